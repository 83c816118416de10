"""What a traced program sends, read from its jaxpr: the tests' own account of collectives, independent of `jaxpara.plan`."""
from collections import defaultdict
from math import prod

import jax
from jax.extend import core
from jax.interpreters import partial_eval

from jaxpara.step import moment

KINDS = {"psum": "all-reduce", "psum_invariant": "all-reduce", "pmax": "all-reduce", "all_gather": "all-gather",
         "all_gather_invariant": "all-gather", "reduce_scatter": "reduce-scatter", "all_to_all": "all-to-all", "ppermute": "permute"}


def collectives(jaxpr, sizes, times=1, found=None):
    """{(axes, kind): [calls, wire bytes]} of a (closed) jaxpr; loop bodies count as often as they run. sizes: {axis: devices}."""
    found = defaultdict(lambda: [0, 0]) if found is None else found
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    for equation in jaxpr.eqns:
        kind = KINDS.get(equation.primitive.name)
        if kind:
            add(equation, kind, sizes, times, found)
        inner = times * equation.params["length"] if equation.primitive.name == "scan" else times
        for value in equation.params.values():
            for sub in value if isinstance(value, (tuple, list)) else [value]:
                if isinstance(sub, (core.Jaxpr, core.ClosedJaxpr)):
                    collectives(sub, sizes, inner, found)
    return found


def add(equation, kind, sizes, times, found):
    axes = equation.params.get("axes") or equation.params.get("axis_name")
    axes = (axes,) if isinstance(axes, str) else tuple(axes)
    groups = equation.params.get("axis_index_groups")
    n = len(groups[0]) if groups else prod(sizes[axis] for axis in axes)
    for operand, result in zip(equation.invars, equation.outvars):
        aval = (result if kind == "all-gather" else operand).aval
        size = aval.size * aval.dtype.itemsize
        wire = size if kind == "permute" else (2 if kind == "all-reduce" else 1) * size * (n - 1) / n
        entry = found[axes, kind]
        entry[0] += times
        entry[1] += times * wire


def traced(program):
    """`collectives` of a program's gradient computation (all but the optimizer)."""
    state, batch = program.abstract()
    jaxpr = jax.make_jaxpr(program._gradients)(state.params, batch, moment(state))
    dead_free, _ = partial_eval.dce_jaxpr(jaxpr.jaxpr, [True] * len(jaxpr.jaxpr.outvars))
    return collectives(dead_free, dict(program.mesh.shape))
