"""The batch that hides nothing, and the measure of a difference (what every equivalence test uses).

Different counts of valid tokens in every row, shard and micro-batch, one row without any, two packed documents with odd ids, no two
dims equal. A leaf's error is max|Δ| over max(max|reference|, 1e-3 · the largest leaf): some gradients are zero by mathematics.
"""
import numpy as np

from jaxpara.config import Run
from jaxpara.settings import configure

B, S, V = 24, 32, 37
SMALL = {"model.layers": 3, "model.width": 48, "model.heads": 8, "model.kv_heads": 4, "model.head_dim": 10, "model.ffn": 80,
         "model.vocab": V, "train.batch": B, "train.seq": S, "optim.clip": None}


def hard_batch(packed=True, seed=0):
    """dict of int [B, S] arrays; with packed, two documents per row, cut at another place in each."""
    rng = np.random.default_rng(seed)
    tokens, targets = rng.integers(0, V, (B, S)), rng.integers(0, V, (B, S))
    targets[rng.random((B, S)) < np.linspace(0.05, 0.7, B)[:, None]] = -1
    targets[1] = -1
    targets[:, -3:] = -1
    if not packed:
        return {"tokens": tokens, "targets": targets}
    place, cut = np.arange(S), rng.integers(3, S - 3, (B, 1))
    return {"tokens": tokens, "targets": targets, "segments": np.where(place < cut, 2 ** 31 - 1, -7),
            "positions": np.where(place < cut, place, place - cut)}


def awake(params, seed=1):
    """Starting parameters with no norm at 1 and no bias at 0, where faults in them would be invisible."""
    rng = np.random.default_rng(seed)
    asleep = lambda leaf: leaf.min() == leaf.max()
    return {path: leaf + rng.normal(0, 0.05, leaf.shape).astype(leaf.dtype) if asleep(leaf) else leaf for path, leaf in params.items()}


def make_run(overrides, dtype="float64", optimizer="adamw"):
    """A resolved run of the small model; `overrides` beat everything else."""
    rate = {"adamw": 0.01, "sgd": 1.0}[optimizer]
    decay = {"adamw": 0.1, "sgd": 0.0}[optimizer]
    return configure(Run(), {**SMALL, "precision.compute": dtype, "precision.params": dtype, "optim.name": optimizer, "optim.lr": rate,
                             "optim.weight_decay": decay, **overrides})


def error(leaves, reference):
    """(largest leaf error, its path) between two {path: array}."""
    assert leaves.keys() == reference.keys()
    largest = max(np.abs(leaf).max() for leaf in reference.values())
    errors = {path: np.abs(leaves[path] - leaf).max() / max(np.abs(leaf).max(), 1e-3 * largest) for path, leaf in reference.items()}
    assert all(np.isfinite(value) for value in errors.values()), errors
    worst = max(errors, key=errors.get)
    return errors[worst], worst
