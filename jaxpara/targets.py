"""Where a program is built for: the devices of this process, or a named target that is only compiled for.

Compiling for TPU needs libtpu, for GPU the CUDA plugin of JAX; neither needs the hardware. `plan/hardware.py` knows the names.
"""
import os
from importlib.util import find_spec

from jaxpara.config import fill_auto
from jaxpara.errors import ConfigError
from jaxpara.plan.hardware import bandwidth, gpu_config, parse_target

CUBE = 4
"""v4, v5p and tpu7x slices wrap around where they are made of whole 4×4×4 cubes: the optical switches join cubes, not chips."""


def device_count(target):
    """Devices of a named target ("cpu:8", "tpu:v5p:4x4x4"), without JAX; ConfigError for an unknown one."""
    return parse_target(target).devices


def compile_only(target):
    """Whether a target (or None: this process's devices) has no devices that could run anything."""
    return target is not None and parse_target(target).platform != "cpu"


def fit(run, target):
    """`run` with its "auto" axis filled from a named target; ConfigError when its mesh does not fit. Without JAX.

    A mesh may leave fake CPU devices idle, not TPUs or GPUs.
    """
    asked = parse_target(target)
    run = fill_auto(run, asked.devices)
    if run.mesh.size > asked.devices or (asked.platform != "cpu" and run.mesh.size != asked.devices):
        remedy = f"Target: cpu:{run.mesh.size}" if asked.platform == "cpu" else "Change the mesh, make one axis auto, or take another topology"
        raise ConfigError(f"The mesh needs {run.mesh.size} devices ({run.mesh.text}) and the target {target} has {asked.devices}. {remedy}.")
    return run


def place(run, target=None):
    """(run with its "auto" axis filled, jax Mesh) for `target`: None = this process's devices, else a named one.

    Sets up fake CPU devices when no accelerator is present. Raises ConfigError for an unknown target or a mesh that does not fit.
    """
    import jax

    from jaxpara.mesh import ensure_devices, lay_out, make_mesh, stay_on_cpu
    if target is None:
        ensure_devices(1 if run.mesh.auto else run.mesh.size)
        run = fill_auto(run, jax.device_count())
        return run, make_mesh(run.mesh)
    run, asked = fit(run, target), parse_target(target)
    if asked.platform == "cpu":
        ensure_devices(asked.devices)
        return run, make_mesh(run.mesh, jax.devices("cpu")[:asked.devices])
    stay_on_cpu()
    devices = tpu_devices(asked) if asked.platform == "tpu" else gpu_devices(asked)
    return run, lay_out(run.mesh, devices)


def tpu_devices(target):
    """Devices of a TPU slice, compile-only."""
    if find_spec("libtpu") is None:
        raise ConfigError(f'Compiling for {target.name} needs libtpu: pip install "jaxpara[tpu]".')
    # libtpu asks Google Cloud's metadata server where it runs, complains of what it does not find there, and lets one process at a time
    # load it: none of this matters without a TPU
    for name, value in {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_WORKER_HOSTNAMES": "localhost",
                        "TPU_ACCELERATOR_TYPE": "v5p-8"}.items():
        os.environ.setdefault(name, value)
    options = {}
    if target.chip.dims == 3 and all(size % CUBE == 0 for size in target.shape):
        options["wrap"] = (True, True, True)
    if target.chip.name == "v4":
        options["chip_config_name"] = "megacore"        # one device per chip, as JAX runs on v4
    if target.devices == target.chip.devices:
        options["chips_per_host_bounds"] = (1, 1, 1)
    return described(target, "tpu", topology_name=f"{target.chip.name}:{target.topology}", **options)


def gpu_devices(target):
    """Devices of a GPU cluster, compile-only."""
    if find_spec("jax_plugins") is None or not any(find_spec(f"jax_plugins.xla_cuda{version}") for version in (12, 13)):
        raise ConfigError(f'Compiling for {target.name} needs the CUDA plugin of JAX: pip install "jaxpara[gpu]".')
    return described(target, "cuda", topology=f"1x{target.topology}", target_config=gpu_config(target.chip))


def described(target, platform, **options):
    from jax.errors import JaxRuntimeError
    from jax.experimental.topologies import get_topology_desc
    try:
        devices = list(get_topology_desc(platform=platform, **options).devices)
    except JaxRuntimeError as error:
        raise ConfigError(f"The compiler knows no topology {target.name}: {str(error).splitlines()[0]}") from None
    if len(devices) != target.devices:
        raise ConfigError(f"{target.name} should have {target.devices} devices; the compiler says {len(devices)}.")
    return devices


def speed(target, mesh, axes, kind):
    """Bytes/s at which one device sends over these mesh axes (see `plan.hardware.bandwidth`), None on CPU. mesh: of `place`."""
    asked = parse_target(target)
    if asked.chip is None:
        return None
    index = tuple(slice(None) if axis in axes else 0 for axis in mesh.axis_names)
    devices = mesh.devices[index].flatten()
    nodes = {device: (device.process_index, 0) for device in devices}
    places = [tuple(device.coords) if asked.platform == "tpu" else (nodes[device][0], device.id) for device in devices]
    return bandwidth(asked, places, kind)
