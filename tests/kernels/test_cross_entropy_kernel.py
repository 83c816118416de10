"""The vocabulary-parallel loss against the obvious one, with its gradients; and faults that must be seen."""
from functools import partial

import jax
import numpy as np
import pytest
from kernels.harness import TOLERANCE, compiled, worst
from jax.sharding import Mesh, PartitionSpec as P

from jaxpara.kernels import cross_entropy
from jaxpara.kernels.cross_entropy import cross_entropy_reference, loss_and_gradients

ROWS, SEQ, WIDTH, VOCAB, STORED = 3, 7, 5, 10, 12
"""Vocabulary 10 is stored in 12 rows: the last two are padding, filled with numbers that would show."""


@pytest.fixture(scope="module")
def given():
    generator = np.random.default_rng(0)
    x, weight = generator.standard_normal((ROWS, SEQ, WIDTH)), generator.standard_normal((STORED, WIDTH))
    weight[VOCAB:] += 5
    targets = generator.integers(0, VOCAB, (ROWS, SEQ)).astype(np.int32)
    targets[0] = -1
    targets[1, ::3] = -1
    return x, weight, targets


@pytest.fixture(scope="module")
def wanted(given):
    x, weight, targets = given
    with jax.enable_x64(True):
        loss, grads = jax.value_and_grad(partial(cross_entropy_reference, vocab=VOCAB), (0, 1))(x, weight, targets)
    return [np.asarray(loss)[None], *map(np.asarray, grads)]


def test_the_reference_is_right(given, wanted):
    x, weight, targets = given
    logits = x @ weight[:VOCAB].T
    loss = sum(np.log(np.exp(logits[i]).sum()) - logits[i][targets[i]] for i in np.ndindex(targets.shape) if targets[i] >= 0)
    assert abs(wanted[0][0] - loss) < 1e-12 * loss
    assert (wanted[1][0] == 0).all() and (wanted[2][VOCAB:] == 0).all() and (wanted[2][:VOCAB] != 0).all()


def sharded(x, weight, targets, tp, limit, check_vma=True, gradients=True, vocab=VOCAB):
    """[loss of each rank, dx summed over ranks, dweight] over tp devices."""
    mesh = Mesh(np.array(jax.devices()[:tp]), ("tp",))

    def on_device(x, weight, targets):
        loss, dx, dweight = loss_and_gradients(x, weight, targets, vocab=vocab, axes=("tp",) * (tp > 1), limit=limit, gradients=gradients)
        return (loss[None],) if not gradients else (loss[None], dx[None], dweight)

    table = P("tp") if tp > 1 else P()       # as in a run: no spec names an axis of size 1
    outputs = (table,) * (3 if gradients else 1)
    program = jax.shard_map(on_device, mesh=mesh, in_specs=(P(), table, P()), out_specs=outputs, check_vma=check_vma)
    with jax.enable_x64(True):
        loss, *rest = compiled(program, x, weight, targets)(x, weight, targets)
    return [np.asarray(loss)] + [f(np.asarray(a)) for f, a in zip((lambda dx: dx.sum(0), lambda dweight: dweight), rest)]


@pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("tp, limit", [(1, 1000), (1, 4), (2, 8), (4, 5), (4, 21)])
def test_equals_the_reference(given, wanted, tp, limit, check_vma):
    """Chunks of 4, 5 and 8 do not divide the 21 tokens."""
    got = sharded(*given, tp, limit, check_vma)
    assert max(worst(got, wanted)) < TOLERANCE["float64"], worst(got, wanted)
    assert np.ptp(got[0]) == 0, "all ranks report the same loss"


def test_equals_the_reference_in_float32(given, wanted):
    x, weight, targets = given
    got = sharded(x.astype("float32"), weight.astype("float32"), targets, 4, 5)
    assert max(worst(got, wanted)) < TOLERANCE["float32"]
    assert {a.dtype.name for a in got} == {"float32"}


def test_the_loss_alone_is_the_same(given, wanted):
    assert abs(sharded(*given, 2, 8, gradients=False)[0] - wanted[0]).max() < 1e-12


def test_padding_and_uncounted_tokens_get_exactly_nothing(given):
    _, dx, dweight = sharded(*given, 4, 5)
    assert (dweight[VOCAB:] == 0).all() and (dx[0] == 0).all() and (dx[1, ::3] == 0).all()


def test_nothing_counted_is_a_loss_of_zero(given):
    x, weight, targets = given
    loss, dx, dweight = sharded(x, weight, np.full_like(targets, -1), 2, 8)
    assert (loss == 0).all() and (dx == 0).all() and (dweight == 0).all()


def test_large_logits_do_not_overflow(given):
    x, weight, targets = given
    got = sharded((x * 1e3).astype("float32"), weight.astype("float32"), targets, 2, 8)
    assert all(np.isfinite(a).all() for a in got) and got[0][0] > 1e3


FAULTS = {
    "padding counted": (dict(vocab=STORED), {}),
    "sum over ranks dropped": ({}, {"sum_over": lambda x, axes, scope: x}),
    "maximum over ranks dropped": ({}, {"max_over": lambda x, axes, scope: x}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(given, wanted, fault, monkeypatch):
    arguments, patches = FAULTS[fault]
    for name, value in patches.items():
        monkeypatch.setattr(cross_entropy, name, value)
    got = sharded(*given, 4, 5, check_vma=False, **arguments)
    assert min(worst([got[0][:1], *got[1:]], wanted)) > 1e-3
