"""Whose a collective is: replica groups -> mesh axes by coordinates, op_name -> phase and owner.

Partition i of the program is the device at row-major place i of the mesh, whatever its own id.
"""
import re
from itertools import product
from math import prod

from jaxpara.hlo.groups import group_size

SCOPE = re.compile(r"(?<![\w.])(zero[0-3]\.(?:gather|scatter|sum)|update\.gather|norm\.sum|tp\.(?:enter|exit)|ring|ulysses|kv|loss|zero_r|border|moe)"
                   r"(?:\.([\w.]+))?(?![\w.])")

PULLED_BACK = re.compile(r"(transpose\()?jvp\(")
"""The marks of differentiation, outermost first; a plain jvp( inside a transpose(jvp( is a forward pass run again by our own backward."""


DIVIDED = re.compile(r"transpose\(pipeline\.\w+\)/jvp\(")
"""How JAX writes transpose(jvp( where a scope of ours stands right around the differentiated function."""


def coordinates(index, sizes):
    """{axis: place} of partition `index` in a mesh of `sizes`."""
    place = {}
    for axis, size in reversed(sizes.items()):
        index, place[axis] = divmod(index, size)
    return place


def moved(devices, sizes):
    """Axes along which these devices lie apart, in mesh order."""
    places = [coordinates(device, sizes) for device in devices]
    return tuple(axis for axis in sizes if len({place[axis] for place in places}) > 1)


def axes_of(groups, kind, sizes):
    """Axes (in mesh order) that the groups span, () if nobody talks to anybody, None if no axes explain them.

    sizes: {axis: devices} of the whole mesh in its order. Groups must be all the devices' and alike: everything that differs in these
    axes only; or, of a single axis, equal parts (`group_size` tells). A permute must move all its pairs along one axis.
    """
    if any(not 0 <= device < prod(sizes.values()) for group in groups for device in group):
        return None
    if kind == "permute":
        found = {moved(pair, sizes) for pair in groups if len(set(pair)) > 1}
        return () if not found else found.pop() if len(found) == 1 and len(next(iter(found))) == 1 else None
    if all(len(group) == 1 for group in groups):
        return ()
    devices = sorted(device for group in groups for device in group)
    if devices != list(range(prod(sizes.values()))) or len({len(group) for group in groups}) > 1:
        return None
    found = {moved(group, sizes) for group in groups}
    axes = found.pop()
    whole = prod(sizes[axis] for axis in axes)
    size = group_size(groups, kind)
    return axes if not found and (size == whole or (len(axes) == 1 and whole % size == 0)) else None


def groups_over(axes, sizes):
    """The groups of partition ids that span `axes`: what `axes_of` undoes."""
    found = {}
    for index, place in enumerate(product(*map(range, sizes.values()))):
        found.setdefault(tuple(at for axis, at in zip(sizes, place) if axis not in axes), []).append(index)
    return tuple(map(tuple, found.values()))


def phase_of(op_name):
    """One of `plan.lines.PHASES`. Our scope decides where there is one; else JAX's marks: transposed is backward, rematted is recompute."""
    op_name = DIVIDED.sub("transpose(jvp(", op_name)
    scope, part = scope_of(op_name)
    if scope.startswith(("zero0", "zero1", "zero2")):
        return "reduce"
    if scope == "zero3.scatter":
        return "backward"
    if scope == "border":
        return "backward" if part == "collect" or "transpose(" in op_name else "forward"
    if scope == "loss" or (scope, part) == ("moe", "totals"):
        return "loss"
    if "rematted_computation" in op_name or scope == "zero_r" or PULLED_BACK.findall(op_name)[-1:] == [""] and "transpose(" in op_name:
        return "recompute"
    if part in ("backward", "gradient"):
        return "backward"
    if scope in ("update.gather", "norm.sum") or not scope and "optimizer" in re.split(r"[/(:]", op_name):
        return "optimizer"
    if "transpose(" in op_name:
        return "backward"
    # a pipeline's B runs its chunk again before it goes backward through it
    return "recompute" if "pipeline.backward" in op_name else "forward"


def owner_of(op_name):
    """The parameter ("layers.mlp.up") or the block ("attention", "mlp", "embedding", "head", "loss") in our scope; "" without one."""
    scope, part = scope_of(op_name)
    if scope in ("ring", "ulysses", "kv"):
        return "attention"
    if scope == "border":
        return "border" if part == "send" else "head"
    return scope if scope in ("loss", "moe") else part


def scope_of(op_name):
    """(scope, what follows it) of the innermost of our scopes, ("", "") without one."""
    found = SCOPE.findall(op_name)
    return found[-1] if found else ("", "")
