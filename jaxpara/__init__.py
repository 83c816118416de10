"""jaxpara: every parallelism a named mesh axis, and what it communicates known before it runs.

    run = jaxpara.load("gpt_tiny", {"mesh.dp": 2})    # recipe name or path, dotted overrides -> Run
    program = jaxpara.build(run)                      # -> Program: init, step, loss_and_grads, params, logits, lower
"""
from jaxpara.config import Data, Mesh, MoE, Model, Optim, Parallel, Precision, Run, Train, Zero
from jaxpara.errors import ConfigError
from jaxpara.settings import load, loads, recipe, recipes

__all__ = ["ConfigError", "Data", "Mesh", "MoE", "Model", "Optim", "Parallel", "Precision", "Run", "Train", "Zero",
           "build", "explain", "load", "loads", "recipe", "recipes"]


def build(run, target=None):
    """Compile-ready `Program` for a `Run`; see `jaxpara.step.build`. (JAX is imported here, not by `import jaxpara`.)"""
    from jaxpara.step import build as build_program
    return build_program(run, target)


def explain(run):
    """Text table: for every parameter its labels, specs, shape and bytes per device, and the reason. No JAX needed."""
    from jaxpara.report.explain import explain as explain_text
    return explain_text(run)
