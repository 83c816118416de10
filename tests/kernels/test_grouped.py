"""Matmuls of rows with their own experts' weights: against every row alone, and what they cost."""
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxpara.experts import LARGEST_BLOCK, SMALLEST_BLOCK, block_rows, buffer_rows
from jaxpara.kernels.dispatch import starts
from jaxpara.kernels.grouped import Groups, grouped, reference

SIZES = {"uneven": (5, 0, 9, 2), "all to one": (0, 0, 16, 0), "none": (0, 0, 0), "one expert": (7,), "full blocks": (8, 16, 8), "last empty": (3, 4, 0)}
A, B = 6, 10


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


def problem(sizes, block, spare=0, dtype="float64"):
    """x [rows, A] with numbers in every row, rows of no expert too; weight [E, A, B]; a cotangent; each row's expert, -1: none."""
    rng, experts = np.random.default_rng(3), len(sizes)
    rows = buffer_rows(sum(sizes), experts, block) + spare * block
    begins = np.asarray(starts(jnp.asarray(sizes, jnp.int32), block))
    owner = np.full(rows, -1)
    for expert, size in enumerate(sizes):
        owner[begins[expert]:begins[expert] + size] = expert
    draw = lambda *shape: rng.standard_normal(shape).astype(dtype)
    x = draw(rows, A)
    x[owner < 0] = 0                    # rows between experts hold zeros: `spread` puts them there
    return jnp.asarray(x), jnp.asarray(draw(experts, A, B)), jnp.asarray(draw(rows, B)), owner, Groups(jnp.asarray(sizes, jnp.int32), block)


def dense(x, weight, owner):
    """Every row with its expert's matrix."""
    return jnp.where((owner >= 0)[:, None], jnp.einsum("ra,rab->rb", x, weight[np.maximum(owner, 0)]), 0)


@pytest.mark.parametrize("spare", [0, 3])
@pytest.mark.parametrize("block", [1, 2, 4, 8])
@pytest.mark.parametrize("name", SIZES)
def test_values_and_gradients(name, block, spare):
    x, weight, down, owner, groups = problem(SIZES[name], block, spare)
    down = jnp.where((owner >= 0)[:, None], down, 0)
    found, back = jax.vjp(lambda x, weight: grouped(x, weight, groups), x, weight)
    wanted, dense_back = jax.vjp(lambda x, weight: dense(x, weight, owner), x, weight)
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)
    for one, other in zip(back(down), dense_back(down)):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", SIZES)
def test_the_reference_of_unaligned_rows(name):
    x, weight, _, owner, groups = problem(SIZES[name], 1)
    np.testing.assert_allclose(reference(x, weight, groups.sizes), dense(x, weight, owner), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(grouped(x, weight, groups), reference(x, weight, groups.sizes), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("block", [2, 8])
def test_rows_of_no_expert(block):
    """Blocks behind the last expert's are not looked at, whatever stands in them: zeros come out, and no gradient goes in."""
    x, weight, down, owner, groups = problem(SIZES["uneven"], block, spare=2)
    used = int(starts(groups.sizes, block)[-1])
    junk = x.at[used:].set(jnp.nan)
    out, back = jax.vjp(lambda x, weight: grouped(x, weight, groups), junk, weight)
    assert not np.asarray(out)[owner < 0].any() and used < len(x)
    dx, dweight = back(down.at[used:].set(jnp.nan))
    assert not np.asarray(dx)[used:].any() and np.isfinite(dweight).all()


@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("name", SIZES)
def test_empty_experts_get_no_gradient(name, block):
    x, weight, down, owner, groups = problem(SIZES[name], block, spare=1)
    down = jnp.where((owner >= 0)[:, None], down, 0)
    dweight = np.asarray(jax.grad(lambda weight: (grouped(x, weight, groups) * down).sum())(weight))
    for expert, size in enumerate(SIZES[name]):
        assert bool(dweight[expert].any()) == bool(size)


@pytest.mark.parametrize("block", [4, 16])
def test_bfloat16(block):
    """Near the float64 numbers; the weights' gradient is summed wide: 600 rows of ones give 600, which bfloat16 sums would not."""
    x, weight, down, owner, groups = problem(SIZES["uneven"], block)
    down = jnp.where((owner >= 0)[:, None], down, 0)
    narrow = lambda *arrays: [array.astype(jnp.bfloat16) for array in arrays]
    found, back = jax.vjp(lambda x, weight: grouped(x, weight, groups), *narrow(x, weight))
    wanted, dense_back = jax.vjp(lambda x, weight: dense(x, weight, owner), x, weight)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.astype(float), wanted, rtol=0.05, atol=0.05)
    for one, other in zip(back(*narrow(down)), dense_back(down)):
        assert one.dtype == jnp.bfloat16
        np.testing.assert_allclose(one.astype(float), other, rtol=0.05, atol=0.08)
    ones = lambda *shape: jnp.ones(shape, jnp.bfloat16)
    groups, rows = Groups(jnp.asarray([600, 0], jnp.int32), 8), 608
    dweight = jax.grad(lambda weight: grouped(ones(rows, 1), weight, groups).astype(jnp.float32).sum())(ones(2, 1, 1))
    assert float(dweight[0, 0, 0]) == 600 and float(dweight[1, 0, 0]) == 0


def test_a_wrong_block_size_is_seen():
    """Planted fault: sizes read with another alignment than the rows have."""
    x, weight, _, owner, groups = problem(SIZES["uneven"], 4)
    assert not np.allclose(grouped(x, weight, groups._replace(block=2)), dense(x, weight, owner))


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


def test_blocks_in_use_follow_the_tokens():
    """The loop's length is the number of blocks that hold rows, not that of the buffer."""
    for sizes in SIZES.values():
        for block in (2, 8):
            owner, used = Groups(jnp.asarray(sizes, jnp.int32), block).blocks(80)
            assert int(used) == sum(-(-size // block) for size in sizes) and len(owner) == 80 // block
            wanted = [expert for expert, size in enumerate(sizes) for _ in range(-(-size // block))]
            np.testing.assert_array_equal(np.asarray(owner)[:int(used)], wanted)


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
            for sizes in (np.diff(np.concatenate([[0], cuts, [rows]])), np.eye(experts, dtype=int)[0] * rows, np.ones(experts, int) * (rows // experts)):
                needed = (-(-sizes // block) * block).sum()
                assert needed <= buffer and buffer % block == 0
            assert buffer < rows + experts * block + block
        half = rows / (2 * experts)
        block = block_rows(rows, experts, "cpu")
        assert block <= max(SMALLEST_BLOCK, 2 * half) and block >= min(LARGEST_BLOCK, half // 1)


def test_a_tighter_buffer_would_overflow():
    """One row per expert and the rest at one: all of the last block of the bound is needed."""
    experts, block = 8, 16
    sizes = np.ones(experts, int)
    sizes[0] = 1 + 3 * block
    needed = (-(-sizes // block) * block).sum()
    assert needed == buffer_rows(sizes.sum(), experts, block) > buffer_rows(sizes.sum(), experts - 1, block)
