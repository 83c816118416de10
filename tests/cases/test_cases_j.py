"""CASES.md J: processes that JAX, or the user's flags, have already set up. Each is a fresh Python."""
import os
import subprocess
import sys

import pytest

NEEDED = "from jaxpara.mesh import ensure_devices\nimport jax\n"


def python(code, flags=None):
    """(exit status, standard output, standard error) of `code` with XLA_FLAGS = flags, and no other JAX settings."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    done = subprocess.run([sys.executable, "-c", NEEDED + code], capture_output=True, text=True, timeout=120,
                          env=clean | {"JAX_PLATFORMS": "cpu"} | ({} if flags is None else {"XLA_FLAGS": flags}))
    return done.returncode, done.stdout.strip(), done.stderr


def test_j1_devices_asked_for_after_jax_has_started_are_an_error_with_the_remedy():
    """JAX was used and has one device; eight are needed: found, wanted and what to do, not a mesh of one."""
    status, out, error = python("jax.devices()\nensure_devices(8)\nprint('went on')")
    assert status == 1 and not out
    for part in ("ConfigError", "needs 8 devices and JAX has 1 (cpu)", "jax.config.update('jax_num_cpu_devices', 8)"):
        assert part in error


@pytest.mark.parametrize("dash", ["\u2013\u2013", "\u2014", "\u2212-"], ids=["en", "em", "minus"])
def test_j1_a_flag_with_a_typographic_dash_is_named(dash):
    flags = f"{dash}xla_force_host_platform_device_count=8"
    status, out, error = python("ensure_devices(8)\nprint('went on')", flags)
    assert status == 1 and not out and "ConfigError" in error and "typographic dash" in error and "--xla_" in error


def test_j1_a_count_that_the_flags_ask_for_is_not_lowered():
    """16 by XLA_FLAGS, 2 needed: 16 it stays."""
    assert python("ensure_devices(2)\nprint(jax.device_count())", "--xla_force_host_platform_device_count=16")[:2] == (0, "16")


def test_j1_a_count_that_jax_was_told_is_not_lowered():
    assert python("jax.config.update('jax_num_cpu_devices', 12)\nensure_devices(2)\nprint(jax.device_count())")[:2] == (0, "12")


@pytest.mark.parametrize("needed, flags, found", [(2, None, 8), (11, None, 11), (11, "--xla_force_host_platform_device_count=4", 11)])
def test_j1_otherwise_there_are_eight_or_as_many_as_needed(needed, flags, found):
    assert python(f"ensure_devices({needed})\nprint(jax.device_count())", flags)[:2] == (0, str(found))
