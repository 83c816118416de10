"""The annotated lowering: the model on global arrays under `jit`; constraints say where things lie and XLA chooses the collectives."""
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxpara.collectives import sum_over, vary
from jaxpara.config import BATCH_AXES
from jaxpara.context.base import Ctx, Rows, attention_kernel, differentiable, look_up, summed_loss
from jaxpara.context.manual import ManualCtx
from jaxpara.context.routing import seen, sum_loads
from jaxpara.experts import split_axes
from jaxpara.kernels import cross_entropy
from jaxpara.mesh import partition, platform_of
from jaxpara.model.declare import fill, weights_of
from jaxpara.model.router import Load
from jaxpara.rules import live


class AnnotatedCtx(Ctx):
    """Under `jit` over the whole mesh: arrays are global, constraints say where they lie."""

    def __init__(self, run, placements, mesh, rows=None):
        super().__init__(run, placements, rows)
        self.mesh = mesh

    def constrain(self, x, *labels):
        return lax.with_sharding_constraint(x, jax.NamedSharding(self.mesh, self.spec(*labels)))

    def on_shards(self, function, inputs, outputs):
        return jax.shard_map(function, mesh=self.mesh, in_specs=inputs, out_specs=outputs, check_vma=self.run.parallel.check_vma)

    def gather_parameter(self, stored):
        placement = self.placements[stored.name]
        strip = slice(1, None) if placement.parameter.stacked else slice(None)
        place = lambda spec: jax.NamedSharding(self.mesh, partition(spec[strip]))
        return _place_parameter(stored.value, stored.sink, place(placement.base), place(placement.storage), stored.sink.dtype)

    def sequence(self, x, border=False):
        return x

    def enter(self, x, owner):
        return self.constrain(x, "batch", "sequence", "width")

    def exit(self, x, owner):
        return self.constrain(x, "batch", "border", "width")

    def embed(self, table, tokens):
        return self.exit(look_up(table, tokens, jnp.ones(tokens.shape, bool), table.shape[0], table.dtype), "embedding")

    def attention(self, query, key, value):
        kernel, mesh, kv_heads = attention_kernel(self.run), self.run.mesh, self.run.model.kv_heads
        copied = kv_heads < mesh.tp
        heads, keys = self.spec("batch", "sequence", "heads"), self.spec("batch", "sequence", "kv_heads")
        rows, per_head = self.spec("batch", "row"), self.spec("batch", "sequence", "heads", "head_dim")
        own = lambda: lax.axis_index("tp") * kv_heads // mesh.tp

        def forward(query, key, value, positions, segments):
            if copied:
                key, value = (lax.dynamic_slice_in_dim(x, own(), 1, axis=2) for x in (key, value))
            return kernel.forward(query, key, value, positions, segments)

        def backward(residuals, cotangent):
            dq, dk, dv = kernel.backward(residuals, cotangent)
            if copied:
                spread = lambda x: jnp.concatenate([jnp.where(own() == head, x, 0) for head in range(kv_heads)], axis=2)
                dk, dv = (sum_over(spread(x), ("tp",), "kv.copies") for x in (dk, dv))
            return dq, dk, dv

        # q, k, v, out are [b, s, heads, d], lse is [b, heads, s, group]; how long s is and how many heads is the kernel's own business
        residuals = (per_head, per_head, per_head, rows, rows, per_head, self.spec("batch", "heads", "sequence"))
        forward = self.on_shards(forward, (heads, keys, keys, rows, rows), (heads, residuals))
        backward = self.on_shards(backward, (residuals, heads), (heads, keys, keys))
        return differentiable(forward, backward)(query, key, value, self.rows.positions, self.rows.segments)

    def cross_entropy(self, x, weight, targets):
        """Summed loss over the whole mesh."""
        mesh, whole, table, tokens = self.run.mesh, self.spec("batch", "sequence"), self.spec("vocab"), self.spec("batch", "sequence")
        replicas = mesh.live(("dp", "fsdp", "ep", "sp"))
        compute = partial(cross_entropy.loss_and_gradients, vocab=self.run.model.vocab, axes=self.tp, limit=self.run.parallel.loss_chunk)

        def on_shard(x, weight, targets, gradients):
            loss, dx, dweight = compute(x, vary(weight, replicas), targets, gradients=gradients)
            loss = sum_over(loss, replicas, "loss.total")
            return (loss, sum_over(dx, self.tp, "loss.enter"), sum_over(dweight, replicas, "loss.weight")) if gradients else (loss,)

        def compute_global(x, weight, targets, gradients):
            outputs = (partition(()), whole, table) if gradients else (partition(()),)
            return self.on_shards(partial(on_shard, gradients=gradients), (whole, table, tokens), outputs)(x, weight, targets)

        return summed_loss(compute_global)(x, weight, targets)

    def moe(self, feed, x, layer):
        """As under the manual lowering, in a `shard_map` of its own: XLA has no constraint that says how tokens are sorted by expert. The backward
        pass runs the layer again, since what autodiff would keep lies on each device as it likes."""
        live, names = self.run.mesh.live, [name for name, _ in weights_of(feed)]
        weights = {name: partition(self.placements[name].base[1:]) for name in names}
        unsplit = {name: tuple(axis for axis in live(("dp", "fsdp", "ep", "sp", "tp")) if not any(axis in dim for dim in self.placements[name].base))
                   for name in names}
        border, everywhere = self.spec("batch", "border", "width"), partition(())
        rows = Rows(*[self.spec("batch", "row")] * 2, self.spec("batch"), *[everywhere] * 6)
        rows = Rows(*(spec if given is not None else None for spec, given in zip(rows, self.rows)))
        told = Load(*[everywhere] * 4, (partition((live(BATCH_AXES), split_axes(self.run))),) * 2 if self.watching else None)

        def on_shard(weights, x, rows, layer):
            ctx = ManualCtx(self.run, self.placements, rows, platform_of(self.mesh))
            ctx.training, ctx.watching = self.training, self.watching
            return ctx.moe(fill(feed, {name: vary(weight, unsplit[name]) for name, weight in weights.items()}), x, layer)

        def forward(*arguments):
            out, load = on_shard(*arguments)
            return out, sum_loads(load, self.run)._replace(routed=seen(load.routed, self.run))

        def backward(weights, x, rows, layer, cotangent):
            varied = {name: vary(weight, unsplit[name]) for name, weight in weights.items()}
            dweights, dx = jax.vjp(lambda weights, x: on_shard(weights, x, rows, layer)[0], varied, x)[1](cotangent)
            return {name: sum_over(dweight, unsplit[name], "moe.weights") for name, dweight in dweights.items()}, dx

        given = weights, border, rows, everywhere
        forward, backward = self.on_shards(forward, given, (border, told)), self.on_shards(backward, (*given, border), (weights, border))
        routed = jax.custom_vjp(forward)
        routed.defvjp(lambda *arguments: (forward(*arguments), arguments), lambda arguments, out: (*backward(*arguments, out[0]), None, None))
        return routed(dict(weights_of(feed)), x, self.rows, layer)

    def recompute_from_shard(self, layer):
        """ZeRO-R by constraint: what is kept lies over tp, what is used is whole."""
        shard = jax.NamedSharding(self.mesh, partition(live((("dp", "fsdp", "ep"), ("sp", "tp"), ()), self.run.mesh)))
        gathered = lambda x, *rest: layer(self.exit(x, "zero_r"), *rest)
        kept = jax.checkpoint(gathered, policy=jax.checkpoint_policies.nothing_saveable, prevent_cse=False)
        return lambda x, *rest: kept(lax.with_sharding_constraint(x, shard), *rest)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _place_parameter(value, sink, base, storage, dtype):
    """The annotated twin of `_gather_parameter`: constraints in place of collectives."""
    return lax.with_sharding_constraint(value, base)


_place_parameter.defvjp(
    lambda value, sink, base, storage, dtype: (lax.with_sharding_constraint(value, base), None),
    lambda base, storage, dtype, _, cotangent: (None, lax.with_sharding_constraint(cotangent.astype(dtype), storage)))
