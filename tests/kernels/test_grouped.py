"""Matmuls of rows with their own experts' weights: against every row alone, and what they cost."""
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxpara.experts import LARGEST_BLOCK, SMALLEST_BLOCK, block_rows, buffer_rows
from jaxpara.kernels.grouped import Groups, grouped, reference

SIZES = {"uneven": (5, 0, 9, 2), "all to one": (0, 0, 16, 0), "none": (0, 0, 0, 0), "full blocks": (8, 16, 8, 8), "last empty": (3, 4, 1, 0),
         "single rows": (1, 1, 1, 1)}
E, ROWS, A, B = 4, 64, 6, 10


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


def problem(sizes, block):
    """x [ROWS, A], zeros in rows of no expert, as `spread` gives; weight [E, A, B]; a cotangent; each row's expert, -1: none."""
    rng, begin, owner = np.random.default_rng(3), 0, np.full(ROWS, -1)
    for expert, size in enumerate(sizes):
        owner[begin:begin + size] = expert
        begin += -(-size // block) * block
    x, down = rng.standard_normal((ROWS, A)), rng.standard_normal((ROWS, B))
    x[owner < 0] = down[owner < 0] = 0
    return x, rng.standard_normal((E, A, B)), down, owner, np.asarray(sizes, np.int32)


@partial(jax.jit, static_argnums=4)
def pulled(x, weight, down, sizes, block):
    """(value, (gradient of x, of weight))."""
    out, back = jax.vjp(lambda x, weight: grouped(x, weight, Groups(sizes, block)), x, weight)
    return out, back(down)


def dense(x, weight, down, owner):
    """The same with every row by itself, in numpy."""
    out, dx, dweight = np.zeros((ROWS, B)), np.zeros((ROWS, A)), np.zeros((E, A, B))
    for row in np.flatnonzero(owner >= 0):
        out[row], dx[row] = x[row] @ weight[owner[row]], weight[owner[row]] @ down[row]
        dweight[owner[row]] += np.outer(x[row], down[row])
    return out, (dx, dweight)


def alike(found, wanted, tolerance=1e-12):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a, float), b, rtol=tolerance, atol=tolerance), found, wanted)


@pytest.mark.parametrize("block", [1, 2, 8])
@pytest.mark.parametrize("name", SIZES)
def test_values_and_gradients(name, block):
    x, weight, down, owner, sizes = problem(SIZES[name], block)
    alike(pulled(x, weight, down, sizes, block), dense(x, weight, down, owner))


@pytest.mark.parametrize("name", SIZES)
def test_the_reference_of_unaligned_rows(name):
    x, weight, down, owner, sizes = problem(SIZES[name], 1)
    alike(reference(x, jnp.asarray(weight), jnp.asarray(sizes)), dense(x, weight, down, owner)[0])


@pytest.mark.parametrize("block", [2, 8])
def test_rows_of_no_expert(block):
    """Blocks behind the last expert's are not looked at, whatever stands in them: zeros come out, and no gradient goes in."""
    x, weight, down, owner, sizes = problem(SIZES["uneven"], block)
    used = sum(-(-size // block) * block for size in sizes)
    x[used:] = down[used:] = np.nan
    out, (dx, dweight) = jax.device_get(pulled(x, weight, down, sizes, block))
    assert used < ROWS and not out[owner < 0].any() and not dx[owner < 0].any() and np.isfinite(dweight).all()


@pytest.mark.parametrize("block", [1, 8])
@pytest.mark.parametrize("name", SIZES)
def test_empty_experts_get_no_gradient(name, block):
    x, weight, down, _, sizes = problem(SIZES[name], block)
    dweight = jax.device_get(pulled(x, weight, down, sizes, block))[1][1]
    assert [bool(part.any()) for part in dweight] == [bool(size) for size in sizes]


def test_bfloat16():
    """Near the float64 numbers; the weights' gradient is summed wide: 600 rows of ones give 600, which bfloat16 sums do not."""
    narrow = lambda array: jnp.asarray(array, jnp.bfloat16)
    x, weight, down, owner, sizes = problem(SIZES["uneven"], 8)
    found = pulled(narrow(x), narrow(weight), narrow(down), sizes, 8)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(found))
    alike(found, dense(x, weight, down, owner), 0.08)
    ones = lambda *shape: jnp.ones(shape, jnp.bfloat16)
    dweight = pulled(ones(608, 1), ones(2, 1, 1), ones(608, 1), np.asarray([600, 8], np.int32), 8)[1][1]
    assert dweight.reshape(-1).astype(float).tolist() == [600, 8]


def test_a_wrong_block_size_is_seen():
    """Planted fault: sizes read with another alignment than the rows have."""
    x, weight, down, owner, sizes = problem(SIZES["uneven"], 8)
    with pytest.raises(AssertionError):
        alike(pulled(x, weight, down, sizes, 2), dense(x, weight, down, owner))


# --- cost ---

def largest(text):
    """Elements of the largest array in an HLO text."""
    return max(np.prod([int(size) for size in dims.split(",")]) for dims in re.findall(r"[a-z]+\d+\[([\d,]+)\]", text))


def compiled(function, experts=16, rows=512, width=32, inner=48):
    """HLO of `function` and its gradients for these sizes, and E·rows·min(width, inner)."""
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
    step = jax.value_and_grad(lambda x, weight, sizes: (function(x, weight, sizes) ** 2).sum(), argnums=(0, 1))
    arguments = shape(rows, width), shape(experts, width, inner), jax.ShapeDtypeStruct((experts,), jnp.int32)
    return jax.jit(step).lower(*arguments).compile().as_text(), experts * rows * min(width, inner)


def test_no_tensor_of_every_expert_by_every_row():
    """Planted fault beside it: `ragged_dot` on CPU has one, which is why it is not used there."""
    text, every = compiled(lambda x, weight, sizes: grouped(x, weight, Groups(sizes, 16)))
    assert largest(text) <= max(512 * 48, 16 * 32 * 48) < every
    text, every = compiled(lambda x, weight, sizes: lax.ragged_dot(x, weight, sizes))
    assert largest(text) >= every


@pytest.mark.parametrize("block", [2, 8])
def test_blocks_in_use_follow_the_tokens(block):
    """The loop is as long as there are blocks that hold rows, not as the buffer."""
    blocks = jax.jit(lambda sizes: Groups(sizes, block).blocks(ROWS))
    for sizes in SIZES.values():
        owner, used = jax.device_get(blocks(np.asarray(sizes, np.int32)))
        wanted = [expert for expert, size in enumerate(sizes) for _ in range(-(-size // block))]
        assert len(owner) == ROWS // block and owner[:used].tolist() == wanted


def test_blocks_of_buffers():
    """A power of two within bounds, about half an expert's mean; 1 on TPU. Whatever the sizes, the buffer holds them, and little more."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        experts, rows = int(rng.integers(1, 65)), int(rng.integers(1, 5000))
        for platform in ("cpu", "gpu", "tpu"):
            block = block_rows(rows, experts, platform)
            assert block == 1 if platform == "tpu" else SMALLEST_BLOCK <= block <= LARGEST_BLOCK and block & (block - 1) == 0
            buffer = buffer_rows(rows, experts, block)
            cuts = np.sort(rng.integers(0, rows + 1, experts - 1))
            alone, even = np.eye(experts, dtype=int)[0] * rows, np.full(experts, rows // experts)
            for sizes in (np.diff(np.concatenate([[0], cuts, [rows]])), alone, even):
                needed = (-(-sizes // block) * block).sum()
                assert needed <= buffer and buffer % block == 0
            assert buffer < rows + experts * block + block
        half = rows / (2 * experts)
        block = block_rows(rows, experts, "cpu")
        assert block <= max(SMALLEST_BLOCK, 2 * half) and block >= min(LARGEST_BLOCK, half // 1)


def test_a_tighter_buffer_would_overflow():
    """One row at each of eight experts takes a block each."""
    assert buffer_rows(8, 8, 16) == 8 * 16 and buffer_rows(9, 8, 16) == 9 * 16 > buffer_rows(9, 7, 16)
