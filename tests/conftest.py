"""One process, one set of eight fake devices, 64-bit mode available: every test file can run alone or together."""
import jax

jax.config.update("jax_num_cpu_devices", 8)
