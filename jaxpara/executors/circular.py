"""The circular pipeline: one scan over ticks in which every stage does the same, differentiated as a whole.

Micro-batch b goes round the stages v times; at tick t stage i does what entered t - i ticks before. A tick is: take what arrived (or, on
the first stage, the next micro-batch, or one that waited for its next round), run one chunk, send it on. Between rounds the first
stage keeps what came early. The backward pass is the scan's own, mirrored.

Bubbles do run their chunk, on a real micro-batch's embedding, so that whatever the layers do stays finite; nobody reads what they give, and its
gradient is zero.
"""
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxpara.collectives import match, shift
from jaxpara.executors.stage import Stage, gathered, inside, scattered, sums
from jaxpara.gradients import dtype_of, reduce_micro, rows_of, sink
from jaxpara.pipeline.placing import schedule


def circular(run, placements, model, make_ctx):
    """A function (weights, batch, moment, scale) -> ((summed loss · scale, `Load`s), {name: gradient}): a whole step's, gradients reduced like
    those of one micro-batch (`gradients.reduce_micro`). make_ctx: placements -> `ManualCtx`."""
    seen = inside(run, placements)
    stage = Stage(run, seen, model, make_ctx(seen), schedule(run), run.parallel.remat_tick)
    dtype = run.precision.gradient(run.train.microbatches)
    differentiate = jax.value_and_grad(partial(loss, stage), has_aux=True)

    def whole(weights, batch, moment, scale):
        usable = gathered(weights, placements) if run.parallel.gather_once else weights
        wide = lambda name: dtype_of(run, seen[name], dtype)
        sinks = {name: (sums(value, seen[name], wide(name)) if name in stage.layers else sink(value, wide(name))) for name, value in usable.items()}
        told, gradients = differentiate(sinks, usable, batch, moment, scale)
        outside = {name: reduce_micro(gradients[name], seen[name]) for name in stage.outside}
        gradients = {**gradients, **outside}
        return told, scattered(gradients, placements) if run.parallel.gather_once else gradients

    return whole


def loss(stage, sinks, weights, batch, moment, scale):
    """(summed loss · scale of all micro-batches, this stage's part of it; the `Load`s of its layers)."""
    m = stage.run.train.microbatches
    flat = {name: array.reshape(-1, *array.shape[2:]) for name, array in batch.items()}
    embedded = stage.ends(weights, sinks).embed(flat["tokens"], stage.ctx.bind(rows_of(flat, stage.run, moment)))
    embedded = embedded.reshape(m, -1, *embedded.shape[1:])
    out, loads = ticks(stage, sinks, weights, batch, moment, embedded)
    return stage.loss(out, batch["targets"], weights, sinks) * scale, loads


def ticks(stage, sinks, weights, batch, moment, embedded):
    """embedded: [m, b, s, H] at a border -> (the same of the last layer, right on the last stage; the `Load`s of this stage's layers)."""
    run = stage.run
    p, m, rounds = run.mesh.pp, run.train.microbatches, stage.numbers.shape[1]
    turn, count = max(m, p), stage.table.forward_ticks
    pairs = [(i, (i + 1) % p) for i in range(p if rounds > 1 else p - 1)]
    first = stage.rank == 0
    waits = rounds > 1 and m > p

    def chunk(x, weights, sinks, t, index, microbatch, active):
        own = {name: whole_sink(value, stage.placements[name]) for name, value in stage.chunk_of(sinks, index).items()}
        rows = stage.rows(batch, microbatch, moment, t)
        rows = rows if rows.weigh is None else rows._replace(weigh=jnp.where(active, rows.weigh, 0))
        return stage.through(x, stage.chunk_of(weights, index), own, index, rows)

    if run.parallel.remat_tick:
        chunk = jax.checkpoint(chunk, policy=jax.checkpoint_policies.nothing_saveable, prevent_cse=False)

    def tick(carry, now):
        (arrived, waiting), (t, fresh) = carry, now
        turns, microbatch = jnp.divmod(t - stage.rank, turn)
        active = (t >= stage.rank) & (turns < rounds) & (microbatch < m)
        microbatch, index = jnp.clip(microbatch, 0, m - 1), jnp.clip(turns, 0, rounds - 1)
        if waits:
            # what comes round before tick p is nobody's, and later overwritten
            waiting = lax.dynamic_update_index_in_dim(waiting, arrived, (t - p) % m, 0)
            arrived = jnp.where(first, lax.dynamic_index_in_dim(waiting, microbatch, keepdims=False), arrived)
        x = jnp.where(first & (turns == 0), fresh, arrived)
        out, loads = chunk(jnp.where(active, x, lax.stop_gradient(embedded[0])), weights, sinks, t, index, microbatch, active)
        out = hand_on(out, active)
        return (shift(out, "pp", pairs, "border.send"), waiting), (out, jax.tree.map(lambda load: jnp.where(active, load, 0), loads))

    filler = jnp.broadcast_to(lax.stop_gradient(embedded[:1]), (count - m, *embedded.shape[1:]))
    empty = match(jnp.zeros(embedded.shape[1:], embedded.dtype), embedded, stage.rank)
    waiting = match(jnp.zeros((m if waits else 0, *empty.shape), empty.dtype), empty)
    _, (outs, loads) = lax.scan(tick, (empty, waiting), (jnp.arange(count), jnp.concatenate([embedded, filler])))
    return outs[count - m:], jax.tree.map(lambda load: load.sum(0, dtype=load.dtype), loads)


def hand_on(out, active):
    """What a stage sends. In a bubble (not active) nobody reads it, so it is sent as it is."""
    return out


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def whole_sink(value, placement):
    """Zeros of the shape that a layer's gradient has before it is scattered over the axes of ZeRO-2 / that scatter, in every tick."""
    if not placement.axes(2):
        return value
    shape = list(value.shape)
    shape[placement.dim] *= lax.axis_size(placement.axes(2))
    return match(jnp.zeros(shape, value.dtype), value)


whole_sink.defvjp(lambda value, placement: (whole_sink(value, placement), None),
                  lambda placement, _, cotangent: (reduce_micro(cotangent, placement),))
