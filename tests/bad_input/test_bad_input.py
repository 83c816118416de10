"""Settings that cannot be honoured: status 2, every violation at once, the nearest legal values, no traceback, nothing compiled."""
import subprocess
import sys

import jax
import numpy as np
import pytest

import jaxpara
from jaxpara import cli, step
from jaxpara.batch import check_batch
from jaxpara.pipeline import build, to_csv

BAD = {     # command line -> what each line of the answer must hold; as many lines as violations
    # heads and widths
    "tp does not divide heads": ("gpt_single --model.heads 12 --model.kv_heads 12 --mesh.tp 8", [
        "mesh.tp = 8 does not divide model.heads = 12 | Legal tp for 12 heads, 12 of them KV: 1, 2, 3, 4, 6, 12."]),
    "tp does not divide heads or ffn": ("gpt_single --mesh.tp 3", [
        "mesh.tp = 3 does not divide model.heads = 8 | 1, 2, 4, 8.", "mesh.tp = 3 does not divide model.ffn = 352 | Nearest ffn: 351, 354"]),
    "tp between KV heads": ("gpt_single --model.heads 12 --model.kv_heads 4 --mesh.tp 6 --model.ffn 360", [
        "mesh.tp = 6 does not fit model.kv_heads = 4 | Legal tp: 1, 2, 4, 12."]),
    "kv_heads does not divide heads": ("gpt_single --model.kv_heads 3", ["model.kv_heads = 3 does not divide model.heads = 8 | Legal: 1, 2, 4, 8."]),
    "more KV heads than heads": ("gpt_single --model.kv_heads 16", ["model.kv_heads = 16 does not divide model.heads = 8 | 1, 2, 4, 8."]),
    "odd head_dim": ("gpt_single --model.head_dim 15", ["model.head_dim = 15 is odd | Nearest: 14, 16."]),
    "tp does not divide ffn": ("gpt_single --mesh.tp 4 --model.ffn 354", ["mesh.tp = 4 does not divide model.ffn = 354 | Nearest ffn: 352, 356 | legal tp: 1, 2, 3"]),
    "vocabulary without padding": ("gpt_single --mesh.tp 8 --model.vocab 257 --parallel.pad_vocab false", [
        "model.vocab = 257 does not split over mesh.tp = 8 | pads it to 264"]),
    "vocabulary too small for bytes": ("gpt_single --model.vocab 100", ["model.vocab = 100 is too small for data.tokenizer = byte | Legal: 256 or more."]),
    # sequences
    "Ulysses times tp": ("gpt_single --mesh.sp 4 --mesh.tp 4 --parallel.sp_kind ulysses", [
        "mesh.sp = 4 with mesh.tp = 4 | tp·sp = 16 | Legal mesh.sp at this tp: 1, 2."]),
    "Ulysses over a prime": ("gpt_single --mesh.sp 3 --train.seq 255 --parallel.sp_kind ulysses", ["mesh.sp = 3 | Legal mesh.sp at this tp: 1, 2, 4, 8."]),
    "hybrid without a degree": ("gpt_single --mesh.sp 4 --parallel.sp_kind hybrid", ["parallel.sp_ulysses = none must divide mesh.sp = 4 | Legal: 1, 2, 4."]),
    "hybrid degree does not divide": ("gpt_single --mesh.sp 4 --parallel.sp_kind hybrid --parallel.sp_ulysses 3", [
        "parallel.sp_ulysses = 3 must divide mesh.sp = 4 | Legal: 1, 2, 4."]),
    "zigzag chunks": ("gpt_single --train.seq 20 --mesh.sp 4 --parallel.sp_order zigzag", [
        "train.seq = 20 must be a multiple of 8 | Nearest: 16, 24. | Without zigzag: multiples of 4."]),
    "sequence over sp": ("gpt_single --train.seq 30 --mesh.sp 4", ["train.seq = 30 must be a multiple of 4 | Nearest: 28, 32."]),
    "sequence over sp and tp": ("gpt_single --train.seq 252 --mesh.sp 2 --mesh.tp 4 --parallel.tp_sequence true", [
        "train.seq = 252 must be a multiple of 8 | mesh.tp = 4 (tp_sequence) | Nearest: 248, 256."]),
    "longer than the positions": ("gpt2_124m --mesh.fsdp 1 --train.seq 2048 --data.path .", [
        "train.seq = 2048 is longer than model.max_positions = 1024 | up to 1024"]),
    "window 0": ("gpt_single --model.window 0", ["model.window = 0 must be greater than 0 | 1 or more, or none"]),
    # batches
    "batch over everything": ("gpt_single --mesh.dp 2 --mesh.fsdp 4 --train.microbatches 3 --train.batch 30", [
        "train.batch = 30 must be a multiple of 24 = train.microbatches 3 · mesh.dp 2 · mesh.fsdp 4 | Nearest: 24, 48."]),
    "last partial batch": ("gpt_zero3 --train.batch 31 --train.microbatches 1", ["train.batch = 31 must be a multiple of 8 | Nearest: 24, 32."]),
    "micro-batches": ("gpt_single --train.batch 8 --train.microbatches 3", ["train.batch = 8 must be a multiple of 3 | Nearest: 6, 9."]),
    # meshes
    "more devices than there are": ("gpt_single --mesh.dp 16", ["The mesh needs 16 devices and JAX has 8 (cpu) | jax_num_cpu_devices', 16"]),
    "auto does not fill": ("gpt_single --mesh.tp 1 --mesh.dp 3 --mesh.fsdp auto --train.batch 24", [
        "mesh.fsdp = auto cannot be filled | 3, which does not divide 8 devices | 6, 9."]),
    "auto twice": ("gpt_single --mesh.dp auto --mesh.fsdp auto", ["mesh.fsdp = auto beside mesh.dp = auto | a number for one of them"]),
    "axis of size 0": ("gpt_single --mesh.tp 0", ["mesh.tp = 0 must be greater than 0 | 1 or more"]),
    "negative axis": ("gpt_single --mesh.tp -2", ["mesh.tp = -2 must be greater than 0 | 1 or more"]),
    # pipelines
    "more stages than layers": ("gpt_single --mesh.pp 8", [
        "model.layers = 4 are fewer than mesh.pp · parallel.chunks = 8 · 1 = 8 chunks | Legal: model.layers 8 or more | are 4 · 1, 3 · 1, 2 · 1."]),
    "more chunks than layers": ("gpt_single --mesh.pp 4 --parallel.chunks 2", [
        "model.layers = 4 are fewer than mesh.pp · parallel.chunks = 4 · 2 = 8 chunks | are 4 · 1, 3 · 1, 2 · 2."]),
    "a V has two chunks": ("gpt_single --mesh.pp 4 --parallel.schedule zb_v --train.microbatches 8 --model.layers 6", [
        "model.layers = 6 are fewer than mesh.pp · parallel.chunks = 4 · 2 = 8 chunks | nearest mesh.pp · parallel.chunks are 3 · 2, 2 · 2."]),
    "proposals suit the micro-batches": ("gpt_single --mesh.pp 4 --parallel.schedule interleaved --train.microbatches 8 --model.layers 6", [
        "4 · 2 = 8 chunks | nearest mesh.pp · parallel.chunks are 4 · 1, 2 · 2."]),
    "one layer": ("gpt_single --mesh.pp 2 --model.layers 1", ["model.layers = 1 are fewer | each needs a layer. Legal: model.layers 2 or more."]),
    **{f"{kind} with few micro-batches": (f"gpt_single --mesh.pp 4 --parallel.schedule {kind} --train.microbatches 2 --model.layers 8", [
        f"train.microbatches = 2 is less than mesh.pp = 4: parallel.schedule = {kind} needs | Legal: 4 or more (bubble | gpipe, 1f1b, circular"])
       for kind in ("zb_h1", "zb_h2", "zb_v", "dualpipe_v")},
    "interleaved with few micro-batches": ("gpt_single --mesh.pp 4 --parallel.schedule interleaved --train.microbatches 2 --model.layers 8", [
        "train.microbatches = 2 is not a multiple of mesh.pp = 4: parallel.schedule = interleaved | Nearest: 4 (bubble 27.3 %)."]),
    "interleaved in groups": ("gpt_single --mesh.pp 4 --parallel.schedule interleaved --train.microbatches 6 --train.batch 24 --model.layers 8", [
        "train.microbatches = 6 is not a multiple of mesh.pp = 4 | Nearest: 4 (bubble 27.3 %), 8 (bubble 15.8 %)."]),
    "chunks of 1f1b": ("gpt_single --mesh.pp 2 --parallel.schedule 1f1b --parallel.chunks 2", [
        "parallel.chunks = 2: parallel.schedule = 1f1b has 1 chunk per stage. Legal: 1 (interleaved and circular"]),
    "chunks of a V": ("gpt_single --mesh.pp 2 --parallel.schedule dualpipe_v --parallel.chunks 1 --train.microbatches 4", [
        "parallel.chunks = 1: parallel.schedule = dualpipe_v has 2 chunks per stage. Legal: 2"]),
    "no chunks": ("gpt_single --mesh.pp 2 --parallel.chunks 0", ["parallel.chunks = 0 must be greater than 0. Legal: 1 or more."]),
    "an impossible schedule has no layers": ("gpt_single --mesh.pp 4 --parallel.schedule zb_h1 --parallel.chunks 2 --train.microbatches 2", [
        "parallel.chunks = 2: parallel.schedule = zb_h1 has 1 chunk", "train.microbatches = 2 is less than mesh.pp = 4"]),
    "an endless table": ("gpt_single --mesh.pp 2 --train.microbatches 2000000 --train.batch 2000000", [
        "mesh.pp · train.microbatches · parallel.chunks = 4,000,000 micro-batch chunks are too many | up to 2,000,000"]),
    "layers that do not add up": ("gpt_single --mesh.pp 2 --parallel.layers_per_stage 3,2", [
        "parallel.layers_per_stage = 3,2 must add up to model.layers = 4 (adds up to 5) with at least 1 each. Such as: 2,2."]),
    "layers for other stages": ("gpt_single --mesh.pp 4 --parallel.layers_per_stage 2,2", [
        "parallel.layers_per_stage = 2,2 has 2 numbers for mesh.pp = 4. Legal: 4. Such as: 1,1,1,1."]),
    "layers for other chunks": ("gpt_single --mesh.pp 2 --parallel.chunks 2 --parallel.layers_per_stage 2,1,1", [
        "parallel.layers_per_stage = 2,1,1 has 3 numbers | Legal: 2 (one per stage) or 4 (one per chunk, in model order). Such as: 2,2."]),
    "a stage with fewer layers than chunks": ("gpt_single --mesh.pp 2 --parallel.chunks 2 --parallel.layers_per_stage 3,1", [
        "parallel.layers_per_stage = 3,1 must add up to model.layers = 4 | at least 2 each. Such as: 2,2."]),
    "a stage without layers": ("gpt_single --mesh.pp 4 --parallel.layers_per_stage 3,0,0,1", [
        "parallel.layers_per_stage = 3,0,0,1: every number must be greater than 0 | 1 or more each"]),
    "a word among the layers": ("gpt_single --mesh.pp 2 --parallel.layers_per_stage x,2", [
        "parallel.layers_per_stage = 'x,2': needs whole numbers with commas between them, such as 3,2,2,1. | Also legal: none."]),
    "half a layer": ("gpt_single --mesh.pp 2 --parallel.layers_per_stage 2.5,1.5", ["parallel.layers_per_stage = '2.5,1.5': needs whole numbers"]),
    "a pipeline that XLA should find": ("gpt_single --mesh.pp 2 --parallel.lowering annotated", [
        "parallel.lowering = annotated with mesh.pp = 2: stages run different layers at one time | Legal: manual."]),
    "unknown schedule": ("gpt_single --mesh.pp 2 --parallel.schedule zb_h3", ["parallel.schedule = 'zb_h3': not one of circular, gpipe | Did you mean zb_h"]),
    "a pipeline wrong in every way": ("gpt_single --mesh.pp 4 --parallel.schedule zb_v --parallel.chunks 3 --train.microbatches 2 --model.layers 3 "
                                      "--parallel.layers_per_stage 1,1 --parallel.lowering annotated --parallel.remat_tick false --parallel.gather_once true", [
        "parallel.lowering = annotated with mesh.pp = 4", "parallel.chunks = 3: parallel.schedule = zb_v has 2 chunks", "train.microbatches = 2 is less",
        "parallel.layers_per_stage = 1,1 must add up to model.layers = 3 (adds up to 2)", "parallel.gather_once = true cannot take effect",
        "parallel.remat_tick = false cannot take effect"]),
    "too few layers, and given wrongly": ("gpt_single --mesh.pp 4 --parallel.chunks 2 --parallel.layers_per_stage 3,1,1,1", [
        "model.layers = 4 are fewer than mesh.pp · parallel.chunks", "parallel.layers_per_stage = 3,1,1,1 must add up to model.layers = 4 (adds up to 6)"]),
    "uneven steps over stages": ("gpt_single --mesh.pp 4 --parallel.zero.pp 2 --parallel.scatter_inner 3", [
        "parallel.scatter_inner = 3 must be 2 or more and divide mesh.pp = 4 | Legal: 2."]),
    # names, choices and types
    "unknown setting": ("gpt_single --mesh.tpp 2", ["Unknown setting mesh.tpp. | Did you mean mesh.tp"]),
    "undotted setting": ("gpt_single --batch 8", ["Unknown setting batch. | Did you mean train.batch"]),
    "unknown parent": ("gpt_single --meshes.xyz 8", ["Unknown setting meshes.xyz. | mesh"]),
    "whole part": ("gpt_single --mesh 8", ["Unknown setting mesh. | mesh.tp"]),
    "wrong choice": ("gpt_single --parallel.sp_kind rings", ["parallel.sp_kind = 'rings' | ring, ulysses, allgather, hybrid | Did you mean ring?"]),
    "fraction for a whole number": ("gpt_single --mesh.tp 2.5", ["mesh.tp = '2.5' | whole number; nearest: 2, 3 | Also legal: auto"]),
    "word for a number": ("gpt_single --train.steps many", ["train.steps = 'many' | needs a whole number"]),
    "nan": ("gpt_single --optim.lr nan", ["optim.lr = 'nan' | needs a finite number"]),
    "inf": ("gpt_single --optim.clip inf", ["optim.clip = 'inf' | needs a finite number | Also legal: none"]),
    "yes for true": ("gpt_single --parallel.tp_sequence yes", ["parallel.tp_sequence = 'yes' | needs true or false"]),
    "none where there is none": ("gpt_single --train.batch none", ["train.batch = 'none' | needs a whole number"]),
    "no value": ("gpt_single --mesh.tp", ["--mesh.tp needs a value | --mesh.tp VALUE"]),
    "no value before the next": ("gpt_single --mesh.tp --mesh.dp 2", ["--mesh.tp needs a value"]),
    "twice": ("gpt_single --mesh.tp 2 --mesh.tp 4", ["--mesh.tp is given twice, as 2 and as 4"]),
    # numbers
    "ZeRO stage 4": ("gpt_single --mesh.fsdp 2 --parallel.zero.fsdp 4", ["parallel.zero.fsdp = 4 is not a ZeRO stage | Legal: 0, 1, 2, 3."]),
    "dropout 1": ("gpt_single --model.dropout 1.0", ["model.dropout = 1.0 | from 0 to less than 1"]),
    "negative lr": ("gpt_single --optim.lr -1e-3", ["optim.lr = -0.001 must not be negative | Legal: 0 or more"]),
    "no steps": ("gpt_single --train.steps 0", ["train.steps = 0 must be greater than 0 | 1 or more"]),
    "uneven steps": ("gpt_single --mesh.dp 8 --parallel.zero.dp 1 --parallel.scatter_inner 3",
                     ["parallel.scatter_inner = 3 must be 2 or more and divide mesh.dp = 8 | Legal: 2, 4"]),
    "steps for nobody": ("gpt_single --mesh.dp 4 --parallel.scatter_inner 2", ["parallel.scatter_inner = 2 cannot take effect | ZeRO stage"]),
    "wide seed": ("gpt_single --train.seed 4294967296", ["train.seed = 4294967296 | 0 to 4294967295"]),
    "warmup as long as the run": ("gpt_single --optim.warmup 120", ["optim.warmup = 120 leaves no step | up to 119"]),
    "final above lr": ("gpt_single --optim.final 2", ["optim.final = 2.0 | from 0 to 1"]),
    "a derived value is not blamed": ("gpt_single --model.width -5 --model.ffn none --model.head_dim none", ["model.width = -5 must be greater than 0"]),
    # precision
    "dtype typo": ("gpt_single --precision.compute bfloat", ["precision.compute = 'bfloat' | float64, float32, bfloat16, float16 | Did you mean bfloat16?"]),
    "float16 without a loss scale": ("gpt_single --precision.compute float16", ["precision.compute = float16 needs precision.loss_scale | for example 1024"]),
    "narrow master": ("gpt_single --precision.params bfloat16 --precision.master bfloat16", [
        "precision.master = bfloat16 keeps no more | Legal: float32, float64, none."]),
    "master narrower than compute": ("gpt_single --precision.params bfloat16 --precision.compute float64 --precision.master float32", [
        "precision.master = float32 is narrower | Legal: float64.", "precision.compute = float64 with params = bfloat16"]),
    "compute wider than what is kept": ("gpt_single --precision.compute float64", ["precision.compute = float64 with params = float32 | params float64"]),
    # typed, and without effect
    "zero over one device": ("gpt_single --parallel.zero.dp 1", ["parallel.zero.dp = 1 cannot take effect: mesh.dp = 1."]),
    "ring over one device": ("gpt_single --parallel.sp_kind ring", ["parallel.sp_kind = ring cannot take effect: mesh.sp = 1."]),
    "zigzag over one device": ("gpt_single --parallel.sp_order zigzag", ["parallel.sp_order = zigzag cannot take effect: mesh.sp = 1."]),
    "tp_sequence over one device": ("gpt_single --parallel.tp_sequence true", ["parallel.tp_sequence = true cannot take effect: mesh.tp = 1."]),
    "a pipeline's settings on one device": (
        "gpt_single --parallel.schedule 1f1b --parallel.chunks 1 --parallel.schedule_file a.csv --parallel.layers_per_stage 2,2 --parallel.gather_once true "
        "--parallel.remat_tick false --parallel.zero.pp 1", [f"parallel.{words} cannot take effect: mesh.pp = 1." for words in (
            "schedule = 1f1b", "chunks = 1", "schedule_file = a.csv", "layers_per_stage = 2,2", "gather_once = true", "remat_tick = false", "zero.pp = 1")]),
    "gathering nothing once": ("gpt_single --mesh.pp 2 --mesh.dp 2 --parallel.zero.dp 2 --parallel.gather_once true", [
        "parallel.gather_once = true cannot take effect: no axis of more than one device has ZeRO stage 3"]),
    "ticks of 1f1b": ("gpt_single --mesh.pp 2 --parallel.schedule 1f1b --parallel.remat_tick false", [
        "parallel.remat_tick = false cannot take effect: parallel.schedule = 1f1b computes every chunk again"]),
    "sp_ulysses in a ring": ("gpt_ring --parallel.sp_ulysses 2", ["parallel.sp_ulysses = 2 cannot take effect: parallel.sp_kind = ring, not hybrid."]),
    "qk_norm in gpt2": ("gpt2_124m --mesh.fsdp 1 --model.qk_norm true", ["model.qk_norm = true cannot take effect: model.style = gpt2."]),
    "momentum of adamw": ("gpt_single --optim.momentum 0.5", ["optim.momentum = 0.5 cannot take effect: optim.name = adamw."]),
    # recipes and files
    "unknown recipe": ("gpt_tinny", ["There is no recipe 'gpt_tinny' | Did you mean gpt_tiny"]),
    "missing recipe file": ("nowhere/mine.py", ["There is no recipe 'nowhere/mine.py' | Shipped: "]),
    "missing data": ("gpt_single --data.path nowhere", ["data.path = nowhere: there is no such file or folder"]),
    "two recipes": ("gpt_single gpt_tiny", ["Unrecognized arguments: gpt_tiny"]),
    # many at once
    "all at once": ("gpt_single --mesh.tp 3 --optim.lr -1 --train.batch 7 --train.microbatches 2 --mesh.xp 2 --precision.compute fp16 "
                    "--model.dropout 2 --parallel.zero.dp 1 --data.path nowhere --train.steps", [
        "--train.steps needs a value", "Unknown setting mesh.xp", "precision.compute = 'fp16' | Did you mean float16?", "optim.lr = -1.0", "model.dropout = 2.0",
        "mesh.tp = 3 does not divide model.heads", "mesh.tp = 3 does not divide model.ffn", "train.batch = 7 must be a multiple of 2 | 6, 8",
        "parallel.zero.dp = 1 cannot take effect", "data.path = nowhere"]),
}


@pytest.fixture(autouse=True)
def nothing_is_built(monkeypatch, tmp_path):
    """An empty current directory, JAX started with 8 devices, and no way to get as far as a program."""
    def fail(*_):
        raise AssertionError("a program was built from bad input")

    assert jax.device_count() == 8
    monkeypatch.setattr(step, "Program", fail)
    monkeypatch.chdir(tmp_path)


def answer(capsys, *argv):
    """The violations that `jaxpara ARGV` prints, after checking how it does so."""
    assert cli.main(list(argv)) == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    heading, *lines = err.splitlines()
    assert heading == ("jaxpara: this setting cannot be honoured:" if len(lines) == 1 else f"jaxpara: these {len(lines)} settings cannot be honoured:")
    assert all(line.startswith("  ") for line in lines)
    return lines


@pytest.mark.parametrize("line, expected", BAD.values(), ids=BAD)
def test_every_violation_is_told(line, expected, capsys, tmp_path):
    all_told(answer(capsys, "train", *line.split()), expected)
    assert list(tmp_path.iterdir()) == []       # no run directory of a run that never was


def all_told(lines, expected):
    """Each of `lines` is one of `expected`, whose parts stand between " | "."""
    unmatched = list(lines)
    for parts in expected:
        match = [told for told in unmatched if all(part in told for part in parts.split(" | "))]
        assert match, f"no line says {parts!r} in {lines}"
        unmatched.remove(match[0])
    assert not unmatched


HEAD = "stage,tick,op,microbatch,chunk\n"
LEGAL = to_csv(build("1f1b", 2, 4))
TABLES = {      # the text of table.csv, settings beside it -> as BAD
    "missing": (None, "", ["parallel.schedule_file = table.csv cannot be read as a schedule: no such file or directory."]),
    "broken rule": (HEAD + "0,0,F,0,0\n1,0,F,0,1\n1,2,B,0,1\n0,2,B,0,0\n", "--train.microbatches 1", [
        "parallel.schedule_file = table.csv, line 3: stage 1, tick 0: F of micro-batch 0, chunk 1 needs F of micro-batch 0, chunk 0 | "
        "Rule: an activation travels one tick."]),
    "not a table": (HEAD + "0,0,X,0,0\n", "", ["parallel.schedule_file = table.csv, line 2: op = X is unknown. Legal: F"]),
    "uneven chunks": (HEAD + "0,0,F,0,0\n1,1,F,0,1\n0,2,F,0,2\n0,3,B,0,2\n1,4,B,0,1\n0,5,B,0,0\n", "--train.microbatches 1", [
        "parallel.schedule_file = table.csv: stage 1 | Rule: every stage holds the same number of chunks."]),
    "other numbers": (LEGAL, "--mesh.pp 4 --train.microbatches 8 --parallel.chunks 2", [
        "mesh.pp = 4 does not fit parallel.schedule_file = table.csv, which has 2 stages. Legal: 2, or a table of 4 stages.",
        "train.microbatches = 8 does not fit parallel.schedule_file = table.csv, which has 4 micro-batches. Legal: 4, or a table of 8.",
        "parallel.chunks = 2 does not fit parallel.schedule_file = table.csv, which has 1 chunk per stage. Legal: 1, or none"]),
    "one stage": (to_csv(build("gpipe", 1, 4)), "", ["mesh.pp = 2 does not fit | which has 1 stage. Legal: a table of 2 stages."]),
    "fewer layers": (to_csv(build("zb_v", 2, 4)), "--model.layers 3", [
        "model.layers = 3 are fewer than mesh.pp · parallel.chunks = 2 · 2 = 4 chunks: each needs a layer. Legal: model.layers 4 or more."]),
    "a schedule beside it": (LEGAL, "--parallel.schedule 1f1b --parallel.remat_tick false", [
        "parallel.schedule = 1f1b cannot take effect: parallel.schedule_file = table.csv is the schedule.",
        "parallel.remat_tick = false cannot take effect: parallel.schedule_file = table.csv computes every chunk again"]),
}


@pytest.mark.parametrize("text, more, expected", TABLES.values(), ids=TABLES)
def test_bad_schedule_file(text, more, expected, capsys, tmp_path):
    if text is not None:
        (tmp_path / "table.csv").write_text(text)
    settings = {"--mesh.pp": "2", "--train.microbatches": "4"} | dict(zip(more.split()[::2], more.split()[1::2]))
    lines = answer(capsys, "train", "gpt_single", "--parallel.schedule_file", "table.csv", *(word for pair in settings.items() for word in pair))
    assert len(lines) == len(expected)
    for line, parts in zip(lines, expected):
        assert all(part in line for part in parts.split(" | ")), line


def test_a_schedule_file_that_was_mended_is_read_again(tmp_path):
    settings = {"mesh.pp": 2, "train.microbatches": 4, "parallel.schedule_file": "table.csv"}
    (tmp_path / "table.csv").write_text(LEGAL)
    jaxpara.load("gpt_single", settings)
    (tmp_path / "table.csv").write_text(LEGAL.replace("1,1,F,0,1", "1,0,F,0,1"))
    with pytest.raises(jaxpara.ConfigError, match="an activation travels one tick"):
        jaxpara.load("gpt_single", settings)
    (tmp_path / "table.csv").write_text(LEGAL)
    jaxpara.load("gpt_single", settings)


RECIPES = {
    "syntax": ("def broken(:\n", "line 1 | SyntaxError"),
    "exception": ("def broken():\n    return 1 / 0\n", "line 2 | ZeroDivisionError"),
    "unknown field": ("import jaxpara\ndef broken():\n    return jaxpara.Run(mesh=jaxpara.Mesh(tpp=2))\n", "line 3 | tpp"),
    "no function": ("x = 1\n", "needs a function broken() that returns a jaxpara.Run"),
    "not a run": ("def broken():\n    return 3\n", "needs a function broken() that returns a jaxpara.Run"),
    "wrong type": ("import jaxpara\ndef broken():\n    return jaxpara.Run(mesh=jaxpara.Mesh(tp=2.5))\n", "mesh.tp = 2.5 | nearest: 2, 3"),
    "wrong choice": ("import jaxpara\ndef broken():\n    return jaxpara.Run(model=jaxpara.Model(style='lama'))\n", "model.style = 'lama' | Did you mean llama?"),
}


@pytest.mark.parametrize("text, expected", RECIPES.values(), ids=RECIPES)
def test_bad_recipe_file(text, expected, capsys, tmp_path):
    (tmp_path / "broken.py").write_text(text)
    lines = answer(capsys, "train", "broken.py")
    assert len(lines) == 1 and all(part in lines[0] for part in expected.split(" | "))


@pytest.mark.parametrize("text, expected", [("{", "not JSON"), ("[]", "not an object of settings"), ('{"mesh": {"tpp": 2}}', "Did you mean mesh.tp"),
                                            ('{"mesh": {"tp": 2.5}}', "nearest: 2, 3"), ('{"mesh": 3}', "Unknown setting mesh")])
def test_bad_saved_configuration(text, expected, capsys, tmp_path):
    (tmp_path / "config.json").write_text(text)
    lines = answer(capsys, "train", "config.json")
    assert len(lines) == 1 and expected in lines[0]


def test_more_text_is_needed(capsys, tmp_path):
    (tmp_path / "short.txt").write_text("short")
    (line,) = answer(capsys, "train", "gpt_single", "--data.path", "short.txt")
    assert "train.seq = 256 is longer than the whole text" in line and "up to 6" in line


def test_binary_data(capsys, tmp_path):
    (tmp_path / "image.txt").write_bytes(b"a\0b")
    (line,) = answer(capsys, "train", "gpt_single", "--data.path", "image.txt")
    assert "holds no text" in line


def test_run_directories_are_never_overwritten(capsys, tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "metrics.jsonl").write_text("{}\n")
    (tmp_path / "file").write_text("")
    lines = answer(capsys, "train", "gpt_single", "--run-dir", "old", "--mesh.tp", "3")
    assert len(lines) == 3 and "old already holds the metrics of a run" in lines[0]
    (line,) = answer(capsys, "train", "gpt_single", "--run-dir=file")
    assert "--run-dir file is no place" in line
    (line,) = answer(capsys, "train", "gpt_single", "--run-dir=file/below")
    assert "--run-dir file/below is no place" in line
    assert (tmp_path / "old" / "metrics.jsonl").read_text() == "{}\n"


@pytest.mark.parametrize("argv, expected", [
    ("", "The following arguments are required: COMMAND"), ("trian", "invalid choice: 'trian'"), ("plan --target tpu", "Unknown target 'tpu'"),
    ("plan --target cpu:4", "The mesh needs 8 devices and the target cpu:4 has 4. Target: cpu:8."), ("plan --target cpu:0", "Unknown target 'cpu:0'"),
    ("plan llama3_8b --target cpu:6", "mesh.fsdp = auto cannot be filled"), ("plan --target", "expected one argument"),
    ("plan gpt2_124m --target cpu:3", "train.batch = 32 must be a multiple of 3"), ("settings --mesh.tp 2", "takes no settings"),
    ("train -x", "Unrecognized arguments: -x"), ("train --run-dir", "expected one argument")])
def test_bad_commands(argv, expected, capsys):
    (line,) = answer(capsys, *argv.split())
    assert expected in line


def batch(**arrays):
    tokens = np.zeros((16, 256), np.int32)
    return {"tokens": tokens, "targets": tokens, **arrays}


def at(value, row, column):
    array = np.zeros((16, 256), np.int32)
    array[row, column] = value
    return array


BATCHES = {
    "token out of range": (batch(tokens=at(256, 3, 7)), "outside 0 … 255; the first is 256 at row 3, column 7"),
    "ignore label among the tokens": (batch(tokens=at(-1, 2, 5)), "outside 0 … 255; the first is -1 at row 2, column 5"),
    "target out of range": (batch(targets=at(-2, 1, 1)), "-1 marks a target that is not counted"),
    "wrong shape": (batch(tokens=np.zeros((16, 128), np.int32)), "has shape (16, 128)"),
    "floats": (batch(tokens=np.zeros((16, 256))), "has dtype float64; it needs integers"),
    "missing": ({"tokens": at(0, 0, 0)}, "has no array 'targets'"),
    "unknown": (batch(token_ids=at(0, 0, 0)), "unknown array 'token_ids'"),
}


@pytest.mark.parametrize("arrays, expected", BATCHES.values(), ids=BATCHES)
def test_bad_batch(arrays, expected):
    with pytest.raises(jaxpara.ConfigError) as error:
        check_batch(arrays, jaxpara.load("gpt_single"))
    assert len(error.value.violations) == 1 and expected in error.value.violations[0]


@pytest.mark.parametrize("overrides", [{"mesh.tp": 3, "optim.lr": -1.0}, {"mesh.tp": "3", "optim.lr": "-1"}])
def test_python_gets_the_same_words(overrides, capsys):
    with pytest.raises(jaxpara.ConfigError) as error:
        jaxpara.load("gpt_single", overrides)
    lines = answer(capsys, "train", "gpt_single", *(word for name, value in overrides.items() for word in (f"--{name}", str(value))))
    assert [line.strip() for line in lines] == list(error.value.violations)
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize("command", ["train gpt_single --mesh.tp 3 --optim.lr -1 --data.path nowhere", "train gpt_tinny", "plan gpt_single --mesh.tp 3",
                                     "train gpt_single --mesh.pp 4 --parallel.schedule zb_h1 --parallel.chunks 2 --parallel.lowering annotated",
                                     "train gpt_single --mesh.pp 4 --parallel.chunks 2 --parallel.layers_per_stage 3,2,2,2",
                                     "train gpt_single --mesh.pp 2 --parallel.schedule_file table.csv"])
def test_from_a_shell(command, tmp_path):
    (tmp_path / "table.csv").write_text(LEGAL.replace("1,1,F,0,1", "1,0,F,0,1"))
    done = subprocess.run([sys.executable, "-m", "jaxpara", *command.split()], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr
    assert done.stderr.startswith("jaxpara: th")
