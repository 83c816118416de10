"""One process, one set of eight fake devices: every test file can run alone or together."""
import os

# these programs run for milliseconds and compile for seconds: tell LLVM not to bother
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0".strip()

import jax  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")       # plugins may be installed to compile only: JAX must not try them first
