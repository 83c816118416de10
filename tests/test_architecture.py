"""The shape of the house: imports go one way, modules and functions stay small, the plan needs no JAX."""
import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted((ROOT / "jaxpara").rglob("*.py"))

ORDER = ["errors", "config", "pipeline", "params", "rules", "zero", "moe_checks", "checks", "order", "experts", "settings", "hf", "plan", "hlo", "report", "data", "mesh", "collectives", "taps",
         "kernels", "transport", "optim", "model", "targets", "state", "batch", "context", "gradients", "executors", "balance", "step", "rundir", "train", "cli"]
"""A module imports only from its own package and from those before it."""

JAX_FREE = ["errors", "config", "params", "rules", "zero", "pipeline", "moe_checks", "checks", "order", "experts", "settings", "hf", "plan", "data", "report", "hlo"]
LONGEST_MODULE, LONGEST_FUNCTION, LONGEST_KERNEL, MOST_ARGUMENTS = 400, 60, 100, 9


def name_of(path):
    return path.relative_to(ROOT / "jaxpara").with_suffix("").parts[0]


def imports(tree):
    """Top-level jaxpara imports of a module, and the names of foreign packages."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            yield node.module
            if node.module == "jaxpara":
                yield from (f"jaxpara.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_module(path):
    text = path.read_text()
    tree, own = ast.parse(text), name_of(path)
    assert len(text.splitlines()) < LONGEST_MODULE
    assert max(map(len, text.splitlines()), default=0) <= 150
    assert own == "__init__" or ast.get_docstring(tree), "every module says what it is"
    longest = LONGEST_KERNEL if own == "kernels" else LONGEST_FUNCTION
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < longest, f"{node.name} has {node.end_lineno - node.lineno + 1} lines"
            count = len(node.args.args) + len(node.args.kwonlyargs)
            assert count <= MOST_ARGUMENTS + (own == "kernels"), f"{node.name} has {count} arguments"
    if own in ("__init__", "__main__"):
        return
    assert own in ORDER, f"{own} has no place in the import order"
    for name in imports(tree):
        parts = name.split(".")
        if parts[0] == "jaxpara" and len(parts) > 1 and parts[1] in ORDER and parts[1] != own:
            assert ORDER.index(parts[1]) < ORDER.index(own), f"{own} imports {name}, which comes after it"
        if own in JAX_FREE:
            assert parts[0] not in ("jax", "flax", "optax"), f"{own} imports {name}"


def test_configuring_and_planning_need_no_jax():
    """Planning is instant because JAX is never imported."""
    code = ("import sys, jaxpara; from jaxpara.plan import traffic, model_state; run = jaxpara.load('gpt_tiny'); traffic(run); "
            "model_state(run); jaxpara.explain(run); sys.exit('jax' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_nothing_reads_the_house_papers():
    """The project contains what it needs; the folder beside it may not be there."""
    named = [path for path in ROOT.rglob("*") if path.suffix in (".py", ".sh", ".toml") and ".venv" not in path.parts
             and path != Path(__file__).resolve() and "shared/" in path.read_text()]
    assert named == []


def test_recipes_say_how_to_run_them_and_what_they_send():
    for path in sorted((ROOT / "recipes").glob("*.py")):
        if path.stem != "__init__":
            function = next(node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef))
            text = ast.get_docstring(function)
            assert function.name == path.stem and "jaxpara " in text and path.stem in text and "Collectives:" in text


def test_the_table_in_the_readme_is_what_plan_prints():
    readme = (ROOT / "README.md").read_text()
    table = readme[readme.index("model state per device"):].split("```")[0].splitlines()
    shown = subprocess.run([sys.executable, "-m", "jaxpara", "plan", "gpt_hybrid_zero"], capture_output=True, encoding="utf-8",
                           env={**os.environ, "COLUMNS": "100", "PYTHONIOENCODING": "utf-8"}).stdout.splitlines()
    first = next(i for i, line in enumerate(shown) if line.startswith("model state per device"))
    assert [line.rstrip() for line in shown[first:first + len(table)]] == table
