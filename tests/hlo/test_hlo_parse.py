"""Hand-written modules: every form a collective takes in HLO text, each with its right value."""
import pytest

from jaxpara.hlo import HloError, bits, collectives, parse

ADD = """%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""
GLOBAL = "channel_id=1, use_global_device_ids=true"


def module(*lines, before="", scheduled=True, partitions=8):
    """An HLO module whose entry has these instructions after two parameters, %x f32[64,4] and %y bf16[16]."""
    body = "\n".join(f"  {line}" for line in lines)
    return (f"HloModule jit_f, {'is_scheduled=true, ' * scheduled}num_partitions={partitions}\n\n{ADD}\n{before}\n"
            f"ENTRY %main (x: f32[64,4], y: bf16[16]) -> f32[] {{\n  %x = f32[64,4]{{1,0}} parameter(0)\n  %y = bf16[16]{{0}} parameter(1)\n{body}\n}}\n")


def only(text):
    found = collectives(text)
    assert len(found) == 1, found
    return found[0]


def of(collective):
    return collective.kind, collective.dtype, collective.elements, collective.calls


FOUR = "replica_groups=[2,4]<=[8]"


@pytest.mark.parametrize("line, expected, wire", [
    (f"ROOT %c = f32[64,4]{{1,0}} all-reduce(%x), {GLOBAL}, {FOUR}, to_apply=%add", ("all-reduce", "f32", 256, 1), 2 * 1024 * 3 // 4),
    (f"ROOT %c = f32[256,4]{{1,0}} all-gather(%x), {GLOBAL}, {FOUR}, dimensions={{0}}", ("all-gather", "f32", 1024, 1), 4096 * 3 // 4),
    (f"ROOT %c = f32[16,4]{{1,0}} reduce-scatter(%x), {GLOBAL}, {FOUR}, dimensions={{0}}, to_apply=%add", ("reduce-scatter", "f32", 256, 1), 768),
    (f"ROOT %c = bf16[16]{{0}} all-to-all(%y), channel_id=1, {FOUR}, dimensions={{0}}", ("all-to-all", "bf16", 16, 1), 24),
    ("ROOT %c = bf16[16]{0} collective-permute(%y), channel_id=1, source_target_pairs={{0,1},{1,0}}", ("permute", "bf16", 16, 1), 32),
    # operands with their shapes, tiled layouts, names without %
    (f"ROOT c = f32[256,4]{{1,0:T(8,128)S(1)}} all-gather(f32[64,4]{{1,0:T(8,128)(2,1)}} x), {GLOBAL}, {FOUR}, dimensions={{0}}",
     ("all-gather", "f32", 1024, 1), 3072),
    # groups of one are listed and send nothing
    (f"ROOT %c = f32[64,4] all-reduce(%x), {GLOBAL}, replica_groups=[8,1]<=[8], to_apply=%add", ("all-reduce", "f32", 256, 1), 0),
    ("ROOT %c = bf16[16] collective-permute(%y), channel_id=1, source_target_pairs={{0,0},{1,1}}", ("permute", "bf16", 16, 1), 0),
    (f"ROOT %c = bf16[16] ragged-all-to-all(%y, %y, %y, %y, %y, %y), channel_id=1, {FOUR}", ("all-to-all", "bf16", 16, 1), 24),
])
def test_kinds(line, expected, wire):
    found = only(module(line))
    assert of(found) == expected and found.wire == wire
    assert not (found.loops or found.conditional or found.uncertain or found.is_async or found.overlapped or found.disguise)


@pytest.mark.parametrize("dtype, dims, size", [("s32", "8,4,1", 128), ("pred", "16", 16), ("u32", "5", 20), ("s64", "3", 24), ("f8e4m3fn", "7", 7),
                                               ("f8e5m2", "7", 7), ("s4", "7", 4), ("bf16", "7", 14), ("f64", "2", 16), ("c64", "2", 16), ("u8", "", 1)])
def test_integers_bools_and_small_floats_count(dtype, dims, size):
    """CASES H3."""
    found = only(module(f"%i = {dtype}[{dims}] bitcast(%x)", f"ROOT %c = {dtype}[{dims}] all-reduce(%i), {GLOBAL}, {FOUR}, to_apply=%add"))
    assert (found.dtype, found.bytes) == (dtype, size)


def test_an_unknown_element_type_is_an_error():
    assert bits("f8e8m0fnu") == 8
    with pytest.raises(HloError, match="f7"):
        bits("f7")


def test_combined_operations_count_once_per_operand():
    """Each with its own op_name, where XLA wrote down as many as there are operands."""
    names = "jit(f)/(loss.total/psum:zero0.sum.head.weight/psum)"
    text = lambda name: module(f"ROOT %c = (f32[64,4]{{1,0}}, /*index=1*/bf16[16]{{0}}) all-reduce(%x, /*index=1*/%y), {GLOBAL}, {FOUR}, to_apply=%add, "
                               f'metadata={{op_name="{name}" stack_frame_id=7}}')
    found = collectives(text(names))
    assert [of(c) for c in found] == [("all-reduce", "f32", 256, 1), ("all-reduce", "bf16", 16, 1)] and {c.parts for c in found} == {2}
    assert [c.op_name for c in found] == ["jit(f)/loss.total/psum", "jit(f)/zero0.sum.head.weight/psum"]
    assert [c.op_name for c in collectives(text("jit(f)/(a:b:c)"))] == ["jit(f)/(a:b:c)"] * 2
    assert [c.op_name for c in collectives(text("jit(f)/jvp(a)/psum"))] == ["jit(f)/jvp(a)/psum"] * 2


def test_all_to_all_in_pieces():
    """CASES R7: on CPU one piece per peer, in a tuple."""
    found = only(module("%a = f32[2,4] slice(%x)", "%b = f32[2,4] slice(%x)",
                        "ROOT %c = (f32[2,4]{1,0}, f32[2,4]{1,0}) all-to-all(%a, %b), channel_id=1, replica_groups={{0,1},{2,3},{4,5},{6,7}}"))
    assert of(found) == ("all-to-all", "f32", 16, 1) and found.wire == 32


def loop(trips="", condition=None, body="", init="%zero = s32[] constant(0)", bound=6, step=1, root=""):
    """A while loop around an all-reduce of its state's second element; (computations, entry lines)."""
    condition = condition or "ROOT %less = pred[] compare(%at, %bound), direction=LT"
    before = f"""%condition (s: (s32[], f32[64,4])) -> pred[] {{
  %s = (s32[], f32[64,4]) parameter(0)
  %at = s32[] get-tuple-element(%s), index=0
  %bound = s32[] constant({bound})
  {condition}
}}

%body (t: (s32[], f32[64,4])) -> (s32[], f32[64,4]) {{
  %t = (s32[], f32[64,4]) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %step = s32[] constant({step})
  %next = s32[] add(%i, %step)
  %w = f32[64,4] get-tuple-element(%t), index=1
  %inner = f32[64,4] all-reduce(%w), {GLOBAL}, {FOUR}, to_apply=%add
  {body}
  ROOT %out = (s32[], f32[64,4]) tuple(%next, %inner)
}}
"""
    return before, (init, "%start = (s32[], f32[64,4]) tuple(%zero, %x)",
                    f"ROOT %loop = (s32[], f32[64,4]) while(%start), condition=%condition, body=%body{trips}")


@pytest.mark.parametrize("trips", [', backend_config={"known_trip_count":{"n":"5"},"known_init_step":{"init":"0","step":"1"}}',
                                   r', backend_config="{\"known_trip_count\":{\"n\":\"5\"}}"'])
def test_trip_counts_that_xla_wrote_down(trips):
    before, lines = loop(trips)
    found = only(module(*lines, before=before))
    assert found.calls == 5 and found.loops == ("loop",) and found.computation == "body" and not found.uncertain


@pytest.mark.parametrize("changes, passes", [
    ({}, 6), ({"step": 2, "bound": 7}, 4), ({"init": "%zero = s32[] constant(4)"}, 2), ({"init": "%zero = s32[] constant(9)"}, 0),
    ({"condition": "ROOT %more = pred[] compare(%bound, %at), direction=GE"}, 7),
    ({"condition": "ROOT %down = pred[] compare(%at, %bound), direction=GT", "init": "%zero = s32[] constant(10)", "step": -1}, 4),
    ({"condition": "%a = pred[] compare(%at, %bound), direction=LT\n  ROOT %b = pred[] and(%a, %a)"}, 6),
])
def test_trip_counts_from_the_counter(changes, passes):
    before, lines = loop(**changes)
    found = only(module(*lines, before=before))
    assert found.calls == passes and not found.uncertain


@pytest.mark.parametrize("changes", [{"init": "%zero = s32[] bitcast(%x)"}, {"condition": "ROOT %r = pred[] custom-call(%at)"}, {"step": 0}])
def test_an_unknown_trip_count_is_one_and_says_so(changes):
    before, lines = loop(**changes)
    found = only(module(*lines, before=before))
    assert found.calls == 1 and "loop" in found.uncertain


def test_nested_loops_multiply():
    """A fused condition too, as XLA:CPU writes it."""
    before, lines = loop(', backend_config={"known_trip_count":{"n":"3"}}')
    inner, _ = loop(condition="ROOT %less = pred[] fusion(%at), kind=kLoop, calls=%fused", bound=4)
    inner = inner.replace("%condition", "%inner_condition").replace("%body", "%inner_body").replace("%inner =", "%deep =").replace("%inner)", "%deep)")
    fused = "%fused (p: s32[]) -> pred[] {\n  %p = s32[] parameter(0)\n  %c = s32[] constant(4)\n  ROOT %r = pred[] compare(%p, %c), direction=LT\n}\n"
    within = ("%z = s32[] constant(0)\n  %st = (s32[], f32[64,4]) tuple(%z, %inner)\n"
              "  %deeper = (s32[], f32[64,4]) while(%st), condition=%inner_condition, body=%inner_body\n")
    before = before.replace("  ROOT %out", f"  {within}  ROOT %out")
    found = {c.name: c for c in collectives(module(*lines, before=fused + inner + before))}
    assert {name: (c.calls, c.loops) for name, c in found.items()} == {"inner": (3, ("loop",)), "deep": (12, ("loop", "deeper"))}


def test_a_condition_runs_once_more_than_its_body():
    before, lines = loop(condition=f"%sync = s32[] all-reduce(%at), {GLOBAL}, {FOUR}, to_apply=%add\n  ROOT %less = pred[] compare(%at, %bound), direction=LT")
    assert {c.name: c.calls for c in collectives(module(*lines, before=before))} == {"sync": 7, "inner": 6}


@pytest.mark.parametrize("branches", ["true_computation=%first, false_computation=%second", "branch_computations={%first, %second}"])
def test_both_branches_at_most_once(branches):
    branch = lambda name, instruction: f"%{name} (p: f32[64,4]) -> f32[64,4] {{\n  %p = f32[64,4] parameter(0)\n  ROOT %{instruction}\n}}\n"
    before = (branch("first", f"one = f32[64,4] all-reduce(%p), {GLOBAL}, {FOUR}, to_apply=%add")
              + branch("second", "two = f32[64,4] collective-permute(%p), channel_id=2, source_target_pairs={{0,1}}"))
    found = collectives(module("%which = pred[] custom-call()", f"ROOT %c = f32[64,4] conditional(%which, %x, %x), {branches}", before=before))
    assert [(c.name, c.kind, c.calls, c.conditional) for c in found] == [("one", "all-reduce", 1, True), ("two", "permute", 1, True)]


def test_asynchronous_forms_and_what_they_overlap():
    found = collectives(module(
        f"%g = (f32[64,4], f32[256,4]) all-gather-start(%x), {GLOBAL}, {FOUR}, dimensions={{0}}",
        "%dot.1 = f32[64,64] dot(%x, %x)",
        "%p = (bf16[16], bf16[16], u32[], u32[]) collective-permute-start(%y), channel_id=2, source_target_pairs={{0,1},{1,2},{2,0}}",
        "%one = s32[] constant(1)",
        "%fusion.2 = f32[64,4] fusion(%x), kind=kLoop, calls=%add",
        "%gd = f32[256,4] all-gather-done(%g)",
        "%pd = bf16[16] collective-permute-done(%p)",
        f"%r = f32[64,4] all-reduce-start(%x), {GLOBAL}, {FOUR}, to_apply=%add",
        "ROOT %rd = f32[64,4] all-reduce-done(%r)"))
    assert [of(c) for c in found] == [("all-gather", "f32", 1024, 1), ("permute", "bf16", 16, 1), ("all-reduce", "f32", 256, 1)]
    assert [c.n for c in found] == [4, 3, 4] and all(c.is_async and c.disguise is None for c in found)
    assert [[name for _, name in c.overlapped] for c in found] == [["dot.1", "p", "fusion.2"], ["fusion.2"], []]
    assert found[0].overlapped[0] == ("dot", "dot.1")


def test_overlap_needs_a_schedule():
    lines = (f"%g = (f32[64,4], f32[256,4]) all-gather-start(%x), {GLOBAL}, {FOUR}, dimensions={{0}}", "%d = f32[64,64] dot(%x, %x)",
             "ROOT %gd = f32[256,4] all-gather-done(%g)")
    assert only(module(*lines)).overlapped and not only(module(*lines, scheduled=False)).overlapped


def test_combined_asynchronous_gather():
    found = collectives(module(f"%g = ((f32[64,4], bf16[16]), (f32[256,4], bf16[64])) all-gather-start(%x, %y), {GLOBAL}, {FOUR}, dimensions={{0}}",
                               "ROOT %d = (f32[256,4], bf16[64]) all-gather-done(%g)"))
    assert [of(c) for c in found] == [("all-gather", "f32", 1024, 1), ("all-gather", "bf16", 64, 1)]


def test_generic_async_start_around_a_collective():
    """Written out, with an update between; and in XLA's short form."""
    before = (f"%wrapped (p: f32[64,4]) -> f32[16,4] {{\n  %p = f32[64,4] parameter(0)\n  ROOT %rs = f32[16,4] reduce-scatter(%p), {GLOBAL}, {FOUR}, "
              "dimensions={0}, to_apply=%add\n}, execution_thread=\"collectives\"\n")
    long = module("%s = ((f32[64,4]), f32[16,4], s32[]) async-start(%x), async_execution_thread=\"collectives\", calls=%wrapped, "
                  'metadata={op_name="jit(f)/zero3.scatter.head.weight/reduce_scatter"}',
                  "%work = f32[64,64] dot(%x, %x)",
                  "%u = ((f32[64,4]), f32[16,4], s32[]) async-update(%s)",
                  "%more = f32[64,64] dot(%x, %x)",
                  "ROOT %d = f32[16,4] async-done(%u)", before=before)
    short = module(f"%s = ((f32[64,4]), f32[16,4], s32[]) reduce-scatter-start(%x), {GLOBAL}, {FOUR}, dimensions={{0}}, to_apply=%add",
                   "%work = f32[64,64] dot(%x, %x)", "%more = f32[64,64] dot(%x, %x)", "ROOT %d = f32[16,4] reduce-scatter-done(%s)")
    for text in (long, short):
        found = only(text)
        assert of(found) == ("reduce-scatter", "f32", 256, 1) and found.is_async and found.disguise == "async-start wrapper"
        assert [name for _, name in found.overlapped] == ["work", "more"]
    assert only(long).op_name.startswith("jit(f)/zero3.scatter")


def test_send_and_receive():
    """A permute taken apart (GPU pipelining); sends to the host are none."""
    pairs = 'frontend_attributes={_xla_send_recv_source_target_pairs="{{0,1},{1,2},{2,3}}"}'
    found = only(module("%t = token[] after-all()", f"%s = (bf16[16], u32[], token[]) send(%y, %t), channel_id=1, {pairs}", "%d = f32[64,64] dot(%x, %x)",
                        "ROOT %sd = token[] send-done(%s), channel_id=1"))
    assert of(found) == ("permute", "bf16", 16, 1) and found.groups == ((0, 1), (1, 2), (2, 3)) and found.disguise == "send + recv" and found.is_async
    assert found.overlapped == (("dot", "d"),)
    assert collectives(module("%t = token[] after-all()", "ROOT %s = (bf16[16], u32[], token[]) send(%y, %t), channel_id=1, is_host_transfer=true")) == []


ME = "%me = u32[] partition-id()"
OFFSET = "%at = u32[] multiply(%me, %me)\n  %zero = s32[] constant(0)"


def test_all_reduce_and_slice_is_a_reduce_scatter():
    """CASES R4, H9. Through views and fusions; of the operands of a combined one each by itself; asynchronous too."""
    plain = module(ME, OFFSET, f"%r = f32[64,4] all-reduce(%x), {GLOBAL}, {FOUR}, to_apply=%add",
                   "%b = f32[64,4] copy(%r)", "ROOT %s = f32[16,4] dynamic-slice(%b, %at, %zero), dynamic_slice_sizes={16,4}")
    later = module(ME, OFFSET, f"%r = f32[64,4] all-reduce-start(%x), {GLOBAL}, {FOUR}, to_apply=%add", "%rd = f32[64,4] all-reduce-done(%r)",
                   "ROOT %s = f32[16,4] dynamic-slice(%rd, %at, %zero), dynamic_slice_sizes={16,4}")
    fused = module(ME, f"%r = f32[64,4] all-reduce(%x), {GLOBAL}, {FOUR}, to_apply=%add",
                   "ROOT %f = f32[16,4] fusion(%me, %r), kind=kLoop, calls=%take", before="""%take (i: u32[], w: f32[64,4]) -> f32[16,4] {
  %i = u32[] parameter(0)
  %w = f32[64,4] parameter(1)
  %z = s32[] constant(0)
  %s = f32[16,4] dynamic-slice(%w, %i, %z), dynamic_slice_sizes={16,4}
  ROOT %n = f32[16,4] negate(%s)
}
""")
    for text in (plain, later, fused):
        assert of(only(text)) == ("reduce-scatter", "f32", 256, 1) and only(text).disguise == "all-reduce + slice" and only(text).wire == 768
    both = module(ME, OFFSET, f"%r = (f32[64,4], bf16[16]) all-reduce(%x, %y), {GLOBAL}, {FOUR}, to_apply=%add", "%g = f32[64,4] get-tuple-element(%r), index=0",
                  "%s = f32[16,4] dynamic-slice(%g, %at, %zero), dynamic_slice_sizes={16,4}", "ROOT %h = bf16[16] get-tuple-element(%r), index=1")
    assert [(c.kind, c.disguise) for c in collectives(both)] == [("reduce-scatter", "all-reduce + slice"), ("all-reduce", None)]


@pytest.mark.parametrize("lines", [
    ("ROOT %s = f32[8,4] dynamic-slice(%r, %at, %zero), dynamic_slice_sizes={8,4}",),                                  # not a fourth
    ("ROOT %s = f32[16,4] dynamic-slice(%r, %zero, %zero), dynamic_slice_sizes={16,4}",),                              # the same for all
    ("%s = f32[16,4] dynamic-slice(%r, %at, %zero), dynamic_slice_sizes={16,4}", "ROOT %n = f32[64,4] negate(%r)"),    # the whole is used too
    ("%s = f32[16,4] dynamic-slice(%r, %at, %zero), dynamic_slice_sizes={16,4}", "ROOT %t = (f32[64,4]) tuple(%r)"),
])
def test_other_slices_leave_it_an_all_reduce(lines):
    found = only(module(ME, OFFSET, f"%r = f32[64,4] all-reduce(%x), {GLOBAL}, {FOUR}, to_apply=%add", *lines))
    assert found.kind == "all-reduce" and found.disguise is None


def test_a_slice_by_the_loop_counter_is_none_but_one_by_a_carried_place_is():
    def body(index):
        return module("%start = (s32[], u32[], f32[64,4]) tuple(%x, %x, %x)", "ROOT %loop = (s32[], u32[], f32[64,4]) while(%start), condition=%c, body=%b",
                      before=f"""%c (s: (s32[], u32[], f32[64,4])) -> pred[] {{
  %s = (s32[], u32[], f32[64,4]) parameter(0)
  ROOT %p = pred[] constant(false)
}}

%b (t: (s32[], u32[], f32[64,4])) -> (s32[], u32[], f32[64,4]) {{
  %t = (s32[], u32[], f32[64,4]) parameter(0)
  %g0 = s32[] get-tuple-element(%t), index=0
  %g1 = u32[] get-tuple-element(%t), index=1
  %w = f32[64,4] get-tuple-element(%t), index=2
  %one = s32[] constant(1)
  %n = s32[] add(%g0, %one)
  %r = f32[64,4] all-reduce(%w), {GLOBAL}, {FOUR}, to_apply=%add
  %sl = f32[16,4] dynamic-slice(%r, %g{index}, %one), dynamic_slice_sizes={{16,4}}
  %wide = f32[64,4] concatenate(%sl, %sl, %sl, %sl)
  ROOT %o = (s32[], u32[], f32[64,4]) tuple(%n, %g1, %wide)
}}
""")
    assert only(body(0)).kind == "all-reduce" and only(body(1)).kind == "reduce-scatter"


def test_fusions_that_hide_a_collective():
    """TPU: kCustom fusions that call a computation named all-reduce-scatter; and any other fusion or call around a collective."""
    inner = lambda name: (f"%{name} (p: f32[64,4]) -> f32[16,4] {{\n  %p = f32[64,4]{{1,0:T(8,128)}} parameter(0)\n"
                          f"  %r = f32[64,4] all-reduce(%p), {GLOBAL}, {FOUR}, to_apply=%add\n  %c = s32[] constant(0)\n"
                          "  ROOT %s = f32[16,4] dynamic-slice(%r, %c, %c), dynamic_slice_sizes={16,4}\n}\n")
    fusion = lambda name: module(f"ROOT %fusion.3 = f32[16,4]{{1,0:T(8,128)S(1)}} fusion(%x), kind=kCustom, calls=%{name}, metadata={{op_name=\"jit(f)/outer\"}}",
                                 before=inner(name))
    hidden, plain = only(fusion("all-reduce-scatter.3")), only(fusion("fused_computation"))
    assert (hidden.kind, hidden.disguise, hidden.elements, hidden.op_name) == ("reduce-scatter", "all-reduce-scatter fusion", 256, "jit(f)/outer")
    assert (plain.kind, plain.disguise, plain.computation) == ("all-reduce", None, "fused_computation")
    twice = module("%a = f32[16,4] call(%x), to_apply=%part", "ROOT %b = f32[16,4] call(%x), to_apply=%part", before=inner("part"))
    assert [c.calls for c in collectives(twice)] == [1, 1]


def test_async_collective_fusions_are_one_collective():
    """TPU: a start, fusions of work and a done each hold a copy, with one channel and one chain; another chain is another collective."""
    copy = lambda name, chain: (
        f"%{name} (p: f32[64,4]) -> f32[256,4] {{\n  %p = f32[64,4]{{1,0:T(8,128)}} parameter(0)\n  ROOT %gather.{name} = f32[256,4] all-gather(%p), "
        f"channel_id=7, {FOUR}, dimensions={{0}}, use_global_device_ids=true, frontend_attributes={{chain_id=\"{chain}\"}}\n}}\n")
    nested = "%outer (p: f32[64,4]) -> f32[256,4] {\n  %p = f32[64,4] parameter(0)\n  ROOT %n = f32[256,4] fusion(%p), kind=kCustom, calls=%work\n}\n"
    before = copy("begin", 0) + copy("work", 0) + nested + copy("end", 0) + copy("other", 1)
    found = collectives(module("%start = f32[256,4] fusion(%x), kind=kCustom, calls=%begin", "%z = s32[] constant(0)", "%d = f32[64,64] dot(%x, %x)",
                               "%busy = f32[256,4] fusion(%x), kind=kOutput, calls=%outer", "%done = f32[256,4] fusion(%x), kind=kCustom, calls=%end",
                               "ROOT %whole = f32[256,4] fusion(%x), kind=kCustom, calls=%other", before=before))
    assert [of(c) for c in found] == [("all-gather", "f32", 1024, 1)] * 2
    assert [(c.disguise, c.is_async) for c in found] == [("async collective fusion", True), (None, False)]
    assert found[0].overlapped == (("dot", "d"), ("fusion", "busy")) and found[1].overlapped == ()


def test_what_is_written_by_hand_and_over_several_lines():
    """No %, no signatures, no header, a constant over lines, brackets and braces inside strings."""
    text = """
add { a = f32[] parameter(0)
}
ENTRY main {
  x = f32[8] parameter(0)
  k = s32[2,2] constant({
    { 0, 1 },
    { 2, 3 }
  })
  odd = f32[8] custom-call(x), custom_call_target="f{(", backend_config="{\\"a\\": [1, \\"}\\"]}"
  ROOT r = f32[8] all-reduce(odd), replica_groups={{0,1}}, to_apply=add, metadata={op_name="a/(b, {c" stack_frame_id=1}
}
"""
    read = parse(text)
    assert read.entry == "main" and not read.scheduled and [i.name for i in read.computations["main"].instructions] == ["x", "k", "odd", "r"]
    found = only(read)
    assert found.groups == ((0, 1),) and found.op_name == "a/(b, {c" and read.computations["main"].root.name == "r"


def test_module_instructions_and_attributes():
    read = parse(module(f"ROOT %c = f32[256,4]{{1,0}} all-gather(%x), {GLOBAL}, {FOUR}, dimensions={{0}}"))
    gather = read.computations["main"].named["c"]
    assert (read.name, read.partitions, read.replicas, read.scheduled) == ("jit_f", 8, 1, True)
    assert (gather.opcode, gather.operands, gather.shapes[0].dims, gather.attributes["dimensions"]) == ("all-gather", ("x",), (256, 4), "{0}")
    assert gather.attributes["replica_groups"] == "[2,4]<=[8]" and gather.root


def test_text_that_is_not_hlo_is_refused():
    with pytest.raises(HloError, match="not HLO"):
        parse("func.func @main() { return }")
