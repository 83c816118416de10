"""How tokens reach their experts over `ep` and come back: one plan from the routing decisions, three transports that give the same numbers.

    all_to_all    fixed cells: with a capacity one per (device, expert), else one per pair of devices, for the worst case. Runs everywhere.
    gather        every device gets all tokens of the group and returns the sum of what its experts make of them. Traffic does not depend on K.
    ragged        exactly the rows that go, in pieces of any size. TPU and GPU.

`experts` is a function (rows, groups) -> rows: rows [E here, r, H] expert by expert and groups None; or [r, H] sorted by expert with `Groups`, where
a device has one expert with None.
"""
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxpara.collectives import exchange, exchange_ragged, gather, scatter
from jaxpara.kernels.dispatch import NOWHERE, combine, in_cells, move, packed, regrouped, spread
from jaxpara.experts import block_rows, buffer_rows
from jaxpara.kernels.grouped import Groups

OUT, BACK, COUNTS, IDS, GATES = (f"moe.{part}" for part in ("dispatch", "return", "counts", "ids", "gates"))
"""Scopes of the collectives in the compiled program."""


def through_experts(x, expert, gates, experts, layout, platform):
    """x: [n, H] of this device's tokens; expert: int32 [n, K], -1 where a choice is dropped; gates: [n, K] in float32 or wider; layout: their
    `jaxpara.experts.Layout`. Returns [n, H], each token's experts weighed and summed."""
    way = {"none": here, "gather": by_gather, "ragged": by_pieces, "all_to_all": by_cells}[layout.transport]
    return way(x, expert, gates, experts, layout, platform)


def here(x, expert, gates, experts, layout, platform):
    """All experts on this device, whose ids run from 0 to E here."""
    if layout.capacity:
        rows = layout.cell * layout.ways
        plan = in_cells(expert, layout.here, layout.here, rows)
        out = experts(spread(x, plan).reshape(layout.here, rows, -1), None)
        return combine(out.reshape(-1, x.shape[1]), gates, plan)
    block = block_rows(layout.received, layout.here, platform)
    plan = packed(expert, layout.here, buffer_rows(layout.received, layout.here, block), block)
    return combine(experts(spread(x, plan), Groups(plan.sizes, block) if layout.here > 1 else None), gates, plan)


def by_gather(x, expert, gates, experts, layout, platform):
    """All-gather of tokens, ids and weights; reduce-scatter of the sums."""
    x, expert = gather(x, ("ep",), 0, OUT), gather(expert, ("ep",), 0, IDS)
    gates = checkpoint_name(gather(gates, ("ep",), 0, GATES), "gates")      # small enough to keep, which gathered arrays are not
    own = expert - lax.axis_index("ep") * layout.here
    out = here(x, jnp.where((own >= 0) & (own < layout.here), own, NOWHERE), gates, experts, layout, platform)
    return scatter(out, ("ep",), 0, BACK)


def by_cells(x, expert, gates, experts, layout, platform):
    """All-to-all of cells of equal size."""
    across = lambda x, scope: exchange(x, "ep", 0, 0, scope)
    if layout.capacity:
        plan = in_cells(expert, layout.experts, layout.experts, layout.cell)
        by_device = layout.ways, layout.here, layout.cell, x.shape[1]
        arrived = across(spread(x, plan), OUT).reshape(by_device).swapaxes(0, 1)
        out = experts(arrived.reshape(layout.here, -1, x.shape[1]), None)
        out = out.reshape(layout.here, layout.ways, layout.cell, -1).swapaxes(0, 1)
        return combine(across(out.reshape(-1, x.shape[1]), BACK), gates, plan)
    plan = in_cells(expert, layout.experts, layout.ways, layout.cell)
    arrived = across(spread(x, plan), OUT)
    if layout.regrouped:
        counts = across(plan.sizes.reshape(layout.ways, layout.here), COUNTS)
        begins = jnp.arange(layout.ways, dtype=jnp.int32) * layout.cell
        out = sorted_again(arrived, counts, begins, experts, layout, platform)
    else:
        out = experts(arrived, None)
    return combine(across(out, BACK), gates, plan)


def by_pieces(x, expert, gates, experts, layout, platform):
    """Ragged all-to-all: first the counts of all, then the rows."""
    plan = packed(expert, layout.experts, layout.sent, 1)
    rank = lax.axis_index("ep")
    counts = gather(plan.sizes[None], ("ep",), 0, COUNTS).reshape(layout.ways, layout.ways, layout.here)
    between = counts.sum(-1)
    arrived = exchange_ragged(spread(x, plan), between, "ep", layout.received, False, OUT)
    if layout.regrouped:
        mine = lax.dynamic_index_in_dim(counts, rank, 1, keepdims=False)
        begins = jnp.cumsum(mine.sum(-1)) - mine.sum(-1)
        out = sorted_again(arrived, mine, begins, experts, layout, platform)
    else:
        out = experts(arrived, None)
    return combine(exchange_ragged(out, between, "ep", layout.sent, True, BACK), gates, plan)


def sorted_again(arrived, counts, begins, experts, layout, platform):
    """The experts' work on rows that came from several devices, which are put in the experts' order and back."""
    block = block_rows(layout.received, layout.here, platform)
    plan = regrouped(counts, begins, arrived.shape[0], buffer_rows(layout.received, layout.here, block), block)
    to, back = plan.choice, plan.row[:, 0]
    return move(experts(move(arrived, to, back), Groups(plan.sizes, block)), back, to)
