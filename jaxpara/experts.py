"""Sizes of the mixture-of-experts layer on one device: token groups, capacity, cells of the dispatch. No JAX; the program and the plan read it.

A *cell* is a fixed piece of a buffer. With a capacity there is one for each (sending device, expert), else one for each pair of devices.
"""
from dataclasses import dataclass
from math import prod

import numpy as np

from jaxpara.order import slots
from jaxpara.params import capacity, choices


LARGEST_BLOCK, SMALLEST_BLOCK = 128, 8


@dataclass(frozen=True)
class Layout:
    """Of one micro-batch on one device."""
    experts: int                # E
    here: int                   # E/N_ep, experts on this device
    choices: int                # experts per token: K, or E where experts choose
    tokens: int                 # n, that this device routes
    capacity: int | None        # tokens of a group that an expert takes; None: dropless
    cell: int                   # rows of one cell
    transport: str              # "none" where ep = 1

    @property
    def ways(self):
        """N_ep."""
        return self.experts // self.here

    @property
    def sent(self):
        """Rows of the buffer that a device sends, padding included; of ragged sends an upper bound."""
        if self.transport == "ragged":
            return self.tokens * self.choices
        return self.cell * (self.experts if self.capacity else self.ways)

    @property
    def received(self):
        """Most rows that a device's experts can get."""
        every = self.tokens * self.ways * min(self.choices, self.here)
        return min(every, self.here * self.ways * self.cell) if self.capacity else every

    @property
    def regrouped(self):
        """Whether what arrives is sorted by expert a second time: not with cells of single experts, nor when a device has but one."""
        return self.transport in ("all_to_all", "ragged") and self.here > 1 and not (self.capacity and self.transport == "all_to_all")


def split_axes(run):
    """Mesh axes, in use, over which the MoE layer's tokens of one row lie."""
    return run.mesh.live(("sp", "tp") if run.parallel.moe_tp == "tokens" else ("sp",))


def copied_axes(run):
    """Mesh axes, in use, whose ranks route the same tokens: tp, unless it splits them."""
    return () if "tp" in split_axes(run) else run.mesh.live(("tp",))


def shares(run, seq=None):
    """int [ranks, groups]: how many tokens of each group of a row each rank of `split_axes` holds."""
    ranks, group, seq = prod(getattr(run.mesh, axis) for axis in split_axes(run)), run.model.moe.group, seq or run.train.seq
    of_group = slots(run, seq).reshape(ranks, -1) // group
    return np.stack([np.bincount(row, minlength=seq // group) for row in of_group])


def spanning(run, seq=None):
    """Whether some token group lies on several ranks."""
    return bool(((shares(run, seq) > 0).sum(0) > 1).any())


def layout(run, rows=None, evaluation=False, seq=None):
    """The `Layout` of a run. rows, seq: sequences of one micro-batch on this device and their whole length, by default those of training."""
    moe, ep = run.model.moe, run.mesh.ep
    rows = rows if rows is not None else run.train.batch // run.train.microbatches // run.mesh.batch
    held, most, n_choices = shares(run, seq), capacity(moe, evaluation), choices(moe)
    tokens, here = rows * int(held[0].sum()), moe.experts // ep
    if most:
        cell = rows * int(np.minimum(held, most).sum(1).max())
    else:
        cell = tokens * min(n_choices, here)
    return Layout(moe.experts, here, n_choices, tokens, most, cell, run.parallel.moe_transport if ep > 1 else "none")


def block_rows(rows, experts, platform):
    """Rows of a block of grouped matmuls: about half of what an expert gets on average, so that filling up costs little; 1 on TPU."""
    if platform == "tpu":
        return 1
    half = max(rows // (2 * experts), 1)
    return min(LARGEST_BLOCK, max(SMALLEST_BLOCK, 1 << (half - 1).bit_length()))


def buffer_rows(rows, experts, block):
    """Rows of a buffer that holds `rows` of `experts` experts, each from a multiple of `block` on."""
    return -(-(rows + experts * (block - 1)) // block) * block
