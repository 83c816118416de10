"""Time and memory of schedules against published numbers and closed forms."""
import pytest
from hypothesis import assume, given, settings, strategies as st

from jaxpara.errors import ConfigError
from jaxpara.pipeline import KINDS, Entry, Op, Schedule, Times, build, memory, simulate
from jaxpara.pipeline.formulas import bubble_fraction, bubble_time
from jaxpara.pipeline.simulate import assign, spans

near = lambda value: pytest.approx(value, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("kind, makespan, bubble, live", [
    ("gpipe", 33, 9, (8, 8, 8, 8)), ("1f1b", 33, 9, (4, 3, 2, 1)), ("zb_h1", 27, 3, (4, 4, 4, 4))])
def test_unit_vector(kind, makespan, bubble, live):
    """p = 4, m = 8, F = B = W = 1."""
    schedule = build(kind, 4, 8)
    result = simulate(schedule)
    assert (result.makespan, result.span, result.bubble, memory(schedule).live) == (makespan, makespan, bubble, live)
    assert result.busy == (24,) * 4 and result.idle == (bubble,) * 4


QI = [      # Qi et al. 2023: p, m, (F, B, W, hop) in ms, bubble rates of 1F1B and ZB-H1
    (8, 24, (18.522, 18.086, 9.337, .601), .2431, .1585),
    (8, 32, (18.513, 18.086, 9.331, .626), .1985, .1242),
    (8, 64, (18.546, 18.097, 9.321, .762), .1240, .0674),
    (8, 24, (29.718, 29.444, 19.927, .527), .2347, .1323),
    (8, 32, (29.802, 29.428, 19.530, .577), .1898, .1045),
    (8, 64, (29.935, 29.621, 19.388, .535), .1091, .0554)]


@pytest.mark.parametrize("p, m, times, plain, zero", QI)
def test_measured_bubble_rates(p, m, times, plain, zero):
    for kind, rate in (("1f1b", plain), ("zb_h1", zero)):
        assert round(simulate(build(kind, p, m), Times(*times)).bubble_fraction, 4) == rate
        without = simulate(build(kind, p, m), Times(*times[:3])).bubble_fraction
        assert round(without, 4) != rate, "the hop matters"


grid = given(st.sampled_from(sorted(KINDS)), st.integers(1, 7), st.integers(1, 24), st.integers(1, 4),
             st.tuples(*[st.integers(1, 9)] * 3))


@settings(max_examples=200, deadline=None)
@grid
def test_closed_forms(kind, p, m, v, times):
    """Every closed form there is, for random p, m, v and F, B, W; hop 0."""
    v = KINDS[kind].chunks or v
    m = p * (1 + m % 4) if kind == "interleaved" else m if KINDS[kind].any_m else m + p - 1
    closed = bubble_time(kind, p, m, v, times)
    assume(closed is not None)
    result = simulate(build(kind, p, m, v), Times(*times))
    assert result.bubble == near(closed)
    assert result.busy == near((m * sum(times),) * p)
    if times[0] == times[1] == times[2]:
        assert result.bubble_fraction == near(bubble_fraction(kind, p, m, v))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 8), st.integers(1, 20), st.integers(1, 4))
def test_fractions_of_time(p, m, v):
    """(p-1)/(m+p-1) of GPipe and 1F1B; (p-1)/(v·m+p-1) of the circular form, of v·p+m-1 ticks when m < p."""
    for kind in ("gpipe", "1f1b"):
        assert simulate(build(kind, p, m)).bubble_fraction == near((p - 1) / (m + p - 1))
    ticks = v * m + p - 1 if m >= p else v * p + m - 1
    assert simulate(build("circular", p, m, v)).bubble_fraction == near((ticks - v * m) / ticks)
    assert simulate(build("interleaved", p, p * m, v)).bubble == near((p - 1) * 3 / v)


@pytest.mark.parametrize("p", [1, 2, 4, 7])
def test_zero_bubbles(p):
    assert simulate(build("zb_v", p, 2 * p + 3)).bubble == near(0)
    assert simulate(build("zb_h2", p, 2 * p + 3)).bubble == near(0)
    assert simulate(build("zb_h2", p, 2 * p + 3), Times(1.2, 1, .5)).bubble == near((p - 1) * 1.2)
    assert simulate(build("dualpipe_v", p, 2 * p + 3)).bubble == near((p - 1) / 2)


def test_the_bubble_of_zb_h2_is_not_in_the_makespan():
    """Every stage ends later than the one before, and begins the next step later."""
    result = simulate(build("zb_h2", 4, 8))
    assert (result.makespan, result.span, result.bubble) == (27, 24, 0)


def test_closed_forms_that_do_not_hold_are_not_given():
    for kind, p, m, times in [("zb_h1", 4, 8, (1, 1, 2)), ("zb_h2", 4, 6, (1, 1, 1)), ("zb_v", 4, 8, (1, 1, 2)), ("zb_v", 4, 5, (1, 1, 1)),
                              ("dualpipe_v", 4, 7, (1, 1, 1)), ("dualpipe_v", 4, 8, (1, 2, 1)), ("dualpipe_v", 4, 8, (3, 1, 1))]:
        assert bubble_time(kind, p, m, KINDS[kind].chunks, times) is None
    assert bubble_fraction("zb_v", 4, 5, 2) == near(simulate(build("zb_v", 4, 5)).bubble_fraction)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(1, 4), st.integers(2, 4))
def test_live_activations(p, turns, v):
    m = p * turns
    assert memory(build("gpipe", p, m)).live == (m,) * p
    assert memory(build("1f1b", p, m)).live == tuple(p - i for i in range(p))
    assert memory(build("zb_h1", p, m)).live == (p,) * p
    many = 2 * m
    assert memory(build("zb_h2", p, many)).live == (2 * p - 1,) * p
    assert memory(build("zb_v", p, many)).live == (2 * p,) * p                   # half stages: p of whole ones
    assert memory(build("dualpipe_v", p, many)).live == (2 * p + 1,) * p
    assert memory(build("interleaved", p, many, v)).live[0] == p * v + p - 1     # p·(1 + (p-1)/(p·v)) of whole ones
    assert memory(build("circular", p, m, v)).live == (v * m,) * p


def test_counts():
    held = memory(build("zb_h1", 4, 8))
    assert held.inputs == (4, 3, 2, 1) and held.pairs == (1, 2, 3, 4)
    assert held.gradients == (1, 1, 1, 1)               # the last stage's B follows its F, so one loss gradient waits at a time
    assert memory(build("gpipe", 4, 8)).gradients == (1, 1, 1, 8)       # those of the last stage wait until all F are done
    assert memory(build("circular", 2, 4, 2)).gradients == (1, 4)
    assert held.slots == (4, 4, 3, 2) and held.buffers == 4
    assert memory(build("1f1b", 4, 8)).pairs == (0,) * 4
    assert memory(build("zb_v", 4, 8)).slots == (8, 9, 9, 9)


def late():
    """Two stages, two micro-batches: stage 1 takes up what arrives at ticks 1 and 2 only at ticks 3 and 5."""
    cells = [(0, 0, "F", 0), (1, 0, "F", 1), (3, 1, "F", 0), (4, 1, "B", 0), (5, 0, "B", 0), (5, 1, "F", 1), (6, 1, "B", 1), (7, 0, "B", 1)]
    return Schedule(tuple(Entry(tick, stage, Op(kind, b, stage)) for tick, stage, kind, b in cells), (0, 1), 2, False)


def test_slots_count_from_arrival():
    held = memory(late())
    assert held.live == (2, 1) and held.slots == (2, 2)
    assert spans(late(), "arrival", "B") == {(0, 0): (0, 5), (1, 0): (1, 7), (0, 1): (1, 4), (1, 1): (2, 6)}
    assert spans(late(), "gradient", "B") == {(0, 0): (5, 5), (1, 0): (7, 7), (0, 1): (4, 4), (1, 1): (6, 6)}
    assert held.gradients == (1, 1)


def test_the_last_gradient_counts_from_its_forward():
    """Stage 1 does both F, at ticks 1 and 2, before it does their B at ticks 3 and 5: from tick 3 on it holds two gradients of the loss."""
    cells = [(0, 0, "F", 0), (1, 0, "F", 1), (1, 1, "F", 0), (2, 1, "F", 1), (3, 1, "B", 0), (4, 0, "B", 0), (5, 1, "B", 1), (6, 0, "B", 1)]
    table = Schedule(tuple(Entry(tick, stage, Op(kind, b, stage)) for tick, stage, kind, b in cells), (0, 1), 2, False)
    assert spans(table, "gradient", "B") == {(0, 1): (2, 3), (1, 1): (3, 5), (0, 0): (4, 4), (1, 0): (6, 6)}
    assert memory(table).gradients == (1, 2)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(KINDS)), st.integers(1, 5), st.integers(1, 3))
def test_slots_are_assigned_without_clashes(kind, p, turns):
    schedule = build(kind, p, p * turns)
    for begin, peaks in (("arrival", memory(schedule).slots), ("F", memory(schedule).inputs), ("gradient", memory(schedule).gradients)):
        kept = spans(schedule, begin, "B")
        slots = assign(schedule, kept)
        for stage in range(p):
            mine = [key for key in kept if schedule.placement[key[1]] == stage]
            assert 1 + max((slots[key] for key in mine), default=-1) == peaks[stage]
            used = [(slots[key], tick) for key in mine for tick in range(kept[key][0], kept[key][1] + 1)]
            assert len(used) == len(set(used))


def test_event_times_by_hand():
    """Two stages, one micro-batch, uneven stages and hops: 2 + .5 + 1, then 3 + .25 + 5."""
    result = simulate(build("gpipe", 2, 1), Times((2, 1), (4, 2), (1, 1), (.5, .25)))
    assert result.starts == {Op("F", 0, 0): 0, Op("F", 0, 1): 2.5, Op("B", 0, 1): 3.5, Op("B", 0, 0): 6.75}
    assert (result.makespan, result.span, result.busy, result.bubble) == (11.75, 11.75, (7, 4), 4.75)
    assert result.lockstep == 2 + 1 + 3 + 5 + 4 * .5


def test_no_hop_inside_a_stage():
    """The V turns on the last stage; one stage alone never sends."""
    result = simulate(build("zb_v", 2, 2), Times(hop=10))
    turn = [result.starts[Op("F", 0, chunk)] for chunk in range(4)]
    assert turn == [0, 10.5, 11, 21.5]
    assert simulate(build("circular", 1, 3, 2), Times(hop=10)).makespan == 9


def test_times_of_chunks():
    one = simulate(build("interleaved", 2, 2, 2), Times(forward=(2, 4)))
    other = simulate(build("interleaved", 2, 2, 2), Times(forward=(1, 2, 1, 2)))
    assert one == other and one.busy == (2 * 4, 2 * 6)
    uneven = simulate(build("1f1b", 4, 8), Times(forward=(1, 1, 1, 2), backward=(1, 1, 1, 2), weight=(1, 1, 1, 2)))
    assert uneven.busy == (24, 24, 24, 48) and uneven.makespan == 3 + 48 + 6


@pytest.mark.parametrize("times", [Times(forward=(1, 2)), Times(hop=(1,) * 5), Times(weight=-1), Times(backward=(1, 1, 1, -1))])
def test_times_that_do_not_fit(times):
    with pytest.raises(ConfigError, match="one number, or one for each of 4 stages"):
        simulate(build("1f1b", 4, 8), times)


def test_stages_that_meet_after_every_tick():
    """1F1B mixes F and the twice as long B in a tick; GPipe does not."""
    assert simulate(build("gpipe", 4, 8)).lockstep == 33
    assert simulate(build("1f1b", 4, 8)).lockstep == 3 + 1 + 18 * 2
