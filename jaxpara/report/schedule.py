"""The screen and the picture of `jaxpara schedule`. No JAX; matplotlib (`jaxpara[plot]`) only for the picture."""
import re
from pathlib import Path

from rich.console import Group
from rich.table import Table
from rich.text import Text

from jaxpara.errors import ConfigError
from jaxpara.pipeline.builders import KINDS, build, wrong
from jaxpara.pipeline.formulas import bubble_time
from jaxpara.pipeline.simulate import Times, memory, simulate
from jaxpara.pipeline.table import cell, read, to_text

COLOURS = {"F": "#2a6fbb", "B": "#e08a1e", "W": "#2f9e6e"}
TERMINAL = {"F": "blue", "B": "yellow", "W": "green"}
WORDS = {"F": "F forward", "B": "B input gradient", "W": "W weight gradient"}
ENDINGS = (".svg", ".png")
NAMES = ("--stages", "--microbatches", "--chunks")


def asked(options):
    """(schedule, `Times`) that a command line asks for; ConfigError with everything wrong with it."""
    errors = []
    times = _times(options.times, errors)
    for name, path in (("plot", options.plot), ("csv", options.csv)):
        if path and not Path(path).parent.is_dir():
            errors.append(f"--{name} {path}: there is no folder {Path(path).parent}.")
        elif path and Path(path).is_dir():
            errors.append(f"--{name} {path} is a folder. Legal: the name of a file in it.")
    if options.plot and Path(options.plot).suffix.lower() not in ENDINGS:
        errors.append(f"--plot {options.plot}: pictures are {' or '.join(ENDINGS)}. Legal: {Path(options.plot).with_suffix('.svg')}.")
    values = [options.stages, options.microbatches, options.chunks]
    schedule = None
    if options.file:
        given = [name for name, value in zip(("--kind", *NAMES), (options.kind, *values)) if value is not None]
        if given:
            errors.append(f"{', '.join(given)} beside --file {options.file}: the file says them. Legal: --file, or --kind with the numbers.")
        else:
            schedule = _tried(lambda: read(options.file), errors)
    else:
        numbers = [_number(name, value, errors) for name, value in zip(NAMES, values)]
        absent = [name for name, value in zip(("--kind", *NAMES[:2]), (options.kind, *values)) if value is None]
        if absent:
            errors.append(f"{', '.join(absent)} not given. Such as: jaxpara schedule --kind zb_h1 --stages 4 --microbatches 8.")
        if options.kind and options.kind not in KINDS:
            errors.append(f"--kind {options.kind} is unknown. Legal: {', '.join(KINDS)}.")
        elif not absent and None not in numbers[:2] and (numbers[2] is not None or values[2] is None):
            faults = list(wrong(options.kind, *numbers, names=NAMES))
            errors += faults
            schedule = None if faults else build(options.kind, *numbers)
    if options.plot and not errors:
        _tried(_matplotlib, errors)
    if errors:
        raise ConfigError(*errors)
    return schedule, times


def _tried(do, errors):
    try:
        return do()
    except ConfigError as error:
        errors += error.violations


def _number(name, value, errors):
    if value is None:
        return None
    if not re.fullmatch("-?[0-9]{1,18}", value):
        errors.append(f"{name} = {value} is not a whole number. Legal: 1 or more.")
        return None
    return int(value)


def _times(text, errors):
    if text is None:
        return Times()
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if len(values) not in (3, 4) or not all(0 <= value < 1e15 for value in values) or min(values[:2]) == 0:
        errors.append(f"--times {text}: four numbers F,B,W,hop (three: hop 0), F and B greater than 0, W and hop 0 or more. Such as: 1,1,1,0.")
        return None
    return Times(*values)


def show(schedule, times, console):
    """Print the table, what it costs with these times, and what each stage holds."""
    p, m, v = schedule.stages, schedule.microbatches, schedule.chunks
    count = lambda n, word, plural="s": f"{n} {word}{plural * (n != 1)}"
    console.print(Text.assemble((schedule.kind, "bold cyan"),
                                f": {count(p, 'stage')}, {count(m, 'micro-batch', 'es')}, {count(v, 'chunk')} per stage, "
                                f"{count(schedule.ticks, 'tick')} ({schedule.forward_ticks} until the last F); {backward_words(schedule)}"))
    console.print(Text(f"source: {schedule.source}"))
    console.print()
    text = Text(to_text(schedule, console.width), no_wrap=True)
    for kind, colour in TERMINAL.items():
        text.highlight_regex(rf"\b{kind}\d+[a-z]?", colour)
    console.print(text, soft_wrap=True)
    console.print()
    result = simulate(schedule, times)
    console.print(stage_table(schedule, result))
    console.print()
    for line in cost_lines(schedule, times, result):
        console.print(line)


def backward_words(schedule):
    """What B is in this table."""
    return "B input gradient, W weight gradient" if schedule.split else "B the whole backward pass"


def stage_table(schedule, result):
    """Per stage: the chunks it holds, its time, its peak counts; and what the counts mean."""
    held, split = memory(schedule), schedule.split
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    columns = {"busy": map(amount, result.busy), "idle": (amount(idle, result.makespan) for idle in result.idle)}
    columns |= {"live": held.live, "slots": held.slots, "gradients": held.gradients}
    columns |= {"F to B": held.inputs, "B to W": held.pairs} if split else {}
    table.add_column("stage", justify="right", header_style="bold")
    table.add_column("chunks", header_style="bold")
    for name in columns:
        table.add_column(name, justify="right", header_style="bold")
    for stage, row in enumerate(zip(*columns.values())):
        chunks = schedule.held(stage)
        table.add_row(str(stage), ", ".join(map(str, chunks[:6])) + ", …" * (len(chunks) > 6), *map(str, row))
    until = "W" if split else "B"
    unit = "micro-batches" if schedule.chunks == 1 else f"micro-batch chunks, 1/{schedule.chunks} of a stage's activations each"
    caption = (f"Peaks, in {unit}: live, activations from F to {until}; slots, inputs from arrival to B (buffers in one program: {held.buffers}); "
               "gradients, from arrival, or from the loss, to B.")
    return Group(table, Text(caption, "italic"))


def amount(value, whole=0.0):
    """A time in the user's unit. What is nothing beside `whole` is rounding."""
    return "0" if abs(value) <= 1e-9 * whole else f"{value:,.6g}" if abs(value) < 1e6 else f"{value:,.0f}"


def cost_lines(schedule, times, result):
    """Makespan and bubble in words, beside the closed form where there is one."""
    values = times.forward, times.backward, times.weight
    yield Text(f"F {amount(values[0])}, B {amount(values[1])}, W {amount(values[2])} per micro-batch and stage"
               + f" (a chunk takes 1/{schedule.chunks})" * (schedule.chunks > 1)
               + f", hop {amount(times.hop)}" + "; here B takes B + W" * (not schedule.split) + ".")
    words = f"Makespan {amount(result.makespan)}."
    if abs(result.span - result.makespan) > 1e-9 * result.makespan:
        words += f" No stage takes longer than {amount(result.span)} from its own start to its own end."
    yield Text(f"{words} Bubble {amount(result.bubble, result.span)}: {bubble_words(result)}.", "bold")
    closed = bubble_time(schedule.kind, schedule.stages, schedule.microbatches, schedule.chunks, values) if schedule.kind in KINDS else None
    if closed is not None:
        yield Text(f"Closed form without hops: {amount(closed)}.")
    yield Text(f"If all stages meet after every tick: {amount(result.lockstep)}.")


def bubble_words(result):
    """Both fractions in use."""
    ideal = max(result.busy)
    return f"{100 * abs(result.bubble_fraction):.2f} % of the time, {100 * abs(result.bubble) / ideal:.2f} % of the ideal {amount(ideal)}"


def _matplotlib():
    try:
        import matplotlib
    except ImportError:
        raise ConfigError('--plot needs matplotlib. Install it: pip install "jaxpara[plot]".') from None
    return matplotlib


POINTS = 72
FONT, SMALL, SMALLEST = 8.0, 5.5, 4.0
"""Points: size of the numbers in the cells where there is room, where the picture would be too wide, and the smallest worth printing."""
WIDEST = 14.0
"""Inches up to which a picture grows for large numbers; three times that for small ones."""


def picture(schedule, times, path):
    """Draw the simulated schedule, time to scale, one row per stage, into an .svg or .png file; returns what could not be shown."""
    matplotlib = _matplotlib()
    from matplotlib.figure import Figure
    result, p = simulate(schedule, times), schedule.stages
    lengths = [result.ends[op] - result.starts[op] for op in result.starts if op.kind != "W"]
    label = lambda op: cell(schedule, op)[1:] if schedule.chunks > 1 else str(op.microbatch)
    widest = max(len(label(op)) for op in result.starts)
    # inches, for the numbers of the narrowest F or B
    needed = lambda font: font * (0.62 * widest + 0.7) / min(lengths) * result.makespan / POINTS
    width = min(max(needed(FONT), 6.0), max(WIDEST, min(needed(SMALL), 3 * WIDEST)))
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "jaxpara"}):
        height = 0.34 * p + 1.3
        figure = Figure(figsize=(width + 1.1, height))
        axes = figure.add_axes((0.8 / (width + 1.1), 0.95 / height, width / (width + 1.1), 0.34 * p / height))
        hidden = _cells(axes, schedule, result, width * POINTS / result.makespan, label)
        _frame(axes, schedule, times, result)
        _legend(figure, schedule, width)
        figure.savefig(path, dpi=150, metadata={"Date": None} if str(path).lower().endswith(".svg") else None)
    return f"{hidden:,} cells are too narrow for their numbers." if hidden else ""


def _cells(axes, schedule, result, scale, label):
    """Draw every op; returns how many have no room for a number. scale: points per unit of time."""
    from matplotlib.collections import PolyCollection
    hidden, boxes = 0, {}
    for op, start in result.starts.items():
        length, stage = result.ends[op] - start, schedule.placement[op.chunk]
        boxes.setdefault(_shade(schedule, op), []).append(
            [(start, stage - 0.5), (start + length, stage - 0.5), (start + length, stage + 0.5), (start, stage + 0.5)])
        size = min(FONT, scale * length / (0.62 * len(label(op)) + 0.4))
        if size >= SMALLEST:
            axes.text(start + length / 2, stage, label(op), ha="center", va="center_baseline", fontsize=size, color=_shade(schedule, op)[1])
        else:
            hidden += 1
    for (fill, _), corners in boxes.items():        # one collection for all boxes of a colour: single patches take minutes for large tables
        shortest = min(box[1][0] - box[0][0] for box in corners)
        axes.add_collection(PolyCollection(corners, facecolors=[fill], edgecolors="white", linewidths=min(0.8, scale * shortest / 6)))
    return hidden


def _shade(schedule, op):
    """(fill, ink) of a cell: the stage's first chunk in full colour, later ones lighter."""
    from matplotlib.colors import to_rgb
    light = 0.62 * schedule.own(op) / max(schedule.chunks - 1, 1)
    return tuple(value + (1 - value) * light for value in to_rgb(COLOURS[op.kind])), "black" if light > 0.3 else "white"


def _frame(axes, schedule, times, result):
    p = schedule.stages
    axes.set(xlim=(0, result.makespan), ylim=(p - 0.5, -0.5), yticks=range(p), facecolor="#ececec")
    axes.set_yticklabels([f"stage {stage}" for stage in range(p)], fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    for edge in range(1, p):
        axes.axhline(edge - 0.5, color="white", linewidth=1.5)
    split = f"B {amount(times.backward)}, W {amount(times.weight)}" if schedule.split else f"B {amount(times.backward + times.weight)}"
    axes.set_xlabel(f"time, for F {amount(times.forward)}, {split}, hop {amount(times.hop)}", fontsize=8, loc="left")
    chunks = f", v = {schedule.chunks}" * (schedule.chunks > 1)
    axes.set_title(f"{Path(schedule.kind).name}, p = {schedule.stages}, m = {schedule.microbatches}{chunks}: "
                   f"bubble {100 * abs(result.bubble_fraction):.1f} %", fontsize=10, loc="left")


def _legend(figure, schedule, width):
    from matplotlib.patches import Patch
    from jaxpara.pipeline.schedule import Op
    v, kinds = schedule.chunks, "FBW" if schedule.split else "FB"
    words = WORDS if schedule.split else WORDS | {"B": "B backward"}
    handles = [Patch(facecolor=COLOURS[kind], label=words[kind]) for kind in kinds]
    if v > 1:
        for own in sorted({0, 1, v - 1}):
            colour = _shade(schedule, Op("F", 0, schedule.held(0)[own]))[0]
            handles.append(Patch(facecolor=colour, label=f"{chr(ord('a') + own) if own < 26 else own}: chunk {own + 1} of {v}"))
    handles.append(Patch(facecolor="#ececec", label="idle"))
    figure.legend(handles=handles, loc="lower left", bbox_to_anchor=(0.7 / (width + 1.1), 0.0), ncols=max(int(width / 1.45), 3), fontsize=8,
                  frameon=False, handlelength=1.2, columnspacing=1.2)
