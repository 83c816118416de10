"""Real programs, compiled in the test: raw JAX, and jaxpara's train step against the plan, every call and every byte.

What XLA:CPU is known to do to a step, and nothing else, may differ from the plan:
- the gradient norm adds all-reduces of one number each, which the plan does not list;
- a tied embedding's two forward gathers are equal, so one is dropped;
- with full recompute and a ring of 2, the backward ring's only hop repeats what the recomputed forward ring just received, so it is dropped.
"""
import importlib.util
import os
import subprocess
import sys
from collections import defaultdict
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpara
from equivalence.hard import make_run
from equivalence.matrix import CASES, settings
from jaxpara.hlo import axes_of, collectives, owner_of, phase_of
from jaxpara.plan import traffic
from jaxpara.zero import placements


def mesh(shape, names, devices=None):
    devices = jax.devices()[:8] if devices is None else devices
    return Mesh(np.asarray(devices).reshape(shape), names, axis_types=(AxisType.Auto,) * len(names))


def read(function, *shapes, sharding=(), **jit):
    """Collectives of a jitted function on float32 arrays of these shapes."""
    where = list(sharding) + [None] * (len(shapes) - len(sharding))
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=s) for shape, s in zip(shapes, where)]
    return collectives(jax.jit(function, **jit).lower(*arguments).compile().as_text())


def mapped(function, over, inside, outside, **options):
    return jax.shard_map(function, mesh=over, in_specs=inside, out_specs=outside, **options)


def summary(found, sizes):
    return sorted((c.kind, axes_of(c.groups, c.kind, sizes), c.elements, c.calls) for c in found)


SIZES = {"a": 2, "b": 4}


@pytest.mark.parametrize("devices", [slice(None), slice(None, None, -1)], ids=["in order", "reversed"])
def test_every_kind_on_every_axis(devices):
    """CASES R7, H7: the same text whatever the device ids."""
    def body(x):        # 8 × 16 on each device
        x = lax.psum(x, "a") * lax.psum_scatter(lax.all_gather(x, "b", axis=0, tiled=True), "b", scatter_dimension=0, tiled=True)
        x = x + lax.ppermute(x, "b", [(i, (i + 1) % 4) for i in range(4)])
        return lax.all_to_all(x, "b", 1, 1, tiled=True) + lax.psum(x * 2, ("a", "b"))

    over = mesh((2, 4), ("a", "b"), jax.devices()[:8][devices])
    found = read(mapped(body, over, P("a", "b"), P("a", "b")), (16, 64), sharding=[NamedSharding(over, P("a", "b"))])
    assert summary(found, SIZES) == sorted([("all-reduce", ("a",), 128, 1), ("all-gather", ("b",), 512, 1), ("reduce-scatter", ("b",), 512, 1),
                                            ("permute", ("b",), 128, 1), ("all-to-all", ("b",), 128, 1), ("all-reduce", ("a", "b"), 128, 1)])


def test_resharding_across_both_axes():
    """CASES H1: (4, 2), P(dp, tp) -> P(tp, dp) gives XLA's mesh spelling with a device order and part of an axis."""
    over = mesh((4, 2), ("dp", "tp"))
    text = jax.jit(lambda x: x + 1, out_shardings=NamedSharding(over, P("tp", "dp"))).lower(
        jax.ShapeDtypeStruct((16, 16), jnp.float32, sharding=NamedSharding(over, P("dp", "tp")))).compile().as_text()
    found = collectives(text)
    assert found and all(sorted(i for group in c.groups for i in group) == list(range(8)) for c in found if c.kind != "permute")
    if "device_ids" in text:
        assert ((0, 2), (1, 3), (4, 6), (5, 7)) in [c.groups for c in found]


def test_a_layer_scan_gathers_once_per_layer():
    """CASES H5: FSDP over 8, 6 layers of 32 × 32."""
    over = mesh((8,), ("fsdp",))

    def body(x, weights):
        return lax.scan(lambda x, w: (jnp.tanh(x @ lax.all_gather(w, "fsdp", axis=0, tiled=True)), None), x, weights)[0]

    found = read(mapped(body, over, (P("fsdp"), P(None, "fsdp")), P("fsdp")), (16, 32), (6, 32, 32))
    assert [(c.kind, c.calls, c.bytes) for c in found] == [("all-gather", 6, 4096)] and len(found[0].loops) == 1


def test_all_reduce_and_slice_from_constraints():
    """CASES H9, R4: XLA:CPU writes a sharded gradient as all-reduce and slice."""
    over = mesh((8,), ("fsdp",))
    place = lambda *spec: NamedSharding(over, P(*spec))
    found = read(jax.grad(lambda w, x: jnp.sum(jnp.tanh(x @ w))), (64, 64), (16, 64), sharding=[place("fsdp"), place("fsdp")], out_shardings=place("fsdp"))
    assert ("reduce-scatter", ("fsdp",), 64 * 64, 1) in summary(found, {"fsdp": 8})
    assert not [c for c in found if c.kind == "all-reduce" and c.elements > 1]


def test_singleton_groups_are_no_traffic():
    """CASES R8."""
    over = mesh((8, 1), ("a", "b"))
    found = read(mapped(lambda x: lax.psum(x, "b"), over, P("a"), P("a"), check_vma=False), (8, 4))
    assert all(c.wire == 0 and axes_of(c.groups, c.kind, {"a": 8, "b": 1}) == () for c in found)


def test_branches_and_loops_of_unknown_length():
    over = mesh((8,), ("a",))

    def body(x, stop):
        x = lax.cond(stop[0] > 0, lambda x: lax.all_gather(x, "a", tiled=True)[:1], lambda x: lax.ppermute(x, "a", [(0, 1), (1, 0)]), x)
        return lax.while_loop(lambda x: lax.psum(x.sum(), "a") < 100, lambda x: x + lax.psum(x * x, "a"), x)

    found = read(mapped(body, over, (P("a"), P()), P("a"), check_vma=False), (8, 4), (1,))
    branches = [c for c in found if c.conditional]
    assert sorted(c.kind for c in branches) == ["all-gather", "permute"] and not any(c.uncertain for c in branches)
    loop = {c.elements: c for c in found if c.loops}
    assert set(loop) == {1, 4} and all("unknown" in c.uncertain for c in loop.values()) and loop[4].calls == 1


@cache
def step_text(items):
    return jaxpara.build(make_run(dict(items), "float32")).lower().compile().as_text()


def sent(run, found):
    """{(axes, kind): [calls, wire bytes]} of a step, without the scalars of the gradient norm."""
    sums = defaultdict(lambda: [0, 0])
    for c in found:
        assert not (c.conditional or c.uncertain or c.disguise), c
        if phase_of(c.op_name) == "optimizer" and (c.kind, c.elements) == ("all-reduce", 1):
            continue
        entry = sums[axes_of(c.groups, c.kind, run.mesh.sizes), c.kind]
        entry[0] += c.calls
        entry[1] += c.calls * c.wire
    return dict(sums)


def planned(run):
    """{(axes, kind): [calls, wire bytes]} of the plan, less what XLA:CPU is known to merge."""
    sums = defaultdict(lambda: [0, 0])
    for line in traffic(run):
        sums[line.axes, line.kind][0] += line.calls
        sums[line.axes, line.kind][1] += line.wire
    m, layers = run.train.microbatches, run.model.layers
    table = placements(run)["embedding.tokens"]
    if run.model.tied and table.axes(3):
        n = np.prod([getattr(run.mesh, axis) for axis in table.axes(3)])
        entry = sums[table.axes(3), "all-gather"]
        entry[0] -= m
        entry[1] -= m * table.elements(table.storage) * 4 * (n - 1)
    if run.parallel.remat == "full" and run.mesh.sp == 2 and run.parallel.sp_kind == "ring":
        line = next(line for line in traffic(run) if line.what == "ring K, V, backward")
        assert line.calls == 2 * m * layers
        sums[("sp",), "permute"][0] -= line.calls
        sums[("sp",), "permute"][1] -= line.wire
    return dict(sums)


def compare(overrides):
    run = make_run(overrides, "float32")
    found = collectives(step_text(tuple(overrides.items())))
    assert sent(run, found) == planned(run)
    return run, found


@pytest.mark.parametrize("stage", range(4))
def test_zero_stages_send_what_is_planned(stage):
    run, found = compare({"mesh.dp": 8, "parallel.zero.dp": stage, "model.vocab": 40})
    owners = {(owner_of(c.op_name), phase_of(c.op_name), c.kind) for c in found}
    expected = {0: {("reduce", "all-reduce")}, 1: {("reduce", "reduce-scatter")}, 2: {("reduce", "reduce-scatter")},
                3: {("forward", "all-gather"), ("backward", "reduce-scatter"), ("recompute", "all-gather")}}[stage]
    # every parameter by its own name, also where twelve sums are one operation; what lies outside the layers is not gathered again
    assert owners - {("loss", "loss", "all-reduce"), ("", "optimizer", "all-gather"), ("", "optimizer", "all-reduce")} == {
        (name, *how) for name in placements(run) for how in expected if how[0] != "recompute" or name.startswith("layers.")}


@pytest.mark.parametrize("more", [{}, {"parallel.tp_sequence": True, "train.microbatches": 3, "parallel.sp_order": "zigzag"},
                                  {"parallel.remat": "full"}, {"model.style": "gpt2", "train.microbatches": 3}], ids=["plain", "megatron", "remat", "gpt2"])
def test_three_axes_send_what_is_planned(more):
    run, found = compare({"mesh.fsdp": 2, "mesh.sp": 2, "mesh.tp": 2, **more})
    phases = {(phase_of(c.op_name), owner_of(c.op_name)) for c in found}
    assert {("forward", "attention"), ("backward", "attention"), ("forward", "mlp"), ("backward", "head"), ("loss", "loss"),
            ("recompute", "layers.mlp.up"), ("reduce", "norm.scale")} <= phases


def test_zero_r_recomputes_inside_backward():
    run, found = compare({"mesh.dp": 2, "mesh.tp": 4, "parallel.remat": "full", "parallel.zero_r": True})
    repeated = [c for c in found if phase_of(c.op_name) == "recompute"]
    assert sorted((c.kind, owner_of(c.op_name), c.calls) for c in repeated) == [("all-gather", "", 3), ("all-reduce", "attention", 3)]


def test_a_planted_fault_is_seen(monkeypatch):
    """The comparison fails when one parameter's sum is left out."""
    from jaxpara import gradients
    kept = gradients.reduce_step
    monkeypatch.setattr(gradients, "reduce_step", lambda gradient, placement, live: gradient if placement.name == "layers.mlp.up"
                        else kept(gradient, placement, live))
    run = make_run({"mesh.dp": 2, "parallel.check_vma": False}, "float32")
    found = sent(run, collectives(jaxpara.build(run).lower().compile().as_text()))
    expected = planned(run)[("dp",), "all-reduce"]
    assert found[("dp",), "all-reduce"] == [expected[0] - 1, expected[1] - 4 * np.prod(placements(run)["layers.mlp.up"].shape)]


TPU = """
import jax, sys
jax.config.update("jax_num_cpu_devices", 8)
from jax.experimental.topologies import get_topology_desc
from jaxpara.mesh import make_mesh
from jaxpara.step import Program
from equivalence.hard import make_run
run = make_run(eval(sys.argv[1]), "float32")
devices = list(get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices)
open(sys.argv[2], "w").write(Program(run, make_mesh(run.mesh, devices)).lower().compile().as_text())
"""


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="compiling for TPU needs libtpu")
def test_tpu(tmp_path):
    """Gathers and scatters as often as planned, though most of the gathers are asynchronous fusions; XLA narrows some to bfloat16."""
    overrides = {"mesh.fsdp": 4, "mesh.tp": 2, "parallel.tp_sequence": True, "model.width": 512, "model.ffn": 1024, "model.head_dim": 64,
                 "train.seq": 512}
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "XLA_FLAGS": "",
                   "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", TPU, repr(overrides), str(tmp_path / "step.txt")], check=True, env=environment)
    run, found = make_run(overrides, "float32"), collectives((tmp_path / "step.txt").read_text())
    calls = lambda pairs: {key: sum(n for k, n in pairs if k == key) for key, _ in pairs if key[1] in ("all-gather", "reduce-scatter")}
    assert calls([((axes_of(c.groups, c.kind, run.mesh.sizes), c.kind), c.calls) for c in found]) == calls(
        [((line.axes, line.kind), line.calls) for line in traffic(run)])
    fused = [c for c in found if c.disguise == "async collective fusion"]
    assert fused and all(c.overlapped and c.is_async for c in fused) and not any(c.uncertain for c in found)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if "annotated" not in case])
def test_matrix(case):
    compare(settings(case)[0])
