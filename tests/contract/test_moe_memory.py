"""Memory of experts: no tensor of every expert by every token; arguments exactly, temporaries within TOLERANCE of the compiled program."""
import re
from math import prod

import pytest
from jax import lax

import jaxpara
from contract.test_moe_contract import settings
from equivalence.hard import make_run
from jaxpara.config import Run
from jaxpara.experts import layout
from jaxpara.hlo.memory import split
from jaxpara.model import moe
from jaxpara.plan import memory
from jaxpara.settings import configure

TOLERANCE = 0.15

# --- no tensor of every expert by every token ---

MANY = {"model.moe.experts": 16, "model.moe.top_k": 2, "model.moe.ffn": 80, "model.layers": 1, "model.width": 64, "model.vocab": 37,
        "train.seq": 64, "train.batch": 16}
WAYS = {"dropless": "llama dp2", "dropless remat": "llama dp2 remat", "capacity": "llama dp2 cap=1.0 grp=16", "gather": "llama ep4 tr=gather",
        "cells": "llama ep4 cap=1.0", "rows in parts": "llama ep2 sp2 zigzag tr=gather cap=1.0 grp=8 aux=0.1"}
DAILY = ("dropless", "gather")


def compiled(case):
    """(run, text) of a small run whose experts are many."""
    run = make_run({**settings(case), **MANY}, "float32")
    return run, jaxpara.build(run).lower().compile().as_text()


def largest(text):
    """(elements, shape) of the largest array in a program."""
    shapes = {tuple(map(int, dims.split(","))) for dims in re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", text)}
    return max((prod(shape), shape) for shape in shapes)


def every(run):
    """E·n·min(H, F): what the smallest tensor of all experts by all tokens of a device would have."""
    return run.model.moe.experts * layout(run).tokens * min(run.model.width, run.model.moe.ffn)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in DAILY)) for name in WAYS])
def test_no_tensor_of_every_expert_by_every_token(name):
    """Exact worst-case cells apart, whose N_ep·n·min(K, E/N_ep) rows are what they are for."""
    run, text = compiled(WAYS[name])
    size, shape = largest(text)
    assert size < every(run), shape
    assert every(run) > 2 * 16 * 64 * 80        # the experts' own weights do not hide it


def test_a_ragged_dot_on_cpu_is_seen(monkeypatch):
    """Planted fault: the matmul that expands to E × rows × width."""
    monkeypatch.setattr(moe, "grouped", lambda x, weight, groups: lax.ragged_dot(x, weight, groups.sizes))
    run, text = compiled(WAYS["dropless"])
    assert largest(text)[0] >= every(run)


# --- the plan ---

LARGE = {"model.layers": 4, "model.width": 128, "model.heads": 8, "model.kv_heads": 4, "model.vocab": 256, "train.batch": 16, "train.seq": 256,
         "optim.clip": None, "model.moe.top_k": 2, "model.moe.ffn": 192}
NARROW = {"precision.compute": "bfloat16", "precision.params": "bfloat16", "precision.master": "float32"}
PLANS = {
    "dropless": "llama", "cells": "llama ep4 cap=1.25 grp=64", "worst case": "llama ep4 dp2", "gather": "llama ep4 tr=gather",
    "remat": "llama ep2 dp2 remat m2",
    "tokens": "llama ep2 tp2 cap=1.0 mtp=tokens",
    "mixed": "gpt2 ep2 fsdp2 every=2 shared=1 cap=1.0 keepmatmuls",
    "16-bit": "llama dp2 cap=1.0 bias_rate=0.01 jitter=0.01",
    "pipeline": "llama pp2 ep2 m4 1f1b cap=1.0",
}
OFTEN = ("cells", "16-bit")


def planned(name):
    run = configure(Run(), {**settings(PLANS[name]), **LARGE, **(NARROW if name == "16-bit" else {})})
    program = jaxpara.build(run).lower().compile()
    return run, program.as_text(), program.memory_analysis()


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in OFTEN)) for name in PLANS])
def test_the_plan(name):
    """Arguments to the byte, part by part: routers in float32 whatever the rest, the selection bias, row numbers where something is random."""
    run, text, stats = planned(name)
    arguments, parts = memory.arguments(run), split(text, stats, run)["parts"]
    assert arguments["total"] == stats.argument_size_in_bytes
    assert all(arguments[part] == parts[part] for part in ("parameters", "master", "optimizer", "scalars", "batch"))
    assert memory.temporaries(run)["total"] == pytest.approx(stats.temp_size_in_bytes, rel=TOLERANCE)


def test_arguments_of_routers():
    """By hand: bfloat16 experts, float32 routers, a bias for each layer and expert, a row number where routers draw."""
    base = {**settings("llama dp2"), **LARGE, "precision.compute": "bfloat16", "precision.params": "bfloat16", "optim.name": "sgd"}
    narrow = configure(Run(), base)
    wide = configure(Run(), {**base, "precision.compute": "float32", "precision.params": "float32"})
    router = 4 * 128 * 8
    assert 2 * (memory.arguments(narrow)["parameters"] - 2 * router) == memory.arguments(wide)["parameters"]

    def more(**changes):
        """{part: bytes more} than without these settings of model.moe."""
        plain, changed = (memory.arguments(run) for run in (narrow, configure(Run(), {**base, **{f"model.moe.{k}": v for k, v in changes.items()}})))
        return {part: size - plain[part] for part, size in changed.items() if size != plain[part]}

    assert more(bias_rate=0.1) == {"scalars": 4 * 8 * 4, "total": 4 * 8 * 4}
    assert more(jitter=0.1) == {"batch": 16 // 2 * 4, "total": 16 // 2 * 4}
    assert more(noise=True) == {"parameters": 4 * router, "batch": 32, "total": 4 * router + 32}


def test_the_tolerance_tells_transports_apart():
    """Planted fault: another transport's or capacity's plan is outside it."""
    total = lambda name: memory.temporaries(configure(Run(), {**settings(PLANS[name]), **LARGE}))["total"]
    assert total("worst case") > (1 + TOLERANCE) * total("cells") and total("dropless") > (1 + TOLERANCE) * total("worst case")
