"""CASES.md A and B: shard_map and autodiff, randomness, meshes and specs."""
import re

import jax
import numpy as np
import pytest
from cases import small
from contract.jaxpr_traffic import traced
from jax.sharding import AxisType, PartitionSpec as P
from kernels.harness import assert_equal, inputs, kernel_results, reference, run_of

import jaxpara
from jaxpara import ConfigError, recipes
from jaxpara.collectives import exchange, vary
from jaxpara.config import AXES
from jaxpara.context import AnnotatedCtx
from jaxpara.mesh import check_axis_types, partition
from jaxpara.params import parameters
from jaxpara.rules import Rules, local_shape
from jaxpara.zero import placements, why


@pytest.mark.parametrize("check_vma", [True, False])
def test_a1_gradients_per_sample_stay_per_sample(check_vma):
    """Weights [1, 2], samples [0,1], [1,1], [1,0], [0,0] over two devices: the gradient of w·x is x. Summed over devices every row would be
    [1, 1]; `vary` on the weights is what jaxpara puts before every gradient."""
    samples, weights = np.array([[0., 1], [1, 1], [1, 0], [0, 0]], np.float32), np.array([1., 2], np.float32)

    def per_sample(weights, samples):
        return jax.vmap(jax.grad(lambda w, x: w @ x), (None, 0))(vary(weights, ("dp",)), samples)

    rows = jax.shard_map(per_sample, mesh=small.mesh(dp=2), in_specs=(P(), P("dp")), out_specs=P("dp"), check_vma=check_vma)(weights, samples)
    np.testing.assert_array_equal(rows, samples)


@pytest.mark.parametrize("check_vma", [True, False])
def test_a3_ring_accumulators_have_the_type_of_what_they_sum(check_vma):
    """Zeros that a scan fills with device-varying values: the ring over sp=4 must trace, and be right, in both modes."""
    given = inputs(3, 16, 4, 2, 6)
    assert_equal(kernel_results(run_of(16, 4, 2, 6, sp=4), given, check_vma), reference(given), "float64")


def test_a5_exchange_deals_heads_out_and_brings_them_back():
    """[2, 16, 8, 4] counted up, over sp=4, dims named from the end: then device r holds heads 2r and 2r+1 of the whole sequence, in order."""
    x = np.arange(2 * 16 * 8 * 4, dtype=np.float32).reshape(2, 16, 8, 4)

    def there_and_back(x):
        heads = exchange(x, "sp", -2, -3, "in")
        return heads, exchange(heads, "sp", -3, -2, "out")

    heads, back = jax.jit(jax.shard_map(there_and_back, mesh=small.mesh(sp=4), in_specs=P(None, "sp"), out_specs=(P("sp"), P(None, "sp"))))(x)
    np.testing.assert_array_equal(back, x)
    for rank in range(4):
        np.testing.assert_array_equal(heads[2 * rank:2 * rank + 2], x[:, :, 2 * rank:2 * rank + 2])


MESHES = [dict(), dict(mesh__dp=2, mesh__tp=4), dict(mesh__dp=4, mesh__tp=2, parallel__zero__dp=1),
          dict(mesh__dp=8, parallel__zero__dp=2, train__batch=8), dict(mesh__fsdp=8, train__batch=8)]


def test_a6_every_mesh_and_stage_starts_from_the_same_bits():
    """Meshes 1, 2×4, 4×2 and 8, ZeRO 0 to 3; a vocabulary of 34 that tp=4 pads. And no two layers or parameters draw the
    same numbers."""
    values = [program.params(program.init()) for program in (small.program(**overrides) for overrides in MESHES)]
    for other in values[1:]:
        assert values[0].keys() == other.keys()
        for name, value in values[0].items():
            assert value.tobytes() == other[name].tobytes(), name
    drawn = np.concatenate([value.ravel() for name, value in values[0].items() if value.std() > 0])
    assert len(np.unique(drawn)) > 0.99 * drawn.size, "layers or parameters share a key"


@pytest.mark.parametrize("name, value", [("jax_threefry_partitionable", False), ("jax_default_prng_impl", "rbg")])
def test_a6_a8_settings_that_make_random_values_depend_on_the_mesh_are_refused(name, value):
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        with pytest.raises(ConfigError, match=f"{name} = {value}"):
            jaxpara.build(small.run())
    finally:
        jax.config.update(name, before)


def test_a8_dropout_is_the_same_when_a_layer_is_recomputed():
    """dp=4, rate 0.3: recomputation must draw the masks again, and alike: the gradients are equal to rounding."""
    kept, again = (small.answer(model__dropout=0.3, mesh__dp=4, **remat) for remat in ({}, {"parallel__remat": "full"}))
    small.assert_same_answer(again, kept, 3e-6)
    assert abs(kept[0] - small.answer()[0]) > 1e-3, "dropout did nothing"


@pytest.mark.parametrize("kind, kernel", [("ulysses", "all-to-all"), ("ring", "collective-permute")])
def test_a10_sequence_parallelism_gathers_no_other_axis(kind, kernel):
    """dp2·sp2·tp2, nothing sharded by ZeRO: the compiled step has the kernel's own collective, sums, and not one all-gather."""
    hlo = small.text(small.program(mesh__dp=2, mesh__sp=2, mesh__tp=2, parallel__sp_kind=kind))
    kinds = set(re.findall(r"= .*? (all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter)(?:-start)?\(", hlo))
    assert kinds == {kernel, "all-reduce"}


def test_b1_a_second_rule_is_taken_when_the_first_ones_axis_is_used():
    rules = Rules([("batch", "dp"), ("length", None), ("embed", "dp"), ("embed", "tp")])
    assert partition(rules.spec(("batch", "length", "embed"))) == P("dp", None, "tp")


@pytest.mark.parametrize("on", [None, "tp"])
def test_b3_one_label_for_two_dims_is_refused_even_where_it_maps_to_nothing(on):
    with pytest.raises(ConfigError, match="'vocab' stands for two dims"):
        Rules([("vocab", on)]).spec(("vocab", "vocab"))


def test_b3_no_parameter_uses_a_label_twice():
    for overrides in (dict(), dict(model__style="gpt2", model__kv_heads=8), dict(model__qk_norm=True)):
        for parameter in parameters(small.run(**overrides).model):
            assert len(set(parameter.labels)) == len(parameter.labels) == len(parameter.shape)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("name", recipes())
def test_b5_every_recipe_with_an_axis_switched_off_is_a_legal_run(name, axis):
    run = jaxpara.load(name, {f"mesh.{axis}": 1})
    assert getattr(run.mesh, axis) == 1
    if run.mesh.auto is None:
        for placement in placements(run).values():
            assert axis not in {axis for spec in (placement.storage, placement.optimizer) for dim in spec for axis in dim}


OFF = [("gpt_tiny", "fsdp"), ("gpt_tiny", "sp"), ("gpt_tiny", "tp"), ("gpt_ulysses", "fsdp")]


@pytest.mark.parametrize("name, axis", OFF)
def test_b5_a_recipe_with_an_axis_switched_off_computes_the_same_and_sends_nothing_on_it(name, axis):
    """The recipe's mesh and parallel settings over the small model. One device's loss and gradients, and no collective that names the axis."""
    recipe = jaxpara.load(name, {f"mesh.{axis}": 1})
    run = small.run().change(mesh=dict(recipe.mesh.sizes)).change(parallel=recipe.parallel, train=dict(microbatches=recipe.train.microbatches))
    if run.mesh.batch * run.train.microbatches > small.ROWS:
        run = run.change(train=dict(microbatches=1))
    program = jaxpara.build(run)
    small.assert_same_answer(program.loss_and_grads(small.start(program), small.batch()), small.answer())
    carried = {axis for axes, kind in traced(program) for axis in axes}
    assert carried == set(run.mesh.live()), "exactly the axes with more than one device carry something"


def test_b7_a_constraint_leaves_no_dim_to_chance():
    """A producer sharded on dim 1; the annotated context asks for dim 0 over dp and dim 1 whole, as an open dim beside it asks nothing.
    The result's dim 1 must be replicated."""
    run = small.run(mesh__dp=2, mesh__sp=4, parallel__lowering="annotated")
    program = jaxpara.build(run)
    ctx = AnnotatedCtx(program.run, program.placements, program.mesh)
    x = jax.device_put(np.ones((4, 8, 3), np.float32), jax.NamedSharding(program.mesh, P(None, "sp")))
    out = jax.jit(lambda x: ctx.constrain(x * 2, "batch", "row", "width"))(x)
    assert out.sharding.is_equivalent_to(jax.NamedSharding(program.mesh, P("dp")), 3)
    assert all(piece.shape == (2, 8, 3) for piece in small.pieces(out))


def test_b9_a_vocabulary_that_does_not_divide_is_padded_and_said_so_or_refused():
    """17 tokens over tp=8: 24 stored rows, 3 on each device, and a line that says it; or, unpadded, an error. Never a whole table on each."""
    sizes = dict(model__vocab=17, mesh__tp=8)
    with pytest.raises(ConfigError, match=r"vocab = 17 .*tp = 8.*24"):
        small.run(**sizes, parallel__pad_vocab=False)
    program = jaxpara.build(small.run(**sizes))
    assert any("17" in note and "24" in note for note in program.run.notes)
    table = small.start(program).params["embedding.tokens"]
    assert table.shape == (24, 20) and {piece.shape for piece in small.pieces(table)} == {(3, 20)}
    assert program.params(small.start(program))["embedding.tokens"].shape == (17, 20)


def test_b9_a_dim_that_does_not_divide_is_never_split_or_dropped_in_silence():
    with pytest.raises(ConfigError, match=r"17 does not split over tp = 8.*16, 24"):
        local_shape((17,), (("tp",),), small.run(mesh__tp=8).mesh)
    run = small.run(model__width=21, mesh__dp=8, parallel__zero__dp=3, train__batch=8)     # 21 divides by nothing here
    scale = placements(run)["norm.scale"]
    assert scale.dropped == ("dp",) and scale.storage == ((),)
    assert "replicated over dp: no dim of (21,) divides" in why(scale, run)


def test_b11_a_foreign_mesh_is_accepted_or_refused_by_the_types_of_its_axes():
    explicit = jax.make_mesh((4, 2), ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2)
    mixed = jax.make_mesh((4, 2), ("dp", "tp"), axis_types=(AxisType.Auto, AxisType.Explicit))
    plain = small.mesh(dp=4, tp=2)
    assert check_axis_types(plain) is plain
    with pytest.raises(ConfigError, match="dp: Explicit, tp: Explicit.*AxisType.Auto"):
        check_axis_types(explicit)
    with pytest.raises(ConfigError, match=r"than Auto \(tp: Explicit\)"):
        check_axis_types(mixed)


def test_b13_a_missing_parameter_and_an_extra_one_are_named():
    program = small.program()
    values = small.weights(program.run.model)
    del values["layers.1.mlp.up"]
    values["layers.1.mlp.upp"] = np.zeros((20, 40))
    with pytest.raises(ConfigError) as caught:
        program.init(values)
    assert "Missing parameter layers.1.mlp.up of shape (20, 40)" in str(caught.value)
    assert "Extra parameter layers.1.mlp.upp" in str(caught.value) and len(caught.value.violations) == 2


def test_b13_a_wrong_shape_is_named():
    program = small.program()
    values = small.weights(program.run.model) | {"norm.scale": np.ones(19)}
    with pytest.raises(ConfigError, match=r"norm.scale has shape \(19,\); the model needs \(20,\)"):
        program.init(values)
