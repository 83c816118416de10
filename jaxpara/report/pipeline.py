"""A run's pipeline in a few lines: who holds what, how long it takes, what waits where, how much of what is sent is nothing. No JAX."""
from jaxpara.pipeline.lockstep import tables
from jaxpara.pipeline.placing import counted, divergent, schedule, stack, ticks
from jaxpara.pipeline.simulate import memory
from jaxpara.plan.passes import borders


def pipeline_lines(run):
    """Lines of text about the pipeline of a resolved run; none without one."""
    if run.mesh.pp == 1:
        return
    table, layers = schedule(run), stack(run)
    sizes = [sum(layer >= 0 for layer in layers.rows[start:start + layers.length]) for start in range(0, len(layers.rows), layers.length)]
    each = counted(sizes[0], "layer") if len(set(sizes)) == 1 else f"{', '.join(map(str, sizes))} layers"
    chunks = f" of {layers.chunks} chunks" * (layers.chunks > 1)
    yield (f"{run.parallel.schedule_file or table.kind}: {counted(table.stages, 'stage')}{chunks}, {each} in each{' chunk' * (layers.chunks > 1)}, "
           f"{counted(ticks(run), 'tick')}" + ", and back" * (not divergent(run)))
    yield from _kept(run, table)
    sends = borders(run)
    calls, useful = sum(border.calls for border in sends), sum(border.useful for border in sends)
    yield (f"{counted(calls, 'send')} from stage to stage, {calls - useful} of them with nothing in them; head and loss on 1/{table.stages} of the "
           "tokens on each stage")


def _kept(run, table):
    """What waits on a stage."""
    held = memory(table)
    if not divergent(run):
        what = "chunk inputs" if run.parallel.remat_tick else "activations"
        yield f"{counted(ticks(run), 'tick')} of {what} kept until the way back"
        return
    rows = tables(table)
    numbers = f"{counted(rows.slots, 'slot')} for chunk inputs, {rows.gradients} for their output gradients"
    numbers += f", {rows.pairs} for matmuls whose W waits" * bool(rows.pairs)
    yield f"{numbers}; live per stage {', '.join(map(str, held.live))}"
