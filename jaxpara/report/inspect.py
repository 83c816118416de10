"""The screen of `jaxpara inspect`: who talks to whom, how often, how many bytes, predicted and compiled. No JAX."""
from collections import defaultdict

from rich.table import Table
from rich.text import Text

from jaxpara.hlo.rewrites import KNOWN
from jaxpara.report.pipeline import pipeline_lines
from jaxpara.report.screen import WIDE
from jaxpara.report.units import duration, size, span

SHORT = {"all-gather": "AG", "reduce-scatter": "RS", "all-reduce": "AR", "all-to-all": "A2A", "permute": "permute"}
SHOWN = 20
"""Differences listed one by one."""


def show(report, console):
    """Print a `hlo.inspection.Report` on a terminal."""
    run = report.run
    console.print(Text.assemble((run.name, "bold cyan"), f" for {report.target}: {run.mesh.text}"
                                + f" ({run.mesh.size} devices)" * (run.mesh.size > 1), f", compiled in {span(report.seconds)}"))
    for line in pipeline_lines(run):
        console.print(Text(line))
    for note in run.notes:
        console.print(Text(f"note: {note}", "yellow"))
    console.print()
    console.print(traffic_table(report, console.width) if report.predicted or report.compiled else Text("One device: nothing is sent."))
    console.print()
    if report.compiled:
        console.print(overlap_line(report))
        console.print()
    console.print(memory_table(report))
    console.print(fit_line(report))
    console.print()
    console.print(verdict(report))


def traffic_table(report, columns):
    """Per group of axes what is sent, one row per purpose and kind: the compiled calls and where they stand, both sums of bytes."""
    timed, narrow = report.named, columns < WIDE
    table = Table(box=None, pad_edge=False, padding=(0, 1 if narrow else 2, 0, 0))
    for heading, justify in (("each device sends", "left"), ("as" if narrow else "collective", "left"), ("calls", "right"), ("in each", "left"),
                             ("predicted", "right"), ("compiled", "right"), *[("on links" if narrow else "at link speed", "right")] * timed):
        table.add_column(heading, justify=justify, header_style="bold")
    for axes, rows in grouped(report).items():
        n = max((line.n for row in rows.values() for line in row["lines"]), default=1)
        seconds = {key: sum(report.time(line) or 0 for line in row["lines"]) for key, row in rows.items()}
        table.add_row(f"over {'·'.join(axes) or 'unknown groups'} ({n})", "", f"{sum(row['calls'] for row in rows.values()):,}", "",
                      size(sum(row["predicted"] for row in rows.values())), size(sum(row["compiled"] for row in rows.values())),
                      *[duration(sum(seconds.values()))] * timed, style="cyan")
        for (what, kind), row in rows.items():
            differs = row["predicted"] != row["compiled"]
            table.add_row(f" {what}", SHORT[kind] if narrow else kind, f"{row['calls']:,}", ", ".join(sorted(row["where"])),
                          size(row["predicted"]), size(row["compiled"]),
                          *[duration(seconds[what, kind])] * timed, style="yellow" if differs else "")
    words = "Ring algorithms, links at their best, nothing overlapped." if timed else "Ring algorithms."
    if narrow:
        words += " AG all-gather, RS reduce-scatter, AR all-reduce, A2A all-to-all."
    table.caption, table.caption_justify = words, "left"
    return table


def grouped(report):
    """{axes: {(what, kind): {"calls", "where", "predicted", "compiled", "lines"}}}; what was compiled for a planned purpose counts there,
    what nobody planned has rows of its own."""
    groups = defaultdict(lambda: defaultdict(lambda: {"calls": 0, "where": set(), "predicted": 0, "compiled": 0, "lines": []}))

    def add(line, compiled, predicted, what=None):
        row = groups[line.axes][what or line.what, line.kind]
        if predicted:
            row["predicted"] += predicted.wire
        if compiled:
            row["calls"] += compiled.calls
            row["where"].add(compiled.when.rpartition(" · ")[2])
            row["compiled"] += compiled.wire
            row["lines"].append(compiled)

    for pair in report.contract.pairs:
        add(pair.predicted or pair.compiled, pair.compiled, pair.predicted, None if pair.predicted else KNOWN_ROWS[pair.rewrites[0]])
    for one in report.differences:
        if one.line is not None and one.kind in ("missing", "less often"):
            add(one.line, None, one.line)
        elif one.line is not None:
            add(one.line, one.line, None, f"not predicted: {one.line.owner or one.line.phase}")
    sent = lambda axes: sum(row["compiled"] for row in groups[axes].values())
    return {axes: groups[axes] for axes in sorted(groups, key=sent, reverse=True)}


KNOWN_ROWS = {"padded": "putting padded pieces in place", "scalars": "gradient norm"}
"""Purpose of a compiled line that a rewrite adds."""


def overlap_line(report):
    """How much is sent while something is computed, as far as the schedule tells."""
    sums = report.overlap
    whole = sums["synchronous"] + sums["asynchronous"] or 1
    share = lambda part: f"{100 * sums[part] / whole:.0f} %"
    return Text(f"{share('asynchronous')} of the bytes travel asynchronously; "
                f"{share('overlapped')} have work scheduled between their start and done.")


ARGUMENTS = {"parameters": "parameters", "master": "master copy", "optimizer": "optimizer", "batch": "batch", "scalars": "scalars",
             "padding": "tiles"}
KINDS = {"saved": "saved activations", "slots": "borders of other ticks", "pairs": "pairs for W", "working": "working set",
         "gathered": "gathered weights", "weights": "copies of weights", "gradients": "gradients", "logits": "logits", "update": "update",
         "rest": "rest"}


def memory_table(report):
    """Bytes per device at the fullest moment, predicted and compiled, by what they hold."""
    memory, planned = report.memory, report.memory["predicted"]
    parts, table = memory["parts"], Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("memory per device", "predicted", "compiled"):
        table.add_column(heading, justify="left" if heading.startswith("memory") else "right", header_style="bold")

    def rows(title, names, before, total, compiled):
        table.add_row(title, size(total), size(compiled), style="cyan")
        for key, words in names.items():
            if before.get(key) or parts.get(key, 0) > 0.001 * memory["peak"]:
                table.add_row(f"  {words}", size(before.get(key, 0)), size(parts[key]) if key in parts else "")

    rows("arguments", ARGUMENTS, planned["arguments"], planned["arguments"]["total"], memory["argument"])
    rows("temporaries", KINDS, planned["temporaries"], planned["temporaries"]["total"], memory["temp"])
    table.add_row("peak", size(planned["peak"]), size(memory["peak"]), style="bold")
    return table


def fit_line(report):
    """How good the prediction is, and whether the program fits."""
    memory = report.memory
    line = Text(f"Peak predicted {100 * (memory['predicted']['peak'] / memory['peak'] - 1):+.1f} %.")
    if report.fits is not None:
        spare = memory["usable"] - memory["peak"]
        words = f"Fits, {size(spare)} to spare" if report.fits else f"Does NOT fit, {size(-spare)} too much"
        line.append(f" {words} of {size(memory['usable'])} usable.", "" if report.fits else "bold red")
    return line


def verdict(report):
    """What `--strict` says, in words."""
    lines = []
    for name, pairs in report.contract.rewrites.items():
        calls = sum((pair.predicted or pair.compiled).calls for pair in pairs)
        lines.append(Text(f"known rewrite, {calls:,} calls: {name}, {KNOWN[name]}", "yellow"))
    objections = report.differences
    for one in objections[:SHOWN]:
        lines.append(Text(f"{one.kind}: {one.text}" + f" ({size(one.bytes)})" * (one.bytes > 0), "red"))
    if len(objections) > SHOWN:
        lines.append(Text(f"… and {len(objections) - SHOWN} more (all are in --json).", "red"))
    if report.kept:
        lines.append(Text("Contract kept: every collective was predicted, 0 unexplained bytes, none missing.", "bold green"))
    else:
        lines.append(Text(f"Contract broken: {size(report.unexplained_bytes)} unexplained, {len(report.missing)} predicted lines missing.",
                          "bold red"))
    if report.run.parallel.lowering == "annotated":
        lines.append(Text("Predicted is what the manual lowering sends; under annotated XLA chooses, and these are its differences."))
    return Text("\n").join(lines)
