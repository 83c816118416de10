"""Every mesh of the matrix trains the same model with experts as one device: what `test_matrix` compares, and every decision of the routers.

Every day runs the smallest cases and 1 in 14 of the others in float64 with SGD, and 1 in 28 of all with AdamW and in float32.
"""
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxpara
from equivalence.hard import awake, error, hard_batch, make_run
from equivalence.matrix import EXPERTS, ROUTED_SMALLEST, on_one_device, settings
from equivalence.test_matrix import LIMIT, rotating
from jaxpara.experts import Layout, spanning
from jaxpara.kernels.dispatch import reference as reference_of
from jaxpara.model.moe import each_expert
from jaxpara.step import Program
from jaxpara.targets import place
from jaxpara.transport import through_experts


def train(overrides, packed, dtype, optimizer, start=None):
    """What three steps show: metrics and loads of each, parameters before and after, the routers' bias after; under SGD at rate 1 the first
    gradients, which are its first update, and what the routers decide before and after. In float32 loss and gradients alone."""
    program = jaxpara.build(make_run(overrides, dtype, optimizer))
    start = awake(program.params(program.init())) if start is None else start
    batch, state = hard_batch(packed), program.init(start)
    told = {"before": program.params(state), "metrics": [], "loads": []}
    if dtype == "float32":
        loss, grads = program.loss_and_grads(state, batch)
        return told | {"metrics": [{"loss": loss}], "grads": grads}
    routing = [program.routing(state, batch)] if optimizer == "sgd" else []
    for i in range(3):
        state, metrics = program.step(state, batch)
        told["metrics"].append({name: value for name, value in metrics.items() if name != "moe/bytes"})     # moe/bytes: of the transport
        told["loads"].append(metrics.load)
        if i == 0:
            after = program.params(state)
            told["grads"] = {path: told["before"][path] - after[path] for path in after}
    routing += [program.routing(state, batch)] if optimizer == "sgd" else []
    return told | {"routing": routing, "after": program.params(state), "bias": None if state.bias is None else np.asarray(state.bias)}


@cache
def reference(model, packed, dtype, optimizer):
    return train(dict(model), packed, dtype, optimizer)


COUNTS = ("tokens", "stopped", "moe/dropped", "moe/load_max")
"""Metrics made of whole numbers: the same to the bit where routing is."""


def compare(case, dtype, optimizer, extra=None):
    overrides, packed = settings(case)
    expected = reference(tuple(sorted(on_one_device(overrides).items())), packed, dtype, optimizer)
    told, limit = train({**overrides, **(extra or {})}, packed, dtype, optimizer, expected["before"]), LIMIT[dtype]
    for step, (found, wanted) in enumerate(zip(told["metrics"], expected["metrics"], strict=True)):
        assert found.keys() == wanted.keys()
        allowed = lambda name: 0 if name in COUNTS else limit * max(abs(wanted[name]), 1e-3)
        assert not [(step, name, found[name], wanted[name]) for name in wanted if not abs(found[name] - wanted[name]) <= allowed(name)]
    if optimizer == "sgd":
        assert error(told["grads"], expected["grads"])[0] < limit, error(told["grads"], expected["grads"])
    if dtype == "float32":
        return
    assert all((found == wanted).all() for found, wanted in zip(told["loads"], expected["loads"], strict=True))
    for found, wanted in zip(told["routing"], expected["routing"], strict=True):
        assert all((found[name] == wanted[name]).all() for name in ("layers", "chosen", "kept"))
    if expected["bias"] is not None:
        assert (told["bias"] == expected["bias"]).all() and np.abs(told["bias"]).max() > 0
    assert error(told["after"], expected["after"])[0] < limit, error(told["after"], expected["after"])
    assert error(told["after"], expected["before"])[0] > 1e-3, "three steps moved nothing: the comparison would be of two initialisations"


@pytest.mark.parametrize("case", ROUTED_SMALLEST + rotating(EXPERTS[len(ROUTED_SMALLEST):], 20))
def test_float64_sgd(case):
    compare(case, "float64", "sgd")


@pytest.mark.parametrize("case", rotating(EXPERTS, 56))
def test_float64_adamw(case):
    compare(case, "float64", "adamw")


@pytest.mark.parametrize("case", rotating(EXPERTS, 56))
def test_float32_sgd(case):
    """In the unchecked mode of shard_map; loss and gradients."""
    manual = settings(case)[0].get("parallel.lowering") != "annotated"
    compare(case, "float32", "sgd", {"parallel.check_vma": False} if manual else {})


@cache
def runs():
    return [make_run(settings(case)[0]) for case in EXPERTS]


WANTED = {
    **{f"dp{dp}, ep{ep}": lambda run, dp=dp, ep=ep: (run.mesh.dp, run.mesh.ep) == (dp, ep)
       for dp, ep in ((1, 1), (2, 1), (1, 2), (2, 2), (1, 4), (2, 4))},
    **{f"ep and {axis}": lambda run, axis=axis: run.mesh.ep > 1 and run.mesh.sizes[axis] > 1 for axis in ("dp", "fsdp", "sp", "tp", "pp")},
    **{f"ZeRO-{stage} over {axis}": lambda run, stage=stage, axis=axis: run.mesh.ep > 1 and run.mesh.sizes[axis] > 1
       and getattr(run.parallel.zero, axis) == stage for axis in ("ep", "dp", "fsdp", "sp") for stage in range(4) if (axis, stage) != ("fsdp", 0)},
    **{f"{kind} pipelines, {m} micro-batches": lambda run, kind=kind, m=m: run.mesh.pp > 1 and run.mesh.ep > 1 and run.parallel.schedule == kind
       and run.train.microbatches == m for kind, m in (("circular", 1), ("1f1b", 1), ("circular", 3), ("1f1b", 3), ("zb_h1", 3))},
    "a pipeline with tp": lambda run: run.mesh.pp > 1 and run.mesh.ep > 1 and run.mesh.tp > 1,
    "a pipeline with sp": lambda run: run.mesh.pp > 1 and run.mesh.ep > 1 and run.mesh.sp > 1 and spanning(run),
    "layers of both kinds in a pipeline": lambda run: run.mesh.pp > 1 and run.model.moe.every == 2,
    "layers of both kinds": lambda run: run.mesh.ep > 1 and run.model.moe.first_dense and run.model.moe.every == 2,
    **{f"a capacity by {order}, groups {'spanning' if across else 'local'}": lambda run, order=order, across=across: run.mesh.sp * run.mesh.tp > 1
       and run.model.moe.capacity and run.model.moe.drop_order == order and spanning(run) == across
       for order in ("probability", "position") for across in (True, False)},
    **{f"loads by {scope}{f' over {axis}' * bool(axis)}": lambda run, scope=scope, axis=axis: run.model.moe.aux_weight and run.mesh.ep > 1
       and run.model.moe.aux_scope == scope and (not axis or run.mesh.sizes[axis] > 1)
       for scope in ("sequence", "microbatch", "global") for axis in ("", "sp", "pp")},
    "a global loss over tp": lambda run: run.model.moe.aux_scope == "global" and run.mesh.tp > 1,
    "micro-batch losses of several": lambda run: run.model.moe.aux_scope == "microbatch" and run.train.microbatches > 1 and run.mesh.dp > 1,
    "warm-up": lambda run: run.model.moe.aux_warmup, "z-loss": lambda run: run.model.moe.z_weight, "bias": lambda run: run.model.moe.bias_rate,
    "bias over tp": lambda run: run.model.moe.bias_rate and run.mesh.tp > 1, "jitter": lambda run: run.model.moe.jitter and run.mesh.ep > 1,
    "noise": lambda run: run.model.moe.noise and run.mesh.ep > 1 and run.mesh.sp > 1,
    "MoE dropout": lambda run: run.model.moe.dropout and run.mesh.ep > 1,
    "recomputation": lambda run: run.parallel.remat == "full" and run.mesh.ep > 1, "ZeRO-R": lambda run: run.parallel.zero_r,
    "kept matmuls": lambda run: run.parallel.remat == "selective" and run.mesh.ep > 1,
    "Megatron-SP": lambda run: run.parallel.tp_sequence and run.parallel.moe_tp == "width" and run.mesh.ep > 1,
    "tokens over tp": lambda run: run.parallel.moe_tp == "tokens" and not run.parallel.tp_sequence,
    "tokens over tp under Megatron-SP": lambda run: run.parallel.moe_tp == "tokens" and run.parallel.tp_sequence,
    "unchecked": lambda run: not run.parallel.check_vma and run.mesh.ep > 1,
    "one expert per device": lambda run: run.model.moe.experts == run.mesh.ep,
    "gather with a capacity": lambda run: run.parallel.moe_transport == "gather" and run.model.moe.capacity,
    "gather without": lambda run: run.parallel.moe_transport == "gather" and not run.model.moe.capacity,
    "all-to-all without a capacity": lambda run: run.mesh.ep > 1 and run.parallel.moe_transport == "all_to_all" and not run.model.moe.capacity,
    "shared experts": lambda run: run.model.moe.shared and run.mesh.tp > 1,
    "sigmoid": lambda run: run.model.moe.score == "sigmoid" and run.mesh.ep > 1,
    "groups of experts": lambda run: run.model.moe.expert_groups > 1 and run.mesh.ep > 1,
    **{f"{kind} routing over {axis}": lambda run, kind=kind, axis=axis: run.model.moe.routing == kind and run.mesh.sizes[axis] > 1
       for kind in ("expert_choice", "sinkhorn") for axis in ("dp", "sp", "tp")},
    **{f"{kind} attention": lambda run, kind=kind: run.mesh.ep > 1 and run.mesh.sp > 1 and run.parallel.sp_kind == kind
       for kind in ("ring", "ulysses", "hybrid")},
    **{f"{order} order": lambda run, order=order: run.mesh.ep > 1 and run.mesh.sp > 1 and run.parallel.sp_order == order
       for order in ("contiguous", "zigzag", "striped")},
}
"""What models with experts must be tried with."""


def test_the_cases_are_wide_enough():
    missing = [what for what, holds in WANTED.items() if not any(holds(run) for run in runs())]
    assert not missing
    assert len(set(EXPERTS)) == len(EXPERTS) >= 40
    assert {run.model.style for run in runs()[:len(ROUTED_SMALLEST)]} == {"gpt2", "llama"}
    assert sum(run.parallel.lowering == "annotated" for run in runs()) >= 3 and sum(run.model.style == "gpt2" for run in runs()) >= 15


def ragged_by_gather(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name, axis_index_groups=None):
    """What `lax.ragged_all_to_all` does, by all-gathers: XLA:CPU has no such operation. What was announced wrongly comes out as NaN."""
    rank, places = lax.axis_index(axis_name), jnp.arange(output.shape[0])
    rows, begins, sizes, lands = (lax.all_gather(x, axis_name) for x in (operand, input_offsets, send_sizes, output_offsets))
    for sender in range(rows.shape[0]):
        begin, size, land = begins[sender, rank], sizes[sender, rank], lands[sender, rank]
        within = places - land
        piece = rows[sender][jnp.clip(begin + within, 0, operand.shape[0] - 1)]
        announced = (recv_sizes[sender] == size) & (begin + size <= operand.shape[0]) & (land + size <= output.shape[0])
        output = jnp.where(((within >= 0) & (within < size))[:, None], jnp.where(announced, piece, jnp.nan), output)
    return output


@pytest.fixture
def ragged(monkeypatch):
    """The ragged transport on CPU, where `build` refuses it."""
    def build(run):
        jax.config.update("jax_enable_x64", True)
        return Program(*place(run, None))

    monkeypatch.setattr(lax, "ragged_all_to_all", ragged_by_gather)
    monkeypatch.setattr(jaxpara, "build", build)


def test_a_model_with_the_ragged_transport(ragged):
    """One of the cases of every day, by the third transport."""
    compare("llama moe dp2 ep2 m3 aux z", "float64", "sgd", {"parallel.moe_transport": "ragged"})


N, H, F, K, EP = 11, 5, 6, 3, 4


def routed(experts, cell, kind):
    """(x [4N, H], expert [4N, K], gates, cotangent, weights of all experts) of four devices; with a cell no expert gets more of one device."""
    rng = np.random.default_rng(experts + cell)
    part = {"even": np.ones(experts), "skewed": 4.0 ** -np.arange(experts)}[kind]
    expert = np.argsort(-(np.log(part) + rng.gumbel(size=(EP * N, experts))), axis=1)[:, :K]
    if cell:
        by_device = expert.reshape(EP, N * K)
        before = np.array([[(row[:i] == row[i]).sum() for i in range(N * K)] for row in by_device])
        expert = np.where(before < cell, by_device, -1).reshape(expert.shape)
        assert 0.1 < (expert < 0).mean() < 0.9
    weights = rng.normal(size=(experts, H, F)), rng.normal(size=(experts, F, H))
    return rng.normal(size=(EP * N, H)), expert.astype(np.int32), rng.random((EP * N, K)), rng.normal(size=(EP * N, H)), weights


def dense(x, gates, weights, expert):
    """All experts on all tokens, of which each token takes its own."""
    every = jnp.einsum("enf,efh->neh", jnp.tanh(jnp.einsum("nh,ehf->enf", x, weights[0])), weights[1])
    return (jnp.where(expert >= 0, gates, 0)[..., None] * jnp.take_along_axis(every, jnp.maximum(expert, 0)[..., None], 1)).sum(1)


def transported(transport, experts, cell, given):
    """(out, gradients of x, gates and weights) by a transport on four devices."""
    x, expert, gates, cotangent, weights = given
    layout = Layout(experts, experts // EP, K, N, cell or None, cell or N * min(K, experts // EP), transport)

    def on_device(x, expert, gates, cotangent, weights):
        def through(x, gates, weights):
            work = lambda rows, groups: each_expert(jnp.tanh(each_expert(rows, weights[0], groups)), weights[1], groups)
            return through_experts(x, expert, gates, work, layout, "cpu")

        out, pull = jax.vjp(through, x, gates, weights)
        return out, pull(cotangent)

    mesh, split = jax.sharding.Mesh(np.array(jax.devices()[:EP]), ("ep",)), jax.P("ep")
    return jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=split, out_specs=split))(x, expert, gates, cotangent, weights)


@pytest.mark.parametrize("experts, cell, kind", [(8, 0, "skewed"), (8, 3, "even"), (4, 0, "skewed"), (4, 4, "skewed")])
def test_transports_are_equal(experts, cell, kind, ragged):
    """Two experts on each of four devices and one, dropless and with a capacity, some experts empty: each transport gives what every token's experts
    give one by one, and its gradients."""
    with jax.enable_x64(True):
        given = routed(experts, cell, kind)
        x, expert, gates, cotangent, weights = given
        one = lambda e, token: np.tanh(token @ weights[0][e]) @ weights[1][e]
        wanted, pull = jax.vjp(lambda x, gates, weights: dense(x, gates, weights, expert), x, gates, weights)
        assert np.abs(wanted - reference_of(x, gates, expert, one)).max() < 1e-12
        for transport in ("all_to_all", "gather", "ragged"):
            found = transported(transport, experts, cell, given)
            for a, b in zip(jax.tree.leaves(found), jax.tree.leaves((wanted, pull(cotangent))), strict=True):
                assert np.abs(a - b).max() < 1e-12 * np.abs(b).max(), transport
