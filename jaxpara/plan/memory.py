"""Bytes per device that live through the whole step: parameters, gradients, master copy, optimizer. No JAX."""
from jaxpara.config import BYTES
from jaxpara.zero import placements

OPTIMIZER_TENSORS = {"sgd": 0, "momentum": 1, "adamw": 2}
"""n_opt: optimizer tensors per parameter."""


def model_state(run):
    """Bytes per device by part, and their total: (δ + δ_grad + (n_opt+1)·δ_opt)·Φ of SPEC section 1 (no +1 without a master copy),
    each part divided by what its ZeRO spec shards it over. Gradients are those held between micro-batches."""
    precision, table = run.precision, placements(run).values()
    held = lambda kind: sum(p.elements(getattr(p, kind)) for p in table)
    optimizer = BYTES[precision.optimizer]
    parts = {"parameters": held("storage") * BYTES[precision.params],
             "gradients": held("gradient") * BYTES[precision.gradient(run.train.microbatches)],
             "master": held("optimizer") * optimizer if precision.master else 0,
             "optimizer": held("optimizer") * optimizer * OPTIMIZER_TENSORS[run.optim.name]}
    return {**parts, "total": sum(parts.values())}
