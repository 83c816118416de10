"""CSV written and read back, its errors by line and rule; the table as text."""
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from jaxpara.errors import ConfigError
from jaxpara.pipeline import KINDS, build, read, to_csv, to_text, write
from jaxpara.pipeline.schedule import loop
from jaxpara.pipeline.table import from_csv


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(KINDS)), st.integers(1, 5), st.integers(1, 3), st.randoms(use_true_random=False))
def test_round_trip(kind, p, turns, random):
    schedule = build(kind, p, p * turns)
    text = to_csv(schedule)
    again = from_csv(text)
    assert again == schedule and again.rows == schedule.rows and again.placement == schedule.placement
    head, *lines = text.split()
    random.shuffle(lines)
    assert from_csv("\n".join([head, *lines])) == schedule, "the order of lines is free"
    assert from_csv(to_csv(build("gpipe", p, 3))) != from_csv(to_csv(build("gpipe", p, 4)))


def test_file(tmp_path):
    path = tmp_path / "table.csv"
    write(build("zb_h1", 3, 4), path)
    assert path.read_text().startswith("stage,tick,op,microbatch,chunk\n0,0,F,0,0\n")
    assert read(path) == build("zb_h1", 3, 4) and read(path).source == str(path)


HAND = """
chunk, op, microbatch, stage, tick
0, F, 0, 0, 0
0, F, 1, 0, 1
0, F, 0, 1, 1

0, B, 0, 1, 2
0, F, 1, 1, 3
0, B, 1, 1, 4
0, B, 0, 0, 3
0, B, 1, 0, 5
"""


def test_chunks_may_be_counted_per_stage():
    """One chunk on each of two stages, both called 0; columns in another order, blanks, an empty line, a byte order mark."""
    assert from_csv(HAND) == build("1f1b", 2, 2)
    table = build("interleaved", 3, 3, 2)
    own = [f"{stage},{tick},{op.kind},{op.microbatch},{table.own(op)}" for tick, stage, op in table.entries]
    again = from_csv("\n".join(["stage,tick,op,microbatch,chunk", *own]))
    assert again == table and again.placement == loop(3, 2)


def test_byte_order_mark(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbf" + HAND.strip().replace("\n", "\r\n").encode())
    assert read(tmp_path / "a.csv") == build("1f1b", 2, 2)


GOOD = to_csv(build("zb_h1", 2, 2)).splitlines()        # line 2: 0,0,F,0,0; 3: 0,1,F,1,0; 4: 1,1,F,0,1; 5: 1,2,B,0,1


def edited(number, line):
    """GOOD with its line `number` (from 1) replaced; None: dropped."""
    return "\n".join(old if i != number else line for i, old in enumerate(GOOD, 1) if i != number or line is not None)


@pytest.mark.parametrize("text, words", [
    ("", "has no ops"),
    (GOOD[0], "has no ops"),
    (edited(1, "stage,tick,op,microbatch"), "line 1: the first line must name the columns stage,tick,op,microbatch,chunk"),
    (edited(1, None), "line 1: the first line must name"),
    (edited(3, "0,1,F,1"), "line 3: 4 values for the 5 columns"),
    (edited(3, "0,1,G,1,0"), "line 3: op = G is unknown. Legal: F (forward), B (backward), W (weight gradient)"),
    (edited(3, "0,one,F,1,0"), "line 3: tick = one is not a number. Legal: 0 or more."),
    (edited(3, "-1,1,F,1,0"), "line 3: stage = -1 is not a number"),
    (edited(3, "0,,F,1,0"), "line 3: tick = nothing"),
    (edited(3, "0,1000000,F,1,0"), "line 3: tick = 1000000 is too large"),
    (edited(3, "0,1,F,1," + "9" * 5000), "is too large"),
    (edited(3, "0,1,F,1," + "9" * 200_000), "not CSV (field larger than"),
    (edited(3, "0,0,F,1,0"), "line 3: stage 0, tick 0: F of micro-batch 1, chunk 0 and F of micro-batch 0, chunk 0 at the same time. Rule: a stage does one op"),
    (edited(3, GOOD[1]), "line 3: stage 0, tick 0"),
    (edited(4, "1,0,F,0,1"), "line 4: stage 1, tick 0: F of micro-batch 0, chunk 1 needs F of micro-batch 0, chunk 0, which runs on stage 0 at tick 0. "
                             "Rule: an activation travels one tick."),
    (edited(4, "0,20,F,0,1"), "line 4: stage 0, tick 20: F of micro-batch 0, chunk 1 belongs to stage 1"),
    (edited(4, None), "stage 1: F of micro-batch 0, chunk 1 is missing"),
    ("\n".join([*GOOD, "0,30,F,0,0"]), f"line {len(GOOD) + 1}: stage 0, tick 30: F of micro-batch 0, chunk 0 again, after tick 0"),
    (edited(3, "0,1,F,1,7"), "chunk 2 has no op, and there is a chunk 7"),
    (edited(3, "5,1,F,1,0"), "stage 2 has no op, and there is a stage 5"),
    (edited(3, "0,1,F,5,0"), "stage 0: F of micro-batch 1, chunk 0 is missing"),
])
def test_errors_name_line_and_rule(text, words):
    from_csv("\n".join(GOOD))
    with pytest.raises(ConfigError) as error:
        from_csv(text, "a.csv")
    assert words in str(error.value) and str(error.value).startswith("a.csv"), str(error.value)
    assert len(error.value.violations) == 1


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"\xff\xfe\x00")
    for path, words in ((tmp_path / "b.csv", "no such file"), (tmp_path, "is a directory"), (tmp_path / "a.csv", "not UTF-8 text")):
        with pytest.raises(ConfigError, match=words):
            read(path)


def test_text():
    assert to_text(build("zb_h1", 2, 2), 80) == "\n".join([
        "tick     0  1  2  3  4  5  6",
        "stage 0 F0 F1  . B0 W0 B1 W1",
        "stage 1  . F0 B0 F1 B1 W0 W1"])
    assert to_text(build("interleaved", 2, 2, 2), 80).splitlines()[1] == "stage 0 F0a F1a F0b F1b   . B0b   . B1b B0a B1a"


@pytest.mark.parametrize("columns", [12, 40, 80, 200])
def test_text_wraps(columns):
    schedule = build("1f1b", 3, 9)
    text = to_text(schedule, columns, lines=10_000)
    assert max(map(len, text.splitlines())) <= columns and "not shown" not in text
    row = " ".join(line.removeprefix("stage 1") for line in text.splitlines() if line.startswith("stage 1")).split()
    assert row == [f"{op.kind}{op.microbatch}" if op else "." for op in schedule.rows[1]]
    short = to_text(build("1f1b", 3, 900), columns, lines=30).splitlines()
    assert len(short) <= 32 and short[-1].startswith("Ticks ") and short[-1].endswith(" to 1803 are not shown.")


def test_the_table_in_the_docs():
    assert f"\n{to_text(build('1f1b', 3, 4), 80)}\n" in (Path(__file__).resolve().parents[2] / "docs" / "pipelines.md").read_text(encoding="utf-8")
