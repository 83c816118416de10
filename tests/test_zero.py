"""The ZeRO table: specs by hand, what holds on every mesh, and bytes per device against the closed forms."""
from math import prod

import jax
import pytest
from hypothesis import given, settings, strategies as st

import jaxpara
from jaxpara import ConfigError, Run
from jaxpara.params import count
from jaxpara.rules import kv_replicated, local_shape
from jaxpara.settings import configure
from jaxpara.zero import placements, why


def run_of(model=None, **overrides):
    """Llama style, dims all different: layers 3, width 20, heads 8 of which 2 KV, d 6, inner width 40, vocabulary 34."""
    sizes = dict(style="llama", layers=3, width=20, heads=8, kv_heads=2, head_dim=6, ffn=40, vocab=34) | (model or {})
    base = Run().change(model=sizes, train=dict(batch=2304, seq=288))
    return configure(base, {name.replace("__", "."): value for name, value in overrides.items()})


def specs(placement):
    return placement.storage, placement.gradient, placement.optimizer


def test_a_hybrid_table_by_hand():
    """fsdp2 stage 3, sp2 stage 2, dp2 stage 1, tp2: added to the largest dim that divides, stage 3 first."""
    found = placements(run_of(mesh__dp=2, mesh__fsdp=2, mesh__sp=2, mesh__tp=2, parallel__zero__sp=2, parallel__zero__dp=1,
                              model=dict(width=24, vocab=80)))
    table = found["embedding.tokens"]                      # [80/tp, 24]: 40 rows split eight ways, and there are more of them
    assert specs(table) == ((("tp", "fsdp"), ()), (("tp", "fsdp", "sp"), ()), (("tp", "fsdp", "sp", "dp"), ()))
    query = found["layers.attention.query"]                # [3, 24, 8/tp, 6]: width
    assert specs(query) == (((), ("fsdp",), ("tp",), ()), ((), ("fsdp", "sp"), ("tp",), ()), ((), ("fsdp", "sp", "dp"), ("tp",), ()))
    up = found["layers.mlp.up"]                            # [3, 24, 40/tp]: 20 does not split eight ways, 24 does
    assert specs(up) == (((), ("fsdp",), ("tp",)), ((), ("fsdp", "sp"), ("tp",)), ((), ("fsdp", "sp", "dp"), ("tp",)))
    scale = found["layers.norm1.scale"]                    # [3, 24]
    assert specs(scale) == (((), ("fsdp",)), ((), ("fsdp", "sp")), ((), ("fsdp", "sp", "dp")))
    assert all(placement.stages == {"dp": 1, "fsdp": 3, "sp": 2} and not placement.dropped for placement in found.values())


def test_mesh_order_among_axes_of_one_stage():
    placement = placements(run_of(mesh__dp=2, mesh__fsdp=2, mesh__sp=5, parallel__zero__sp=1, parallel__zero__dp=1, train__seq=40))["norm.scale"]
    assert specs(placement) == ((("fsdp",),), (("fsdp",),), (("fsdp", "dp", "sp"),))


def test_an_axis_that_no_dim_can_take_is_dropped_and_named():
    """Norm scales [21] over fsdp2 (stage 3) and dp3 (stage 1): six ways do not divide 21, two do not either; matrices take both."""
    run = run_of(mesh__fsdp=2, mesh__dp=3, parallel__zero__dp=1, model=dict(width=21))
    found = placements(run)
    scale = found["norm.scale"]
    assert scale.dropped == ("fsdp", "dp") and scale.stages == {"dp": 0, "fsdp": 0} and specs(scale) == (((),),) * 3 and scale.dim is None
    assert why(scale, run) == "replicated over fsdp, dp: no dim of (21,) divides"
    assert not found["layers.mlp.down"].dropped or "divides" in why(found["layers.mlp.down"], run)


def test_the_lower_stage_is_dropped_first():
    """[20] over fsdp5 (stage 3) and dp3 (stage 1): fifteen ways do not divide it, five do."""
    run = run_of(mesh__fsdp=5, mesh__dp=3, parallel__zero__dp=1, train__batch=15)
    scale = placements(run)["norm.scale"]
    assert scale.dropped == ("dp",) and specs(scale) == ((("fsdp",),),) * 3 and scale.stages == {"dp": 0, "fsdp": 3}
    assert "replicated over dp: no dim of (20,) divides" in why(scale, run)


def test_kv_heads_that_ranks_slice_are_never_split():
    """4 KV heads of 6 over tp8 are whole on every rank, each of which uses one; ZeRO over fsdp4 would fit heads, and takes the width."""
    key = placements(run_of(mesh__tp=8, mesh__fsdp=4, model=dict(kv_heads=4)))["layers.attention.key"]
    assert key.kv_slice == 2 and key.base == ((), (), (), ()) and key.storage == ((), ("fsdp",), (), ())
    assert key.tp_sum, "each rank's gradient is of its own queries"
    odd = placements(run_of(mesh__tp=8, mesh__fsdp=4, model=dict(kv_heads=4, width=21)))["layers.attention.key"]
    assert odd.dropped == ("fsdp",) and odd.storage == ((), (), (), ()), "4 KV heads divide by 4, and are still not taken"


def test_copies_over_tp_that_need_a_sum():
    """Norms see all tokens on every rank, unless Megatron-SP splits them; sharded parameters have no copies."""
    plain, split = (placements(run_of(mesh__tp=2, parallel__tp_sequence=on)) for on in (False, True))
    assert not any(placement.tp_sum for placement in plain.values())
    assert {name for name, placement in split.items() if placement.tp_sum} == {"layers.norm1.scale", "layers.norm2.scale", "norm.scale"}
    normed = placements(run_of(mesh__tp=2, model=dict(qk_norm=True)))
    assert {name for name, placement in normed.items() if placement.tp_sum} == {"layers.attention.query_scale", "layers.attention.key_scale"}


degrees, stages = st.sampled_from([1, 2, 3, 4]), st.integers(0, 3)


@settings(max_examples=150, deadline=None)
@given(degrees, degrees, degrees, st.sampled_from([1, 2, 4, 8]), stages, stages, stages, st.sampled_from([20, 21, 24]), st.booleans())
def test_what_holds_on_every_mesh(dp, fsdp, sp, tp, zero_dp, zero_fsdp, zero_sp, width, tp_sequence):
    table = (("dp", dp, zero_dp), ("fsdp", fsdp, zero_fsdp), ("sp", sp, zero_sp))
    zero = {f"parallel__zero__{axis}": stage for axis, size, stage in table if size > 1}
    run = run_of(mesh__dp=dp, mesh__fsdp=fsdp, mesh__sp=sp, mesh__tp=tp, **zero, model=dict(width=width),
                 **({"parallel__tp_sequence": True} if tp_sequence and tp > 1 else {}))
    live = run.mesh.live(("dp", "fsdp", "sp"))
    for placement in placements(run).values():
        storage, gradient, optimizer = specs(placement)
        longer = {i for i, (base, last) in enumerate(zip(placement.base, optimizer)) if base != last}
        assert longer <= {placement.dim}, "one dim grows"
        for short, long in ((placement.base, storage), (storage, gradient), (gradient, optimizer)):
            assert all(b[:len(a)] == a for a, b in zip(short, long)), "each is a prefix of the next"
        for spec, wanted in ((storage, (3,)), (gradient, (3, 2)), (optimizer, (3, 2, 1))):
            axes = [axis for dim in spec for axis in dim]
            assert len(axes) == len(set(axes))
            assert {axis for axis in axes if axis != "tp"} == {axis for axis in live if placement.stages[axis] in wanted}
            local_shape(placement.shape, spec, run.mesh)      # raises where it does not divide
        added = optimizer[placement.dim][len(placement.base[placement.dim]):] if placement.dim is not None else ()
        assert [placement.stages[axis] for axis in added] == sorted((placement.stages[axis] for axis in added), reverse=True)
        asked = {axis: getattr(run.parallel.zero, axis) for axis in live}
        assert all(placement.stages[axis] == (0 if axis in placement.dropped else stage) for axis, stage in asked.items())
        assert set(placement.dropped) <= {axis for axis, stage in asked.items() if stage}
        if placement.dropped:
            assert f"replicated over {', '.join(placement.dropped)}" in why(placement, run)
        ways = prod(getattr(run.mesh, axis) for axis in added)
        pieces = local_shape(placement.shape, placement.base, run.mesh)
        free = [(size, piece) for size, piece, label in zip(placement.shape, pieces, placement.parameter.labels)
                if label != "layers" and not (label == "kv_heads" and kv_replicated(run))]
        if placement.dim is not None and added:
            label = placement.parameter.labels[placement.dim]
            assert label != "layers" and not (label == "kv_heads" and kv_replicated(run))
            assert placement.shape[placement.dim] == max(size for size, piece in free if piece % ways == 0), "the largest that divides"
        if placement.dropped:
            worse = ways * getattr(run.mesh, placement.dropped[0])
            assert not any(piece % worse == 0 for _, piece in free), "dropped only where nothing divides"


N, EVEN = 8, dict(width=32, heads=16, kv_heads=8, head_dim=4, ffn=48, vocab=64)


def state_bytes(run, delta, delta_grad, delta_opt, n_opt):
    """Model state per device by the table's own account: parameters, gradients, n_opt moments and a master copy."""
    found = placements(run).values()
    return sum(delta * p.elements(p.storage) + delta_grad * p.elements(p.gradient) + (n_opt + 1) * delta_opt * p.elements(p.optimizer) for p in found)


CLOSED = {
    0: lambda phi, d, g, o, n: (d + g + (n + 1) * o) * phi,
    1: lambda phi, d, g, o, n: (d + g) * phi + (n + 1) * o * phi // N,
    2: lambda phi, d, g, o, n: d * phi + (g + (n + 1) * o) * phi // N,
    3: lambda phi, d, g, o, n: (d + g + (n + 1) * o) * phi // N,
}


@pytest.mark.parametrize("axis", ["dp", "fsdp", "sp"])
@pytest.mark.parametrize("n_opt", [0, 1, 2])
@pytest.mark.parametrize("stage", CLOSED)
def test_bytes_per_device_are_the_closed_forms(stage, n_opt, axis):
    """A model of which everything divides by 8, over one axis of 8; bfloat16 with a float32 master, gradients of 2 and of 4 bytes."""
    run = run_of(model=EVEN, **{f"mesh__{axis}": N, f"parallel__zero__{axis}": stage})
    assert not any(placement.dropped for placement in placements(run).values())
    for delta_grad in (2, 4):
        sizes = 2, delta_grad, 4
        assert state_bytes(run, *sizes, n_opt) == CLOSED[stage](count(run.model), *sizes, n_opt)


@pytest.mark.parametrize("stage", CLOSED)
def test_a_programs_state_has_those_bytes(stage):
    """What `build` would allocate for AdamW with a master copy, without gradients: parameters, master, two moments, and a few scalars."""
    run = run_of(model=EVEN, mesh__dp=N, parallel__zero__dp=stage, precision__params="bfloat16", precision__compute="bfloat16",
                 precision__master="float32")
    program = jaxpara.build(run)
    state, _ = program.abstract()
    pieces = [(leaf.size, leaf.dtype.itemsize * prod(leaf.sharding.shard_shape(leaf.shape))) for leaf in jax.tree.leaves(state)]
    assert sum(size for whole, size in pieces if whole > 1) == CLOSED[stage](count(run.model), 2, 0, 4, 2)
    assert sum(size for whole, size in pieces if whole == 1) <= 4 * 4


def test_two_axes_multiply():
    """ZeRO-3 over fsdp4, ZeRO-1 over dp2: parameters a quarter, optimizer an eighth."""
    run = run_of(model=EVEN, mesh__dp=2, mesh__fsdp=4, parallel__zero__dp=1)
    phi = count(run.model)
    assert state_bytes(run, 2, 2, 4, 2) == (2 + 2) * phi // 4 + 12 * phi // 8


def test_a_stage_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="parallel.zero.dp = 4 is not a ZeRO stage. Legal: 0, 1, 2, 3"):
        run_of(mesh__dp=2, parallel__zero__dp=4)
