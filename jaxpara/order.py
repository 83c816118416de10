"""The order in which a sequence sharded over sp stores its tokens, so that causal attention costs every device the same."""
from math import lcm

import numpy as np

from jaxpara.checks import ring_degree, ulysses_degree
from jaxpara.errors import ConfigError

KINDS = ("contiguous", "zigzag", "striped")


def order(seq, ring, inner, kind):
    """int64 [seq]: the original index of the token stored in each slot.

    The slots are split contiguously over sp = ring·inner devices: device g·inner + j is the j-th of ring group g (inner: the
    Ulysses degree). Group g's block of seq/ring slots holds
      contiguous: tokens g·seq/ring onwards, so order is the identity;
      zigzag: chunks g and 2·ring-1-g of 2·ring chunks;
      striped: tokens g, g + ring, g + 2·ring, …
    With ring = 1 all three are the identity: there is nothing to balance.
    Raises ConfigError when `seq` does not split so, or `kind` is none of these.
    """
    if kind not in KINDS:
        raise ConfigError(f"parallel.sp_order = {kind} is not known. Legal: {', '.join(KINDS)}.")
    zigzag = kind == "zigzag" and ring > 1
    step = lcm(ring * inner, 2 * ring) if zigzag else ring * inner
    if seq % step:
        chunks = f" and 2·{ring} chunks (zigzag)" * zigzag
        raise ConfigError(f"train.seq = {seq} must be a multiple of {step}, for mesh.sp = {ring * inner}{chunks}.")
    tokens = np.arange(seq)
    if zigzag:
        chunks = tokens.reshape(2 * ring, -1)
        return np.stack([chunks[:ring], chunks[:ring - 1:-1]], axis=1).reshape(seq)
    return tokens.reshape(-1, ring).T.reshape(seq) if kind == "striped" else tokens


def slots(run, seq):
    """int [S]: the original index of the token in each slot of the run's sequence order."""
    kind = run.parallel.sp_order if run.mesh.sp > 1 else "contiguous"
    return order(seq, ring_degree(run), ulysses_degree(run), kind)


def inverse(order):
    """int64 [seq]: the slot that stores each token, so stored[inverse(order)] undoes stored = tokens[order]."""
    return np.argsort(order)
