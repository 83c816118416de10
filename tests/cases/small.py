"""A small model for the cases: no two dims equal, odd documents, masked targets; programs and the one-device answer built once."""
from functools import lru_cache

import jax
import numpy as np
from jax.sharding import Mesh

import jaxpara
from jaxpara import Model, Optim, Run, Train
from jaxpara.params import parameters, unstack
from jaxpara.settings import configure

ROWS, SEQ, VOCAB = 4, 16, 34


def run(**overrides):
    """A resolved `Run`; overrides: dotted names with __ for the dot, mesh__tp=2."""
    base = Run(model=Model(style="llama", layers=3, width=20, heads=8, kv_heads=2, head_dim=6, ffn=40, vocab=VOCAB),
               optim=Optim(name="sgd", lr=0.1, clip=0.5), train=Train(batch=ROWS, seq=SEQ, steps=9))
    return configure(base, {name.replace("__", "."): value for name, value in overrides.items()})


@lru_cache(maxsize=None)
def program(**overrides):
    return jaxpara.build(run(**overrides))


def weights(model, spread=0.3, seed=0):
    """{dotted path: array} of parameters large enough to matter, biases and scales included; spread 0: scales 1, the rest 0."""
    generator, values = np.random.default_rng(seed), {}
    for parameter in parameters(model):
        paths = [unstack(parameter.name, i) for i in range(model.layers)] if parameter.stacked else [parameter.name]
        shape = parameter.shape[parameter.stacked:]
        for path in paths:
            values[path] = ((parameter.init == "ones") + generator.standard_normal(shape) * spread).astype(np.float32)
    return values


def start(made):
    """The state of a program at `weights`."""
    return made.init(weights(made.run.model))


def batch(rows=ROWS, seq=SEQ, vocab=VOCAB, seed=0):
    """Rows with different numbers of counted targets, one of them none; documents that start anywhere, positions that restart."""
    generator = np.random.default_rng(seed)
    tokens, targets = generator.integers(0, vocab, (2, rows, seq))
    positions, segments = np.empty((2, rows, seq), int)
    for row in range(rows):
        cut = 3 + 2 * row % (seq - 4)
        positions[row] = np.concatenate([np.arange(cut), np.arange(seq - cut)])
        segments[row] = np.where(np.arange(seq) < cut, -5, 9 + row)
        targets[row, :row] = -1
    targets[1] = -1
    return {"tokens": tokens, "targets": targets, "positions": positions, "segments": segments}


@lru_cache(maxsize=None)
def answer(**overrides):
    """(loss, {path: gradient}) of a small program at `weights` on `batch`."""
    made = program(**overrides)
    return made.loss_and_grads(start(made), batch())


def leaf_errors(got, wanted):
    """Largest difference of each leaf over max(its largest element, a thousandth of the largest leaf's)."""
    assert got.keys() == wanted.keys()
    largest = max(np.abs(leaf).max() for leaf in wanted.values())
    return {name: float(np.abs(got[name] - leaf).max() / max(np.abs(leaf).max(), 1e-3 * largest)) for name, leaf in wanted.items()}


def assert_same_answer(got, wanted, tolerance=1e-5):
    """Loss and every gradient leaf."""
    assert abs(got[0] - wanted[0]) <= tolerance * abs(wanted[0]), (got[0], wanted[0])
    errors = leaf_errors(got[1], wanted[1])
    assert max(errors.values()) <= tolerance, sorted(errors.items(), key=lambda item: -item[1])[:5]


def mesh(**sizes):
    """A jax mesh of these axes only."""
    devices = np.array(jax.devices()[:int(np.prod(list(sizes.values())))])
    return Mesh(devices.reshape(tuple(sizes.values())), tuple(sizes))


def pieces(array):
    """The array's shards, by device in mesh order, as numpy."""
    shards = {shard.device: np.asarray(shard.data) for shard in array.addressable_shards}
    return [shards[device] for device in array.sharding.mesh.devices.flat]


def zeros(model):
    """{dotted path: zeros} of a model, to fill by hand."""
    return {path: np.zeros_like(value) for path, value in weights(model).items()}


def text(made):
    """Compiled HLO of a program's train step."""
    return made.lower().compile().as_text()


def total_bytes(tree):
    """Bytes of a pytree on the first device of each array."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))
