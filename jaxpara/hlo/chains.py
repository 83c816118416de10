"""TPU's async collective fusions: one collective, spread over fusions that compute meanwhile.

A fusion `async-collective-start`, any number of fusions of real work and one `async-collective-done` each hold a copy of the same
collective, with one channel_id and one chain_id between them.
"""
import re

CHAIN = re.compile(r'channel_id=(\d+).*chain_id="?(\d+)"?', re.S)


def key(instruction):
    """(channel, chain) of a copy, or None for a collective that is whole."""
    found = CHAIN.search(instruction.raw) if "chain_id" in instruction.raw else None
    return found.groups() if found else None


def chains(module, computation):
    """{key: names of the fusions of `computation` that hold copies, in order}."""
    found = {}
    for instruction in computation.instructions:
        if instruction.opcode == "fusion":
            for copy in dict.fromkeys(held(module, instruction)):
                found.setdefault(copy, []).append(instruction.name)
    return found


def held(module, fusion):
    for name in (name for names in fusion.called.values() for name in names):
        for instruction in module.computations[name].instructions if name in module.computations else ():
            copy = key(instruction)
            if copy:
                yield copy
            if instruction.opcode == "fusion":
                yield from held(module, instruction)
