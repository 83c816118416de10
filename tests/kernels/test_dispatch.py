"""From routing decisions to sorted buffers and back: plans against brute force, moves and their gradients against dense ones, no scatters."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from jaxpara.experts import buffer_rows
from jaxpara.kernels import dispatch
from jaxpara.kernels.dispatch import NOWHERE, by_expert, combine, in_cells, move, packed, reference, regrouped, spread

SHAPES = {       # tokens, K, E
    "plain": (12, 2, 4), "one choice": (9, 1, 6), "one expert": (7, 2, 1), "one token": (1, 3, 8),
    "mostly empty": (5, 2, 32), "many choices": (8, 11, 12),
}
BLOCK, WIDTH = 4, 5


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


def routing(name, dropped=0.2, seed=0):
    """int32 [n, K], -1 where dropped, and E. A token's experts are different ones where there are enough."""
    tokens, k, experts = SHAPES[name]
    rng = np.random.default_rng(seed)
    expert = np.stack([rng.permutation(max(experts, k))[:k] % experts for _ in range(tokens)])
    return np.where(rng.random(expert.shape) < dropped, NOWHERE, expert).astype(np.int32), experts


def routings(name):
    """Random ones, none of whose choices is dropped, some, all; and all that is left at the first or the last expert."""
    for dropped in (0, 0.4, 1):
        yield routing(name, dropped)
    expert, experts = routing(name)
    for one in {0, experts - 1}:
        yield np.where(expert >= 0, one, NOWHERE).astype(np.int32), experts


def inverse(plan):
    """Both maps say the same."""
    row, choice = plan.row, plan.choice
    assert row.dtype == choice.dtype == plan.sizes.dtype == np.int32
    for flat, place in enumerate(row.reshape(-1)):
        assert place == NOWHERE or choice[place] == flat
    for place, flat in enumerate(choice):
        assert flat == NOWHERE or row.reshape(-1)[flat] == place
    assert (row >= 0).sum() == (choice >= 0).sum() == plan.sizes.sum()


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


JITTED = {function: jax.jit(function, static_argnums=static) for function, static in ((by_expert, 1), (in_cells, (1, 2, 3)), (packed, (1, 2, 3)),
                                                                                      (regrouped, (2, 3, 4)), (dispatch.starts, 1))}


def run(function, *arguments):
    return jax.device_get(JITTED[function](*arguments))


@pytest.mark.parametrize("name", SHAPES)
def test_sorting_by_expert(name):
    for expert, experts in routings(name):
        flat = expert.reshape(-1)
        found = run(by_expert, flat, experts)
        order = np.argsort(np.where(flat < 0, experts, flat), kind="stable")
        np.testing.assert_array_equal(found.order, order)
        np.testing.assert_array_equal(np.asarray(found.place)[order], np.arange(flat.size))
        np.testing.assert_array_equal(found.begin, np.concatenate([[0], np.cumsum(counts(expert, experts))]))


@pytest.mark.parametrize("name", SHAPES)
def test_cells(name):
    """One expert per cell, several, all in one."""
    for expert, experts in routings(name):
        for cells in {1, experts, next((n for n in (2, 3, 4) if experts % n == 0), 1)}:
            each, size, sizes = experts // cells, expert.size, counts(expert, experts)
            before = np.concatenate([np.cumsum(part) - part for part in sizes.reshape(cells, each)])
            starts = np.repeat(np.arange(cells) * size, each) + before
            same(run(in_cells, expert, experts, cells, size), *brute(expert, experts, starts, cells * size))


def test_full_cells():
    """Cells as small as the fullest needs; with one row less, its last row would be the next cell's first."""
    expert, experts = routing("plain", 0.0)
    sizes = counts(expert, experts)
    size = int(sizes.max())
    same(run(in_cells, expert, experts, experts, size), *brute(expert, experts, np.arange(experts) * size, experts * size))
    with pytest.raises(AssertionError):
        inverse(run(in_cells, expert, experts, experts, size - 1))


@pytest.mark.parametrize("block", [1, BLOCK])
@pytest.mark.parametrize("name", SHAPES)
def test_packed(name, block):
    for expert, experts in routings(name):
        rows, sizes = buffer_rows(expert.size, experts, block), counts(expert, experts)
        aligned = -(-sizes // block) * block
        plan = run(packed, expert, experts, rows, block)
        same(plan, *brute(expert, experts, np.cumsum(aligned) - aligned, rows))
        np.testing.assert_array_equal(run(dispatch.starts, plan.sizes, block), np.concatenate([[0], np.cumsum(aligned)]))


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
    plan = run(regrouped, came.astype(np.int32), begins.astype(np.int32), devices * size, rows, block)
    same(plan, *brute(expert[:, None], experts, np.cumsum(aligned) - aligned, rows))


# --- moves ---

def problem(name, dropped=0.3):
    """A plan, its routing, its rows' owners; draw(shape)."""
    expert, experts = routing(name, dropped)
    plan = run(packed, expert, experts, buffer_rows(expert.size, experts, BLOCK), BLOCK)
    return plan, expert, np.random.default_rng(1).standard_normal


def pulled(function, arguments, down):
    """(value, gradients) for the cotangent `down`."""
    def both(arguments, down):
        out, back = jax.vjp(function, *arguments)
        return out, back(down)

    return jax.device_get(jax.jit(both)(arguments, down))


def alike(found, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12), found, wanted)


def dense(plan, gates):
    """[n, rows]: by how much each row counts for each token."""
    matrix = np.zeros((len(plan.row), len(plan.choice)))
    for token, k in np.argwhere(plan.row >= 0):
        matrix[token, plan.row[token, k]] += gates[token, k]
    return matrix


MOVES = [(name, dropped) for name in SHAPES for dropped in (0.3, 1.0) if dropped < 1 or name == "plain"]


@pytest.mark.parametrize("name, dropped", MOVES)
def test_spread(name, dropped):
    plan, expert, draw = problem(name, dropped)
    x, down = draw((len(expert), WIDTH)), draw((len(plan.choice), WIDTH))
    matrix = dense(plan, np.ones(expert.shape))
    alike(pulled(lambda x: spread(x, plan), (x,), down), (matrix.T @ x, (matrix @ down,)))


@pytest.mark.parametrize("name, dropped", MOVES)
def test_combine(name, dropped):
    """"many choices" takes the loop for K > 8."""
    plan, expert, draw = problem(name, dropped)
    rows, gates, down = draw((len(plan.choice), WIDTH)), draw(expert.shape), draw((len(expert), WIDTH))
    matrix = dense(plan, gates)
    dgates = np.where(plan.row >= 0, np.einsum("nh,nkh->nk", down, rows[plan.row]), 0)
    alike(pulled(lambda rows, gates: combine(rows, gates, plan), (rows, gates), down), (matrix @ rows, (matrix.T @ down, dgates)))


@pytest.mark.parametrize("dropped", [0.3, 1.0])
def test_move(dropped):
    plan, expert, draw = problem("plain", dropped)
    flat = plan.row.reshape(-1)
    choices, rows = draw((flat.size, WIDTH)), draw((len(plan.choice), WIDTH))
    for x, to, back, down in ((choices, plan.choice, flat, rows), (rows, flat, plan.choice, choices)):
        matrix = (to[:, None] == np.arange(len(x))) * 1.0
        alike(pulled(lambda x: move(x, to, back), (x,), down), (matrix @ x, (matrix.T @ down,)))


@pytest.mark.parametrize("name", ["plain", "many choices"])
def test_there_and_back_is_the_reference(name):
    """Every token through its experts, which here multiply by a number of their own."""
    plan, expert, draw = problem(name)
    x, gates = draw((len(expert), WIDTH)), draw(expert.shape)
    owner = np.where(plan.choice >= 0, expert.reshape(-1)[plan.choice], 0)
    out = jax.jit(lambda x, gates: combine(spread(x, plan) * (2 + owner)[:, None], gates, plan))(x, gates)
    alike(out, reference(x, gates, expert, lambda expert, token: (2 + expert) * token))


def test_narrow_rows_are_summed_wide():
    """256 + 1 + … + 1 in bfloat16 stays 256; summed in float32 it is 264, forward and backward."""
    k = 9
    plan = run(packed, np.arange(k, dtype=np.int32)[None], k, k, 1)
    rows = jnp.asarray([[256.0]] + [[1.0]] * 8, jnp.bfloat16)
    out = jax.jit(combine)(rows, jnp.ones((1, k), jnp.float32), plan)
    assert out.dtype == jnp.bfloat16 and float(out[0, 0]) == 264
    _, (dx,) = pulled(lambda x: spread(x, plan), (jnp.zeros((1, 1), jnp.bfloat16),), rows)
    assert float(dx[0, 0]) == 264 and float(sum(rows[:, 0])) != 264


# --- nothing is scattered ---

def naive_spread(x, plan):
    owner = np.where(plan.choice >= 0, plan.choice // plan.row.shape[1], 0)
    return jnp.where((plan.choice >= 0)[:, None], x[owner], 0)


def naive_combine(rows, gates, plan):
    found = jnp.where((plan.row >= 0)[..., None], rows[np.maximum(plan.row, 0)], 0)
    return (gates[..., None] * found).sum(1)


def primitives(jaxpr):
    """Names of all primitives, of inner programs too."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for inner in jaxprs_in_params(equation.params):
            yield from primitives(inner)


def scatters(function, *arguments):
    """Scatters in the gradient of `function`'s sum of squares, by its jaxpr and by its HLO."""
    gradient = jax.grad(lambda *arguments: (function(*arguments) ** 2).sum(), argnums=tuple(range(len(arguments))))
    names = [name for name in primitives(jax.make_jaxpr(gradient)(*arguments).jaxpr) if "scatter" in name]
    return names, jax.jit(gradient).lower(*arguments).as_text(dialect="hlo").count(" scatter(")


@pytest.mark.parametrize("name", ["plain", "many choices"])
def test_no_scatter(name):
    plan, expert, draw = problem(name)
    x, gates, rows = draw((len(expert), WIDTH)), draw(expert.shape), draw((len(plan.choice), WIDTH))
    assert scatters(lambda x: spread(x, plan), x) == ([], 0)
    assert scatters(lambda rows, gates: combine(rows, gates, plan), rows, gates) == ([], 0)
    assert scatters(lambda rows: move(rows, plan.row.reshape(-1), plan.choice), rows) == ([], 0)


def test_plans_scatter_nothing():
    """The way of `jaxpara.transport` with a second sort, plans and all."""
    expert, experts = routing("plain")

    def forward(x, gates):
        plan = in_cells(jnp.asarray(expert), experts, 2, expert.size)
        begins = jnp.arange(2, dtype=jnp.int32) * expert.size
        again = regrouped(plan.sizes.reshape(2, 2), begins, 2 * expert.size, buffer_rows(2 * expert.size, 2, 8), 8)
        to, back = again.choice, again.row[:, 0]
        return combine(move(move(spread(x, plan), to, back), back, to), gates, plan)

    rng = np.random.default_rng(0)
    assert scatters(forward, rng.standard_normal((len(expert), WIDTH)), rng.standard_normal(expert.shape)) == ([], 0)


def test_a_plain_gather_is_seen():
    """Planted fault: the naive moves give the same numbers, and their gradients scatter."""
    plan, expert, draw = problem("plain")
    x, gates, rows = draw((len(expert), WIDTH)), draw(expert.shape), draw((len(plan.choice), WIDTH))
    alike((naive_spread(x, plan), naive_combine(rows, gates, plan)), (spread(x, plan), combine(rows, gates, plan)))
    for function, arguments in ((naive_spread, (x,)), (naive_combine, (rows, gates))):
        names, count = scatters(lambda *arguments: function(*arguments, plan), *arguments)
        assert names and count >= 1


def test_an_inverse_that_is_not_one_is_seen():
    """Planted fault: a map that sends two choices to one row."""
    plan, *_ = problem("plain", 0.0)
    row = plan.row.copy()
    row[0, 0] = row[1, 0]
    with pytest.raises(AssertionError):
        inverse(plan._replace(row=row))
