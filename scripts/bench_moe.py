"""Tokens per second of one mixture-of-experts layer, forward and backward, on one device: dropless and with capacity 1.25, against a plain loop over
experts; and the time as E grows at fixed K.

    .venv/bin/python scripts/bench_moe.py [--steps 10] [--json FILE]

The plain layer is written below without jaxpara: every expert works on every token, and a token's weights say what counts. Programs take turns step by
step, so that noise hits all alike; figures are medians, and ratios of medians of one run.
"""
import argparse
import json
import time
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np

import jaxpara
from jaxpara.context import ManualCtx, Moment
from jaxpara.gradients import rows_of
from jaxpara.model.declare import fill
from jaxpara.model.moe import MoE
from jaxpara.params import parameters
from jaxpara.zero import placements

ROWS, SEQ, WIDTH, FFN = 8, 512, 256, 512
CONTENDERS = {"dropless": None, "capacity 1.25": 1.25}
GROWTH = (4, 8, 16, 32, 64, 128)


def run_of(experts, capacity, top_k=2):
    """A run of one such layer; its attention and embedding are not measured."""
    moe = jaxpara.MoE(experts=experts, top_k=top_k, ffn=FFN, capacity=capacity, aux_weight=0.01)
    run = jaxpara.Run(model=jaxpara.Model(layers=1, width=WIDTH, heads=4, ffn=FFN, moe=moe), train=jaxpara.Train(batch=ROWS, seq=SEQ))
    from jaxpara.checks import checked
    from jaxpara.config import resolve
    return checked(resolve(run))


def inputs(run):
    """(weights of the layer by name, x, its output's cotangent)."""
    rng = np.random.default_rng(0)
    table = {p.name: p for p in parameters(run.model) if p.name.startswith("layers.moe.")}
    weights = {name: jnp.asarray(rng.normal(0, 0.02, p.shape[1:]), jnp.float32) for name, p in table.items()}
    x, cotangent = (jnp.asarray(rng.normal(0, 1, (ROWS, SEQ, WIDTH)), jnp.float32) for _ in range(2))
    return weights, x, cotangent


def ours(run):
    """A compiled (weights, x, cotangent) -> (output's sum, gradients) of jaxpara's layer."""
    table = {p.name: p for p in parameters(run.model)}
    layer = MoE(table, "layers.moe", run.model)
    micro = {"positions": jnp.zeros((ROWS, SEQ), jnp.int32), "segments": jnp.zeros((ROWS, SEQ), jnp.int32), "number": jnp.arange(ROWS)}
    ctx = ManualCtx(run, placements(run), rows_of(micro, run, Moment(jnp.int32(0))))

    def out(weights, x, cotangent):
        return (fill(layer, weights)(x, jnp.int32(0), ctx)[0] * cotangent).sum()
    return jax.jit(jax.value_and_grad(out, (0, 1)))


def plain(run):
    """The same, the way one writes it first: a loop over experts, all tokens through each."""
    moe = run.model.moe

    def out(weights, x, cotangent):
        get = lambda name: weights[f"layers.moe.{name}"]
        scores = jax.nn.softmax(x @ get("router"))
        values, chosen = jax.lax.top_k(scores, moe.top_k)
        values /= values.sum(-1, keepdims=True)
        y = jnp.zeros_like(x)
        for expert in range(moe.experts):
            gate = jnp.where(chosen == expert, values, 0).sum(-1, keepdims=True)
            inner = jax.nn.silu(x @ get("gate")[expert]) * (x @ get("up")[expert])
            y += gate * (inner @ get("down")[expert])
        return (y * cotangent).sum()
    return jax.jit(jax.value_and_grad(out, (0, 1)))


def race(programs, steps):
    """{name: median seconds} of {name: (function, arguments)}, which take turns."""
    seconds = {name: [] for name in programs}
    for function, arguments in programs.values():
        jax.block_until_ready(function(*arguments))
    names = list(programs)
    for i in range(steps):
        for name in names[i % len(names):] + names[:i % len(names)]:
            function, arguments = programs[name]
            start = time.perf_counter()
            jax.block_until_ready(function(*arguments))
            seconds[name].append(time.perf_counter() - start)
    return {name: median(times) for name, times in seconds.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="measured steps of each program")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    runs = {name: run_of(8, capacity) for name, capacity in CONTENDERS.items()}
    programs = {"plain loop": (plain(runs["dropless"]), inputs(runs["dropless"])), **{name: (ours(run), inputs(run)) for name, run in runs.items()}}
    first = {name: float(function(*arguments)[0]) for name, (function, arguments) in programs.items()}
    assert abs(first["dropless"] / first["plain loop"] - 1) < 1e-3, f"the two do not compute the same: {first}"
    seconds, tokens = race(programs, options.steps), ROWS * SEQ
    print(f"jax {jax.__version__}, {ROWS} × {SEQ} tokens, width {WIDTH}, experts of width {FFN}, forward and backward, float32")
    print(f"\n{'E 8, K 2':16}{'median ms':>12}{'tokens/s':>12}{'÷ plain':>10}")
    for name, time_of in seconds.items():
        print(f"{name:16}{1000 * time_of:>12.1f}{tokens / time_of:>12,.0f}{seconds['plain loop'] / time_of:>10.2f}")
    grown = {(name, experts): run_of(experts, capacity) for name, capacity in CONTENDERS.items() for experts in GROWTH}
    times = race({key: (ours(run), inputs(run)) for key, run in grown.items()}, options.steps)
    print(f"\n{'K 2, ms at E':16}" + "".join(f"{experts:>9}" for experts in GROWTH))
    for name in CONTENDERS:
        print(f"{name:16}" + "".join(f"{1000 * times[name, experts]:>9.1f}" for experts in GROWTH))
    if options.json:
        figures = {"layer": seconds, "growth": {name: {experts: times[name, experts] for experts in GROWTH} for name in CONTENDERS}}
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"jax": jax.__version__, "tokens": tokens, "seconds": figures}, file, indent=1)


if __name__ == "__main__":
    main()
