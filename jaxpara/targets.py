"""Where a program is built for: the devices of this process, or a named target that is only compiled for."""
import re

from jaxpara.config import fill_auto
from jaxpara.errors import ConfigError


def device_count(target):
    """Devices of a named target ("cpu:8"), without JAX; ConfigError for an unknown one."""
    match = re.fullmatch(r"cpu:([1-9]\d*)", target)
    if not match:
        raise ConfigError(f"Unknown target {target!r}. This version compiles for cpu:N, N being a number of devices, such as cpu:8.")
    return int(match.group(1))


def fit(run, target):
    """`run` with its "auto" axis filled from a named target; ConfigError when its mesh needs more devices. Without JAX."""
    devices = device_count(target)
    run = fill_auto(run, devices)
    if run.mesh.size > devices:
        raise ConfigError(f"The mesh needs {run.mesh.size} devices and the target {target} has {devices}. Target: cpu:{run.mesh.size}.")
    return run


def place(run, target=None):
    """(run with its "auto" axis filled, jax Mesh) for `target`: None = this process's devices, "cpu:N" = N fake CPU devices.

    Sets up fake CPU devices when no accelerator is present. Raises ConfigError for an unknown target or a mesh that does not fit.
    """
    import jax

    from jaxpara.mesh import ensure_devices, make_mesh
    if target is None:
        ensure_devices(1 if run.mesh.auto else run.mesh.size)
        run = fill_auto(run, jax.device_count())
        return run, make_mesh(run.mesh)
    run, devices = fit(run, target), device_count(target)
    ensure_devices(devices)
    return run, make_mesh(run.mesh, jax.devices("cpu")[:devices])
