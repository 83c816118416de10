"""CASES.md E: tensor parallelism, the split vocabulary, Megatron sequence parallelism."""
import jax
import numpy as np
import pytest
from cases import small
from jax import lax
from jax.sharding import PartitionSpec as P
from kernels.harness import compiled

import jaxpara
from jaxpara import ConfigError, zero
from jaxpara.context import ManualCtx
from jaxpara.kernels.cross_entropy import cross_entropy_reference, loss_and_gradients
from jaxpara.step import moment


@pytest.mark.parametrize("lowering", ["manual", "annotated"])
def test_e1_a_row_parallel_bias_is_added_once(lowering):
    """tp=2, biases [100, 200, 300, …] after the attention's and the MLP's exit, all weights 0: the residual stream is the token plus each bias
    once, which the last norm and the head show. Twice would be another direction."""
    program = small.program(model__style="gpt2", model__kv_heads=8, model__tied=False, model__layers=1, model__width=3, model__vocab=6,
                            mesh__tp=2, parallel__lowering=lowering)
    values = small.zeros(program.run.model)
    values["layers.0.mlp.down_bias"][:] = [100, 200, 300]
    values["layers.0.attention.output_bias"][:] = [30, -10, 50]
    values["embedding.tokens"][:] = [400, -200, -100]
    values["norm.scale"][:] = 1
    values["head.weight"][:3] = np.eye(3)
    logits = program.logits(program.init(values), {"tokens": small.batch()["tokens"] % 6})[0, 0, :3]
    normed = lambda x: (x - np.mean(x)) / np.std(x)
    once, twice = normed([530, -10, 250]), normed([660, 180, 600])
    assert logits == pytest.approx(once, abs=1e-5) and np.abs(logits - twice).max() > 0.05


MEGATRON = dict(mesh__tp=4, parallel__tp_sequence=True)


def raw_gradients(program):
    """Gradients as stored: global arrays whose copies can be compared."""
    placed, state = program.put(small.batch()), small.start(program)
    return program._loss_and_grads(state.params, placed, moment(state))[2]


def test_e3_norm_gradients_are_alike_on_all_ranks_and_whole():
    """tp=4 with the sequence split between blocks, S=16: each rank's norms saw a quarter of the tokens; the gradients must be the sum, everywhere."""
    program = small.program(**MEGATRON)
    grads = raw_gradients(program)
    for name in ("layers.norm1.scale", "layers.norm2.scale", "norm.scale"):
        copies = small.pieces(grads[name])
        assert len(copies) == 4 and all((copy == copies[0]).all() for copy in copies)
    small.assert_same_answer(small.answer(**MEGATRON), small.answer())


def test_e3_a_missing_sum_over_ranks_would_be_seen(monkeypatch):
    monkeypatch.setattr(zero, "tp_partial", lambda parameter, run: "kv_heads" in parameter.labels)
    program = jaxpara.build(small.run(**MEGATRON, parallel__check_vma=False))
    grads, (_, wanted) = raw_gradients(program), small.answer()
    assert np.abs(np.asarray(grads["norm.scale"]) - wanted["norm.scale"]).max() > 0.1 * np.abs(wanted["norm.scale"]).max()


def vocabulary_loss(x, weight, targets, vocab, whole=False):
    """(loss, dweight) over tp=4. whole: every rank is given the whole table, so computes all logits."""
    def on_device(x, weight, targets):
        loss, _, dweight = loss_and_gradients(x, weight, targets, vocab=vocab, axes=("tp",), limit=5, gradients=True)
        return loss, dweight
    table = P() if whole else P("tp")
    program = jax.shard_map(on_device, mesh=small.mesh(tp=4), in_specs=(P(), table, P()), out_specs=(P(), P("tp")), check_vma=False)
    loss, dweight = compiled(program, x, weight, targets)(x, weight, targets)
    return float(loss), np.asarray(dweight)


@pytest.mark.parametrize("whole", [False, True], ids=["split table", "whole table"])
def test_e5_logits_that_are_already_whole_are_not_counted_four_times(whole):
    """V=16, tp=4. Had each rank's whole row gone into the sum over ranks, every token's loss would be log 4 = 1.386 too large."""
    generator = np.random.default_rng(0)
    x, weight = generator.standard_normal((2, 9, 5)).astype(np.float32), generator.standard_normal((16, 5)).astype(np.float32)
    targets = generator.integers(0, 16, (2, 9)).astype(np.int32)
    wanted = cross_entropy_reference(x, weight, targets, 16)
    assert vocabulary_loss(x, weight, targets, 16, whole)[0] == pytest.approx(float(wanted), rel=1e-6)


@pytest.mark.parametrize("target", range(10))
def test_e7_padded_columns_match_no_target_and_get_no_gradient(target):
    """V=10 stored as 16 over tp=4, so that one rank holds padding only; the padding's weights would win if they were counted."""
    generator = np.random.default_rng(1)
    x, weight = generator.standard_normal((2, 9, 5)).astype(np.float32), generator.standard_normal((16, 5)).astype(np.float32)
    weight[10:] = 40 * x[0, 0]
    targets = np.full((2, 9), target, np.int32)
    loss, dweight = vocabulary_loss(x, weight, targets, 10)
    dense, dense_grad = jax.value_and_grad(cross_entropy_reference, 1)(x, weight[:10], targets, 10)
    assert np.isfinite(loss) and loss == pytest.approx(float(dense), rel=1e-5)
    assert dweight[:10] == pytest.approx(np.asarray(dense_grad), abs=1e-5) and (dweight[10:] == 0).all()


def test_e7_a_padded_model_is_the_unpadded_one():
    """V=34, which tp=4 stores as 36 rows: loss and gradients of one device, which stores 34."""
    program, dense = small.program(**MEGATRON), small.program()
    assert [made.placements["head.weight"].shape[0] for made in (program, dense)] == [36, 34]
    small.assert_same_answer(small.answer(**MEGATRON), small.answer())


def test_e9_only_rows_that_were_looked_up_get_an_embedding_gradient():
    """V=24 over dp2·tp4, ids 0 to 11: rows 12 to 23 exactly 0, the others what numpy adds up; repeated ids included."""
    run = small.run(model__vocab=24, mesh__dp=2, mesh__tp=4)
    program = jaxpara.build(run)
    generator = np.random.default_rng(0)
    tokens, table = generator.integers(0, 12, (4, 16)).astype(np.int32), generator.standard_normal((24, 20)).astype(np.float32)
    cotangent = generator.standard_normal((4, 16, 20)).astype(np.float32)

    def on_device(table, tokens, cotangent):
        out, pullback = jax.vjp(lambda table: ManualCtx(run, program.placements).embed(table, tokens), table)
        return out, lax.psum(pullback(cotangent)[0], "dp")

    looked_up = jax.shard_map(on_device, mesh=program.mesh, in_specs=(P("tp"), P("dp"), P("dp")), out_specs=(P("dp"), P("tp")), check_vma=False)
    out, grad = compiled(looked_up, table, tokens, cotangent)(table, tokens, cotangent)
    wanted = np.zeros((24, 20), np.float32)
    np.add.at(wanted, tokens, cotangent)
    assert (np.asarray(out) == table[tokens]).all()
    assert np.asarray(grad) == pytest.approx(wanted, abs=1e-5) and (np.asarray(grad)[12:] == 0).all() and (np.abs(wanted[:12]).max(1) > 0).all()


def test_e9_a_whole_models_embedding_gradient_has_the_same_zeros():
    batch, programs = small.batch(vocab=12), (small.program(mesh__dp=2, mesh__tp=4), small.program())
    answers = [program.loss_and_grads(small.start(program), batch) for program in programs]
    small.assert_same_answer(*answers)
    assert (answers[0][1]["embedding.tokens"][12:] == 0).all() and (answers[0][1]["head.weight"][12:] != 0).all()


def test_e11_the_inner_width_itself_must_split():
    """F=3, tp=2: twice F would split, F does not, and the message names F."""
    with pytest.raises(ConfigError, match=r"mesh.tp = 2 does not divide model.ffn = 3\."):
        small.run(model__ffn=3, mesh__tp=2)


def test_e13_kv_heads_fewer_than_tp_are_copied_and_their_gradients_summed():
    """N_kv=2 over tp=8: four devices use each KV head; dk and dv reach its weights once from each. 8 query heads, so one a device."""
    program = small.program(mesh__tp=8)
    assert small.start(program).params["layers.attention.key"].addressable_shards[0].data.shape == (3, 20, 2, 6)
    small.assert_same_answer(small.answer(mesh__tp=8), small.answer())


@pytest.mark.parametrize("heads, kv, tp, legal", [(12, 6, 4, "1, 2, 3, 6, 12"), (12, 4, 3, "1, 2, 4, 12"), (24, 6, 4, "1, 2, 3, 6, 12, 24")])
def test_e13_a_tp_that_fits_no_whole_kv_head_is_refused_with_those_that_do(heads, kv, tp, legal):
    with pytest.raises(ConfigError, match=rf"mesh.tp = {tp} .*kv_heads = {kv}.*Legal tp: {legal}\."):
        small.run(model__heads=heads, model__kv_heads=kv, mesh__tp=tp)
