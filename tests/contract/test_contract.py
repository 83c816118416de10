"""Matching and naming, on lines made by hand."""
from dataclasses import replace

import pytest

from equivalence.hard import make_run
from jaxpara.hlo.contract import compare
from jaxpara.hlo.lines import dtype_of, where
from jaxpara.hlo.parse import Collective
from jaxpara.hlo.attribute import groups_over
from jaxpara.plan.lines import Line

RUN = make_run({"mesh.fsdp": 4, "mesh.tp": 2, "train.microbatches": 3}, "float32")
SIZES = RUN.mesh.sizes
N = {("fsdp",): 4, ("tp",): 2}
SCOPES = {"layers.mlp.up": "zero3.gather.layers.mlp.up", "mlp": "tp.exit.mlp", "": "nothing"}


def line(kind="all-gather", axes=("fsdp",), elements=4000, calls=9, owner="layers.mlp.up", dtype="float32", when="layer", phase="forward"):
    return Line(kind, axes, dtype, elements, calls, phase, owner, N[axes], "purpose", when)


def one(kind="all-gather", axes=("fsdp",), elements=4000, calls=9, owner="layers.mlp.up", dtype="f32", trips=(3, 3), **more):
    groups = groups_over(axes, SIZES) if kind != "permute" else tuple(
        (group[i], group[(i + 1) % len(group)]) for group in groups_over(axes, SIZES) for i in range(len(group)))
    return Collective(kind, groups, dtype, elements, calls, SCOPES[owner], "name.1", "main", tuple(map(str, trips)), trips, **more)


def check(predicted, compiled, platform="cpu"):
    return compare(predicted, compiled, RUN, platform)


def test_equal_is_kept():
    contract = check([line(), line("all-reduce", ("tp",), owner="mlp", calls=3)], [one(), one("all-reduce", ("tp",), owner="mlp", calls=3)])
    assert contract.kept and contract.unexplained_bytes == 0 and contract.missing == [] and contract.rewrites == {}


def test_calls_of_several_instructions_add_up():
    assert check([line(calls=9)], [one(calls=3), one(calls=6)]).kept
    assert check([line(calls=3), replace(line(), calls=6)], [one(calls=9)]).kept


def test_names_may_be_lost():
    """A combined operation keeps one name for all: elements, kind and axes must do."""
    assert check([line()], [one(owner="")]).kept
    assert not check([line()], [one(owner="", elements=4001)]).kept


def test_groups_of_one_are_no_traffic():
    nobody = Collective("all-reduce", tuple((i,) for i in range(8)), "f32", 10, 5, "", "a", "main")
    assert check([], [nobody]).kept and check([], [nobody]).compiled == []


@pytest.mark.parametrize("predicted, compiled, kind, words, size", [
    ([], [one()], "unplanned", "nobody planned it", 9 * 4000 * 4 * 3 // 4),
    ([], [one(owner="mlp")], "unplanned", "a gather of an activation that nobody planned", 9 * 4000 * 4 * 3 // 4),
    ([line(calls=1, when="step")], [one(calls=9)], "moved into a loop", "beyond the 1 predicted; it stands in: micro-batch · layer", 8 * 4000 * 4 * 3 // 4),
    ([line(calls=4, when="step")], [one(calls=9, trips=())], "more often", "beyond the 4 predicted", 5 * 4000 * 4 * 3 // 4),
    ([line()], [], "missing", "predicted, not compiled", 0),
    ([line(calls=9)], [one(calls=3)], "less often", "6 calls", 0),
    ([line("all-reduce", ("tp",), owner="mlp")], [one("all-reduce", ("fsdp",), owner="mlp")], "other axes", "predicted over tp", 9 * 4000 * 4 * 2 * 3 // 4),
])
def test_differences_are_named(predicted, compiled, kind, words, size):
    contract = check(predicted, compiled)
    assert [found.kind for found in contract.differences] == [kind] and words in contract.differences[0].text
    assert contract.unexplained_bytes == size and not contract.kept


def test_groups_that_no_axes_explain():
    odd = Collective("all-reduce", ((0, 3), (1, 2), (4, 7), (5, 6)), "f32", 10, 5, "", "odd.7", "main")
    contract = check([], [odd])
    assert "unknown groups" in contract.differences[0].text and "odd.7" in contract.differences[0].text and contract.unexplained_bytes == 5 * 40


REWRITES = [
    ("narrowed", [line()], [one(dtype="bf16")]),
    ("widened", [line(dtype="bfloat16")], [one()]),
    ("reduce-scatter as all-reduce", [line("reduce-scatter")], [one("all-reduce", owner="")]),
    ("all-gather as all-reduce", [line()], [one("all-reduce", owner="")]),
    ("all-gather as permutes", [line()], [one("permute", elements=1000, calls=27, owner="")]),
    ("reduce-scatter as permutes", [line("reduce-scatter")], [one("permute", elements=1000, calls=27, owner="")]),
    ("padded", [line("reduce-scatter")], [one("reduce-scatter", elements=4096, owner=""), one("permute", elements=24, calls=2, owner="")]),
    ("out of the loop", [line("reduce-scatter")], [one("reduce-scatter", calls=3, trips=(3,))]),
    ("out of the loop", [line("reduce-scatter"), line("reduce-scatter", owner="mlp", calls=3)],
     [one("reduce-scatter", calls=3, trips=(3,)), one("reduce-scatter", owner="mlp", calls=3)]),
    ("concatenated", [line("all-reduce", elements=10, calls=1), line("all-reduce", elements=30, calls=1)],
     [one("all-reduce", elements=40, calls=1, owner="")]),
    ("scalars", [line("all-reduce", elements=1, calls=1, phase="optimizer")], [one("all-reduce", ("tp",), elements=4, calls=1, owner="")]),
]


@pytest.mark.parametrize("name, predicted, compiled", REWRITES, ids=[rewrite[0] for rewrite in REWRITES])
def test_known_rewrites_pass_on_accelerators(name, predicted, compiled):
    contract = check(predicted, compiled, "tpu")
    assert contract.kept and set(contract.rewrites) == {name}
    if name not in ("widened", "narrowed"):
        assert not check(predicted, compiled, "cpu").kept, "the CPU has no excuses"


def test_two_rewrites_at_once():
    """A scatter in every micro-batch that becomes one all-reduce after the loop."""
    contract = check([line("reduce-scatter", calls=3, when="micro-batch")], [one("all-reduce", calls=1, trips=(), owner="")], "tpu")
    assert contract.kept and set(contract.rewrites) == {"reduce-scatter as all-reduce", "out of the loop"}


def test_an_all_reduce_of_which_a_piece_is_used():
    """A reduce-scatter on CPU; on a wire it sends what an all-reduce sends."""
    compiled = [one("reduce-scatter", disguise="all-reduce + slice")]
    cpu, tpu = (check([line("reduce-scatter")], compiled, platform) for platform in ("cpu", "tpu"))
    assert set(cpu.rewrites) == {"all-reduce + slice"} and set(tpu.rewrites) == {"reduce-scatter as all-reduce"}
    assert 2 * cpu.compiled[0].wire == tpu.compiled[0].wire


@pytest.mark.parametrize("predicted, compiled", [
    ([line("reduce-scatter")], [one("all-reduce", elements=4400, owner="")]),
    ([line()], [one("permute", elements=1000, calls=27, owner="", axes=("tp",))]),
    ([line("reduce-scatter")], [one("reduce-scatter", elements=4700, owner="")]),
    ([line(calls=3, when="step")], [one(calls=9)]),
    ([], [one("all-reduce", elements=65, calls=1, owner="")]),
    ([line("reduce-scatter", calls=9, when="step")], [one("reduce-scatter", calls=3, trips=(3,))]),
    ([line(calls=18)], [one(calls=9)]),                                             # half as often in the same loops
    ([line()], [one("permute", elements=1000, calls=26, owner="")]),                # one hop is missing
    ([line("all-reduce", elements=10, calls=1), line("all-reduce", elements=30, calls=2)], [one("all-reduce", elements=40, calls=1, owner="")]),
])
def test_what_only_looks_like_a_rewrite_does_not(predicted, compiled):
    assert not check(predicted, compiled, "tpu").kept


def test_words():
    assert [dtype_of(name) for name in ("f32", "bf16", "s32", "u8", "pred", "f8e4m3fn", "c64")] == [
        "float32", "bfloat16", "int32", "uint8", "bool", "float8", "complex64"]
    run = make_run({"train.microbatches": 3, "model.layers": 5}, "float32")
    assert [where(trips, run) for trips in ((), (3,), (3, 5), (5,), (3, 5, 7), (1, 3, 1, 5))] == [
        "step", "micro-batch", "micro-batch · layer", "layer", "micro-batch · layer · loop of 7", "micro-batch · layer"]
    piped = make_run({"train.microbatches": 4, "model.layers": 6, "mesh.pp": 2, "parallel.schedule": "1f1b"}, "float32")
    assert where((10, 3), piped) == "tick · layer" and where((10,), piped) == "tick" and where((4,), piped) == "loop of 4"
    assert where((3, 5), run, "loss") == "micro-batch · chunk", "as many chunks of tokens as layers are no layers"
