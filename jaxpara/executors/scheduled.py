"""Any legal pipeline table in one program: a scan over its ticks, a switch on what this stage does, exchanges outside the switch.

In a tick every stage does its own op: nothing, F, B or W. F keeps the chunk's input only; B runs the chunk again from it and pulls the output
gradient back through it; where the table splits the backward pass, B leaves (input, output gradient) pairs for W (`jaxpara.taps`). What all stages
do together stands outside the switch, and in the ticks that need it only: looking up a micro-batch that begins, taking the loss of one that
leaves the last chunk, summing the embedding's gradient of one that is through, and sending.
"""
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxpara.collectives import match, shift, varying_axes, vary
from jaxpara.executors.stage import Stage, gathered, inside, scattered, sums
from jaxpara.gradients import dtype_of, reduce_micro, sink
from jaxpara.pipeline.lockstep import B, tables
from jaxpara.pipeline.placing import schedule
from jaxpara.taps import Note, Teller, weight_gradient


def scheduled(run, placements, model, make_ctx):
    """A function (weights, batch, moment, scale) -> ((summed loss · scale, `Load`s), {name: gradient}): a whole step's, gradients reduced by
    `gradients.reduce_micro`. make_ctx: placements -> `ManualCtx`."""
    seen = inside(run, placements)
    table = schedule(run)
    stage, rows = Stage(run, seen, model, make_ctx(seen), table, True), tables(table)

    def whole(weights, batch, moment, scale):
        usable = gathered(weights, placements) if run.parallel.gather_once else weights
        machine = Machine(stage, rows, usable, batch, moment, scale)
        state, _ = lax.scan(machine.tick, machine.start(), machine.rows())
        gradients = state["gradients"]
        return (state["loss"], state["loads"]), scattered(gradients, placements) if run.parallel.gather_once else gradients

    return whole


class Machine:
    """One device's ticks. Its state: slots (chunk inputs), cotangents (chunk output gradients), pairs (for W), gradients, loss, `Load`s."""

    def __init__(self, stage, table, weights, batch, moment, scale):
        self.stage, self.table, self.weights, self.batch, self.moment, self.scale = stage, table, weights, batch, moment, scale
        self.dtype = stage.run.precision.gradient(stage.run.train.microbatches)
        self.border = jax.eval_shape(lambda: self.embed(0, self.sinks(stage.entry)))
        held = lambda name: stage.placements[name].parameter
        self.matrices = tuple(name for name in stage.layers if held(name).matrix and not held(name).routed) if table.pairs else ()
        self.note = Note()
        _, loads = jax.eval_shape(self.noted)
        self.no_load = jax.tree.map(lambda like: vary(jnp.zeros(like.shape, like.dtype), (*varying_axes(like), "pp")), loads)

    def noted(self):
        """A chunk that tells the note of its matmuls."""
        x, own = self.empty(1)[0], self.stage.chunk_of(self.weights, 0)
        sinks = {**self.sinks(self.stage.layers, own), **{name: Teller(name, self.note) for name in self.matrices}}
        return self.stage.through(x, own, sinks, 0, self.stage.rows(self.batch, 0, self.moment))

    def sinks(self, names, like=None):
        """{name: zeros where its gradient comes out}, shaped like `like`, by default all that this device has of it."""
        like = self.weights if like is None else like
        return {name: sink(like[name], self.dtype_of(name)) for name in names}

    def dtype_of(self, name):
        """Dtype of a parameter's gradient."""
        return dtype_of(self.stage.run, self.stage.placements[name], self.dtype)

    def empty(self, count):
        """Zeros for `count` activations at a border."""
        return vary(jnp.zeros((count, *self.border.shape), self.border.dtype), (*varying_axes(self.border), "pp"))

    def start(self):
        """The state before the first tick."""
        gradients = {name: sums(value, self.stage.placements[name], self.dtype_of(name)) for name, value in self.weights.items()}
        pairs = jax.tree.map(lambda zeros: jnp.broadcast_to(zeros, (self.table.pairs, *zeros.shape)), self.no_pair())
        loss = vary(jnp.zeros((), self.scale.dtype), (*varying_axes(self.batch["targets"]), "pp"))
        return {"slots": self.empty(self.table.slots), "cotangents": self.empty(self.table.gradients), "pairs": pairs,
                "gradients": gradients, "loss": loss, "loads": self.no_load}

    def rows(self):
        """What the scan reads: this stage's column of each table, and what is common to all."""
        table, column = self.table, lambda array: jnp.asarray(array)[:, self.stage.rank]
        own = {name: column(getattr(table, name)) for name in ("op", "microbatch", "chunk", "input", "gradient", "pair")}
        common = {name: jnp.asarray(getattr(table, name)) for name in ("begins", "ends", "losses", "kept")}
        hops = [(jnp.asarray(hop.sends), column(hop.activation), column(hop.gradient)) for hop in table.hops]
        return {**own, **common, "hops": hops}

    def tick(self, state, now):
        """One row of the table."""
        table, nothing, on = self.table, self.empty(1)[0], lambda stage, tick, slot: jnp.where((self.stage.rank == stage) & (tick >= 0), slot, -1)
        fresh = when(now["begins"] >= 0, "pipeline.begin", lambda _: self.embed(now["begins"], self.sinks(self.stage.entry)), nothing)
        slots = put(state["slots"], fresh, on(table.first, now["begins"], now["input"]))
        branches = [self.idle, self.forward, self.backward] + [self.weight] * bool(self.matrices)
        ops = [scoped(branch, {**state, "slots": slots}, now) for branch in branches]
        gradients, message, pair, loads = lax.switch(now["op"], ops, state["gradients"])
        pairs = jax.tree.map(lambda buffer, new: put(buffer, new, jnp.where(now["op"] == B, now["pair"], -1)), state["pairs"], pair)
        gradients, loss, dx = when(now["losses"] >= 0, "pipeline.loss", partial(self.take_loss, now, message), (gradients, state["loss"], nothing))
        cotangents = put(state["cotangents"], dx, on(table.last, now["losses"], now["kept"]))
        gradients = when(now["ends"] >= 0, "pipeline.end", partial(self.end, now, message), gradients)
        loads = jax.tree.map(jnp.add, state["loads"], loads)
        state = {"slots": slots, "cotangents": cotangents, "pairs": pairs, "gradients": gradients, "loss": loss, "loads": loads}
        for hop, (sends, activation, gradient) in zip(self.table.hops, now["hops"]):
            arrived = message
            if hop.distance:
                send = lambda message: shift(message, "pp", hop.pairs, "border.send")
                arrived = lax.cond(sends, send, lambda message: message, message)
            for name, slot, used in (("slots", activation, hop.activation), ("cotangents", gradient, hop.gradient)):
                if (used >= 0).any():
                    state = {**state, name: put(state[name], arrived, slot)}
        return state, None

    def idle(self, state, now, gradients):
        """Nothing: what is sent then, nobody reads."""
        return gradients, self.empty(1)[0], self.no_pair(), self.no_load

    def no_pair(self):
        """{matrix: Tap} of zeros, one chunk's."""
        return self.note.taps(self.matrices, {name: self.stage.length_of(name) for name in self.matrices})

    def forward(self, state, now, gradients):
        """A chunk, from its input to its output."""
        x, own = at(state["slots"], now["input"]), self.stage.chunk_of(self.weights, now["chunk"])
        rows = self.stage.rows(self.batch, now["microbatch"], self.moment)
        out, loads = self.stage.through(x, own, self.sinks(self.stage.layers, own), now["chunk"], rows)
        return gradients, out, self.no_pair(), jax.tree.map(match, loads, self.no_load)

    def backward(self, state, now, gradients):
        """A chunk again, and its output gradient back through it; of split matmuls the pairs."""
        stage, x, own = self.stage, at(state["slots"], now["input"]), self.stage.chunk_of(self.weights, now["chunk"])
        rows = stage.rows(self.batch, now["microbatch"], self.moment)
        sinks = {**self.sinks([name for name in stage.layers if name not in self.matrices], own), **self.no_pair()}
        _, pull = jax.vjp(lambda x, sinks: stage.through(x, own, sinks, now["chunk"], rows)[0], x, sinks)
        message, found = pull(at(state["cotangents"], now["gradient"]))
        pair = {name: found.pop(name) for name in self.matrices}
        return self.add(gradients, found, now["chunk"]), message, pair, self.no_load

    def weight(self, state, now, gradients):
        """The weight gradients that B left, one layer at a time."""
        owners = self.note.owners(self.matrices)

        def layer(names, _, number):
            pairs = jax.tree.map(lambda buffer: buffer[now["pair"], number], state["pairs"])
            one = lambda name: weight_gradient(self.note.told[name][0], pairs[owners[name]].x, pairs[name].out)
            return None, {name: self.stage.ctx.scatter_parameter(one(name), name, self.dtype) for name in names}

        found, lengths = {}, [self.stage.length_of(name) for name in self.matrices]
        for length in dict.fromkeys(lengths):
            names = [name for name, own in zip(self.matrices, lengths) if own == length]
            found |= lax.scan(partial(layer, names), None, jnp.arange(length))[1]
        return self.add(gradients, found, now["chunk"]), self.empty(1)[0], self.no_pair(), self.no_load

    def add(self, gradients, found, chunk):
        """`gradients` with those of one micro-batch added; chunk: whose rows of the layers they are, None outside the layers."""
        summed = dict(gradients)
        for name, gradient in found.items():
            gradient, total = reduce_micro(gradient, self.stage.placements[name]), gradients[name]
            if total.shape != gradient.shape:
                size = self.stage.length_of(name)
                gradient += lax.dynamic_slice_in_dim(total, chunk * size, size)
                summed[name] = lax.dynamic_update_slice_in_dim(total, gradient, chunk * size, 0)
            else:
                summed[name] = total + gradient
        return summed

    def embed(self, microbatch, sinks):
        """[b, s, H] at a border, of one micro-batch's tokens."""
        tokens = lax.dynamic_index_in_dim(self.batch["tokens"], microbatch, keepdims=False)
        return self.stage.ends(self.weights, sinks).embed(tokens, self.stage.ctx.bind(self.stage.rows(self.batch, microbatch, self.moment)))

    def take_loss(self, now, message, state):
        """A micro-batch has left the last chunk: its loss, the gradients of norm and head, and the gradient of its output."""
        targets = lax.dynamic_index_in_dim(self.batch["targets"], now["losses"], keepdims=False)
        loss = lambda x, sinks: self.stage.loss(x, targets, self.weights, sinks) * self.scale
        value, (dx, found) = jax.value_and_grad(loss, argnums=(0, 1))(message, self.sinks(self.stage.exit))
        gradients, total, _ = state
        return self.add(gradients, found, None), total + value, dx

    def end(self, now, message, gradients):
        """A micro-batch is through the backward pass of the first chunk: the embedding's gradient."""
        _, pull = jax.vjp(lambda sinks: self.embed(now["ends"], sinks), self.sinks(self.stage.entry))
        found, = pull(jnp.where(self.stage.rank == self.table.first, message, 0))
        return self.add(gradients, found, None)


def scoped(branch, state, now):
    """A branch of the switch, named in the compiled program."""
    def run(gradients):
        with jax.named_scope(f"pipeline.{branch.__name__}"):
            return branch(state, now, gradients)
    return run


def when(condition, scope, do, state):
    """`do(state)` in the ticks for which `condition`, the same on all stages, holds; in the others `state`."""
    def taken(state):
        with jax.named_scope(scope):
            return jax.tree.map(match, do(state), state)
    return lax.cond(condition, taken, lambda state: state, state)


def at(buffer, slot):
    """What is in `slot`."""
    return lax.dynamic_index_in_dim(buffer, jnp.maximum(slot, 0), keepdims=False)


def put(buffer, value, slot):
    """`buffer` with `value` in `slot`; unchanged where slot is -1."""
    return lax.dynamic_update_index_in_dim(buffer, jnp.where(slot >= 0, value, at(buffer, slot)), jnp.maximum(slot, 0), 0)
