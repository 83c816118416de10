"""The train loop: what it writes, when it reads, and how it ends."""
import io
import json
import os
import signal
from dataclasses import replace

import numpy as np
import pytest

import jaxpara
from jaxpara import train as loop
from jaxpara.data import Loader
from jaxpara.errors import TrainingStopped
from jaxpara.report import screen

SMALL = {"model.layers": 2, "model.width": 32, "model.heads": 2, "model.kv_heads": 2, "model.head_dim": 16, "model.ffn": 64,
         "train.batch": 4, "train.seq": 32, "train.steps": 6, "optim.warmup": 0, "optim.lr": 1e-2}


@pytest.fixture
def text(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for n in range(8):
        (folder / f"{n}.txt").write_text("the quick brown fox jumps over the lazy dog. " * (4 + n))
    return folder


@pytest.fixture
def small(text):
    def load(**overrides):
        named = {name.replace("__", "."): value for name, value in overrides.items()}
        return jaxpara.load("gpt_single", {**SMALL, "data.path": str(text), **named})
    return load


def silent():
    return screen.console(io.StringIO())


def rows_of(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_files_lines_and_falling_loss(small, tmp_path):
    run, console = small(mesh__fsdp=2, mesh__tp=2, train__steps=12), silent()
    last = loop.train(run, tmp_path / "run", console)
    rows = rows_of(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(1, 13)) and rows[-1] == last
    for row in rows:
        assert {"step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "ms"} <= set(row)
        assert row["loss"] > 0 and row["grad_norm"] > 0 and 0 < row["tokens"] <= 4 * 32 and row["ms"] > 0
        assert row.get("compiled", False) == (row["step"] == 1)
    assert rows[0]["loss"] > 5 and rows[-1]["loss"] < rows[0]["loss"] - 1

    again = jaxpara.load(tmp_path / "run" / "config.json")
    assert replace(again, notes=()) == replace(run, notes=())

    printed = console.file.getvalue()
    assert printed.count("/12  loss ") == 12 and "\x1b" not in printed
    assert max(map(len, printed.splitlines())) <= 80 or str(tmp_path) in max(printed.splitlines(), key=len)
    for words in ("fsdp2·tp2", "attention", "model state per device", "over fsdp", "over tp", "compilation included", "12 of 12 steps"):
        assert words in printed, words


def test_the_saved_configuration_trains_the_same(small, tmp_path):
    loop.train(small(train__steps=3), tmp_path / "one", silent())
    loop.train(jaxpara.load(str(tmp_path / "one" / "config.json")), tmp_path / "two", silent())
    losses = [[row["loss"] for row in rows_of(tmp_path / name)] for name in ("one", "two")]
    assert losses[0] == losses[1]


def test_default_directory_is_new_each_time(small, tmp_path, monkeypatch):
    from jaxpara.rundir import make_directory
    monkeypatch.chdir(tmp_path)
    first, second = make_directory(small(), None), make_directory(small(), None)
    assert first != second and first.parent.name == "runs" and first.name.startswith("gpt_single-") and second.is_dir()


class Scripted:
    """A program, its batches and its metrics in one, which writes down what is asked of it, in order."""

    def __init__(self):
        self.log, self.asked = [], False

    def batch(self, step):
        return step

    def put(self, batch):
        self.log.append(f"put {batch}")
        return batch

    def step(self, state, batch):
        self.log.append(f"step {batch}")
        return state, self.Metrics(self.log, batch)

    class Metrics(dict):
        load = None

        def __init__(self, log, batch):
            self.log, self.number = log, batch

        def items(self):
            self.log.append(f"read {self.number}")
            return [("stopped", -1.0), ("loss", float(self.number))]


def test_metrics_are_read_while_the_next_step_runs():
    script = Scripted()
    done = [(step, metrics["loss"]) for step, metrics in loop.completed(script, script, None, 4, script)]
    assert done == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0)]
    assert script.log == ["put 0", "step 0", "put 1", "step 1", "put 2", "read 0", "step 2", "put 3", "read 1", "step 3", "read 2", "read 3"]


def test_one_step():
    script = Scripted()
    assert len(list(loop.completed(script, script, None, 1, script))) == 1
    assert script.log == ["put 0", "step 0", "read 0"]


def test_an_interrupt_reads_everything_that_was_dispatched():
    script, done = Scripted(), []
    for step, _ in loop.completed(script, script, None, 10, script):
        done.append(step)
        script.asked = step == 2
    assert done == [0, 1, 2, 3] and script.log[-1] == "read 3" and "step 4" not in script.log


def test_ctrl_c_ends_cleanly(small, tmp_path, monkeypatch):
    started = signal.signal(signal.SIGINT, signal.default_int_handler)      # a shell starts background jobs with it ignored
    before, show = signal.getsignal(signal.SIGINT), loop.Steps.show

    def show_and_interrupt(self, row, pace):
        show(self, row, pace)
        if row["step"] == 2:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(loop.Steps, "show", show_and_interrupt)
    console = silent()
    with pytest.raises(KeyboardInterrupt):
        loop.train(small(train__steps=50), tmp_path / "run", console)
    rows = rows_of(tmp_path / "run")
    assert 3 <= len(rows) <= 4 and f"{len(rows)} of 50 steps" in console.file.getvalue()
    assert signal.getsignal(signal.SIGINT) is before
    signal.signal(signal.SIGINT, started)


def test_the_first_lap_stays_out_of_the_mean(monkeypatch):
    times = iter([0.0, 10.0, 11.0, 13.0])
    monkeypatch.setattr(loop.time, "perf_counter", lambda: next(times))
    clock = loop.Clock()
    assert (clock.lap(), clock.pace) == (10.0, None)
    assert (clock.lap(), clock.pace) == (1.0, 1.0)
    assert (clock.lap(), clock.pace) == (2.0, 1.5)


def planted(run, text):
    """(parameters in which only the embedding of the byte 0xC3 is infinite, its first step from 0, and the row there)."""
    (text / "0.txt").write_text("the quick brown fox é jumps over the lazy dog. " * 3)
    program, loader = jaxpara.build(run), Loader(run)
    params = {name: np.array(value) for name, value in program.params(program.init()).items()}
    params["embedding.tokens"][0xC3, 5] = np.inf
    found = ((step, row) for step in range(run.train.steps) for row, tokens in enumerate(loader.batch(step)["tokens"]) if 0xC3 in tokens)
    return params, *next(found)


@pytest.mark.parametrize("mesh", [{}, {"mesh__fsdp": 2, "mesh__tp": 2}], ids=["one", "fsdp2tp2"])
def test_a_loss_that_is_not_finite_names_step_row_and_parameter(small, text, tmp_path, mesh):
    run = small(train__steps=40, train__seed=2, optim__name="sgd", optim__weight_decay=0.0, optim__schedule="constant", **mesh)
    params, step, row = planted(run, text)
    assert step > 0 and row > 0          # or the test would not see a wrong count
    with pytest.raises(TrainingStopped) as stopped:
        loop.train(run, tmp_path / "run", silent(), params)
    assert (stopped.value.step, stopped.value.row) == (step + 1, row)
    message = str(stopped.value)
    assert message.startswith(f"Training stopped at step {step + 1}: the loss is nan")
    assert Loader(run).where(step) in message and "Already not finite before the step: embedding.tokens" in message
    assert [line["step"] for line in rows_of(tmp_path / "run")] == list(range(1, step + 1))     # and NaN is no JSON


def test_a_learning_rate_far_too_large_stops_before_the_update(small, tmp_path):
    with pytest.raises(TrainingStopped) as stopped:
        loop.train(small(optim__lr=1e30, optim__clip=None, optim__name="sgd"), tmp_path / "run", silent())
    assert stopped.value.step == 2 and stopped.value.row == 0 and len(rows_of(tmp_path / "run")) == 1
    assert stopped.value.parameter == "embedding.tokens"
    assert "smaller optim.lr (now 1e+30)" in str(stopped.value) and "Nothing was updated" in str(stopped.value)


def test_only_the_gradient_overflows(small, tmp_path):
    run = small(precision__compute="float16", precision__loss_scale=1e9)
    with pytest.raises(TrainingStopped) as stopped:
        loop.train(run, tmp_path / "run", silent())
    message = str(stopped.value)
    assert stopped.value.step == 1 and "but its gradient is not finite" in message and "precision.loss_scale = 1e+09 may be too large" in message


def test_paths_in_the_order_of_the_forward_pass():
    names = ["norm.scale", "layers.0.mlp.up", "head.weight", "layers.10.norm1.scale", "layers.2.norm1.scale", "embedding.tokens"]
    assert loop.in_order(names) == ["embedding.tokens", "layers.0.mlp.up", "layers.2.norm1.scale", "layers.10.norm1.scale", "norm.scale", "head.weight"]
