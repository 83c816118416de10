"""Groups -> mesh axes by coordinates; op_name -> phase and owner."""
from itertools import chain, combinations

import pytest

from jaxpara.hlo import axes_of, groups_over, owner_of, phase_of

SIZES = {"pp": 1, "dp": 2, "fsdp": 2, "ep": 1, "sp": 4, "tp": 2}
LIVE = [axis for axis, size in SIZES.items() if size > 1]
AXES = list(chain.from_iterable(combinations(LIVE, n) for n in range(len(LIVE) + 1)))


@pytest.mark.parametrize("axes", AXES, ids="·".join)
def test_every_tuple_of_axes_is_found_again(axes):
    """In any order of groups and members."""
    groups = groups_over(axes, SIZES)
    assert axes_of(groups, "all-reduce", SIZES) == axes
    assert axes_of(tuple(tuple(reversed(group)) for group in reversed(groups)), "all-gather", SIZES) == axes


def test_dead_axes_are_no_traffic():
    """CASES R8."""
    assert axes_of(groups_over(("pp", "ep"), SIZES), "all-reduce", SIZES) == ()


def test_parts_of_one_axis():
    """Ulysses inside a hybrid: pairs of neighbours on sp, and the ring of every second."""
    sizes = {"fsdp": 2, "sp": 4}
    assert axes_of(((0, 1), (2, 3), (4, 5), (6, 7)), "all-to-all", sizes) == ("sp",)
    assert axes_of(((0, 2), (1, 3), (4, 6), (5, 7)), "all-gather", sizes) == ("sp",)


@pytest.mark.parametrize("groups", [
    ((0, 1, 2), (3, 4, 5, 6, 7)),                   # unequal
    ((0, 1), (2, 3)),                               # not everybody
    ((0, 3), (1, 2), (4, 7), (5, 6)),               # askew in fsdp and tp
    ((0, 1), (2, 3), (4, 6), (5, 7)),               # here along one axis, there along another
    ((0, 1, 2), (3, 4, 5), (6, 7, 8)),              # more than there are
])
def test_groups_of_no_axes(groups):
    assert axes_of(groups, "all-reduce", {"dp": 2, "fsdp": 2, "tp": 2}) is None


def test_permutes():
    sizes = {"dp": 2, "sp": 4}
    ring = tuple((base + i, base + (i + 1) % 4) for base in (0, 4) for i in range(4))
    assert axes_of(ring, "permute", sizes) == ("sp",)
    assert axes_of(ring[:3], "permute", sizes) == ("sp",)
    assert axes_of(tuple((i, (i + 4) % 8) for i in range(8)), "permute", sizes) == ("dp",)
    assert axes_of(((0, 0), (1, 1)), "permute", sizes) == ()
    assert axes_of((), "permute", sizes) == ()
    assert axes_of(((0, 5),), "permute", sizes) is None
    assert axes_of(((0, 1), (0, 4)), "permute", sizes) is None


LAYER, BACK = "jit(_train_step)/shard_map/jvp()/while/body/closed_call", "jit(_train_step)/shard_map/transpose(jvp())/while/body/closed_call"
NAMES = {
    f"{LAYER}/zero3.gather.layers.mlp.up/all_gather": ("forward", "layers.mlp.up"),
    f"{BACK}/checkpoint/rematted_computation/zero3.gather.layers.mlp.up/all_gather": ("recompute", "layers.mlp.up"),
    f"{BACK}/checkpoint/zero3.scatter.layers.attention.query/reduce_scatter": ("backward", "layers.attention.query"),
    "jit(_train_step)/shard_map/jvp(zero3.gather.embedding.tokens)/all_gather": ("forward", "embedding.tokens"),
    "jit(_train_step)/shard_map/transpose(jvp(zero3.scatter.head.weight))/reduce_scatter": ("backward", "head.weight"),
    "jit(_train_step)/shard_map/zero2.scatter.norm.scale/reduce_scatter": ("reduce", "norm.scale"),
    "jit(_train_step)/shard_map/zero1.scatter.layers.mlp.down/reduce_scatter": ("reduce", "layers.mlp.down"),
    "zero0.sum.layers.mlp.up/psum_invariant": ("reduce", "layers.mlp.up"),
    f"{LAYER}/tp.exit.attention/psum_invariant": ("forward", "attention"),
    "jit(_train_step)/shard_map/jvp(tp.exit.embedding)/psum_invariant": ("forward", "embedding"),
    "jit(_train_step)/shard_map/transpose(jvp(tp.enter.head))/psum_invariant": ("backward", "head"),
    f"{BACK}/checkpoint/tp.exit.mlp/all_gather": ("backward", "mlp"),
    f"{BACK}/checkpoint/rematted_computation/tp.enter.mlp/all_gather": ("recompute", "mlp"),
    # ZeRO-R runs the layer again by its own vjp, inside the transpose of the whole
    f"{BACK}/jvp(tp.exit.attention)/psum_invariant": ("recompute", "attention"),
    f"{BACK}/transpose(jvp(tp.enter.attention))/psum_invariant": ("backward", "attention"),
    f"{BACK}/zero_r/all_gather_invariant": ("recompute", ""),
    f"{LAYER}/closed_call/while/body/closed_call/ring.forward/ppermute": ("forward", "attention"),
    f"{BACK}/checkpoint/while/body/closed_call/ring.backward/ppermute": ("backward", "attention"),
    f"{BACK}/checkpoint/ring.gradient/ppermute": ("backward", "attention"),
    f"{LAYER}/ulysses.in/all_to_all": ("forward", "attention"),
    f"{BACK}/checkpoint/rematted_computation/ulysses.out/all_to_all": ("recompute", "attention"),
    f"{BACK}/kv.gradient/reduce_scatter": ("backward", "attention"),
    f"{LAYER}/loss.max/pmax": ("loss", "loss"),
    "jit(_train_step)/shard_map/loss.count/psum_invariant": ("loss", "loss"),
    "jit(_train_step)/optimizer/sharding_constraint": ("optimizer", ""),
    "jit(_train_step)/(optimizer/reduce_sum:optimizer/reduce_sum)": ("optimizer", ""),
    "jit(_train_step)/jvp()/dot_general": ("forward", ""),
    "jit(_train_step)/transpose(jvp())/dot_general": ("backward", ""),
    "jit(f)/loss_total/training.in/psum": ("forward", ""),
    "": ("forward", ""),
}


@pytest.mark.parametrize("op_name", NAMES)
def test_phase_and_owner(op_name):
    assert (phase_of(op_name), owner_of(op_name)) == NAMES[op_name]
