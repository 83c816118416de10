"""Devices: fake CPU devices when no accelerator is present, and the named-axis mesh over them."""
import os
import re
from importlib.util import find_spec

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxpara.config import AXES
from jaxpara.errors import ConfigError

FAKE_DEVICES = 8
"""CPU devices set up when nobody asks for more."""


def started():
    """Whether JAX has already made its devices (their number cannot be changed any more)."""
    from jax._src import xla_bridge      # there is no public name for this in jax 0.10 to 0.12
    return xla_bridge.backends_are_initialized()


def ensure_devices(needed):
    """Make sure JAX has at least `needed` devices, by setting up fake CPU devices if JAX has not started yet.

    Never lowers a number that XLA_FLAGS or JAX's own setting gives. Raises ConfigError with the numbers and the remedy otherwise.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if re.search(r"[\u2010-\u2015\u2212]", flags):
        raise ConfigError(f"XLA_FLAGS = {flags!r} holds a typographic dash, so XLA ignores the flag or stops. Type two plain hyphens: --xla_…")
    if not started():
        leave_absent_accelerators_alone()
        given = re.search(r"--xla_force_host_platform_device_count=(\d+)", flags)
        jax.config.update("jax_num_cpu_devices", max(FAKE_DEVICES, needed, int(given.group(1)) if given else 0,
                                                     jax.config.jax_num_cpu_devices))
    found = jax.device_count()
    if found < needed:
        platform = jax.devices()[0].platform
        remedy = (f"JAX had already started with {found}: build the largest mesh first, or call "
                  f"jax.config.update('jax_num_cpu_devices', {needed}) before anything else uses JAX."
                  if platform == "cpu" else "Make the mesh smaller, or run on more devices.")
        raise ConfigError(f"The mesh needs {needed} devices and JAX has {found} ({platform}). {remedy}")


def leave_absent_accelerators_alone():
    """Keep JAX on the CPU where its TPU or GPU plugin is installed only to compile.

    JAX starts on the CPU there anyway, but first loads libtpu and checks the CUDA libraries, and both complain at length on stderr; after
    a failed check the plugin cannot compile either. Whatever the user chose stands, and so does JAX's own choice where it sees a device.
    """
    from jax._src import hardware_utils     # the question JAX itself asks; a TPU is known by its PCI numbers
    chosen = jax.config.jax_platforms or os.environ.get("JAX_PLATFORMS")
    present = any(os.path.exists(f"/dev/{name}") for name in ("nvidia0", "nvidiactl", "dxg", "kfd"))
    if not chosen and plugins() and not present and not hardware_utils.num_available_tpu_chips_and_device_id()[0]:
        jax.config.update("jax_platforms", "cpu")


def plugins():
    """The accelerators that JAX could compile for here: of "tpu", "gpu"."""
    cuda = find_spec("jax_plugins") and any(find_spec(f"jax_plugins.xla_cuda{version}") for version in (12, 13))
    return {name for name, there in (("tpu", find_spec("libtpu")), ("gpu", cuda)) if there}


def stay_on_cpu():
    """For a compile-only target: what JAX itself has to compute, it computes on the CPU. Of no effect once JAX has started."""
    if not started():
        jax.config.update("jax_platforms", "cpu")
        ensure_devices(1)


def lay_out(config, devices):
    """`jax.sharding.Mesh` of all of a topology's devices, slow axes outermost and tp innermost.

    config: `config.Mesh` of as many devices. TPU: as `jax.make_mesh` lays it on a TPU that is there, each axis over whole dims of the torus
    where it can (`plan.links.spread`). GPU: in the order of nodes and their devices.
    """
    shape = tuple(config.sizes.values())
    # In the order of the device list, Llama-3 8B on v5p 4×4×4 (fsdp16·tp4) got 96 more permutes (docs/targets.md)
    if devices[0].platform == "tpu":
        return Mesh(mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True), AXES)
    return Mesh(np.asarray(devices).reshape(shape), AXES)


def make_mesh(config, devices=None):
    """`jax.sharding.Mesh` with all six axes over the first devices, axis types Auto.

    config: `config.Mesh` without "auto". On CPU a mesh may leave devices idle; on accelerators that is refused.
    """
    devices = jax.devices() if devices is None else devices
    if len(devices) < config.size:
        raise ConfigError(f"The mesh needs {config.size} devices ({config.text}); there are {len(devices)}.")
    if devices[0].platform != "cpu" and len(devices) != config.size:
        raise ConfigError(f"The mesh {config.text} = {config.size} would leave {len(devices) - config.size} of {len(devices)} "
                          f"{devices[0].platform} devices idle. Make one axis auto, or restrict the visible devices.")
    shape = tuple(config.sizes.values())
    return Mesh(np.asarray(devices[:config.size]).reshape(shape), AXES)


def check_axis_types(mesh):
    """The mesh itself, if all its axes are Auto; ConfigError naming found and wanted types otherwise."""
    wrong = {name: kind for name, kind in zip(mesh.axis_names, mesh.axis_types) if kind != AxisType.Auto}
    if wrong:
        found = ", ".join(f"{name}: {kind.name}" for name, kind in wrong.items())
        raise ConfigError(f"The mesh has axes of another type than Auto ({found}). jax.make_mesh makes Explicit axes by default; pass "
                          "axis_types=(jax.sharding.AxisType.Auto,) * len(names), or use jax.sharding.Mesh.")
    return mesh


def partition(spec):
    """A plain-tuple spec as a `PartitionSpec`: the one place where that happens, so that equal specs compare equal."""
    dims = [None if not dim else dim[0] if len(dim) == 1 else dim for dim in spec]
    while dims and dims[-1] is None:
        dims.pop()
    return PartitionSpec(*dims)


def sharding(mesh, spec):
    """`NamedSharding` of a plain-tuple spec."""
    return NamedSharding(mesh, partition(spec))


def platform_of(mesh):
    """cpu | tpu | gpu."""
    return mesh.devices.flat[0].platform
