"""From routing decisions to sorted buffers and back: plans against brute force, moves and their gradients against dense ones, no scatters."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpara.experts import buffer_rows
from jaxpara.kernels import dispatch
from jaxpara.kernels.dispatch import NOWHERE, by_expert, combine, in_cells, move, packed, reference, regrouped, spread

ROUTINGS = {     # tokens, K, E, part dropped
    "plain": (12, 2, 4, 0.0), "dropped": (13, 3, 6, 0.4), "one choice": (9, 1, 5, 0.2), "one expert": (7, 2, 1, 0.3), "one token": (1, 3, 8, 0.0),
    "more experts than choices": (5, 2, 32, 0.1), "none": (6, 2, 4, 1.0), "many choices": (8, 11, 12, 0.2),
}


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


def routing(name, seed=0):
    """int32 [n, K], -1 where dropped, and E. A token's experts are different ones where there are enough."""
    tokens, k, experts, dropped = ROUTINGS[name]
    rng = np.random.default_rng(seed)
    expert = np.stack([rng.permutation(max(experts, k))[:k] % experts for _ in range(tokens)])
    return np.where(rng.random(expert.shape) < dropped, NOWHERE, expert).astype(np.int32), experts


def skewed(name):
    """The routings of ROUTINGS, and the same with all choices at the first or the last expert."""
    expert, experts = routing(name)
    yield expert, experts
    for one in {0, experts - 1}:
        yield np.where(expert >= 0, one, NOWHERE).astype(np.int32), experts


def inverse(plan):
    """Both maps say the same."""
    row, choice = np.asarray(plan.row), np.asarray(plan.choice)
    assert row.dtype == choice.dtype == np.asarray(plan.sizes).dtype == np.int32
    for flat, place in enumerate(row.reshape(-1)):
        assert place == NOWHERE or choice[place] == flat
    for place, flat in enumerate(choice):
        assert flat == NOWHERE or row.reshape(-1)[flat] == place
    assert (row >= 0).sum() == (choice >= 0).sum() == np.asarray(plan.sizes).sum()


def same(plan, row, choice, sizes):
    for found, wanted in zip(plan, (row, choice, sizes)):
        np.testing.assert_array_equal(found, wanted)
    inverse(plan)


def brute(expert, experts, starts, rows):
    """(row, choice, sizes): choices in their order, each to the next free row of its expert, from `starts`[expert] on."""
    flat, free = expert.reshape(-1), list(starts)
    row, choice, sizes = np.full(flat.shape, NOWHERE), np.full(rows, NOWHERE), np.zeros(experts, int)
    for place, e in enumerate(flat):
        if e != NOWHERE:
            row[place], choice[free[e]] = free[e], place
            free[e], sizes[e] = free[e] + 1, sizes[e] + 1
    return row.reshape(expert.shape), choice, sizes


def counts(expert, experts):
    return np.bincount(expert[expert >= 0], minlength=experts)


@pytest.mark.parametrize("name", ROUTINGS)
def test_sorting_by_expert(name):
    for expert, experts in skewed(name):
        flat = expert.reshape(-1)
        found = by_expert(jnp.asarray(flat), experts)
        order = np.argsort(np.where(flat < 0, experts, flat), kind="stable")
        np.testing.assert_array_equal(found.order, order)
        np.testing.assert_array_equal(np.asarray(found.place)[order], np.arange(flat.size))
        np.testing.assert_array_equal(found.begin, np.concatenate([[0], np.cumsum(counts(expert, experts))]))


@pytest.mark.parametrize("name", ROUTINGS)
def test_cells(name):
    """One expert per cell, several, all in one; cells just large enough, and larger."""
    for expert, experts in skewed(name):
        for cells in (n for n in range(1, experts + 1) if experts % n == 0):
            each = experts // cells
            sizes = counts(expert, experts)
            least = max(sizes.reshape(cells, each).sum(1).max(), 1)
            for size in (least, least + 3):
                before = np.concatenate([np.cumsum(part) - part for part in sizes.reshape(cells, each)])
                starts = np.repeat(np.arange(cells) * size, each) + before
                same(in_cells(jnp.asarray(expert), experts, cells, size), *brute(expert, experts, starts, cells * size))


@pytest.mark.parametrize("block", [1, 4, 8])
@pytest.mark.parametrize("name", ROUTINGS)
def test_packed(name, block):
    for expert, experts in skewed(name):
        rows, sizes = buffer_rows(expert.size, experts, block), counts(expert, experts)
        aligned = -(-sizes // block) * block
        plan = packed(jnp.asarray(expert), experts, rows, block)
        same(plan, *brute(expert, experts, np.cumsum(aligned) - aligned, rows))
        np.testing.assert_array_equal(dispatch.starts(plan.sizes, block), np.concatenate([[0], np.cumsum(aligned)]))


@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("name", ["cells", "pieces", "one device", "one expert", "nothing came"])
def test_regrouped(name, block):
    """What several devices sent, each sorted by expert, with gaps between them (cells) or none (pieces), in the experts' order."""
    rng = np.random.default_rng(5)
    devices, experts = {"one device": (1, 3), "one expert": (3, 1)}.get(name, (4, 3))
    came = rng.integers(0, 6, (devices, experts)) * (name != "nothing came")
    came[rng.random(came.shape) < 0.2] = 0
    each, size = came.sum(1), 18
    begins = np.cumsum(each) - each if name == "pieces" else np.arange(devices) * size
    expert = np.full(devices * size, NOWHERE)
    for device in range(devices):
        expert[begins[device]:begins[device] + each[device]] = np.repeat(np.arange(experts), came[device])
    rows = buffer_rows(int(came.sum()) + 2, experts, block)
    aligned = -(-came.sum(0) // block) * block
    plan = regrouped(*(jnp.asarray(x, jnp.int32) for x in (came, begins)), devices * size, rows, block)
    same(plan, *brute(expert[:, None], experts, np.cumsum(aligned) - aligned, rows))


# --- moves ---

def problem(name, block=4, width=5):
    """A plan with x, gates and what a cotangent of each result may be; drops, empty experts and empty rows in it."""
    expert, experts = routing(name)
    rng = np.random.default_rng(1)
    rows = buffer_rows(expert.size, experts, block)
    plan = packed(jnp.asarray(expert), experts, rows, block)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape))
    return expert, plan, draw(len(expert), width), draw(*expert.shape), draw(rows, width), draw(len(expert), width), draw(rows, width)


def naive_spread(x, plan):
    owner = jnp.where(plan.choice >= 0, plan.choice // plan.row.shape[1], 0)
    return jnp.where((plan.choice >= 0)[:, None], x[owner], 0)


def naive_combine(rows, gates, plan):
    found = jnp.where((plan.row >= 0)[..., None], rows[jnp.maximum(plan.row, 0)], 0)
    return (gates[..., None] * found).sum(1)


def naive_move(x, to, back):
    return jnp.where((to >= 0)[:, None], x[jnp.maximum(to, 0)], 0)


def alike(found, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12), found, wanted)


@pytest.mark.parametrize("name", ROUTINGS)
def test_spread(name):
    _, plan, x, _, _, _, down = problem(name)
    found, wanted = (jax.vjp(lambda x: function(x, plan), x) for function in (spread, naive_spread))
    alike(found[0], wanted[0])
    alike(found[1](down), wanted[1](down))


@pytest.mark.parametrize("name", ROUTINGS)
def test_combine(name):
    _, plan, _, gates, rows, down, _ = problem(name)
    found, wanted = (jax.vjp(lambda rows, gates: function(rows, gates, plan), rows, gates) for function in (combine, naive_combine))
    alike(found[0], wanted[0])
    alike(found[1](down), wanted[1](down))


@pytest.mark.parametrize("name", ["plain", "dropped", "none"])
def test_move(name):
    _, plan, _, _, rows, _, _ = problem(name)
    choices = jnp.asarray(np.random.default_rng(2).standard_normal((plan.row.size, 5)))
    flat = plan.row.reshape(-1)
    for x, to, back, down in ((choices, plan.choice, flat, rows), (rows, flat, plan.choice, choices)):
        found, wanted = (jax.vjp(lambda x: function(x, to, back), x) for function in (move, naive_move))
        alike(found[0], wanted[0])
        alike(found[1](down), wanted[1](down))


@pytest.mark.parametrize("name", ROUTINGS)
def test_there_and_back_is_the_reference(name):
    """Every token through its experts, which here multiply by a number of their own."""
    expert, plan, x, gates, _, _, _ = problem(name)
    owner = jnp.where(plan.choice >= 0, jnp.asarray(expert.reshape(-1))[plan.choice], 0)
    out = combine(spread(x, plan) * (2 + owner)[:, None], gates, plan)
    alike(out, reference(np.asarray(x), np.asarray(gates), expert, lambda expert, token: (2 + expert) * token))


def test_narrow_rows_are_summed_wide():
    """256 + 1 + … + 1 in bfloat16 stays 256; summed in float32 it is 264, forward and backward."""
    k = 9
    plan = packed(jnp.arange(k, dtype=jnp.int32)[None], k, k, 1)
    rows = jnp.asarray([[256.0]] + [[1.0]] * 8, jnp.bfloat16)
    out = combine(rows, jnp.ones((1, k), jnp.float32), plan)
    assert out.dtype == jnp.bfloat16 and float(out[0, 0]) == 264
    _, back = jax.vjp(lambda x: spread(x, plan), jnp.zeros((1, 1), jnp.bfloat16))
    assert float(back(rows)[0][0, 0]) == 264 and sum(rows[:, 0]) != 264


# --- nothing is scattered ---

def primitives(jaxpr):
    """Names of all primitives, of inner programs too."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for inner in jax.core.jaxprs_in_params(equation.params):
            yield from primitives(inner)


def scatters(function, *arguments):
    """Scatters in the gradient of `function`'s sum of squares, by its jaxpr and by its HLO."""
    gradient = jax.grad(lambda *arguments: (function(*arguments) ** 2).sum(), argnums=tuple(range(len(arguments))))
    names = [name for name in primitives(jax.make_jaxpr(gradient)(*arguments).jaxpr) if "scatter" in name]
    text = jax.jit(gradient).lower(*arguments).as_text(dialect="hlo")
    return names, text.count(" scatter(")


@pytest.mark.parametrize("name", ["dropped", "many choices"])
def test_no_scatter(name):
    _, plan, x, gates, rows, _, _ = problem(name)
    flat = plan.row.reshape(-1)
    assert scatters(lambda x: spread(x, plan), x) == ([], 0)
    assert scatters(lambda rows, gates: combine(rows, gates, plan), rows, gates) == ([], 0)
    assert scatters(lambda rows: move(rows, flat, plan.choice), rows) == ([], 0)


def test_plans_scatter_nothing():
    def forward(x, gates):
        plan = in_cells(jnp.asarray(routing("dropped")[0]), 6, 3, 39)
        again = regrouped(plan.sizes.reshape(3, 2), jnp.arange(3, dtype=jnp.int32) * 39, 117, 120, 8)
        to, back = again.choice, again.row[:, 0]
        return combine(move(move(spread(x, plan), to, back), back, to), gates, plan)

    _, _, x, gates, _, _, _ = problem("dropped")
    assert scatters(forward, x, gates) == ([], 0)


def test_a_plain_gather_is_seen():
    """Planted fault: the naive moves give the same numbers, and their gradients scatter."""
    _, plan, x, gates, rows, _, _ = problem("dropped")
    for function, arguments in ((naive_spread, (x,)), (naive_combine, (rows, gates))):
        names, count = scatters(lambda *arguments: function(*arguments, plan), *arguments)
        assert names and count >= 1


def test_an_inverse_that_is_not_one_is_seen():
    """Planted fault: a map that sends two choices to one row."""
    _, plan, *_ = problem("plain")
    with pytest.raises(AssertionError):
        inverse(plan._replace(row=plan.row.at[0, 0].set(plan.row[1, 0])))
