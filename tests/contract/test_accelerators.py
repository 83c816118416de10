"""The contract on TPU pods and GPU clusters that nobody here owns: compiled only, differences but for known rewrites are none."""
import pytest

import jaxpara
from backends import needs_gpu, needs_tpu, on_day
from equivalence.hard import make_run
from jaxpara import ConfigError
from jaxpara.hlo.inspection import CLASSES
from jaxpara.report import screen
from jaxpara.report.inspect import show

LARGE = {"model.width": 512, "model.ffn": 1024, "model.head_dim": 64, "train.seq": 512}
MESHES = {"fsdp4 tp2 megatron": {"mesh.fsdp": 4, "mesh.tp": 2, "parallel.tp_sequence": True},
          "dp2 fsdp2 tp2 zdp1 m3": {"mesh.dp": 2, "mesh.fsdp": 2, "mesh.tp": 2, "parallel.zero.dp": 1, "train.microbatches": 3},
          "fsdp2 sp4 ring": {"mesh.fsdp": 2, "mesh.sp": 4},
          "dp2 sp4 ulysses zdp2": {"mesh.dp": 2, "mesh.sp": 4, "parallel.sp_kind": "ulysses", "parallel.zero.dp": 2},
          "fsdp8 remat": {"mesh.fsdp": 8, "parallel.remat": "full"}}


def agrees(report, capsys, allowed=0.02):
    """The table is printed; per axes and class the bytes are within 2 % of the prediction, or a rewrite names the difference."""
    with capsys.disabled():
        print()
        show(report, screen.console())
    assert report.kept, [one.text for one in report.differences]
    changed = {((pair.predicted or pair.compiled).axes, CLASSES[one.kind]) for pair in report.contract.pairs if pair.rewrites
               for one in (pair.predicted, pair.compiled) if one}
    for key, (predicted, compiled) in report.totals.items():
        assert abs(compiled - predicted) <= allowed * predicted or key in changed, (key, predicted, compiled)


@needs_tpu
@pytest.mark.parametrize("mesh", [pytest.param(mesh, marks=[pytest.mark.slow] * (i in (0, 2, 4))) for i, mesh in enumerate(MESHES)])
def test_a_small_step_on_eight_chips(mesh, capsys):
    agrees(jaxpara.build(make_run({**LARGE, **MESHES[mesh]}, "float32"), "tpu:v5e:2x4").inspect(), capsys)


@needs_gpu
@pytest.mark.parametrize("mesh", MESHES)
def test_a_small_step_on_eight_gpus(mesh, capsys):
    agrees(jaxpara.build(make_run({**LARGE, **MESHES[mesh]}, "float32"), "gpu:h100:1x8").inspect(), capsys)


def large(recipe, target, capsys, memory=0.1):
    report = jaxpara.build(jaxpara.load(recipe), target).inspect()
    agrees(report, capsys)
    assert report.memory["argument"] == report.memory["predicted"]["arguments"]["total"], "tile padding included"
    assert abs(report.memory["predicted"]["peak"] / report.memory["peak"] - 1) < memory
    assert report.seconds < 240 and report.fits


@needs_tpu
@on_day(1, 3)
def test_llama3_8b_on_64_chips(capsys):
    large("llama3_8b", "tpu:v5p:4x4x4", capsys)


@needs_tpu
@pytest.mark.slow
def test_llama3_70b_on_512_chips(capsys):
    large("llama3_70b", "tpu:v5p:8x8x8", capsys)


@needs_gpu
def test_llama3_70b_on_128_gpus(capsys):
    large("llama3_70b", "gpu:h100:16x8", capsys)


ROUTED = {"model.moe.experts": 8, "model.moe.ffn": 256, "model.moe.top_k": 2, "model.moe.aux_weight": 0.01}
ROUTED_MESHES = {"ep4 fsdp2 ragged remat": {"mesh.ep": 4, "mesh.fsdp": 2, "parallel.moe_transport": "ragged", "parallel.remat": "full"},
                 "ep4 tp2 capacity": {"mesh.ep": 4, "mesh.tp": 2, "model.moe.capacity": 1.25, "model.moe.group": 128},
                 "ep2 fsdp2 tp2 gather megatron": {"mesh.ep": 2, "mesh.fsdp": 2, "mesh.tp": 2, "parallel.tp_sequence": True,
                                                   "parallel.moe_transport": "gather"},
                 "pp2 ep4 1f1b ragged": {"mesh.pp": 2, "mesh.ep": 4, "parallel.schedule": "1f1b", "train.microbatches": 2,
                                         "parallel.moe_transport": "ragged"}}


@needs_tpu
@pytest.mark.parametrize("mesh", [pytest.param(mesh, marks=on_day(i, 4)) for i, mesh in enumerate(ROUTED_MESHES)])
def test_experts_on_eight_chips(mesh, capsys):
    """Ragged sends too: counted are the rows that are due, of the buffers around them the smaller one's."""
    agrees(jaxpara.build(make_run({**LARGE, **ROUTED, **ROUTED_MESHES[mesh]}, "float32"), "tpu:v5p:2x2x2").inspect(), capsys)


@needs_gpu
@pytest.mark.parametrize("mesh", ROUTED_MESHES)
def test_experts_on_eight_gpus(mesh, capsys):
    agrees(jaxpara.build(make_run({**LARGE, **ROUTED, **ROUTED_MESHES[mesh]}, "float32"), "gpu:h100:1x8").inspect(), capsys)


@needs_tpu
@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral_8x7b", "qwen3_moe_30b"])
def test_experts_on_64_chips(name, capsys):
    large(name, "tpu:v5p:4x4x4", capsys)


@needs_tpu
@pytest.mark.slow
def test_a_scatter_in_two_steps_stays_a_scatter():
    """One axis over a whole 4×4×4 slice: in one step XLA:TPU makes all-reduces of the scatters, for twice the bytes; in two it does not."""
    sums = {}
    for inner in ("none", 4):
        run = jaxpara.load("llama3_8b", {"model.layers": 2, "mesh.tp": 1, "parallel.tp_sequence": False, "train.seq": 1024, "parallel.scatter_inner": inner})
        report = jaxpara.build(run, "tpu:v5p:4x4x4").inspect()
        assert report.kept
        sums[inner] = sum(line.wire for line in report.compiled if line.kind in ("all-reduce", "reduce-scatter"))
        planned = sum(line.wire for line in report.predicted if line.kind in ("all-reduce", "reduce-scatter"))
    assert sums["none"] > 1.9 * planned and sums[4] < 1.05 * planned


@needs_tpu
def test_a_program_that_does_not_fit_is_refused_with_the_compilers_words():
    with pytest.raises(ConfigError, match=r"llama3_8b does not fit on tpu:v5e:2x2, its compiler says: .*15\.75G"):
        jaxpara.build(jaxpara.load("llama3_8b", {"train.batch": 8}), "tpu:v5e:2x2").inspect()
