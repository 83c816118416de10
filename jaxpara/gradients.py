"""Loss and gradients of a global batch, under either lowering: where the ZeRO table meets the model."""
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxpara.batch import specs
from jaxpara.collectives import scatter_in_steps, sum_over, vary, varying_axes
from jaxpara.config import BATCH_AXES
from jaxpara.context import AnnotatedCtx, ManualCtx, Rows, Stored, seen, sum_loads
from jaxpara.experts import split_axes
from jaxpara.mesh import partition, platform_of, sharding
from jaxpara.model.declare import fill
from jaxpara.order import slots
from jaxpara.rules import activation_rules
from jaxpara.rules import live as live_spec
from jaxpara.zero import REPLICA_AXES

TOKEN_AXES = ("dp", "fsdp", "ep", "sp")
"""Axes whose devices see different tokens."""


def rows_of(micro, run, moment):
    """`Rows` of one micro-batch; the random key depends on seed and step only. moment: `Moment`; without a step: not in training."""
    key, moe = None, run.model.moe
    training = moment is not None and moment.step is not None
    if run.model.random and training:
        key = jax.random.fold_in(jax.random.key(run.train.seed + 1, impl="threefry2x32"), moment.step)
    index = jnp.asarray(slots(run, micro["positions"].shape[-1]), jnp.int32)
    rows = Rows(micro["positions"], micro["segments"], micro["number"] if key is not None else None, index, key)
    rows = rows._replace(bias=moment.bias if moment else None)
    if not moe.experts or not training:
        return rows
    weigh = jnp.asarray(run.precision.loss_scale or 1.0, wide(run)) if moe.aux_weight or moe.z_weight else None
    return rows._replace(weigh=weigh, warm=warmed(run, moment.step))


def objective(loss, loads, run, moment):
    """The loss that gradients are of: cross-entropy and the routers' losses."""
    if loads is None:
        return loss
    moe = run.model.moe
    return loss + moe.aux_weight * warmed(run, moment.step) * loads.aux.sum() + moe.z_weight * loads.z.sum()


def warmed(run, step):
    """Factor of the load-balance loss in step `step` (from 0): linear from 0 up to 1 after `moe.aux_warmup` steps."""
    steps = run.model.moe.aux_warmup
    return jnp.minimum(jnp.asarray(step, wide(run)) / steps, 1) if steps else jnp.ones((), wide(run))


def wide(run):
    """Dtype of sums: float32, or float64 in float64 runs."""
    return jnp.promote_types(run.precision.compute, jnp.float32)


def micro_gradients(model, run, make_ctx):
    """A function (sinks, weights, micro-batch, moment, scale) -> ((summed loss · scale, `Load`s), {name: gradient})."""
    def loss(sinks, weights, micro, moment, scale):
        stored = {name: Stored(weights[name], sinks[name], name) for name in weights}
        ctx = make_ctx(rows_of(micro, run, moment))
        total, loads = fill(model, stored).loss(micro["tokens"], micro["targets"], ctx)
        return total * scale, loads
    return jax.value_and_grad(loss, has_aux=True)


def accumulate(one, zeros, batch, m):
    """Sum what `one(micro-batch)` gives over the m micro-batches. zeros: what a sum starts from."""
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
    """A function (weights, batch, moment, scale) -> ((summed loss · scale, `Load`s), {name: gradient}) of one device that runs all layers:
    micro-batch after micro-batch, each reduced by `reduce_micro`."""
    precision, m = run.precision, run.train.microbatches
    differentiate = micro_gradients(model, run, partial(make_ctx, placements))
    gradient_dtype = precision.gradient(m)

    def whole(weights, batch, moment, scale):
        sinks = {name: sink(value, dtype_of(run, placements[name], gradient_dtype)) for name, value in weights.items()}

        def one(micro):
            usable = weights if m == 1 else tie(weights, placements, micro)
            told, gradients = differentiate(sinks, usable, micro, moment, scale)
            return told, {name: reduce_micro(gradient, placements[name]) for name, gradient in gradients.items()}

        shapes = jax.eval_shape(one, {name: array[0] for name, array in batch.items()})
        zeros = jax.tree.map(lambda like: sink(like, like.dtype), shapes)
        return accumulate(one, zeros, batch, m)

    return whole


def manual(run, mesh, placements, model, make=one_device):
    """(params, batch, moment) -> (loss, counted tokens, gradients in the optimizer specs, `Load`s), as one `shard_map` over the whole mesh.

    make: `one_device`, or an executor of pipelines that is made and called alike.
    """
    precision, live = run.precision, run.mesh.live
    scale, replicas = precision.loss_scale or 1.0, varying_over(placements, live)
    whole = make(run, placements, model, partial(ManualCtx, run, platform=platform_of(mesh)))

    def on_device(params, batch, moment):
        weights = {name: vary(computed(value, run, placements[name]), replicas[name]) for name, value in params.items()}
        count = sum_over((batch["targets"] >= 0).sum(dtype=jnp.int32), live(TOKEN_AXES), "loss.count")
        (loss, loads), gradients = whole(weights, batch, moment, (scale / jnp.maximum(count, 1)).astype(wide(run)))
        loss, loads = sum_over(loss, live(REPLICA_AXES), "loss.total") / scale, sum_loads(loads, run)
        reduced = {name: reduce_step(gradient, placements[name], live) for name, gradient in gradients.items()}
        return objective(loss, loads, run, moment), count, {name: unscale(gradient, scale) for name, gradient in reduced.items()}, loads

    spec_of = lambda kind: {name: partition(getattr(placement, kind)) for name, placement in placements.items()}
    replicated = PartitionSpec()
    return jax.shard_map(on_device, mesh=mesh, in_specs=(spec_of("storage"), specs(run), replicated),
                         out_specs=(replicated, replicated, spec_of("optimizer"), replicated), check_vma=run.parallel.check_vma)


def computed(value, run, placement):
    """A stored parameter as the model sees it."""
    return value.astype(run.precision.computed(placement.parameter))


def dtype_of(run, placement, gradient):
    """Dtype of a parameter's gradient, that of most being `gradient`: never narrower than the parameter."""
    return jnp.promote_types(gradient, run.precision.stored(placement.parameter))


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

    def whole(params, batch, moment):
        weights = {name: computed(value, run, placements[name]) for name, value in params.items()}
        sinks = {name: jnp.zeros(value.shape, dtype_of(run, placements[name], gradient_dtype)) for name, value in weights.items()}
        count = (batch["targets"] >= 0).sum(dtype=jnp.int32)
        per_token = (scale / jnp.maximum(count, 1)).astype(wide(run))
        differentiate = micro_gradients(model, run, partial(AnnotatedCtx, run, placements, mesh))

        def one(micro):
            told, gradients = differentiate(sinks, weights, micro, moment, per_token)
            return told, lax.with_sharding_constraint(gradients, kinds["gradient"])

        shapes = jax.eval_shape(one, {name: array[0] for name, array in batch.items()})
        told = jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), shapes[0])
        (loss, loads), gradients = accumulate(one, (told, lax.with_sharding_constraint(sinks, kinds["gradient"])), batch, m)
        gradients = lax.with_sharding_constraint(gradients, kinds["optimizer"])
        unscaled = {name: unscale(gradient, scale) for name, gradient in gradients.items()}
        return objective(loss / scale, loads, run, moment), count, unscaled, loads

    return whole


def logits(run, mesh, placements, model, through=None, watching=False):
    """(params, batch, moment) -> [1, B, S, V_padded] logits in slot order, as in evaluation. through: ({name: `Stored`}, tokens, ctx) ->
    (logits [b, s, V_padded], `Load`s), if not all layers are at hand. watching: instead (chosen, expert), each int32 [L, B, S, K], of every token in
    every layer, in training (see `model.router.Routed`)."""
    def at_hand(stored, tokens, ctx):
        whole = fill(model, stored)
        x, loads = whole.hidden(tokens, ctx)
        return whole.predict(x, ctx), loads

    def forward(make_ctx, cast, told, params, batch, moment):
        micro = {name: array[0] for name, array in batch.items()}
        usable = {name: cast(name, computed(value, run, placements[name])) for name, value in params.items()}
        stored = {name: Stored(value, jnp.zeros(value.shape, value.dtype), name) for name, value in usable.items()}
        ctx = make_ctx(rows_of(micro, run, moment))
        ctx.training = ctx.watching = watching
        found, loads = (through or at_hand)(stored, micro["tokens"], ctx)
        return told(loads.routed) if watching else found[None]

    if run.parallel.lowering == "annotated":
        return partial(forward, partial(AnnotatedCtx, run, placements, mesh), lambda name, value: value, lambda routed: routed)
    replicas = varying_over(placements, run.mesh.live)
    out = partition(live_spec(activation_rules(run).spec(("microbatch", "batch", "sequence", "vocab")), run.mesh))
    if watching:
        out = partition(((), run.mesh.live(BATCH_AXES), split_axes(run), ()))
    stored = {name: partition(placement.storage) for name, placement in placements.items()}
    make_ctx = partial(ManualCtx, run, placements, platform=platform_of(mesh))
    on_device = partial(forward, make_ctx, lambda name, value: vary(value, replicas[name]), partial(seen, run=run))
    return jax.shard_map(on_device, mesh=mesh, in_specs=(stored, specs(run), PartitionSpec()), out_specs=out, check_vma=run.parallel.check_vma)
