"""What a user sees of a pipeline is the model in its own order: the same start on every mesh, parameters layer by layer, logits."""
import numpy as np
import pytest

import jaxpara
from equivalence.hard import hard_batch, make_run
from equivalence.matrix import on_one_device, settings


@pytest.mark.parametrize("case", ["llama pp2 tp2 m2 L5 zb_v megatron zpp3", "gpt2 pp4 sp2 m4 v2 L8 circular zigzag unchecked"])
def test_views_are_those_of_one_device(case):
    overrides, batch = settings(case)[0], hard_batch()
    one, piped = (jaxpara.build(make_run(chosen, "float64")) for chosen in (on_one_device(overrides), overrides))
    start, state = one.params(one.init()), piped.init()
    drawn = piped.params(state)
    assert list(drawn) == list(start) and all((drawn[path] == start[path]).all() for path in start)
    again = piped.params(piped.init(start))
    assert all((again[path] == start[path]).all() for path in start)
    expected, logits = one.logits(one.init(), batch), piped.logits(state, batch)
    assert np.abs(logits - expected).max() < 1e-12 * np.abs(expected).max()
    swapped = {path: start[path.replace("layers.0.", "layers.x.").replace("layers.1.", "layers.0.").replace("layers.x.", "layers.1.")] for path in start}
    assert np.abs(piped.logits(piped.init(swapped), batch) - expected).max() > 1e-3 * np.abs(expected).max(), "the order of layers shows"


def test_padding_stays_zero():
    """Rows that hold no layer are stored as zeros and are after a step of AdamW."""
    program = jaxpara.build(make_run(settings("llama pp2 m2 L5 circular")[0], "float32"))
    state, _ = program.step(program.init(), hard_batch())
    stored, rows = np.asarray(state.params["layers.mlp.up"]), program.placements["layers.mlp.up"].stack.rows
    assert -1 in rows and all((stored[row] == 0).all() == (layer < 0) for row, layer in enumerate(rows))
