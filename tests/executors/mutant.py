"""The circular executor with a fault that no patch can plant: one expression of its source replaced."""
import inspect
from importlib import import_module

circular = import_module("jaxpara.executors.circular")      # `jaxpara.executors.circular` is the function of that name
FED = "jnp.where(active, x, lax.stop_gradient(embedded[0]))"


def bubbles_run_what_arrived():
    """`ticks` without the filler: a bubble's chunk runs on whatever came from the stage before, as `hand_on` now sends it."""
    source = inspect.getsource(circular.ticks)
    assert source.count(FED) == 1, "the executor says this in other words now: say here how to take it out"
    namespace = dict(vars(circular))
    exec(source.replace(FED, "x"), namespace)
    return namespace["ticks"]
