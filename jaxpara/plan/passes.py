"""How often one device runs its layers, its ends and its borders in a step: by micro-batches, or by the ticks of a pipeline. No JAX."""
from dataclasses import dataclass, replace

from jaxpara.pipeline.lockstep import tables
from jaxpara.params import layers_of, period
from jaxpara.pipeline.placing import divergent, only, schedule, stack, ticks


@dataclass(frozen=True)
class Passes:
    """forward: layers run in a step, the bubbles' of a circular pipeline included. again: of them run again, whole, in the backward pass,
    before it recomputes what the policy says layer by layer. backward: layers run backward. chunks: runs of layers backward.
    begins: calls of the embedding, of `batches` micro-batches each; losses: calls of the loss, of `tokens` tokens at a border each.
    length: layers per run; held: layers on this device, padding included; period: layers that one pass of the loop over layers runs.
    """
    forward: int
    again: int
    backward: int
    chunks: int
    begins: int
    batches: int
    losses: int
    tokens: int
    length: int
    held: int
    period: int

    @property
    def merged(self):
        """Whether what the recompute policy would compute again of a layer is what was just run again: runs of one period have no other policy."""
        return bool(self.again) and self.length == self.period


def tokens_per_device(run):
    """b·S/N_sp: tokens of one micro-batch inside a block on one device."""
    return run.train.batch // run.train.microbatches // run.mesh.batch * run.train.seq // run.mesh.sp


def border_tokens(run):
    """Tokens of one micro-batch that one device holds at a border."""
    return tokens_per_device(run) // (run.mesh.tp if run.parallel.tp_sequence else 1)


def passes_of(run, kind):
    """The `Passes` of a run's layers whose feed-forward block is of one kind: "moe" or "dense"."""
    whole, layers = stack(run), layers_of(run.model, kind)
    each = only(whole, layers).length if layers else 0
    count = passes(run)
    part = lambda number: number // whole.length * each
    return replace(count, forward=part(count.forward), again=part(count.again), backward=part(count.backward), held=part(count.held))


def passes(run):
    """The `Passes` of a run."""
    m, p, tokens, each = run.train.microbatches, run.mesh.pp, border_tokens(run), period(run.model)
    if p == 1:
        layers = run.model.layers
        return Passes(m * layers, 0, m * layers, m, m, 1, m, tokens, layers, layers, each)
    held = stack(run)
    part = lambda tokens: -(-tokens // p)
    if divergent(run):
        runs = m * held.chunks
        layers = runs * held.length
        return Passes(layers, layers, layers, runs, m, 1, m, part(tokens), held.length, held.chunks * held.length, each)
    count = ticks(run)
    layers = count * held.length
    return Passes(layers, layers if run.parallel.remat_tick else 0, layers, count, 1, m, 1, part(m * tokens), held.length,
                  held.chunks * held.length, each)


@dataclass(frozen=True)
class Border:
    """Sends between stages: calls of the program, of which `useful` are what the busiest stage has to send; phase of the compiled program."""
    calls: int
    useful: int
    phase: str


def borders(run):
    """Every `Border` of a run, in the order of `lockstep.hops`; none without a pipeline."""
    if run.mesh.pp == 1:
        return []
    table, m = schedule(run), run.train.microbatches
    if not divergent(run):
        useful = min(m * table.chunks, ticks(run))
        return [Border(ticks(run), useful, phase) for phase in ("forward", "backward")]
    return [Border(int(hop.sends.sum()), max(hop.sent), "forward") for hop in tables(table).hops if hop.distance]


def taken(run, scope, distance=None):
    """How many of the ticks take a branch of the program: of the switch on the op ("forward", "backward", "weight"), of what all stages do
    together ("begin", "loss", "end"), of sending to the stage `distance` further ("send"). "idle" sends nothing."""
    table, m = schedule(run), run.train.microbatches
    if scope == "send":
        return next(int(hop.sends.sum()) for hop in tables(table).hops if hop.distance == distance)
    return {"forward": m * table.chunks, "backward": m * table.chunks, "weight": m * table.chunks, "begin": m, "loss": m, "end": m, "idle": 0}[scope]
