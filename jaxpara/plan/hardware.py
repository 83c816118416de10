"""The chips that programs are compiled for, and the names of targets. No JAX.

Figures are per JAX device, from data sheets: nothing here has been timed.
"""
import re
from dataclasses import dataclass
from math import prod

from jaxpara.errors import ConfigError

GB, GIB = 10 ** 9, 2 ** 30


@dataclass(frozen=True)
class Chip:
    name: str
    platform: str               # "tpu" | "gpu"
    flops: float                # dense bfloat16 FLOP/s
    memory: int                 # bytes of HBM by name
    usable: int                 # bytes that a program may use
    bandwidth: float            # bytes/s of HBM
    link_sheet: float           # bytes/s one way on the data sheet: of one ICI link, or of all of a GPU's NVLinks together
    link: float                 # the same to plan with
    out: float                  # bytes/s per device between nodes (GPU) or slices (TPU)
    dims: int = 0               # of the torus (TPU)
    devices: int = 1            # JAX devices per chip
    node: int = 8               # devices per host; on GPU the most that NVLink joins


# FLOP/s, HBM, ICI: Google Cloud's pages of each generation; ICI to plan with: the scaling book, 10 % below; between slices: the host network's
# share of a chip, same pages. tpu7x has two devices per chip, so all of its chip's figures are halved; each v5p has 95 GB on its page
# and more in libtpu, so 96 GiB here. Usable: what libtpu 0.0.50 calls available when it refuses a program that is too large (0.0.42 says
# up to 0.01 GiB more; v4 agrees with the scaling book).
TPUS = (
    Chip("v4", "tpu", 275e12, 32 * GIB, int(30.75 * GIB), 1200e9, 50e9, 45e9, 6.25e9, dims=3, node=4),
    Chip("v5e", "tpu", 197e12, 16 * GIB, int(15.75 * GIB), 819e9, 50e9, 45e9, 3.125e9, dims=2, node=4),
    Chip("v5p", "tpu", 459e12, 96 * GIB, int(95.73 * GIB), 2765e9, 100e9, 90e9, 6.25e9, dims=3, node=4),
    Chip("v6e", "tpu", 918e12, 32 * GIB, int(31.24 * GIB), 1638e9, 100e9, 90e9, 12.5e9, dims=2, node=4),
    Chip("tpu7x", "tpu", 2307e12 / 2, 96 * GIB, int(94.74 * GIB), 7380e9 / 2, 50e9, 45e9, 6.25e9, dims=3, devices=2),
)


@dataclass(frozen=True)
class Silicon:
    """What XLA wants to know of a GPU."""
    name: str
    capability: tuple[int, int]
    cores: int                  # multiprocessors
    lanes: int                  # float32 units in each
    shared: int                 # bytes of shared memory in each
    cache: int                  # bytes of L2
    clock: float                # GHz
    memory: int                 # bytes that the driver reports


# NVIDIA's tuning guides and data sheets (SXM boards), and what `nvidia-smi` and XLA's own device dumps report.
SILICON = {
    "a100": Silicon("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 167936, 41943040, 1.41, 85_100_068_864),
    "h100": Silicon("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 233472, 52428800, 1.98, 84_942_979_072),
    "h200": Silicon("NVIDIA H200", (9, 0), 132, 128, 233472, 52428800, 1.98, 151_397_597_184),
    "b200": Silicon("NVIDIA B200", (10, 0), 148, 128, 233472, 132644864, 1.965, 191_514_411_008),
}

XLA_SHARE = 0.75
"""Part of the memory that XLA takes for itself unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise (JAX's page on GPU memory)."""


def _gpu(name, flops, memory, bandwidth, link, out):
    return Chip(name, "gpu", flops, memory, int(XLA_SHARE * SILICON[name].memory), bandwidth, link, link, out)


# NVIDIA's data sheets: A100, H100, H200 SXM; B200 in an HGX board; NVLink one way; a network card of 200 (A100) or 400 Gb/s for each GPU.
GPUS = (
    _gpu("a100", 312e12, 80 * GB, 2039e9, 300e9, 25e9),
    _gpu("h100", 989e12, 80 * GB, 3352e9, 450e9, 50e9),
    _gpu("h200", 989e12, 141 * GB, 4800e9, 450e9, 50e9),
    _gpu("b200", 2250e12, 192 * GB, 8000e9, 900e9, 50e9),
)
CHIPS = {chip.name: chip for chip in TPUS + GPUS}


def gpu_config(chip):
    """Text of XLA's `GpuTargetConfigProto` (xla/stream_executor/device_description.proto) for a chip of `GPUS`."""
    one = SILICON[chip.name]
    extension = " feature_extension: ACCELERATED_FEATURES" if one.capability[0] >= 9 else ""     # sm_90a: what the device itself reports
    return f"""gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: {one.shared} shared_memory_per_block_optin: {one.shared - 1024}
  core_count: {one.cores} fpus_per_core: {one.lanes} registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {int(chip.bandwidth)} l2_cache_size: {one.cache} clock_rate_ghz: {one.clock} device_memory_size: {one.memory}
  cuda_compute_capability {{ major: {one.capability[0]} minor: {one.capability[1]}{extension} }}
  runtime_version: "13.0.0" driver_version: "13.0.0" dnn_version: "9.10.1"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 1 }}
device_description_str: "{one.name}"
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

    @property
    def cubes(self):
        """Whether a 3-D slice is made of whole 4×4×4 cubes: optical switches join cubes, not chips, so only then do its dims wrap around."""
        return len(self.shape) == 3 and all(size % 4 == 0 for size in self.shape)

    @property
    def wraps(self):
        """Per dim of a TPU slice, whether it is a ring: v5e and v6e have one where a dim is the whole pod's 16. Source: scaling book."""
        return tuple(self.cubes if len(self.shape) == 3 else size == 16 for size in self.shape)


EXAMPLES = "cpu:8, tpu:v5p:4x4x4 (chips along each dim of the torus), gpu:h100:4x8 (nodes × devices)"

LARGEST = 9216
"""Chips of the largest TPU pod there is (tpu7x); describing a million would take minutes."""


def parse_target(name):
    """`Target` of cpu:N, tpu:CHIP:AxB[xC] or gpu:CHIP:NODESxDEVICES; ConfigError with the nearest legal name otherwise."""
    platform, _, rest = name.partition(":")
    chip, _, shape = rest.partition(":")
    if platform == "cpu" and re.fullmatch(r"[1-9]\d*", rest):
        return Target(name, platform, int(rest))
    known = [one.name for one in CHIPS.values() if one.platform == platform]
    if known and chip and chip not in known:
        raise ConfigError(f"Unknown chip {chip!r} in target {name!r}. Known for {platform}: {', '.join(known)}.")
    if not known or not shape:
        raise ConfigError(f"Unknown target {name!r}. A target is a platform and what there is of it: {EXAMPLES}.")
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape):
        raise ConfigError(f"Unknown shape {shape!r} in target {name!r}. It is numbers with x between, as in {EXAMPLES}.")
    return (_slice if platform == "tpu" else _cluster)(name, CHIPS[chip], tuple(map(int, shape.split("x"))))


def _slice(name, chip, shape):
    """A TPU slice. libtpu's rule: hosts have 2×2 chips, so the first two dims are even, or the slice is a single chip."""
    if len(shape) != chip.dims or prod(shape) > 1 and (shape[0] % 2 or shape[1] % 2):
        nearest = [size + size % 2 if dim < 2 else size for dim, size in enumerate((*shape, 1, 1)[:chip.dims])]
        raise ConfigError(f"Target {name!r}: a {chip.name} slice has {chip.dims} dims, the first two even (a host has 2×2 chips), or is one chip. "
                          f"Nearest: tpu:{chip.name}:{'x'.join(map(str, nearest))}.")
    if prod(shape) > LARGEST:
        raise ConfigError(f"Target {name!r} has {prod(shape)} chips, and no pod has more than {LARGEST}. "
                          f"Nearest: tpu:{chip.name}:{'16x16' if chip.dims == 2 else '16x16x24'}.")
    return Target(name, "tpu", prod(shape) * chip.devices, chip, shape)


def _cluster(name, chip, shape):
    """GPU nodes joined by a network; NVLink joins the devices of each."""
    devices = prod(shape)
    if len(shape) != 2 or shape[1] > chip.node:
        nearest = f"{-(-devices // chip.node)}x{min(devices, chip.node)}"
        raise ConfigError(f"Target {name!r}: a GPU target is NODESxDEVICES, with up to {chip.node} {chip.name} per node (NVLink joins no more). "
                          f"Nearest: gpu:{chip.name}:{nearest}.")
    return Target(name, "gpu", devices, chip, shape)
