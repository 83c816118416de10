"""What the mixture-of-experts layer sends: tokens to their experts and back, and what routers must know of each other. No JAX."""
from jaxpara.experts import choices, layout, spanning, split_axes
from jaxpara.plan.lines import Line
from jaxpara.plan.passes import passes_of
from jaxpara.plan.weights import size, wide


def moe(run):
    """Every `Line` of the layers with experts but those of their weights and, where tp splits widths, of tp."""
    if not run.model.moe.experts:
        return
    yield from routers(run)
    if run.mesh.ep > 1:
        yield from TRANSPORTS[run.parallel.moe_transport](run, layout(run))


def dispatched(run):
    """Wire bytes per device and step of tokens on their way over ep: to their experts and back, forward and backward, recomputation included."""
    return sum(line.wire for line in moe(run) if line.what.startswith("tokens"))


def recomputed(run):
    """Whether the backward pass runs a layer's dispatch again, layer by layer."""
    return run.parallel.remat != "none" and not passes_of(run, "moe").merged


def both(run, line):
    """Yield `line(phase, calls)` of what the forward pass does and the backward pass runs again."""
    count = passes_of(run, "moe")
    yield line("forward", count.forward)
    yield line("recompute", count.again + (count.backward if recomputed(run) else 0))


def line_over(run, axes, what, kind, elements, dtype):
    """A function (phase, calls) -> `Line`."""
    return lambda phase, calls: Line(kind, axes, dtype, elements, calls, phase, "moe", size(run, axes), what, "layer")


def routers(run):
    """Ids and scores of token groups that lie on several devices, loads for the balance loss, and once a step the sum of all loads."""
    moe, sizes, split = run.model.moe, layout(run), split_axes(run)
    over = lambda axes, *rest: line_over(run, axes, *rest)
    every = sizes.tokens * size(run, split)         # tokens of whole rows
    if split and moe.routing == "sinkhorn":
        yield from both(run, over(split, "routing: logits of whole rows", "all-gather", every * moe.experts, wide(run)))
    if split and sizes.capacity and spanning(run):
        yield from both(run, over(split, "routing: ids of whole rows", "all-gather", every * choices(moe), "int32"))
        if moe.drop_order == "probability":
            yield from both(run, over(split, "routing: scores of whole rows", "all-gather", every * choices(moe), wide(run)))
    if moe.aux_weight and moe.routing != "expert_choice":
        rows = run.train.batch // run.train.microbatches // run.mesh.batch
        by_row = moe.aux_scope == "sequence"
        axes = split if by_row else run.mesh.live(("dp", "fsdp", "ep")) + split
        if axes:
            yield from both(run, over(axes, f"routing: loads per {'row' if by_row else 'micro-batch'}", "all-reduce",
                                      (rows if by_row else 1) * moe.experts, "int32"))
    everywhere = run.mesh.live()
    if everywhere:
        for what, dtype, numbers in (("routing: loads of the step", "int32", moe.experts + 1), ("routing: losses of the step", wide(run), 2)):
            yield Line("all-reduce", everywhere, dtype, run.model.layers * numbers, 1, "loss", "moe", size(run, everywhere), what, "step")


def cells(run, sizes):
    """4δ·rows·H per layer and micro-batch, a way out and a way back, each again in the backward pass: rows are E·cell with a capacity, N_ep·cell in
    the worst case. Rows without a token are sent too."""
    if sizes.regrouped:
        yield from both(run, line_over(run, ("ep",), "routing: counts", "all-to-all", sizes.experts, "int32"))
    yield from exchanged(run, sizes)


def pieces(run, sizes):
    """4δ·K·n·H for exactly the rows that are chosen, and the counts of all devices."""
    yield from both(run, line_over(run, ("ep",), "routing: counts", "all-gather", sizes.ways * sizes.experts, "int32"))
    yield from exchanged(run, sizes)


def exchanged(run, sizes):
    """The rows out and back, and their gradients."""
    for what in ("tokens to experts", "tokens back"):
        across = lambda what: line_over(run, ("ep",), what, "all-to-all", sizes.sent * run.model.width, run.precision.compute)
        yield from both(run, across(what))
        yield across(f"{what}, gradients")("backward", passes_of(run, "moe").backward)


def gathers(run, sizes):
    """4δ(N_ep-1)·n·H whatever K, and the ids and weights of all tokens."""
    count, tokens, dtype = passes_of(run, "moe"), sizes.tokens * sizes.ways, run.precision.compute
    over = lambda what, kind, elements, dtype: line_over(run, ("ep",), what, kind, elements, dtype)
    yield from both(run, over("tokens to experts", "all-gather", tokens * run.model.width, dtype))
    yield over("tokens to experts, gradients", "reduce-scatter", tokens * run.model.width, dtype)("backward", count.backward)
    yield from both(run, over("routing: ids", "all-gather", tokens * sizes.choices, "int32"))
    yield from both(run, over("routing: weights", "all-gather", tokens * sizes.choices, wide(run)))
    yield over("routing: weights, gradients", "reduce-scatter", tokens * sizes.choices, wide(run))("backward", count.backward)
    back = over("tokens back", "reduce-scatter", tokens * run.model.width, dtype)
    yield back("forward", count.forward)
    yield back("recompute", 0 if count.merged else count.again)
    yield over("tokens back, gradients", "all-gather", tokens * run.model.width, dtype)("backward", count.backward)


TRANSPORTS = {"all_to_all": cells, "ragged": pieces, "gather": gathers}


def parts_of_tokens(run, count, elements):
    """Where tp splits the layer's tokens and not its experts: at a border with copies, the tokens' parts put together, forward at the exit and
    backward at the entrance; at a border of Megatron-SP nothing."""
    if run.parallel.tp_sequence:
        return
    for phase, calls in (("forward", count.forward), ("recompute", 0 if count.merged else count.again), ("backward", count.backward)):
        yield Line("all-gather", ("tp",), run.precision.compute, elements, calls, phase, "moe", run.mesh.tp, "tokens put together", "block")
