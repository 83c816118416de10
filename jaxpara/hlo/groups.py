"""Replica groups in every spelling of XLA -> tuples of device numbers.

    {{0,1},{2,3}}                                      listed
    {}                                                 all together
    [4,2]<=[2,4]T(1,0)                                 4 groups of 2 from 0…7, seen as 2×4 and transposed
    mesh['a'=2,'b'=4] {'b'}                            over axes of a mesh whose names are XLA's own, not the user's
    mesh['a'=2,'b'=4], device_ids=([2,2,2]T(0,2,1)) {'b':(2)2}     with an order of devices, and of axis b (4) the part of
                                                                   size 2 that has 2 before it
"""
import re
from itertools import product
from math import prod

from jaxpara.hlo.module import HloError

IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?$")
MESH = re.compile(r"@?mesh\w*\[(.*?)\](?:,\s*device_ids=\((.*?)\)(?=\s*[{,]|$))?\s*(\{.*\})?$", re.S)
DEVICES = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?$")


def numbers(text):
    return tuple(int(part) for part in text.split(",") if part.strip())


def transposed(dims, order, values=None):
    """`values` (default 0, 1, …) laid out as `dims`, transposed by `order`, read row by row."""
    steps = [prod(dims[i + 1:]) for i in range(len(dims))]
    places = product(*(range(dims[i]) for i in order))
    flat = [sum(place * steps[i] for place, i in zip(at, order)) for at in places]
    return flat if values is None else [values[i] for i in flat]


def listed(text):
    """Tuples of `{{0,1},{2,3}}`; of `{}` none."""
    return tuple(numbers(inner) for inner in re.findall(r"\{([\d,\s]*)\}", text.strip()[1:-1]) if inner.strip())


def cut(flat, size):
    return tuple(tuple(flat[i:i + size]) for i in range(0, len(flat), size))


def groups(text):
    """Tuple of groups as written; empty for `{}`, which means all there are. Raises HloError for a spelling nobody told us of."""
    text = text.strip()
    if text.startswith("{"):
        return listed(text)
    iota = IOTA.match(text)
    if iota:
        shape, dims = numbers(iota.group(1)), numbers(iota.group(2))
        order = numbers(iota.group(3)) if iota.group(3) else tuple(range(len(dims)))
        if prod(shape) == prod(dims) and len(shape) == 2:
            return cut(transposed(dims, order), shape[1])
    mesh = MESH.match(text)
    if mesh:
        return over_mesh(*mesh.groups(), text)
    raise HloError(f"replica_groups={text}: a spelling this reader does not know.")


def over_mesh(axes, devices, over, text):
    """Groups over the axes, or parts of axes, in `over`; the first named is the slowest within a group."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", axes)}
    parts = [(name, int(before or 1), int(size) if size else None)
             for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", over or "")]
    if not sizes or over is None or any(name not in sizes for name, _, _ in parts):
        raise HloError(f"replica_groups={text}: axes that the mesh does not name.")
    dims, grouped = [], {}
    for name, size in sizes.items():
        # an axis of 8 of which part (2)2 is meant becomes dims 2 (before), 2 (meant), 2 (after)
        left = 1
        for _, before, part in sorted((p for p in parts if p[0] == name), key=lambda p: p[1]):
            part = part or size
            if before % left or size % (before * part):
                raise HloError(f"replica_groups={text}: '{name}' of {size} has no part ({before}){part}.")
            dims += [before // left, part]
            grouped[name, before] = len(dims) - 1
            left = before * part
        dims.append(size // left)
    inner = [grouped[name, before] for name, before, _ in parts]
    outer = [i for i in range(len(dims)) if i not in inner]
    order = device_order(devices, prod(sizes.values()), text)
    return cut(transposed(tuple(dims), (*outer, *inner), order), prod(dims[i] for i in inner))


def device_order(devices, count, text):
    """List of device numbers in mesh order: as listed, or a transposed count, or 0, 1, … where nothing is said."""
    if devices is None:
        return list(range(count))
    found = DEVICES.match(devices.strip())
    if found:
        dims = numbers(found.group(2) or found.group(1))
        order = transposed(dims, numbers(found.group(3)) if found.group(3) else tuple(range(len(dims))))
    else:
        order = list(numbers(devices.strip("[]{} ")))
    if sorted(order) != list(range(count)):
        raise HloError(f"replica_groups={text}: the devices are not a permutation of {count}.")
    return order


def flattened(found, attributes, kind, replicas, partitions):
    """Groups of partition ids (of replica · partitions + partition, if there are replicas too) from groups as written.

    What the numbers mean depends on two attributes (XLA: GetCollectiveOpGroupMode): without channel_id they are replicas; with it
    replicas with all their partitions; with use_global_device_ids too, flattened ids. All-to-alls and permutes with channel_id name
    partitions.
    """
    named, in_partitions = "channel_id" in attributes, range(partitions)
    if named and kind in ("all-to-all", "permute"):
        return tuple(tuple(r * partitions + p for p in group) for r in range(replicas) for group in found or (tuple(in_partitions),))
    outside = any(i >= replicas for group in found for i in group)      # cannot be replicas, whatever the attributes say
    if outside or (named and attributes.get("use_global_device_ids") == "true"):
        return found or (tuple(range(replicas * partitions)),)
    written = found or (tuple(range(replicas)),)
    if named:
        return tuple(tuple(r * partitions + p for r in group for p in in_partitions) for group in written)
    return tuple(tuple(r * partitions + p for r in group) for group in written for p in in_partitions)


def group_size(groups, kind):
    """Devices in the largest group; of a permute, in its longest ring or chain."""
    return max(map(len, joined(groups) if kind == "permute" else groups), default=1)


def joined(pairs):
    """Sets of devices that (source, target) pairs connect."""
    sets = {}
    for pair in pairs:
        whole = set(pair).union(*(sets.get(i, ()) for i in pair))
        sets.update(dict.fromkeys(whole, whole))
    return {id(whole): whole for whole in sets.values()}.values()
