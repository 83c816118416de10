"""CASES H: reading what compiled programs communicate."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpara
from cases import small
from jaxpara.batch import slots
from jaxpara.hlo import axes_of, collectives
from jaxpara.hlo.groups import groups


def over(shape, names, devices=None):
    return Mesh(np.asarray(jax.devices()[:8] if devices is None else devices).reshape(shape), names)


def read(function, shapes, where, dtype=jnp.float32, **jit):
    arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, sharding in zip(shapes, where)]
    return collectives(jax.jit(function, **jit).lower(*arguments).compile().as_text())


@pytest.mark.parametrize("text, expected", [
    ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
    ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
    ("[4,2]<=[2,2,2]T(1,0,2)", ((0, 1), (4, 5), (2, 3), (6, 7))),
    ("mesh['stage'=2,'local'=4] {'stage'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
    ("mesh['axis_0'=2,'axis_1'=4], device_ids=([2,2,2]T(0,2,1)) {'axis_1':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
    ("mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'b'}", ((0, 2), (1, 3))),
])
def test_h1_every_spelling_of_groups(text, expected):
    assert groups(text) == expected


@pytest.mark.parametrize("dtype, dims, kind, size", [("s32", "8,4,1", "all-gather", 128), ("pred", "16", "all-reduce", 16), ("u32", "16", "all-reduce", 64),
                                                     ("s64", "16", "all-reduce", 128), ("f8e4m3fn", "16", "all-reduce", 16)])
def test_h3_integers_and_truth_values_count(dtype, dims, kind, size):
    operand = "4,4,1" if kind == "all-gather" else dims
    extra = ", dimensions={0}" if kind == "all-gather" else ", to_apply=add"
    text = f"""HloModule m, num_partitions=2
add {{
  a = {dtype}[] parameter(0)
  b = {dtype}[] parameter(1)
  ROOT c = {dtype}[] add(a, b)
}}
ENTRY main {{
  p = {dtype}[{operand}] parameter(0)
  ROOT r = {dtype}[{dims}] {kind}(p), replica_groups=[1,2]<=[2], channel_id=1, use_global_device_ids=true{extra}
}}
"""
    assert [(one.kind, one.bytes, one.n) for one in collectives(text)] == [(kind, size, 2)]


def test_h3_a_split_vocabulary_look_up_gathers_ids():
    """XLA's own look-up in a table split over the vocabulary may send its int32 ids: they are listed with the rest."""
    mesh = over((2, 4), ("dp", "tp"))
    found = read(lambda ids: lax.with_sharding_constraint(ids, NamedSharding(mesh, P())) + 1, [(16, 8)], [NamedSharding(mesh, P("dp"))], jnp.int32)
    assert [(one.kind, one.dtype, one.bytes) for one in found] == [("all-gather", "s32", 16 * 8 * 4)]


def test_h5_loop_bodies_count_as_often_as_they_run():
    mesh = over((8,), ("fsdp",))
    body = lambda x, weights: lax.scan(lambda x, w: (jnp.tanh(x @ lax.all_gather(w, "fsdp", axis=0, tiled=True)), None), x, weights)[0]
    found = read(jax.shard_map(body, mesh=mesh, in_specs=(P("fsdp"), P(None, "fsdp")), out_specs=P("fsdp")), [(16, 32), (6, 32, 32)], [None, None])
    assert [(one.kind, one.calls, one.bytes) for one in found] == [("all-gather", 6, 32 * 32 * 4)]
    assert sum(one.calls * one.bytes for one in found) == 6 * 4096


def test_h7_groups_are_attributed_by_coordinate_not_by_device_id():
    """A mesh over the devices in another order than their ids."""
    mesh = over((2, 4), ("dp", "tp"), np.asarray(jax.devices()[:8])[[5, 2, 7, 0, 1, 4, 3, 6]])
    found = read(jax.shard_map(lambda x: lax.psum(x, "dp") * 2, mesh=mesh, in_specs=P("dp", "tp"), out_specs=P(None, "tp")), [(8, 8)],
                 [NamedSharding(mesh, P("dp", "tp"))])
    assert [axes_of(one.groups, one.kind, {"dp": 2, "tp": 4}) for one in found] == [("dp",)]


def test_h9_a_reduce_scatter_in_disguise_counts_as_one():
    """w [64, 64] split over fsdp 8, its gradient too: scattered bytes, not a 16 KiB all-reduce."""
    mesh = over((8,), ("fsdp",))
    where = NamedSharding(mesh, P("fsdp"))
    found = read(jax.grad(lambda w, x: jnp.sum(jnp.tanh(x @ w))), [(64, 64), (16, 64)], [where, where], out_shardings=where)
    large = [one for one in found if one.kind != "all-gather" and one.elements > 1]
    assert [(one.kind, one.disguise, one.wire) for one in large] == [("reduce-scatter", "all-reduce + slice", 64 * 64 * 4 * 7 // 8)]


@pytest.mark.parametrize("remat", ["none", "full", "selective"])
def test_h11_backward_gathers_weights_again_and_says_so(remat):
    """Gathers split into forward and recompute: layers are gathered again whatever the policy, since a gathered weight is never kept."""
    report = jaxpara.build(small.run(mesh__fsdp=4, parallel__remat=remat, model__layers=4)).inspect()
    gathers = {phase: sum(line.calls for line in report.compiled if line.kind == "all-gather" and line.phase == phase and line.owner == "layers.mlp.up")
               for phase in ("forward", "recompute", "backward")}
    assert gathers == {"forward": 4, "recompute": 4, "backward": 0} and report.kept


def test_h11_kept_activations_are_in_the_memory():
    """Full recomputation needs less memory for temporaries than none."""
    temporaries = {remat: jaxpara.build(small.run(mesh__fsdp=4, parallel__remat=remat, model__layers=4)).inspect().memory["temp"]
                   for remat in ("none", "full")}
    assert temporaries["full"] < temporaries["none"]


def test_h13_a_permuted_sequence_costs_nothing():
    """The data path permutes each row on the host: zigzag sends exactly what the contiguous order sends, and no gather over dp."""
    sent = {}
    for order in ("contiguous", "zigzag"):
        run = small.run(mesh__dp=2, mesh__sp=2, parallel__sp_order=order)
        report = jaxpara.build(run).inspect()
        assert report.kept and not any(line.kind == "all-gather" and "dp" in line.axes for line in report.compiled)
        sent[order] = sorted((line.kind, line.axes, line.elements, line.calls) for line in report.compiled), list(slots(run, 16))
    assert sent["contiguous"][0] == sent["zigzag"][0] and sent["contiguous"][1] != sent["zigzag"][1]


def test_h13_a_shuffle_on_devices_is_listed():
    """A permutation of each row, under jit with rows split over dp, sends nothing; one across rows does, and shows."""
    mesh = over((8,), ("dp",))
    where = NamedSharding(mesh, P("dp"))
    mapped = jax.shard_map(lambda x: x[:, jnp.array([2, 0, 3, 1])], mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))
    assert read(mapped, [(16, 4)], [where]) == []
    assert read(lambda x: x[jnp.arange(16)[::-1]], [(16, 4)], [where], out_shardings=where)
