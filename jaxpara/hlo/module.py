"""HLO text -> computations and instructions. Knows the grammar, not the meaning.

Reads what XLA prints (compiled or not, scheduled or not) and what people write by hand: names with or without %, operands with or
without shapes, layouts with tiles, comments, signatures or none, instructions over several lines.
"""
import re
from dataclasses import dataclass
from functools import cached_property
from math import prod

STRING = re.compile(r'"(?:\\.|[^"\\])*"', re.S)
COMMENT = re.compile(r"/\*.*?\*/")
ARRAY = re.compile(r"\b([a-z]\w*)\[((?:(?:<=)?\d+,?\s*)*)\]")
COMPUTATION = re.compile(r"\s*(ENTRY\s+)?%?([\w.\-]+)\s*(?:\(.*\)\s*->.*)?\{\s*$", re.S)
INSTRUCTION = re.compile(r"\s*(ROOT\s+)?%?([\w.\-]+)\s+=\s+(.*)$", re.S)
MARK = re.compile(r'"(?:\\.|[^"\\])*"|[()\[\]{},]', re.S)
CALLS = ("calls", "to_apply", "body", "condition", "true_computation", "false_computation", "branch_computations", "called_computations")


class HloError(ValueError):
    """Text that does not mean what we can read; says what was found."""


@dataclass(frozen=True)
class Shape:
    dtype: str
    dims: tuple[int, ...]

    @property
    def elements(self):
        return prod(self.dims)


@dataclass(frozen=True)
class Instruction:
    name: str
    opcode: str
    shapes: tuple[Shape, ...]           # of the result, nested tuples flattened
    operands: tuple[str, ...]           # names
    given: tuple[Shape | None, ...]     # shapes written with the operands
    literal: str                        # what stands in the parentheses: the value of a constant, the number of a parameter
    raw: str                            # the attributes as written
    root: bool

    @cached_property
    def attributes(self):
        """{key: value as written}. `device_ids` is part of `replica_groups` and stays there."""
        found = {}
        for part in split(self.raw):
            key, equals, value = part.partition("=")
            if key == "device_ids" and "replica_groups" in found:
                found["replica_groups"] += ", " + part
            elif equals:
                found[key.strip()] = value.strip()
        return found

    @cached_property
    def called(self):
        """{attribute: names of the computations}."""
        return {key: tuple(name.strip().lstrip("%") for name in self.attributes[key].strip("{}").split(",") if name.strip())
                for key in CALLS if key in self.attributes}

    @cached_property
    def op_name(self):
        found = re.search(r'op_name="((?:\\.|[^"\\])*)"', self.raw)
        return found.group(1) if found else ""


@dataclass(frozen=True)
class Computation:
    name: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def named(self):
        return {instruction.name: instruction for instruction in self.instructions}

    @cached_property
    def uses(self):
        """{name: instructions that take it}."""
        found = {}
        for instruction in self.instructions:
            for name in dict.fromkeys(instruction.operands):
                found.setdefault(name, []).append(instruction)
        return found

    @cached_property
    def root(self):
        return next((i for i in self.instructions if i.root), self.instructions[-1] if self.instructions else None)

    @cached_property
    def parameters(self):
        """{number: instruction}."""
        return {int(i.literal): i for i in self.instructions if i.opcode == "parameter"}

    def operand_shapes(self, instruction):
        """Shapes of each operand, as defined or, failing that, as written: a tuple of tuples."""
        return tuple(self.named[name].shapes if name in self.named else (given,) if given else ()
                     for name, given in zip(instruction.operands, instruction.given))


@dataclass(frozen=True)
class Module:
    name: str
    computations: dict[str, Computation]
    entry: str
    scheduled: bool                     # whether the order of the text is the order of execution
    replicas: int
    partitions: int


def parse(text):
    """`Module` of HLO text. Raises HloError where there is no computation."""
    header = next((line for line in text.splitlines() if line.lstrip().startswith("HloModule")), "")
    number = lambda key: int(found.group(1)) if (found := re.search(rf"\b{key}=(\d+)", header)) else 1
    computations, entry, name, body = {}, None, None, []
    for line in logical_lines(text):
        if name is None:
            head = COMPUTATION.match(line)
            if head:
                name, body = head.group(2), []
                entry = name if head.group(1) else entry
        elif line.lstrip().startswith("}"):
            computations[name] = Computation(name, tuple(body))
            name = None
        else:
            found = INSTRUCTION.match(line)
            if found:
                body.append(instruction(*found.groups()))
    if not computations:
        raise HloError("No computation found: this is not HLO text (of `compiled.as_text()`, or an XLA dump).")
    title = re.match(r"\s*HloModule\s+([^\s,]+)", header)
    return Module(title.group(1) if title else "", computations, entry or list(computations)[-1], "is_scheduled=true" in header,
                  number("replica_count"), number("num_partitions"))


def logical_lines(text):
    """Lines without comments; those that open more brackets than they close are joined with what follows. A computation's head is a line."""
    pending = ""
    for line in text.splitlines():
        line = COMMENT.sub("", line) if "/*" in line else line
        if not pending and (" = " not in line or line.lstrip().startswith("HloModule")):
            yield line
            continue
        pending += ("\n" if pending else "") + line
        bare = STRING.sub("", pending)
        if sum(map(bare.count, "([{")) <= sum(map(bare.count, ")]}")):
            yield pending
            pending = ""
    if pending:
        yield pending


def instruction(root, name, text):
    """`Instruction` from what follows the equals sign: shape opcode(operands), attributes."""
    end = close(text) if text.startswith("(") else text.find(" ")
    shape, rest = text[:end], text[end:].lstrip()
    opcode, _, _ = rest.partition("(")
    end = close(rest[len(opcode):]) + len(opcode)
    inside, raw = rest[len(opcode) + 1:end - 1], rest[end:].lstrip(", ")
    opcode = opcode.strip()
    if opcode in ("constant", "parameter", "iota"):
        return Instruction(name, opcode, shapes(shape), (), (), inside.strip(), raw, bool(root))
    parts = [part.strip() for part in split(inside)]
    operands = tuple(part.rsplit(None, 1)[-1].lstrip("%") for part in parts)
    given = tuple(next(iter(shapes(part)), None) for part in parts)
    return Instruction(name, opcode, shapes(shape), operands, given, inside.strip(), raw, bool(root))


def shapes(text):
    """Every array shape in a (tuple) shape, in order."""
    return tuple(Shape(dtype, tuple(int(dim.strip().lstrip("<=")) for dim in dims.split(",") if dim.strip())) for dtype, dims in ARRAY.findall(text))


def close(text):
    """Index after the bracket that closes the one `text` starts with."""
    depth = 0
    for mark in MARK.finditer(text):
        if mark.group() in ("(", "[", "{"):
            depth += 1
        elif mark.group() in (")", "]", "}"):
            depth -= 1
            if not depth:
                return mark.end()
    raise HloError(f"A bracket is never closed: {text[:80]!r}…")


def split(text):
    """Parts between the commas that stand in no bracket and no string."""
    parts, depth, start = [], 0, 0
    for mark in MARK.finditer(text):
        symbol = mark.group()
        if symbol in ("(", "[", "{"):
            depth += 1
        elif symbol in (")", "]", "}"):
            depth -= 1
        elif symbol == "," and not depth:
            parts.append(text[start:mark.start()].strip())
            start = mark.end()
    return [part for part in (*parts, text[start:].strip()) if part]
