"""The run directory: where config.json and metrics.jsonl of a run go. No JAX."""
import os
from datetime import datetime
from pathlib import Path

from jaxpara.errors import ConfigError


def occupied(run_dir):
    """Yield why `run_dir` cannot be used: a run's metrics are never overwritten."""
    if run_dir is None:
        return
    path = Path(run_dir)
    there = next(place for place in (path, *path.absolute().parents) if place.exists())
    if (path / "metrics.jsonl").exists():
        yield f"--run-dir {path} already holds the metrics of a run. Name a new directory, or leave it out for one under runs/."
    elif not there.is_dir():
        yield f"--run-dir {path} is no place for a directory: {there} is a file. Name another, or leave it out for one under runs/."
    elif not os.access(there, os.W_OK):
        yield f"--run-dir {path} cannot be made: {there} cannot be written to. Name another, or leave it out for one under runs/."


def make_directory(run, run_dir):
    """The run directory, made: `run_dir`, or a new one under runs/ named after the recipe and the time."""
    name = Path("runs", f"{run.name}-{datetime.now():%Y%m%d-%H%M%S}")
    tries = [Path(run_dir)] if run_dir is not None else [name, *(Path(f"{name}-{n}") for n in range(2, 100))]
    for path in tries:
        try:
            path.mkdir(parents=True, exist_ok=run_dir is not None)
            return path
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"The run directory {path} cannot be made: {error.strerror}. Give --run-dir a place that can be written.") from None
    raise ConfigError(f"The run directory {name} and 98 numbered ones beside it exist. Give --run-dir a name.")
