"""Targets: names, devices, layout of a mesh over them, links. What needs libtpu or the CUDA plugin is skipped without."""
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import mesh_utils
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxpara
from jaxpara import ConfigError, mesh as mesh_module, targets
from jaxpara.config import AXES, Mesh
from jaxpara.hlo import axes_of, collectives
from jaxpara.mesh import ensure_devices
from jaxpara.plan.hardware import CHIPS, GPUS, SILICON, TPUS, gpu_config, parse_target
from jaxpara.plan.links import link_seconds, spread
from jaxpara.targets import compile_only, device_count, fit, place

tpu = pytest.mark.skipif(find_spec("libtpu") is None, reason="compiling for TPU needs libtpu (jaxpara[tpu])")
gpu = pytest.mark.skipif(find_spec("jax_plugins") is None or find_spec("jax_plugins.xla_cuda13") is None,
                         reason="compiling for GPU needs the CUDA plugin (jaxpara[gpu])")


@pytest.fixture(autouse=True)
def eight():
    ensure_devices(8)


def meshed(**sizes):
    """A small run on a mesh."""
    return jaxpara.load("gpt_single", {"train.batch": 32, **{f"mesh.{axis}": size for axis, size in sizes.items()}})


NAMES = {"cpu:8": 8, "tpu:v4:2x2x1": 4, "tpu:v4:4x4x4": 64, "tpu:v5e:1x1": 1, "tpu:v5e:2x4": 8, "tpu:v5e:16x16": 256, "tpu:v5p:2x2x1": 4,
         "tpu:v5p:4x4x4": 64, "tpu:v5p:2x2x3": 12, "tpu:v5p:8x8x12": 768, "tpu:v6e:1x1": 1, "tpu:v6e:8x8": 64, "tpu:tpu7x:1x1x1": 2,
         "tpu:tpu7x:2x2x1": 8, "tpu:tpu7x:4x4x8": 256, "gpu:h100:4x8": 32, "gpu:a100:1x1": 1, "gpu:b200:300x8": 2400, "gpu:h200:3x4": 12}


@pytest.mark.parametrize("name, devices", NAMES.items())
def test_devices_of_a_name(name, devices):
    assert device_count(name) == devices and parse_target(name).topology in name
    assert compile_only(name) == (not name.startswith("cpu")) and not compile_only(None)


@pytest.mark.parametrize("name, message", [
    ("tpu", "Unknown target 'tpu'.*tpu:v5p:4x4x4"), ("xpu:8", "Unknown target.*cpu:8"), ("gpu:h100", "Unknown target.*gpu:h100:4x8"),
    ("tpu:v9:4x4", "Unknown chip 'v9'.*v4, v5e, v5p, v6e, tpu7x"), ("gpu:v5p:4x4x4", "Unknown chip 'v5p'.*a100, h100, h200, b200"),
    ("tpu:v5p:4x", "Unknown shape '4x'"), ("tpu:v5p:0x4x4", "Unknown shape"), ("tpu:v5p:4x4x4 ", "Unknown shape"),
    ("tpu:v5p:4x4", "3 dims.*Nearest: tpu:v5p:4x4x1"), ("tpu:v5e:4x4x4", "2 dims.*Nearest: tpu:v5e:4x4"),
    ("tpu:v5p:3x4x5", "first two even.*Nearest: tpu:v5p:4x4x5"), ("tpu:v6e:1x4", "Nearest: tpu:v6e:2x4"),
    ("tpu:v5p:64x64x64", "has 262144 chips.*9216.*16x16x24"),
    ("gpu:h100:8", "NODESxDEVICES.*Nearest: gpu:h100:1x8"), ("gpu:h100:1x64", "up to 8 h100 per node.*Nearest: gpu:h100:8x8"),
])
def test_a_name_that_means_nothing_is_an_error_with_the_nearest(name, message):
    for ask in (device_count, lambda name: place(meshed(), name)):
        with pytest.raises(ConfigError, match=message):
            ask(name)


def test_an_auto_axis_is_filled_from_the_topology():
    run = jaxpara.load("llama3_8b")
    assert [fit(run, name).mesh.fsdp for name in ("tpu:v5p:4x4x4", "tpu:tpu7x:4x4x4", "gpu:h100:4x8", "cpu:64")] == [16, 32, 8, 16]


@pytest.mark.parametrize("sizes, message", [
    (dict(fsdp=8, tp=2), r"needs 16 devices \(fsdp8·tp2\).*has 64; none may be left idle. Nearest: mesh.fsdp = 32, or mesh.tp = 8"),
    (dict(fsdp=32, tp=4), "needs 128 devices.*Nearest: mesh.fsdp = 16, or mesh.tp = 2"), (dict(fsdp=8, tp=3), "Nearest: mesh.tp = 8"),
    (dict(dp=5, tp=3), "Make one axis auto")])
def test_a_mesh_must_fill_the_topology(sizes, message):
    with pytest.raises(ConfigError, match=message):
        fit(jaxpara.Run().change(mesh=sizes), "tpu:v5p:4x4x4")


def test_names_and_links_need_no_jax():
    code = ("import sys, jaxpara; from jaxpara import targets; from jaxpara.plan.links import link_seconds; "
            "run = targets.fit(jaxpara.load('llama3_8b'), 'tpu:v5p:4x4x4'); link_seconds('tpu:v5p:4x4x4', run.mesh, ('tp',), 'all-gather', 1); "
            "sys.exit('jax' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
def test_figures_of_a_chip_are_plausible(chip):
    """A figure in the wrong unit, or per chip instead of per device, falls out of these."""
    assert 0.7 * chip.memory < chip.usable < chip.memory and 15e9 < chip.memory < 200e9
    assert 100 < chip.flops / chip.bandwidth < 600 and 0.85 * chip.link_sheet < chip.link <= chip.link_sheet
    assert 3 < chip.bandwidth / chip.link < 100 and 3e9 < chip.out <= chip.link / 3
    assert (chip.dims in (2, 3)) == (chip in TPUS) and (chip in GPUS) == (chip.name in SILICON)


def test_figures_of_the_data_sheets():
    v5p, h100, tpu7x = CHIPS["v5p"], CHIPS["h100"], CHIPS["tpu7x"]
    assert v5p.flops == 459e12 and v5p.dims * 2 * 2 * v5p.link_sheet == 1200e9       # per chip, both ways
    assert tpu7x.devices * tpu7x.flops == 2307e12 and tpu7x.devices * tpu7x.dims * 2 * 2 * tpu7x.link_sheet == 1200e9
    assert h100.flops == 989e12 and h100.node * h100.out == 400e9 and h100.usable == int(0.75 * 84_942_979_072)
    assert CHIPS["v4"].usable == int(30.75 * 2 ** 30)
    assert "major: 9 minor: 0" in gpu_config(h100) and f"memory_bandwidth: {3352 * 10 ** 9} " in gpu_config(h100)


@dataclass(frozen=True)
class Device:
    id: int
    platform: str
    device_kind: str
    coords: tuple
    core_on_chip: int
    process_index: int = 0


def fake_torus(*shape):
    """Devices as JAX has them, enough to lay a mesh over them."""
    return [Device(id=i, platform="tpu", device_kind="TPU7x" if len(shape) == 4 else "TPU v5", coords=(*place[:3], 0, 0)[:3],
                            core_on_chip=place[3] if len(shape) == 4 else 0) for i, place in enumerate(np.ndindex(*shape))]


def extents(grid, axis, dims):
    """Distinct places in each dim of a group along one axis of an array of devices."""
    group = np.moveaxis(grid, axis, -1).reshape(-1, grid.shape[axis])[0]
    return tuple(len({(*device.coords, device.core_on_chip)[dim] for device in group}) for dim in dims)


@pytest.mark.parametrize("shape, sizes", [
    ((4, 4, 4), dict(fsdp=16, tp=4)), ((4, 4, 4), dict(fsdp=4, tp=16)), ((4, 4, 4), dict(dp=2, fsdp=4, sp=2, tp=4)), ((4, 4, 4), dict(fsdp=64)),
    ((4, 4, 4), dict(dp=8, tp=8)), ((4, 4, 12), dict(pp=2, fsdp=12, tp=8)), ((2, 2, 4), dict(fsdp=4, sp=2, tp=2)),
    ((8, 8, 1), dict(dp=2, fsdp=16, tp=2)), ((16, 16, 1), dict(fsdp=16, tp=16)), ((16, 16, 1), dict(pp=4, fsdp=8, tp=8)),
    ((4, 4, 4, 2), dict(fsdp=32, tp=4)), ((4, 4, 4, 2), dict(dp=4, fsdp=4, tp=8)), ((4, 4, 8, 2), dict(fsdp=128, tp=2)),
    ((8, 8, 8), dict(dp=2, fsdp=16, ep=2, sp=2, tp=4))], ids=str)
def test_the_plan_knows_how_jax_lays_a_mesh_over_a_torus(shape, sizes):
    sizes = {axis: sizes.get(axis, 1) for axis in AXES}
    grid = mesh_utils.create_device_mesh(tuple(sizes.values()), fake_torus(*shape), allow_split_physical_axes=True)
    laid = spread(sizes, shape)
    assert laid == {axis: extents(grid, i, range(len(shape))) for i, axis in enumerate(AXES)}
    assert all(prod(laid[axis]) == sizes[axis] for axis in AXES)


@pytest.mark.parametrize("target, sizes, axes, kind, rate", [
    ("tpu:v5p:4x4x4", dict(fsdp=16, tp=4), ("tp",), "all-gather", 180e9),               # a ring, both ways
    ("tpu:v5p:4x4x4", dict(fsdp=16, tp=4), ("fsdp",), "reduce-scatter", 360e9),         # two rings
    ("tpu:v5p:4x4x4", dict(fsdp=16, tp=4), ("fsdp", "tp"), "all-reduce", 540e9),
    ("tpu:v5p:4x4x4", dict(fsdp=16, tp=4), ("tp",), "permute", 90e9),
    ("tpu:v5p:4x4x4", dict(fsdp=32, tp=2), ("tp",), "all-gather", 90e9),                # half of a dim does not wrap around
    ("tpu:v5p:2x2x4", dict(fsdp=8, tp=2), ("tp",), "all-gather", 90e9),                 # nor does a dim of less than a cube
    ("tpu:v5p:2x2x4", dict(fsdp=4, tp=4), ("tp",), "all-gather", 180e9),                # a plane of two lines
    ("tpu:v5e:16x16", dict(fsdp=16, tp=16), ("tp",), "all-gather", 90e9),
    ("tpu:v5e:16x16", dict(fsdp=16, tp=16), ("tp",), "all-to-all", 90e9 / (16 * 16 / 60)),
    ("tpu:tpu7x:4x4x4", dict(fsdp=64, tp=2), ("tp",), "all-gather", 90e9),
    ("gpu:h100:4x8", dict(fsdp=4, tp=8), ("tp",), "all-gather", 450e9),
    ("gpu:h100:4x8", dict(fsdp=4, tp=8), ("fsdp",), "all-gather", 50e9),                # one card of eight
    ("gpu:h100:4x8", dict(fsdp=32), ("fsdp",), "reduce-scatter", 400e9),                # all eight
    ("gpu:h100:4x8", dict(fsdp=32), ("fsdp",), "all-to-all", 50e9),
    ("gpu:b200:2x8", dict(pp=2, dp=2, tp=4), ("pp", "dp"), "all-reduce", 100e9),
    ("gpu:h100:2x6", dict(fsdp=3, tp=4), ("tp",), "all-gather", 100e9)], ids=str)      # the second of three tp groups lies in both nodes
def test_seconds_on_the_links(target, sizes, axes, kind, rate):
    assert link_seconds(target, Mesh(**sizes), axes, kind, 1e9) == pytest.approx(1e9 / rate)
    assert link_seconds(target, Mesh(**sizes), (*axes, "ep"), kind, 2e9) == pytest.approx(2e9 / rate)


def test_seconds_published():
    """Scaling book: 34 MB gathered over four v5e take 560 µs in its model. 413 GB/s per GPU over a SuperPod of 1024 H100."""
    assert link_seconds("tpu:v5e:4x4", Mesh(fsdp=4, tp=4), ("tp",), "all-gather", 34e6 * 3 / 4) == pytest.approx(560e-6, rel=0.02)
    assert link_seconds("gpu:h100:128x8", Mesh(fsdp=1024), ("fsdp",), "all-gather", 1e9) == pytest.approx(1e9 / 413e9, rel=0.04)


def test_seconds_of_small_calls_and_of_none():
    cube = Mesh(fsdp=16, tp=4)
    assert link_seconds("tpu:v5p:4x4x4", cube, ("tp",), "all-gather", 8, calls=10) == pytest.approx(10 * 2 * 1e-6)     # two hops each
    assert link_seconds("tpu:v5p:4x4x4", cube, ("fsdp",), "all-reduce", 8) == pytest.approx(8e-6)
    assert link_seconds("tpu:v5p:4x4x4", cube, ("dp",), "all-reduce", 8) == 0
    assert link_seconds("cpu:64", cube, ("tp",), "all-gather", 8) is None


def test_a_missing_plugin_is_an_error_that_names_the_extra(monkeypatch):
    monkeypatch.setattr(mesh_module, "find_spec", lambda name: None)
    for name, extra in (("tpu:v5p:2x2x1", "tpu"), ("gpu:h100:1x4", "gpu")):
        with pytest.raises(ConfigError, match=rf'^Compiling for {name} needs .*: pip install "jaxpara\[{extra}\]"\.$'):
            place(meshed(fsdp=4), name)


def described_by(monkeypatch, describe):
    from jax.experimental import topologies
    monkeypatch.setattr(mesh_module, "find_spec", lambda name: name)
    monkeypatch.setattr(topologies, "get_topology_desc", describe)


def test_the_compilers_own_complaint_is_one_line(monkeypatch):
    def describe(**options):
        raise RuntimeError("INVALID_ARGUMENT: no such thing\n=== Source Location Trace: ===\nlibtpu.cc:1")
    described_by(monkeypatch, describe)
    with pytest.raises(ConfigError, match=r"^tpu:v5p:2x2x1 is not a topology that the compiler knows: INVALID_ARGUMENT: no such thing$"):
        place(meshed(fsdp=4), "tpu:v5p:2x2x1")


def test_a_plugin_that_jax_started_without(monkeypatch):
    def describe(**options):
        raise NotImplementedError("topology not implemented for cuda")
    described_by(monkeypatch, describe)
    with pytest.raises(ConfigError, match="started without the plugin that compiles for gpu:h100:1x4.*JAX_PLATFORMS=cpu"):
        place(meshed(fsdp=4), "gpu:h100:1x4")


@pytest.mark.parametrize("chosen, installed, devices, chips, expected", [
    ("", True, (), 0, ["cpu"]), ("", False, (), 0, []), ("tpu,cpu", True, (), 0, []), ("", True, ("/dev/nvidia0",), 0, []), ("", True, (), 4, [])])
def test_jax_is_kept_off_accelerators_that_are_not_there_and_only_then(monkeypatch, chosen, installed, devices, chips, expected):
    updates = []
    monkeypatch.setattr(mesh_module, "jax", SimpleNamespace(config=SimpleNamespace(
        jax_platforms=chosen, update=lambda name, value: updates.append(value))))
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(mesh_module, "plugins", lambda: {"tpu"} if installed else set())
    monkeypatch.setattr(os.path, "exists", lambda path: path in devices)
    monkeypatch.setattr("jax._src.hardware_utils.num_available_tpu_chips_and_device_id", lambda: (chips, None))
    mesh_module.leave_absent_accelerators_alone()
    assert updates == expected


def test_a_compiler_that_counts_otherwise_is_an_error(monkeypatch):
    described_by(monkeypatch, lambda **options: SimpleNamespace(devices=fake_torus(2, 2, 2)))
    with pytest.raises(ConfigError, match="should have 4 devices and the compiler counts 8"):
        place(meshed(fsdp=4), "tpu:v5p:2x2x1")


def test_what_libtpu_is_told_is_told_to_nobody_else(monkeypatch):
    seen = {}
    described_by(monkeypatch, lambda **options: seen.update({name: os.environ.get(name) for name in targets.LIBTPU} | options)
                 or SimpleNamespace(devices=fake_torus(4, 4, 4)))
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "mine")
    monkeypatch.delenv("TPU_ACCELERATOR_TYPE", raising=False)
    place(meshed(fsdp=16, tp=4), "tpu:v5p:4x4x4")
    assert seen["TPU_WORKER_HOSTNAMES"] == "localhost" and seen["ALLOW_MULTIPLE_LIBTPU_LOAD"] == "1" and seen["wrap"] == (True, True, True)
    assert os.environ["TPU_WORKER_HOSTNAMES"] == "mine" and "TPU_ACCELERATOR_TYPE" not in os.environ


def exchanged(mesh):
    """[(kind, axes)] of a program compiled for `mesh` that gathers over each axis alone, then over all together, and sends along each."""
    live = [axis for axis in AXES if mesh.shape[axis] > 1]

    def body(x):
        for axis in live:
            ring = [(i, (i + 1) % mesh.shape[axis]) for i in range(mesh.shape[axis])]
            x = lax.ppermute(lax.psum_scatter(lax.all_gather(x, axis, tiled=True) * x[0, 0], axis, tiled=True), axis, ring)
        return lax.psum(x, tuple(live))
    where = NamedSharding(mesh, P(tuple(live)))
    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=where.spec, out_specs=P(), check_vma=False))
    text = program.lower(jax.ShapeDtypeStruct((mesh.size * 512, 512), jnp.float32, sharding=where)).compile().as_text()
    return {(found.kind, axes_of(found.groups, found.kind, dict(mesh.shape))) for found in collectives(text)}, [(axis,) for axis in live]


def check_axes(mesh):
    """The place in the mesh, not the device's id, is the number that the compiled text has: `axes_of` relies on it."""
    found, axes = exchanged(mesh)
    assert None not in {over for _, over in found}
    assert {("permute", over) for over in axes} <= found and set(axes) <= {over for kind, over in found if kind == "all-gather"}
    assert ("all-reduce", tuple(axis for axis, in axes)) in found


@tpu
@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("tpu")])
def test_libtpu_counts_as_we_do(name):
    devices = targets.tpu_devices(parse_target(name))
    assert len(devices) == NAMES[name] and devices[0].platform == "tpu"


@tpu
def test_tp_is_a_ring_of_neighbours_on_a_torus():
    run, mesh = place(meshed(fsdp=16, tp=4), "tpu:v5p:4x4x4")
    assert run.mesh.size == mesh.size == 64 and mesh.axis_names == AXES
    for group in mesh.devices.reshape(16, 4):
        coords = np.array([device.coords for device in group])
        assert [len(set(dim)) for dim in coords.T] == [4, 1, 1] and coords[:, 0].tolist() == [0, 1, 2, 3]
    assert 1 / link_seconds("tpu:v5p:4x4x4", run.mesh, ("tp",), "all-gather", 1.0, calls=0) == pytest.approx(180e9)


@tpu
@pytest.mark.parametrize("name, sizes", [("tpu:v5p:2x2x4", dict(dp=2, fsdp=4, tp=2)), ("tpu:tpu7x:2x2x1", dict(fsdp=4, tp=2)),
                                         ("tpu:v6e:2x4", dict(fsdp=2, sp=2, tp=2)), ("tpu:v4:2x2x2", dict(fsdp=4, tp=2))], ids=str)
def test_collectives_on_a_tpu_are_attributed(name, sizes):
    check_axes(place(meshed(**sizes), name)[1])


SMALL = {"model.layers": 1, "model.width": 64, "model.ffn": 128, "train.seq": 64}


def only_lowers(name, **sizes):
    run = jaxpara.load("gpt_single", {**SMALL, "train.batch": 8, **{f"mesh.{axis}": size for axis, size in sizes.items()}})
    program = jaxpara.build(run, name)
    assert program.lower().compile().memory_analysis().argument_size_in_bytes > 0
    with pytest.raises(ConfigError, match=f"{name} is only compiled for"):
        program.init()


@tpu
def test_a_program_for_tpu_lowers_and_does_not_run():
    only_lowers("tpu:v5e:2x4", fsdp=4, tp=2)


def is_not_heard_of(name):
    """Neither when JAX starts on fake CPU devices nor when it compiles: no line on stderr, and JAX stays on the CPU."""
    code = ("import jax, jaxpara; from jaxpara.mesh import ensure_devices; from jaxpara.targets import place; {}; "
            "place(jaxpara.load('gpt2_124m'), '{}'); print(jax.devices()[0].platform, len(jax.devices()))")
    environment = {name: value for name, value in os.environ.items() if name not in {*targets.LIBTPU, "JAX_PLATFORMS", "XLA_FLAGS"}}
    for first in ("ensure_devices(1)", "pass"):
        done = subprocess.run([sys.executable, "-c", code.format(first, name)], capture_output=True, encoding="utf-8", env=environment)
        assert (done.stdout, done.stderr, done.returncode) == ("cpu 8\n", "", 0)


@tpu
def test_libtpu_without_a_tpu_is_not_heard_of():
    is_not_heard_of("tpu:v5e:2x2")


@gpu
def test_the_cuda_plugin_without_a_gpu_is_not_heard_of():
    is_not_heard_of("gpu:h100:1x4")


@gpu
@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("gpu")])
def test_xla_counts_gpus_as_we_do(name):
    devices = targets.gpu_devices(parse_target(name))
    assert len(devices) == NAMES[name] and devices[-1].process_index == parse_target(name).shape[0] - 1
    assert SILICON[parse_target(name).chip.name].name == devices[0].device_kind


@gpu
def test_tp_stays_inside_a_node():
    _, mesh = place(meshed(fsdp=4, tp=8), "gpu:h100:4x8")
    nodes = [{device.process_index for device in group} for group in mesh.devices.reshape(4, 8)]
    assert nodes == [{0}, {1}, {2}, {3}]


@gpu
def test_collectives_on_gpus_are_attributed():
    check_axes(place(meshed(dp=2, fsdp=2, tp=4), "gpu:h100:2x8")[1])


@gpu
@pytest.mark.parametrize("chip", [chip.name for chip in GPUS])
def test_a_program_for_gpu_lowers_and_does_not_run(chip):
    only_lowers(f"gpu:{chip}:2x4", fsdp=4, tp=2)
