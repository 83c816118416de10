"""Meshes and the devices under them."""
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh as JaxMesh, PartitionSpec as P

import jaxpara
from jaxpara import ConfigError
from jaxpara.config import AXES, Mesh
from jaxpara.mesh import check_axis_types, ensure_devices, make_mesh, partition, sharding
from jaxpara.targets import place


@pytest.fixture(autouse=True)
def eight():
    ensure_devices(8)


@pytest.mark.parametrize("sizes", [{}, dict(dp=2, tp=4), dict(fsdp=2, sp=2, tp=2), dict(sp=8), dict(tp=3)], ids=str)
def test_a_mesh_has_all_six_axes_of_type_auto(sizes):
    mesh = make_mesh(Mesh(**sizes))
    assert mesh.axis_names == AXES == ("pp", "dp", "fsdp", "ep", "sp", "tp")
    assert dict(mesh.shape) == dict.fromkeys(AXES, 1) | sizes
    assert set(mesh.axis_types) == {AxisType.Auto}


def test_the_last_axis_is_of_neighbours():
    """tp, for the fastest network, runs over devices 0, 1, 2, 3; dp over 0 and 4."""
    grid = make_mesh(Mesh(dp=2, tp=4)).devices.reshape(2, 4)
    assert grid.tolist() == np.array(jax.devices()[:8]).reshape(2, 4).tolist()


def test_more_devices_than_there_are_is_an_error_with_both_numbers():
    with pytest.raises(ConfigError, match=r"needs 16 devices \(dp4·tp4\); there are 8"):
        make_mesh(Mesh(dp=4, tp=4), jax.devices()[:8])
    with pytest.raises(ConfigError, match=r"needs 1024 devices and JAX has \d+ \(cpu\).*jax_num_cpu_devices', 1024"):
        ensure_devices(1024)


def test_a_cpu_mesh_may_leave_devices_idle_and_uses_the_first():
    assert make_mesh(Mesh(dp=3)).devices.ravel().tolist() == jax.devices()[:3]


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_an_accelerator_mesh_may_not(platform):
    devices = [SimpleNamespace(platform=platform, id=i) for i in range(8)]
    with pytest.raises(ConfigError, match=rf"dp2·tp2 = 4 would leave 4 of 8 {platform} devices idle.*auto"):
        make_mesh(Mesh(dp=2, tp=2), devices)


def test_types_of_a_foreign_mesh():
    foreign = JaxMesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    assert check_axis_types(foreign) is foreign
    explicit = JaxMesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"), axis_types=(AxisType.Auto, AxisType.Explicit))
    with pytest.raises(ConfigError, match=r"another type than Auto \(b: Explicit\)"):
        check_axis_types(explicit)


def test_a_target_names_its_devices():
    run = jaxpara.load("gpt_tp")
    for devices in (8, 12):
        if devices <= jax.device_count():
            placed, mesh = place(run, f"cpu:{devices}")
            assert placed.mesh.size == mesh.size == 8
    with pytest.raises(ConfigError, match="needs 8 devices and the target cpu:4 has 4. Target: cpu:8"):
        place(run, "cpu:4")


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_an_auto_axis_is_filled_from_the_target(devices):
    run, mesh = place(jaxpara.load("gpt2_124m"), f"cpu:{devices}")
    assert run.mesh.fsdp == mesh.size == devices and run.mesh.auto is None


def test_an_auto_axis_that_cannot_be_filled_is_an_error():
    run = jaxpara.load("gpt2_124m", {"mesh.tp": 3})
    with pytest.raises(ConfigError, match="mesh.fsdp = auto cannot be filled: the other axes multiply to 3, which does not divide 8"):
        place(run, "cpu:8")


@pytest.mark.parametrize("target", ["cpu", "cpu:0", "cpu:", "CPU:8", "cpu:8 "])
def test_an_unknown_target_is_an_error_with_an_example(target):
    with pytest.raises(ConfigError, match="Unknown target .*cpu:8"):
        place(jaxpara.load("gpt_single"), target)


def test_specs_that_mean_the_same_are_equal():
    assert partition((("dp",), (), ("fsdp", "sp"), (), ())) == P("dp", None, ("fsdp", "sp"))
    assert partition(((), ())) == P() and partition(()) == P()
    mesh = make_mesh(Mesh(dp=2, tp=2))
    assert sharding(mesh, (("dp",), ())) == jax.NamedSharding(mesh, P("dp"))


def test_shapes_in_words():
    assert Mesh(fsdp=2, sp=2, tp=2).text == "fsdp2·sp2·tp2" and Mesh().text == "one device"


def test_build_takes_a_run_made_by_hand():
    """Fields left to be derived are derived, and violations come before devices are counted."""
    program = jaxpara.build(jaxpara.Run())
    assert program.run.model.kv_heads == program.run.model.heads
    with pytest.raises(ConfigError) as raised:
        jaxpara.build(jaxpara.Run().change(mesh=dict(tp=3, dp=-1), train=dict(batch=0)))
    assert len(raised.value.violations) == 4
