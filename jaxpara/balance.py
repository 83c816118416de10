"""What a step's expert loads are used for: the selection bias of the next step, and metrics."""
from math import log

import jax.numpy as jnp

from jaxpara.experts import choices
from jaxpara.params import layers_of


def balanced(run, bias, counts, healthy):
    """The routers' selection bias after a step (Wang et al. 2024, arXiv 2408.15664): `bias_rate` up for experts with less than the mean load, down
    for those with more. bias: [L, E] or None; counts: int32 [L, E], the whole step's, so that it does not depend on the mesh."""
    if bias is None:
        return None
    experts = counts.shape[1]
    return jnp.where(healthy, bias + run.model.moe.bias_rate * jnp.sign(counts.sum(1, keepdims=True) - experts * counts), bias).astype(bias.dtype)


def router_metrics(run, loads):
    """{name: scalar} of a step, over the layers that have experts.

    load_max: the busiest expert's load over the mean, in the worst layer; load_entropy: of the loads, as a part of log E, in the worst layer;
    dropped: part of all choices; aux_loss, z_loss: means over layers, without their weights.
    """
    moe, layers = run.model.moe, jnp.asarray(layers_of(run.model, "moe"))
    counts = loads.counts[layers]
    part = counts / jnp.maximum(counts.sum(1, keepdims=True), 1)
    entropy = -(part * jnp.log(jnp.where(part > 0, part, 1))).sum(1) / log(moe.experts)
    made = len(layers) * run.train.batch * run.train.seq * choices(moe)
    return {"moe/load_max": (part.max(1) * moe.experts).max(), "moe/load_entropy": entropy.min(),
            "moe/dropped": loads.dropped.sum() / made, "moe/z_loss": loads.z[layers].mean(),
            **({"moe/aux_loss": loads.aux[layers].mean()} if moe.aux_weight else {})}
