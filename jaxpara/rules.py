"""Labels -> mesh axes. Specs here are plain tuples (one tuple of axis names per dim); no JAX.

A rule says on which mesh axes a labelled dim lies. A label may have several rules: the first whose axes are still free in
the array is taken, so `("embed", "dp"), ("embed", "tp")` shards embed over tp wherever dp already splits another dim.
"""
import difflib

from jaxpara.config import AXES
from jaxpara.errors import ConfigError
from jaxpara.params import parameters


class Rules:
    """An ordered table of (label, axes); axes: None (replicated), an axis name, or a tuple of them, major first.

    Raises ConfigError for an unknown axis, naming the rule and the nearest axis.
    """

    def __init__(self, table, axes=AXES):
        wrong, self.table = [], []
        for label, on in table:
            on = () if on is None else (on,) if isinstance(on, str) else tuple(on)
            for axis in on:
                if axis not in axes:
                    close = difflib.get_close_matches(axis, axes, n=1, cutoff=0.4)
                    hint = f" Did you mean {close[0]}?" if close else ""
                    wrong.append(f"Unknown mesh axis {axis!r} in the rule for {label!r}. Known axes: {', '.join(axes)}.{hint}")
            self.table.append((label, on))
        if wrong:
            raise ConfigError(*wrong)

    def spec(self, labels):
        """Axes of each dim of an array with these labels: a tuple of tuples.

        Raises ConfigError when a label has no rule, stands twice, or wants an axis that another dim of the array already has.
        """
        wrong = [f"Label {label!r} stands for two dims of one array {tuple(labels)}: give each dim its own label."
                 for label in dict.fromkeys(labels) if label is not None and list(labels).count(label) > 1]
        spec, used = [], {}
        for label in labels:
            options = [on for name, on in self.table if name == label]
            if label is not None and not options:
                known = list(dict.fromkeys(name for name, _ in self.table))
                close = difflib.get_close_matches(label, known, n=1)
                hint = f" Did you mean {close[0]}?" if close else ""
                wrong.append(f"No rule for label {label!r}. Known labels: {', '.join(known)}.{hint}")
            free = [on for on in options if not any(axis in used for axis in on)]
            if options and not free:
                axis = next(axis for axis in options[0] if axis in used)
                wrong.append(f"Mesh axis {axis!r} would split two dims of one array: {used[axis]!r} and {label!r}. "
                             f"Give {label!r} another rule, or map one of them to None.")
            chosen = free[0] if free else ()
            used.update({axis: label for axis in chosen})
            spec.append(chosen)
        if wrong:
            raise ConfigError(*wrong)
        return tuple(spec)

    def unmatched(self, labels):
        """Messages for rules whose label is none of `labels`: a rule that matches nothing does nothing."""
        labels = tuple(labels)
        return [f"The rule for {name!r} matches no dim. Labels in use: {', '.join(labels)}."
                for name in dict.fromkeys(name for name, _ in self.table) if name not in labels]


def kv_replicated(run):
    """Whether every tp rank stores all KV heads because there are fewer of them than ranks (N_kv < N_tp)."""
    return run.model.kv_heads < run.mesh.tp


def parameter_rules(run):
    """Where each label of a parameter lies before ZeRO: stages of the pipeline, and tensor parallelism."""
    return Rules([("layers", "pp"), ("vocab", "tp"), ("heads", "tp"),
                  ("kv_heads", None if kv_replicated(run) else "tp"), ("ffn", "tp"),
                  ("experts", "ep"), ("expert_ffn", None if run.parallel.moe_tp == "tokens" else "tp"),
                  ("width", None), ("head_dim", None), ("positions", None), ("choices", None)])


def activation_rules(run):
    """Where each dim of an activation lies. `border`: the sequence between blocks; `sequence`: inside a block."""
    border = ("sp", "tp") if run.parallel.tp_sequence else ("sp",)
    return Rules([("microbatch", None), ("batch", ("dp", "fsdp", "ep")), ("sequence", "sp"), ("border", border), ("row", None),
                  ("width", None), ("heads", "tp"), ("kv_heads", None if kv_replicated(run) else "tp"),
                  ("head_dim", None), ("vocab", "tp"), ("ffn", "tp")])


def live(spec, mesh):
    """`spec` without the axes of size 1: they split nothing and must not cause traffic."""
    return tuple(tuple(axis for axis in dim if getattr(mesh, axis) > 1) for dim in spec)


def shards(spec, mesh):
    """Ways each dim is split."""
    ways = []
    for dim in spec:
        n = 1
        for axis in dim:
            n *= getattr(mesh, axis)
        ways.append(n)
    return tuple(ways)


def local_shape(shape, spec, mesh):
    """Shape of one device's piece; raises ConfigError where an axis does not divide the dim."""
    wrong = [f"A dim of {size} does not split over {' × '.join(dim)} = {ways}; nearest multiples: "
             f"{size // ways * ways or ways}, {(size // ways + 1) * ways}."
             for size, dim, ways in zip(shape, spec, shards(spec, mesh)) if size % ways]
    if wrong:
        raise ConfigError(*wrong)
    return tuple(size // ways for size, ways in zip(shape, shards(spec, mesh)))


def labels_in_use(model):
    """Labels of the parameters of a model, in order of first use."""
    return tuple(dict.fromkeys(label for parameter in parameters(model) for label in parameter.labels))
