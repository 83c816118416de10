"""The router: which experts a token is sent to, with what weight, and who is left out where an expert takes no more.

Everything is computed in float32 or wider. `choice`s are integers and carry no gradient; gradients reach the router by the weights of the chosen
experts, and by the auxiliary losses, whose gradient is put in here (`with_loss`), whatever lies between the layer and the loss.
"""
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxpara.collectives import match, recomputed
from jaxpara.experts import capacity, choices
from jaxpara.kernels.dispatch import NOWHERE
from jaxpara.model.declare import declare

JITTER_SITE, NOISE_SITE = 3, 4
SINKHORN_ITERATIONS = 30


class Routed(NamedTuple):
    expert: jax.Array       # int32 [b, s, K]: of each choice; -1: dropped
    chosen: jax.Array       # int32 [b, s, K]: before drops
    gates: jax.Array        # [b, s, K]: weight of each choice, float32 or wider


class Load(NamedTuple):
    """What one device's tokens of one micro-batch did in one layer; summed over devices and micro-batches, the step's."""
    counts: jax.Array       # int32 [E]: choices of each expert, before drops
    dropped: jax.Array      # int32 []: choices dropped
    aux: jax.Array          # []: load-balance loss without its weight: 1 when balanced, up to E/K
    z: jax.Array            # []: mean squared log-normaliser of the logits
    routed: tuple | None = None     # (chosen, expert) of `Routed`, where someone asked for them


class Router(nnx.Module):
    def __init__(self, table, name, model):
        self.weight, self.model = declare(table, f"{name}.router"), model
        if model.moe.noise:
            self.noise = declare(table, f"{name}.noise")

    def __call__(self, x, layer, ctx):
        """x: [b, s, H], the tokens that this device routes; layer: int32 []. Returns (`Routed`, `Load`)."""
        moe, training = self.model.moe, ctx.training
        logits = self.logits(x, layer, ctx)
        scores = jax.nn.softmax(logits) if moe.score == "softmax" else jax.nn.sigmoid(logits)
        chosen = self.choose(lax.stop_gradient(scores), lax.stop_gradient(logits), layer, ctx)
        gates = pick(scores, chosen)
        if moe.renormalise and moe.routing != "expert_choice":
            gates /= jnp.maximum(gates.sum(-1, keepdims=True), 1e-20)
        most = capacity(moe, evaluation=not training)
        kept = jnp.ones(chosen.shape, bool) if most is None else self.kept(chosen, lax.stop_gradient(gates), most, ctx)
        expert = jnp.where(kept, chosen, NOWHERE)
        counted = chosen if moe.routing != "expert_choice" else expert
        by_row = (counted[..., None] == jnp.arange(moe.experts)).sum((1, 2), dtype=jnp.int32)
        aux, z = self.losses(scores, logits, by_row, ctx)
        dropped = jnp.int32(0) if moe.routing == "expert_choice" else (~kept).sum(dtype=jnp.int32)
        load = Load(by_row.sum(0, dtype=jnp.int32), match(dropped, by_row), aux, z)
        if ctx.rows.weigh is not None:
            gates = with_loss(gates, (moe.aux_weight * ctx.rows.warm * aux + moe.z_weight * z), ctx.share(ctx.rows.weigh, layer))
        return Routed(expert, chosen, gates * moe.scale), jax.tree.map(lax.stop_gradient, load)

    def logits(self, x, layer, ctx):
        """[b, s, E] in float32 or wider, with this step's noise in training."""
        moe, wide = self.model.moe, jnp.promote_types(x.dtype, jnp.float32)
        factors = ()
        if moe.jitter and ctx.training:
            factor = lambda key: jax.random.uniform(key, x.shape[-1:], wide, 1 - moe.jitter, 1 + moe.jitter)
            factors = (ctx.draw(JITTER_SITE, layer, factor),)
        project = lambda weight: projected(x, weight[...], *factors)
        logits = project(self.weight)
        if moe.noise and ctx.training:
            normal = ctx.draw(NOISE_SITE, layer, lambda key: jax.random.normal(key, (moe.experts,), wide))
            logits += normal * jax.nn.softplus(project(self.noise))
        return logits

    def choose(self, scores, logits, layer, ctx):
        """int32 [b, s, K] of scores or, balanced, of logits [b, s, E]."""
        moe = self.model.moe
        if moe.routing == "expert_choice":
            return jnp.broadcast_to(jnp.arange(moe.experts, dtype=jnp.int32), scores.shape) + match(jnp.int32(0), scores)
        if moe.routing == "sinkhorn":
            whole = ctx.whole(logits, "logits")
            groups = whole.reshape(whole.shape[0], -1, moe.group, moe.experts)
            scores = ctx.own(sinkhorn(groups).reshape(whole.shape))
        if ctx.rows.bias is not None:
            scores = scores + ctx.rows.bias[layer].astype(scores.dtype)
        return lax.top_k(limited(scores, moe), moe.top_k)[1].astype(jnp.int32)

    def kept(self, chosen, gates, most, ctx):
        """bool [b, s, K]: who is within capacity. Groups are consecutive tokens of the row, wherever they lie."""
        moe = self.model.moe
        spans = ctx.spans()
        if spans:
            chosen = ctx.whole(chosen, "ids")
            gates = ctx.whole(gates, "scores") if moe.drop_order == "probability" else gates
        within = lambda x: x.reshape(x.shape[0], -1, moe.group * choices(moe))
        priority = within(rounded(gates)) if moe.drop_order == "probability" else None
        kept = within_capacity(within(chosen), priority, moe.experts, most).reshape(chosen.shape)
        return ctx.own(kept) if spans else kept

    def losses(self, scores, logits, by_row, ctx):
        """This device's part of (load-balance loss, z-loss), means over the step's tokens; linear in the scores, since loads carry no gradient.

        Load-balance loss: Σ_i f_i·P_i of Fedus et al. 2021 (arXiv 2101.03961), f_i = E/K · expert i's part of the choices, P_i the mean score;
        z-loss: Zoph et al. 2022 (arXiv 2202.08906).
        """
        moe, train = self.model.moe, ctx.run.train
        share = scores if moe.score == "softmax" else scores / scores.sum(-1, keepdims=True)
        if not moe.aux_weight or moe.routing == "expert_choice":
            aux = match(jnp.zeros((), scores.dtype), scores)
        elif moe.aux_scope == "sequence":
            part = ctx.sum_of_row(by_row).astype(scores.dtype) / ctx.row_tokens(scores.shape[1])
            aux = (part * share.sum(1)).sum()
        else:
            part = ctx.sum_of_batch(by_row.sum(0, dtype=jnp.int32)).astype(scores.dtype) / (train.batch // train.microbatches * train.seq)
            aux = (part * share.sum((0, 1))).sum()
        tokens = train.batch * train.seq
        z = jnp.square(jax.nn.logsumexp(logits, axis=-1)).sum()
        return aux * (moe.experts / moe.top_k / tokens), z / tokens


@recomputed
def projected(x, weight, *factors):
    """[b, s, H], [H, E] -> [b, s, E] in float32 or wider, as the inputs and, with jitter, their factors are; of x no wider copy is kept."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    for factor in factors:
        wide *= factor
    return jnp.einsum("bsh,he->bse", wide, weight, precision=lax.Precision.HIGHEST)


def pick(scores, chosen):
    """scores [..., E] at int32 [..., K], by a sum rather than a gather, whose transpose would scatter."""
    return jnp.where(chosen[..., None] == jnp.arange(scores.shape[-1]), scores[..., None, :], 0).sum(-1)


def limited(scores, moe):
    """`scores` with the experts outside the `top_groups` best groups at -inf (DeepSeek-V3, arXiv 2412.19437, section 2.1.2)."""
    if moe.expert_groups == 1:
        return scores
    grouped = scores.reshape(*scores.shape[:-1], moe.expert_groups, -1)
    best = lax.top_k(grouped, 2 if moe.group_score == "top2" else 1)[0].sum(-1)
    allowed = (lax.top_k(best, moe.top_groups)[1][..., None] == jnp.arange(moe.expert_groups)).any(-2)
    return jnp.where(allowed[..., None], grouped, -jnp.inf).reshape(scores.shape)


def sinkhorn(logits):
    """[..., G, E] logits -> the same scaled until tokens (rows) add up to 1/G and experts to 1/E (Clark et al. 2022, arXiv 2202.01169)."""
    tokens, experts = logits.shape[-2:]
    start = logits - logits.max((-2, -1), keepdims=True)

    def once(_, cost):
        cost -= jax.nn.logsumexp(cost, -1, keepdims=True) + jnp.log(jnp.asarray(tokens, cost.dtype))
        return cost - jax.nn.logsumexp(cost, -2, keepdims=True) - jnp.log(jnp.asarray(experts, cost.dtype))

    return jnp.exp(lax.fori_loop(0, SINKHORN_ITERATIONS, once, start))


def within_capacity(expert, priority, experts, most):
    """bool [..., N]: whether a choice is among the first `most` of its expert: of the highest priority, of equals the first; without priorities the
    first. expert: int32 [..., N] choices of one group in the order of the row."""
    place = lax.broadcasted_iota(jnp.int32, expert.shape, expert.ndim - 1)
    keys = (expert,) if priority is None else (expert, -priority)
    place = match(place, expert)
    order = lax.sort((*keys, place), num_keys=len(keys), is_stable=True)[-1]
    rank = jnp.argsort(order, axis=-1).astype(jnp.int32)
    begin = (expert[..., None] < jnp.arange(experts)).sum(-2, dtype=jnp.int32)
    return rank - jnp.take_along_axis(begin, expert, -1) < most


def rounded(scores):
    """`scores` to half their bits: tokens that see the same (a document that begins like another) score the same but for rounding, which is not the
    same on every mesh. Now they are equal, and their places in the row decide."""
    kind = jnp.finfo(scores.dtype)
    return lax.reduce_precision(scores, kind.nexp, kind.nmant // 2)


@jax.custom_vjp
def with_loss(x, loss, weigh):
    """`x`, to whose backward pass `loss` (a scalar) adds its own gradient times `weigh`, whatever x's cotangent."""
    return x


with_loss.defvjp(lambda x, loss, weigh: (x, (match(weigh.astype(loss.dtype), loss),)),
                 lambda residuals, cotangent: (cotangent, *residuals, None))
