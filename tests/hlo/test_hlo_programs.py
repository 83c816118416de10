"""Real programs, compiled in the test: raw JAX with each form of collective, and a train step saved to text on each backend.

`tests/contract/test_inspect.py` compares train steps with the plan.
"""
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpara
from backends import needs_gpu, needs_tpu
from equivalence.hard import make_run
from jaxpara.hlo import axes_of, collectives, owner_of, phase_of
from jaxpara.mesh import plugins
from jaxpara.plan import traffic


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


BACKENDS = [pytest.param("cpu:8"), pytest.param("tpu:v5e:2x4", marks=needs_tpu), pytest.param("gpu:h100:1x8", marks=needs_gpu)]


@pytest.mark.parametrize("wide", [False, True])
def test_64_bit_mode_of_the_process_changes_no_program(wide):
    """A float64 run turns it on for good; later programs of other runs must read as if it had not."""
    before = jax.config.jax_enable_x64
    try:
        jax.config.update("jax_enable_x64", wide)
        found = collectives(jaxpara.build(make_run({"mesh.fsdp": 8}, "float32"), "tpu:v5e:2x4" if "tpu" in plugins() else None).lower()
                            .compile().as_text())
    finally:
        jax.config.update("jax_enable_x64", before)
    assert found and not any(c.uncertain for c in found) and max(c.calls for c in found) >= 3


@pytest.mark.parametrize("target", BACKENDS)
def test_a_saved_program_of_each_backend(target, tmp_path):
    """Text that was written to a file and read back: as many calls of each kind as planned, of the right group, nothing uncertain; on TPU
    most gathers are asynchronous fusions with work in between, on GPU reduce-scatters are asynchronous."""
    run = make_run({"mesh.fsdp": 4, "mesh.tp": 2, "parallel.tp_sequence": True, "model.width": 512, "model.ffn": 1024, "model.head_dim": 64,
                    "train.seq": 512}, "float32")
    path = tmp_path / "step.txt"
    path.write_text(jaxpara.build(run, target).lower().compile().as_text())
    found = collectives(path.read_text())
    calls = lambda triples: {key: sum(n for *k, n in triples if tuple(k) == key) for *k, _ in triples for key in [tuple(k)]
                             if key[1] in ("all-gather", "reduce-scatter")}
    assert calls([(axes_of(c.groups, c.kind, run.mesh.sizes), c.kind, c.calls) for c in found]) == calls(
        [(line.axes, line.kind, line.calls) for line in traffic(run)])
    assert not any(c.uncertain or c.conditional for c in found)
    asynchronous = [c for c in found if c.is_async]
    assert bool(asynchronous) == (target != "cpu:8")
    if target.startswith("tpu"):
        fused = [c for c in found if c.disguise == "async collective fusion"]
        assert fused and all(c.overlapped and c.is_async for c in fused)
    assert {owner_of(c.op_name) for c in found} >= {"layers.mlp.up", "attention", "mlp", "embedding", "head", "loss"}
    assert {phase_of(c.op_name) for c in found} >= {"forward", "backward", "recompute", "reduce", "loss", "optimizer"}


def test_zero_r_recomputes_inside_backward():
    run = make_run({"mesh.dp": 2, "mesh.tp": 4, "parallel.remat": "full", "parallel.zero_r": True}, "float32")
    found = collectives(jaxpara.build(run).lower().compile().as_text())
    repeated = [c for c in found if phase_of(c.op_name) == "recompute"]
    assert sorted((c.kind, owner_of(c.op_name), c.calls) for c in repeated) == [("all-gather", "", 3), ("all-reduce", "attention", 3)]
