"""Every attention kernel against the slow reference, which is itself held against loops in numpy; and faults that must be seen."""
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given as over, settings, strategies as st
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P
from kernels.harness import TOLERANCE, assert_equal, compiled, inputs, kernel_results, reference, run_of, worst

from jaxpara.context import attention_kernel
from jaxpara.order import order
from jaxpara.kernels import local, ring, ulysses

ROWS, SEQ, HEADS, KV, DIM, WINDOW = 3, 48, 8, 2, 6, 5


def looped(query, key, value, query_at, key_at, cotangent, window):
    """(out, lse, dq, dk, dv) by loops over rows, heads and queries, with softmax's derivative written out. numpy float64."""
    out, lse = np.zeros(query.shape), np.full(query.shape[:3], -np.inf)
    dq, dk, dv = np.zeros(query.shape), np.zeros(key.shape), np.zeros(value.shape)
    scale, groups = query.shape[-1] ** -0.5, query.shape[2] // key.shape[2]
    for b, i, n in np.ndindex(query.shape[:3]):
        m, behind = n // groups, query_at[0][b, i].astype(int) - key_at[0][b].astype(int)
        seen = np.flatnonzero((query_at[1][b, i] == key_at[1][b]) & (behind >= 0) & (behind < (window or 10**9)))
        if not seen.size:
            continue
        scores = key[b, seen, m] @ query[b, i, n] * scale
        lse[b, i, n] = np.log(np.exp(scores).sum())
        weights = np.exp(scores - lse[b, i, n])
        out[b, i, n] = weights @ value[b, seen, m]
        slope = value[b, seen, m] @ cotangent[b, i, n]
        dscores = weights * (slope - weights @ slope) * scale
        dq[b, i, n] = dscores @ key[b, seen, m]
        np.add.at(dk[b, :, m], seen, np.outer(dscores, query[b, i, n]))
        np.add.at(dv[b, :, m], seen, np.outer(weights, cotangent[b, i, n]))
    return out, lse, dq, dk, dv


@pytest.fixture(scope="module")
def given():
    return inputs(ROWS, SEQ, HEADS, KV, DIM)


@pytest.fixture(scope="module")
def wanted(given):
    """{window: (out, dq, dk, dv)} of the reference in float64."""
    return {window: reference(given, window) for window in (None, WINDOW)}


@pytest.mark.parametrize("window", [None, WINDOW])
def test_the_reference_is_right(given, wanted, window):
    at = (given.positions, given.segments)
    out, _, *grads = looped(given.query, given.key, given.value, at, at, given.cotangent, window)
    assert max(worst(wanted[window], (out, *grads))) < 1e-12


# One device: blocks, and rows that see nothing.

def strangers(rows=2, queries=192, keys=128, kv=2, groups=3, dim=5):
    """Queries that are not the keys' own tokens; a tenth of them in documents that no key is in, a whole block's worth at the end too."""
    generator = np.random.default_rng(3)
    query_at = (generator.integers(-3, 40, (rows, queries)).astype(np.int32), generator.choice([-9, 0, 4], (rows, queries)).astype(np.int32))
    key_at = (generator.integers(-3, 40, (rows, keys)).astype(np.int32), generator.choice([-9, 0, 4], (rows, keys)).astype(np.int32))
    query_at[1][:, ::10] = 2**31 - 1
    query_at[1][:, 128:] = 3
    query_at[0][:, 5] = -100                  # sees its document, but nothing so early
    draw = lambda *shape: generator.standard_normal((rows, *shape, dim))
    return draw(queries, kv * groups), draw(keys, kv), draw(keys, kv), query_at, key_at, draw(queries, kv * groups)


def local_results(query, key, value, query_at, key_at, cotangent, window, limit):
    """(out, lse, dq, dk, dv) of the blockwise pair, heads flat."""
    def both(query, key, value, query_at, key_at, cotangent):
        q, c = (local.grouped(x, key.shape[2]) for x in (query, cotangent))
        k, v = map(local.heads_first, (key, value))
        out, lse = local.forward(q, k, v, query_at, key_at, window, limit)
        dq, dk, dv = local.backward(q, k, v, query_at, key_at, lse, c, local.row_sum(out, c), window, limit)
        flat_lse = local.ungrouped(lse[..., None])[..., 0]
        return local.ungrouped(out), flat_lse, local.ungrouped(dq), local.heads_first(dk), local.heads_first(dv)

    arguments = query, key, value, query_at, key_at, cotangent
    with jax.enable_x64(True):
        return [np.asarray(x) for x in compiled(both, *arguments)(*arguments)]


@pytest.mark.parametrize("dtype, window, limit", [("float64", None, 64), ("float64", 7, 64), ("float64", 7, 512), ("float32", 7, 64)])
def test_blocks_and_rows_that_see_no_key(dtype, window, limit):
    query, key, value, query_at, key_at, cotangent = strangers()
    out, lse, *grads = looped(query, key, value, query_at, key_at, cotangent, window)
    blind = np.isinf(lse)
    assert blind[:, 128:].all() and blind[:, :128].any() and blind[:, 5].all() and not blind.all()
    cast = [x.astype(dtype) for x in (query, key, value)]
    got_out, got_lse, *got_grads = local_results(*cast, query_at, key_at, cotangent.astype(dtype), window, limit)
    assert_equal([got_out, *got_grads], [out, *grads], dtype)
    assert (got_out[blind] == 0).all() and (got_lse[blind] == -np.inf).all() and (got_grads[0][blind] == 0).all()
    assert np.abs(got_lse[~blind] - lse[~blind]).max() < TOLERANCE[dtype] * 10


def test_a_block_wrongly_skipped_is_seen(monkeypatch):
    monkeypatch.setattr(local, "may_see", lambda query_at, key_at, window: (query_at[0].max(1) > key_at[0].max(1)).any())
    arguments = strangers()
    out, _, *grads = looped(*arguments, None)
    got_out, _, *got_grads = local_results(*arguments, None, 64)
    assert max(worst([got_out, *got_grads], [out, *grads])) > 1e-3


def test_keys_that_nobody_sees_get_no_gradient():
    query, key, value, query_at, key_at, cotangent = strangers()
    key_at[1][:, 70:] = 77
    *_, dk, dv = local_results(query, key, value, query_at, key_at, cotangent, None, 64)
    assert (dk[:, 70:] == 0).all() and (dv[:, 70:] == 0).all() and (dv[:, :70] != 0).any()


@over(st.integers(1, 700), st.integers(1, 300))
@settings(max_examples=200, deadline=None)
def test_blocks_cover_the_length_and_are_never_too_long(length, limit):
    n, size = local.blocks(length, limit)
    assert size <= max(limit, local.SMALLEST)
    assert (n - 1) * size < length <= n * size


def test_a_length_that_does_not_split_is_filled_up():
    """131 is prime: three blocks of 44, one slot too many. The filling is seen by nobody and adds nothing."""
    query, key, value, query_at, key_at, cotangent = (jax.tree.map(lambda x: x[:, :131], part) for part in strangers())
    out, lse, *grads = looped(query, key, value, query_at, key_at, cotangent, 7)
    got_out, got_lse, *got_grads = local_results(query, key, value, query_at, key_at, cotangent, 7, 64)
    assert_equal([got_out, *got_grads], [out, *grads], "float64")
    assert np.array_equal(np.isinf(got_lse), np.isinf(lse))


small = st.lists(st.integers(-3, 5), min_size=3, max_size=3)


@over(st.tuples(small, small), st.tuples(small, small), st.sampled_from([None, 1, 2, 4]))
@settings(max_examples=200, deadline=None)
def test_may_see_is_never_wrongly_no(query_at, key_at, window):
    query_at, key_at = (tuple(np.array([x, x[::-1]], np.int32) for x in at) for at in (query_at, key_at))
    sees = bool(np.asarray(local.visible(query_at, key_at, window)).any())
    assert bool(local.may_see(query_at, key_at, window)) >= sees


@pytest.mark.parametrize("query, key, window, answer", [
    (((10, 12), (0, 0)), ((4, 9), (0, 0)), None, True), (((4, 9), (0, 0)), ((10, 12), (0, 0)), None, False),
    (((10, 12), (0, 0)), ((10, 12), (1, 1)), None, False), (((10, 12), (0, 0)), ((4, 7), (0, 0)), 3, False),
    (((10, 12), (0, 0)), ((4, 7), (0, 0)), 4, True)])
def test_may_see_says_no_where_it_can(query, key, window, answer):
    at = lambda pair: tuple(np.array([x], np.int32) for x in pair)
    assert bool(local.may_see(at(query), at(key), window)) == answer


def test_merge_of_two_sides_that_saw_nothing_is_nothing():
    nothing = jnp.zeros((2, 3)), jnp.full(2, -jnp.inf)
    something = jnp.ones((2, 3)) * 5, jnp.zeros(2)
    for got, wanted in ((local.merge(nothing, nothing), nothing), (local.merge(nothing, something), something),
                        (local.merge(something, nothing), something)):
        for a, b in zip(got, wanted):
            np.testing.assert_array_equal(a, b)


# Several devices.

KERNELS = {
    "whole": dict(sp=1),
    "ring2-zigzag": dict(sp=2, sp_order="zigzag"),
    "ring4-contiguous": dict(sp=4),
    "ring4-striped": dict(sp=4, sp_order="striped"),
    "ring8-zigzag": dict(sp=8, sp_order="zigzag"),
    "ulysses2": dict(sp=2, sp_kind="ulysses"),
    "ulysses4-kv-copied": dict(sp=4, sp_kind="ulysses"),
    "ulysses8-kv-copied": dict(sp=8, sp_kind="ulysses"),
    "hybrid2x2-zigzag": dict(sp=4, sp_kind="hybrid", sp_ulysses=2, sp_order="zigzag"),
    "hybrid2x4-striped": dict(sp=8, sp_kind="hybrid", sp_ulysses=4, sp_order="striped"),
    "allgather2-zigzag": dict(sp=2, sp_kind="allgather", sp_order="zigzag"),
    "allgather4-contiguous": dict(sp=4, sp_kind="allgather"),
}
WINDOWED = ("whole", "ring4-contiguous", "ring8-zigzag", "ulysses4-kv-copied", "hybrid2x2-zigzag", "allgather2-zigzag")
FLOAT32 = ("ring8-zigzag", "ulysses4-kv-copied", "hybrid2x2-zigzag", "allgather4-contiguous")


def run_named(name, window=None):
    return run_of(SEQ, HEADS, KV, DIM, window, **KERNELS[name])


@pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("name", KERNELS)
def test_equals_the_reference(given, wanted, name, check_vma):
    """Packed documents, KV heads shared; the two modes must agree with the reference each."""
    window = WINDOW if name in WINDOWED else None
    assert_equal(kernel_results(run_named(name, window), given, check_vma), wanted[window], "float64")


@pytest.mark.parametrize("name", FLOAT32)
def test_equals_the_reference_in_float32(given, wanted, name):
    assert_equal(kernel_results(run_named(name), given.cast("float32")), wanted[None], "float32")


def test_equals_the_reference_whatever_the_order_of_the_slots(given, wanted):
    """A ring that compares positions needs no order: here the slots are shuffled at random."""
    shuffled = np.random.default_rng(1).permutation(SEQ)
    assert_equal(kernel_results(run_named("ring4-contiguous"), given, order=shuffled), wanted[None], "float64")


@pytest.fixture(scope="module")
def long():
    """256 tokens in one document: over two devices each chunk is two blocks, some of which are skipped."""
    return inputs(1, 256, 4, 2, 6, documents=False)


@pytest.mark.parametrize("window", [None, 40])
def test_a_ring_of_many_blocks_equals_the_reference(long, window):
    run = run_of(256, 4, 2, 6, window, sp=2, sp_order="zigzag")
    assert_equal(kernel_results(run, long), reference(long, window), "float64")


# What skipping is for.

def counted_pairs(monkeypatch, kind, n, seq):
    """Block pairs that each device of a ring really computes in one forward pass over a causal sequence."""
    pairs, compute = np.zeros(n, int), local._pair_forward

    def counting(*arguments):
        jax.debug.callback(lambda rank: np.add.at(pairs, int(rank), 1), lax.axis_index("sp"))
        return compute(*arguments)

    monkeypatch.setattr(local, "_pair_forward", counting)
    run = run_of(seq, 2, 1, 2, sp=n, sp_order=kind)
    kernel, slots = attention_kernel(run), order(seq, n, 1, kind).astype(np.int32)[None]
    split = P(None, "sp")
    forward = jax.shard_map(lambda q, k, positions: kernel.forward(q, k, k, positions, positions * 0)[0], mesh=Mesh(
        np.array(jax.devices()[:n]), ("sp",)), in_specs=(split, split, P()), out_specs=split, check_vma=False)
    query, key = np.ones((1, seq, 2, 2), np.float32), np.ones((1, seq, 1, 2), np.float32)
    jax.block_until_ready(jax.jit(forward)(query, key, slots))
    jax.effects_barrier()
    return pairs.tolist()


def test_zigzag_gives_every_device_the_same_block_pairs(monkeypatch):
    """Two blocks on each of 4 devices, 36 of 64 pairs visible: 9 each in the zigzag order; contiguous, the last has 5 times the first's."""
    assert counted_pairs(monkeypatch, "zigzag", 4, 512) == [9, 9, 9, 9]


def test_the_contiguous_order_is_not_balanced(monkeypatch):
    assert counted_pairs(monkeypatch, "contiguous", 4, 512) == [3, 7, 11, 15]


# Faults that the comparison must see.

def worst_with_fault(name, given, wanted, **fault):
    return worst(kernel_results(run_named(name), given, **fault), wanted[None])


@pytest.mark.parametrize("name", ["ring2-zigzag", "ring4-striped", "hybrid2x2-zigzag", "allgather2-zigzag"])
def test_positions_left_in_natural_order_are_seen(given, wanted, name):
    assert min(worst_with_fault(name, given, wanted, positions_in_order=True)) > 1e-2


def test_a_dropped_hop_of_dk_and_dv_is_seen(given, wanted, monkeypatch):
    """Without the hops of dK, dV they add up on the wrong devices; out and dq do not notice."""
    shift = ring.shift
    monkeypatch.setattr(ring, "shift", lambda tree, axis, pairs, scope: tree if scope == "ring.gradient" else shift(tree, axis, pairs, scope))
    out, dq, dk, dv = kernel_results(run_named("ring4-contiguous"), given, check_vma=False)
    errors = worst((out, dq, dk, dv), wanted[None])
    assert max(errors[:2]) < 1e-12 and min(errors[2:]) > 1e-2


def test_a_chunk_merged_without_its_weight_is_seen(given, wanted, monkeypatch):
    monkeypatch.setattr(local, "merge", lambda a, b: ((a[0] + b[0]) / 2, jnp.logaddexp(a[1], b[1])))
    assert worst_with_fault("ring2-zigzag", given, wanted)[0] > 1e-2


def test_kv_heads_copied_to_the_wrong_devices_are_seen(given, wanted, monkeypatch):
    tiled = lambda x, copies, axis: jnp.tile(x, [copies if dim == axis else 1 for dim in range(x.ndim)])
    monkeypatch.setattr(ulysses, "jnp", SimpleNamespace(repeat=tiled))
    assert min(worst_with_fault("ulysses4-kv-copied", given, wanted)) > 1e-2


def test_kv_gradients_not_summed_over_devices_are_seen(given, wanted, monkeypatch):
    def own(x, axes, dim, scope):
        size = x.shape[dim] // 4
        return lax.dynamic_slice_in_dim(x, lax.axis_index(axes[0]) * size, size, axis=dim)
    monkeypatch.setattr(ring, "scatter", own)
    errors = worst_with_fault("allgather4-contiguous", given, wanted)
    assert max(errors[:2]) < 1e-12 and min(errors[2:]) > 1e-2
