"""Schedules that users write as CSV files: trained, and equal to one device."""
from dataclasses import replace
from functools import cache

import pytest
from equivalence.hard import awake, error, hard_batch, make_run
from executors.test_lockstep import odd

import jaxpara
from jaxpara.pipeline import Entry, build, to_csv

BY_HAND = """stage,tick,op,microbatch,chunk
0,0,F,1,0
0,1,F,0,0
1,2,F,0,1
1,3,B,0,1
1,5,F,1,1
0,5,B,0,0
1,6,B,1,1
1,7,W,1,1
0,7,B,1,0
0,8,W,1,0
1,9,W,0,1
0,10,W,0,0
"""
"""Micro-batch 1 enters first and is overtaken; ticks in which nobody works; the first B's W comes last."""


def stretched(schedule):
    """The same ops with an idle tick after every third, and two before the first."""
    entries = tuple(Entry(2 + tick + tick // 3, stage, op) for tick, stage, op in schedule.entries)
    return to_csv(replace(schedule, entries=entries))


TABLES = {"by hand": (2, 2, BY_HAND), "stretched 1f1b": (4, 3, stretched(build("1f1b", 4, 3))),
          "placement 0 2 1": (3, 4, to_csv(odd((0, 2, 1), 4))), "placement 1 0 0 1": (2, 3, to_csv(odd((1, 0, 0, 1), 3, split=True))),
          "placement 2 0 1": (3, 3, to_csv(odd((2, 0, 1), 3, split=True)))}


@cache
def one_device():
    program = jaxpara.build(make_run({"model.layers": 5}, "float64", "sgd"))
    start = awake(program.params(program.init()))
    return start, program.loss_and_grads(program.init(start), hard_batch())


@pytest.mark.parametrize("name", TABLES)
def test_a_table_trains_as_one_device(name, tmp_path):
    """Float64: loss, norm and every gradient, which a step of plain SGD at rate 1 shows; five layers, so that chunks differ in length."""
    stages, microbatches, text = TABLES[name]
    file = tmp_path / "table.csv"
    file.write_text(text)
    start, (loss, grads) = one_device()
    run = make_run({"model.layers": 5, "mesh.pp": stages, "train.microbatches": microbatches, "parallel.schedule_file": str(file)}, "float64", "sgd")
    program = jaxpara.build(run)
    state, metrics = program.step(program.init(start), hard_batch())
    after = program.params(state)
    assert abs(metrics["loss"] / loss - 1) < 1e-9
    assert error({path: start[path] - after[path] for path in start}, grads)[0] < 1e-9
    assert abs(metrics["grad_norm"] ** 2 / sum((leaf ** 2).sum() for leaf in grads.values()) - 1) < 1e-9
