"""Loss and gradients of a global batch, under either lowering: where the ZeRO table meets the model."""
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxpara.batch import slots, specs
from jaxpara.collectives import scatter_in_steps, sum_over, vary, varying_axes
from jaxpara.context import AnnotatedCtx, ManualCtx, Rows, Stored
from jaxpara.mesh import partition, sharding
from jaxpara.model.declare import fill
from jaxpara.pipeline.placing import divergent
from jaxpara.rules import activation_rules
from jaxpara.rules import live as live_spec
from jaxpara.zero import REPLICA_AXES

TOKEN_AXES = ("dp", "fsdp", "ep", "sp")
"""Axes whose devices see different tokens."""


def rows_of(micro, run, step):
    """`Rows` of one micro-batch; the dropout key depends on seed and step only."""
    key = None
    if run.model.dropout and step is not None:
        key = jax.random.fold_in(jax.random.key(run.train.seed + 1, impl="threefry2x32"), step)
    index = jnp.asarray(slots(run, micro["positions"].shape[-1]), jnp.int32)
    return Rows(micro["positions"], micro["segments"], micro["number"] if key is not None else None, index, key)


def micro_gradients(model, run, make_ctx):
    """A function (sinks, weights, micro-batch, step, scale) -> (summed loss · scale, {name: gradient})."""
    def loss(sinks, weights, micro, step, scale):
        stored = {name: Stored(weights[name], sinks[name], name) for name in weights}
        ctx = make_ctx(rows_of(micro, run, step))
        return fill(model, stored).loss(micro["tokens"], micro["targets"], ctx) * scale
    return jax.value_and_grad(loss)


def accumulate(one, zeros, batch, m):
    """Sum (loss, gradients) of `one(micro-batch)` over the m micro-batches. zeros: what a sum starts from."""
    if m == 1:
        return one({name: array[0] for name, array in batch.items()})
    add = lambda total, micro: (jax.tree.map(jnp.add, total, one(micro)), None)
    return lax.scan(add, zeros, batch)[0]


def tie(weights, placements, micro):
    """Make the weights that are gathered outside the layers depend on the micro-batch, so that XLA does not gather them once, before the
    accumulation loop, and keep them whole all through it."""
    outside = {name for name, placement in placements.items() if placement.axes(3) and not placement.parameter.stacked}
    return {name: lax.optimization_barrier((weight, micro["tokens"]))[0] if name in outside else weight for name, weight in weights.items()}


def varying_over(placements, live):
    """{name: axes over which its copies get different gradients}: parameters are cast to vary over them, so that nothing is reduced in silence."""
    return {name: live(REPLICA_AXES + ("tp",) * (p.tp_sum or any("tp" in dim for dim in p.base))) for name, p in placements.items()}


def sink(like, dtype):
    """Zeros where a gradient comes out, or from which a sum starts: of the shape and the varying axes of `like`."""
    return vary(jnp.zeros(like.shape, dtype), varying_axes(like))


def one_device(run, placements, model, make_ctx):
    """A function (weights, batch, step, scale) -> (summed loss · scale, {name: gradient}) of one device that runs all layers: micro-batch after
    micro-batch, each reduced by `reduce_micro`."""
    precision, m = run.precision, run.train.microbatches
    differentiate = micro_gradients(model, run, partial(make_ctx, placements))
    gradient_dtype = precision.gradient(m)

    def whole(weights, batch, step, scale):
        sinks = {name: sink(value, gradient_dtype) for name, value in weights.items()}

        def one(micro):
            usable = weights if m == 1 else tie(weights, placements, micro)
            loss, gradients = differentiate(sinks, usable, micro, step, scale)
            return loss, {name: reduce_micro(gradient, placements[name]) for name, gradient in gradients.items()}

        shapes = jax.eval_shape(one, {name: array[0] for name, array in batch.items()})
        zeros = jax.tree.map(lambda like: sink(like, like.dtype), shapes)
        return accumulate(one, zeros, batch, m)

    return whole


def manual(run, mesh, placements, model, make=one_device):
    """(params, batch, step) -> (loss, counted tokens, gradients in the optimizer specs), as one `shard_map` over the whole mesh.

    make: `one_device`, or an executor of pipelines that is made and called alike.
    """
    precision, live = run.precision, run.mesh.live
    scale, replicas = precision.loss_scale or 1.0, varying_over(placements, live)
    wide = jnp.promote_types(precision.compute, jnp.float32)
    grouped = divergent(run) and mesh.devices.flat[0].platform == "cpu"
    whole = make(run, placements, model, partial(ManualCtx, run, grouped=grouped))

    def on_device(params, batch, step):
        weights = {name: vary(value.astype(precision.compute), replicas[name]) for name, value in params.items()}
        count = sum_over((batch["targets"] >= 0).sum(dtype=jnp.int32), live(TOKEN_AXES), "loss.count")
        loss, gradients = whole(weights, batch, step, (scale / jnp.maximum(count, 1)).astype(wide))
        loss = sum_over(loss, live(REPLICA_AXES), "loss.total") / scale
        reduced = {name: reduce_step(gradient, placements[name], live) for name, gradient in gradients.items()}
        return loss, count, {name: unscale(gradient, scale) for name, gradient in reduced.items()}

    spec_of = lambda kind: {name: partition(getattr(placement, kind)) for name, placement in placements.items()}
    return jax.shard_map(on_device, mesh=mesh, in_specs=(spec_of("storage"), specs(run), PartitionSpec()),
                         out_specs=(PartitionSpec(), PartitionSpec(), spec_of("optimizer")), check_vma=run.parallel.check_vma)


def reduce_micro(gradient, placement):
    """After each micro-batch: scatter over the axes of stage 2 (those of stage 3 were scattered layer by layer)."""
    return scatter_in_steps(gradient, placement.axes(2), placement.dim, f"zero2.scatter.{placement.name}", placement.inner)


def reduce_step(gradient, placement, live):
    """After the last micro-batch: scatter over the axes of stage 1, then sum what is left over those of stage 0."""
    gradient = scatter_in_steps(gradient, placement.axes(1), placement.dim, f"zero1.scatter.{placement.name}", placement.inner)
    rest = placement.axes(0) + live(("tp",)) * placement.tp_sum
    return sum_over(gradient, rest, f"zero0.sum.{placement.name}")


def unscale(gradient, scale):
    """The gradient without the loss scale, widened first: in float16 what the scale had kept from vanishing would vanish here."""
    return gradient if scale == 1 else gradient.astype(jnp.promote_types(gradient.dtype, jnp.float32)) / scale


def annotated(run, mesh, placements, model):
    """The same function under `jit`: XLA inserts the collectives that the constraints call for."""
    precision, m = run.precision, run.train.microbatches
    gradient_dtype, scale = precision.gradient(m), precision.loss_scale or 1.0
    kinds = {kind: {name: sharding(mesh, getattr(p, kind)) for name, p in placements.items()} for kind in ("gradient", "optimizer")}
    wide = jnp.promote_types(precision.compute, jnp.float32)

    def whole(params, batch, step):
        weights = {name: value.astype(precision.compute) for name, value in params.items()}
        sinks = {name: jnp.zeros(value.shape, gradient_dtype) for name, value in weights.items()}
        count = (batch["targets"] >= 0).sum(dtype=jnp.int32)
        per_token = (scale / jnp.maximum(count, 1)).astype(wide)
        differentiate = micro_gradients(model, run, partial(AnnotatedCtx, run, placements, mesh))

        def one(micro):
            loss, gradients = differentiate(sinks, weights, micro, step, per_token)
            return loss, lax.with_sharding_constraint(gradients, kinds["gradient"])

        zeros = jnp.zeros((), wide), lax.with_sharding_constraint(sinks, kinds["gradient"])
        loss, gradients = accumulate(one, zeros, batch, m)
        gradients = lax.with_sharding_constraint(gradients, kinds["optimizer"])
        return loss / scale, count, {name: unscale(gradient, scale) for name, gradient in gradients.items()}

    return whole


def logits(run, mesh, placements, model, through=None):
    """(params, batch) -> [1, B, S, V_padded] logits in slot order, no dropout. through: ({name: `Stored`}, tokens, ctx) -> logits [b, s, V_padded],
    if not all layers are at hand."""
    compute = run.precision.compute
    through = through or (lambda stored, tokens, ctx: fill(model, stored).logits(tokens, ctx))

    def forward(make_ctx, cast, params, batch):
        micro = {name: array[0] for name, array in batch.items()}
        stored = {name: Stored(cast(name, value.astype(compute)), jnp.zeros(value.shape, compute), name) for name, value in params.items()}
        return through(stored, micro["tokens"], make_ctx(rows_of(micro, run, None)))[None]

    if run.parallel.lowering == "annotated":
        return partial(forward, partial(AnnotatedCtx, run, placements, mesh), lambda name, value: value)
    replicas = varying_over(placements, run.mesh.live)
    out = partition(live_spec(activation_rules(run).spec(("microbatch", "batch", "sequence", "vocab")), run.mesh))
    stored = {name: partition(placement.storage) for name, placement in placements.items()}
    on_device = partial(forward, partial(ManualCtx, run, placements), lambda name, value: vary(value, replicas[name]))
    return jax.shard_map(on_device, mesh=mesh, in_specs=(stored, specs(run)), out_specs=out, check_vma=run.parallel.check_vma)
