"""Memory of pipelines: flat in the micro-batches or growing as planned, slots as the tables say, programs of one size whatever their number."""
from functools import cache

import numpy as np
import pytest

import jaxpara
from backends import needs_tpu, on_day
from equivalence.hard import make_run
from jaxpara.hlo.memory import leaves, printed_shapes, split
from jaxpara.hlo.module import parse
from jaxpara.hlo.stages import core
from jaxpara.pipeline import lockstep
from jaxpara.pipeline.placing import schedule, stack
from jaxpara.plan import memory
from jaxpara.plan.stages import pairs, ticks

TOLERANCE = 0.15
TINY = {"model.layers": 4, "model.heads": 4, "model.kv_heads": 2, "model.head_dim": 8, "model.width": 32, "model.ffn": 48, "train.seq": 64,
        "optim.name": "sgd", "mesh.pp": 4, "parallel.remat": "full"}
"""Weights of kilobytes."""
LARGE = {**TINY, "model.width": 128, "model.head_dim": 32, "model.ffn": 256, "train.seq": 256, "model.layers": 8, "mesh.fsdp": 2}
"""Activations of megabytes: what XLA rounds up, or keeps for itself, does not matter."""
KINDS = ("1f1b", "gpipe", "interleaved", "zb_h1", "zb_h2", "zb_v", "dualpipe_v")
V2 = ("interleaved", "zb_v", "dualpipe_v")


def make(kind, m, rows=8, settings=LARGE, **changes):
    """A run of `m` micro-batches of `rows` rows on each device."""
    ways = changes.get("mesh.fsdp", settings.get("mesh.fsdp", 1))
    more = {"model.layers": 8} if kind in V2 else {}
    return make_run({**settings, **more, "parallel.schedule": kind, "train.microbatches": m, "train.batch": m * rows * ways, **changes}, "float32")


@cache
def compiled(run, target=None):
    """(text, statistics)."""
    program = jaxpara.build(run, target).lower().compile()
    return program.as_text(), program.memory_analysis()


def temporaries(run, target=None):
    """Bytes beside the arguments. On TPU temp_size counts more than the heap ever holds, so there it is the peak without the arguments."""
    _, stats = compiled(run, target)
    return stats.peak_memory_in_bytes - stats.argument_size_in_bytes if target and target.startswith("tpu") else stats.temp_size_in_bytes


@pytest.fixture
def wasteful(monkeypatch):
    """Planted fault: a slot of its own for each micro-batch and chunk."""
    def one_each(table, kept):
        return {(microbatch, chunk): microbatch * table.chunks + chunk // table.stages for microbatch, chunk in kept}
    lockstep.tables.cache_clear()
    monkeypatch.setattr(lockstep, "assign", one_each)
    yield
    lockstep.tables.cache_clear()


def is_flat(sizes):
    return max(sizes) <= 1.05 * min(sizes)


def test_1f1b_is_flat():
    """However many micro-batches: a stage never keeps more than there are stages."""
    assert is_flat([temporaries(make("1f1b", 4 * times)) for times in (1, 8)])


def test_one_slot_per_micro_batch_is_not_flat(wasteful):
    programs = [jaxpara.build(make("1f1b", m)).lower().compile() for m in (4, 32)]
    assert not is_flat([program.memory_analysis().temp_size_in_bytes for program in programs])


def grows_as_planned(sizes, planned):
    """Whether temporaries over equally many more micro-batches grow in a line, as the plan's do."""
    steps, expected = np.diff(sizes), np.diff(planned)
    return abs(np.diff(steps)).max() <= 0.03 * steps.mean() and abs(steps.mean() - expected.mean()) <= 0.03 * expected.mean()


@pytest.mark.parametrize("kind", ["gpipe", "circular"])
def test_gpipe_grows_in_a_line(kind):
    """GPipe by two borders per micro-batch, input and cotangent; the circular scan by three, of input, output and embedding."""
    runs = [make(kind, m) for m in (4, 8, 12)]
    sizes, planned = [temporaries(run) for run in runs], [memory.temporaries(run)["total"] for run in runs]
    border = 8 * 256 * 128 * 4
    assert planned[1] - planned[0] == 4 * border * {"gpipe": 2, "circular": 3}[kind]
    assert grows_as_planned(sizes, planned)
    flat, twice = [sizes[0]] * 3, [sizes[0] + 2 * (size - sizes[0]) for size in sizes]
    assert not any(grows_as_planned(fault, planned) for fault in (flat, twice, [sizes[0], sizes[0], sizes[2]]))


CASES = {kind: {} for kind in ("1f1b", "gpipe", "interleaved", "circular", "zb_h1", "zb_v")} | {
    "circular, all residuals": {"parallel.schedule": "circular", "parallel.remat_tick": False},
    "none": {"parallel.schedule": "1f1b", "parallel.remat": "none"},
    "two rounds": {"parallel.schedule": "circular", "parallel.chunks": 2},
    "pp2·fsdp2·tp2": {"parallel.schedule": "zb_h1", "mesh.pp": 2, "mesh.tp": 2},
    "Megatron-SP": {"parallel.schedule": "1f1b", "mesh.pp": 2, "mesh.tp": 2, "parallel.tp_sequence": True},
    "16-bit": {"parallel.schedule": "1f1b", "precision.compute": "bfloat16"},
    "gathered once": {"parallel.schedule": "1f1b", "parallel.gather_once": True, "optim.name": "adamw"},
    "sp": {"parallel.schedule": "1f1b", "mesh.pp": 2, "mesh.sp": 2, "optim.name": "adamw"},
    "dropout": {"parallel.schedule": "circular", "model.dropout": 0.1, "optim.name": "momentum"},
    "GPT-2": {"parallel.schedule": "interleaved", "model.style": "gpt2", "model.kv_heads": 4},
    "padding": {"parallel.schedule": "1f1b", "model.layers": 7},
    "ZeRO-1": {"parallel.schedule": "1f1b", "mesh.fsdp": 1, "mesh.dp": 2, "parallel.zero.dp": 1, "optim.name": "adamw"},
    "ZeRO over pp": {"parallel.schedule": "1f1b", "parallel.zero.pp": 3},
}
OFTEN = ("1f1b", "circular", "circular, all residuals", "zb_h1", "interleaved", "gathered once", "sp")
EACH = [pytest.param(name, marks=[] if name in OFTEN else [pytest.mark.slow]) for name in CASES]


@cache
def case(name):
    changes = {**CASES[name]}
    run = make(changes.pop("parallel.schedule", name), 8, **changes)
    return run, *compiled(run)


@pytest.mark.parametrize("name", EACH)
def test_arguments_are_exact(name):
    run, text, stats = case(name)
    planned, parts = memory.arguments(run), split(text, stats, run)["parts"]
    assert planned["total"] == stats.argument_size_in_bytes
    assert all(planned[part] == parts[part] for part in ("parameters", "master", "optimizer", "scalars", "batch"))
    assert memory.arguments(run.change(mesh=dict(pp=run.mesh.pp // 2)))["total"] != planned["total"], "planted fault: half as many stages"


@pytest.mark.parametrize("name", EACH)
def test_temporaries_are_near(name):
    run, _, stats = case(name)
    assert memory.temporaries(run)["total"] == pytest.approx(stats.temp_size_in_bytes, rel=TOLERANCE)


@pytest.mark.parametrize("name", ["1f1b", "circular", "zb_h1", "circular, all residuals"])
def test_what_waits_is_what_the_loops_carry(name):
    run, text, stats = case(name)
    planned, found = memory.temporaries(run), split(text, stats, run)["parts"]
    size = memory.Sizes(run, "cpu")
    assert found["slots"] == pytest.approx(planned["slots"], abs=2 * size.border)
    assert found["pairs"] == pairs(run, size, "cpu")
    if not planned["pairs"]:        # with pairs B and W need about the same: which is the fullest, XLA decides
        assert found["saved"] == pytest.approx(planned["saved"], rel=0.1)


def test_another_schedule_is_outside_the_tolerance():
    """Planted fault."""
    total = lambda name: memory.temporaries(case(name)[0])["total"]
    assert total("1f1b") != pytest.approx(case("zb_h1")[2].temp_size_in_bytes, rel=TOLERANCE)
    assert total("circular") != pytest.approx(case("1f1b")[2].temp_size_in_bytes, rel=TOLERANCE)


def carried(text):
    """Shapes that the loop over ticks carries: the entry's loop that carries most bytes."""
    module = parse(text)
    shapes, entry = printed_shapes(text), module.computations[module.entry]
    loops = [leaves(shapes[i.name]) for i in entry.instructions if i.opcode == "while"]
    most = max(loops, key=lambda buffers: sum(buffer.bytes for buffer in buffers))
    return [buffer.dims for buffer in most]


def slots_of(run, text):
    """([slots of borders], {slots of pairs}, how many arrays of pairs) that the loop over ticks carries."""
    border, pair = core(memory.shape_of_border(run)), {core(shape) for shape in memory.shapes_of_pair(run)}
    found, length = carried(text), stack(run).length
    borders = sorted(dims[0] for dims in found if len(dims) == 4 and core(dims[1:]) == border)
    kept = [dims[0] for dims in found if len(dims) > 4 and dims[1] == length and core(dims[2:]) in pair]
    return borders, set(kept), len(kept)


def as_planned(run, text):
    table = lockstep.tables(schedule(run))
    kept = ({table.pairs}, 11) if table.pairs else (set(), 0)
    return slots_of(run, text) == (sorted((table.slots, table.gradients)), *kept)


@pytest.mark.parametrize("kind", KINDS)
def test_slots_are_those_of_the_table(kind):
    """Chunk inputs, cotangents, and eleven arrays of pairs: of q, k, v, up and gate the output gradients and two inputs, of output and down both."""
    run = make(kind, 8, 1, TINY)
    assert as_planned(run, compiled(run)[0])


def test_other_slots_are_seen(wasteful, monkeypatch):
    """Planted fault: the program keeps one per micro-batch, the table says fewer."""
    run = make("zb_h1", 8, 1, TINY)
    text = jaxpara.build(run).lower().compile().as_text()
    assert slots_of(run, text) == ([8, 8], {8}, 11)
    monkeypatch.undo()
    lockstep.tables.cache_clear()
    assert not as_planned(run, text)


def test_the_circular_scan_keeps_every_tick():
    run = make("circular", 8, 1, TINY)
    assert slots_of(run, compiled(run)[0])[0].count(ticks(run)) >= 1


def instructions(run):
    return sum(len(computation.instructions) for computation in parse(compiled(run)[0]).computations.values())


@pytest.mark.parametrize("kind", ["circular", "1f1b", "gpipe", "zb_h1"])
def test_programs_do_not_grow_with_micro_batches(kind):
    few, many = (instructions(make(kind, m, 1, TINY)) for m in (4, 64))
    assert many == pytest.approx(few, rel=0.01)
    if kind == "1f1b":
        assert instructions(make(kind, 4, 1, TINY, **{"model.style": "gpt2", "model.kv_heads": 4})) != pytest.approx(few, rel=0.01), "planted fault"


WIDE = {**LARGE, "model.width": 512, "model.heads": 4, "model.head_dim": 128, "model.kv_heads": 4, "model.ffn": 1024, "train.seq": 1024,
        "mesh.pp": 4, "mesh.fsdp": 2, "model.layers": 4}
"""Activations that do not fit in the memory beside a core."""
TPU = "tpu:v5p:2x2x2"


@needs_tpu
@on_day(0, 3)
def test_1f1b_is_flat_on_tpu():
    assert is_flat([temporaries(make("1f1b", m, 16, WIDE), TPU) for m in (4, 32)])


@needs_tpu
@pytest.mark.slow
def test_gpipe_grows_in_a_line_on_tpu():
    runs = [make("gpipe", m, 16, WIDE) for m in (4, 8, 12)]
    assert grows_as_planned([temporaries(run, TPU) for run in runs], [memory.temporaries(run, "tpu")["total"] for run in runs])


@needs_tpu
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["1f1b", "circular", "zb_h1"])
def test_temporaries_are_near_on_tpu(kind):
    run = make(kind, 8, 16, WIDE)
    _, stats = compiled(run, TPU)
    assert memory.arguments(run, "tpu")["total"] == stats.argument_size_in_bytes
    assert memory.temporaries(run, "tpu")["total"] == pytest.approx(temporaries(run, TPU), rel=0.2)
