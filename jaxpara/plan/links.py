"""Which links of a target a group of mesh axes has, and how long a collective takes on them. No JAX.

A model of bandwidth at its best, with nothing measured in it: use it to compare meshes, not to promise step times.
"""
from collections import Counter
from itertools import product
from math import prod

from jaxpara.config import AXES
from jaxpara.plan.hardware import parse_target

HOP = 1e-6
"""Seconds that a message takes from a TPU to its neighbour (scaling book)."""


def spread(sizes, shape):
    """{axis: its devices along each dim of a torus}: how `jax.experimental.mesh_utils.create_device_mesh` lays a mesh over it.

    sizes: {axis: devices} in mesh order; shape: devices along each dim, of the same product. From the last axis (tp) on, each takes whole
    dims where it can, as many as it can; else parts, first of a dim that is begun.
    """
    left, found = list(shape), {}
    for axis in reversed(sizes):
        taken = [total // rest for total, rest in zip(shape, left)]

        def worth(parts):
            whole = [part for part, total in zip(parts, shape) if part == total]
            return prod(whole), sum(part > 1 for part in whole), prod(part for part, begun in zip(parts, taken) if begun > 1), parts
        found[axis] = max(_factors(sizes[axis], left), key=worth)
        left = [rest // part for rest, part in zip(left, found[axis])]
    return {axis: found[axis] for axis in sizes}


def _factors(n, limits):
    """Every way to write n as a product of one divisor of each limit."""
    if not limits:
        return [()] if n == 1 else []
    return [(part, *rest) for part in range(1, n + 1) if n % part == 0 and limits[0] % part == 0 for rest in _factors(n // part, limits[1:])]


def link_seconds(target, mesh, axes, kind, wire_bytes, calls=1):
    """Seconds that the collectives of one kind over these mesh axes take, or None on CPU.

    target: its name; mesh: `config.Mesh` without "auto" that fills the target; kind: as in `plan.lines`; wire_bytes: sent per device by
    all calls together with ring algorithms, so with (N-1)/N; calls: number of calls. 0 for a group of one device.
    TPU: all-gather, reduce-scatter and all-reduce use all links of the dims that the group extends over: both directions of a ring,
    one of a dim that does not wrap around or of which the group takes a part. A permute uses one link. Bytes of an all-to-all travel
    N²/4(N-1) links of each dim. A call takes 1 µs per hop at least. The two devices of a tpu7x chip count as a ring of two.
    GPU: NVLink inside a node; across nodes each device has its own network card, and a group's k devices in a node send the
    node's share of a ring through k cards; permutes and all-to-alls through one. No latency.
    Sources: scaling book, chapters on sharded matrices (torus) and on GPUs.
    """
    asked = parse_target(target)
    axes = [axis for axis in mesh.live(AXES) if axis in axes]
    if asked.platform == "cpu":
        return None
    if not axes:
        return 0.0
    return (_tpu_seconds if asked.platform == "tpu" else _gpu_seconds)(asked, mesh, axes, kind, wire_bytes, calls)


def _tpu_seconds(target, mesh, axes, kind, wire_bytes, calls):
    shape, wraps, link = target.shape, target.wraps, target.chip.link
    if target.chip.devices > 1:
        shape, wraps = (*shape, target.chip.devices), (*wraps, True)
    laid = spread(mesh.sizes, shape)
    extents = [prod(laid[axis][dim] for axis in axes) for dim in range(len(shape))]
    used = [(extent, link * (2 if wrap and extent == size else 1)) for extent, size, wrap in zip(extents, shape, wraps) if extent > 1]
    around = sum(extent for extent, _ in used)
    hops = {"permute": 1, "all-reduce": around}.get(kind, around / 2)
    if kind == "permute":
        needed = wire_bytes / link
    elif kind == "all-to-all":
        needed = wire_bytes * max(n * n / (4 * (n - 1)) / rate for n, rate in used)
    else:
        needed = wire_bytes / sum(rate for _, rate in used)
    return max(needed, calls * hops * HOP)


def _gpu_seconds(target, mesh, axes, kind, wire_bytes, calls):
    chip, (_, per_node) = target.chip, target.shape
    nodes = {}
    for index, place in enumerate(product(*map(range, mesh.sizes.values()))):
        group = tuple(at for axis, at in zip(mesh.sizes, place) if axis not in axes)
        nodes.setdefault(group, Counter())[index // per_node] += 1
    across = [min(counts.values()) for counts in nodes.values() if len(counts) > 1]
    if not across:
        return wire_bytes / chip.link
    cards = 1 if kind in ("permute", "all-to-all") else min(across)
    return wire_bytes / min(chip.link, cards * chip.out)
