"""The screen before step 1 and the one after the last: what a run is, what it holds, what it sends. No JAX.

What is sent is the plan's closed form, in exact bytes per device; the same number is in `jaxpara plan`.
"""
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxpara.config import BYTES
from jaxpara.experts import capacity
from jaxpara.params import count, count_active, layers_of
from jaxpara.plan import model_state, traffic
from jaxpara.report.explain import spec_text
from jaxpara.report.pipeline import pipeline_lines
from jaxpara.report.units import both, exact, size, span
from jaxpara.zero import placements

GROUPS = ("embedding", "attention", "mlp", "router", "experts", "shared", "norms", "head")

WIDE = 100
"""Columns from which a table shows what it can do without."""


def console(file=None):
    """The terminal as jaxpara writes to it: plain words (no markup, no emoji), colours only where there is a terminal."""
    return Console(file=file or sys.stdout, markup=False, emoji=False, highlight=False)


def before(run, console, facts=()):
    """Print the screen before step 1. run: resolved, without "auto". facts: (name, text) lines to add to the head."""
    model, batch = run.model, run.train
    heads = f"{model.heads} heads" + f" ({model.kv_heads} KV)" * (model.kv_heads != model.heads)
    size_of = f"{model.style}, {model.layers} layers, width {model.width}, {heads}, ffn {model.ffn}, vocab {model.vocab}"
    steps = f"{batch.batch} sequences × {batch.seq} tokens, {batch.microbatches} micro-batch{'es' * (batch.microbatches > 1)}, {batch.steps} steps"
    grid = Table.grid(padding=(0, 2))
    for name, text in [("model", f"{count(model):,} parameters: {size_of}"), *expert_lines(run),
                       ("mesh", run.mesh.text + f" ({run.mesh.size} devices)" * (run.mesh.size > 1)),
                       *zip(("pipeline", "", ""), pipeline_lines(run)), ("precision", precision_text(run.precision)), ("batch", steps), *facts]:
        grid.add_row(Text(name, "bold"), Text(text, overflow="fold"))
    console.print(Text(run.name, "bold cyan"))
    console.print(grid)
    for note in run.notes:
        console.print(Text(f"note: {note}", "yellow"))
    console.print()
    console.print(parameter_table(run))
    console.print()
    console.print(state_line(run))
    console.print()
    console.print(traffic_table(run, console.width))
    console.print()


def expert_lines(run):
    """[("experts", text)] of a model that has some."""
    model, moe = run.model, run.model.moe
    if not moe.experts:
        return []
    layers = layers_of(model, "moe")
    where = "every layer" if len(layers) == model.layers else f"{len(layers)} of {model.layers} layers"
    takes = "dropless" if moe.capacity is None else f"capacity {capacity(moe)} of {moe.group} tokens"
    chosen = f"top {moe.top_k} by {moe.score}" if moe.routing == "token_choice" else moe.routing.replace("_", " ")
    shared = f" and {moe.shared} shared" if moe.shared else ""
    return [("experts", f"{moe.experts}{shared} in {where}, ffn {moe.ffn}, {chosen}, {takes}; {count_active(model):,} parameters active per token")]


def precision_text(precision):
    """The dtypes of a run in words."""
    scale = f", loss scale {precision.loss_scale:g}" if precision.loss_scale else ""
    return f"compute {precision.compute}, parameters {precision.params}, master copy {precision.master or 'none'}{scale}"


def group_of(name):
    """The group of a parameter on the screen; `explain` lists them one by one."""
    if "norm" in name or name.endswith("_scale"):
        return "norms"
    if name.startswith("layers.moe.") and not name.startswith("layers.moe.shared."):
        return "router" if name in ("layers.moe.router", "layers.moe.noise") else "experts"
    return next(group for group in GROUPS if group in name.split("."))


def parameter_table(run):
    """One row per group: the spec of its largest parameter stands for the rest."""
    table, width = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0)), BYTES[run.precision.params]
    for heading, justify in (("parameters", "left"), ("elements", "right"), ("stored as", "left"), ("bytes per device", "right")):
        table.add_column(heading, justify=justify, header_style="bold")
    groups = {group: [] for group in GROUPS}
    for placement in placements(run).values():
        groups[group_of(placement.name)].append(placement)
    for group, members in groups.items():
        if members:
            largest = max(members, key=lambda placement: placement.parameter.size)
            bytes_held = sum(p.elements(p.storage) for p in members) * width
            table.add_row(group, f"{sum(p.parameter.size for p in members):,}", spec_text(largest, largest.storage), exact(bytes_held))
    if run.model.tied:
        table.add_row("head", "", "the token embedding (tied)", "")
    return table


def state_line(run):
    """Model state per device: bytes of each part, and all of it."""
    parts = model_state(run)
    total = parts.pop("total")
    line = Text.assemble(("model state per device", "bold"), f"  {both(total)}\n")
    return line.append("  " + " + ".join(f"{part} {size(amount)}" for part, amount in parts.items() if amount))


def by_axis(run):
    """{axis: its traffic lines}, live axes that carry nothing included. A group over several axes has its own entry: "dp·fsdp"."""
    lines = traffic(run)
    axes = {axis for line in lines for axis in line.axis.split("·")}
    sent = {line.axis: [] for line in lines} | {axis: [] for axis in run.mesh.live() if axis not in axes}
    for line in lines:
        sent[line.axis].append(line)
    return sent


def traffic_table(run, columns):
    """Closed-form communication of a step: per axis the total and what it is made of."""
    sent = by_axis(run)
    if not sent:
        return Text("One device: nothing is sent.")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading, justify in (("sent per device and step", "left"), ("collective", "left"), ("calls", "right"), ("bytes", "right")):
        table.add_column(heading, justify=justify, header_style="bold")
    if columns >= WIDE:
        table.add_column("once per", header_style="bold")
    for axis, lines in sent.items():
        total = sum(line.wire for line in lines)
        table.add_row(f"over {axis}", f"in all {size(total)}", f"{sum(line.calls for line in lines):,}", exact(total), style="cyan")
        for what, kind, when, calls, wire in merged(lines, columns >= WIDE):
            table.add_row(f"  {what}", kind, f"{calls:,}", exact(wire), *[when] * (columns >= WIDE))
    table.caption, table.caption_justify = source_of(run), "left"
    return table


def source_of(run):
    """Where the numbers of a traffic table come from."""
    if run.parallel.lowering == "annotated":
        return "As the manual lowering sends it; under annotated, XLA chooses the collectives."
    return "Closed forms of the configuration, ring algorithms; compilers may choose others."


def merged(lines, timely):
    """[(what, kind, when, calls, wire)], lines of the same name added up. timely: keep apart those that happen at different times."""
    sums = {}
    for line in lines:
        key = line.what, line.kind, line.when if timely else ""
        calls, wire = sums.get(key, (0, 0))
        sums[key] = calls + line.calls, wire + line.wire
    return [(*key, *amounts) for key, amounts in sums.items()]


@dataclass(frozen=True)
class Summary:
    """What a run did."""
    steps: int
    first_loss: float
    last_loss: float
    seconds: float                  # from the start of the first step, compilation included
    tokens_per_s: float | None      # without compilation; None when only the first step was done
    directory: Path
    written: tuple[Path, ...] = ()  # what else lies there


def after(run, console, done):
    """Print the last screen: `done` (a `Summary`), and what was sent per axis."""
    speed, steps = f", {done.tokens_per_s:,.0f} tokens/s" if done.tokens_per_s else "", done.steps
    console.print()
    console.print(Text(f"{steps} of {run.train.steps} steps in {span(done.seconds)}{speed}. "
                       f"Loss {done.first_loss:.4f} → {done.last_loss:.4f} nats per token.", "bold"))
    sent = by_axis(run)
    if sent:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for heading in ("sent by each device", "per step", f"in {steps} step{'s' * (steps != 1)}"):
            table.add_column(heading, justify="left" if heading.startswith("sent") else "right", header_style="bold")
        for axis, lines in sent.items():
            wire = sum(line.wire for line in lines)
            table.add_row(f"over {axis}", both(wire), both(wire * steps), style="cyan")
        table.caption, table.caption_justify = source_of(run), "left"
        console.print(table)
    else:
        console.print("One device: nothing was sent.")
    console.print(f"Metrics and configuration: {done.directory}", soft_wrap=True)
    if done.written:
        console.print(f"Load of every expert over the run: {' and '.join(path.name for path in done.written)}", soft_wrap=True)
