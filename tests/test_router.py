"""The router: scores, choices, capacity, losses, balance and what it says, each against numpy by the definition."""
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpara
from equivalence.hard import hard_batch, make_run
from jaxpara.balance import balanced, router_metrics
from jaxpara.config import MoE, Precision
from jaxpara.experts import capacity
from jaxpara.model.router import Load, Router, limited, pick, sinkhorn, with_loss, within_capacity
from jaxpara.params import parameters

ROWS, SEQ, WIDTH, E, K = 3, 16, 6, 8, 3


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


class OneDevice:
    """What a router asks of its context, all tokens at hand."""
    training = True

    def __init__(self, run, weigh=None, bias=None, warm=1.0):
        self.run = run
        self.rows = SimpleNamespace(weigh=None if weigh is None else jnp.asarray(weigh), bias=bias, warm=jnp.asarray(warm))

    whole = staticmethod(lambda x, what: x)
    own = sum_of_row = sum_of_batch = staticmethod(lambda x: x)
    spans = staticmethod(lambda: False)
    row_tokens = staticmethod(lambda here: here)
    share = staticmethod(lambda weigh, layer: weigh)


def run_of(**moe):
    return make_run({"model.moe.experts": E, "model.moe.top_k": K, "model.moe.ffn": 28, "model.width": WIDTH, "train.seq": SEQ, "train.batch": ROWS,
                     "model.heads": 2, "model.kv_heads": 2, **{f"model.moe.{name}": value for name, value in moe.items()}})


def inputs(dtype="float64"):
    rng = np.random.default_rng(0)
    return rng.normal(0, 1, (ROWS, SEQ, WIDTH)).astype(dtype), rng.normal(0, 1, (WIDTH, E)).astype(dtype)


def router_of(run, weight):
    """A `Router` of one layer with this weight."""
    table = {p.name.replace("layers.moe", "r"): replace(p, shape=p.shape[1:], labels=p.labels[1:]) for p in parameters(run.model) if p.wide}
    router = Router(table, "r", run.model)
    router.weight.set_value(jnp.asarray(weight))
    return router


def routed(run, training=True, x=None, **told):
    """(`Routed`, `Load`, numpy logits) of `inputs`."""
    given, weight = inputs()
    x, router, ctx = given if x is None else x, router_of(run, weight), OneDevice(run, **told)
    ctx.training = training
    found, load = jax.device_get(jax.jit(lambda x: router(x, jnp.int32(0), ctx))(x))
    return found, load, x @ weight


def softmax(logits):
    exp = np.exp(logits - logits.max(-1, keepdims=True))
    return exp / exp.sum(-1, keepdims=True)


SCORES = {"softmax": softmax, "sigmoid": lambda logits: 1 / (1 + np.exp(-logits))}


def top(scores, k):
    """The k best, best first, of equals the first."""
    return np.argsort(-scores, -1, kind="stable")[..., :k]


def take(scores, chosen):
    return np.take_along_axis(scores, chosen, -1)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("renormalise", [True, False])
def test_token_choice(score, renormalise):
    run = run_of(score=score, renormalise=renormalise, scale=2.5)
    found, load, logits = routed(run)
    scores = SCORES[score](logits)
    chosen = top(scores, K)
    gates = take(scores, chosen)
    gates = gates / gates.sum(-1, keepdims=True) if renormalise else gates
    np.testing.assert_array_equal(found.chosen, chosen)
    np.testing.assert_array_equal(found.expert, chosen)
    np.testing.assert_allclose(found.gates, 2.5 * gates, rtol=1e-12)
    np.testing.assert_array_equal(load.counts, np.bincount(chosen.reshape(-1), minlength=E))
    assert load.dropped == 0 and found.expert.dtype == found.chosen.dtype == load.counts.dtype == np.int32


def test_equal_scores_choose_the_first():
    found, _, _ = routed(run_of(), x=np.zeros((ROWS, SEQ, WIDTH)))
    assert (found.chosen == np.arange(K)).all() and np.allclose(found.gates, 1 / K)


def test_a_bias_chooses_and_does_not_weigh():
    run = run_of(bias_rate=0.1, score="sigmoid")
    bias = np.zeros((run.model.layers, E), np.float32)
    bias[0] = [0, 0, 5, 0, 0, 5, 0, 0]
    bias[1:] = 9 * np.arange(E)
    found, _, logits = routed(run, bias=jnp.asarray(bias))
    scores = SCORES["sigmoid"](logits)
    chosen = top(scores + bias[0], K)
    np.testing.assert_array_equal(found.chosen, chosen)
    assert all({2, 5} <= set(token) for token in chosen.reshape(-1, K).tolist())
    gates = take(scores, chosen)
    np.testing.assert_allclose(found.gates, gates / gates.sum(-1, keepdims=True), rtol=1e-12)


@pytest.mark.parametrize("kind", ["top1", "top2"])
@pytest.mark.parametrize("groups, best", [(4, 2), (2, 1), (4, 4), (4, 3)])
def test_group_limited(kind, groups, best):
    """DeepSeek-V3's rule: groups by the sum of their best scores, experts from the best groups only."""
    moe = MoE(experts=E, top_k=K, expert_groups=groups, top_groups=best, group_score=kind)
    scores = np.random.default_rng(1).random((40, E))
    wanted = []
    for token in scores:
        parts = token.reshape(groups, -1)
        value = np.sort(parts, -1)[:, ::-1][:, :1 if kind == "top1" else 2].sum(-1)
        allowed = sorted(np.argsort(-value, kind="stable")[:best])
        open_to = [expert for group in allowed for expert in range(group * E // groups, (group + 1) * E // groups)]
        wanted.append(sorted(open_to, key=lambda expert: (-token[expert], expert))[:K])
    found = jax.lax.top_k(limited(jnp.asarray(scores), moe), K)[1]
    np.testing.assert_array_equal(found, wanted)
    if best < min(groups, K):
        assert (np.asarray(found) != top(scores, K)).any()


def test_group_limited_in_the_router():
    """By scores with the bias, weights from the scores without."""
    run = run_of(expert_groups=4, top_groups=2, group_score="top2", bias_rate=0.1)
    bias = np.random.default_rng(2).normal(0, 0.3, (run.model.layers, E)).astype(np.float32)
    found, _, logits = routed(run, bias=jnp.asarray(bias))
    scores = softmax(logits)
    selection = scores + bias[0]
    best = top(selection.reshape(ROWS, SEQ, 4, 2).sum(-1), 2)
    allowed = (best[..., None] == np.arange(E) // 2).any(-2)
    chosen = top(np.where(allowed, selection, -np.inf), K)
    np.testing.assert_array_equal(found.chosen, chosen)
    gates = take(scores, chosen)
    np.testing.assert_allclose(found.gates, gates / gates.sum(-1, keepdims=True), rtol=1e-12)


# --- capacity ---

def first(expert, priority, most):
    """bool [N]: one group's choices one after the other, best first, of equals those that come first."""
    kept, taken = np.zeros(len(expert), bool), {}
    for place in sorted(range(len(expert)), key=lambda place: (0 if priority is None else -priority[place], place)):
        taken[expert[place]] = taken.get(expert[place], 0) + 1
        kept[place] = taken[expert[place]] <= most
    return kept


@pytest.mark.parametrize("order", ["position", "probability", "ties"])
@pytest.mark.parametrize("most", [1, 3, 100])
def test_within_capacity(order, most):
    rng = np.random.default_rng(3)
    expert = rng.integers(0, 5, (4, 30)).astype(np.int32)
    expert[1] = 2
    expert[2, :] %= 2
    priority = {"position": None, "probability": rng.random(expert.shape), "ties": rng.integers(0, 3, expert.shape) / 2}[order]
    found = jax.jit(within_capacity, static_argnums=(2, 3))(expert, priority, 5, most)
    wanted = [first(row, None if priority is None else priority[i], most) for i, row in enumerate(expert)]
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("order", ["position", "probability"])
@pytest.mark.parametrize("group", [4, 16])
def test_capacity_in_the_router(order, group):
    """Dropped choices have expert -1, keep their weight (the others' do not grow), count as load, and are told."""
    run = run_of(capacity=0.5, group=group, drop_order=order)
    found, load, logits = routed(run)
    scores = softmax(logits)
    chosen = top(scores, K)
    gates = take(scores, chosen)
    gates /= gates.sum(-1, keepdims=True)
    parts = lambda x: x.reshape(-1, group * K)
    most = capacity(run.model.moe)
    kept = np.stack([first(*pair, most) for pair in zip(parts(chosen), parts(gates) if order == "probability" else [None] * (ROWS * SEQ // group))])
    kept = kept.reshape(chosen.shape)
    np.testing.assert_array_equal(found.expert, np.where(kept, chosen, -1))
    np.testing.assert_array_equal(found.chosen, chosen)
    np.testing.assert_allclose(found.gates, gates, rtol=1e-12)
    np.testing.assert_array_equal(load.counts, np.bincount(chosen.reshape(-1), minlength=E))
    assert load.dropped == (~kept).sum() > 0


def test_evaluation_drops_nobody_unless_told():
    kept = lambda **moe: (routed(run_of(capacity=0.5, **moe), training=False)[0].expert >= 0).all()
    assert kept() and not kept(eval_capacity=True)


def test_expert_choice():
    """Each expert takes its best C of each group, with the token's own score as weight."""
    run = run_of(routing="expert_choice", capacity=1.5, group=8)
    found, load, logits = routed(run)
    most, scores = capacity(run.model.moe), softmax(logits)
    by_group = scores.reshape(-1, 8, E)
    taken = np.zeros(by_group.shape, bool)
    for group, of in enumerate(by_group):
        for expert in range(E):
            taken[group, np.argsort(-of[:, expert], kind="stable")[:most], expert] = True
    taken = taken.reshape(scores.shape)
    assert most == 5 and (taken.reshape(-1, 8, E).sum(1) == most).all()
    np.testing.assert_array_equal(found.expert, np.where(taken, np.arange(E), -1))
    np.testing.assert_allclose(found.gates, scores, rtol=1e-12)
    assert (load.counts == most * ROWS * SEQ // 8).all() and load.dropped == 0 and load.aux == 0


def test_sinkhorn_sums():
    """Every expert's column adds up to 1/E; every token's row to 1/G, as far as the iterations have come."""
    shares = np.asarray(sinkhorn(jnp.asarray(np.random.default_rng(4).normal(0, 2, (5, 32, E)))))
    np.testing.assert_allclose(shares.sum(-2), 1 / E, rtol=1e-12)
    np.testing.assert_allclose(shares.sum(-1), 1 / 32, rtol=1e-3)
    assert (shares > 0).all()


def test_sinkhorn_balances_each_group():
    """Weights are the plain scores of what it chooses; loads are flatter than those of token choice."""
    x = np.random.default_rng(5).normal(0, 1, (ROWS, SEQ, WIDTH)) + 1.0
    plain = routed(run_of(), x=x)[1].counts
    run = run_of(routing="sinkhorn", group=8, renormalise=False)
    found, load, logits = routed(run, x=x)
    cost = logits.reshape(-1, 8, E)
    shares = np.exp(cost - cost.max((1, 2), keepdims=True))
    for _ in range(30):
        shares = shares / shares.sum(-1, keepdims=True) / 8
        shares = shares / shares.sum(-2, keepdims=True) / E
    np.testing.assert_array_equal(found.chosen, top(shares.reshape(logits.shape), K))
    np.testing.assert_allclose(found.gates, take(softmax(logits), found.chosen), rtol=1e-12)
    assert load.counts.std() < plain.std() / 2


# --- losses ---

def losses(run, logits):
    """(load-balance loss, z-loss, gradient of each by the logits) of token choice, with the loads held fixed."""
    moe = run.model.moe
    scores = SCORES[moe.score](logits)
    chosen = top(scores, K)
    load = np.stack([np.bincount(row.reshape(-1), minlength=E) for row in chosen])
    if moe.aux_scope != "sequence":
        load = np.broadcast_to(load.sum(0) / ROWS, load.shape)

    def both(logits):
        raw = jax.nn.softmax(logits) if moe.score == "softmax" else jax.nn.sigmoid(logits)
        share = raw / raw.sum(-1, keepdims=True)
        part = load * E / (K * SEQ)                          # f_i
        return (part * share.mean(1)).sum(-1).mean(), jnp.square(jax.nn.logsumexp(logits, -1)).mean()

    one, other = (jax.grad(lambda x, i=i: both(x)[i])(jnp.asarray(logits)) for i in range(2))
    return (*map(float, both(jnp.asarray(logits))), one, other)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("scope", ["sequence", "microbatch", "global"])
def test_losses_and_their_gradients(score, scope):
    """The values as told; the gradients exactly those of aux_weight·warm·aux + z_weight·z, beside whatever else flows back."""
    run = run_of(score=score, aux_weight=0.3, aux_scope=scope, z_weight=0.05)
    _, load, logits = routed(run, weigh=1.0, warm=0.25)
    aux, z, daux, dz = losses(run, logits)
    np.testing.assert_allclose([load.aux, load.z], [aux, z], rtol=1e-12)
    x, weight = inputs()
    router = router_of(run, weight)
    gates = lambda x, weigh: router(x, jnp.int32(0), OneDevice(run, weigh, warm=0.25))[0].gates
    pull = jax.jit(lambda x, weigh, down: jax.vjp(lambda x: gates(x, weigh), x)[1](down)[0])
    down = np.random.default_rng(6).normal(0, 1, (ROWS, SEQ, K))
    wanted = np.einsum("bse,he->bsh", 0.3 * 0.25 * daux + 0.05 * dz, weight)
    np.testing.assert_allclose(pull(x, 1.0, 0 * down), wanted, rtol=1e-9, atol=1e-14)
    np.testing.assert_allclose(pull(x, 2.0, down) - pull(x, 0.0, down), 2 * wanted, rtol=1e-9, atol=1e-13)
    assert np.abs(pull(x, 0.0, down)).max() > 0


def test_a_balanced_load_has_loss_1_and_a_collapsed_one_E_over_K():
    run = run_of(aux_weight=0.1)
    even = np.zeros((ROWS, SEQ, WIDTH))
    assert routed(run, x=even)[1].aux == pytest.approx(1)       # equal scores: whatever is chosen, the mean score is 1/E
    weight = inputs()[1]
    away = np.broadcast_to(1e4 * np.linalg.pinv(weight.T)[:, 0], (ROWS, SEQ, WIDTH))
    _, load, logits = routed(run, x=away @ np.eye(WIDTH))
    share = softmax(logits)
    assert load.aux == pytest.approx((E / K) * share.mean((0, 1))[top(logits, K)[0, 0]].sum()) and load.aux > 2


def test_with_loss_adds_the_gradient_and_nothing_else():
    def value(x, y, weigh):
        return (with_loss(x, jnp.sum(y ** 2), weigh) * jnp.arange(3.0)).sum()

    x, y = jnp.ones(3), jnp.asarray([1.0, -2.0])
    out, (dx, dy, dweigh) = jax.value_and_grad(value, (0, 1, 2))(x, y, jnp.asarray(0.5))
    assert out == 3 and dx.tolist() == [0, 1, 2] and dy.tolist() == [1, -2] and dweigh == 0
    twice = jax.grad(lambda y: 100 * value(x, y, jnp.asarray(0.5)))(y)
    assert twice.tolist() == [1, -2]                            # whatever the cotangent


def test_picking_is_taking():
    rng = np.random.default_rng(7)
    scores, chosen = rng.random((4, 5, E)), rng.integers(0, E, (4, 5, K))
    np.testing.assert_array_equal(pick(jnp.asarray(scores), jnp.asarray(chosen)), take(scores, chosen))


# --- what a step does with loads ---

def test_balance_moves_towards_the_mean():
    """Up below the mean load, down above it, not at it; nothing in an unhealthy step; none without a bias."""
    run = run_of(bias_rate=0.01)
    counts = jnp.asarray([[0, 4, 2, 2, 2, 2, 2, 2], [2] * 8, [16, 0, 0, 0, 0, 0, 0, 0]], jnp.int32)
    bias = jnp.full((3, E), 0.5, jnp.float32)
    moved = balanced(run, bias, counts, True)
    signs = np.asarray([[1, -1] + [0] * 6, [0] * 8, [-1] + [1] * 7])
    np.testing.assert_allclose(moved, 0.5 + 0.01 * signs, rtol=1e-6)
    assert moved.dtype == jnp.float32
    np.testing.assert_array_equal(balanced(run, bias, counts, False), bias)
    assert balanced(run, None, counts, True) is None
    odd = balanced(run, bias[:1], jnp.asarray([[1, 0, 0, 0, 0, 0, 0, 0]], jnp.int32), True)    # a mean of 1/8
    assert np.sign(odd - 0.5).tolist() == [[-1] + [1] * 7]


def test_metrics_by_hand():
    """Three layers, of which the last two have experts; 48 choices of 3·16 tokens and K = 1."""
    run = run_of(first_dense=1, aux_weight=0.1, top_k=1)
    counts = np.zeros((3, E), np.int32)
    counts[1], counts[2, :2] = 6, 24
    load = Load(jnp.asarray(counts), jnp.asarray([0, 3, 9], jnp.int32), jnp.asarray([0.0, 1.0, 4.0]), jnp.asarray([0.0, 2.0, 6.0]))
    found = {name: float(value) for name, value in router_metrics(run, load).items()}
    assert found == pytest.approx({"moe/load_max": 4.0, "moe/load_entropy": 1 / 3, "moe/dropped": 12 / 96, "moe/z_loss": 4.0, "moe/aux_loss": 2.5})
    assert "moe/aux_loss" not in router_metrics(run_of(first_dense=1), load)


def test_the_router_stays_wide():
    """In float32 under bfloat16, stored and computed, and never narrowed under float64."""
    half, double = Precision(compute="bfloat16", params="bfloat16"), Precision(compute="float64", params="float64")
    for p in parameters(run_of(noise=True).model):
        wide = p.name in ("layers.moe.router", "layers.moe.noise")
        assert p.wide == wide
        assert half.stored(p) == half.computed(p) == ("float32" if wide else "bfloat16")
        assert double.stored(p) == double.computed(p) == "float64"


def test_close_logits_choose_alike_in_bfloat16():
    """F7 of the cases: 1.000, 1.001, 1.002, 0.999 are one number in bfloat16; the router sees them apart."""
    run = make_run({"model.moe.experts": 4, "model.moe.top_k": 2, "model.width": 4, "model.heads": 2, "model.kv_heads": 2, "train.seq": 2,
                    "train.batch": 1})
    router = router_of(run, np.asarray([[1.000, 1.001, 1.002, 0.999]] + [[0.0] * 4] * 3, np.float32))
    x = jnp.asarray(np.eye(4)[None, :1].repeat(2, 1), jnp.bfloat16)
    found, _ = jax.jit(lambda x: router(x, jnp.int32(0), OneDevice(run)))(x)
    assert found.chosen.tolist() == [[[2, 1], [2, 1]]] and found.gates.dtype == jnp.float32
    assert len(set(np.asarray([1.000, 1.001, 1.002, 0.999], jnp.bfloat16).tolist())) < 4


def test_a_bfloat16_program_keeps_its_router_wide():
    run = make_run({"model.moe.experts": E, "model.moe.top_k": K, "model.moe.ffn": 28, "model.layers": 1, "precision.compute": "bfloat16",
                    "precision.params": "bfloat16"})
    state = jaxpara.build(run).abstract()[0]
    assert {name: str(leaf.dtype) for name, leaf in state.params.items() if "moe" in name} == {
        "layers.moe.router": "float32", "layers.moe.up": "bfloat16", "layers.moe.gate": "bfloat16", "layers.moe.down": "bfloat16"}


@pytest.fixture(scope="module")
def warming():
    """A program of one layer whose load-balance loss warms up in 4 steps; its state and gradients by step."""
    with jax.enable_x64(True):
        settings = {"model.moe.experts": E, "model.moe.top_k": K, "model.moe.ffn": 28, "model.layers": 1, "model.moe.aux_weight": 0.5,
                    "model.moe.aux_warmup": 4}
        program = jaxpara.build(make_run(settings))
        state = program.init()
        return {step: program.loss_and_grads(replace(state, step=jnp.int32(step)), hard_batch()) for step in (0, 1, 2, 4, 9)}


def test_warm_up(warming):
    """A quarter more in each of 4 steps, then all of it: of the loss, and of its gradients."""
    loss, router = ({step: pair[i] for step, pair in warming.items()} for i in range(2))
    router = {step: grads["layers.0.moe.router"] for step, grads in router.items()}
    assert loss[4] - loss[0] > 0.4 and np.abs(router[4] - router[0]).max() > 1e-6
    for step, factor in ((1, 0.25), (2, 0.5), (9, 1.0)):
        np.testing.assert_allclose(loss[step] - loss[0], factor * (loss[4] - loss[0]), rtol=1e-12)
        np.testing.assert_allclose(router[step] - router[0], factor * (router[4] - router[0]), rtol=1e-9, atol=1e-14)
