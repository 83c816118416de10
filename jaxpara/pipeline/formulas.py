"""Bubbles in closed form, hop time 0. No JAX."""


def bubble_time(kind, p, m, v=1, times=(1, 1, 1)):
    """Idle time of a stage in one step, in the unit of `times`: F, B, W of one micro-batch through one stage, all v chunks of it.

    None where there is no closed form: zb_h1 and zb_h2 with W longer than F or B, zb_v unless F = B = W, dualpipe_v unless B + W ≥ F ≥ B ≥ W; and
    too few micro-batches for zb_h2 and zb_v (2p-1) and dualpipe_v (2p).
    Source: Narayanan et al. 2021; Qi et al. 2023, table 1. dualpipe_v is ours: DualPipe's own table has (p-1)(F&B + B + W - 3W)/2 for a V of p
    stages, F&B the time of an overlapped pair; here nothing overlaps, and B sends its gradient before W starts.
    """
    f, b, w = times
    whole = f + b + w
    if kind in ("gpipe", "1f1b", "interleaved"):
        return (p - 1) * whole / v
    if kind == "circular":
        return ((v - 1) * max(p - m, 0) + p - 1) * whole / v
    if kind == "zb_h1":
        return (p - 1) * (f + b - w) if w <= min(f, b) else None
    if kind == "zb_h2":
        return (p - 1) * (f + b - 2 * w) if w <= min(f, b) and m >= 2 * p - 1 else None
    if kind == "zb_v":
        return 0 if f == b == w and m >= 2 * p - 1 else None
    return (p - 1) * (f + b - w) / 2 if b + w >= f >= b >= w and m >= 2 * p else None


def bubble_fraction(kind, p, m, v=1):
    """Bubble over the whole step for F = B = W and hop 0: of the closed form where there is one, else simulated."""
    bubble = bubble_time(kind, p, m, v)
    return simulated_fraction(kind, p, m, v) if bubble is None else bubble / (3 * m + bubble)


def simulated_fraction(kind, p, m, v):
    """The same from the table itself."""
    from jaxpara.pipeline.builders import build
    from jaxpara.pipeline.simulate import simulate
    return simulate(build(kind, p, m, v)).bubble_fraction
