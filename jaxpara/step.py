"""Run -> Program: init, step, loss_and_grads, params, logits, lower, inspect.

Gradients come from the chosen lowering (`gradients.py`). The optimizer runs in the global view: plain `jit`, optax unmodified, on
arrays placed by the optimizer specs, so that norms and clipping see whole logical arrays; going back to the storage specs is
the parameter all-gather of ZeRO-1 and 2.
"""
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jaxpara import checks, gradients
from jaxpara.balance import balanced, router_metrics
from jaxpara.batch import place_batch, specs
from jaxpara.config import resolve
from jaxpara.context import Moment
from jaxpara.order import inverse, slots
from jaxpara.errors import ConfigError
from jaxpara.executors import circular, relay, scheduled
from jaxpara.hlo.inspection import inspection
from jaxpara.mesh import check_axis_types, platform_of, sharding
from jaxpara.model import GPT
from jaxpara.optim import optimizer, schedule
from jaxpara.params import layers_of, parameters
from jaxpara.pipeline.placing import divergent
from jaxpara.plan.moe import dispatched
from jaxpara.state import (State, check_random, from_single_device, initial_state, state_shardings, to_single_device)
from jaxpara.targets import compile_only, place
from jaxpara.zero import placements


def build(run, target=None):
    """`Program` of a `Run` (from `jaxpara.load`, or made by hand), for this process's devices or for a target: "cpu:8", or to compile
    for only "tpu:v5p:4x4x4" or "gpu:h100:4x8".

    Sets up fake CPU devices when no accelerator is present, and 64-bit mode when the run's precision asks for float64. Raises
    ConfigError with every violation before anything is compiled.
    """
    run, mesh = place(checks.checked(resolve(run)), target)
    run = checks.checked(run)       # again, now that an "auto" axis is filled
    if platform_of(mesh) == "cpu" and run.mesh.ep > 1 and run.parallel.moe_transport == "ragged":
        raise ConfigError("parallel.moe_transport = ragged on cpu: XLA:CPU has no ragged all-to-all. Legal on cpu: all_to_all, gather, which train "
                          "the same model; ragged with devices or a --target of tpu or gpu.")
    check_random()
    if run.precision.wide:
        jax.config.update("jax_enable_x64", True)
    return Program(run, mesh, target)


def moment(state):
    """The `Moment` of the step that a state is before."""
    return Moment(state.step, state.bias)


class Metrics(Mapping):
    """Metrics of a step by name, read as Python floats; reading waits for the step to finish, holding them does not."""

    def __init__(self, arrays, load=None):
        self._arrays, self._load = arrays, load

    def __getitem__(self, name):
        return float(self._arrays[name])

    @property
    def load(self):
        """int [n, E]: how often the routers of the n layers with experts chose each, over the whole mesh; None for a dense model."""
        return None if self._load is None else np.asarray(self._load)

    def __iter__(self):
        return iter(self._arrays)

    def __len__(self):
        return len(self._arrays)

    def __repr__(self):
        return repr(dict(self))


def square_sum(gradient, name):
    """Sum of squares, in a scope that says whose it is."""
    with jax.named_scope(f"norm.sum.{name}"):
        return jnp.sum(gradient * gradient)


class Program:
    """A training program for one run on one mesh. Nothing is compiled until it is first used, and then once. With a target that is only
    compiled for, `lower` and `inspect` work and whatever needs devices raises ConfigError."""

    def __init__(self, run, mesh, target=None):
        self.run, self.mesh = run, check_axis_types(mesh)
        device = mesh.devices.flat[0]
        self.target = target or (f"cpu:{mesh.size}" if device.platform == "cpu" else f"{mesh.size} × {device.device_kind}")
        self.runs = not compile_only(target)
        self.placements = placements(run)
        self.model = GPT({parameter.name: parameter for parameter in parameters(run.model)}, run.model)
        self.optimizer, self.schedule = optimizer(run), schedule(run)
        self.dispatched = dispatched(run)
        self.shardings = state_shardings(run, self.placements, mesh, self.optimizer)
        lowering = gradients.manual if run.parallel.lowering == "manual" else gradients.annotated
        piped = {"make": scheduled if divergent(run) else circular} if run.mesh.pp > 1 else {}
        self._gradients = lowering(run, mesh, self.placements, self.model, **piped)
        scalar = sharding(mesh, ())
        self._step = jax.jit(self._train_step, donate_argnums=0, out_shardings=(self.shardings, scalar))
        self._init = jax.jit(lambda: initial_state(run, self.placements, self.optimizer), out_shardings=self.shardings)
        self._adopt = jax.jit(lambda params: initial_state(run, self.placements, self.optimizer, params), out_shardings=self.shardings)
        self._loss_and_grads = jax.jit(self._gradients)
        through = relay(run, self.placements, self.model) if run.mesh.pp > 1 else None
        self._logits = jax.jit(gradients.logits(run, mesh, self.placements, self.model, through))
        self._routing = jax.jit(gradients.logits(run, mesh, self.placements, self.model, through, watching=True))

    def _must_run(self):
        if not self.runs:
            raise ConfigError(f"{self.target} is only compiled for: there are no such devices here. lower() and inspect() work.")

    def init(self, params=None):
        """`State` before step 1, drawn from train.seed: the same bits on every mesh. params: {dotted path: array} to start from instead,
        one entry per layer as `params()` gives them."""
        self._must_run()
        if params is None:
            return self._init()
        return self._adopt(from_single_device(params, self.placements))

    def put(self, batch):
        """Check a global batch (dict of integer arrays [B, S]: tokens, targets, optional positions, segments) and place it on the mesh."""
        self._must_run()
        return place_batch(batch, self.run, self.mesh)

    def step(self, state, batch):
        """One optimizer step: (state, batch) -> (state, metrics). `state` is donated: use the returned one.

        batch: as for `put`, or what `put` returned. metrics: loss (mean over counted targets), grad_norm (before clipping), tokens
        (counted), lr; and stopped (the step at which loss or gradient was not finite, else -1: from then on nothing is updated); of a model
        with experts also those of `balance.router_metrics`, moe/bytes (sent per device for tokens on their way to experts and back), and
        `metrics.load`.
        """
        batch = batch if "number" in batch else self.put(batch)
        state, (metrics, load) = self._step(state, batch)
        return state, Metrics(metrics if load is None else {**metrics, "moe/bytes": self.dispatched}, load)

    def loss_and_grads(self, state, batch):
        """(loss, {dotted path: np.ndarray}): gradients of the mean loss in the single-device layout, one entry per layer."""
        batch = batch if "number" in batch else self.put(batch)
        loss, _, grads, _ = self._loss_and_grads(state.params, batch, moment(state))
        return float(loss), to_single_device(grads, self.placements)

    def params(self, state):
        """{dotted path: np.ndarray} in the single-device layout, one entry per layer; the master copy where there is one."""
        return to_single_device(state.master or state.params, self.placements)

    def logits(self, state, batch):
        """np.ndarray [B, S, V] in natural order, without dropout. batch: as for `step` (targets may be missing), any B the mesh divides."""
        batch = {"targets": np.zeros_like(batch["tokens"]), **batch}
        placed = place_batch(batch, self.run, self.mesh, fixed=False)
        out = np.asarray(self._logits(state.params, placed, Moment(None, state.bias)))[0]
        return out[:, inverse(slots(self.run, out.shape[1])), :self.run.model.vocab]

    def routing(self, state, batch):
        """What the routers decide of a batch in the step that comes next: {"layers": int [n], those with experts, "chosen": int [n, B, S, K],
        "kept": bool [n, B, S, K], False where an expert had no room}. batch: as for `step`."""
        if not self.run.model.moe.experts:
            raise ConfigError("model.moe.experts = 0: this model has no routers.")
        placed = place_batch(batch, self.run, self.mesh, fixed=False)
        layers, back = list(layers_of(self.run.model, "moe")), inverse(slots(self.run, self.run.train.seq))
        chosen, expert = (np.asarray(array)[layers][:, :, back] for array in self._routing(state.params, placed, moment(state)))
        return {"layers": np.asarray(layers), "chosen": chosen, "kept": expert >= 0}

    def abstract(self):
        """(state, batch) as `jax.ShapeDtypeStruct`s with shardings: what `step` takes, with nothing allocated."""
        shapes = jax.eval_shape(lambda: initial_state(self.run, self.placements, self.optimizer))
        state = jax.tree.map(lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), shapes, self.shardings)
        m, rows = self.run.train.microbatches, self.run.train.batch // self.run.train.microbatches
        batch = {name: jax.ShapeDtypeStruct((m, rows, self.run.train.seq)[:2 if name == "number" else 3], jnp.int32,
                                            sharding=jax.NamedSharding(self.mesh, spec)) for name, spec in specs(self.run).items()}
        return state, batch

    def lower(self):
        """The train step lowered for abstract arguments; `.compile()` it to read HLO, memory and cost."""
        # another program of this process may have turned 64-bit mode on: it would make this one's loop counters 64 bits wide
        with jax.enable_x64(self.run.precision.wide):
            return self._step.lower(*self.abstract())

    @cached_property
    def compiled(self):
        """(compiled train step, seconds that it took). Raises ConfigError when the compiler says that it does not fit."""
        start = time.perf_counter()
        try:
            step = self.lower().compile()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            reason = str(error).splitlines()[0].partition(": ")[2]
            raise ConfigError(f"{self.run.name} does not fit on {self.target}, its compiler says: {reason}") from None
        return step, time.perf_counter() - start

    def inspect(self):
        """`hlo.inspection.Report`: the train step compiled for the target, line by line against what the config predicts."""
        step, seconds = self.compiled
        platform = platform_of(self.mesh)
        usable = None if not self.runs or platform == "cpu" else self.mesh.local_devices[0].memory_stats()["bytes_limit"]
        return inspection(self.run, self.target, platform, step.as_text(), step.memory_analysis(), seconds, usable)

    def _train_step(self, state, batch):
        loss, tokens, grads, loads = self._gradients(state.params, batch, moment(state))
        with jax.named_scope("optimizer"):
            state, metrics = self._update(state, loss, tokens, grads)
        if loads is None:
            return state, (metrics, None)
        bias = balanced(self.run, state.bias, loads.counts, metrics["stopped"] < 0)
        return replace(state, bias=bias), (metrics | router_metrics(self.run, loads), loads.counts[jnp.asarray(layers_of(self.run.model, "moe"))])

    def _place_as(self, tree, kind):
        """Constrain {name: array} to one of the placements' specs; a gather that this takes is its parameter's by name."""
        placed = {}
        for name, value in tree.items():
            with jax.named_scope(f"update.gather.{name}"):
                placed[name] = lax.with_sharding_constraint(value, sharding(self.mesh, getattr(self.placements[name], kind)))
        return placed

    def _update(self, state, loss, tokens, grads):
        run, place_as = self.run, self._place_as
        wide = {name: gradient.astype(jnp.promote_types(run.precision.optimizer, jnp.float32)) for name, gradient in grads.items()}
        squares = {name: square_sum(gradient, name) for name, gradient in wide.items()}
        norm = jnp.sqrt(sum(squares.values()))
        healthy = (state.stopped < 0) & jnp.isfinite(norm) & jnp.isfinite(loss)
        if run.optim.clip is not None:
            wide = {name: gradient * jnp.minimum(1, run.optim.clip / jnp.maximum(norm, 1e-30)) for name, gradient in wide.items()}
        now = place_as(state.master or state.params, "optimizer")
        updates, optimizer_state = self.optimizer.update(wide, state.optimizer, now)
        keep = lambda new, old: jax.tree.map(lambda new, old: jnp.where(healthy, new, old).astype(old.dtype), new, old)
        new = place_as(keep(optax.apply_updates(now, updates), now), "optimizer")
        narrow = {name: value.astype(run.precision.stored(self.placements[name].parameter)) for name, value in new.items()}
        params = place_as(place_as(narrow, "optimizer"), "storage")
        stopped = jnp.where(healthy | (state.stopped >= 0), state.stopped, state.step)
        metrics = {"loss": loss, "grad_norm": norm, "tokens": tokens, "lr": jnp.asarray(self.schedule(state.step)), "stopped": stopped}
        if "layers.moe.router" in squares:
            metrics["moe/router_grad_norm"] = jnp.sqrt(squares["layers.moe.router"])
        return State(state.step + healthy, params, new if run.precision.master else None,
                     keep(optimizer_state, state.optimizer), stopped, state.bias), metrics
