"""A global batch of numpy arrays -> what the compiled step takes: checked, cut into micro-batches, permuted, placed."""
import jax
import numpy as np

from jaxpara.errors import ConfigError
from jaxpara.mesh import partition
from jaxpara.order import slots
from jaxpara.rules import activation_rules, live


def specs(run):
    """PartitionSpec of each array. Positions and documents are those of whole rows: every sp rank needs its neighbours' too."""
    rules = activation_rules(run)
    spec = lambda *labels: partition(live(rules.spec(labels), run.mesh))
    split, whole = spec("microbatch", "batch", "sequence"), spec("microbatch", "batch", "row")
    return {"tokens": split, "targets": split, "positions": whole, "segments": whole, "number": spec("microbatch", "batch")}


def check_batch(batch, run, fixed=True):
    """Raise ConfigError for missing or unknown arrays, wrong shapes or ids out of range. fixed: the shape must be the run's [B, S]."""
    wrong = [f"The batch has no array {name!r}." for name in ("tokens", "targets") if name not in batch]
    known = ("tokens", "targets", "positions", "segments")
    wrong += [f"The batch has an unknown array {name!r}. Known: {', '.join(known)}." for name in batch if name not in known]
    if wrong:
        raise ConfigError(*wrong)
    shape = (run.train.batch, run.train.seq) if fixed else np.shape(batch["tokens"])
    for name, array in batch.items():
        if np.shape(array) != shape:
            wrong.append(f"batch[{name!r}] has shape {np.shape(array)}; this program is compiled for train.batch × train.seq = {shape}.")
        elif not np.issubdtype(np.asarray(array).dtype, np.integer):
            wrong.append(f"batch[{name!r}] has dtype {np.asarray(array).dtype}; it needs integers.")
    wrong = wrong or [text for name, low, high in _ranges(run) if name in batch for text in _out_of_range(name, batch[name], low, high)]
    if wrong:
        raise ConfigError(*wrong)


def _ranges(run):
    yield "tokens", 0, run.model.vocab
    yield "targets", -1, run.model.vocab
    if run.model.style == "gpt2":
        yield "positions", 0, run.model.max_positions


def _out_of_range(name, array, low, high):
    array = np.asarray(array)
    if array.min() < low or array.max() >= high:
        bad = (array < low) | (array >= high)
        row, column = np.argwhere(bad)[0]
        note = " (-1 marks a target that is not counted; nothing else is negative)" if low == -1 else ""
        yield (f"batch[{name!r}] has {bad.sum()} values outside {low} … {high - 1}{note}; the first is {array[row, column]} "
               f"at row {row}, column {column}.")


def place_batch(batch, run, mesh, fixed=True):
    """dict of [B, S] arrays in natural order -> dict of device arrays [m, B/m, S] in slot order, and `number` [m, B/m].

    Positions default to 0, 1, … along the row, segments (document ids, any integers) to one document per row. Micro-batch j is rows
    [jB/m, (j+1)B/m).
    """
    check_batch(batch, run, fixed)
    rows, seq = np.shape(batch["tokens"])
    m = run.train.microbatches if fixed else 1
    permutation = slots(run, seq)
    arrays = {"positions": np.broadcast_to(np.arange(seq), (rows, seq)), "segments": np.zeros((rows, seq)), **batch}
    placed = {name: np.asarray(array)[:, permutation].astype(np.int32).reshape(m, rows // m, seq) for name, array in arrays.items()}
    placed["number"] = np.arange(rows, dtype=np.int32).reshape(m, rows // m)
    return jax.device_put(placed, {name: jax.NamedSharding(mesh, spec) for name, spec in specs(run).items()})
