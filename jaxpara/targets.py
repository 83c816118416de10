"""Where a program is built for: the devices of this process, or a named target that is only compiled for.

Compiling for TPU needs libtpu, for GPU the CUDA plugin of JAX; neither needs the hardware. `plan/hardware.py` knows the names.
"""
import os

from jaxpara.config import fill_auto
from jaxpara.errors import ConfigError
from jaxpara.plan.hardware import gpu_config, parse_target

LIBTPU = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": "v5p-8"}
"""What keeps libtpu, when it is loaded, from asking Google Cloud's metadata server where it runs, from complaining of what it does not find
there, and from letting only one process at a time load it. None of this matters without a TPU; the type is any valid one."""


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
    mesh = run.mesh
    if asked.platform == "cpu" and mesh.size > asked.devices:
        raise ConfigError(f"The mesh needs {mesh.size} devices and the target {target} has {asked.devices}. Target: cpu:{mesh.size}.")
    if asked.platform != "cpu" and mesh.size != asked.devices:
        rest = {axis: mesh.size // size for axis, size in mesh.sizes.items() if size > 1 or mesh.size == 1}
        fits = [f"mesh.{axis} = {asked.devices // others}" for axis, others in rest.items() if asked.devices % others == 0]
        raise ConfigError(f"The mesh needs {mesh.size} devices ({mesh.text}) and the target {target} has {asked.devices}; none may be left idle. "
                          f"{'Nearest: ' + ', or '.join(fits) if fits else 'Make one axis auto, or take another topology'}.")
    return run


def place(run, target=None):
    """(run with its "auto" axis filled, jax Mesh) for `target`: None = this process's devices, else a named one.

    Sets up fake CPU devices when no accelerator is present. Raises ConfigError for an unknown target, a mesh that does not fit, or a plugin
    that is not installed. Of a compile-only target's mesh nothing can be computed; JAX itself stays on the CPU if it has not started.
    """
    import jax

    from jaxpara.mesh import ensure_devices, lay_out, make_mesh, plugins, stay_on_cpu
    if target is None:
        ensure_devices(1 if run.mesh.auto else run.mesh.size)
        run = fill_auto(run, jax.device_count())
        return run, make_mesh(run.mesh)
    run, asked = fit(run, target), parse_target(target)
    if asked.platform == "cpu":
        ensure_devices(asked.devices)
        return run, make_mesh(run.mesh, jax.devices("cpu")[:asked.devices])
    if asked.platform not in plugins():
        library = "libtpu" if asked.platform == "tpu" else "the CUDA plugin of JAX"
        raise ConfigError(f'Compiling for {target} needs {library}: pip install "jaxpara[{asked.platform}]".')
    stay_on_cpu()
    devices = tpu_devices(asked) if asked.platform == "tpu" else gpu_devices(asked)
    return run, lay_out(run.mesh, devices)


def tpu_devices(target):
    """The devices of a TPU slice (`plan.hardware.Target`), compile-only."""
    options = {}
    # libtpu knows that dims of 16 of v5e and v6e wrap around, but takes one cube for a slice cut out of it: then Llama-3 8B (fsdp16·tp4) got
    # 96 more permutes (docs/targets.md), and gathers over the whole cube become all-reduces
    if target.cubes:
        options["wrap"] = (True, True, True)
    if target.chip.name == "v4":
        options["chip_config_name"] = "megacore"        # one device per chip, as JAX has on v4; libtpu's default is two
    if target.devices == target.chip.devices:
        options["chips_per_host_bounds"] = (1, 1, 1)
    before = {name: os.environ.get(name) for name in LIBTPU}
    os.environ.update(LIBTPU)
    try:
        return described(target, "tpu", topology_name=f"{target.chip.name}:{target.topology}", **options)
    finally:
        for name, value in before.items():      # what a process started from here sees must not depend on whether we compiled
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


def gpu_devices(target):
    """The devices of a GPU cluster (`plan.hardware.Target`), compile-only."""
    return described(target, "cuda", topology=f"1x{target.topology}", target_config=gpu_config(target.chip))


def described(target, platform, **options):
    """Devices of a topology as the plugin describes it; ConfigError if it does not know it, or counts otherwise than `Target`."""
    from jax.experimental.topologies import get_topology_desc
    try:
        devices = list(get_topology_desc(platform=platform, **options).devices)
    except NotImplementedError:
        raise ConfigError(f"JAX started without the plugin that compiles for {target.name}, since there is no such device here. Name the target "
                          "before anything else uses JAX, or set JAX_PLATFORMS=cpu.") from None
    except RuntimeError as error:       # JaxRuntimeError is one
        raise ConfigError(f"{target.name} is not a topology that the compiler knows: {str(error).splitlines()[0][:150]}") from None
    if len(devices) != target.devices:
        raise ConfigError(f"{target.name} should have {target.devices} devices and the compiler counts {len(devices)}: another version?")
    return devices
