"""Tokens per second of gpt_single against a plain single-device JAX step, and of several meshes and pipelines on eight fake devices, all in one run.

    .venv/bin/python scripts/bench.py [--steps 20] [--json FILE]

The plain step is written below without jaxpara: a dict of arrays, one scan over layers, attention with its S × S scores, logits whole,
optax. Programs take turns step by step, so that noise hits all alike; figures are medians, and ratios of medians. Fake devices
share this machine's cores: their ratio shows the overhead of a layout, not a speed-up. CPU seconds count all threads.
"""
import argparse
import json
import platform
import time
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import jaxpara

MESHES = {"fsdp8": {"mesh.fsdp": 8},
          "fsdp2·sp2·tp2": {"mesh.fsdp": 2, "mesh.sp": 2, "mesh.tp": 2, "parallel.sp_order": "zigzag", "parallel.tp_sequence": True}}
M4 = {"train.microbatches": 4}
MESHES |= {"fsdp4·tp2, m 4": {"mesh.fsdp": 4, "mesh.tp": 2, **M4},
           "pp2·fsdp2·tp2 circular": {"mesh.pp": 2, "mesh.fsdp": 2, "mesh.tp": 2, **M4},
           "pp2·fsdp2·tp2 1f1b": {"mesh.pp": 2, "mesh.fsdp": 2, "mesh.tp": 2, "parallel.schedule": "1f1b", **M4},
           "pp2·fsdp2·tp2 zb_v": {"mesh.pp": 2, "mesh.fsdp": 2, "mesh.tp": 2, "parallel.schedule": "zb_v", **M4}}


def plain_program(run):
    """(state, step) of the same model, optimizer and schedule, the way one writes it for one device."""
    model, optim = run.model, run.optim
    width, heads, kv, dim, inner, layers = model.width, model.heads, model.kv_heads, model.head_dim, model.ffn, model.layers

    def init(key):
        keys = iter(jax.random.split(key, 9))
        normal = lambda *shape: jax.random.normal(next(keys), shape) * 0.02
        block = {"norm1": jnp.ones((layers, width)), "norm2": jnp.ones((layers, width)),
                 "q": normal(layers, width, heads, dim), "k": normal(layers, width, kv, dim), "v": normal(layers, width, kv, dim),
                 "o": normal(layers, heads, dim, width), "gate": normal(layers, width, inner), "up": normal(layers, width, inner),
                 "down": normal(layers, inner, width)}
        return {"embed": normal(model.vocab, width), "block": block, "norm": jnp.ones(width), "head": normal(model.vocab, width)}

    def norm(x, scale):
        return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + model.norm_eps) * scale

    def rotate(x, cos, sin):
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def loss(params, batch):
        angles = batch["positions"][..., None, None] * model.rope_theta ** (-jnp.arange(0, dim, 2) / dim)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        place = jnp.arange(run.train.seq)
        seen = (place[:, None] >= place) & (batch["segments"][:, :, None] == batch["segments"][:, None, :])

        def layer(x, p):
            y = norm(x, p["norm1"])
            q = rotate(jnp.einsum("bsh,hnd->bsnd", y, p["q"]), cos, sin).reshape(*y.shape[:2], kv, heads // kv, dim)
            k, v = rotate(jnp.einsum("bsh,hnd->bsnd", y, p["k"]), cos, sin), jnp.einsum("bsh,hnd->bsnd", y, p["v"])
            scores = jnp.einsum("bsmgd,btmd->bmgst", q, k) * dim ** -0.5
            weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -jnp.inf), -1)
            out = jnp.einsum("bmgst,btmd->bsmgd", weights, v).reshape(*y.shape[:2], heads, dim)
            x = x + jnp.einsum("bsnd,ndh->bsh", out, p["o"])
            y = norm(x, p["norm2"])
            return x + jnp.einsum("bsf,fh->bsh", jax.nn.silu(y @ p["gate"]) * (y @ p["up"]), p["down"]), None

        x, _ = lax.scan(layer, params["embed"][batch["tokens"]], params["block"])
        logits = norm(x, params["norm"]) @ params["head"].T
        counted = batch["targets"] >= 0
        each = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(batch["targets"], 0))
        return jnp.where(counted, each, 0).sum() / counted.sum()

    mask = lambda params: jax.tree.map_with_path(lambda path, _: "norm" not in str(path), params)
    transformation = optax.chain(optax.clip_by_global_norm(optim.clip), optax.adamw(optim.lr, optim.b1, optim.b2, weight_decay=optim.weight_decay, mask=mask))

    def step(state, batch):
        params, optimizer = state
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, optimizer = transformation.update(grads, optimizer, params)
        return (optax.apply_updates(params, updates), optimizer), {"loss": value, "grad_norm": optax.global_norm(grads)}

    params = jax.jit(init)(jax.random.key(0))
    return (params, transformation.init(params)), jax.jit(step, donate_argnums=0)


class Contender:
    """One program, its state, its batches on the device, and the times of its steps."""

    def __init__(self, name, state, step, put):
        self.name, self.state, self.step, self.put, self.seconds, self.cpu = name, state, step, put, [], []

    def turn(self, batch):
        batch = jax.block_until_ready(self.put(batch))
        wall, cpu = time.perf_counter(), time.process_time()
        self.state, metrics = self.step(self.state, batch)
        loss = float(metrics["loss"])
        self.seconds.append(time.perf_counter() - wall)
        self.cpu.append(time.process_time() - cpu)
        return loss


def contenders(overrides):
    """The plain step, gpt_single, and the meshes."""
    base = {"optim.schedule": "constant", "optim.warmup": 0, **overrides}
    programs = {name: jaxpara.build(jaxpara.load("gpt_single", {**base, **mesh})) for name, mesh in {**MESHES, "gpt_single": {}}.items()}
    single = programs.pop("gpt_single")
    state, step = plain_program(single.run)
    yield Contender("plain JAX", state, step, lambda batch: jax.device_put({name: array.astype(np.int32) for name, array in batch.items()}, jax.devices()[0]))
    for name, program in {"gpt_single": single, **programs}.items():
        yield Contender(name, program.init(), program.step, program.put)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="measured steps of each program")
    parser.add_argument("--json", help="write the figures to this file")
    options, rest = parser.parse_known_args()
    overrides = dict(zip((flag.removeprefix("--") for flag in rest[::2]), rest[1::2]))
    jax.config.update("jax_num_cpu_devices", 8)
    run = jaxpara.load("gpt_single", overrides)
    from jaxpara.data import Loader
    loader, racers = Loader(run), list(contenders(overrides))
    for racer in racers:
        racer.turn(loader.batch(0))
    compile_seconds = {racer.name: racer.seconds.pop() for racer in racers}
    for racer in racers:
        racer.turn(loader.batch(1))
        racer.seconds.clear(), racer.cpu.clear()
    for i in range(options.steps):
        for racer in racers[i % len(racers):] + racers[:i % len(racers)]:
            racer.turn(loader.batch(2 + i))
    tokens, plain = run.train.batch * run.train.seq, median(racers[0].seconds)
    print(f"{platform.processor() or platform.machine()}, jax {jax.__version__}, {options.steps} steps each, batch {run.train.batch} × {run.train.seq}")
    print(f"{'program':16}{'first step s':>14}{'median ms':>12}{'tokens/s':>12}{'CPU s/step':>12}{'tokens/s ÷ plain':>18}")
    figures = {}
    for racer in racers:
        middle = median(racer.seconds)
        figures[racer.name] = {"first_step_s": compile_seconds[racer.name], "median_s": middle, "tokens_per_s": tokens / middle,
                               "cpu_s": median(racer.cpu), "ratio": plain / middle}
        print(f"{racer.name:16}{compile_seconds[racer.name]:14.1f}{1000 * middle:12.1f}{tokens / middle:12.0f}{median(racer.cpu):12.2f}{plain / middle:18.3f}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(figures, file, indent=2)


if __name__ == "__main__":
    main()
