"""Recipes and dotted settings: the one door through which `Run` objects come, for Python and the command line alike."""
import difflib
import importlib.util
import json
import math
import traceback
from dataclasses import replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Literal, Union, get_args, get_origin

from jaxpara import checks
from jaxpara.config import Run, resolve, settings_of
from jaxpara.errors import ConfigError


def load(name, overrides=None, data=False):
    """Recipe name, path of a recipe (`.py`) or of a saved `config.json`, and dotted overrides -> a resolved, checked `Run`.

    overrides: dict such as {"mesh.tp": 2, "parallel.zero.dp": 1}; values may be strings as typed on a command line. data: check
    also what matters only when jaxpara reads the text itself.
    Raises ConfigError with every violation at once. A recipe's own value that an override makes idle becomes a line in
    `run.notes`; an idle value among `overrides` is an error.
    """
    return configure(recipe(name), overrides, data)


def configure(run, overrides=None, data=False):
    """Apply dotted overrides to a `Run`, resolve it and check it; as `load`, which see."""
    given = {name: value for name, _, value in settings_of(run)}
    run, _, wrong = override(Run(notes=run.notes), given)      # a recipe's own values are checked as typed ones are
    run, typed, more = override(run, overrides or {})
    run, wrong = resolve(run), wrong + more
    errors, notes = checks.check(run, typed, set(overrides or {}) - typed)
    errors += checks.check_data(run) if data else ()
    if wrong or errors:
        raise ConfigError(*wrong, *errors)
    return replace(run, notes=tuple(notes))


def loads(text):
    """The `Run` that `dumps` wrote (a run directory's config.json)."""
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"The saved configuration is not JSON: {error}.") from None
    if not isinstance(tree, dict):
        raise ConfigError("The saved configuration is JSON, but not an object of settings.")
    run, _, wrong = override(Run(), flatten(tree))
    if wrong:
        raise ConfigError(*wrong)
    return run


def dumps(run):
    """JSON text of a `Run`, nested as the dataclasses are."""
    tree = {}
    for name, _, value in settings_of(run):
        *parents, leaf = name.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return json.dumps(tree, indent=2) + "\n"


def flatten(tree, prefix=""):
    """{"mesh": {"tp": 2}} -> {"mesh.tp": 2}."""
    flat = {}
    for key, value in tree.items():
        flat.update(flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return flat


def override(run, overrides):
    """Apply dotted overrides. Returns (run, names given, violations); a name or value that is wrong is left out."""
    types = {name: kind for name, kind, _ in settings_of(run)}
    typed, wrong = set(), []
    for name, value in overrides.items():
        if name not in types:
            wrong.append(f"Unknown setting {name}.{suggestion(name, types)}")
            continue
        try:
            value = coerce(value, types[name])
        except ValueError as error:
            wrong.append(f"{name} = {value!r}: {error}")
            continue
        typed.add(name)
        run = run.set(name, value)
    return run, typed, wrong


def suggestion(name, known):
    """' Did you mean …?' for a misspelt name, or the legal names under the same parent."""
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    leaf = [other for other in known if other.rpartition(".")[2] == name.rpartition(".")[2]]
    if close or leaf:
        return f" Did you mean {' or '.join(list(dict.fromkeys(close[:1] + leaf + close))[:3])}?"
    parent = name.partition(".")[0]
    below = [other for other in known if other.startswith(parent + ".")]
    return f" Known: {', '.join(below or sorted({other.partition('.')[0] for other in known}))}."


def coerce(value, kind):
    """`value` (a Python value, or text from a command line) as the annotation `kind`; ValueError says what is legal."""
    if get_origin(kind) is Literal:
        return _choice(value, get_args(kind))
    if get_origin(kind) is tuple:
        return _list(value, get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        options = get_args(kind)
        if NoneType in options and (value is None or str(value).lower() == "none"):
            return None
        words = [word for option in options if get_origin(option) is Literal for word in get_args(option)]
        if value in words:
            return value
        plain = [option for option in options if option is not NoneType]
        try:
            return coerce(value, plain[0])
        except ValueError as error:
            also = words * (get_origin(plain[0]) is not Literal) + ["none"] * (NoneType in options)
            raise ValueError(str(error) + (f" Also legal: {', '.join(also)}." if also else "")) from None
    return _plain(value, kind)


def _list(value, kind):
    """Numbers with commas between them, or a list of Python."""
    parts = value.split(",") if isinstance(value, str) else value
    try:
        return tuple(_plain(part, kind) for part in parts)
    except (TypeError, ValueError):
        raise ValueError("needs whole numbers with commas between them, such as 3,2,2,1.") from None


def _choice(value, options):
    text = str(value)
    if text in options:
        return text
    close = difflib.get_close_matches(text, options, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]}?" if close else ""
    raise ValueError(f"not one of {', '.join(options)}.{hint}")


def _plain(value, kind):
    if kind is bool:
        if isinstance(value, bool):
            return value
        if str(value).lower() in ("true", "false"):
            return str(value).lower() == "true"
        raise ValueError("needs true or false.")
    if kind is str:
        return str(value)
    if isinstance(value, bool):
        raise ValueError(f"needs {'a whole number' if kind is int else 'a number'}, not a truth value.")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"needs {'a whole number' if kind is int else 'a number'}.") from None
    if not math.isfinite(number):
        raise ValueError("needs a finite number.")
    if kind is int:
        if number != int(number):
            raise ValueError(f"needs a whole number; nearest: {math.floor(number)}, {math.ceil(number)}.")
        return int(number)
    return number


def _folders():
    here = Path(__file__).resolve().parent
    return [folder for folder in (here / "recipes", here.parent / "recipes") if folder.is_dir()]


def recipes():
    """{name: path} of every shipped recipe."""
    return {path.stem: path for folder in _folders() for path in sorted(folder.glob("*.py")) if path.stem != "__init__"}


def recipe(name):
    """The unresolved `Run` that a recipe returns. name: a shipped recipe, or the path of a recipe or of a config.json."""
    shipped, path = recipes(), Path(name)
    if name in shipped:
        path = shipped[name]
    elif path.suffix not in (".py", ".json") or not path.is_file():
        close = difflib.get_close_matches(str(name), shipped, n=3, cutoff=0.5)
        hint = f" Did you mean {' or '.join(close)}?" if close else ""
        raise ConfigError(f"There is no recipe {name!r}, neither shipped nor a .py or config.json file at that path.{hint} "
                          f"Shipped: {', '.join(shipped)}.")
    if path.suffix == ".json":
        try:
            return loads(path.read_text())
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read: {error}.") from None
    run = _call_recipe(path)
    if not isinstance(run, Run):
        raise ConfigError(f"{path} needs a function {path.stem}() that returns a jaxpara.Run.")
    return replace(run, name=path.stem)


def _call_recipe(path):
    """What the function of the file's name returns, or None without one. A recipe is a user's program: its faults are the user's to mend."""
    spec = importlib.util.spec_from_file_location(f"jaxpara_recipe_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        function = getattr(module, path.stem, None)
        return function() if callable(function) else None
    except ConfigError:
        raise
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == spec.origin]
        line = getattr(error, "lineno", None) or (lines[-1] if lines else None)
        at = f", line {line}" if line else ""
        raise ConfigError(f"The recipe {path} does not run{at}: {type(error).__name__}: {error}.") from error
