"""What the kernel tests and the cases share: inputs, the reference in natural order, a kernel on its own small mesh."""
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P

from jaxpara import Run
from jaxpara.batch import slots
from jaxpara.context import attention_kernel, differentiable
from jaxpara.order import inverse
from jaxpara.kernels.local import attention_reference
from jaxpara.settings import configure

TOLERANCE = {"float64": 1e-12, "float32": 1e-5}


class Inputs(NamedTuple):
    """q [B, S, N_q, d], k, v [B, S, N_kv, d], positions, segments [B, S], cotangent of the output; numpy, natural order."""
    query: Any
    key: Any
    value: Any
    positions: Any
    segments: Any
    cotangent: Any

    def cast(self, dtype):
        numbers = {name: getattr(self, name).astype(dtype) for name in ("query", "key", "value", "cotangent")}
        return self._replace(**numbers)


def run_of(seq, heads, kv_heads, head_dim, window=None, **parallel):
    """A `Run` whose attention has these dims; parallel: sp, sp_kind, sp_order, sp_ulysses."""
    overrides = {"mesh.sp": parallel.pop("sp", 1)} | {f"parallel.{name}": value for name, value in parallel.items()}
    run = Run().change(model=dict(heads=heads, kv_heads=kv_heads, head_dim=head_dim, width=30, window=window), train=dict(seq=seq))
    return configure(run, overrides)


def packed(rows, seq, seed=0):
    """Two kinds of row: three documents with strange ids, one of which comes twice, and a single document. Positions start again in each."""
    generator = np.random.default_rng(seed)
    positions, segments = np.empty((rows, seq), np.int32), np.empty((rows, seq), np.int32)
    for row in range(rows):
        cuts = np.sort(generator.choice(np.arange(1, seq), size=2, replace=False)) if row % 2 == 0 else []
        starts = np.concatenate([[0], cuts]).astype(int)
        document = np.searchsorted(starts, np.arange(seq), side="right") - 1
        positions[row] = np.arange(seq) - starts[document]
        segments[row] = np.array([-7, 2**31 - 1, -2**31])[document]
    return positions, segments


@lru_cache
def inputs(rows, seq, heads, kv_heads, head_dim, documents=True):
    generator = np.random.default_rng(seq + heads)
    draw = lambda n: generator.standard_normal((rows, seq, n, head_dim))
    positions, segments = packed(rows, seq)
    if not documents:
        positions, segments = np.broadcast_to(np.arange(seq, dtype=np.int32), (rows, seq)), np.zeros((rows, seq), np.int32)
    return Inputs(draw(heads), draw(kv_heads), draw(kv_heads), positions, segments, draw(heads))


@partial(jax.jit, static_argnames="window")
def _reference(given, window):
    at = (given.positions, given.segments)
    out, pullback = jax.vjp(lambda q, k, v: attention_reference(q, k, v, at, at, window), given.query, given.key, given.value)
    return (out, *pullback(given.cotangent))


def reference(given, window=None):
    """(out, dq, dk, dv) of the slow reference, numpy."""
    with jax.enable_x64(True):
        return [np.asarray(x) for x in _reference(given, window)]


def kernel_results(run, given, check_vma=True, order=None, positions_in_order=False):
    """(out, dq, dk, dv) of the run's kernel on a mesh of sp devices, natural order, numpy.

    order: of the slots, instead of the run's. positions_in_order: the fault of not permuting positions and segments with the rest.
    """
    order = slots(run, given.query.shape[1]) if order is None else order
    moved = Inputs(*(x[:, order] for x in given))
    if positions_in_order:
        moved = moved._replace(positions=given.positions, segments=given.segments)
    mesh, split = Mesh(np.array(jax.devices()[:run.mesh.sp]), ("sp",)), P(None, "sp")

    def on_device(moved):
        attend = differentiable(*attention_kernel(run))
        out, pullback = jax.vjp(lambda q, k, v: attend(q, k, v, moved.positions, moved.segments), moved.query, moved.key, moved.value)
        return (out, *pullback(moved.cotangent))

    specs = Inputs(split, split, split, P(), P(), split)
    with jax.enable_x64(True):
        program = jax.shard_map(on_device, mesh=mesh, in_specs=(specs,), out_specs=(split,) * 4, check_vma=check_vma)
        return [np.asarray(x)[:, inverse(order)] for x in compiled(program, moved)(moved)]


EXECUTABLES = {}


def compiled(function, *arguments):
    """`function` compiled for these arguments, quickly rather than well; once for all functions that lower to the same text."""
    lowered = jax.jit(function).lower(*arguments)
    text = lowered.as_text()
    if text not in EXECUTABLES:
        EXECUTABLES[text] = lowered.compile({"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True})
    return EXECUTABLES[text]


def worst(got, wanted):
    """Largest difference of each array, as a part of the largest element wanted."""
    return [float(np.max(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64))) / np.max(np.abs(np.asarray(b, np.float64))))
            for a, b in zip(got, wanted)]


def assert_equal(got, wanted, dtype):
    errors = dict(zip(("out", "dq", "dk", "dv"), worst(got, wanted)))
    assert max(errors.values()) < TOLERANCE[dtype], errors
    assert {x.dtype.name for x in got} == {dtype}
