"""The chips that programs are compiled for, and the names of targets. No JAX.

Figures are per JAX device, decimal GB/s unless said otherwise. Speed of light, not measurements: nothing here has been timed.
"""
import re
from dataclasses import dataclass
from math import prod

from jaxpara.errors import ConfigError

GIB = 2 ** 30


@dataclass(frozen=True)
class Chip:
    name: str
    platform: str               # "tpu" | "gpu"
    flops: float                # dense bfloat16 FLOP/s
    memory: int                 # bytes of HBM on the data sheet
    usable: int                 # bytes that a program may use
    bandwidth: float            # bytes/s of HBM
    link: float                 # bytes/s one way per link: of one ICI link, or of all of a GPU's NVLinks together
    out: float                  # bytes/s per device between nodes (GPU) or slices (TPU)
    dims: int = 0               # of the torus (TPU)
    node: int = 4               # devices per host
    devices: int = 1            # JAX devices per chip (TPU)


# ICI: the "planning" one-way figures of the scaling book, ~10 % below the data sheet. TPU usable memory: what libtpu 0.0.42 says is
# available when it refuses a program that is too large. FLOP/s, HBM: Google Cloud's and NVIDIA's data sheets, halved per device on tpu7x.
TPUS = (
    Chip("v4", "tpu", 275e12, 32 * GIB, int(30.75 * GIB), 1.2e12, 45e9, 6.25e9, dims=3),
    Chip("v5e", "tpu", 197e12, 16 * GIB, int(15.75 * GIB), 819e9, 45e9, 3.1e9, dims=2),
    Chip("v5p", "tpu", 459e12, 96 * GIB, int(95.74 * GIB), 2765e9, 90e9, 6.25e9, dims=3),
    Chip("v6e", "tpu", 918e12, 32 * GIB, int(31.25 * GIB), 1638e9, 90e9, 12.5e9, dims=2),
    Chip("tpu7x", "tpu", 1153.5e12, 96 * GIB, int(94.75 * GIB), 3690e9, 45e9, 6.25e9, dims=3, node=8, devices=2),
)

# Usable: what is left of the memory that the driver reports when XLA preallocates with its default share of 75 %. NVLink one way per GPU, 400
# Gb/s of network per GPU (A100: 200): NVIDIA's data sheets for SXM boards and DGX nodes.
GPUS = (
    Chip("a100", "gpu", 312e12, 80 * 10 ** 9, 63_640_000_000, 2039e9, 300e9, 25e9, node=8),
    Chip("h100", "gpu", 989e12, 80 * 10 ** 9, 63_730_000_000, 3352e9, 450e9, 50e9, node=8),
    Chip("h200", "gpu", 989e12, 141 * 10 ** 9, 112_500_000_000, 4800e9, 450e9, 50e9, node=8),
    Chip("b200", "gpu", 2250e12, 192 * 10 ** 9, 143_700_000_000, 8000e9, 900e9, 50e9, node=8),
)
CHIPS = {chip.name: chip for chip in TPUS + GPUS}

# (compute capability, multiprocessors, FP32 lanes each, shared memory per multiprocessor, that a block may have, L2 bytes, GHz, bytes of
# memory that the driver reports, name). NVIDIA's tuning guides and `nvidia-smi`.
SILICON = {
    "a100": ((8, 0), 108, 64, 167936, 166912, 41943040, 1.41, 84_850_000_000, "NVIDIA A100-SXM4-80GB"),
    "h100": ((9, 0), 132, 128, 233472, 232448, 52428800, 1.98, 84_978_434_048, "NVIDIA H100 80GB HBM3"),
    "h200": ((9, 0), 132, 128, 233472, 232448, 62914560, 1.98, 150_000_000_000, "NVIDIA H200"),
    "b200": ((10, 0), 148, 128, 233472, 232448, 132644864, 1.965, 191_600_000_000, "NVIDIA B200"),
}


def gpu_config(chip):
    """Text of XLA's `GpuTargetConfigProto` (xla/stream_executor/device_description.proto) for a chip of `GPUS`."""
    (major, minor), cores, lanes, shared, block, cache, clock, memory, name = SILICON[chip.name]
    return f"""gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: {shared} shared_memory_per_block_optin: {block}
  core_count: {cores} fpus_per_core: {lanes} registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {int(chip.bandwidth)} l2_cache_size: {cache} clock_rate_ghz: {clock} device_memory_size: {memory}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 1 }}
device_description_str: "{name}"
"""


@dataclass(frozen=True)
class Target:
    """What a name such as tpu:v5p:4x4x4 means."""
    name: str
    platform: str               # "cpu" | "tpu" | "gpu"
    devices: int                # JAX devices
    chip: Chip | None = None    # None: fake CPU devices
    shape: tuple[int, ...] = ()     # TPU: chips along each dim; GPU: (nodes, devices per node)

    @property
    def topology(self):
        """4x4x4."""
        return "x".join(map(str, self.shape))

    @property
    def usable(self):
        """Bytes of a device that a program may use; None on CPU."""
        return self.chip and self.chip.usable


EXAMPLES = "cpu:8, tpu:v5p:4x4x4 (chips along each dim of the torus), gpu:h100:4x8 (nodes × devices)"


def parse_target(name):
    """`Target` of cpu:N, tpu:CHIP:AxB[xC] or gpu:CHIP:NODESxDEVICES; ConfigError otherwise."""
    platform, _, rest = name.partition(":")
    chip, _, shape = rest.partition(":")
    if platform == "cpu" and re.fullmatch(r"[1-9]\d*", rest):
        return Target(name, platform, int(rest))
    if platform not in ("tpu", "gpu") or not shape:
        raise ConfigError(f"Unknown target {name!r}. A target is a platform and what there is of it: {EXAMPLES}.")
    known = [one.name for one in (TPUS if platform == "tpu" else GPUS)]
    if chip not in known:
        raise ConfigError(f"Unknown chip {chip!r} in target {name!r}. Known for {platform}: {', '.join(known)}.")
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape):
        raise ConfigError(f"Unknown shape {shape!r} in target {name!r}. It is numbers with x between, such as {EXAMPLES}.")
    sizes = tuple(map(int, shape.split("x")))
    return (tpu if platform == "tpu" else gpu)(name, CHIPS[chip], sizes)


def tpu(name, chip, shape):
    """A slice of a torus. Hosts have 2×2 chips, so the first two dims are even, or the slice is a single chip."""
    single = prod(shape) == 1
    if len(shape) != chip.dims or not single and (shape[0] % 2 or shape[1] % 2):
        even = lambda size: size + size % 2
        fixed = tuple(even(size) if i < 2 else size for i, size in enumerate((*shape, 1, 1)[:chip.dims]))
        raise ConfigError(f"Target {name!r}: a {chip.name} slice has {chip.dims} dims, the first two even (a host has 2×2 chips). "
                          f"Nearest: tpu:{chip.name}:{'x'.join(map(str, fixed))}.")
    return Target(name, "tpu", prod(shape) * chip.devices, chip, shape)


def gpu(name, chip, shape):
    if len(shape) != 2:
        raise ConfigError(f"Target {name!r}: a GPU target is NODESxDEVICES, such as gpu:{chip.name}:4x8 (four nodes of eight).")
    return Target(name, "gpu", prod(shape), chip, shape)


def bandwidth(target, coordinates, kind):
    """Bytes/s at which one device sends within a group that lies at `coordinates`; None on CPU.

    coordinates: of the group's devices, of equal length: on TPU places in the torus, on GPU (node, device). GPU: NVLink inside a node,
    the device's share of the network across. TPU: a ring in each torus dim that the group extends over, both ways at once; a permute
    uses one link. Groups of one chip's two devices (tpu7x) are counted as one ring.
    """
    if target.chip is None:
        return None
    spread = [len(set(places)) > 1 for places in zip(*coordinates)]
    if target.platform == "gpu":
        return target.chip.out if spread[0] else target.chip.link
    return target.chip.link * (1 if kind == "permute" else 2 * max(sum(spread), 1))
