"""`ctx`: what the model knows of parallelism, and its two lowerings.

Manual: the model runs on one device's pieces inside a single `shard_map` over the whole mesh; every collective is ours.
Annotated: the model runs on global arrays under `jit`; sharding constraints say where things lie and XLA chooses the collectives,
kernels apart, which stay `shard_map`. Both run the same model code and give the same numbers.

A block sees a *border* layout ([b, S/N_sp, H], with `tp_sequence` [b, S/(N_sp·N_tp), H]) and, between `enter` and `exit`,
the inside of tensor parallelism: all of the sp shard's tokens, this device's heads or inner width.
"""
from jaxpara.context.annotated import AnnotatedCtx
from jaxpara.context.base import Moment, Rows, Stored, attention_kernel, differentiable
from jaxpara.context.manual import ManualCtx
from jaxpara.context.routing import seen, sum_loads

__all__ = ["AnnotatedCtx", "ManualCtx", "Moment", "Rows", "Stored", "attention_kernel", "differentiable", "seen", "sum_loads"]
