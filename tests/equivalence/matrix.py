"""The matrix: one line per mesh and setting, all on eight fake devices or a divisor of them.

A case is a style and one text of settings. Short names: dp2 fsdp2 … are mesh axes; zdp1 is parallel.zero.dp = 1; m3 is
train.microbatches = 3; kv2 is model.kv_heads = 2, L5 model.layers = 5, v2 parallel.chunks = 2; layers3,2 is parallel.layers_per_stage = 3,2;
a schedule's name is parallel.schedule; any other word stands for what WORDS says.
"""
import re

from jaxpara.pipeline import KINDS

NUMBERS = {"m": "train.microbatches", "kv": "model.kv_heads", "L": "model.layers", "v": "parallel.chunks"}

WORDS = {
    **{kind: {"parallel.schedule": kind} for kind in KINDS},
    "once": {"parallel.gather_once": True}, "keepticks": {"parallel.remat_tick": False},
    "ring": {}, "zigzag": {"parallel.sp_order": "zigzag"}, "striped": {"parallel.sp_order": "striped"},
    "ulysses": {"parallel.sp_kind": "ulysses"}, "allgather": {"parallel.sp_kind": "allgather"},
    "hybrid2": {"parallel.sp_kind": "hybrid", "parallel.sp_ulysses": 2}, "hybrid4": {"parallel.sp_kind": "hybrid", "parallel.sp_ulysses": 4},
    "megatron": {"parallel.tp_sequence": True}, "annotated": {"parallel.lowering": "annotated"}, "unchecked": {"parallel.check_vma": False},
    "window": {"model.window": 5}, "dropout": {"model.dropout": 0.2}, "tied": {"model.tied": True}, "untied": {"model.tied": False},
    "qknorm": {"model.qk_norm": True}, "remat": {"parallel.remat": "full"}, "zero_r": {"parallel.zero_r": True},
    "keepattention": {"parallel.remat": "selective"}, "keepmatmuls": {"parallel.remat": "selective", "parallel.remat_save": "matmuls"},
    "chunks": {"parallel.loss_chunk": 7}, "oneDocument": {}, "steps2": {"parallel.scatter_inner": 2}, "steps4": {"parallel.scatter_inner": 4},
}

CASES = [
    # ZeRO, each stage alone, with and without accumulation
    "gpt2 dp8", "llama dp8 m3", "llama dp8 zdp1", "gpt2 dp8 zdp1 m3", "gpt2 dp8 zdp2", "llama dp8 zdp2 m3", "llama dp8 zdp3",
    "gpt2 dp8 zdp3 m3", "llama fsdp8 m3", "gpt2 dp4 m3 zdp1",
    "llama fsdp8 m3 steps4", "gpt2 dp8 zdp2 m3 steps2", "llama dp4 sp2 zdp2 zsp1 m3 steps2", "gpt2 dp4 tp2 zdp1 kv2 steps2",
    # several replica axes, a stage for each
    "gpt2 dp2 fsdp4 zdp1 m3", "llama dp2 fsdp4 zdp2 m3", "llama dp2 fsdp2 sp2 zdp1 zsp1 m3", "gpt2 dp2 sp2 tp2 zdp2 zsp1 m3 megatron",
    # tensor parallelism, KV heads fewer than ranks, Megatron-SP on and off
    "gpt2 tp8 kv8", "llama tp8 kv2 megatron", "llama tp8 kv1", "gpt2 dp2 tp4 kv2 m3", "llama dp2 tp4 zdp1 megatron", "llama fsdp4 tp2 m3 megatron",
    "gpt2 fsdp2 tp4 m3", "llama dp2 fsdp2 tp2 zdp1 m3 megatron", "gpt2 dp2 fsdp2 tp2 zdp3",
    # sequence parallelism: ring in each order, Ulysses, all-gather, hybrid; packed documents
    "gpt2 sp8 zsp3", "llama sp4 tp2 zsp1 zigzag", "gpt2 sp2 tp4 zigzag megatron zsp2 m3", "llama sp2 tp4 kv2", "llama fsdp4 sp2 zigzag",
    "llama fsdp2 sp4 striped m3", "llama fsdp4 sp2 ulysses", "llama dp2 sp4 ulysses kv2 m3", "gpt2 sp8 ulysses kv8", "llama sp2 tp4 ulysses megatron",
    "llama fsdp2 sp4 hybrid2 zigzag", "gpt2 sp8 hybrid4 zigzag", "llama sp8 hybrid2 striped", "llama fsdp2 sp4 allgather zigzag",
    "gpt2 dp4 sp2 allgather zdp1", "llama sp4 tp2 allgather kv1",
    # the whole mesh
    "llama fsdp2 sp2 tp2 zigzag megatron", "gpt2 fsdp2 sp2 tp2 zigzag megatron m3", "gpt2 fsdp2 sp2 tp2 ulysses m3",
    # one document per row
    "llama sp4 dp2 oneDocument", "gpt2 sp4 dp2 zigzag oneDocument", "llama sp4 dp2 striped oneDocument", "llama sp4 dp2 ulysses oneDocument",
    "gpt2 sp4 dp2 allgather oneDocument", "llama sp4 dp2 hybrid2 zigzag oneDocument",
    # windows
    "llama sp4 dp2 zigzag window", "llama sp4 tp2 ulysses window", "gpt2 sp2 fsdp2 tp2 striped window",
    # the annotated lowering
    "gpt2 dp8 zdp1 m3 annotated", "llama fsdp8 annotated", "llama dp2 tp4 kv2 m3 annotated megatron", "gpt2 dp2 fsdp2 tp2 zdp2 annotated",
    "llama fsdp2 sp2 tp2 zigzag megatron annotated", "gpt2 sp4 tp2 ulysses annotated", "llama fsdp2 sp4 hybrid2 annotated",
    "llama sp4 fsdp2 allgather annotated m3",
    # the unchecked mode of shard_map in float64 as well (float32 runs it everywhere)
    "llama fsdp2 sp2 tp2 zigzag megatron unchecked m3", "gpt2 tp8 kv2 unchecked", "llama sp8 hybrid2 unchecked", "gpt2 dp8 zdp2 m3 unchecked",
    # recomputation, dropout, variants of the model
    "llama fsdp2 sp2 tp2 remat m3", "gpt2 dp2 tp4 remat zero_r", "llama fsdp2 sp2 tp2 keepattention ulysses", "gpt2 fsdp4 tp2 keepmatmuls megatron",
    "gpt2 fsdp2 sp2 tp2 dropout zigzag megatron m3", "llama dp2 tp2 sp2 dropout annotated", "llama fsdp2 tp4 tied qknorm kv2 m3", "gpt2 fsdp8 untied chunks",
]

SMALLEST = [
    # one of each kind, every day: pp = 2 and little beside it
    "gpt2 pp2 m3 gpipe", "llama pp2 dp2 m2 1f1b zpp1", "llama pp2 m4 interleaved L4", "gpt2 pp2 m3 circular zpp1", "llama pp2 m3 zb_h1 tied",
    "gpt2 pp2 tp2 m3 zb_h2 zpp2", "llama pp2 m3 zb_v L4", "gpt2 pp2 m3 dualpipe_v L5",
]

PIPELINES = SMALLEST + [
    # pp = 4 with each kind: m = p, m > p, not a multiple of p, and fewer where that is legal
    "llama pp4 tp2 m6 circular L5 megatron kv1", "gpt2 pp4 dp2 m2 circular v2 L8", "gpt2 pp4 tp2 m2 gpipe L4", "llama pp4 dp2 m4 1f1b L8 remat zdp1",
    "gpt2 pp4 dp2 m2 1f1b L5 zdp2", "llama pp4 tp2 m4 interleaved L8 kv1", "gpt2 pp4 dp2 m6 zb_h1 L4 zdp3", "llama pp4 fsdp2 m6 zb_h2 L5",
    "llama pp4 tp2 m4 zb_v L8 kv1 megatron", "gpt2 pp4 sp2 m6 dualpipe_v L8 zigzag zsp1", "gpt2 pp4 tp2 m4 zb_h1 zpp3 L4 untied",
    # data and tensor parallelism, dropout
    "llama pp2 dp2 tp2 m3 circular zdp1 megatron remat", "gpt2 pp2 dp2 tp2 m3 zb_h1 zdp2 remat", "llama pp2 dp2 tp2 m4 interleaved v3 L8 zdp3 zpp3",
    "gpt2 pp2 dp2 tp2 m2 gpipe dropout zpp1 megatron", "gpt2 pp2 tp2 m6 circular dropout v2 L4", "gpt2 pp2 fsdp2 tp2 m3 zb_h2 dropout",
    # sequence parallelism of every kind, under the scan and under tables
    "llama pp2 fsdp2 sp2 m3 circular zigzag", "llama pp2 fsdp2 sp2 m3 1f1b zigzag", "gpt2 pp2 fsdp2 sp2 m3 1f1b ulysses",
    "llama pp2 fsdp2 sp2 m4 circular ulysses once",
    "llama pp2 fsdp2 sp2 m3 zb_v L4 ulysses", "gpt2 pp2 fsdp2 sp2 m3 dualpipe_v L4 striped zsp3", "llama pp2 dp2 sp2 m3 zb_h2 allgather zsp2 zdp1",
    "gpt2 pp2 sp4 m3 circular allgather zsp3 zpp3 untied", "llama pp2 sp4 m3 zb_h1 hybrid2 zigzag",
    "llama pp2 sp4 m2 circular hybrid2 v2 L4 oneDocument",
    "llama pp2 tp2 sp2 m3 zb_h1 zigzag megatron kv1 zpp2", "gpt2 pp2 tp2 sp2 m4 circular v2 L4 window ulysses megatron",
    "llama pp2 tp2 sp2 m4 interleaved L4 window striped unchecked",
    # uneven layers as given; three rounds
    "llama pp2 dp2 m3 1f1b L5 layers3,2 zpp3", "gpt2 pp4 dp2 m4 circular L8 layers3,2,2,1", "llama pp2 tp4 m3 zb_h2 L5 layers1,4 kv2",
    "llama pp2 dp4 m3 circular v3 L8 zdp2 steps2", "llama pp2 dp2 m4 zb_v L8 layers1,3,3,1 qknorm zdp2",
    # recomputation, gathers once a step, scatters in two steps
    "gpt2 pp2 fsdp4 m3 circular keepmatmuls keepticks zpp2", "llama pp2 dp4 m3 circular keepticks zdp3 once",
    "llama pp2 fsdp2 tp2 m3 zb_v L4 keepattention megatron tied",
    "gpt2 pp2 tp2 m3 1f1b remat zero_r", "gpt2 pp2 fsdp4 m3 zb_h2 once", "llama pp2 fsdp4 m2 gpipe once steps2 chunks",
    "llama pp4 dp2 m4 1f1b zpp1 L8 steps2",
    "gpt2 pp2 fsdp4 m3 dualpipe_v L4 steps2 untied",
]


def settings(case):
    """(overrides, packed) of a case."""
    style, *words = case.split()
    overrides = {"model.style": style}
    for word in words:
        found = re.fullmatch(r"(z?)(pp|dp|fsdp|sp|tp|m|kv|L|v)(\d+)", word)
        if found:
            zero, name, number = found.groups()
            overrides[NUMBERS.get(name, f"parallel.zero.{name}" if zero else f"mesh.{name}")] = int(number)
        elif given := re.fullmatch(r"layers([\d,]+)", word):
            overrides["parallel.layers_per_stage"] = tuple(map(int, given[1].split(",")))
        else:
            overrides.update(WORDS[word])
    return overrides, "oneDocument" not in words


def on_one_device(overrides):
    """The part of the settings that is the model's and data's: what the reference run on one device has in common with the case."""
    return {name: value for name, value in overrides.items() if name.startswith("model.")}
