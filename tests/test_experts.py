"""Sizes of the expert layer: capacity, cells, token groups and who holds them, by hand and by brute force."""
import math
from fractions import Fraction

import numpy as np
import pytest

from jaxpara import Run
from jaxpara.experts import Layout, capacity, choices, layout, shares, spanning, split_axes
from jaxpara.order import slots
from jaxpara.settings import configure

SEQ, BATCH = 32, 24


def run_of(**overrides):
    """cap, grp, E, K: of model.moe; anything else with two underscores for a dot."""
    short = {"cap": "model.moe.capacity", "grp": "model.moe.group", "E": "model.moe.experts", "K": "model.moe.top_k"}
    named = {short.get(name, name.replace("__", ".")): value for name, value in overrides.items()}
    return configure(Run(), {"model.moe.experts": 8, "model.moe.top_k": 2, "model.heads": 8, "model.width": 64,
                             "train.seq": SEQ, "train.batch": BATCH, **named})


TRAPS = [(0.8, 3, 10, 4), (0.8, 3, 20, 6), (0.8, 3, 40, 16), (0.8, 6, 40, 64)]
"""c, K, G, E whose product is a whole number, and as floats a little more."""


@pytest.mark.parametrize("c, k, group, experts, wanted", [
    (1.0, 2, 32, 8, 8), (1.25, 2, 32, 8, 10), (1.0, 1, 10, 4, 3), (2.0, 2, 32, 8, 16), (0.5, 1, 16, 16, 1), (100.0, 2, 32, 8, 32),
    *[(*trap, math.ceil(Fraction(str(trap[0])) * math.prod(trap[1:3]) / trap[3])) for trap in TRAPS], (0.1, 3, 20, 6, 1)])
def test_capacity(c, k, group, experts, wanted):
    run = run_of(cap=c, K=k, grp=group, E=experts, train__seq=group * 2)
    assert capacity(run.model.moe) == wanted == layout(run).capacity


def test_the_traps_are_traps():
    """Planted fault: a plain ceil takes one token too many."""
    for c, k, group, experts in TRAPS:
        assert math.ceil(c * k * group / experts) == Fraction(str(c)) * k * group / experts + 1


def test_capacity_in_evaluation():
    """Off unless asked for; experts that choose have no other routing."""
    moe = lambda **settings: run_of(cap=1.0, **{f"model__moe__{name}": value for name, value in settings.items()}).model.moe
    assert capacity(moe(), evaluation=True) is None and capacity(moe(eval_capacity=True), evaluation=True) == 8
    assert capacity(moe(routing="expert_choice"), evaluation=True) == 8
    assert capacity(run_of().model.moe) is capacity(run_of().model.moe, evaluation=True) is None
    assert choices(moe()) == 2 and choices(moe(routing="expert_choice")) == 8
    evaluated = layout(run_of(cap=1.0, mesh__ep=4), evaluation=True)
    assert evaluated == layout(run_of(mesh__ep=4)) and evaluated.cell == evaluated.tokens * 2


def test_by_hand():
    """ep4·dp2, 24 rows of 32 tokens in 3 micro-batches: one row on a device, two experts, top-2 of 8."""
    mesh = dict(mesh__ep=4, mesh__dp=2, train__microbatches=3)
    dropless = layout(run_of(**mesh))
    assert dropless == Layout(experts=8, here=2, choices=2, tokens=32, capacity=None, cell=64, transport="all_to_all")
    assert (dropless.ways, dropless.sent, dropless.received, dropless.regrouped) == (4, 4 * 64, 4 * 64, True)
    capped = layout(run_of(cap=1.0, grp=8, **mesh))              # 1·2·8/8 = 2 of each of 4 groups
    assert capped == Layout(8, 2, 2, 32, 2, 8, "all_to_all")
    assert (capped.sent, capped.received, capped.regrouped) == (8 * 8, 2 * 4 * 8, False)
    gathered = layout(run_of(parallel__moe_transport="gather", **mesh))
    assert (gathered.transport, gathered.received, gathered.regrouped) == ("gather", 4 * 64, False)
    ragged = layout(run_of(parallel__moe_transport="ragged", **mesh))
    assert (ragged.sent, ragged.received, ragged.regrouped) == (64, 4 * 64, True)
    here = layout(run_of(cap=1.0, grp=8, mesh__dp=2))           # 12 rows of 4 groups of 2
    assert here == Layout(8, 8, 2, 12 * 32, 2, 12 * 4 * 2, "none") and here.received == 8 * 96 and not here.regrouped
    alone = layout(run_of(mesh__ep=8, K=3))                     # one expert per device: a token goes there once at most
    assert (alone.here, alone.cell, alone.received, alone.regrouped) == (1, 96, 8 * 96, False)
    few = layout(run_of(mesh__ep=2, E=4, K=3))                  # two experts per device: at most two of a token's three
    assert few.cell == few.tokens * 2 == 12 * 32 * 2


def test_capacity_never_receives_more_than_dropless():
    """A huge capacity is bounded by the tokens there are."""
    huge = layout(run_of(cap=100.0, mesh__ep=4))
    assert huge.capacity == SEQ and huge.received == min(huge.tokens * 4 * 2, 2 * 4 * huge.cell) == layout(run_of(mesh__ep=4)).received


ORDERS = {      # sp = 2, 32 tokens in groups of 8: tokens of each group on each rank
    "contiguous": [[8, 8, 0, 0], [0, 0, 8, 8]], "zigzag": [[8, 0, 0, 8], [0, 8, 8, 0]], "striped": [[4, 4, 4, 4], [4, 4, 4, 4]]}


@pytest.mark.parametrize("order", ORDERS)
def test_shares(order):
    run = run_of(mesh__sp=2, parallel__sp_order=order, cap=1.0, grp=8)
    held = shares(run)
    assert held.tolist() == ORDERS[order] and spanning(run) == (order == "striped")
    assert layout(run).cell == BATCH * (8 if order == "striped" else 4)     # at most 2 of a group: 4 groups here, or 2
    assert spanning(run_of(mesh__sp=2, parallel__sp_order=order))           # by default the whole row is one group
    longer = shares(run, seq=64)
    assert longer.shape == (2, 8) and longer.sum() == 64


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("group", [4, 8, 32])
@pytest.mark.parametrize("tp", [1, 2])
def test_shares_are_those_of_the_order(order, group, tp):
    """By brute force, token by token."""
    run = run_of(mesh__sp=4, mesh__tp=tp, parallel__sp_order=order, cap=1.0, grp=group,
                 **{"parallel__moe_tp": "tokens"} if tp > 1 else {})
    ranks = 4 * tp
    wanted, homes = np.zeros((ranks, SEQ // group), int), [set() for _ in range(SEQ // group)]
    for place, token in enumerate(slots(run, SEQ)):
        rank = place // (SEQ // ranks)
        wanted[rank, token // group] += 1
        homes[token // group].add(rank)
    assert shares(run).tolist() == wanted.tolist() and spanning(run) == any(len(home) > 1 for home in homes)


def test_tp_splits_tokens_only_where_asked():
    assert split_axes(run_of(mesh__tp=2, mesh__sp=2)) == ("sp",) and split_axes(run_of(mesh__tp=2)) == ()
    tokens = run_of(mesh__tp=2, mesh__sp=2, parallel__moe_tp="tokens", cap=1.0, grp=8)
    assert split_axes(tokens) == ("sp", "tp") and layout(tokens).tokens == BATCH * 8 and layout(tokens).cell == BATCH * 2
    width = run_of(mesh__tp=2, mesh__sp=2, cap=1.0, grp=8)
    assert layout(width).tokens == BATCH * 16 and layout(width).cell == BATCH * 4
    assert layout(run_of(mesh__tp=2, parallel__moe_tp="tokens")).tokens == BATCH * 16


# --- the bound is right, and tight: F9 of the cases, whatever the routing and however the tokens are cut ---

BOUNDS = [
    dict(), dict(mesh__ep=2), dict(mesh__ep=4, K=3), dict(mesh__ep=2, E=4, K=3), dict(cap=1.0, grp=8), dict(mesh__ep=2, cap=1.0, grp=8),
    dict(mesh__ep=4, cap=2.0, grp=8, K=3), dict(mesh__ep=2, mesh__sp=2, cap=1.0, grp=8, parallel__sp_order="striped"),
    dict(mesh__ep=2, mesh__sp=2, cap=1.5, grp=16, parallel__sp_order="zigzag"), dict(mesh__ep=2, mesh__sp=4, cap=0.5, parallel__sp_order="zigzag"),
    dict(mesh__ep=8, mesh__tp=2, cap=4.0, grp=8, parallel__moe_tp="tokens")]


def routings(rows, owner, run, rng):
    """Expert ids [rows, S, K]: random ones, skewed ones, and the adversary's: all tokens at the same experts; those of one rank at the experts of
    one device in turn, the rest as far away as they can be. owner: the rank of each token."""
    k, experts, here = run.model.moe.top_k, run.model.moe.experts, run.model.moe.experts // run.mesh.ep
    for skew in (0, 2, 6):
        scores = rng.gumbel(size=(rows, SEQ, experts)) + skew * np.linspace(0, 1, experts)
        yield np.argsort(-scores, -1)[..., :k]
    last = np.broadcast_to(np.arange(experts)[::-1][:k], (rows, SEQ, k))
    yield last
    first = np.broadcast_to(np.arange(k), (rows, SEQ, k))
    for rank in range(owner.max() + 1):
        number = np.cumsum(owner == rank)[:, None]      # of each token among the rank's
        turn = np.concatenate([(number * k + np.arange(min(k, here))) % here, last[0, :, :k - min(k, here)]], axis=1)
        for mine in (first, turn):
            yield np.where((owner == rank)[:, None], mine, last)


def kept(expert, most, group):
    """The first `most` choices of each expert in each group of each row, in the original order."""
    kept = np.ones(expert.shape, bool)
    if most:
        for row in range(len(expert)):
            for start in range(0, expert.shape[1], group):
                seen = {}
                for token in range(start, start + group):
                    for k in range(expert.shape[2]):
                        e = expert[row, token, k]
                        seen[e] = seen.get(e, 0) + 1
                        kept[row, token, k] = seen[e] <= most
    return kept


@pytest.mark.parametrize("case", BOUNDS, ids=str)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_no_routing_needs_more_than_a_cell_and_some_needs_all_of_it(case, microbatches):
    """A cell is of one expert with a capacity, else of one device. The bound is of a micro-batch: with two, half the rows."""
    run = run_of(**case, train__batch=16, train__microbatches=microbatches)
    sizes, rng, moe = layout(run), np.random.default_rng(4), run.model.moe
    rows = 16 // microbatches // run.mesh.batch
    ranks = len(shares(run))
    owner = np.empty(SEQ, int)
    owner[slots(run, SEQ)] = np.repeat(np.arange(ranks), SEQ // ranks)
    per_cell = 1 if sizes.capacity else sizes.here
    fullest = received = 0
    for expert in routings(rows, owner, run, rng):
        stays = kept(expert, sizes.capacity, moe.group)
        for rank in range(ranks):
            here = expert[:, owner == rank][stays[:, owner == rank]]
            count = np.bincount(here // per_cell, minlength=moe.experts // per_cell)
            fullest = max(fullest, count.max())
            received = max(received, sizes.ways * np.bincount(here // sizes.here, minlength=sizes.ways).max())
    assert fullest == sizes.cell        # never more, and with one row less some routing would not fit
    assert received == sizes.received
