"""The contract: what compiled programs communicate is what the config predicts, line by line; and what breaks it is called by name."""
import json
import os
from collections import Counter

import pytest

import jaxpara
from equivalence.hard import make_run
from equivalence.matrix import CASES, settings
from jaxpara import cli, collectives, context, gradients, state
from jaxpara.params import count
from jaxpara.settings import configure

MANUAL = [case for case in CASES if "annotated" not in case]
MORE = ["llama sp2 dp4 keepmatmuls", "gpt2 sp4 dp2 hybrid2 remat", "llama sp8 hybrid4 keepmatmuls m3", "llama sp4 dp2 remat", "gpt2 sp2 dp2 allgather remat", "llama sp4 dp2 allgather keepmatmuls",
        "llama sp2 tp2 ulysses remat m3", "gpt2 fsdp8 tied remat m3"]
"""Where the compiler merges what is recomputed, beyond the matrix."""

ROTATION = int(os.environ.get("ROTATION", 0)) % 3
SPREAD = [pytest.param(case, marks=[pytest.mark.slow] * (i % 3 != ROTATION)) for i, case in enumerate(MANUAL)]


def inspected(overrides, dtype="float32"):
    return jaxpara.build(make_run(overrides, dtype)).inspect()


def counted(lines):
    """{what a line says: calls}, lines that say the same added up."""
    sums = Counter()
    for line in lines:
        sums[line.kind, line.axes, line.dtype, line.elements, line.phase, line.owner, line.n] += line.calls
    return sums


def exact(report):
    assert report.memory["argument"] == report.memory["predicted"]["arguments"]["total"]
    assert report.kept and report.unexplained_bytes == 0 and report.missing == [] and not report.contract.rewrites
    assert counted(report.predicted) == counted(report.compiled)


@pytest.mark.parametrize("case", SPREAD)
def test_matrix(case):
    exact(inspected(settings(case)[0]))


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (i % 3 != ROTATION)) for i, case in enumerate(MORE)])
def test_what_compilers_merge_is_predicted(case):
    exact(inspected(settings(case)[0]))


TINY = sorted(name for name in jaxpara.recipes() if name.startswith("gpt_") or name.endswith("_tiny"))


@pytest.mark.parametrize("name", [*TINY, *(pytest.param(name, marks=pytest.mark.slow) for name in sorted(set(jaxpara.recipes()) - set(TINY)))])
def test_recipes(name):
    run = jaxpara.load(name)
    run = configure(run, {f"mesh.{run.mesh.auto}": 16 // run.mesh.tp // run.mesh.ep if "gpt2" not in name else 8}) if run.mesh.auto else run
    run = configure(run, {"parallel.moe_transport": "all_to_all"}) if run.parallel.moe_transport == "ragged" else run
    report = jaxpara.build(run, f"cpu:{run.mesh.size}").inspect()
    assert report.kept and not report.missing and report.unexplained_bytes == 0
    assert set(report.contract.rewrites) <= {"widened"}
    assert report.memory["argument"] == report.memory["predicted"]["arguments"]["total"]


def test_float64():
    exact(inspected({"mesh.fsdp": 2, "mesh.sp": 2, "mesh.tp": 2, "train.microbatches": 3, "parallel.tp_sequence": True}, "float64"))


def test_16_bit_collectives_that_the_cpu_widens_are_flagged():
    run = configure(make_run({"mesh.fsdp": 2, "mesh.sp": 2, "mesh.tp": 2}, "float32"),
                    {"precision.compute": "bfloat16", "precision.params": "bfloat16", "precision.master": "float32"})
    report = jaxpara.build(run).inspect()
    assert report.kept and set(report.contract.rewrites) == {"widened"}
    pairs = report.contract.rewrites["widened"]
    assert {(pair.predicted.dtype, pair.compiled.dtype) for pair in pairs} == {("bfloat16", "float32")}
    assert all(pair.predicted.elements == pair.compiled.elements and pair.predicted.calls == pair.compiled.calls for pair in pairs)
    assert sum(line.wire for line in report.compiled) > 1.2 * sum(line.wire for line in report.predicted)


# 37 tokens do not split over 8; 40 do, so that every parameter is sharded and the formulas are exact
ZERO = {"0": {"parallel.zero.dp": 0}, "1": {"parallel.zero.dp": 1}, "2": {"parallel.zero.dp": 2}, "3": {"parallel.zero.dp": 3}}


@pytest.mark.parametrize("m", [1, 4])
def test_the_zero_table(m, capsys):
    """SPEC section 3 from compiled programs: 2δΦ, 2δΦ, (m+1)δΦ, 3mδΦ (less what is gathered in forward only), times (N-1)/N."""
    rows, base = [], {"mesh.dp": 8, "model.vocab": 40, "train.microbatches": m, "train.batch": 32}
    for stage, overrides in ZERO.items():
        report = inspected({**base, **overrides})
        model = report.run.model
        phi, outside = count(model), 2 * 40 * model.width + model.width
        kinds = Counter()
        for line in report.compiled:
            if line.elements > 1:
                kinds[line.kind] += line.wire
                rows.append((f"ZeRO-{stage}", "dp8", line.kind, line.when, line.calls, line.wire))
        unit = 4 * phi * 7 // 8
        assert dict(kinds) == {"0": {"all-reduce": 2 * unit}, "1": {"reduce-scatter": unit, "all-gather": unit},
                               "2": {"reduce-scatter": m * unit, "all-gather": unit},
                               "3": {"all-gather": m * (2 * unit - 4 * outside * 7 // 8), "reduce-scatter": m * unit}}[stage]
        loops = {line.when for line in report.compiled if line.elements > 1 and line.kind == "reduce-scatter"}
        assert loops <= {"0": set(), "1": {"step"}, "2": {"micro-batch"} if m > 1 else {"step"},
                         "3": {"micro-batch", "micro-batch · layer"} if m > 1 else {"step", "layer"}}[stage]
    hybrid = inspected({**base, "mesh.dp": 2, "mesh.fsdp": 4, "parallel.zero.dp": 1})
    sums = Counter()
    for line in hybrid.compiled:
        if line.elements > 1:
            sums[line.axes, line.kind] += line.wire
            rows.append(("hybrid", line.axis, line.kind, line.when, line.calls, line.wire))
    inner, outer = 4 * phi * 3 // 4, 4 * phi // 4 // 2
    assert dict(sums) == {(("fsdp",), "all-gather"): m * (2 * inner - 4 * outside * 3 // 4), (("fsdp",), "reduce-scatter"): m * inner,
                          (("dp",), "reduce-scatter"): outer, (("dp",), "all-gather"): outer}
    with capsys.disabled():
        print(f"\nZeRO in compiled programs, Φ = {phi:,} float32, m = {m}: per device and step")
        table = Counter()
        for *key, calls, wire in rows:
            table[tuple(key), "calls"] += calls
            table[tuple(key), "wire"] += wire
        for key in dict.fromkeys(key for key, _ in table):
            print("  {:<8} {:<5} {:<15} {:<20}".format(*key), f"{table[key, 'calls']:>5} calls {table[key, 'wire']:>10,} B")


# --- what breaks the contract is named ---

@pytest.fixture
def broken(monkeypatch):
    """A function (overrides, object, name, replacement) -> report of a program built with the fault in it."""
    def build(overrides, where, name, fault):
        monkeypatch.setattr(where, name, fault)
        return inspected({"parallel.check_vma": False, **overrides})
    return build


def test_an_unplanned_gather_of_an_activation_in_a_layer(broken):
    from jax import lax
    original = context.ManualCtx.enter

    def wasteful(self, x, owner):
        x, size = original(self, x, owner), x.shape[0]
        return lax.dynamic_slice_in_dim(lax.all_gather(x, "tp", axis=0, tiled=True) * 1.5, lax.axis_index("tp") * size, size, 0)

    report = broken({"mesh.tp": 2, "mesh.dp": 2}, context.ManualCtx, "enter", wasteful)
    found = [one for one in report.differences if "gather of an activation that nobody planned" in one.text]
    assert found and all("all-gather over tp" in one.text and one.line.when == "layer" or one.line.when == "step" for one in found)
    assert report.unexplained_bytes >= sum(one.bytes for one in found) > 0


def test_a_sum_over_the_wrong_axis(broken):
    original = collectives.sum_over
    wrong = lambda x, axes, scope: original(x, ("dp",) if axes == ("tp",) and scope.startswith("tp.exit.mlp") else axes, scope)
    report = broken({"mesh.tp": 2, "mesh.dp": 2}, collectives, "sum_over", wrong)
    named = [one for one in report.differences if one.kind == "other axes"]
    assert named and all("all-reduce over dp" in one.text and "mlp" in one.text and "predicted over tp" in one.text for one in named)
    assert report.unexplained_bytes > 0 and not report.kept


def test_a_dropped_zero_1_constraint(broken):
    """Adam's moments kept whole on every device: argument bytes and unplanned gathers tell."""
    original = state.optimizer_shardings

    def whole(transformation, master, placements, mesh):
        import jax
        return jax.tree.map(lambda _: state.sharding(mesh, ()), original(transformation, master, placements, mesh))

    report = broken({"mesh.dp": 8, "parallel.zero.dp": 1}, state, "optimizer_shardings", whole)
    assert not report.kept
    assert any(one.kind == "unplanned" and one.line.kind == "all-gather" and one.line.axes == ("dp",) for one in report.differences)
    whole = [one.text for one in report.differences if one.kind == "replicated"]
    assert any(text.startswith("optimizer.layers.mlp.up lies on each device with") for text in whole) and len(whole) >= 12


def test_a_reduction_that_moved_into_the_accumulation_loop(broken):
    """ZeRO-1 reduced in each micro-batch: three times the bytes."""
    original = gradients.reduce_micro

    def early(gradient, placement):
        return collectives.sum_over(gradient, ("dp",), f"zero0.sum.{placement.name}") / 1

    report = broken({"mesh.dp": 8, "train.microbatches": 3}, gradients, "reduce_micro", early)
    named = [one for one in report.differences if one.kind == "moved into a loop"]
    assert len(named) >= 10 and all("micro-batch" in one.text and "beyond the 1 predicted" in one.text for one in named)
    assert original is not gradients.reduce_micro


def test_a_parameter_that_nobody_reduces(broken):
    kept = gradients.reduce_step
    report = broken({"mesh.dp": 2}, gradients, "reduce_step", lambda gradient, placement, live: gradient if placement.name == "layers.mlp.up"
                    else kept(gradient, placement, live))
    assert [(one.kind, one.line.owner) for one in report.differences] == [("missing", "layers.mlp.up")]
    assert [line.owner for line in report.missing] == ["layers.mlp.up"] and report.unexplained_bytes == 0


def test_the_cpu_has_no_excuses(broken):
    """What passes as a known rewrite on accelerators breaks the contract on CPU: a reduce-scatter done as an all-reduce."""
    from jax import lax
    original = gradients.scatter_in_steps

    def lazily(x, axes, dim, scope, inner):
        if not axes or not scope.startswith("zero1"):
            return original(x, axes, dim, scope, inner)
        size = x.shape[dim] // 8
        return lax.dynamic_slice_in_dim(collectives.sum_over(x, axes, scope) * 1.5, 0, size, dim)

    report = broken({"mesh.dp": 8, "parallel.zero.dp": 1, "model.vocab": 40}, gradients, "scatter_in_steps", lazily)
    assert not report.kept and report.unexplained_bytes > 0 and len(report.missing) == 12


# --- annotated, JSON, command line ---

def test_annotated_is_reported():
    report = inspected({"mesh.fsdp": 2, "mesh.tp": 2, "mesh.dp": 2, "parallel.lowering": "annotated"})
    assert not report.kept and report.compiled and any(line.kind == "reduce-scatter" and line.what == "all-reduce + slice" for line in report.compiled)


def test_json_has_it_all():
    report = inspected({"mesh.fsdp": 2, "mesh.tp": 2})
    data = json.loads(report.to_json())
    assert data["kept"] is True and data["unexplained_bytes"] == 0 and data["missing"] == [] and data["mesh"]["tp"] == 2
    assert len(data["predicted"]) == len(report.predicted)
    line = data["predicted"][0]
    assert {"kind", "axes", "dtype", "elements", "calls", "phase", "owner", "n", "wire"} <= line.keys()
    assert data["memory"]["argument"] == report.memory["argument"] > 0 and data["memory"]["peak"] >= data["memory"]["temp"] > 0
    assert sum(total["compiled"] for total in data["totals"]) == sum(line["wire"] for line in data["compiled"])


SMALL = ["gpt_zero1", "--model.layers", "2", "--model.width", "32", "--train.seq", "32", "--train.steps", "5", "--optim.warmup", "0"]


def test_command_line(tmp_path, capsys):
    report, text = tmp_path / "report.json", tmp_path / "step.hlo"
    assert cli.main(["inspect", *SMALL, "--target", "cpu:8", "--strict", "--json", str(report), "--hlo", str(text)]) == 0
    shown = capsys.readouterr().out
    assert "Contract kept" in shown and "ZeRO-1 gradients" in shown and "over dp (8)" in shown and "fit" not in shown
    assert json.loads(report.read_text())["target"] == "cpu:8" and text.read_text().startswith("HloModule")


def test_strict_fails_and_lists_the_difference(capsys):
    """Exit status 1 with --strict, 0 without."""
    arguments = ["inspect", *SMALL, "--parallel.lowering", "annotated"]
    assert cli.main([*arguments, "--strict"]) == 1
    shown = capsys.readouterr().out
    assert "Contract broken" in shown and "XLA chooses" in shown
    assert cli.main(arguments) == 0


def test_bad_input(tmp_path, capsys):
    assert cli.main(["inspect", "gpt_zero1", "--json", str(tmp_path / "none" / "x.json")]) == 2
    assert cli.main(["inspect", "gpt_zero1", "--target", "gpu:h100:0x8"]) == 2
    error = capsys.readouterr().err
    assert "there is no folder" in error and "gpu:h100:0x8" in error and "Traceback" not in error
