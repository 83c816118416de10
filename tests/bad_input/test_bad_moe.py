"""Settings of mixture-of-experts models that cannot be honoured, that would do nothing, and what a run says of its experts before it starts."""
import pytest

import jaxpara
from bad_input.test_bad_input import all_told, answer, nothing_is_built     # noqa: F401: the fixture serves these tests too
from jaxpara import moe_checks
from jaxpara.experts import layout
from jaxpara.settings import configure, dumps, loads, recipe

MOE = {"experts": 8}


def line(moe=None, **others):
    """gpt_single with 8 experts and these settings of model.moe; others: with two underscores for a dot."""
    settings = {f"model.moe.{name}": value for name, value in (MOE | (moe or {})).items()}
    settings |= {name.replace("__", "."): value for name, value in others.items()}
    return ["gpt_single", *(word for name, value in settings.items() for word in (f"--{name}", str(value)))]


def load(moe=None, **others):
    name, *words = line(moe, **others)
    return jaxpara.load(name, {key.removeprefix("--"): value for key, value in zip(words[::2], words[1::2])})


NEGATIVE = dict(experts=-1, first_dense=-1, shared=-1, bias_rate=-0.1, aux_weight=-0.5, aux_warmup=-3, z_weight=-1.0)
CHOICE = dict(routing="expert_choice", capacity=1.0)

BAD = {     # settings -> what each line of the answer must hold; as many lines as violations
    # numbers
    **{f"{name} below 0": (line({name: value}), [f"model.moe.{name} = {value} must not be negative. Legal: 0 or more."])
       for name, value in NEGATIVE.items()},
    **{f"{name} 0": (line({name: 0}), [f"model.moe.{name} = 0 must be greater than 0. Legal: 1 or more."])
       for name in ("top_k", "every", "group", "expert_groups", "top_groups", "ffn")},
    "scale 0": (line(dict(scale=0)), ["model.moe.scale = 0.0 must be greater than 0. Legal: any number above 0"]),
    "capacity 0": (line(dict(capacity=0)), ["model.moe.capacity = 0.0 must be greater than 0. Legal: any number above 0, or none for dropless."]),
    **{f"{name} {value}": (line({name: value}), [f"model.moe.{name} = {value} is out of range. Legal: from 0 to less than 1"])
       for name in ("jitter", "dropout") for value in (1.0, -0.1)},
    "a width that experts derive": (line(model__ffn=-3), ["model.ffn = -3 must be greater than 0"]),
    "a length that groups derive": (line(train__seq=0), ["train.seq = 0 must be greater than 0"]),
    # experts over ep
    "ep without experts": (["gpt_single", "--mesh.ep", "2"], [
        "mesh.ep = 2: ep splits experts and model.moe.experts = 0. Legal: mesh.ep 1 (dp or fsdp split the batch), or a model with experts."]),
    "experts over ep": (line(dict(experts=6), mesh__ep=4), [
        "model.moe.experts = 6 does not split over mesh.ep = 4. Legal mesh.ep for 6 experts: 1, 2, 3, 6; | divide the devices that the other axes leave."]),
    "batch over ep": (line(mesh__ep=4, train__batch=6), ["train.batch = 6 must be a multiple of 4 = train.microbatches 1 · mesh.ep 4 | Nearest: 4, 8."]),
    # choices
    "top_k": (line(dict(top_k=9)), ["model.moe.top_k = 9 is more than model.moe.experts = 8. Legal: 1 to 8."]),
    "groups of experts": (line(dict(expert_groups=3)), ["model.moe.expert_groups = 3 does not divide model.moe.experts = 8 | Legal: 1, 2, 4, 8."]),
    "top_groups": (line(dict(expert_groups=4, top_groups=5)), ["model.moe.top_groups = 5 is more than model.moe.expert_groups = 4. Legal: 1 to 4."]),
    "top_k of few groups": (line(dict(expert_groups=4, top_groups=1, top_k=3)), [
        "model.moe.top_k = 3 is more than the 2 experts that model.moe.top_groups = 1 of model.moe.expert_groups = 4 leave | top_k 1 to 2, or top_groups 2 to 4."]),
    "two best of one": (line(dict(expert_groups=8, top_groups=2)), [
        "model.moe.group_score = top2 needs two experts in a group | expert_groups = 8 leaves one | Legal: top1, or expert_groups 4."]),
    # routing
    "token groups": (line(dict(capacity=1.0, group=100)), [
        "model.moe.group = 100 does not divide train.seq = 256 | consecutive tokens of one row. Nearest: 64, 128."]),
    "a group longer than the row": (line(dict(routing="sinkhorn", group=512)), ["model.moe.group = 512 does not divide train.seq = 256 | Nearest: 256."]),
    **{f"{routing} under ep": (line(dict(routing=routing, **more), mesh__ep=2), [
        f"model.moe.routing = {routing} with mesh.ep = 2: a router under ep sees only the tokens of its own device | Legal: token_choice, or mesh.ep 1."])
       for routing, more in (("sinkhorn", {}), ("expert_choice", dict(capacity=1.0)))},
    "experts that choose without a number": (line(dict(routing="expert_choice")), ["model.moe.routing = expert_choice needs model.moe.capacity | such as 1.0"]),
    "experts that choose the first": (line(CHOICE | dict(drop_order="position")), [
        "model.moe.drop_order = position with model.moe.routing = expert_choice | Legal: probability, or token_choice."]),
    "a bias for sinkhorn": (line(dict(routing="sinkhorn", bias_rate=0.001)), [
        "model.moe.bias_rate = 0.001 with model.moe.routing = sinkhorn | Legal: 0, or token_choice."]),
    "loads of the whole step": (line(dict(aux_weight=0.01, aux_scope="global"), train__microbatches=2), [
        "model.moe.aux_scope = global with train.microbatches = 2 | first backward pass. Legal: sequence, microbatch, or train.microbatches 1."]),
    # layers
    "no layer with experts": (line(dict(first_dense=3, every=2)), [
        "model.moe.every = 2 and model.moe.first_dense = 3 leave none of model.layers = 4 with experts "
        "| Legal: first_dense up to 2 with this every, or every up to 1 with this first_dense."]),
    "all layers dense": (line(dict(first_dense=4)), ["leave none | Legal: first_dense up to 3 with this every."]),
    "neither is legal": (line(dict(first_dense=9, every=9)), ["leave none | Legal: first_dense 0 and every up to 4."]),
    "chunks that differ": (line(dict(first_dense=1), mesh__pp=2), [
        "model.moe.every = 1 and model.moe.first_dense = 1 with mesh.pp = 2 | each of the 2 chunks must hold equally many layers, with experts at the same places "
        "| Legal: first_dense 0, with every 1; or every 2 in even chunks of 2 layers."]),
    "chunks too short": (line(dict(every=2), mesh__pp=4), [
        "model.moe.every = 2 and | each of the 4 chunks | Legal: first_dense 0, with every 1; or this every and model.layers 8 in even chunks."]),
    "padding among both kinds": (line(dict(every=2), mesh__pp=2, model__layers=5), [
        "each of the 2 chunks | Legal: first_dense 0, with every 1; or this every and model.layers 4, 8 in even chunks."]),
    "chunks of some lengths": (line(dict(every=2), mesh__pp=2, model__layers=8, parallel__layers_per_stage="2,6"), [
        "each of the 2 chunks | Legal: first_dense 0, with every 1; or every 2, 4 in even chunks of 4 layers."]),
    # widths
    "width of an expert": (line(dict(ffn=100), mesh__tp=8), [
        "mesh.tp = 8 does not divide model.moe.ffn = 100. Nearest ffn: 96, 104; legal tp: 1, 2, 4, 5, 10, 20, 25, 50, 100; or parallel.moe_tp = tokens"]),
    "the model's width, of an expert": (line(mesh__tp=4, model__ffn=354), ["mesh.tp = 4 does not divide model.moe.ffn = 354. Nearest ffn: 352, 356"]),
    "one width, told once": (line(dict(every=2), mesh__tp=4, model__ffn=354), ["mesh.tp = 4 does not divide model.ffn = 354"]),
    "two widths": (line(dict(every=2, ffn=98), mesh__tp=4, model__ffn=354), [
        "mesh.tp = 4 does not divide model.ffn = 354", "mesh.tp = 4 does not divide model.moe.ffn = 98"]),
    "tokens over tp": (line(mesh__sp=2, mesh__tp=4, parallel__moe_tp="tokens", train__seq=252), [
        "train.seq = 252 must be a multiple of 8, for mesh.sp = 2 and mesh.tp = 4 (moe_tp). Nearest: 248, 256."]),
    # many at once
    "all at once": (line(dict(experts=6, top_k=7, expert_groups=4, routing="sinkhorn", bias_rate=1, group=100, first_dense=4, scale=-1, aux_weight=1,
                              aux_scope="global", eval_capacity="true", ffn=33), mesh__ep=4, mesh__tp=2, train__microbatches=2), [
        "model.moe.scale = -1.0 must be greater than 0", "model.moe.experts = 6 does not split over mesh.ep = 4", "model.moe.top_k = 7",
        "model.moe.expert_groups = 4 does not divide", "model.moe.group = 100", "model.moe.routing = sinkhorn with mesh.ep = 4", "model.moe.bias_rate = 1.0",
        "model.moe.aux_scope = global", "leave none of model.layers = 4", "model.moe.eval_capacity = true cannot take effect: model.moe.capacity = none"]),
    "what a bad number would cause is not told": (line(dict(experts=-2, top_k=5, capacity=-1, eval_capacity="true", routing="expert_choice"), mesh__ep=2), [
        "model.moe.experts = -2", "model.moe.capacity = -1.0"]),
}


@pytest.mark.parametrize("words, expected", BAD.values(), ids=BAD)
def test_every_violation_is_told(words, expected, capsys, tmp_path):
    all_told(answer(capsys, "train", *words), expected)
    assert list(tmp_path.iterdir()) == []


EVERYTHING = dict(top_k=1, ffn=64, every=2, first_dense=1, shared=1, routing="sinkhorn", score="sigmoid", renormalise=False, scale=2.5, expert_groups=2,
                  top_groups=2, group_score="top1", bias_rate=0.5, jitter=0.5, noise=True, dropout=0.5, aux_weight=0.5, aux_scope="global", aux_warmup=3,
                  z_weight=0.5, capacity=1.5, group=64, drop_order="position", eval_capacity=True)
BY_CHOICE = "model.moe.routing = expert_choice balances loads by construction."

IDLE = {        # settings of model.moe, of parallel -> the reason why each of some does nothing
    "no experts": (dict(experts=0) | EVERYTHING, dict(moe_transport="gather", moe_tp="tokens"),
                   {**{f"model.moe.{name}": "model.moe.experts = 0." for name in EVERYTHING},
                    "parallel.moe_transport": "model.moe.experts = 0.", "parallel.moe_tp": "model.moe.experts = 0."}),
    "one device": ({}, dict(moe_transport="ragged", moe_tp="tokens"), {"parallel.moe_transport": "mesh.ep = 1.", "parallel.moe_tp": "mesh.tp = 1."}),
    "no loss": (dict(aux_scope="global", aux_warmup=5), {}, dict.fromkeys(("model.moe.aux_scope", "model.moe.aux_warmup"), "model.moe.aux_weight = 0.")),
    "dropless": (dict(drop_order="position", eval_capacity=True, group=64), {}, {
        "model.moe.drop_order": "model.moe.capacity = none, so", "model.moe.eval_capacity": "model.moe.capacity = none, so",
        "model.moe.group": "model.moe.capacity = none, and only a capacity or sinkhorn"}),
    "a group that does not fit, and need not": (dict(group=100), {}, {"model.moe.group": "model.moe.capacity = none, and only"}),
    "sinkhorn without a capacity": (dict(routing="sinkhorn", group=64, drop_order="position", aux_weight=0.1), {}, {
        "model.moe.drop_order": "model.moe.capacity = none"}),
    "one group of experts": (dict(top_groups=2, group_score="top1"), {}, dict.fromkeys(
        ("model.moe.top_groups", "model.moe.group_score"), "model.moe.expert_groups = 1.")),
    "all groups of experts": (dict(expert_groups=2, top_groups=2, group_score="top1"), {}, dict.fromkeys(
        ("model.moe.expert_groups", "model.moe.group_score"), "model.moe.top_groups = 2 are all groups.")),
    "experts choose": (CHOICE | dict(aux_weight=0.5, aux_scope="microbatch", aux_warmup=4, bias_rate=0.1, expert_groups=4, top_groups=2, group_score="top1",
                                     eval_capacity=True, group=64), {}, {
        **dict.fromkeys((f"model.moe.{name}" for name in ("aux_weight", "aux_scope", "aux_warmup", "bias_rate")), BY_CHOICE),
        **dict.fromkeys((f"model.moe.{name}" for name in ("expert_groups", "top_groups", "group_score")), "model.moe.routing = expert_choice: no token chooses."),
        "model.moe.eval_capacity": "model.moe.routing = expert_choice has its capacity in evaluation too."}),
    "nothing": (EVERYTHING | dict(routing="token_choice", expert_groups=4, aux_scope="sequence", ffn=352), {}, {}),
}


@pytest.mark.parametrize("moe, parallel, reasons", IDLE.values(), ids=IDLE)
def test_what_does_nothing(moe, parallel, reasons, capsys):
    run = configure(recipe("gpt_single").change(model=dict(moe=MOE | moe), parallel=parallel))
    idle = [note for note in run.notes if " is idle: " in note]
    assert len(idle) == len(reasons)
    for name, reason in reasons.items():
        assert any(note.startswith(f"{name} = ") and reason in note for note in idle), (name, idle)
    if not reasons:
        return
    typed = {f"parallel__{name}": value for name, value in parallel.items()}
    all_told(answer(capsys, "train", *line(moe, **typed)), [f"{name} = | cannot take effect: {reason}" for name, reason in reasons.items()])


def test_renormalise_is_none_of_the_experts_business(capsys):
    (told,) = answer(capsys, "train", *line(CHOICE | dict(renormalise="true")))
    assert "model.moe.renormalise = true cannot take effect" in told
    assert not [note for note in load(CHOICE | dict(renormalise="false")).notes + load(CHOICE).notes if "renormalise" in note]


NOTES = {       # settings -> the notes of the run
    "quiet": (line(), []),
    "capacity": (line(dict(capacity=1.25)), ["model.moe.capacity = 1.25: each expert takes 80 of 256 tokens, in training only."]),      # 1.25·2·256/8
    "capacity of a group": (line(dict(capacity=1.1, group=64, eval_capacity="true")), ["model.moe.capacity = 1.1: each expert takes 18 of 64 tokens."]),  # 17.6
    "as exact as typed": (line(dict(capacity=1.1, experts=1, top_k=1, group=128, eval_capacity="true", renormalise="false")), [
        "model.moe.capacity = 1.1: each expert takes 128 of 128 tokens; none is ever dropped."]),
    "room for all": (line(dict(capacity=4.0)), ["model.moe.capacity = 4.0: each expert takes 256 of 256 tokens, in training only; none is ever dropped."]),
    "experts choose": (line(CHOICE), [
        "model.moe.routing = expert_choice: a token's experts depend on later tokens of its group, in evaluation too, so the loss is not that of a model "
        "that writes token by token.", "model.moe.capacity = 1.0: each expert chooses 64 of 256 tokens."]),
    "one expert": (line(dict(top_k=1)), ["model.moe.top_k = 1 with model.moe.renormalise = true: every gate is 1, so the router learns only from its auxiliary "
                                         "losses (aux_weight and z_weight, which are 0)."]),
    "one expert and a loss": (line(dict(top_k=1, z_weight=0.1)), ["model.moe.top_k = 1 with model.moe.renormalise = true: every gate is 1, so the router learns "
                                                                   "only from its auxiliary losses (aux_weight and z_weight)."]),
    "its own score": (line(dict(top_k=1, renormalise="false")), []),
    "gpt2": (line(model__style="gpt2"), ["model.style = gpt2 with model.moe.experts: experts have no biases; attention, norms and dense layers keep theirs."]),
    # 16 rows of 256 on 4 devices: n = 1024; 4·n·min(2, 2) rows of cells
    "dropless cells": (line(mesh__ep=4), ["parallel.moe_transport = all_to_all without model.moe.capacity has room for the worst case: a device sends 8,192 rows "
                                          "per layer and micro-batch, of which 2,048 hold tokens. A capacity, or ragged on TPU and GPU, sends fewer."]),
    # n = 128 on each of ep2·sp2·tp2 in 4 micro-batches: 2·n·2
    "dropless cells of less": (line(mesh__ep=2, mesh__sp=2, mesh__tp=2, parallel__moe_tp="tokens", train__microbatches=4), [
        "parallel.moe_transport = all_to_all without model.moe.capacity has room for the worst case: a device sends 512 rows "
        "per layer and micro-batch, of which 256 hold tokens. A capacity, or ragged on TPU and GPU, sends fewer."]),
    "every expert": (line(dict(top_k=8), mesh__ep=4), []),
    "gather": (line(mesh__ep=4, parallel__moe_transport="gather"), []),
    "ragged": (line(mesh__ep=4, parallel__moe_transport="ragged"), []),
    "little work": (line(train__batch=1, train__seq=16), [     # 2·16/8
        "An expert gets 4 tokens of a micro-batch on each device that has it, on average; a matrix unit is full from 128 on. "
        "Larger micro-batches or fewer experts give more."]),
    "not yet known": (line(mesh__ep="auto", parallel__moe_transport="ragged", train__batch=1, train__seq=16), []),
}


@pytest.mark.parametrize("words, notes", NOTES.values(), ids=NOTES)
def test_notes(words, notes):
    assert list(jaxpara.load(words[0], {name.removeprefix("--"): value for name, value in zip(words[1::2], words[2::2])}).notes) == notes


LEGAL = {
    "auto": dict(mesh__ep="auto", mesh__dp=2),
    "experts over ep and tp": dict(mesh__ep=4, mesh__tp=2),
    "annotated": dict(mesh__ep=2, mesh__tp=2, parallel__lowering="annotated", parallel__moe_tp="tokens", parallel__check_vma=False),
    "groups of experts": dict(moe=dict(expert_groups=4, top_groups=1)),
    "groups of one expert": dict(moe=dict(expert_groups=8, top_groups=2, group_score="top1")),
    "experts choose, in groups of none": dict(moe=CHOICE | dict(top_k=2)),
    "sinkhorn and a loss": dict(moe=dict(routing="sinkhorn", aux_weight=0.1)),
    "global in one": dict(moe=dict(aux_weight=0.1, aux_scope="global")),
    "micro-batches in a pipeline": dict(moe=dict(aux_weight=0.1, aux_scope="microbatch"), mesh__pp=2, train__microbatches=4),
    "padding among experts": dict(mesh__pp=2, train__microbatches=4, model__layers=5),
    "chunks alike": dict(moe=dict(every=2), mesh__pp=2, train__microbatches=4),
    "short chunks alike": dict(moe=dict(every=2), mesh__pp=2, parallel__chunks=2, model__layers=8, train__microbatches=4),
    "an odd width and tokens": dict(moe=dict(ffn=97), mesh__tp=4, parallel__moe_tp="tokens"),
    "the last layer": dict(moe=dict(first_dense=3)),
    "a width that no layer has": dict(moe=dict(ffn=96), model__ffn=354, mesh__tp=4),
    "a width of dense layers": dict(moe=dict(every=2, ffn=64), model__ffn=512),
}


@pytest.mark.parametrize("settings", LEGAL.values(), ids=LEGAL)
def test_legal(settings):
    load(**settings)


def test_a_saved_run_says_the_same():
    run = load(dict(capacity=1.25, group=64, aux_weight=0.1), mesh__ep=2)
    assert configure(loads(dumps(run))) == run


def test_bad_runs_have_notes_too():
    """Notes are made of runs with violations as well, and thrown away."""
    run = load().change(mesh=dict(ep=5, tp=7), model=dict(moe=dict(experts=3, top_k=4, capacity=9.0)))
    assert list(moe_checks.wrong(run)) and list(moe_checks.notes(run))


@pytest.mark.parametrize("settings", [dict(mesh__ep=4), dict(mesh__ep=2, mesh__tp=2, parallel__moe_tp="tokens"), dict(moe=dict(experts=6, top_k=5), mesh__ep=2, mesh__sp=2),
                                      dict(moe=dict(capacity=1.1, group=64), mesh__ep=2), dict(moe=dict(capacity=9.0))])
def test_the_numbers_of_the_notes_are_the_programs(settings):
    run = load(**settings)
    sizes = layout(run)
    if sizes.capacity:
        assert f"each expert takes {sizes.capacity} of {run.model.moe.group} tokens" in run.notes[0]
    else:
        assert f"sends {sizes.sent:,} rows per layer and micro-batch, of which {sizes.tokens * sizes.choices:,} hold tokens" in run.notes[0]
