"""The ZeRO table: one parameter's base spec -> its storage, gradient and optimizer specs. Plain tuples; no JAX.

ZeRO is a property of a parameter's replica group: the axes that hold copies of it (dp, fsdp, sp, and ep, pp where they do).
Each axis has its own stage; what a stage shards over its axis (SPEC: Rajbhandari et al. 2020, arXiv 1910.02054):

    stage   storage   gradient   optimizer      reduced
    0       –         –          –              once per step, all-reduce
    1       –         –          sharded        once per step, reduce-scatter; parameters gathered once per step
    2       –         sharded    sharded        reduce-scatter in every micro-batch; parameters gathered once per step
    3       sharded   sharded    sharded        gathered per layer in forward and backward, reduce-scatter per layer

The three specs lengthen one dim only, higher stages first (major), so that a change from one to the next is one gather or
one scatter and never a permute: storage (tp, fsdp) -> gradient (tp, fsdp, sp) -> optimizer (tp, fsdp, sp, dp).
"""
from dataclasses import dataclass
from functools import cached_property
from math import prod

from jaxpara.config import AXES, Mesh
from jaxpara.params import Parameter, padded_vocab, parameters
from jaxpara.pipeline.placing import Stack, only, stack
from jaxpara.rules import kv_replicated, live, local_shape, parameter_rules, shards

REPLICA_AXES = ("pp", "dp", "fsdp", "ep", "sp")
"""Axes a dense parameter may have copies over, tp apart (whose copies are stage 0)."""


@dataclass(frozen=True)
class Placement:
    """Where one parameter lives. Specs: a tuple per dim of axis names, live axes only."""
    parameter: Parameter
    mesh: Mesh
    shape: tuple[int, ...]              # stored: the vocabulary padded to a multiple of tp, the layers in rows of `stack`
    base: tuple                         # by the rules, before ZeRO
    dim: int | None                     # the dim that ZeRO lengthens; None: nothing divides
    stages: dict[str, int]              # stage in force per live replica axis
    dropped: tuple[str, ...]            # axes whose stage could not be honoured since no dim divides
    tp_sum: bool                        # copies over tp see different tokens or heads: their gradients are summed over tp
    kv_slice: int | None                # dim of which a tp rank uses only its own KV head(s)
    stack: Stack                        # which layer each row of a stacked parameter holds
    inner: int | None = None            # reduce-scatters over one larger axis go in two steps, the second among so many neighbours

    @property
    def name(self):
        return self.parameter.name

    def axes(self, *stages):
        """Axes in one of these stages, in mesh order."""
        return tuple(axis for axis in AXES if self.stages.get(axis) in stages)

    def _extend(self, *stages):
        if self.dim is None:
            return self.base
        added = tuple(axis for stage in sorted(stages, reverse=True) for axis in self.axes(stage))
        return tuple(dim + added if i == self.dim else dim for i, dim in enumerate(self.base))

    @cached_property
    def storage(self):
        return self._extend(3)

    @cached_property
    def gradient(self):
        return self._extend(3, 2)

    @cached_property
    def optimizer(self):
        return self._extend(3, 2, 1)

    @property
    def held(self):
        """Layers of a stacked parameter on one device, padding included."""
        return len(self.stack.rows) // self.mesh.pp

    def elements(self, spec):
        """Elements on one device under `spec`."""
        return prod(local_shape(self.shape, spec, self.mesh))


def placements(run):
    """{name: Placement} of every parameter of a resolved, checked run."""
    layers = stack(run)
    return {parameter.name: place(parameter, run, layers) for parameter in parameters(run.model)}


def place(parameter, run, layers):
    """The `Placement` of one parameter under a run's mesh, rules and ZeRO table. layers: the run's `Stack`."""
    mesh = run.mesh
    layers = only(layers, parameter.of) if parameter.stacked else layers
    stored = {"vocab": padded_vocab(run.model, run.mesh), "layers": len(layers.rows)}
    shape = tuple(stored.get(label, size) for label, size in zip(parameter.labels, parameter.shape))
    base = live(parameter_rules(run).spec(parameter.labels), mesh)
    sharded = {axis for dim in base for axis in dim}
    wanted = {axis: getattr(run.parallel.zero, axis) for axis in mesh.live(REPLICA_AXES) if axis not in sharded}
    kv_slice = parameter.labels.index("kv_heads") if "kv_heads" in parameter.labels and kv_replicated(run) else None
    ordered = sorted((axis for axis, stage in wanted.items() if stage), key=lambda axis: -wanted[axis])
    dim, kept = None, list(ordered)
    while kept and dim is None:
        dim = largest_dim(parameter.labels, shape, base, prod(getattr(mesh, axis) for axis in kept), mesh, kv_slice)
        if dim is None:
            kept.pop()
    stages = {axis: stage if axis in kept else 0 for axis, stage in wanted.items()}
    return Placement(parameter, mesh, shape, base, dim, stages, tuple(ordered[len(kept):]),
                     mesh.tp > 1 and "tp" not in sharded and tp_partial(parameter, run), kv_slice, layers,
                     run.parallel.scatter_inner)


def scatter_steps(n, axes, inner):
    """Group sizes of the steps of a reduce-scatter over `axes`, n devices in all: one, or over a single axis of more than `inner` two."""
    return (n // inner, inner) if inner and len(axes) == 1 and n > inner and n % inner == 0 else (n,)


def largest_dim(labels, shape, base, ways, mesh, kv_slice):
    """Index of the largest dim whose local piece splits `ways` ways, or None. Never the layers, nor KV heads that ranks slice."""
    fits = [(size, -i) for i, (label, size, split) in enumerate(zip(labels, shape, shards(base, mesh)))
            if label != "layers" and i != kv_slice and size // split % ways == 0]
    return -max(fits)[1] if fits else None


def tp_partial(parameter, run):
    """Whether the copies of an unsharded parameter on the tp ranks get different (partial) gradients.

    Norms, exit biases and positions work between blocks: on all tokens, alike on every rank, unless Megatron-SP (tp_sequence) splits them.
    Query/key norms and sliced KV projections work inside a block, on the rank's own heads; a router's weights of the experts, on the rank's own
    columns of them, or, like experts whose width tp does not split, on the rank's own tokens.
    """
    inside = "kv_heads" in parameter.labels or parameter.labels[-1] == "head_dim" or parameter.name.startswith("layers.moe.")
    return inside or run.parallel.tp_sequence


def why(placement, run):
    """One phrase per dim: why it is split over what it is, or is whole."""
    mesh, reasons = run.mesh, []
    for i, label in enumerate(placement.parameter.labels):
        tensor, zero = placement.base[i], placement.optimizer[i][len(placement.base[i]):]
        parts = [f"{label} → {'·'.join(tensor)} by rule"] if tensor else []
        if zero:
            parts.append(f"{label} + {', '.join(f'{axis} (ZeRO-{placement.stages[axis]})' for axis in zero)}: largest dim that divides")
        if label == "kv_heads" and placement.kv_slice is not None:
            parts.append(f"kv_heads whole: {run.model.kv_heads} heads < tp {mesh.tp}, each rank uses its own")
        if label == "vocab" and placement.shape[i] != placement.parameter.shape[i]:
            parts.append(f"vocab padded {placement.parameter.shape[i]} → {placement.shape[i]}")
        reasons += parts
    if placement.dropped:
        reasons.append(f"replicated over {', '.join(placement.dropped)}: no dim of {placement.shape} divides")
    if not reasons:
        reasons.append("whole: no rule and no ZeRO stage splits it")
    return "; ".join(reasons)
