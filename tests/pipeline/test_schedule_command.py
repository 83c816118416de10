"""`jaxpara schedule`, as a user meets it."""
import subprocess
import sys

import pytest

from jaxpara import cli
from jaxpara.pipeline import build, read, to_text

SMALL = "schedule --kind zb_h1 --stages 4 --microbatches 8"


@pytest.fixture(autouse=True)
def wide(monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(tmp_path)


def test_screen(capsys):
    assert cli.main(SMALL.split()) == 0
    out = capsys.readouterr().out
    assert to_text(build("zb_h1", 4, 8), 120) in out
    for words in ("zb_h1: 4 stages, 8 micro-batches, 1 chunk per stage, 27 ticks", "2401.10241", "B input gradient",
                  "Makespan 27. Bubble 3: 11.11 % of the time, 12.50 % of the ideal 24.", "Closed form without hops: 3.",
                  "If all stages meet after every tick: 27.", "buffers in one program: 4"):
        assert words in out, words
    rows = [line.split() for line in out.splitlines()]
    # stage, chunk, busy, idle, live, slots, gradients, F to B, B to W
    assert ["0", "0", "24", "3", "4", "4", "1", "4", "1"] in rows and ["3", "3", "24", "3", "4", "2", "1", "1", "4"] in rows


@pytest.mark.parametrize("arguments, words", [
    ("--kind circular --stages 4 --microbatches 8 --chunks 2", ["38 ticks (19 until the last F)", "15.79 % of the time", "B the whole backward pass"]),
    ("--kind gpipe --stages 4 --microbatches 2", ["60.00 % of the time"]),
    ("--kind zb_h2 --stages 4 --microbatches 8", ["Makespan 27. No stage takes longer than 24 from its own start to its own end. Bubble 0: 0.00 %"]),
    ("--kind 1f1b --stages 8 --microbatches 24 --times 18.522,18.086,9.337,.601", ["24.31 % of the time", "hop 0.601; here B takes B + W"]),
    ("--kind interleaved --stages 4 --microbatches 8", ["2 chunks per stage", "F0b", "Bubble 4.5", "1/2 of a stage's activations"]),
    ("--kind 1f1b --stages 3 --microbatches 3 --times 1e-6,2e-6,1e-7", ["Makespan 1.55e-05. Bubble 6.2e-06"]),
    ("--kind zb_v --stages 2 --microbatches 4 --times 1,1,1", ["0, 3", "1, 2"]),
])
def test_kinds(arguments, words, capsys):
    assert cli.main(["schedule", *arguments.split()]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for part in words:
        assert part in out, part


def test_csv_and_back(tmp_path, capsys):
    assert cli.main([*SMALL.split(), "--csv", "a.csv"]) == 0
    first = capsys.readouterr().out
    assert read("a.csv") == build("zb_h1", 4, 8)
    assert cli.main(["schedule", "--file=a.csv", "--csv=b.csv"]) == 0
    second = capsys.readouterr().out
    assert (tmp_path / "a.csv").read_text() == (tmp_path / "b.csv").read_text()
    assert second.startswith("table: 4 stages") and first.splitlines()[2:12] == second.splitlines()[2:12]


def test_pictures(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert cli.main([*"schedule --kind dualpipe_v --stages 2 --microbatches 4 --plot a.svg --times 1,1,.01,.5".split()]) == 0
    assert "a.svg: 16 cells are too narrow for their numbers." in capsys.readouterr().out
    drawn = (tmp_path / "a.svg").read_text()
    for words in (">3b<", ">stage 1<", ">W weight gradient<", ">b: chunk 2 of 2<", "dualpipe_v, p = 2, m = 4, v = 2: bubble", ">idle<", "hop 0.5<"):
        assert words in drawn, words
    assert cli.main([*SMALL.split(), "--plot", "a.png"]) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG") and "too narrow" not in capsys.readouterr().out


def test_without_matplotlib(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main([*SMALL.split(), "--plot", "a.svg"]) == 2
    captured = capsys.readouterr()
    assert 'pip install "jaxpara[plot]"' in captured.err and captured.out == ""
    assert cli.main(SMALL.split()) == 0


BAD = {     # command line -> what each line of the answer must hold
    "": ["--kind, --stages, --microbatches not given. | Such as: jaxpara schedule --kind zb_h1"],
    "--kind zb1 --stages 4 --microbatches 8": ["--kind zb1 is unknown. Legal: gpipe, 1f1b, interleaved, circular, zb_h1, zb_h2, zb_v, dualpipe_v."],
    "--kind 1f1b --stages four --microbatches 8": ["--stages = four is not a whole number"],
    "--kind 1f1b --stages=--4 --microbatches 9999999999999999999999": ["--stages = --4 is not", "--microbatches = 9999999999999999999999 is not"],
    "--kind 1f1b --stages 4 --microbatches 8 --csv .": ["--csv . is a folder."],
    "--kind 1f1b --stages 0 --microbatches -8": ["--stages = 0 must be greater than 0", "--microbatches = -8 must be greater than 0"],
    "--kind zb_h1 --stages 4 --microbatches 2": ["--microbatches = 2 is less than --stages = 4 | Legal: 4 or more (bubble 20.0 % at 4)"],
    "--kind interleaved --stages 4 --microbatches 6": ["--microbatches = 6 is not a multiple of --stages = 4 | Nearest: 4 (bubble 27.3 %), 8 (bubble 15.8 %)."],
    "--kind 1f1b --stages 4 --microbatches 8 --chunks 2": ["--chunks = 2: 1f1b has 1 chunk per stage. Legal: 1"],
    "--kind 1f1b --stages 4 --microbatches 8 --times 1,1": ["--times 1,1: four numbers F,B,W,hop"],
    "--kind 1f1b --stages 4 --microbatches 8 --times 0,1,1,0": ["F and B greater than 0"],
    "--kind 1f1b --stages 4 --microbatches 8 --times 1,nan,1,0": ["four numbers"],
    "--kind 1f1b --stages 4 --microbatches 8 --plot a.pdf --csv no/a.csv": ["--csv no/a.csv: there is no folder no.", "pictures are .svg or .png. Legal: a.svg."],
    "--file none.csv": ["none.csv cannot be read as a schedule: no such file or directory."],
    "--file none.csv --stages 4": ["--stages beside --file none.csv"],
    "--kind 1f1b --stages 4 --microbatches 8 --mesh.pp 4": ["jaxpara schedule takes no settings."],
    "--kind": ["expected one argument"],
}


@pytest.mark.parametrize("line", BAD)
def test_bad_input(line, capsys):
    assert cli.main(["schedule", *line.split()]) == 2
    captured = capsys.readouterr()
    told = captured.err.splitlines()[1:]
    assert captured.out == "" and len(told) == len(BAD[line]), told
    for message, parts in zip(told, BAD[line]):
        assert all(part.strip() in message for part in parts.split("|")), message


def test_bad_file(tmp_path, capsys):
    (tmp_path / "a.csv").write_text("stage,tick,op,microbatch,chunk\n0,0,F,0,0\n0,1,B,0,0\n0,1,F,1,0\n0,3,B,1,0\n")
    assert cli.main(["schedule", "--file", "a.csv"]) == 2
    assert "a.csv, line 4: stage 0, tick 1: F of micro-batch 1, chunk 0 and B of micro-batch 0" in capsys.readouterr().err


def test_jax_is_not_imported(tmp_path):
    code = ("import sys; from jaxpara import cli; import jaxpara.pipeline; status = cli.main(sys.argv[1:]); "
            "sys.exit(status or 50 * bool({'jax', 'matplotlib'} & set(sys.modules)))")
    done = subprocess.run([sys.executable, "-c", code, *SMALL.split(), "--csv", "a.csv"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
