"""Settings of a pipeline: read and written, idle where they do nothing, and what a run says of its pipeline before it starts."""
import json
from dataclasses import replace

import pytest

import jaxpara
from jaxpara import checks, cli
from jaxpara.config import fill_auto
from jaxpara.pipeline import build, to_csv
from jaxpara.pipeline.placing import stack
from jaxpara.settings import configure, dumps, loads, recipe


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def load(**settings):
    """gpt_single with settings whose dots are written as two underscores."""
    return jaxpara.load("gpt_single", {name.replace("__", "."): value for name, value in settings.items()})


def recipes_own(**parts):
    """gpt_single whose own values are these, so that idle ones are notes."""
    return configure(recipe("gpt_single").change(**parts))


@pytest.mark.parametrize("typed", ["3,2,2,1", "3, 2, 2, 1", (3, 2, 2, 1), [3, 2, 2, 1], ["3", 2.0, 2, 1]])
def test_layers_per_stage(typed):
    run = load(mesh__pp=4, model__layers=8, parallel__layers_per_stage=typed)
    assert run.parallel.layers_per_stage == (3, 2, 2, 1) and checks.text(run.parallel.layers_per_stage) == "3,2,2,1"
    assert json.loads(dumps(run))["parallel"]["layers_per_stage"] == [3, 2, 2, 1]
    assert replace(loads(dumps(run)), notes=run.notes) == run
    assert stack(run).rows == (0, 1, 2, 3, 4, -1, 5, 6, -1, 7, -1, -1)


def test_layers_per_stage_may_be_none():
    assert load(mesh__pp=2, parallel__layers_per_stage="none").parallel.layers_per_stage is None
    assert json.loads(dumps(load()))["parallel"]["layers_per_stage"] is None


@pytest.mark.parametrize("typed", ["x,2", "3,", "", "3,2.5", "3;2", 4, [True, 3], [None]])
def test_what_is_no_list_of_layers(typed):
    with pytest.raises(jaxpara.ConfigError) as error:
        load(mesh__pp=2, parallel__layers_per_stage=typed)
    assert error.value.violations == (f"parallel.layers_per_stage = {typed!r}: needs whole numbers with commas between them, such as 3,2,2,1. "
                                      "Also legal: none.",)


def test_a_list_made_by_hand_is_taken():
    assert stack(replace(load(mesh__pp=2), parallel=replace(load().parallel, layers_per_stage=[1, 3]))).rows == (0, -1, -1, 1, 2, 3)


def test_the_setting_table_says_how_to_write_it(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["settings"]) == 0
    assert "whole numbers with commas" in capsys.readouterr().out


NOTES = {       # settings -> the notes of the run
    "circular": (dict(mesh__pp=4, train__microbatches=8), ["pipeline: circular, 4 stages, 8 micro-batches: bubble 27.3 %."]),
    "1f1b": (dict(mesh__pp=4, train__microbatches=8, parallel__schedule="1f1b"), ["pipeline: 1f1b, 4 stages, 8 micro-batches: bubble 27.3 %."]),
    "chunks": (dict(mesh__pp=2, train__microbatches=4, parallel__chunks=2),     # (p-1)/(v·m + p-1) = 1/9
               ["pipeline: circular, 2 stages of 2 chunks, 4 micro-batches: bubble 11.1 %."]),
    "no bubble": (dict(mesh__pp=2, train__microbatches=4, parallel__schedule="zb_v"),
                  ["pipeline: zb_v, 2 stages of 2 chunks, 4 micro-batches: bubble 0.0 %."]),
    "few micro-batches": (dict(mesh__pp=4, train__microbatches=2, parallel__schedule="gpipe"), [        # 3/5, and 3/19 for 16
        "pipeline: gpipe, 4 stages, 2 micro-batches: bubble 60.0 %.",
        "train.microbatches = 2 is less than mesh.pp = 4, so stages wait for work. With 16 micro-batches the bubble is 15.8 %."]),
    "one micro-batch": (dict(mesh__pp=2), [
        "pipeline: circular, 2 stages, 1 micro-batch: bubble 50.0 %.",
        "train.microbatches = 1 is less than mesh.pp = 2, so stages wait for work. With 8 micro-batches the bubble is 11.1 %."]),
    "padding": (dict(mesh__pp=4, train__microbatches=8, model__layers=5), [
        "pipeline: circular, 4 stages, 8 micro-batches: bubble 27.3 %.",
        "model.layers = 5 over 4 stages: 2 per chunk are stored and run, 3 rows are padding."]),
    "one row": (dict(mesh__pp=2, train__microbatches=4, parallel__chunks=2, model__layers=7), [
        "pipeline: circular, 2 stages of 2 chunks, 4 micro-batches: bubble 11.1 %.",
        "model.layers = 7 over 2 stages of 2 chunks: 2 per chunk are stored and run, 1 row is padding."]),
    "table": (dict(mesh__pp=2, train__microbatches=1, parallel__schedule_file="table.csv"), ["pipeline: table.csv, 2 stages, 1 micro-batch: bubble 50.0 %."]),
    "none": (dict(), []),
    "not yet known": (dict(mesh__pp="auto", parallel__schedule="zb_h1", parallel__chunks=7, parallel__gather_once=True, parallel__zero__pp=2,
                           parallel__layers_per_stage="1,3", parallel__scatter_inner=2, parallel__remat_tick=False), []),
}


@pytest.mark.parametrize("settings, notes", NOTES.values(), ids=NOTES)
def test_notes(settings, notes, tmp_path):
    (tmp_path / "table.csv").write_text(to_csv(build("gpipe", 2, 1)))
    assert list(load(**settings).notes) == notes


def test_notes_are_on_the_screen(capsys):
    assert cli.main("plan gpt_single --mesh.pp 4 --train.microbatches 2 --model.layers 5".split()) == 0
    out = " ".join(capsys.readouterr().out.split())
    for words in ("bubble 60.0 %.", "With 16 micro-batches the bubble is 15.8 %.", "3 rows are padding."):
        assert words in out


IDLE = {        # a recipe's own values -> its notes of what is idle
    "without a pipeline": (dict(parallel=dict(schedule="zb_v", chunks=2, schedule_file="a.csv", layers_per_stage=(2, 2), gather_once=True, remat_tick=False,
                                              zero=dict(pp=3))),
                           [f"parallel.{words} is idle: mesh.pp = 1." for words in (
                               "zero.pp = 3", "schedule = zb_v", "chunks = 2", "schedule_file = a.csv", "layers_per_stage = 2,2", "gather_once = true",
                               "remat_tick = false")]),
    "nothing to gather": (dict(mesh=dict(pp=2), parallel=dict(gather_once=True)),
                          ["parallel.gather_once = true is idle: no axis of more than one device has ZeRO stage 3, which alone gathers weights."]),
    "something to gather": (dict(mesh=dict(pp=2, fsdp=2), parallel=dict(gather_once=True)), []),
    "stages gather": (dict(mesh=dict(pp=2), parallel=dict(gather_once=True, zero=dict(pp=3))), []),
    "zero over stages": (dict(mesh=dict(pp=2), parallel=dict(zero=dict(pp=1))), []),
    "a tick kept": (dict(mesh=dict(pp=2), parallel=dict(remat_tick=False)), []),
    "no tick to keep": (dict(mesh=dict(pp=2), parallel=dict(remat_tick=False, schedule="1f1b")),
                        ["parallel.remat_tick = false is idle: parallel.schedule = 1f1b computes every chunk again from its input; "
                         "only circular can keep more."]),
    "steps over stages": (dict(mesh=dict(pp=4), parallel=dict(scatter_inner=2, zero=dict(pp=2))), []),
    "no steps over two stages": (dict(mesh=dict(pp=2), parallel=dict(scatter_inner=2, zero=dict(pp=2))),
                                 ["parallel.scatter_inner = 2 is idle: no axis with a ZeRO stage is larger."]),
    "a table and a kind": (dict(mesh=dict(pp=2), parallel=dict(schedule="1f1b", schedule_file="table.csv")),
                           ["parallel.schedule = 1f1b is idle: parallel.schedule_file = table.csv is the schedule."]),
}


@pytest.mark.parametrize("parts, notes", IDLE.values(), ids=IDLE)
def test_idle(parts, notes, tmp_path):
    (tmp_path / "table.csv").write_text(to_csv(build("gpipe", 2, 1)))
    assert [note for note in recipes_own(**parts).notes if " is idle: " in note] == notes


@pytest.mark.parametrize("axis", ["fsdp", "pp"])
def test_idle_is_said_once_an_axis_is_filled(axis):
    """gather_once with fsdp = auto, or pp = auto, may have something to gather: that is known when the axis is."""
    other = {"fsdp": dict(mesh__pp=2), "pp": {}}[axis]
    run = load(**{f"mesh__{axis}": "auto"}, parallel__gather_once=True, **other)
    assert "idle" not in " ".join(run.notes)
    filled = checks.checked(fill_auto(run, 2))
    (idle,) = [note for note in filled.notes if "idle" in note]
    assert idle.startswith("parallel.gather_once = true is idle: ")


def test_a_filled_axis_is_checked_again():
    run = load(mesh__pp="auto", parallel__schedule="zb_h1", train__microbatches=4)
    assert "4 stages" in checks.checked(fill_auto(run, 4)).notes[0]
    with pytest.raises(jaxpara.ConfigError) as error:
        checks.checked(fill_auto(run, 8))
    assert len(error.value.violations) == 1 and "train.microbatches = 4 is less than mesh.pp = 8" in str(error.value)
