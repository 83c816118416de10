"""Attention kernels. Each is a pair of plain functions on one device's arrays, with the backward pass stated:

    forward(query, key, value, positions, segments) -> (out, residuals)
    backward(residuals, out_cotangent) -> (query_cotangent, key_cotangent, value_cotangent)

query: [b, s, N_q, d]; key, value: [b, s, N_kv, d] (N_q a multiple of N_kv): this device's slots of the sequence.
positions, segments: int32 [b, S]: of the whole row, in slot order. `context.py` joins the pair into a differentiable function under either lowering.
"""
from typing import Callable, NamedTuple


class Kernel(NamedTuple):
    forward: Callable
    backward: Callable
