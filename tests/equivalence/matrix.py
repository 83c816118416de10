"""The matrix: one line per mesh and setting, all on eight fake devices or a divisor of them.

A case is a style and one text of settings. Short names: dp2 fsdp2 … are mesh axes; zdp1 is parallel.zero.dp = 1; m3 is
train.microbatches = 3; kv2 is model.kv_heads = 2, L5 model.layers = 5, v2 parallel.chunks = 2; layers3,2 is parallel.layers_per_stage = 3,2;
a schedule's name is parallel.schedule; any other word stands for what WORDS says. Of models with experts (the word moe): E4 K2 grp16 every2 first1
are model.moe.experts, top_k, group, every, first_dense; cap1.25 is model.moe.capacity = 1.25.
"""
import re

from jaxpara.pipeline import KINDS

NUMBERS = {"m": "train.microbatches", "kv": "model.kv_heads", "L": "model.layers", "v": "parallel.chunks", "E": "model.moe.experts",
           "K": "model.moe.top_k", "grp": "model.moe.group", "every": "model.moe.every", "first": "model.moe.first_dense"}

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
    "moe": {"model.moe.experts": 8, "model.moe.top_k": 3, "model.moe.ffn": 28},
    "gather": {"parallel.moe_transport": "gather"}, "tokens": {"parallel.moe_tp": "tokens"}, "position": {"model.moe.drop_order": "position"},
    "noise": {"model.moe.noise": True}, "jitter": {"model.moe.jitter": 0.1}, "moedropout": {"model.moe.dropout": 0.1},
    "aux": {"model.moe.aux_weight": 0.1}, "microbatch": {"model.moe.aux_scope": "microbatch"}, "global": {"model.moe.aux_scope": "global"},
    "warmup": {"model.moe.aux_warmup": 2}, "z": {"model.moe.z_weight": 0.1}, "bias": {"model.moe.bias_rate": 0.01}, "shared": {"model.moe.shared": 2},
    "sigmoid": {"model.moe.score": "sigmoid"}, "ownscores": {"model.moe.renormalise": False}, "scaled": {"model.moe.scale": 2.5},
    "groups": {"model.moe.expert_groups": 4, "model.moe.top_groups": 2}, "top1": {"model.moe.group_score": "top1"},
    "expertchoice": {"model.moe.routing": "expert_choice"}, "sinkhorn": {"model.moe.routing": "sinkhorn"},
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

ROUTED_SMALLEST = [
    # every day: two models on few devices, each of the kinds of traffic
    "llama moe dp2 ep2 m3 aux z zep1", "llama moe ep2 tp2 gather tokens aux z", "llama moe pp2 ep2 m3 circular aux z",
    "gpt2 moe ep2 sp2 zigzag cap1 grp16 noise bias", "gpt2 moe ep2 tp2 megatron cap1 grp16 noise bias",
    "gpt2 moe ep2 fsdp2 annotated cap1 grp16 noise bias",
]

EXPERTS = ROUTED_SMALLEST + [
    # data and expert parallelism, ZeRO over ep for what is not an expert's
    "llama moe m3 cap1 grp8 aux z", "gpt2 moe dp2 m3 noise cap1.25", "llama moe ep2 zep1 cap1 position",
    "gpt2 moe ep4 m3 zep2 cap1 grp8 aux",
    "llama moe dp2 ep4 m3 zep3 zdp1 aux warmup",
    # with tensor parallelism: widths, and tokens
    "llama moe ep2 tp4 cap1 grp8 kv2 m3", "gpt2 moe ep4 tp2 megatron aux z zep1 tied", "llama moe ep2 tp2 tokens cap1 grp8 position aux",
    "llama moe dp2 ep2 tp2 tokens megatron m3 cap1 zdp2", "gpt2 moe ep2 sp2 tp2 tokens zigzag cap1 grp16 aux",
    # with sequence parallelism: groups on one device, and over several
    "llama moe ep2 sp4 zigzag cap1 grp16 aux zsp1", "gpt2 moe ep2 sp2 ring cap1 grp8 position m3 zsp2",
    "llama moe ep4 sp2 ulysses cap1 grp8 aux zsp3",
    "llama moe ep2 sp2 striped cap1 grp8 position aux microbatch m3", "gpt2 moe ep2 sp4 hybrid2 zigzag aux z zep2",
    "llama moe dp2 ep2 sp2 ring aux noise",
    # with FSDP, each stage
    "llama moe ep2 fsdp4 m3 aux", "gpt2 moe ep2 fsdp2 zfsdp1 zep2 m3 cap1", "llama moe ep4 fsdp2 zfsdp2 zep3 cap1 grp16",
    "llama moe ep2 fsdp2 tp2 zep3 megatron shared remat m3",
    # pipelines
    "gpt2 moe pp2 ep2 circular aux global", "llama moe pp2 ep2 1f1b cap1 grp8 zpp1", "llama moe pp2 ep2 tp2 m3 1f1b L5 noise bias aux",
    "gpt2 moe pp2 ep2 m3 zb_h1 cap1 grp8 aux zpp1 zep1", "llama moe pp2 ep2 tp2 m3 zb_h1 tokens megatron cap1 z",
    "llama moe pp2 ep2 L4 every2 m3 zb_h1",
    "llama moe pp4 ep2 m4 circular L4 aux microbatch zep2", "llama moe pp2 ep2 sp2 m3 1f1b zigzag cap1 grp16 aux",
    "gpt2 moe pp2 ep2 L4 every2 m3 circular aux",
    # losses of the step and of micro-batches
    "llama moe dp2 ep2 sp2 m3 aux microbatch z", "gpt2 moe dp2 ep2 tp2 aux global z megatron",
    "llama moe ep4 sp2 striped aux global sigmoid",
    # what is drawn
    "llama moe ep2 dp2 sp2 noise jitter moedropout m3", "gpt2 moe ep2 dp2 tp2 noise jitter moedropout dropout tokens cap1",
    # recomputation
    "gpt2 moe ep2 fsdp2 keepmatmuls cap1 aux", "llama moe ep4 tp2 remat zero_r aux z gather",
    # the annotated lowering, the unchecked mode, the other transport
    "llama moe ep2 sp2 tp2 annotated cap1 grp16 aux shared", "gpt2 moe ep2 fsdp2 tp2 annotated m3 tokens megatron jitter",
    "llama moe ep2 sp2 tp2 unchecked gather aux m3 zsp1", "llama moe ep4 fsdp2 gather m3 cap1 grp8",
    # layers without experts among them; one expert per device; few and many choices
    "llama moe ep2 dp2 L5 every2 first1 shared", "llama moe ep8 zep3 m3 aux", "gpt2 moe E4 ep4 dp2 K2 cap1 grp8",
    "llama moe K1 ep2 dp2 zdp3 ownscores aux",
    # other routings
    "llama moe ep2 dp2 sigmoid groups bias scaled m3", "gpt2 moe ep4 dp2 groups top1 ownscores cap1 bias aux",
    "gpt2 moe dp2 sp2 striped expertchoice cap1 grp8", "llama moe dp4 tp2 expertchoice cap1 m3", "gpt2 moe dp2 sp2 sinkhorn aux grp8",
    "llama moe dp2 sp2 tp2 sinkhorn cap1 grp16 zigzag megatron z",
]


def settings(case):
    """(overrides, packed) of a case."""
    style, *words = case.split()
    overrides = {"model.style": style}
    for word in words:
        found = re.fullmatch(r"(z?)(pp|dp|fsdp|ep|sp|tp|m|kv|L|v|E|K|grp|every|first)(\d+)", word)
        if found:
            zero, name, number = found.groups()
            overrides[NUMBERS.get(name, f"parallel.zero.{name}" if zero else f"mesh.{name}")] = int(number)
        elif given := re.fullmatch(r"cap([\d.]+)", word):
            overrides["model.moe.capacity"] = float(given[1])
        elif given := re.fullmatch(r"layers([\d,]+)", word):
            overrides["parallel.layers_per_stage"] = tuple(map(int, given[1].split(",")))
        else:
            overrides.update(WORDS[word])
    return overrides, "oneDocument" not in words


def on_one_device(overrides):
    """The part of the settings that is the model's and data's: what the reference run on one device has in common with the case. Where loads are
    counted by micro-batch, their number is part of the model."""
    by_microbatch = overrides.get("model.moe.aux_scope") == "microbatch"
    return {name: value for name, value in overrides.items() if name.startswith("model.") or by_microbatch and name == "train.microbatches"}
