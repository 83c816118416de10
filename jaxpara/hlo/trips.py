"""How often a loop runs: what XLA wrote down, or else counted by running the loop's counter alone."""
import re

KNOWN = re.compile(r'known_trip_count\\?"?\s*[:=]\s*\{\s*\\?"?n\\?"?\s*:\s*\\?"?(\d+)')
MOST = 100_000
"""Passes after which counting gives up."""

COMPARE = {"LT": int.__lt__, "LE": int.__le__, "GT": int.__gt__, "GE": int.__ge__, "EQ": int.__eq__, "NE": int.__ne__}
ARITHMETIC = {"add": int.__add__, "subtract": int.__sub__, "multiply": int.__mul__, "minimum": min, "maximum": max,
              "and": int.__and__, "or": int.__or__}
SAME = ("copy", "bitcast", "convert", "reshape")


def trip_count(module, computation, loop):
    """Passes of a `while` instruction, or None where neither XLA nor the counter tells."""
    known = KNOWN.search(loop.raw)
    if known:
        return int(known.group(1))
    condition, body = (module.computations.get(loop.called.get(key, ("",))[0]) for key in ("condition", "body"))
    if condition is None or body is None or not condition.instructions or not body.instructions:
        return None
    state = value(module, computation, loop.operands[0], ())
    if not isinstance(state, list):
        state = [None] * len(loop.shapes) if len(loop.shapes) > 1 else state
    for passes in range(MOST):
        go = value(module, condition, condition.root.name, (state,))
        if go is None:
            return None
        if not go:
            return passes
        state = value(module, body, body.root.name, (state,))
    return None


def value(module, computation, name, arguments, memo=None):
    """What an instruction yields if it follows from constants and `arguments` by scalar integer arithmetic: an int, for a tuple a list
    of such; None where it does not."""
    memo = {} if memo is None else memo
    if name not in memo:
        memo[name] = None
        instruction = computation.named.get(name)
        memo[name] = None if instruction is None else evaluate(module, computation, instruction, arguments, memo)
    return memo[name]


def evaluate(module, computation, instruction, arguments, memo):
    opcode = instruction.opcode
    if opcode == "constant":
        word = instruction.literal.strip("{} ")
        return {"true": 1, "false": 0}.get(word, int(word) if re.fullmatch(r"-?\d+", word) else None)
    if opcode == "parameter":
        return arguments[int(instruction.literal)] if int(instruction.literal) < len(arguments) else None
    scalar = not any(shape.dims for shape in instruction.shapes)
    if opcode not in ("tuple", "get-tuple-element") and not (scalar and opcode in ("compare", "fusion", "call", *ARITHMETIC, *SAME)):
        return None
    inputs = [value(module, computation, name, arguments, memo) for name in instruction.operands]
    if opcode == "tuple":
        return inputs
    if opcode == "get-tuple-element":
        index = int(instruction.attributes["index"])
        return inputs[0][index] if isinstance(inputs[0], list) and index < len(inputs[0]) else None
    if opcode in ("fusion", "call"):
        called = module.computations.get(next(iter(instruction.called.values()), ("",))[0])
        return value(module, called, called.root.name, tuple(inputs)) if called else None
    if not all(isinstance(x, int) for x in inputs):
        return None
    if opcode == "compare":
        return int(COMPARE[instruction.attributes["direction"]](*inputs))
    return ARITHMETIC[opcode](*inputs) if opcode in ARITHMETIC else inputs[0]
