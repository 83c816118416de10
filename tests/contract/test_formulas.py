"""The formulas of the literature equal the sums of the plan's lines, over head ratios and degrees."""
import pytest

from equivalence.hard import make_run
from jaxpara.params import count
from jaxpara.plan import model_state, traffic
from jaxpara.settings import configure

MIXED = {"precision.compute": "bfloat16", "precision.params": "bfloat16", "precision.master": "float32"}


def sums(run, *words):
    """(wire, limit) of the lines whose `what` contains one of the words."""
    lines = [line for line in traffic(run) if any(word in line.what for word in words)]
    return sum(line.wire for line in lines), sum(line.limit for line in lines)


def shape(run):
    """δ, b, S, H, L of one micro-batch."""
    bytes_each = {"bfloat16": 2, "float32": 4, "float64": 8}[run.precision.compute]
    return bytes_each, run.train.batch // run.train.microbatches // run.mesh.batch, run.train.seq, run.model.width, run.model.layers


@pytest.mark.parametrize("tp,sp", [(2, 1), (4, 1), (4, 2), (8, 1)])
def test_tensor_parallelism_8_per_layer_10_with_megatron_sp(tp, sp):
    """8δb(S/N_sp)H per layer as all-reduces; 10 with Megatron-SP, whose backward gathers each block's input again."""
    for megatron, factor in ((False, 8), (True, 10)):
        run = make_run({"mesh.tp": tp, "mesh.sp": sp, "parallel.tp_sequence": megatron}, "float32")
        delta, b, seq, width, layers = shape(run)
        wire, limit = sums(run, "block")
        assert limit == factor * delta * b * seq // sp * width * layers
        assert wire == limit * (tp - 1) / tp


@pytest.mark.parametrize("sp,tp,kv", [(2, 1, 8), (4, 1, 4), (4, 2, 4), (8, 1, 8), (2, 4, 8), (4, 1, 2)])
def test_ulysses(sp, tp, kv):
    """4(N_kv/N_q + 1)·δbSN_q·d/(N_sp·N_tp) per layer; N_kv counts the copies when there are fewer than devices."""
    run = make_run({"mesh.sp": sp, "mesh.tp": tp, "model.kv_heads": kv, "parallel.sp_kind": "ulysses"}, "float32")
    delta, b, seq, _, layers = shape(run)
    queries, copies = run.model.heads, max(kv, sp * tp)
    wire, limit = sums(run, "Ulysses")
    assert limit == 4 * (copies / queries + 1) * delta * b * seq * queries * run.model.head_dim / (sp * tp) * layers
    assert wire == limit * (sp - 1) / sp


@pytest.mark.parametrize("sp,tp,kv", [(2, 1, 4), (4, 1, 2), (8, 1, 1), (4, 2, 4)])
def test_ring(sp, tp, kv):
    """Forward 2δbSN_kv·d/N_tp, in all 6 when dK, dV travel in the same width and 8 when compute is bf16 and they in fp32; n-1 hops of n but
    for dK, dV, whose last hop brings them home."""
    for settings, total in (({}, 6), (MIXED, 8)):
        run = configure(make_run({"mesh.sp": sp, "mesh.tp": tp, "model.kv_heads": kv}, "float32"), settings)
        delta, b, seq, _, layers = shape(run)
        unit = delta * b * seq * max(kv, tp) // tp * run.model.head_dim * layers
        chunk = (sp - 1) / sp
        assert sums(run, "ring K, V, forward")[0] == 2 * unit * chunk
        assert sums(run, "ring")[0] == (4 * chunk + (total - 4)) * unit


def test_all_gather_of_keys_and_values():
    """2δbSN_kv·d forward, as much again in backward, and the gradients' reduce-scatter."""
    run = make_run({"mesh.sp": 4, "parallel.sp_kind": "allgather"}, "float32")
    delta, b, seq, _, layers = shape(run)
    unit = 2 * delta * b * seq * run.model.kv_heads * run.model.head_dim * layers
    assert [sums(run, what)[1] for what in ("keys and values, forward", "keys and values, backward", "key and value gradients")] == [unit] * 3


# 37 tokens do not split over 8; 40 do, so that every parameter is sharded and the table's formulas are exact
DIVIDES = {"model.vocab": 40, "mesh.dp": 8}


@pytest.mark.parametrize("m", [1, 3])
def test_the_zero_table(m):
    """2δΦ, 2δΦ, (m+1)δΦ, 3mδΦ per step, times (N-1)/N, for stages 0 to 3 (the embedding is not needed again in backward: 3mδΦ less its mδ)."""
    found, phi, delta = {}, None, 4
    for stage in range(4):
        run = make_run({**DIVIDES, "parallel.zero.dp": stage, "train.microbatches": m}, "float32")
        phi = count(run.model)
        found[stage] = sums(run, "ZeRO", "updated")[1]
    outside = 2 * run.model.vocab * run.model.width + run.model.width      # embedding, head and final norm: gathered in forward only
    assert found == {0: 2 * delta * phi, 1: 2 * delta * phi, 2: (m + 1) * delta * phi, 3: 3 * m * delta * phi - m * delta * outside}


def test_model_state_by_stage():
    """(2δ+(n_opt+1)δ_opt)Φ and its parts divided by N as the stage says: 16 bytes per parameter whole, δ_grad = 4 since a master copy exists."""
    for stage, parts in {0: (2, 4, 12), 1: (2, 4, 12 / 8), 2: (2, 4 / 8, 12 / 8), 3: (2 / 8, 4 / 8, 12 / 8)}.items():
        run = configure(make_run({**DIVIDES, "parallel.zero.dp": stage}, "float32"), MIXED)
        state = model_state(run)
        phi = count(run.model)
        assert (state["parameters"], state["gradients"], state["master"] + state["optimizer"]) == tuple(part * phi for part in parts)
        assert state["total"] == sum(parts) * phi
