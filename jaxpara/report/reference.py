"""The lists that a user looks things up in: recipes and settings. No JAX."""
import ast
import inspect
import re
from types import NoneType, UnionType
from typing import Literal, Union, get_args, get_origin

from rich.table import Table
from rich.text import Text

from jaxpara import checks, config
from jaxpara.settings import recipes


def recipe_table():
    """Every shipped recipe with the first line of its docstring, read without running it."""
    table = Table.grid(padding=(0, 2))
    for name, path in recipes().items():
        functions = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef) and node.name == name]
        words = ast.get_docstring(functions[0]) if functions else None
        table.add_row(Text(name, "bold"), (words or "").partition("\n")[0])
    return table


def setting_table():
    """Every dotted setting: what it takes, its default, and the comment beside it in config.py."""
    notes, table = comments(), Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("setting", "takes", "default", "meaning"):
        table.add_column(heading, header_style="bold", overflow="fold")
    for name, kind, value in config.settings_of(config.Run()):
        table.add_row(Text(name, "bold"), kind_text(kind), checks.text(value), notes.get(name, ""))
    return table


def kind_text(kind):
    """An annotation in words: "a | b", "whole number", "none"."""
    if get_origin(kind) is Literal:
        return " | ".join(get_args(kind))
    if get_origin(kind) is tuple:
        return "whole numbers with commas"
    if get_origin(kind) in (Union, UnionType):
        return " | ".join(kind_text(option) for option in get_args(kind))
    return {bool: "true | false", int: "whole number", float: "number", str: "text", NoneType: "none"}[kind]


def comments():
    """{dotted setting: the comment beside its field}. A field without one shares its class's docstring."""
    found = {}

    def read(node, prefix):
        source = inspect.getsource(type(node))
        for name, value in vars(node).items():
            if hasattr(value, "__dataclass_fields__"):
                read(value, f"{prefix}{name}.")
                continue
            beside = re.search(rf"^    {name}:[^#\n]*#\s*(.*)$", source, re.MULTILINE)
            shared = inspect.getdoc(type(node)) or ""
            found[prefix + name] = beside[1] if beside else "" if shared.startswith(f"{type(node).__name__}(") else shared
    read(config.Run(), "")
    return found
