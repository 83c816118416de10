"""Matmuls in which each row meets the weight of its own expert: rows sorted by expert, no E × rows tensor.

On TPU `jax.lax.ragged_dot`. Elsewhere that expands to E × rows × width, so there each expert's rows begin at a multiple of a block and a loop
takes block after block, as many as there are rows in use: the cost follows the tokens, not E and not the buffer.
"""
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpara.collectives import match
from jaxpara.kernels import local
from jaxpara.kernels.dispatch import starts

class Groups(NamedTuple):
    """How a buffer is divided among experts."""
    sizes: jax.Array        # int32 [E]
    block: int              # static

    def blocks(self, rows):
        """(int32 [blocks] expert of each block, int32 [] blocks in use)."""
        start = starts(self.sizes, self.block) // self.block
        owner = jnp.searchsorted(start[1:], jnp.arange(rows // self.block), side="right", method="compare_all")
        return jnp.minimum(owner, self.sizes.shape[0] - 1).astype(jnp.int32), start[-1]


def grouped(x, weight, groups):
    """x: [rows, A], weight: [E, A, B] -> [rows, B]. Rows of no expert give zeros."""
    if groups.block == 1:
        return lax.ragged_dot(x, weight, groups.sizes)
    return _grouped(x, weight, groups.sizes, groups.block)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _grouped(x, weight, sizes, block):
    return _each_block(x, weight, Groups(sizes, block), "ra,ab->rb")


def _forward(x, weight, sizes, block):
    return _grouped(x, weight, sizes, block), (x, weight, sizes)


def _backward(block, residuals, cotangent):
    x, weight, sizes = residuals
    groups = Groups(sizes, block)
    return _each_block(cotangent, weight, groups, "rb,ab->ra"), _weight_gradient(x, cotangent, groups).astype(weight.dtype), None


_grouped.defvjp(_forward, _backward)


def _each_block(x, weight, groups, spec):
    owner, used = groups.blocks(x.shape[0])
    width = weight.shape[2 if spec.endswith("b") else 1]

    def one(i, out):
        rows = lax.dynamic_slice_in_dim(x, i * groups.block, groups.block)
        matrix = lax.dynamic_index_in_dim(weight, owner[i], keepdims=False)
        return lax.dynamic_update_slice_in_dim(out, jnp.einsum(spec, rows, matrix), i * groups.block, 0)

    return lax.fori_loop(0, used, one, match(jnp.zeros((x.shape[0], width), x.dtype), x, weight, used))


def _weight_gradient(x, cotangent, groups):
    """[E, A, B] in float32 or wider: what each expert's rows give."""
    owner, used = groups.blocks(x.shape[0])
    wide = local.wide(x.dtype)

    def one(i, total):
        cut = lambda array: lax.dynamic_slice_in_dim(array, i * groups.block, groups.block)
        gradient = jnp.einsum("ra,rb->ab", cut(x), cut(cotangent), preferred_element_type=wide)
        held = lax.dynamic_index_in_dim(total, owner[i], keepdims=False)
        return lax.dynamic_update_index_in_dim(total, held + gradient, owner[i], 0)

    shape = groups.sizes.shape[0], x.shape[1], cotangent.shape[1]
    return lax.fori_loop(0, used, one, match(jnp.zeros(shape, wide), x, cotangent, used))


def reference(x, weight, sizes):
    """The slow way, for rows without alignment: every row with its own expert's matrix."""
    expert = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(x.shape[0]), side="right")
    each = jnp.einsum("ra,rab->rb", x, weight[jnp.minimum(expert, len(sizes) - 1)])
    return jnp.where((expert < len(sizes))[:, None], each, 0)
