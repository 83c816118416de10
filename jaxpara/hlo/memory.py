"""Compiled text -> the bytes it needs: what is alive at the fullest moment, whose it is, and which arguments are larger than planned. No JAX.

XLA's `memory_analysis()` gives sums only. The text of a scheduled program gives the rest: its order is the order of execution, so the
moment at which most bytes are alive can be found, and every buffer has the name of what made it.
"""
import re
from dataclasses import dataclass, replace
from math import ceil, prod

from jaxpara.hlo.module import HloError, close, parse
from jaxpara.hlo.module import split as parts_of
from jaxpara.hlo.parse import BITS
from jaxpara.hlo.stages import Waiting, core
from jaxpara.pipeline.placing import stack
from jaxpara.plan.memory import KINDS as PLANNED
from jaxpara.rules import local_shape
from jaxpara.zero import placements

LEAF = re.compile(r"([a-z]\w*)\[([\d,<= ]*)\](?:\{([^{}]*)\})?")
DEFINITION = re.compile(r"^\s*(?:ROOT\s+)?%?([\w.\-]+)\s+=\s+(\(|[a-z]\w*\[)", re.M)
IN_PLACE = ("dynamic-update-slice", "scatter")
NOTHING_NEW = ("bitcast", "optimization-barrier", "while", "add-dependency")
RUNS = ("while", "conditional", "call", "async-start")
SHORT = {"float64": "f64", "float32": "f32", "bfloat16": "bf16", "float16": "f16"}


@dataclass(frozen=True)
class Buffer:
    name: str                   # of the instruction that makes it
    bytes: int                  # as laid out, tiles filled up
    dtype: str
    dims: tuple[int, ...]
    op_name: str
    opcode: str = ""
    loops: int = 0              # how many loops it lies in
    carried: bool = False       # whether a loop carries it


@dataclass(frozen=True)
class Peak:
    bytes: int                  # alive at once, arguments and results left out
    at: str                     # the instruction at which
    buffers: tuple[Buffer, ...]     # alive there, largest first


def padded(dtype, dims, layout=""):
    """Bytes of an array under an XLA layout such as "1,0:T(8,128)(2,1)": the most minor dims are filled up to whole tiles."""
    order, _, rest = layout.partition(":")
    tile = re.match(r"T\(([\d,]+)\)", rest)
    sizes = [dims[int(i)] for i in reversed(order.split(","))] if order else list(dims)
    if tile:
        steps = [int(step) for step in tile.group(1).split(",")]
        sizes = [1] * (len(steps) - len(sizes)) + sizes
        first = len(sizes) - len(steps)
        sizes = sizes[:first] + [ceil(size / step) * step for size, step in zip(sizes[first:], steps)]
    return ceil(prod(sizes) * BITS[dtype] / 8)


def leaves(text, name="", op_name="", opcode=""):
    """A shape as printed -> a `Buffer`, or for a tuple a list of such. Arrays outside the main memory (S(1) and up) have 0 bytes."""
    text = text.strip()
    if text.startswith("("):
        return [leaves(part, name, op_name, opcode) for part in parts_of(text[1:close(text) - 1])]
    found = LEAF.match(text)
    if not found:
        raise HloError(f"{name}: no shape in {text[:60]!r}.")
    dtype, inside, layout = found.groups()
    dims = tuple(int(dim.strip().lstrip("<=")) for dim in inside.split(",") if dim.strip())
    elsewhere = re.search(r"S\([1-9]", layout or "")
    return Buffer(name, 0 if elsewhere or dtype not in BITS else padded(dtype, dims, layout or ""), dtype, dims, op_name, opcode)


def printed_shapes(text):
    """{instruction: its shape as printed}; names are unique in a module."""
    text = re.sub(r"/\*.*?\*/", "", text)
    found = {}
    for match in DEFINITION.finditer(text):
        start = match.start(2)
        if match.group(2) == "(":
            found[match.group(1)] = text[start:start + close(text[start:start + 200_000])]
        else:
            found[match.group(1)] = LEAF.match(text, start).group()
    return found


def flat(value):
    """The `Cell`s in a value."""
    return [leaf for part in value for leaf in flat(part)] if isinstance(value, list) else [value]


class Cell:
    """One place in memory: several values may lie in it one after the other."""

    def __init__(self, buffer, start):
        self.buffer, self.start, self.end, self.outside = buffer, start, start, False


def peak(text, module=None):
    """The `Peak` of a scheduled module: the entry computation, and below each loop, branch or call what that needs while it runs.

    Values that leave a computation lie where the caller put them (loops carry in place). An operand that dies at an elementwise operation of
    its own size gives its place to the result. What fragmentation costs on top, `memory_analysis()` knows and the text does not.
    module: of the text, if it was parsed before (it has no layouts, so the text is needed too).
    """
    module = module or parse(text)
    if not module.scheduled:
        raise HloError("The module is not scheduled: take the text of a compiled program.")
    return Liveness(module, printed_shapes(text)).peak(module.entry, 0)


class Liveness:
    def __init__(self, module, printed):
        self.module, self.printed, self.known = module, printed, {}
        self.tiles = any(":T(" in shape for shape in printed.values())

    def peak(self, name, loops):
        if (name, loops) not in self.known:
            computation = self.module.computations[name]
            self.known[name, loops] = self.fullest(computation, self.cells(computation, loops), loops)
        return self.known[name, loops]

    def cells(self, computation, loops):
        """Every `Cell` of a computation with its first and last use."""
        values, everything = {}, {}
        # XLA:CPU lets what a loop hands on grow where an operand lay; XLA:TPU, and any entry whose results lie in donated arguments, does not
        leaving = self.leaving(computation) if self.tiles or computation.name == self.module.entry else ()
        last = {name: index for index, i in enumerate(computation.instructions) for name in i.operands}
        for index, instruction in enumerate(computation.instructions):
            value = self.value(instruction, values, index, {} if instruction.name in leaving else last)
            values[instruction.name] = value
            used = [value] if instruction.opcode == "get-tuple-element" else [values.get(name, []) for name in instruction.operands]
            for cell in flat(used):
                cell.end = max(cell.end, index)
            for cell in flat(value):
                cell.buffer = replace(cell.buffer, loops=loops, carried=cell.buffer.carried or instruction.opcode == "while")
                cell.end = max(cell.end, index)
                everything[id(cell)] = cell
        for cell in flat(values[computation.root.name]):
            cell.outside = True
        return list(everything.values())

    def leaving(self, computation):
        """Names of what makes the results of a computation: these lie where the caller put them, so never where an operand was."""
        found, todo = set(), [computation.root.name]
        while todo:
            name = todo.pop()
            instruction = computation.named.get(name)
            if instruction is not None and name not in found:
                found.add(name)
                todo += instruction.operands if instruction.opcode in ("tuple", "bitcast", "get-tuple-element", "optimization-barrier") else ()
        return found

    def value(self, instruction, values, index, last):
        """Where the result of an instruction lies: a `Cell`, for a tuple a list. last: {operand: its last use}, where it may be overwritten."""
        opcode, operands = instruction.opcode, [values.get(name) for name in instruction.operands]
        fresh = self.fresh(instruction, index)
        if opcode == "tuple":
            return operands
        if opcode == "get-tuple-element" and isinstance(operands[0], list):
            return operands[0][int(instruction.attributes["index"])]
        if opcode in NOTHING_NEW and operands:
            return operands[0]
        if opcode.endswith(("-done", "-update")) and isinstance(operands[0], list):
            return operands[0] if opcode.endswith("-update") else operands[0][0 if opcode == "copy-done" else 1]
        if opcode in ("parameter", "constant"):
            for cell in flat(fresh):
                cell.outside = True
        if opcode == "copy-start":
            fresh[1] = operands[0]
        elif opcode.endswith("-start") and isinstance(fresh, list):
            fresh[0] = operands[0] if len(operands) == 1 and not isinstance(fresh[0], list) else operands
        return self.shared(instruction, operands, fresh, index, last)

    def fresh(self, instruction, index):
        make = lambda buffer: [make(part) for part in buffer] if isinstance(buffer, list) else Cell(buffer, index)
        return make(leaves(self.printed[instruction.name], instruction.name, instruction.op_name, instruction.opcode))

    def shared(self, instruction, operands, fresh, index, last):
        """`fresh`, with those leaves replaced that lie where an operand lies."""
        results = fresh if isinstance(fresh, list) else [fresh]
        for number, operand in self.in_place(instruction).items():
            if number < len(results) and operand < len(operands) and isinstance(operands[operand], Cell):
                results[number] = operands[operand]
        if instruction.opcode in ("fusion", "add", "multiply", "subtract", "convert", "select", "maximum", "copy"):
            for number, result in enumerate(results):
                dying = [cell for name, cell in zip(instruction.operands, operands) if isinstance(cell, Cell) and last.get(name) == index
                         and cell.end < index and not cell.outside and self.elementwise(instruction, cell, result)]
                if isinstance(result, Cell) and result.start == index and result.buffer.name == instruction.name and dying:
                    cell = dying[0]
                    cell.buffer = replace(result.buffer, bytes=max(result.buffer.bytes, cell.buffer.bytes))
                    results[number], cell.end = cell, index
        return results if isinstance(fresh, list) else results[0]

    def elementwise(self, instruction, cell, result):
        """Whether `result` may overwrite `cell`: as many bytes and dims, and no matrix product in between."""
        if not isinstance(result, Cell) or cell.buffer.bytes != result.buffer.bytes or cell.buffer.dims != result.buffer.dims:
            return False
        inside = [self.module.computations[name] for names in instruction.called.values() for name in names]
        return not any(i.opcode in ("dot", "convolution", "reduce", "gather", "transpose", "scatter", "custom-call") for c in inside
                       for i in c.instructions)

    def in_place(self, instruction):
        """{result: operand} of what is written in place."""
        written = re.search(r"output_to_operand_aliasing=\{(.*?\)\s*)\}", instruction.raw)
        if written:
            return {int(a or 0): int(b) for a, b in re.findall(r"\{(\d*)\}:\s*\((\d+)", written.group(1))}
        if instruction.opcode in IN_PLACE:
            return {0: 0}
        if instruction.opcode != "fusion" or "calls" not in instruction.called:
            return {}
        inside = self.module.computations[instruction.called["calls"][0]]
        roots = inside.root.operands if inside.root.opcode == "tuple" else (inside.root.name,)
        found = {number: self.updated(inside, name) for number, name in enumerate(roots)}
        return {number: operand for number, operand in found.items() if operand is not None}

    def updated(self, inside, name):
        """The parameter number of a fusion that its dynamic-update-slice writes into, or None."""
        step, updated = inside.named.get(name), False
        while step is not None:
            updated = updated or step.opcode in IN_PLACE
            if step.opcode == "parameter":
                return int(step.literal) if updated else None
            if step.opcode not in (*IN_PLACE, "bitcast", "copy", "convert"):
                return None
            step = inside.named.get(step.operands[0])
        return None

    def fullest(self, computation, cells, loops):
        """The `Peak` of one computation."""
        starts, ends = {}, {}
        for cell in cells:
            if not cell.outside and cell.buffer.bytes:
                starts.setdefault(cell.start, []).append(cell)
                ends.setdefault(cell.end, []).append(cell)
        alive, held, best = set(), 0, Peak(0, "", ())
        for index, instruction in enumerate(computation.instructions):
            alive.update(starts.get(index, ()))
            held += sum(cell.buffer.bytes for cell in starts.get(index, ()))
            inner = self.below(instruction, loops)
            if held + inner.bytes > best.bytes:
                best = Peak(held + inner.bytes, inner.at or instruction.name, (*(cell.buffer for cell in alive), *inner.buffers))
            alive.difference_update(ends.get(index, ()))
            held -= sum(cell.buffer.bytes for cell in ends.get(index, ()))
        return replace(best, buffers=tuple(sorted(best.buffers, key=lambda buffer: (-buffer.bytes, buffer.name))))

    def below(self, instruction, loops):
        """The fullest of what an instruction runs."""
        if instruction.opcode not in RUNS:
            return Peak(0, "", ())
        inside = loops + (instruction.opcode == "while")
        return max((self.peak(name, inside) for names in instruction.called.values() for name in names if name in self.module.computations),
                   key=lambda found: found.bytes, default=Peak(0, "", ()))



KINDS = (*PLANNED, "update", "rest")
"""Kinds of temporaries; all but the last two as in `plan.temporaries`."""

PARAMETER = re.compile(r"^(state\.(params|master|optimizer)|batch)\b.*\['([\w.]+)'\]")


def kinds(run):
    """A function `Buffer` -> one of KINDS, from its shape and from the scopes in the name of what made it.

    weights: copies in another dtype or layout; gradients: sums and single layers'; saved: kept of layers for the backward pass; gathered: whole
    weights of ZeRO-3; logits: of one chunk of the loss; update: of the optimizer; slots, pairs: what a pipeline keeps for other ticks;
    working: all else that is large.
    """
    whole, layer, vocab, chunks = set(), set(), set(), stack(run).chunks
    waiting = Waiting(run) if run.mesh.pp > 1 else None
    for name, placement in placements(run).items():
        for spec in (placement.storage, placement.gradient, placement.optimizer, placement.base):
            shape = local_shape(placement.shape, spec, run.mesh)
            whole |= {core(shape)} | ({core((shape[0] // chunks, *shape[1:]))} if placement.parameter.stacked else set())
            layer |= {core(shape[1:])} if placement.parameter.stacked else set()
            vocab |= {shape[0]} if spec == placement.base and name in ("embedding.tokens", "head.weight") else set()
    gradient = SHORT[run.precision.gradient(run.train.microbatches)]

    def kind(buffer):
        name, dims = buffer.op_name, core(buffer.dims)
        if "/optimizer/" in name:
            return "update"
        if "zero3.gather" in name or "update.gather" in name:
            return "gathered"
        if re.search(r"zero[123]\.scatter|zero0\.sum", name):
            return "gradients"
        if waiting and (kept := waiting.kind(buffer)):
            return kept
        if dims in whole | layer and len(dims) > 1:
            # XLA sums gradients in loops into buffers that start as a broadcast zero
            summed = "transpose(" in name or buffer.opcode == "broadcast" or not name and buffer.carried
            return "gradients" if summed and buffer.dtype == gradient else "weights"
        if waiting.saved(buffer) if waiting else buffer.carried and len(buffer.dims) > 2 and buffer.dims[0] == run.model.layers:
            return "saved"
        if vocab & set(buffer.dims):
            return "logits"
        return "working" if prod(buffer.dims) > 1024 else "rest"

    return kind


def split(text, stats, run, module=None):
    """Bytes per device of a compiled step: {"argument", "output", "alias", "temp", "peak", "parts"}.

    stats: `compiled.memory_analysis()`. On TPU temp is XLA's peak without the arguments, since its temp_size counts more than the heap ever
    holds; elsewhere the peak is all that is not shared, since XLA's can be below its temporaries. parts: the arguments by part ("parameters",
    "master", "optimizer", "scalars", "batch"), then what is alive at the fullest moment by kind (KINDS); "rest" holds what no buffer explains:
    tiles, fragmentation, and less than nothing where XLA found room that `peak` did not.
    """
    sizes = {part: getattr(stats, f"{part}_size_in_bytes") for part in ("argument", "output", "alias", "temp")}
    if ":T(" in text:
        sizes["temp"] = stats.peak_memory_in_bytes - sizes["argument"]
        sizes["peak"] = stats.peak_memory_in_bytes
    else:
        sizes["peak"] = sizes["argument"] + sizes["temp"] + sizes["output"] - sizes["alias"]
    module = module or parse(text)
    parts, kind = {**entry_parts(module), **dict.fromkeys(KINDS, 0)}, kinds(run)
    for buffer in peak(text, module).buffers:
        parts[kind(buffer)] += buffer.bytes
    parts["rest"] += sizes["argument"] + sizes["temp"] - sum(parts.values())
    return {**sizes, "parts": parts}


def entry_arguments(module):
    """Yield (whose, name of the parameter or array or None, `Shape`) of the entry computation's arguments, by the names that JAX gives them."""
    for instruction in module.computations[module.entry].parameters.values():
        found = PARAMETER.match(instruction.op_name.replace("\\'", "'"))
        whose, name = (found.group(2) or "batch", found.group(3)) if found else ("scalars", None)
        yield from ((whose, name, shape) for shape in instruction.shapes)


def entry_parts(module):
    """{part: bytes} of the arguments, tiles left out."""
    parts = dict.fromkeys(("parameters", "master", "optimizer", "scalars", "batch"), 0)
    for whose, _, shape in entry_arguments(module):
        parts["parameters" if whose == "params" else whose] += shape.elements * BITS[shape.dtype] // 8
    return parts


def replicated(module, run):
    """[(argument, surplus bytes per device)]: what lies on a device in more elements than the ZeRO table plans, largest first.

    module: HLO text of a compiled step, or a `Module`; both JAX versions, CPU and TPU. Arguments go by JAX's names: params.layers.mlp.up.
    """
    module, table, found = parse(module) if isinstance(module, str) else module, placements(run), []
    rows = run.train.batch // run.mesh.batch
    batch = {name: rows * run.train.seq // (run.mesh.sp if name in ("tokens", "targets") else 1)
             for name in ("tokens", "targets", "positions", "segments")}
    for whose, name, shape in entry_arguments(module):
        planned = None
        if name in table:
            planned = table[name].elements(table[name].storage if whose == "params" else table[name].optimizer)
        elif whose == "batch":
            planned = batch.get(name, rows)
        if planned is not None and shape.elements > planned:
            found.append((f"{whose}.{name}", (shape.elements - planned) * BITS[shape.dtype] // 8))
    return sorted(found, key=lambda one: -one[1])
