"""CASES.md F: mixture of experts, expert parallelism."""
import jax.numpy as jnp
import numpy as np
import pytest
from cases import small

import jaxpara
from jaxpara import ConfigError

FOUR = dict(model__moe__experts=4, model__moe__top_k=2, model__moe__ffn=12, model__moe__aux_weight=0.1, precision__params="float64",
            precision__compute="float64", optim__lr=1.0, optim__clip=None, optim__weight_decay=0.0)
"""Four experts, of which each token takes two; with plain SGD at rate 1 a step is the gradient."""

MESHES = [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4)]


def four(dp=1, ep=1, **overrides):
    """A program of four experts."""
    axes = {f"mesh__{axis}": size for axis, size in (("dp", dp), ("ep", ep)) if size > 1}
    return small.program(**{**FOUR, **axes, **overrides})


def answer(program, values=None, **arrays):
    """(loss, gradients) at `values`, of the batch with some arrays replaced."""
    values = small.weights(program.run.model) if values is None else values
    return program.loss_and_grads(program.init(values), {**small.batch(), **arrays})


def uncounted(rows=small.ROWS, seq=small.SEQ):
    """Targets of which none counts: nothing is left of the loss but the routers' own."""
    return np.full((rows, seq), -1)


def routers(grads):
    return {path: leaf for path, leaf in grads.items() if path.endswith("moe.router")}


def stepped(program, values, batch):
    """(metrics, gradients) of one step of SGD at rate 1."""
    state = program.init(values)
    before = program.params(state)
    state, metrics = program.step(state, batch)
    after = program.params(state)
    return metrics, {path: before[path] - after[path] for path in before}


@pytest.mark.parametrize("dp, ep", MESHES[1:])
def test_f1_expert_gradients_do_not_depend_on_the_mesh(dp, ep):
    """Four experts, the same global batch, (dp,ep) = (1,1),(2,1),(1,2),(2,2),(1,4): the same expert gradients, and all others, in float64."""
    program, wanted = four(dp, ep), answer(four())
    assert program.placements["layers.moe.up"].elements(program.placements["layers.moe.up"].storage) == 3 * 4 // ep * 20 * 12
    assert min(np.abs(wanted[1][f"layers.{i}.moe.{name}"][e]).max() for i in range(3) for name in ("gate", "up", "down") for e in range(4)) > 1e-6
    small.assert_same_answer(answer(program), wanted, 1e-12)


def test_a_router_learns_from_its_auxiliary_loss_alone():
    """No target counts: the loss is the balance loss, and gives routers a gradient, the same on ep2 as on one device."""
    loss, grads = answer(four(), targets=uncounted())
    assert loss > 0.3 and min(np.abs(leaf).max() for leaf in routers(grads).values()) > 1e-5
    small.assert_same_answer(answer(four(ep=2), targets=uncounted()), (loss, grads), 1e-12)


def forced(model, scores):
    """Weights of which each token has much of one feature, by which the routers give every token these scores."""
    values = small.weights(model)
    values["embedding.tokens"][:, 0] = 30
    for i in range(model.layers):
        values[f"layers.{i}.norm2.scale"][0] = 1
        values[f"layers.{i}.moe.router"][:] = 0
        values[f"layers.{i}.moe.router"][0] = scores
    return values


def test_all_tokens_to_two_experts():
    """The others are empty: everything is finite, the same on four devices, of which two have no work, as on one; empty experts' gradients are 0."""
    single, across = four(), four(ep=4)
    values = forced(single.run.model, [-3, 0.5, -3, 0.4])
    chosen = across.routing(across.init(values), small.batch())["chosen"]
    assert set(np.unique(chosen)) == {1, 3}
    found, wanted = answer(across, values), answer(single, values)
    small.assert_same_answer(found, wanted, 1e-12)
    experts = [leaf for path, leaf in found[1].items() if ".moe." in path and not path.endswith("router")]
    assert all(np.isfinite(leaf).all() for leaf in found[1].values()) and len(experts) == 9
    assert all((leaf[[0, 2]] == 0).all() and np.abs(leaf[1]).max() > 0 and np.abs(leaf[3]).max() > 0 for leaf in experts)


def test_capacity_for_all_is_dropless():
    """E/K = 2 times the mean holds every token: gradients are those without a capacity."""
    roomy = four(ep=2, model__moe__capacity=2.0)
    assert any("none is ever dropped" in note for note in roomy.run.notes)
    small.assert_same_answer(answer(roomy), answer(four(ep=2)), 1e-12)


def test_f3_the_auxiliary_loss_of_a_tiled_batch():
    """dp=1, and dp=4 with the batch tiled four times; loads counted over all: the same value and the same gradients, of routers and all others."""
    batch, scope = small.batch(rows=2), dict(model__moe__aux_scope="global")
    one, four_times = four(**scope, train__batch=2), four(dp=4, **scope, train__batch=8)
    values = small.weights(one.run.model)
    (metrics, grads), (tiled_metrics, tiled) = (stepped(program, values, {name: np.tile(array, (times, 1)) for name, array in batch.items()})
                                                for program, times in ((one, 1), (four_times, 4)))
    assert metrics["moe/aux_loss"] > 1.01 and metrics["moe/aux_loss"] == pytest.approx(tiled_metrics["moe/aux_loss"], rel=1e-12)
    assert min(np.abs(leaf).max() for leaf in routers(grads).values()) > 1e-5
    assert max(small.leaf_errors(tiled, grads).values()) < 1e-12


OPPOSITE = dict(model__moe__aux_scope="microbatch", model__moe__top_k=1, model__moe__renormalise=False, model__layers=2, optim__lr=1.0)
P = np.exp(3) / (np.exp(3) + 3)
"""A token's score of its own expert, where logits are 3 and 0."""


def halves(**overrides):
    """(load-balance loss, gradients) of a step in which the first half of the rows is all tokens 0, sent to expert 0, the second all tokens 1, to
    expert 1, with a score of P each, in both layers."""
    program = four(**{**OPPOSITE, **overrides})
    values = small.zeros(program.run.model)
    values["embedding.tokens"][0, 0] = values["embedding.tokens"][1, 1] = 1
    for i in range(2):
        values[f"layers.{i}.norm2.scale"][:] = 1
        unit = 1 / np.sqrt(1 / 20 + 1e-5)       # RMSNorm of a one among twenty
        values[f"layers.{i}.moe.router"][0, 0] = values[f"layers.{i}.moe.router"][1, 1] = 3 / unit
    tokens = np.repeat([0, 0, 1, 1], small.SEQ).reshape(4, -1)
    metrics, grads = stepped(program, values, {"tokens": tokens, "targets": uncounted()})
    return metrics["moe/aux_loss"], grads


def test_f5_the_loss_of_micro_batches_is_the_documented_one():
    """Two micro-batches with opposite routing: f·P of each is 4·P (all choices in one expert), where the loads of the step would give half of
    4·P + 4·(1 - P)/3. The same when sharded and in a pipeline; loads of the step under accumulation are refused."""
    value, grads = halves(train__microbatches=2)
    assert value == pytest.approx(4 * P, rel=1e-6)
    assert halves()[0] == pytest.approx((4 * P + 4 * (1 - P) / 3) / 2, rel=1e-6)
    assert min(np.abs(leaf).max() for leaf in routers(grads).values()) > 1e-5
    for mesh in (dict(dp=2), dict(ep=2, mesh__pp=2)):
        found, sharded = halves(train__microbatches=2, **mesh)
        assert found == pytest.approx(value, rel=1e-12) and max(small.leaf_errors(sharded, grads).values()) < 1e-12
    with pytest.raises(ConfigError, match="aux_scope = global with train.microbatches = 2"):
        four(**{**OPPOSITE, "model__moe__aux_scope": "global"}, train__microbatches=2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_f7_a_bfloat16_model_routes_as_a_float32_one(dtype):
    """Router logits 1.000, 1.001, 1.002, 0.999: experts 2 and 1, though bfloat16 holds 1 four times."""
    logits = np.float32([1.000, 1.001, 1.002, 0.999])
    assert len(set(np.asarray(jnp.asarray(logits, jnp.bfloat16), np.float32))) == 1
    program = four(precision__params=dtype, precision__compute=dtype)
    values = small.zeros(program.run.model)
    values["embedding.tokens"][:] = 1
    for i in range(3):
        values[f"layers.{i}.norm2.scale"][:] = 1
        values[f"layers.{i}.moe.router"][:] = logits / 20
    decided = program.routing(program.init(values), small.batch())
    assert (decided["chosen"] == [2, 1]).all() and decided["kept"].all()


@pytest.mark.parametrize("m", [1, 2])
def test_f9_the_capacity_without_drops_is_a_bound(m):
    """All tokens to one expert, ep=2, in one micro-batch and in two: a capacity of E/K = 4 has room for all 16 tokens of a group, and drops none; one
    token less drops one of 16."""
    for capacity, most in ((4.0, 16), (3.75, 15)):
        program = four(ep=2, model__moe__top_k=1, model__moe__renormalise=False, model__moe__capacity=capacity, train__microbatches=m)
        note = f"each expert takes {most} of 16 tokens, in training only" + "; none is ever dropped" * (most == 16)
        assert any(note in said for said in program.run.notes)
        _, metrics = program.step(program.init(forced(program.run.model, [-3, -3, 2, -3])), small.batch())
        assert (metrics.load == np.array([0, 0, 64, 0])).all()
        assert metrics["moe/dropped"] == pytest.approx(1 - most / 16)


def test_f11_ragged_exchange_on_cpu_is_an_error():
    run = jaxpara.load("gpt_single", {"model.moe.experts": 4, "mesh.ep": 2, "parallel.moe_transport": "ragged"})
    with pytest.raises(ConfigError, match=r"parallel.moe_transport = ragged on cpu.*Legal on cpu: all_to_all, gather"):
        jaxpara.build(run)
