"""Bytes per device of the mixture-of-experts layer: rows on their way, rows at their experts. No JAX."""
from jaxpara.experts import block_rows, buffer_rows, layout


class Routed:
    """Of one layer and micro-batch. rows: [r, H] at the experts; sent: [r, H] of the sending device; inner: [r, F/N_tp]; shared: [b, s,
    shared·F/N_tp]; scores: [b, s, E], wide."""

    def __init__(self, run, size, platform):
        model, sizes = run.model, layout(run)
        self.model, self.platform, self.fixed = model, platform, bool(sizes.capacity)
        ways = 1 if run.parallel.moe_tp == "tokens" else run.mesh.tp
        count = sizes.received
        if not sizes.capacity and sizes.here > 1:
            count = buffer_rows(count, sizes.here, block_rows(count, sizes.here, platform))
        self.rows = count * model.width * size.width
        self.sent = (sizes.sent if sizes.transport in ("all_to_all", "ragged") else 0) * model.width * size.width
        self.tokens = (sizes.ways * sizes.tokens * model.width if sizes.transport == "gather" else 0) * size.width
        self.inner = count * model.moe.ffn // ways * size.width
        self.shared_width = model.moe.shared * model.moe.ffn // ways
        self.shared = sizes.tokens * self.shared_width * size.width
        self.scores = sizes.tokens * model.moe.experts * size.wide

    def residuals(self):
        """{tensor: bytes} that autograd keeps of the layer."""
        inner = 3 if self.model.style == "llama" else 2
        return {"expert rows": self.rows, "expert inner": inner * self.inner, "rows that came back": self.sent or self.rows,
                "shared inner": inner * self.shared, "router": 4 * self.scores}

    def working(self, several, recomputed):
        """Bytes alive in the layer's backward pass: its inner tensors, and rows before and after each move with their cotangents. A loop of grouped
        matmuls carries one of each more than a batched matmul or the TPU's kernel."""
        if self.platform == "tpu":
            return 3 * (self.inner + max(self.rows, self.sent)) + 2 * self.tokens + several * self.shared
        again = max(several - 4, 0)
        inner = self.inner * ((5 if recomputed else 3) if self.fixed else 4 + again * 3 // 4)
        return inner + (3 if self.fixed else 5) * max(self.rows, self.sent) + 2 * self.tokens + several * self.shared
