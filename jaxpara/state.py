"""The training state: its values at the start, where each array lies, and the single-device view of it."""
import zlib
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpara.errors import ConfigError
from jaxpara.mesh import sharding
from jaxpara.params import unstack


@partial(jax.tree_util.register_dataclass, data_fields=["step", "params", "master", "optimizer", "stopped", "bias"], meta_fields=[])
@dataclass
class State:
    step: jax.Array             # int32 []: updates done
    params: dict[str, Any]      # {name: stored array}, layers stacked, vocabulary padded
    master: dict[str, Any] | None   # the optimizer's own copy, when params are 16-bit
    optimizer: Any              # optax state, over the master copy if there is one
    stopped: jax.Array          # int32 []: the step whose loss or gradient was not finite; -1 while all is well. No update follows it
    bias: jax.Array | None = None   # float32 [L, E]: the routers' selection bias, moved by measured load; None without moe.bias_rate


def check_random():
    """Refuse settings under which random values would depend on the mesh."""
    wrong = []
    if not jax.config.jax_threefry_partitionable:
        wrong.append("jax_threefry_partitionable = False makes random values depend on the mesh. Set it to True (JAX's default).")
    if str(jax.config.jax_default_prng_impl) != "threefry2x32":
        wrong.append(f"jax_default_prng_impl = {jax.config.jax_default_prng_impl} gives other values on other meshes and when a layer is "
                     "recomputed. Legal: threefry2x32.")
    if wrong:
        raise ConfigError(*wrong)


def initial_value(placement, seed, dtype):
    """The stored array of one parameter: the same bits on every mesh. Drawn in float32, one key per parameter and layer; padding is 0."""
    parameter = placement.parameter
    shape = (*placement.shape[:parameter.stacked], *parameter.shape[parameter.stacked:])
    if parameter.init != "normal":
        value = jnp.full(shape, {"zeros": 0, "ones": 1}[parameter.init], dtype)
    else:
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), np.uint32(zlib.crc32(parameter.name.encode())))
        draw = lambda key, shape: jax.random.normal(key, shape, jnp.float32) * parameter.std
        if parameter.stacked:
            layers = jnp.asarray(placement.stack.rows)
            keys = jax.vmap(lambda layer: jax.random.fold_in(key, layer))(jnp.maximum(layers, 0))
            value = jax.vmap(lambda key: draw(key, shape[1:]))(keys).astype(dtype)
        else:
            value = draw(key, shape).astype(dtype)
    if parameter.stacked and placement.stack.padded:
        value = jnp.where(jnp.asarray(placement.stack.rows).reshape(-1, *[1] * (value.ndim - 1)) >= 0, value, 0)
    return jnp.pad(value, [(0, stored - size) for stored, size in zip(placement.shape, shape)])


def optimizer_shardings(transformation, master, placements, mesh):
    """Shardings of the optax state: a tensor shaped like a parameter lies where that parameter's optimizer spec says, the rest everywhere."""
    abstract = jax.eval_shape(transformation.init, master)

    def place(path, leaf):
        name = next((key.key for key in reversed(path) if getattr(key, "key", None) in placements), None)
        like = name is not None and leaf.shape == placements[name].shape
        return sharding(mesh, placements[name].optimizer if like else ())

    return jax.tree_util.tree_map_with_path(place, abstract)


def state_shardings(run, placements, mesh, transformation):
    """A `State` of NamedShardings."""
    stored = {name: sharding(mesh, placement.storage) for name, placement in placements.items()}
    kept = {name: sharding(mesh, placement.optimizer) for name, placement in placements.items()}
    abstract = {name: jax.ShapeDtypeStruct(p.shape, run.precision.optimizer) for name, p in placements.items()}
    scalar = sharding(mesh, ())
    return State(scalar, stored, kept if run.precision.master else None,
                 optimizer_shardings(transformation, abstract, placements, mesh), scalar, scalar if biased(run) else None)


def initial_state(run, placements, transformation, params=None):
    """The state before step 1, from stored `params` or drawn from the seed. To be run under jit with `state_shardings`."""
    if params is None:
        # a 16-bit weight is the rounded master, not the other way round
        params = {name: initial_value(p, run.train.seed, run.precision.optimizer) for name, p in placements.items()}
    master = {name: value.astype(run.precision.optimizer) for name, value in params.items()}
    stored = {name: value.astype(run.precision.stored(placements[name].parameter)) for name, value in params.items()}
    bias = jnp.zeros((run.model.layers, run.model.moe.experts), jnp.float32) if biased(run) else None
    return State(jnp.int32(0), stored, master if run.precision.master else None, transformation.init(master), jnp.int32(-1), bias)


def biased(run):
    """Whether routers have a selection bias."""
    return bool(run.model.moe.experts and run.model.moe.bias_rate)


def to_single_device(arrays, placements):
    """{stored name: array} -> {dotted path: np.ndarray}: one entry per layer, no padding, as on one device."""
    single = {}
    for name, placement in placements.items():
        stacked = placement.parameter.stacked
        unpadded = tuple(slice(size) for size in placement.parameter.shape[stacked:])
        if stacked:
            whole = np.asarray(arrays[name])
            single.update({unstack(name, placement.stack.rows[row]): whole[row][unpadded] for row in placement.stack.row_of})
        else:
            single[name] = np.asarray(arrays[name])[unpadded]
    return single


def from_single_device(single, placements):
    """The inverse of `to_single_device`; raises ConfigError listing missing and extra paths and wrong shapes."""
    arrays, wrong, expected = {}, [], set()
    for name, placement in placements.items():
        shape = placement.parameter.shape
        stacked = placement.parameter.stacked
        layers = placement.parameter.of
        paths = [unstack(name, layer) for layer in layers] if stacked else [name]
        expected.update(paths)
        for path in paths:
            if path not in single:
                wrong.append(f"Missing parameter {path} of shape {shape[stacked:]}.")
            elif np.shape(single[path]) != shape[stacked:]:
                wrong.append(f"Parameter {path} has shape {np.shape(single[path])}; the model needs {shape[stacked:]}.")
        if not wrong:
            pieces = [np.asarray(single[path]) for path in paths]
            fill = lambda piece: np.pad(piece, [(0, stored - size) for stored, size in zip(placement.shape[stacked:], shape[stacked:])])
            of = lambda layer: fill(pieces[layers.index(layer)] if layer >= 0 else np.zeros_like(pieces[0]))
            rows = [of(layer) for layer in placement.stack.rows] if stacked else None
            arrays[name] = np.stack(rows) if stacked else fill(pieces[0])
    wrong += [f"Extra parameter {path}: the model has none of that name." for path in single if path not in expected]
    if wrong:
        raise ConfigError(*wrong[:10], *[f"… and {len(wrong) - 10} more."] * (len(wrong) > 10))
    return arrays
