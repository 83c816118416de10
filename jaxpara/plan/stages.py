"""Bytes per device that a pipeline holds beside a layer's own: what stages hand on, and what waits for a later tick. No JAX.

A border is [b, s, H] of one micro-batch. Tables keep chunk inputs, cotangents, and pairs for W, each in as many slots as the table needs; the
circular scan keeps borders of all its ticks, since autodiff stacks what goes into a scan, what comes out of it, and what its backward pass needs.
"""
from jaxpara.config import BYTES
from jaxpara.pipeline.lockstep import tables
from jaxpara.params import kinds, layers_of
from jaxpara.pipeline.placing import divergent, only, schedule, stack, ticks


def borders(run):
    """{what: how many borders are held} while a layer runs backward."""
    if divergent(run):
        # what the tick's op gives, what the loss or an embedding gives in the same tick, and the slot that either may have to keep
        table = tables(schedule(run))
        return {"chunk inputs": table.slots, "cotangents": table.gradients, "in this tick": 3}
    m, count = run.train.microbatches, ticks(run)
    waiting = m if schedule(run).chunks > 1 and m > run.mesh.pp else 0
    return {"tick inputs": count if run.parallel.remat_tick else 0, "cotangents of outputs": count, "cotangents of embeddings": count,
            "waiting for the next round": waiting, "in this tick": 2}


def stacked_ticks(run):
    """Of how many ticks a layer's residuals are kept until it runs backward: of its own, or without remat_tick of all in the circular scan."""
    return 1 if divergent(run) or run.parallel.remat_tick else ticks(run)


def carried(run, held, size):
    """`held` bytes of activations as the loop over ticks carries them: XLA:CPU, where it widens 16-bit types, leaves those be that pass through a
    table's switch."""
    return held * BYTES[run.precision.compute] // size.width if divergent(run) else held


def pair(run, size):
    """Bytes of what B leaves W of one chunk: input and output gradient of each of its matmuls, what several read once."""
    inner, attention = 3 if run.model.style == "llama" else 2, 2 * size.inside + 2 * size.query + 2 * size.keys
    feeds = {"dense": 2 * size.inside + inner * size.inner,
             "moe": (2 * size.inside + inner * size.experts.shared) * bool(run.model.moe.shared) if size.experts else 0}
    layers = {kind: only(stack(run), layers_of(run.model, kind)).length for kind in dict.fromkeys(kinds(run.model))}
    return carried(run, sum(count * (attention + feeds[kind]) for kind, count in layers.items()), size)


def pairs(run, size, platform):
    """Bytes of the pairs that wait, and of those that the tick's op gives.

    Every branch of the switch has a pair as result. XLA:CPU also reads the slot that a new pair may
    have to leave as it was, and does so before it runs the branch.
    """
    if not divergent(run) or not schedule(run).split:
        return 0
    beside = 1 + (platform == "cpu")
    return (tables(schedule(run)).pairs + beside) * pair(run, size)
