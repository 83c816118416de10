"""Compiled text -> the collectives it runs: what kind, among whom, of what, how often, for whom, and what hides it.

Conventions are those of `jaxpara.plan.traffic`: elements are of the full result of an all-gather, the full operand of a
reduce-scatter, the operand of everything else; a combined operation counts once per operand.
"""
import re
from dataclasses import dataclass, field
from math import ceil

from jaxpara.hlo.chains import chains, key
from jaxpara.hlo.groups import flattened, group_size, groups, listed
from jaxpara.hlo.module import HloError, Instruction, Module, parse
from jaxpara.hlo.slices import only_sliced
from jaxpara.hlo.trips import trip_count
from jaxpara.plan.lines import FACTOR

__all__ = ["Collective", "HloError", "Instruction", "Module", "bits", "collectives", "parse"]

KINDS = {"all-gather": "all-gather", "reduce-scatter": "reduce-scatter", "all-reduce": "all-reduce", "all-to-all": "all-to-all",
         "ragged-all-to-all": "all-to-all", "collective-permute": "permute", "send": "permute"}
NOT_WORK = ("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "partition-id", "replica-id", "after-all")
"""Opcodes that take no time, so hide none."""

BRANCH = re.compile(r"pipeline\.(begin|forward|backward|weight|loss|end)|border\.(send)")
"""Scopes of the parts of a pipeline's tick that stand in branches."""

BITS = {"pred": 8, "bf16": 16, "c64": 64, "c128": 128, "token": 0, "opaque": 0}
FLOAT8 = ("f8e3m4", "f8e4m3", "f8e4m3b11fnuz", "f8e4m3fn", "f8e4m3fnuz", "f8e5m2", "f8e5m2fnuz", "f8e8m0fnu")
BITS |= {name: 8 for name in FLOAT8} | {"f4e2m1fn": 4} | {f"f{n}": n for n in (16, 32, 64)}
BITS |= {f"{sign}{n}": n for sign in "su" for n in (1, 2, 4, 8, 16, 32, 64)}


def bits(dtype):
    """Width of an XLA element type."""
    if dtype not in BITS:
        raise HloError(f"Element type {dtype} is not one this reader knows: {', '.join(sorted(BITS))}.")
    return BITS[dtype]


@dataclass(frozen=True)
class Collective:
    kind: str                                   # "all-gather" | "reduce-scatter" | "all-reduce" | "all-to-all" | "permute"
    groups: tuple[tuple[int, ...], ...]         # partition ids; of a permute its (source, target) pairs
    dtype: str                                  # XLA's name
    elements: int                               # per call
    calls: int                                  # per run of the program; in a branch of a conditional: at most
    op_name: str
    name: str                                   # of the instruction
    computation: str                            # that it stands in
    loops: tuple[str, ...] = ()                 # the while instructions around it, outermost first
    trips: tuple[int, ...] = ()                 # passes of each; 1 where unknown
    conditional: bool = False                   # in a branch that may not be taken
    branch: str = ""                            # the part of a pipeline's tick that this branch is, see BRANCH
    uncertain: str = ""                         # why `calls` may be wrong; "" where it is known
    is_async: bool = False                      # has a start and a done
    overlapped: tuple[tuple[str, str], ...] = ()    # (opcode, name) of what is scheduled between the two
    disguise: str | None = None                 # None | "all-reduce + slice" | "all-reduce-scatter fusion" | "async-start wrapper"
                                                # | "async collective fusion" | "send + recv"
    parts: int = 1                              # how many operands the instruction combines; this is one of them

    @property
    def n(self):
        """Devices in the largest group; of a permute, in the longest ring or chain."""
        return group_size(self.groups, self.kind)

    @property
    def bytes(self):
        """Of `elements`."""
        return ceil(self.elements * bits(self.dtype) / 8)

    @property
    def wire(self):
        """Bytes sent per device in one call by the ring algorithms, as in `jaxpara.plan.traffic`; 0 for groups of one."""
        if self.n == 1:
            return 0
        exact = self.bytes if self.kind == "permute" else FACTOR[self.kind] * self.bytes * (self.n - 1) / self.n
        return int(exact) if exact == int(exact) else exact


@dataclass(frozen=True)
class Place:
    """What is known of how a computation is reached."""
    calls: int = 1
    loops: tuple[str, ...] = ()
    trips: tuple[int, ...] = ()
    conditional: bool = False
    branch: str = ""
    uncertain: str = ""
    is_async: bool = False
    overlapped: tuple = ()
    fused: str = ""                             # names of the fusion around it and of what it calls
    within: str = ""                            # the outermost fusion around it
    chains: dict = field(default_factory=dict, compare=False)   # where that fusion stands: {key: fusions}, see chains.py
    between: tuple = field(default=(), compare=False)           # and all (opcode, name) there, in order
    wrapped: bool = False
    op_name: str = ""                           # of the instruction that wraps it, for when its own is lost
    path: tuple[str, ...] = field(default=(), compare=False)

    def __call__(self, **changes):
        return Place(**{**self.__dict__, **changes})


def collectives(text):
    """Every `Collective` that one run of the program may execute, in the order of the text. text: HLO, or a `Module`.

    A computation reached from two places gives its collectives twice. Groups of one are listed too (`wire` 0).
    """
    module = text if isinstance(text, Module) else parse(text)
    return list(walk(module, module.entry, Place()))


def walk(module, name, place):
    computation = module.computations.get(name)
    if computation is None or name in place.path:
        return
    place = place(path=(*place.path, name))
    if not place.fused:
        place = place(chains=chains(module, computation), between=tuple((i.opcode, i.name) for i in computation.instructions))
    for instruction in computation.instructions:
        yield from read(module, computation, instruction, place)
        if instruction.called:
            for callee, inner in callees(module, computation, instruction, place):
                yield from walk(module, callee, inner)


def callees(module, computation, instruction, place):
    """(computation, `Place`) for each that an instruction runs."""
    called, opcode = instruction.called, instruction.opcode
    if opcode == "while":
        trips = trip_count(module, computation, instruction)
        uncertain = place.uncertain or ("" if trips is not None else f"passes of {instruction.name} unknown, counted as 1")
        once = 1 if trips is None else trips
        inside = place(loops=(*place.loops, instruction.name), trips=(*place.trips, once), uncertain=uncertain)
        yield from ((callee, inside(calls=place.calls * (once + 1))) for callee in called.get("condition", ()))
        yield from ((callee, inside(calls=place.calls * once)) for callee in called.get("body", ()))
    elif opcode == "conditional":
        for names in called.values():
            yield from ((callee, place(conditional=True, branch=place.branch or part_of(module, callee))) for callee in names)
    elif base(opcode) not in KINDS:             # the to_apply of a reduction only adds
        changes = {}
        if opcode == "fusion":
            changes["within"] = place.within or instruction.name
            changes["fused"] = " ".join((place.fused, instruction.name, *(c for names in called.values() for c in names)))
        if opcode.endswith("-start"):
            changes |= {"is_async": True, "overlapped": overlapped(module, computation, instruction), "wrapped": True}
        if opcode.endswith(("-done", "-update")):
            return
        for names in called.values():
            yield from ((callee, place(op_name=instruction.op_name or place.op_name, **changes)) for callee in names)


def part_of(module, name):
    """The part of a pipeline's tick that a branch is. A collective in it may have lost its own op_name; something in it has one."""
    computation = module.computations.get(name)
    found = (BRANCH.search(instruction.op_name) for instruction in (computation.instructions if computation else ()))
    return next((match[1] or match[2] for match in found if match), "")


def base(opcode):
    """The opcode without the -start of an asynchronous form; the -done half is not a collective again."""
    return opcode.removesuffix("-start")


def overlapped(module, computation, start):
    """(opcode, name) of the work between a start and its done, where the text is in the order of execution."""
    between, chain = [], {start.name}
    if not module.scheduled:
        return ()
    instructions = computation.instructions
    for instruction in instructions[instructions.index(start) + 1:]:
        if chain.intersection(instruction.operands) and instruction.opcode.endswith(("-done", "-update")):
            if instruction.opcode.endswith("-done"):
                return tuple(between)
            chain.add(instruction.name)
        elif instruction.opcode not in NOT_WORK and not instruction.opcode.endswith(("-done", "-update")):
            between.append((instruction.opcode, instruction.name))
    return ()


def fused_between(module, place, chain):
    """(opcode, name) of the work from after the first to before the last fusion of a chain, those between included."""
    names = [name for _, name in place.between]
    inside = place.between[names.index(chain[0]) + 1:names.index(chain[-1])] if module.scheduled else ()
    return tuple((opcode, name) for opcode, name in inside if opcode not in NOT_WORK)


def read(module, computation, instruction, place):
    """The collectives of one instruction, one per operand."""
    opcode, attributes = base(instruction.opcode), instruction.attributes
    kind = KINDS.get(opcode)
    pairs = attributes.get("source_target_pairs")
    if opcode == "send":
        pairs = sent_pairs(instruction.raw)
    chain = place.chains.get(key(instruction), ())
    if kind is None or (kind == "permute" and pairs is None) or (chain and place.within != chain[0]):
        return
    found = listed(pairs) if kind == "permute" else groups(attributes.get("replica_groups", "{}"))
    found = () if kind == "permute" and not found else flattened(found, attributes, kind, module.replicas, module.partitions)
    start = instruction.opcode.endswith("-start") or opcode == "send"
    # the -start of kinds that XLA has no asynchronous opcode for is how it prints a generic async-start around one
    sugar = start and opcode not in ("all-gather", "all-reduce", "collective-permute", "send")
    disguise = ("async collective fusion" if len(chain) > 1 else "send + recv" if opcode == "send"
                else "async-start wrapper" if place.wrapped or sugar else None)
    common = {"groups": found, "name": instruction.name, "computation": computation.name, "loops": place.loops, "trips": place.trips,
              "calls": place.calls, "conditional": place.conditional, "branch": place.branch,
              "uncertain": place.uncertain,
              "is_async": start or place.is_async or len(chain) > 1,
              "overlapped": fused_between(module, place, chain) if len(chain) > 1 else
              overlapped(module, computation, instruction) if start else place.overlapped}
    sizes = operands(computation, instruction, kind, opcode, found)
    names = split_names(instruction.op_name or place.op_name, len(sizes))
    for index, ((dtype, elements), op_name) in enumerate(zip(sizes, names)):
        hidden = scattered(module, computation, instruction, place, elements // group_size(found, kind), index if len(sizes) > 1 else None) \
            if kind == "all-reduce" and group_size(found, kind) > 1 else None
        yield Collective("reduce-scatter" if hidden else kind, dtype=dtype, elements=elements, op_name=op_name, disguise=hidden or disguise,
                         parts=len(sizes), **common)


def scattered(module, computation, instruction, place, part, index):
    """The disguise of a reduce-scatter (to `part` elements) that is written as an all-reduce, or None for a true all-reduce."""
    if "all-reduce-scatter" in place.fused or "all_reduce_scatter" in place.fused:
        return "all-reduce-scatter fusion"
    done = [user.name for user in computation.uses.get(instruction.name, ()) if user.opcode == "all-reduce-done"]
    name = done[0] if done else instruction.name
    return "all-reduce + slice" if only_sliced(module, computation, name, part, index) else None


def operands(computation, instruction, kind, opcode, found):
    """[(dtype, elements)] of one instruction, by the module's convention."""
    given = [shapes[0] for shapes in computation.operand_shapes(instruction) if shapes]
    if not given:
        raise HloError(f"{instruction.name}: no operand with a shape.")
    if opcode == "ragged-all-to-all":
        # how much is sent shows at run time only; of the buffers before and after, one has room for the worst case, the other for what is due
        return [(given[0].dtype, min(shape.elements for shape in given[:2]))]
    if opcode in ("send", "collective-permute"):
        # after the data come offsets and sizes, a token, or (in place) the buffer and where in it
        given = given[:1] if opcode != "collective-permute" or "slice_sizes" in instruction.attributes else given
    if kind == "all-to-all":                    # a tuple of pieces, one per peer, is one array in pieces
        return [(given[0].dtype, sum(shape.elements for shape in given))]
    if kind == "all-gather":
        return [(shape.dtype, shape.elements * group_size(found, kind)) for shape in given]
    return [(shape.dtype, shape.elements) for shape in given]


def sent_pairs(raw):
    """The pairs of a permute that was taken apart into send and recv, or None for another send."""
    _, mark, rest = raw.partition("_xla_send_recv_source_target_pairs=")
    return rest.split('"')[1] if mark and rest.startswith('"') else rest[:rest.find("}}") + 2] if mark else None


def split_names(op_name, count):
    """op_name for each of `count` operands. XLA writes a combined operation's as `prefix/(first:second:…)`; where the parts are as many as
    the operands they are told apart, else all get the whole."""
    prefix, mark, rest = op_name.partition("(") if op_name.startswith("(") else op_name.partition("/(")
    if not mark or not rest.endswith(")"):
        return [op_name] * count
    parts = rest[:-1].split(":")
    return [f"{prefix}/{part}".lstrip("/") for part in parts] if len(parts) == count else [op_name] * count
