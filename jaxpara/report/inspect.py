"""The screen of `jaxpara inspect`: who talks to whom, how often, how many bytes, predicted and compiled. No JAX."""
from collections import defaultdict

from rich.table import Table
from rich.text import Text

from jaxpara.hlo.rewrites import KNOWN
from jaxpara.report.units import duration, size, span

SHOWN = 20
"""Differences listed one by one."""


def show(report, console):
    """Print a `hlo.inspection.Report` on a terminal."""
    run = report.run
    console.print(Text.assemble((run.name, "bold cyan"), f" for {report.target}: {run.mesh.text}"
                                + f" ({run.mesh.size} devices)" * (run.mesh.size > 1), f", compiled in {span(report.seconds)}"))
    for note in run.notes:
        console.print(Text(f"note: {note}", "yellow"))
    console.print()
    console.print(traffic_table(report) if report.predicted or report.compiled else Text("One device: nothing is sent."))
    console.print()
    if report.compiled:
        console.print(overlap_line(report))
    console.print(memory_lines(report))
    console.print()
    console.print(verdict(report))


def traffic_table(report):
    """Per group of axes what is sent, one row per purpose and kind: the compiled calls and where they stand, both sums of bytes."""
    timed = report.named
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading, justify in (("each device sends", "left"), ("collective", "left"), ("calls", "right"), ("in each", "left"),
                             ("predicted", "right"), ("compiled", "right"), *[("at link speed", "right")] * timed):
        table.add_column(heading, justify=justify, header_style="bold")
    for axes, rows in grouped(report).items():
        n = max((line.n for row in rows.values() for line in row["lines"]), default=1)
        times = [report.time(line) for row in rows.values() for line in row["lines"]]
        table.add_row(f"over {'·'.join(axes) or 'unknown groups'} ({n})", "", f"{sum(row['calls'] for row in rows.values()):,}", "",
                      size(sum(row["predicted"] for row in rows.values())), size(sum(row["compiled"] for row in rows.values())),
                      *[duration(sum(time or 0 for time in times))] * timed, style="cyan")
        for (what, kind), row in rows.items():
            differs = row["predicted"] != row["compiled"]
            spent = sum(report.time(line) or 0 for line in row["lines"])
            table.add_row(f"  {what}", kind, f"{row['calls']:,}", ", ".join(sorted(row["where"])), size(row["predicted"]), size(row["compiled"]),
                          *[duration(spent)] * timed, style="yellow" if differs else "")
    table.caption, table.caption_justify = ("Ring algorithms, nothing overlapped." if timed else "Ring algorithms."), "left"
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


def memory_lines(report):
    """Bytes per device: planned and compiled, and whether they fit."""
    memory = report.memory
    line = Text.assemble(("memory per device", "bold"), f"  arguments {size(memory['argument'])}, temporaries {size(memory['temp'])}, "
                         f"peak {size(memory['peak'])}")
    if report.fits is not None:
        spare = memory["usable"] - memory["peak"]
        words = f"fits, {size(spare)} to spare" if report.fits else f"does NOT fit, {size(-spare)} too much"
        line.append(f"; {words} of {size(memory['usable'])} usable", "" if report.fits else "bold red")
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
