"""Labels to axes: which rule is taken, and what is refused with which advice."""
import pytest

from jaxpara import ConfigError, Run
from jaxpara.config import AXES, Mesh
from jaxpara.rules import Rules, activation_rules, kv_replicated, labels_in_use, live, local_shape, parameter_rules, shards
from jaxpara.settings import configure

TABLE = [("batch", ("dp", "fsdp")), ("length", None), ("embed", "dp"), ("embed", "tp"), ("vocab", "tp")]


def test_a_spec_has_a_tuple_of_axes_per_dim():
    assert Rules(TABLE).spec(("batch", "length", "vocab")) == (("dp", "fsdp"), (), ("tp",))
    assert Rules(TABLE).spec(("length", None, "vocab")) == ((), (), ("tp",))
    assert Rules(TABLE).spec(()) == ()


def test_the_first_rule_with_free_axes_is_taken():
    assert Rules(TABLE).spec(("embed", "length")) == (("dp",), ())
    assert Rules(TABLE).spec(("batch", "embed")) == (("dp", "fsdp"), ("tp",))


@pytest.mark.parametrize("axis, guess", [("tpp", "tp"), ("fsd", "fsdp"), ("tensr", None)])
def test_an_unknown_axis_is_named_with_its_rule_and_the_known_ones(axis, guess):
    with pytest.raises(ConfigError) as caught:
        Rules([("mlp", axis)])
    message, = caught.value.violations
    assert message.startswith(f"Unknown mesh axis {axis!r} in the rule for 'mlp'. Known axes: {', '.join(AXES)}.")
    assert guess is None or message.endswith(f"Did you mean {guess}?")


def test_all_unknown_axes_are_reported_together():
    with pytest.raises(ConfigError) as caught:
        Rules([("a", "x1"), ("b", ("dp", "x2"))])
    assert len(caught.value.violations) == 2


def test_an_unknown_label_is_named_with_the_known_ones():
    with pytest.raises(ConfigError, match="No rule for label 'bach'. Known labels: batch, length, embed, vocab. Did you mean batch?"):
        Rules(TABLE).spec(("bach", "length"))


def test_an_axis_that_would_split_two_dims_is_refused_and_both_dims_named():
    with pytest.raises(ConfigError, match="Mesh axis 'tp' would split two dims of one array: 'vocab' and 'heads'"):
        Rules([("vocab", "tp"), ("heads", "tp")]).spec(("vocab", "heads"))


def test_a_collision_in_one_axis_of_several_is_refused_too():
    with pytest.raises(ConfigError, match="Mesh axis 'dp' would split two dims of one array: 'rows' and 'batch'"):
        Rules([("rows", "dp"), ("batch", ("fsdp", "dp"))]).spec(("rows", "batch"))


@pytest.mark.parametrize("on", [None, "tp"])
def test_a_label_for_two_dims_is_refused(on):
    with pytest.raises(ConfigError, match=r"Label 'vocab' stands for two dims of one array \('vocab', 'vocab'\)"):
        Rules([("vocab", on)]).spec(("vocab", "vocab"))


def test_unlabelled_dims_may_be_many():
    assert Rules(TABLE).spec((None, None)) == ((), ())


def test_rules_that_match_nothing_are_listed():
    assert Rules(TABLE).unmatched(("batch", "length", "embed", "vocab")) == []
    message, = Rules(TABLE).unmatched(("batch", "length", "embed"))
    assert message == "The rule for 'vocab' matches no dim. Labels in use: batch, length, embed."


def run_of(style="llama", experts=0, **overrides):
    return configure(Run().change(model=dict(style=style, heads=8, kv_heads=2, width=24, head_dim=6, ffn=40, moe=dict(experts=experts))),
                     {name.replace("__", "."): value for name, value in overrides.items()})


@pytest.mark.parametrize("style", ["llama", "gpt2"])
def test_every_parameter_label_has_a_rule_and_no_rule_is_left_over(style):
    used = set()
    for given in (("llama",), ("gpt2",), ("llama", 4)):
        used |= set(labels_in_use(run_of(*given).model))
    assert parameter_rules(run_of(style)).unmatched(used) == []
    assert set(labels_in_use(run_of(style).model)) <= {label for label, _ in parameter_rules(run_of(style)).table}


def test_kv_heads_are_whole_when_tp_is_larger():
    few, many = run_of(mesh__tp=4), run_of(mesh__tp=2)
    assert kv_replicated(few) and not kv_replicated(many)
    for rules in (parameter_rules, activation_rules):
        assert rules(few).spec(("heads", "kv_heads")[1:]) == ((),)
        assert rules(many).spec(("kv_heads",)) == (("tp",),)


def test_the_border_takes_tp_too_under_megatron_sp():
    plain, split = run_of(mesh__tp=2), run_of(mesh__tp=2, parallel__tp_sequence=True)
    assert activation_rules(plain).spec(("batch", "border", "width")) == (("dp", "fsdp", "ep"), ("sp",), ())
    assert activation_rules(split).spec(("batch", "border", "width")) == (("dp", "fsdp", "ep"), ("sp", "tp"), ())
    assert activation_rules(split).spec(("sequence",)) == (("sp",),)


def test_axes_of_one_device_are_left_out():
    mesh = Mesh(dp=2, tp=3)
    assert live((("dp", "fsdp", "ep"), (), ("tp",)), mesh) == (("dp",), (), ("tp",))
    assert shards((("dp", "tp"), (), ("tp",)), mesh) == (6, 1, 3)


def test_a_local_shape_is_the_piece_of_one_device():
    assert local_shape((12, 5, 9), (("dp", "tp"), (), ("tp",)), Mesh(dp=2, tp=3)) == (2, 5, 3)


def test_a_dim_that_does_not_split_is_refused_with_the_nearest_that_do():
    with pytest.raises(ConfigError, match="A dim of 17 does not split over dp × tp = 6; nearest multiples: 12, 18."):
        local_shape((17, 3), (("dp", "tp"), ()), Mesh(dp=2, tp=3))
    with pytest.raises(ConfigError, match="A dim of 2 does not split over tp = 3; nearest multiples: 3, 3|nearest multiples: 3"):
        local_shape((2,), (("tp",),), Mesh(tp=3))
