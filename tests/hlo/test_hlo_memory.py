"""The fullest moment of a program, by hand: sizes, tiles, loops that carry in place, operands that are overwritten."""
import pytest

from jaxpara.hlo.memory import HloError, padded, peak, replicated

HEAD = "HloModule m, is_scheduled=true\n"


@pytest.mark.parametrize("dtype, dims, layout, size", [
    ("f32", (), ":T(128)", 512), ("f32", (), "", 4), ("bf16", (), ":T(256)", 512), ("f32", (3, 5), "1,0", 60),
    ("f32", (3, 5), "1,0:T(4,128)", 4 * 128 * 4), ("f32", (32, 4096, 224), "1,2,0:T(8,128)", 32 * 4096 * 224 * 4),
    ("f32", (32, 4096, 224), "2,1,0:T(8,128)", 32 * 4096 * 256 * 4), ("pred", (5, 64), "1,0:T(32,128)(4,1)", 32 * 128),
    ("bf16", (9, 100), "1,0:T(8,128)(2,1)", 16 * 128 * 2), ("s32", (300,), "0:T(512)", 2048)])
def test_padded(dtype, dims, layout, size):
    assert padded(dtype, dims, layout) == size


def test_arguments_and_results_are_not_temporaries():
    found = peak(HEAD + """
ENTRY %e (p: f32[100]) -> f32[100] {
  %p = f32[100]{0} parameter(0)
  %a = f32[100]{0} sine(%p)
  %b = f32[100]{0} sort(%a)
  ROOT %c = f32[100]{0} cosine(%b)
}""")
    assert found.bytes == 800 and found.at == "b" and [buffer.name for buffer in found.buffers] == ["a", "b"]


def test_an_elementwise_result_takes_the_place_of_a_dying_operand():
    text = HEAD + """
ENTRY %e (p: f32[100]) -> f32[100] {
  %p = f32[100]{0} parameter(0)
  %a = f32[100]{0} sine(%p)
  %b = f32[100]{0} add(%a, %p)
  ROOT %c = f32[100]{0} cosine(%b)
}"""
    assert peak(text).bytes == 400
    assert peak(text.replace("cosine(%b)", "add(%a, %b)")).bytes == 800        # a lives on


LOOP = HEAD + """
%body (s: (s32[], f32[100], f32[8,100])) -> (s32[], f32[100], f32[8,100]) {
  %s = (s32[], f32[100]{0}, f32[8,100]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[100]{0} get-tuple-element(%s), index=1
  %kept = f32[8,100]{1,0} get-tuple-element(%s), index=2
  %work = f32[300]{0} custom-call(%x), custom_call_target="w"
  %next = f32[100]{0} custom-call(%work), custom_call_target="n"
  %row = f32[1,100]{1,0} bitcast(%x)
  %stored = f32[8,100]{1,0} dynamic-update-slice(%kept, %row, %i, %i)
  ROOT %t = (s32[], f32[100]{0}, f32[8,100]{1,0}) tuple(%i, %next, %stored)
}
%cond (s: (s32[], f32[100], f32[8,100])) -> pred[] {
  %s = (s32[], f32[100]{0}, f32[8,100]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %n = s32[] constant(8)
  ROOT %go = pred[] compare(%i, %n), direction=LT
}
ENTRY %e (p: f32[100]) -> f32[100] {
  %p = f32[100]{0} parameter(0)
  %z = s32[] constant(0)
  %x0 = f32[100]{0} copy(%p)
  %k0 = f32[8,100]{1,0} broadcast(%z), dimensions={}
  %t0 = (s32[], f32[100]{0}, f32[8,100]{1,0}) tuple(%z, %x0, %k0)
  %loop = (s32[], f32[100]{0}, f32[8,100]{1,0}) while(%t0), condition=%cond, body=%body
  %last = f32[100]{0} get-tuple-element(%loop), index=1
  %late = f32[1000]{0} custom-call(%last), custom_call_target="l"
  ROOT %r = f32[100]{0} custom-call(%late), custom_call_target="r"
}"""


def test_a_loop_carries_in_place_and_needs_its_body_on_top():
    """3200 saved + 400 carried + 1200 of work; after the loop only what is read of it lives on (400 + 4000 = less)."""
    found = peak(LOOP)
    assert found.bytes == 3200 + 400 + 1200 and found.at == "work"
    assert {buffer.name: (buffer.carried, buffer.loops) for buffer in found.buffers} == {"k0": (True, 0), "x0": (True, 0), "work": (False, 1)}


def test_a_saved_array_that_is_read_after_the_loop_lives_on():
    text = LOOP.replace('custom-call(%last), custom_call_target="l"', 'custom-call(%last, %k), custom_call_target="l"').replace(
        "  %late", "  %k = f32[8,100]{1,0} get-tuple-element(%loop), index=2\n  %late")
    assert peak(text).bytes == 3200 + 400 + 4000


def test_other_memory_spaces_do_not_count():
    assert peak(LOOP.replace("f32[300]{0} custom", "f32[300]{0:S(1)} custom")).bytes == 400 + 4000


def test_text_out_of_order_is_refused():
    with pytest.raises(HloError, match="not scheduled"):
        peak(LOOP.replace(", is_scheduled=true", ""))


def test_a_surplus_is_counted_in_bytes():
    from jaxpara.config import Run
    from jaxpara.settings import configure
    run = configure(Run(), {"model.layers": 2, "model.width": 32, "model.heads": 2, "model.ffn": 64, "model.vocab": 16, "mesh.fsdp": 2})
    line = '  %p = f32[2,{}]{{1,0}} parameter(0), metadata={{op_name="state.params[\\\'layers.norm1.scale\\\']"}}\n'
    text = lambda width: HEAD + "ENTRY %e (p: f32[2,32]) -> f32[] {\n" + line.format(width) + "  ROOT %c = f32[] constant(0)\n}"
    assert replicated(text(16), run) == []
    assert replicated(text(32), run) == [("params.layers.norm1.scale", 2 * 16 * 4)]
