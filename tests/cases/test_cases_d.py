"""CASES.md D: ring, zigzag, Ulysses."""
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import small
from kernels.harness import Inputs, assert_equal, inputs, kernel_results, reference, run_of, worst

from jaxpara import ConfigError
from jaxpara.batch import slots
from jaxpara.order import order
from jaxpara.data.packing import Stream
from jaxpara.kernels import local



@lru_cache(maxsize=None)
def rounded_errors(sp):
    """Largest errors of out, dq, dk, dv in bfloat16 over a ring of sp, against the reference in float64 on the same rounded inputs."""
    given = inputs(1, 256, 4, 2, 6, documents=False).cast(jnp.bfloat16)
    return worst(kernel_results(run_of(256, 4, 2, 6, sp=sp), given), reference(given.cast("float64")))


@pytest.mark.parametrize("sp", [2, 4, 8])
def test_d1_the_error_does_not_grow_with_the_ring(sp):
    """bfloat16, S=256: the error over sp devices is at most twice that of one, for the output and each gradient."""
    ratios = [many / one for many, one in zip(rounded_errors(sp), rounded_errors(1))]
    assert max(ratios) < 2, ratios
    assert 1e-4 < min(rounded_errors(1)), "the inputs were not rounded: nothing was measured"


def test_d1_gradients_that_travel_in_bfloat16_would_be_seen(monkeypatch):
    one = rounded_errors(1)
    monkeypatch.setattr(local, "wide", lambda dtype: dtype)
    given = inputs(1, 256, 4, 2, 6, documents=False).cast(jnp.bfloat16)
    narrow = worst(kernel_results(run_of(256, 4, 2, 6, sp=8), given, check_vma=False), reference(given.cast("float64")))
    assert max(many / few for many, few in zip(narrow, one)) > 2


def test_d3_rows_that_see_no_key_are_nothing():
    """A running lse of -inf merged with a block's -inf, and query rows of padding: output 0, lse -inf, gradients finite and 0 for those rows."""
    rows, queries, keys = 2, 128, 192
    shapes = dict(query=(queries, 3), key=(keys,), value=(keys,), cotangent=(queries, 3))
    query, key, value, cotangent = (np.random.default_rng(seed).standard_normal((rows, 2, *shape, 6)).astype(np.float32)
                                    for seed, shape in enumerate(shapes.values()))
    at = lambda length: (np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length)), np.zeros((rows, length), np.int32))
    query_at, key_at = at(queries), at(keys)
    query_at[1][:, 90:] = -1                  # padding: a document of its own, of which there is no key

    @jax.jit
    def both(query, key, value, cotangent):
        out, lse = local.forward(query, key, value, query_at, key_at, None, 64)
        return out, lse, *local.backward(query, key, value, query_at, key_at, lse, cotangent, local.row_sum(out, cotangent), None, 64)

    out, lse, dq, dk, dv = map(np.asarray, both(query, key, value, cotangent))
    assert (out[:, :, 90:] == 0).all() and (lse[:, :, 90:] == -np.inf).all() and (dq[:, :, 90:] == 0).all()
    assert np.isfinite(lse[:, :, :90]).all() and (out[:, :, :90] != 0).all()
    assert all(np.isfinite(grad).all() for grad in (dq, dk, dv))
    nothing = jnp.zeros((3, 6)), jnp.full(3, -jnp.inf)
    merged, merged_lse = local.merge(nothing, nothing)
    assert (merged == 0).all() and (merged_lse == -jnp.inf).all()


def natural(rows=small.ROWS):
    """A batch of whole documents, so that tokens, targets and positions can be told from each other's places."""
    return {name: array for name, array in small.batch(rows).items() if name in ("tokens", "targets")}


def test_d5_rope_turns_tokens_by_their_own_positions_in_the_zigzag_order():
    """S=16, sp=2: device 0 holds positions 0-3 and 12-15, device 1 4-11; and the logits, put back in order, are one device's."""
    program = small.program(mesh__sp=2, parallel__sp_order="zigzag")
    counted = np.broadcast_to(np.arange(16), (4, 16))
    placed = program.put({"tokens": counted, "targets": counted})
    held = [piece[0, 0].tolist() for piece in small.pieces(placed["tokens"])]
    assert held == [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]]
    assert np.asarray(placed["positions"])[0, 0].tolist() == held[0] + held[1]
    dense = small.program()
    wanted = dense.logits(small.start(dense), natural())
    np.testing.assert_allclose(program.logits(small.start(program), natural()), wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def test_d7_ulysses_in_a_zigzag_ring_gets_the_order_it_expects():
    """Ulysses 2 × ring 2, S=32, causal: equal to one device. Of sp=4 the ring is 2 long, so the chunks are 4, not 8; and feeding tokens in that
    order as if they were in the natural one changes the result."""
    run, given = run_of(32, 4, 2, 6, sp=4, sp_kind="hybrid", sp_ulysses=2, sp_order="zigzag"), inputs(3, 32, 4, 2, 6, documents=False)
    assert slots(run, 32).reshape(4, 8)[:, 0].tolist() == [0, 24, 8, 16]
    wanted = reference(given)
    assert_equal(kernel_results(run, given), wanted, "float64")
    assert min(worst(kernel_results(run, given, positions_in_order=True), wanted)) > 1e-2


def test_d9_a_window_is_of_positions_not_of_slots():
    """Zigzag, window 3, S=16, sp=2. Values are unit vectors, so the output is the weights: query i sees exactly i-2, i-1 and i."""
    draw = np.random.default_rng(0).standard_normal
    eye = np.broadcast_to(np.eye(16)[None, :, None], (1, 16, 2, 16))
    positions = np.arange(16, dtype=np.int32)[None]
    given = Inputs(draw((1, 16, 2, 16)), draw((1, 16, 2, 16)), eye, positions, positions * 0, draw((1, 16, 2, 16)))
    out, *_ = kernel_results(run_of(16, 2, 2, 16, window=3, sp=2, sp_order="zigzag"), given)
    assert [np.flatnonzero(row).tolist() for row in out[0, :, 1]] == [[j for j in (i - 2, i - 1, i) if j >= 0] for i in range(16)]


def test_d9_zigzag_balances_chunk_pairs():
    """S=16, sp=2: of the causal pairs of 4-token chunks each device has 5. (With window 3 it is 3 and 4: the text's first chunk has none before it.)"""
    chunks = order(16, 2, 1, "zigzag").reshape(4, 4).astype(np.int32)[:, None]
    at = [(chunk, chunk * 0) for chunk in chunks]
    seen = lambda window: np.array([[bool(local.may_see(query, key, window)) for key in at] for query in at])
    pairs = lambda window: seen(window).reshape(2, -1).sum(1).tolist()
    assert pairs(None) == [5, 5] and pairs(3) == [3, 4]


def test_d11_kv_heads_fewer_than_ulysses_ranks_are_copied():
    """N_q=8, N_kv=2, sp=4: each KV head on two devices, its gradient the sum of both."""
    given = inputs(3, 16, 8, 2, 6)
    assert_equal(kernel_results(run_of(16, 8, 2, 6, sp=4, sp_kind="ulysses"), given), reference(given), "float64")


@pytest.mark.parametrize("heads, kv, tp, legal", [(8, 2, 1, [1, 2, 4, 8]), (12, 2, 1, [1, 2, 4, 6, 12]), (12, 3, 1, [1, 3, 6, 12]),
                                                  (12, 4, 2, [1, 2, 6]), (12, 6, 2, [1, 3, 6]), (24, 4, 4, [1, 2, 3, 6])])
def test_d11_the_message_and_the_check_agree(heads, kv, tp, legal):
    """Every sp from 1 to 12 is accepted exactly if whole query heads and whole KV heads, or whole numbers of copies of them, fit; and the
    message of each that is not lists those that are."""
    for sp in range(1, 13):
        sizes = dict(model__heads=heads, model__kv_heads=kv, mesh__tp=tp, mesh__sp=sp, train__seq=27720)
        kind = {"parallel__sp_kind": "ulysses"} if sp > 1 else {}
        if sp in legal:
            assert small.run(**sizes, **kind).mesh.sp == sp
            continue
        listed = ", ".join(map(str, legal))
        with pytest.raises(ConfigError, match=rf"^mesh.sp = {sp} with mesh.tp = {tp}.* {heads} heads .*KV heads, {kv},.*: {listed}\.$"):
            small.run(**sizes, **kind)


def test_d13_tensor_parallelism_splits_the_heads_too():
    """8 heads, tp=4, sp=4: 16 ways are too many, and the message says so."""
    with pytest.raises(ConfigError, match=r"mesh.sp = 4 with mesh.tp = 4.*8 heads.*16.*Legal mesh.sp at this tp: 1, 2\."):
        small.run(mesh__tp=4, mesh__sp=4, parallel__sp_kind="ulysses")
    assert small.run(mesh__tp=4, mesh__sp=2, parallel__sp_kind="ulysses").mesh.sp == 2


@pytest.mark.parametrize("seq, kind, step, nearest", [(30, "contiguous", 4, "28, 32"), (20, "zigzag", 8, "16, 24")])
def test_d15_a_sequence_that_does_not_split_is_refused_with_the_multiple_it_needs(seq, kind, step, nearest):
    overrides = {"parallel__sp_order": kind} if kind == "zigzag" else {}
    with pytest.raises(ConfigError, match=rf"train.seq = {seq} must be a multiple of {step}, for mesh.sp = 4.*Nearest: {nearest}\."):
        small.run(train__seq=seq, mesh__sp=4, **overrides)


def test_d15_the_zigzag_message_says_what_plain_would_need():
    with pytest.raises(ConfigError, match="Without zigzag: multiples of 4"):
        small.run(train__seq=20, mesh__sp=4, parallel__sp_order="zigzag")


def test_d17_gradients_of_sequence_shards_are_summed():
    """sp=2, dp=1: every gradient is one device's, not half of it."""
    small.assert_same_answer(small.answer(mesh__sp=2, parallel__sp_order="zigzag"), small.answer())


def counted_rows():
    """Four rows of tokens 0 to 15, as the data pipeline makes them."""
    return Stream([np.arange(15, dtype=np.uint8)], 16, seed=0, separator=15).rows(0, 4)


@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
def test_d19_targets_are_the_next_tokens_across_shard_edges(kind):
    """Tokens 0 to 15 over sp=4: every shard's target is its token + 1, and that of the last token -1."""
    rows = counted_rows()
    assert rows["tokens"][0].tolist() == list(range(16))
    placed = small.program(mesh__sp=4, **{"parallel__sp_order": kind} if kind != "contiguous" else {}).put(rows)
    shards = list(zip(small.pieces(placed["tokens"]), small.pieces(placed["targets"])))
    assert sorted(np.concatenate([tokens[0, 0] for tokens, _ in shards])) == list(range(16))
    for tokens, targets in shards:
        np.testing.assert_array_equal(targets, np.where(tokens == 15, -1, tokens + 1))


def test_d19_the_loss_does_not_shift_them_again():
    """The loss over two sequence shards is the mean of -log p(token i+1) at position i, i = 0 … 14, by the program's own logits."""
    rows, program = counted_rows(), small.program(mesh__sp=2, parallel__sp_order="zigzag")
    logits = program.logits(small.start(program), rows).astype(np.float64)[:, :15]
    log_probabilities = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    loss, _ = program.loss_and_grads(small.start(program), rows)
    assert loss == pytest.approx(-np.mean(log_probabilities[:, np.arange(15), np.arange(1, 16)]), rel=1e-5)
