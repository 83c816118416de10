"""Memory: the arguments exactly, the temporaries within TOLERANCE, predicted from the config against the compiled program."""
from functools import cache
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

import jaxpara
from equivalence.hard import make_run
from jaxpara.hlo.memory import peak as compiled_peak
from jaxpara.hlo.memory import replicated, split
from jaxpara.kernels import local
from jaxpara.plan import memory

TOLERANCE = 0.12
HALF = {"precision.compute": "bfloat16", "precision.params": "bfloat16", "precision.master": "float32"}
FULL, SELECTIVE, MATMULS = ({"parallel.remat": "full"}, {"parallel.remat": "selective"},
                            {"parallel.remat": "selective", "parallel.remat_save": "matmuls"})
SETTINGS = {
    "none": {}, "full": FULL, "attention": SELECTIVE, "matmuls": MATMULS,
    "none, m 3": {"train.microbatches": 3}, "full, m 3": {**FULL, "train.microbatches": 3, "optim.name": "sgd"},
    "gpt2": {"model.style": "gpt2", **FULL, "optim.schedule": "cosine", "optim.warmup": 2},
    "dropout": {"model.dropout": 0.1, "optim.name": "momentum", "mesh.fsdp": 8},
    "16-bit": HALF, "ZeRO-1": {"mesh.dp": 4, "parallel.zero.dp": 1}, "ZeRO-2, m 3": {"mesh.dp": 4, "parallel.zero.dp": 2, "train.microbatches": 3},
    "three axes": {"mesh.fsdp": 2, "mesh.sp": 2, "mesh.tp": 2}, "Megatron-SP": {"mesh.tp": 4, "parallel.tp_sequence": True},
    "ZeRO-R": {"mesh.tp": 4, **FULL, "parallel.zero_r": True}, "annotated": {"mesh.fsdp": 2, "mesh.tp": 2, "parallel.lowering": "annotated"},
    "float64": {"precision.compute": "float64", "precision.params": "float64"},
}
OFTEN = ("none", "full", "attention", "matmuls", "full, m 3", "gpt2", "dropout", "16-bit", "three axes", "Megatron-SP")
EACH = [pytest.param(name, marks=[] if name in OFTEN else [pytest.mark.slow]) for name in SETTINGS]
tpu = pytest.mark.skipif(find_spec("libtpu") is None, reason="compiling for TPU needs libtpu (jaxpara[tpu])")


@cache
def compiled(name):
    """(run, text, statistics) of one of SETTINGS."""
    run = make_run(SETTINGS[name], "float32")
    program = jaxpara.build(run).lower().compile()
    return run, program.as_text(), program.memory_analysis()


@pytest.mark.parametrize("name", EACH)
def test_arguments_are_exact(name):
    run, text, stats = compiled(name)
    planned = memory.arguments(run)
    assert planned["total"] == stats.argument_size_in_bytes
    parts = split(text, stats, run)["parts"]
    assert all(planned[part] == parts[part] for part in ("parameters", "master", "optimizer", "scalars", "batch"))


@pytest.mark.parametrize("name", EACH)
def test_temporaries_are_near(name):
    run, text, stats = compiled(name)
    near = pytest.approx(stats.temp_size_in_bytes, rel=TOLERANCE)
    assert memory.temporaries(run)["total"] == near
    assert compiled_peak(text).bytes == near


@pytest.mark.parametrize("name", ["none", "full", "attention", "matmuls"])
def test_what_is_saved_is_what_the_loop_carries(name):
    run, text, stats = compiled(name)
    planned, found = memory.temporaries(run), split(text, stats, run)["parts"]
    assert found["saved"] == pytest.approx(planned["saved"], rel=0.05)


def test_every_remat_policy_saves_what_it_says_and_no_more():
    saved = [sum(memory.saved(make_run(settings, "float32")).values()) for settings in (FULL, SELECTIVE, MATMULS, {})]
    assert saved == sorted(saved) and saved[0] == 3 * 24 * 32 * 48 * 4
    real = [compiled(name)[2].temp_size_in_bytes for name in ("full", "attention", "matmuls", "none")]
    assert real == sorted(real)


@pytest.mark.parametrize("settings", [SELECTIVE, {}, {**FULL, "train.microbatches": 3}, {**FULL, "mesh.fsdp": 2}])
def test_the_tolerance_tells_settings_apart(settings):
    """Planted fault: another setting's prediction is outside it. (The policies' own differences are small at this size: see `saved`.)"""
    if settings == SELECTIVE:
        assert sum(memory.saved(make_run(settings, "float32")).values()) > 2 * sum(memory.saved(compiled("full")[0]).values())
    else:
        assert memory.temporaries(make_run(settings, "float32"))["total"] != pytest.approx(compiled("full")[2].temp_size_in_bytes, rel=TOLERANCE)


@pytest.mark.parametrize("name, fault", [("none", {"COUNTERS": {"adamw": 1}}), ("full, m 3", {"COUNTERS": {"sgd": 2}}),
                                         ("none", {"OPTIMIZER_TENSORS": {"adamw": 1}})])
def test_a_forgotten_argument_is_seen(name, fault, monkeypatch):
    run, _, stats = compiled(name)
    for constant, value in fault.items():
        monkeypatch.setattr(memory, constant, value)
    assert memory.arguments(run)["total"] != stats.argument_size_in_bytes


def test_replicated_arguments_are_named():
    """Nothing is larger than planned; against a plan with more sharding, the surplus is each array's by name."""
    run, text, _ = compiled("ZeRO-1")
    assert replicated(text, run) == []
    found = dict(replicated(text, run.change(parallel=dict(zero=dict(dp=3)))))
    up = 3 * 48 * 80 * 4
    assert found["params.layers.mlp.up"] == up - up // 4
    assert not any(name.startswith("optimizer") for name in found)
    assert "batch.tokens" in dict(replicated(text, run.change(mesh=dict(dp=8))))


def test_blocks_are_those_of_the_kernels():
    assert (memory.ATTENTION_BLOCK, memory.SMALLEST_BLOCK) == (local.BLOCK, local.SMALLEST)


@pytest.mark.parametrize("shape, width, size", [
    ((), 4, 512), ((), 2, 512), ((5,), 4, 512), ((129,), 4, 1024), ((300,), 2, 1024), ((1000,), 4, 4096),
    ((3, 5), 4, 4 * 128 * 4),                   # 5 -> 128 wide, 3 -> 4 high
    ((100, 9), 4, 16 * 128 * 4),                # 100 is the better minor dim: 128 × 16, not 104 × 128
    ((32, 4096, 224), 4, 32 * 4096 * 224 * 4),  # 4096 wide, 224 high: nothing wasted
    ((200, 3, 130), 4, 3 * 136 * 256 * 4), ((130, 1), 4, 256 * 4), ((130, 1), 2, 2 * 256 * 2), ((6, 1, 8), 2, 8 * 128 * 2)])
def test_tiles(shape, width, size):
    assert memory.tiled(shape, width) == size


def test_padding_is_that_of_llama3_8b_on_v5p():
    """What libtpu said: 1,506,743,296 bytes of arguments; XLA's peak beside them 5,072,180,928 (4x4x4), 5,916,489,920 for 70b (8x8x8)."""
    eight, seventy = jaxpara.load("llama3_8b", {"mesh.fsdp": 16}), jaxpara.load("llama3_70b", {"mesh.fsdp": 64})
    assert memory.arguments(eight, "tpu")["total"] == 1_506_743_296
    assert memory.arguments(seventy, "tpu")["total"] == 1_654_083_072
    assert memory.temporaries(eight, "tpu")["total"] == pytest.approx(5_072_180_928, rel=0.1)
    assert memory.temporaries(seventy, "tpu")["total"] == pytest.approx(5_916_489_920, rel=0.1)
    assert memory.arguments(eight, "cpu")["total"] != 1_506_743_296


@tpu
@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"parallel.remat": "selective"}, {"train.microbatches": 4}])
def test_tpu(settings):
    """Llama-3 8B with a quarter of its layers on v5p:4x4x4: XLA's own peak is what the text shows, and near the plan."""
    run = jaxpara.load("llama3_8b", {"mesh.fsdp": 16, "model.layers": 8, **settings})
    program = jaxpara.build(run, "tpu:v5p:4x4x4").lower().compile()
    stats, text = program.memory_analysis(), program.as_text()
    real = stats.peak_memory_in_bytes - stats.argument_size_in_bytes
    assert memory.arguments(run, "tpu")["total"] == stats.argument_size_in_bytes
    assert compiled_peak(text).bytes == pytest.approx(real, rel=0.05)
    assert memory.temporaries(run, "tpu")["total"] == pytest.approx(real, rel=0.15)
    assert replicated(text, run) == []


def test_split_adds_up():
    run, text, stats = compiled("Megatron-SP")
    sizes = split(text, stats, run)
    assert sum(sizes["parts"].values()) == sizes["argument"] + sizes["temp"]
    assert sizes["peak"] == sizes["argument"] + sizes["temp"] + sizes["output"] - sizes["alias"]
    tight = SimpleNamespace(argument_size_in_bytes=1, output_size_in_bytes=1, alias_size_in_bytes=1, temp_size_in_bytes=9)
    assert split(text, tight, run)["parts"]["rest"] < 0
