"""The train loop: batches in, metrics out, a run directory behind it.

The devices never wait for Python: step n is dispatched and batch n+1 placed before the metrics of step n-1 are read.
"""
import json
import os
import signal
import threading
import time

import jax
import numpy as np

from jaxpara import checks
from jaxpara.data import Loader
from jaxpara.errors import ConfigError, TrainingStopped
from jaxpara.params import layers_of
from jaxpara.report import screen
from jaxpara.report.load import LoadMap
from jaxpara.report.progress import Steps
from jaxpara.rundir import make_directory, occupied
from jaxpara.settings import dumps
from jaxpara.state import to_single_device
from jaxpara.step import build


def train(run, run_dir=None, console=None, params=None):
    """Train a `Run` (from `jaxpara.load`) on its own text and return the last step's row of metrics.jsonl.

    run_dir: where config.json and metrics.jsonl go; None: runs/<recipe>-<time>. console: a rich console to report to. params:
    {dotted path: array} to start from, as `Program.init` takes them.
    Raises ConfigError before anything is compiled; TrainingStopped at a loss or gradient that is not finite; KeyboardInterrupt
    after the step during which one was asked for, with everything written.
    """
    errors = [*checks.check_data(run), *occupied(run_dir)]
    if errors:
        raise ConfigError(*errors)
    loader, program = Loader(run), build(run)
    run, console = program.run, console or screen.console()
    directory = make_directory(run, run_dir)
    (directory / "config.json").write_text(dumps(run), encoding="utf-8")
    screen.before(run, console, facts(program, loader, directory))
    with (open(directory / "metrics.jsonl", "w", encoding="utf-8") as sink, Interrupt() as interrupt, Steps(console, run.train.steps) as steps):
        state, clock, first, loads = program.init(params), Clock(), None, LoadMap(layers_of(run.model, "moe"))
        for step, metrics in completed(program, loader, state, run.train.steps, interrupt):
            row = row_of(step, metrics, clock)
            if loads.layers:
                loads.add(metrics.load)
            first = first or row
            sink.write(json.dumps(row) + "\n")
            sink.flush()
            steps.show(row, clock.pace)
    rate = row["tokens"] / clock.pace if clock.pace else None
    written = loads.write(directory)
    screen.after(run, console, screen.Summary(row["step"], first["loss"], row["loss"], clock.last - clock.start, rate, directory, written))
    if interrupt.asked:
        raise KeyboardInterrupt
    return row


def completed(program, loader, state, steps, interrupt):
    """Yield (step from 0, metrics) of each step once it is done, while the next one runs. Ends after the step that runs when
    `interrupt.asked` turns true. Raises TrainingStopped at a step whose loss or gradient is not finite."""
    waiting, batch = None, program.put(loader.batch(0))
    for step in range(steps):
        state, metrics = program.step(state, batch)
        if step + 1 < steps:
            batch = program.put(loader.batch(step + 1))
        if waiting:
            yield finished(program, loader, state, *waiting)
        waiting = step, metrics
        if interrupt.asked:
            break
    yield finished(program, loader, state, *waiting)


def finished(program, loader, state, step, metrics):
    """(step, metrics), read from the devices; TrainingStopped if the step stopped the run. state: any later one, since none updated it."""
    read = Read(metrics.items(), metrics.load)
    if read["stopped"] >= 0:
        raise diagnose(program, loader, state, step)
    return step, read


class Read(dict):
    """A step's metrics, read. load: of `step.Metrics`."""

    def __init__(self, items, load):
        super().__init__(items)
        self.load = load


def row_of(step, metrics, clock):
    """A step's line of metrics.jsonl: step from 1; tokens: targets counted; ms: from the end of the step before it to its own end.
    The first one has `compiled`: its time is that of compilation too."""
    seconds = clock.lap()
    row = {"step": step + 1, "loss": metrics["loss"], "grad_norm": metrics["grad_norm"], "lr": metrics["lr"], "tokens": int(metrics["tokens"]),
           "tokens_per_s": round(metrics["tokens"] / seconds, 1), "ms": round(1000 * seconds, 1),
           **{name: value for name, value in metrics.items() if name.startswith("moe/")}}
    return row | {"compiled": True} if clock.laps == 1 else row


class Clock:
    """Times from the end of one step to the end of the next; the first lap, in which the program is compiled, is kept out of the mean."""

    def __init__(self):
        self.start = self.last = self.compiled = time.perf_counter()
        self.laps = 0

    def lap(self):
        """End a lap; its seconds."""
        before, self.last = self.last, time.perf_counter()
        self.laps += 1
        if self.laps == 1:
            self.compiled = self.last
        return self.last - before

    @property
    def pace(self):
        """Mean seconds per lap, None before the second."""
        return (self.last - self.compiled) / (self.laps - 1) if self.laps > 1 else None


class Interrupt:
    """Context manager: the first Ctrl-C sets `asked` and lets the step finish, a second one stops at once."""
    asked = False

    def __enter__(self):
        # A process started in the background ignores Ctrl-C, and someone else's handler is someone else's business.
        self.ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self.ours:
            signal.signal(signal.SIGINT, self.ask)
        return self

    def __exit__(self, *_):
        if self.ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def ask(self, *_):
        self.asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.write(2, b"\nFinishing the step that runs. Ctrl-C again stops at once.\n")     # print() is not safe in a handler


def facts(program, loader, directory):
    """What the screen before step 1 says besides the configuration."""
    device = program.mesh.devices.flat[0]
    kind = "fake CPU devices of this process" if device.platform == "cpu" and program.run.mesh.size > 1 else f"{device.device_kind}"
    return [("devices", f"{program.run.mesh.size} of {jax.device_count()} {device.platform} ({kind})"),
            ("data", f"{loader.source}, {loader.tokens:,} tokens"), ("run", str(directory))]


def diagnose(program, loader, state, step):
    """The TrainingStopped that says what went wrong in `step` (from 0): the gradients of its batch, computed again on the state, which
    has not changed since."""
    batch = loader.batch(step)
    loss, grads = program.loss_and_grads(state, batch)
    held = to_single_device(state.params, program.placements)
    broken = in_order(name for name, value in held.items() if not np.isfinite(value).all())
    bad = in_order(name for name, gradient in grads.items() if not np.isfinite(gradient).all())
    loss_bad = not np.isfinite(loss)
    row = first_bad_row(program, state, batch, loss_bad)
    what = f"the loss is {loss}" if loss_bad else f"the loss is {loss:.4f}, but its gradient is not finite"
    lines = [f"Training stopped at step {step + 1}: {what}. Nothing was updated by this step.",
             f"Batch: {loader.where(step)}; row {row} of the batch (counted from 0) is the first at fault."]
    if bad:
        lines.append(f"First parameter with a gradient that is not finite: {bad[0]} ({len(bad)} of {len(grads)} have one).")
    if broken:
        lines.append(f"Already not finite before the step: {broken[0]} ({len(broken)} of {len(held)} parameters).")
    elif program.run.precision.loss_scale and not loss_bad:
        lines.append(f"precision.loss_scale = {program.run.precision.loss_scale:g} may be too large for float16.")
    elif step:
        lines.append(f"The steps before it were finite; a smaller optim.lr (now {program.run.optim.lr:g}) or a longer optim.warmup may help.")
    return TrainingStopped("\n".join(lines), step + 1, row, (bad or broken or [None])[0])


def in_order(names):
    """Dotted paths in the order of the forward pass: all of layer 0 before any of layer 1."""
    rank = {"embedding": (0, 0), "norm": (2, 0), "head": (3, 0)}
    return sorted(names, key=lambda name: (1, int(name.split(".")[1])) if name.startswith("layers.") else rank[name.split(".")[0]])


def first_bad_row(program, state, batch, loss_bad):
    """The row with which the batch's loss (or, where that is finite, its gradient) first stops being finite. Halving, with the other rows'
    targets not counted: log2 B runs of a program that is compiled already."""
    def fails(rows):
        counted = np.arange(len(batch["targets"]))[:, None] < rows
        loss, grads = program.loss_and_grads(state, {**batch, "targets": np.where(counted, batch["targets"], -1)})
        return not np.isfinite(loss) if loss_bad else not all(np.isfinite(gradient).all() for gradient in grads.values())

    good, bad = 0, len(batch["targets"])
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (good, middle) if fails(middle) else (middle, bad)
    return bad - 1
