"""The split of the backward pass: B gives the same input gradient, W the same weight gradient, and the program does each once."""
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import small

from jaxpara.context import ManualCtx, Stored
from jaxpara.gradients import rows_of
from jaxpara.hlo import parse
from jaxpara.model.declare import fill
from jaxpara.taps import Note, Teller, weight_gradient

SPECS = {"bsh,hnd->bsnd": ((2, 3, 4), (4, 5, 6)), "bsnd,ndh->bsh": ((2, 3, 5, 6), (5, 6, 4)),
         "bsh,hf->bsf": ((2, 3, 4), (4, 7)), "bsf,fh->bsh": ((2, 3, 7), (7, 4))}


@pytest.mark.parametrize("spec", SPECS)
def test_a_weight_gradient_is_autodiffs(spec):
    generator = np.random.default_rng(0)
    x, weight = (jnp.asarray(generator.standard_normal(shape), jnp.float32) for shape in SPECS[spec])
    out, pull = jax.vjp(lambda weight: jnp.einsum(spec, x, weight), weight)
    cotangent = jnp.asarray(generator.standard_normal(out.shape), jnp.float32)
    assert np.asarray(weight_gradient(spec, x, cotangent)) == pytest.approx(np.asarray(pull(cotangent)[0]), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("overrides", [{}, {"model__style": "gpt2", "model__kv_heads": 8}, {"parallel__remat": "full"},
                                       {"parallel__remat": "selective"}], ids=["llama", "gpt2", "full", "selective"])
def test_a_tapped_chunk_gives_the_same_gradients(overrides):
    """One chunk, all layers of a small model on one device: dx and what has no tap bit for bit; the pairs give autodiff's weight gradients."""
    program = small.program(**overrides)
    batch = {name: array[0] for name, array in program.put(small.batch()).items()}
    weights = {name: value for name, value in small.start(program).params.items() if name.startswith("layers.")}
    matrices = [name for name in weights if program.placements[name].parameter.matrix]
    ctx = ManualCtx(program.run, program.placements, rows_of(batch, program.run, None))
    x, cotangent = (jax.random.normal(jax.random.key(seed), (small.ROWS, small.SEQ, 20)) for seed in (0, 1))

    def chunk(x, sinks):
        stored = {name: Stored(weights[name], sinks[name], name) for name in weights}
        return fill(program.model, stored).blocks(x, jnp.arange(program.run.model.layers), ctx)[0]

    note, zeros = Note(), {name: jnp.zeros_like(value) for name, value in weights.items()}
    jax.eval_shape(lambda: chunk(x, {**zeros, **{name: Teller(name, note) for name in matrices}}))
    taps = note.taps(matrices, dict.fromkeys(matrices, program.run.model.layers))
    pull = jax.jit(lambda sinks: jax.vjp(chunk, x, sinks)[1](cotangent))
    (plain_dx, plain), (dx, found) = pull(zeros), pull({**zeros, **taps})
    assert (np.asarray(dx) == np.asarray(plain_dx)).all() and np.abs(dx).max() > 0
    owners = note.owners(matrices)
    assert len({owners[f"layers.attention.{part}"] for part in ("query", "key", "value")}) == 1, "three matmuls of one input keep it once"
    assert owners["layers.attention.output"] == "layers.attention.output"
    for name in weights:
        if name in matrices:
            one = partial(weight_gradient, note.told[name][0])
            gradient = jax.vmap(one)(found[owners[name]].x, found[name].out)
            assert np.asarray(gradient) == pytest.approx(np.asarray(plain[name]), rel=1e-5, abs=1e-5 * float(np.abs(plain[name]).max()))
        else:
            assert (np.asarray(found[name]) == np.asarray(plain[name])).all()


def scoped(schedule):
    """{scope: opcodes of the compiled instructions in it} of the ops in a pipeline of two stages."""
    program = small.program(mesh__pp=2, train__microbatches=2, parallel__schedule=schedule)
    instructions = [one for computation in parse(program.compiled[0].as_text()).computations.values() for one in computation.instructions]
    return {scope: [one.opcode for one in instructions if f"pipeline.{scope}/" in one.op_name] for scope in ("forward", "backward", "weight")}


def test_w_is_the_weight_einsums_and_nothing_else():
    """The seven matrices of a Llama layer: seven matmuls in W, no attention, no norm; B has seven fewer than an unsplit one, whose forward
    is the same."""
    split, whole = scoped("zb_h1"), scoped("1f1b")
    dots = {(scope, name): found[scope].count("dot") for name, found in (("split", split), ("whole", whole)) for scope in found}
    assert dots["weight", "split"] == 7 and dots["weight", "whole"] == 0
    assert dots["backward", "whole"] - dots["backward", "split"] == 7
    assert dots["forward", "whole"] == dots["forward", "split"] >= 7 + 2
    assert not {"exponential", "rsqrt", "tanh", "logistic", "divide", "custom-call"} & set(split["weight"])
    assert {"exponential", "rsqrt"} <= set(split["backward"])
