"""Logits of a pipeline: the tokens go through the stages one after the other, whatever the schedule."""
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpara.collectives import sum_over, vary
from jaxpara.executors.stage import Stage
from jaxpara.pipeline.placing import schedule


def relay(run, placements, model):
    """A function ({name: `Stored`}, tokens int32 [b, s], ctx) -> (logits [b, s, V_padded], `Load`s of all layers), alike on all stages. What a stage
    hands on, and the logits, are sums over pp of zeros but for one stage."""
    table = schedule(run)
    own = np.asarray([table.held(on).index(chunk) for chunk, on in enumerate(table.placement)], np.int32)

    def logits(stored, tokens, ctx):
        stage = Stage(run, placements, model, ctx, table, False)
        weights, sinks = ({name: getattr(one, part) for name, one in stored.items()} for part in ("value", "sink"))
        ends = stage.ends(weights, sinks)
        from_stage = lambda x, on: sum_over(jnp.where(stage.rank == on, x, 0), ("pp",), "border.relay")

        def hop(x, chunk):
            on, index = chunk
            out, loads = stage.through(x, stage.chunk_of(weights, index), stage.chunk_of(sinks, index), index, ctx.rows)
            return vary(from_stage(out, on), ("pp",)), jax.tree.map(lambda load: from_stage(load, on), loads)

        x, loads = lax.scan(hop, ends.embed(tokens, ctx), (np.asarray(table.placement, np.int32), own))
        return from_stage(ends.predict(x, ctx), 0), jax.tree.map(lambda load: load.sum(0, dtype=load.dtype), loads)

    return logits
