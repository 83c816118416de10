"""All-reduces of which every device uses only its own piece: reduce-scatters under another name (XLA:CPU, and all-reduce-scatter on TPU)."""

VIEWS = ("bitcast", "copy", "convert", "reshape", "transpose", "get-tuple-element", "optimization-barrier")
IDENTITY = ("partition-id", "replica-id")


def only_sliced(module, computation, name, part, index=None):
    """Whether all uses of `name` (of its element `index`, if it is a tuple) are slices of `part` elements, at a place that depends on the
    device."""
    users = computation.uses.get(name, ())
    root = computation.root is not None and computation.root.name == name
    if index is not None:
        users = [user for user in users if user.opcode != "get-tuple-element" or int(user.attributes["index"]) == index]
        if any(user.opcode != "get-tuple-element" for user in users):
            return False
    return bool(users) and not root and all(is_slice(module, computation, name, user, part) for user in users)


def is_slice(module, computation, name, user, part):
    if user.opcode == "dynamic-slice":
        return (user.operands[0] == name and user.shapes[0].elements == part
                and any(depends_on_device(module, computation, offset) for offset in user.operands[1:]))
    if user.opcode in VIEWS:
        return only_sliced(module, computation, user.name, part)
    if user.opcode in ("fusion", "call"):
        called = module.computations.get(next(iter(user.called.values()), ("",))[0])
        if called is None:
            return False
        inside = Inlined(called, computation, user)
        return all(number in called.parameters and only_sliced(module, inside, called.parameters[number].name, part)
                   for number, operand in enumerate(user.operands) if operand == name)
    return False


class Inlined:
    """A fused computation together with where it is called from, so that an offset can be followed out of it."""

    def __init__(self, called, outside, user):
        self.uses, self.named, self.root = called.uses, called.named, called.root
        self.outside, self.operands = outside, user.operands


def depends_on_device(module, computation, name, seen=None):
    """Whether the value follows from the device's own number, or is carried unchanged through a loop (XLA moves what does not change out)."""
    seen = set() if seen is None else seen
    if (id(computation), name) in seen or name not in computation.named:
        return False
    seen.add((id(computation), name))
    instruction = computation.named[name]
    if instruction.opcode in IDENTITY:
        return True
    if instruction.opcode == "get-tuple-element" and carried(computation, instruction):
        return True
    if instruction.opcode == "parameter":
        if not isinstance(computation, Inlined):
            return False
        number = int(instruction.literal)
        return number < len(computation.operands) and depends_on_device(module, computation.outside, computation.operands[number], seen)
    if instruction.opcode in ("fusion", "call"):
        called = module.computations.get(next(iter(instruction.called.values()), ("",))[0])
        if called is not None and any(i.opcode in IDENTITY for i in called.instructions):
            return True
    return any(depends_on_device(module, computation, operand, seen) for operand in instruction.operands)


def carried(computation, element):
    """Whether `element` of a loop body's state leaves the body as it came: so not the counter, nor anything that is updated."""
    source = computation.named.get(element.operands[0])
    root, index = computation.root, int(element.attributes["index"])
    if source is None or source.opcode != "parameter" or root is None or root.opcode != "tuple" or index >= len(root.operands):
        return False
    last = computation.named.get(root.operands[index])
    return last is not None and last.opcode == "get-tuple-element" and last.operands == element.operands and last.attributes["index"] == str(index)
