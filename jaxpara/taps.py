"""Matmuls whose weight gradient may wait: the zero-bubble split of the backward pass (Qi et al. 2023, arXiv 2401.10241).

A tap is an extra input of a matmul that nothing reads. Its "gradient" is not a gradient but the pair (input, output gradient), from which the
weight gradient is one einsum, at any later time: what the papers call M_W. So B differentiates with respect to a chunk's input and its taps,
and W never touches the chain of layers again.
"""
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxpara.collectives import varying_axes, vary


@partial(jax.tree_util.register_dataclass, data_fields=["x", "out"], meta_fields=[])
@dataclass
class Tap:
    """Zeros shaped like a matmul's input and output; as a gradient, its input and output gradient. x: None where another tap has the same input."""
    x: Any
    out: Any


@dataclass(eq=False)
class Note:
    """What is told of each matmul while shapes are traced: {name: (einsum, x, out)}."""
    told: dict = field(default_factory=dict)

    def taps(self, names, counts):
        """{name: Tap} of zeros, counts[name] stacked; a tensor that several read (q, k and v) is kept by the first of them."""
        zeros = lambda count, like: vary(jnp.zeros((count, *like.shape), like.dtype), varying_axes(like))
        owners, made = self.owners(names), {}
        for name in names:
            _, x, out = self.told[name]
            made[name] = Tap(zeros(counts[name], x) if owners[name] == name else None, zeros(counts[name], out))
        return made

    def owners(self, names):
        """{name: the first name whose matmul has the same input}."""
        return {name: next(other for other in names if self.told[other][1] is self.told[name][1]) for name in names}


@partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=["name", "note"])
@dataclass
class Teller:
    """In place of a sink: tells `note` of its matmul."""
    name: str
    note: Note


@dataclass
class Tapped:
    """A weight usable in `matmul`, whose gradient does not come out of it."""
    value: Any
    sink: Tap | Teller


def matmul(spec, x, weight):
    """einsum(spec, x, weight) of an activation and an nnx parameter."""
    weight = weight.get_value()
    if not isinstance(weight, Tapped):
        return jnp.einsum(spec, x, weight)
    if isinstance(weight.sink, Tap):
        return _tapped(spec, x, weight.value, weight.sink)
    out = jnp.einsum(spec, x, weight.value)
    weight.sink.note.told[weight.sink.name] = spec, x, out
    return out


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tapped(spec, x, weight, tap):
    return jnp.einsum(spec, x, weight)


def _tapped_forward(spec, x, weight, tap):
    return jnp.einsum(spec, x, weight), (x, weight, tap.x is None)


def _tapped_backward(spec, residuals, cotangent):
    x, weight, shared = residuals
    dx, = jax.vjp(lambda x: jnp.einsum(spec, x, weight), x)[1](cotangent)
    return dx, None, Tap(None if shared else x, cotangent)


_tapped.defvjp(_tapped_forward, _tapped_backward)


def weight_gradient(spec, x, out):
    """The gradient of `weight` in einsum(spec, x, weight), from the pair that a tap gave."""
    inputs, result = spec.split("->")
    left, weight = inputs.split(",")
    return jnp.einsum(f"{left},{result}->{weight}", x, out)
