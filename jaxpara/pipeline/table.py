"""A schedule as text, and as CSV with the columns stage, tick, op, microbatch, chunk: written and read. No JAX.

In the CSV a chunk has its number in model order. A table of several stages that all run the chunks 0 … v-1 is taken to count them per
stage, chunk k of stage i being k·p + i in model order.
"""
import csv
import io
from collections import Counter, defaultdict
from pathlib import Path

from jaxpara.errors import ConfigError
from jaxpara.pipeline.check import first_fault
from jaxpara.pipeline.schedule import Entry, Op, Schedule

COLUMNS = ("stage", "tick", "op", "microbatch", "chunk")
MOST_TICKS = 1_000_000
LINES = 200
"""Lines of text beyond which a table is cut."""


def to_csv(schedule):
    """The table as CSV text, by tick and stage."""
    rows = (f"{stage},{tick},{op.kind},{op.microbatch},{op.chunk}" for tick, stage, op in schedule.entries)
    return "\n".join([",".join(COLUMNS), *rows, ""])


def write(schedule, path):
    """Write `to_csv` to a file."""
    Path(path).write_text(to_csv(schedule), encoding="utf-8")


def read(path):
    """The legal `Schedule` in a CSV file; ConfigError with the line and the first broken rule."""
    return from_csv(text_of(path), str(path))


def text_of(path):
    """What a CSV file holds; ConfigError if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ConfigError(f"{path} cannot be read as a schedule: {reason[:1].lower()}{reason[1:]}.") from None


def from_csv(text, name="schedule"):
    """The legal `Schedule` in CSV text. name: what errors call it."""
    lines = _parsed(text, name)
    entries = _model_order([entry for _, entry in lines])
    line_of = {entry: line for (line, _), entry in zip(lines, entries)}
    placement = _placement(entries, name)
    schedule = Schedule(tuple(sorted(entries, key=lambda entry: entry[:2])), placement, 1 + max(entry.op.microbatch for entry in entries),
                        any(entry.op.kind == "W" for entry in entries), "table", name)
    if fault := first_fault(schedule):
        line = f", line {line_of[fault.entry]}" if fault.entry in line_of else ""
        raise ConfigError(f"{name}{line}: {fault.message}")
    return schedule


def _parsed(text, name):
    """[(line number, Entry)], at least one."""
    rows = csv.reader(io.StringIO(text, newline=""), skipinitialspace=True)
    head, found = None, []
    for row in _rows(rows, name):
        row = [value.strip() for value in row]
        if not any(row):
            continue
        if head is None:
            head = [value.lower() for value in row]
            if sorted(head) != sorted(COLUMNS):
                raise ConfigError(f"{name}, line {rows.line_num}: the first line must name the columns {','.join(COLUMNS)}; it is {','.join(row)}.")
            continue
        found.append((rows.line_num, _entry(head, row, f"{name}, line {rows.line_num}")))
    if not found:
        raise ConfigError(f"{name} has no ops. Legal: a line {','.join(COLUMNS)}, then one line for each op.")
    return found


def _rows(rows, name):
    try:
        yield from rows
    except csv.Error as error:
        raise ConfigError(f"{name}, line {rows.line_num}: not CSV ({error}).") from None


def _entry(head, row, place):
    if len(row) != len(head):
        raise ConfigError(f"{place}: {len(row)} values for the {len(head)} columns {','.join(head)}.")
    values = dict(zip(head, row))
    for column in COLUMNS:
        value = values[column]
        if column == "op":
            if value not in ("F", "B", "W"):
                raise ConfigError(f"{place}: op = {value} is unknown. Legal: F (forward), B (backward), W (weight gradient).")
        elif not (value.isascii() and value.isdigit()):
            raise ConfigError(f"{place}: {column} = {value or 'nothing'} is not a number. Legal: 0 or more.")
        elif len(value) > 9 or int(value) >= MOST_TICKS:
            raise ConfigError(f"{place}: {column} = {value} is too large. Legal: less than {MOST_TICKS}.")
    return Entry(int(values["tick"]), int(values["stage"]), Op(values["op"], int(values["microbatch"]), int(values["chunk"])))


def _model_order(entries):
    """The entries with chunks in model order."""
    seen = defaultdict(set)
    for _, stage, op in entries:
        seen[stage].add(op.chunk)
    stages, own = max(seen) + 1, set(range(len(seen[0])))
    if len(seen) < 2 or any(chunks != own for chunks in seen.values()):
        return entries
    return [Entry(tick, stage, op._replace(chunk=op.chunk * stages + stage)) for tick, stage, op in entries]


def _placement(entries, name):
    """The stage of each chunk: the one that most of its ops name, so that a slip of one line is found to be that."""
    votes = defaultdict(Counter)
    for _, stage, op in entries:
        votes[op.chunk][stage] += 1
    for what, numbers in (("stage", {stage for _, stage, _ in entries}), ("chunk", set(votes))):
        absent = min(set(range(len(numbers))) - numbers, default=None)
        if absent is not None:
            raise ConfigError(f"{name}: {what} {absent} has no op, and there is a {what} {max(numbers)}. "
                              f"Rule: {what}s are numbered from 0, none left out.")
    return tuple(max(sorted(votes[chunk]), key=votes[chunk].get) for chunk in range(len(votes)))


def cell(schedule, op):
    """F3; with several chunks per stage F3b, b being the stage's second. "." for idle."""
    if op is None:
        return "."
    own = schedule.own(op)
    letter = "" if schedule.chunks == 1 else chr(ord("a") + own) if own < 26 else f".{own}"
    return f"{op.kind}{op.microbatch}{letter}"


def to_text(schedule, columns=100, lines=LINES):
    """One row per stage, one column per tick, in blocks of at most `columns` characters; what would take more than `lines` lines is left
    out, and the last line says so."""
    ticks, rows = schedule.ticks, schedule.rows
    width = max(len(str(ticks - 1)), *(len(cell(schedule, op)) for _, _, op in schedule.entries))
    label = len(f"stage {schedule.stages - 1}")
    step = max((columns - label) // (width + 1), 1)
    text, first = [], 0
    while first < ticks and (not text or len(text) + schedule.stages + 2 <= lines):
        last = min(first + step, ticks)
        row = lambda head, cells: f"{head:<{label}}" + "".join(f" {value:>{width}}" for value in cells)
        text += [""] * bool(text) + [row("tick", map(str, range(first, last)))]
        text += [row(f"stage {stage}", (cell(schedule, op) for op in rows[stage][first:last])) for stage in range(schedule.stages)]
        first = last
    if first < ticks:
        text += ["", f"Ticks {first} to {ticks - 1} are not shown."]
    return "\n".join(line.rstrip() for line in text)
