"""The contract of experts: what compiled programs send of tokens, ids, loads and weights is what the config predicts; SPEC's formulas of it."""
import os
import re
from functools import cache

import pytest
from jax import lax

from contract.test_inspect import exact, inspected
from equivalence.hard import B, S, make_run
from equivalence.matrix import settings as dense_settings
from jaxpara import context
from jaxpara.experts import layout
from jaxpara.plan.traffic import traffic

SHORT = {"cap": "model.moe.capacity", "grp": "model.moe.group", "aux": "model.moe.aux_weight", "scope": "model.moe.aux_scope",
         "z": "model.moe.z_weight", "drop": "model.moe.drop_order", "tr": "parallel.moe_transport", "mtp": "parallel.moe_tp",
         "E": "model.moe.experts", "K": "model.moe.top_k"}

ALWAYS = ["llama ep4 dp2", "llama ep2 tp2 cap=1.0 grp=8", "llama ep4 dp2 tr=gather aux=0.1"]
OTHERS = [
    # one expert per device; token groups and rows over several devices
    "llama ep4 dp2 E=4", "llama ep4 sp2 striped cap=1.0 grp=8",
    "gpt2 ep2 sp4 zigzag cap=1.5 drop=position aux=0.1", "llama sp2 dp2 routing=sinkhorn grp=8",
    # tp splits widths, or tokens
    "gpt2 ep2 tp4 megatron shared=1 z=0.01", "llama ep2 sp2 tp2 mtp=tokens cap=1.25 aux=0.1", "llama ep2 tp2 dp2 mtp=tokens megatron m3 K=2",
    "llama tp2 dp2 routing=expert_choice cap=1.0 grp=8 shared=1",
    # weights of experts under ZeRO, recomputation, accumulation
    "llama ep2 fsdp2 remat m3 aux=0.1", "gpt2 ep2 dp2 fsdp2 zdp1 zep1 bias_rate=0.01 noise=true", "llama ep4 tr=gather keepmatmuls m3 cap=1.0",
    # pipelines
    "llama pp2 ep2 m3 circular aux=0.1 remat", "llama pp2 ep2 m2 1f1b cap=1.0", "gpt2 pp2 ep2 m3 zb_h1 aux=0.1 tr=gather",
    # dense layers between, scopes of the balance loss
    "llama ep2 dp2 L5 every=2 first_dense=1 m3", "llama ep2 sp2 m3 aux=0.1 scope=microbatch", "llama ep2 tp2 sp2 aux=0.1 scope=global z=0.01",
    # a pipeline's chunks of exactly one period of dense layers and one with experts
    "llama pp2 ep2 m2 1f1b L4 every=2 tr=gather",
    "llama pp2 ep2 tp2 m2 1f1b L4 every=2 cap=1.0", "llama pp2 ep2 m2 circular L4 every=2 cap=1.0 remat",
]
PARTS = 4
ROTATION = int(os.environ.get("ROTATION", 0)) % PARTS
CASES = ALWAYS + [pytest.param(case, marks=[pytest.mark.slow] * (i % PARTS != ROTATION)) for i, case in enumerate(OTHERS)]


def settings(case):
    """Overrides of a case of `equivalence.matrix` that also knows ep4, zep1 and name=value: SHORT, or of model.moe."""
    words = case.split()
    mine = [word for word in words if "=" in word or re.fullmatch(r"z?ep\d+", word)]
    overrides = {"model.moe.experts": 8, "model.moe.top_k": 3, "model.moe.ffn": 28, **dense_settings(" ".join(w for w in words if w not in mine))[0]}
    for word in mine:
        name, value = word.split("=") if "=" in word else ("parallel.zero.ep" if word[0] == "z" else "mesh.ep", word.lstrip("zep"))
        overrides[SHORT.get(name, name if "." in name else f"model.moe.{name}")] = value
    return overrides


def run_of(case):
    return make_run(settings(case), "float32")


@cache
def report(case):
    return inspected(settings(case))


@pytest.mark.parametrize("case", CASES)
def test_exact(case):
    exact(report(case))


# --- formulas: of all layers and micro-batches, forward and backward, nothing recomputed ---

def sent(run, platform="cpu", of="tokens"):
    """Bytes that one device sends for tokens on their way, in all."""
    return sum(line.wire for line in traffic(run, platform) if line.owner == "moe" and line.what.startswith(of))


def dims(run):
    """(layers · micro-batches, n: tokens of a micro-batch that a device routes, H, N_ep)."""
    mesh, m = run.mesh, run.train.microbatches
    return run.model.layers * m, B * S // m // mesh.batch // mesh.sp, run.model.width, mesh.ep


@pytest.mark.parametrize("case", ["llama ep2 cap=1.0 grp=8", "llama ep4 dp2 cap=1.0 grp=8 m3", "gpt2 ep8 cap=1.25", "llama ep4 cap=1.0 sp2 grp=8",
                                  "llama ep2 tp2 cap=2.0"])
def test_padded_cells(case):
    """E·C rows per token group and micro-batch: 4δ·H·E·C·(N_ep-1)/N_ep, whatever the routing."""
    run = run_of(case)
    times, tokens, width, ways = dims(run)
    moe, groups = run.model.moe, tokens // run.model.moe.group
    most = -(-int(100 * moe.capacity) * moe.top_k * moe.group // (100 * moe.experts))
    assert sent(run) == times * groups * 4 * 4 * width * moe.experts * most * (ways - 1) // ways > 0


def test_padded_cells_grow_with_the_capacity_only():
    one, two, few = (sent(run_of(f"llama ep4 grp=16 {more}")) for more in ("cap=1.0", "cap=2.0", "cap=1.0 K=1"))
    assert two == 2 * one and few * 3 == one


@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("case", ["llama ep2 dp2", "gpt2 ep4 m3", "llama ep8", "llama ep4 sp2 cap=1.0 grp=4"])
def test_gathered_tokens(case, k):
    """4δ(N_ep-1)·n·H whatever K; ids and weights beside them, which do grow with it."""
    run = run_of(f"{case} tr=gather K={k}")
    times, tokens, width, ways = dims(run)
    assert sent(run) == times * 4 * 4 * (ways - 1) * tokens * width
    assert sent(run, of="routing: ids") == times * 4 * (ways - 1) * tokens * k
    assert sent(run, of="routing: weights") == 2 * times * 4 * (ways - 1) * tokens * k


@pytest.mark.parametrize("case", ["llama ep2 dp2", "gpt2 ep4 m3", "llama ep4 tp2", "llama ep8 K=2", "llama ep2 E=4"])
def test_worst_case_cells(case):
    """Dropless: room for all that one device may send another, n·min(K, E/N_ep) rows for each: 4δ·N_ep·n·min(K, E/N_ep)·H·(N_ep-1)/N_ep."""
    run = run_of(case)
    times, tokens, width, ways = dims(run)
    rows = tokens * min(run.model.moe.top_k, run.model.moe.experts // ways)
    assert sent(run) == times * 4 * 4 * (ways - 1) * rows * width
    counts = times * 4 * run.model.moe.experts * (ways - 1) // ways if layout(run).regrouped else 0
    assert sent(run, of="routing: counts") == counts


@pytest.mark.parametrize("case", ["llama ep2 dp2", "gpt2 ep4 m3 K=2", "llama ep8 K=1", "llama ep4 sp2"])
def test_ragged_pieces(case):
    """Exactly the rows that are chosen: 4δ·K·n·H·(N_ep-1)/N_ep, and never more than the padded ones."""
    run = run_of(f"{case} tr=ragged")
    times, tokens, width, ways = dims(run)
    assert sent(run, "tpu") == times * 4 * 4 * run.model.moe.top_k * tokens * width * (ways - 1) // ways
    assert sent(run, "tpu") <= sent(run_of(case))


def test_16_bit_halves_tokens_and_not_routers():
    run = run_of("llama ep4 tr=gather")
    half = run.change(precision=dict(compute="bfloat16", params="bfloat16"))
    assert 2 * sent(half) == sent(run) and sent(half, of="routing") == sent(run, of="routing")


def test_recomputation_sends_again_what_the_layer_sent():
    """remat = full runs the dispatch again: six exchanges of cells in place of four."""
    plain, again = sent(run_of("llama ep4 cap=1.0")), sent(run_of("llama ep4 cap=1.0 remat"))
    assert 4 * again == 6 * plain


def test_groups_on_several_devices_ask_for_ids_and_scores():
    """By name; ids only where the first of the row stay; nothing where no group spans."""
    names = lambda case: {line.what for line in traffic(run_of(case), "cpu") if line.what.startswith("routing: ") and line.phase == "forward"}
    assert names("llama ep4 sp2 striped cap=1.0 grp=8") == {"routing: ids of whole rows", "routing: scores of whole rows"}
    assert names("llama ep4 sp2 striped cap=1.0 grp=8 drop=position") == {"routing: ids of whole rows"}
    assert names("llama ep4 sp2 cap=1.0 grp=8") == names("llama ep4 cap=1.0") == set()
    assert names("llama sp2 routing=sinkhorn") == {"routing: logits of whole rows"}
    assert names("llama ep4 dp2") == {"routing: counts"}


@pytest.mark.parametrize("scope, axes, elements", [
    ("sequence", ("sp",), 8 * B // 4), ("microbatch", ("dp", "ep", "sp"), 8), ("global", ("dp", "ep", "sp"), 8)])
def test_loads_of_the_balance_loss(scope, axes, elements):
    """Per row over the axes that split rows; else over all that hold tokens."""
    lines = [line for line in traffic(run_of(f"llama dp2 ep2 sp2 aux=0.1 scope={scope}"), "cpu") if "loads per" in line.what]
    assert {(line.axes, line.elements, line.calls, line.dtype) for line in lines if line.phase == "forward"} == {(axes, elements, 3, "int32")}
    assert not any("loads per" in line.what for line in traffic(run_of("llama dp2 ep2 aux=0.1"), "cpu"))


# --- one expert per device ---

def test_a_device_with_one_expert_sorts_once():
    """E = N_ep: the second, local routing step disappears, and with it its exchange of counts and its sorts."""
    several, one = report("llama ep4 dp2"), report("llama ep4 dp2 E=4")
    assert layout(several.run).regrouped and not layout(one.run).regrouped
    counts = lambda found: sum(line.calls for line in found.compiled if line.kind == "all-to-all" and line.dtype == "int32")
    sorts = lambda found: len(re.findall(r" sort\(", found.text))
    assert counts(one) == 0 < counts(several) == several.run.model.layers
    assert 0 < sorts(one) < sorts(several)
    assert "moe.counts" not in one.text and "moe.counts" in several.text


# --- what breaks the contract is named ---

def test_a_gather_in_the_way_of_tokens_is_seen(monkeypatch):
    """Planted fault: experts' results are put together over ep, and a device keeps its own."""
    original = context.ManualCtx.through_experts

    def wasteful(self, x, routed, experts):
        out = original(self, x, routed, experts)
        whole = lax.all_gather(out, "ep", axis=1, tiled=True) * 1.5
        return lax.dynamic_slice_in_dim(whole, lax.axis_index("ep") * out.shape[1], out.shape[1], 1)

    monkeypatch.setattr(context.ManualCtx, "through_experts", wasteful)
    found = inspected({**settings("llama ep2 cap=1.0"), "parallel.check_vma": False})
    named = [one for one in found.differences if one.kind == "unplanned" and "all-gather over ep" in one.text]
    assert not found.kept and named and found.unexplained_bytes >= sum(one.bytes for one in named) > 0
