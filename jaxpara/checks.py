"""Every rule a run must satisfy, and every setting that would do nothing. No JAX.

`check` collects all violations instead of stopping at the first. Each message gives the value, the rule, and the nearest
legal values.
"""
import re
from dataclasses import replace
from functools import cache
from math import lcm
from pathlib import Path

from jaxpara import moe_checks
from jaxpara.config import AXES, BATCH_AXES, BYTES, Run, fill_auto, resolve, settings_of
from jaxpara.errors import ConfigError
from jaxpara.moe_checks import divisors, listed, nearest
from jaxpara.params import kinds, padded_vocab
from jaxpara.pipeline import KINDS, placing, simulate
from jaxpara.pipeline.formulas import bubble_fraction
from jaxpara.zero import REPLICA_AXES

DERIVED = {"model.kv_heads": ("model.heads",), "model.head_dim": ("model.width", "model.heads"), "model.ffn": ("model.width",),
           "model.max_positions": ("train.seq",), "model.moe.ffn": ("model.ffn", "model.width"), "model.moe.group": ("train.seq",)}
"""What `config.resolve` derives a setting from: a derived value is as wrong as its source, which alone is reported."""

UNTIL_FILLED = ("parallel.scatter_inner", "parallel.gather_once")
"""Settings of which nobody can say that they are idle while one axis is "auto", whichever it is."""


def check(run, typed=frozenset(), unusable=frozenset()):
    """(violations, notes) of a resolved run. typed: the dotted names a user gave in this call, which may not be idle. unusable: names
    whose given value could not be read; nothing is said about the value that stands in for it."""
    numbers = dict(_numbers(run))
    wrong = [message for name, message in numbers.items() if not any(source in numbers for source in DERIVED.get(name, ()))]
    run = _mend(run, numbers)
    mesh, unknown = run.mesh, re.compile("|".join(rf"\b{re.escape(name)}\b" for name in {*numbers, *unusable}) or "(?!)")
    auto = mesh.auto
    if auto:
        run = fill_auto(run, _rest(mesh))      # the rules that need this axis are checked again when it is filled
    found = [message for rule in (_pipeline, _heads, _sequence, _batch, _steps, _widths, moe_checks.wrong, _precision)
             for message in rule(run)]
    notes, defaults = [], {name: value for name, _, value in settings_of(Run())}
    for name, value, reason in idle(run):
        if auto and (reason.endswith(f"mesh.{auto} = 1.") or name in UNTIL_FILLED):
            continue
        if name in typed:
            found.append(f"{name} = {text(value)} cannot take effect: {reason} Leave it out, or change what it depends on.")
        elif value != defaults[name]:
            notes.append(f"{name} = {text(value)} is idle: {reason}")
    if short := _short_of_steps(run):       # a recipe may be cut to a few steps; what was typed must take effect
        (found if typed & {"optim.warmup", "optim.schedule"} else notes).append(short)
    notes += [*_notes(run), *moe_checks.notes(run, settled=auto is None)]
    return wrong + [message for message in found if not unknown.search(message)], notes


def checked(run):
    """`run` with what there is to say about it added to its notes; ConfigError with all its violations if there are any."""
    errors, notes = check(run)
    if errors:
        raise ConfigError(*errors)
    return replace(run, notes=tuple(dict.fromkeys(run.notes + tuple(notes))))


def _mend(run, names):
    """`run` with default values for the settings in `names`, so that the rules about other settings can still be checked."""
    defaults = {name: value for name, _, value in settings_of(Run())}
    for name in names:
        run = run.set(name, defaults[name])
    return resolve(run)


def text(value):
    """A setting's value as it is typed on a command line: none, true, false, 2, 3,2,2,1."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _rest(mesh):
    rest = 1
    for size in mesh.sizes.values():
        rest *= 1 if size == "auto" else size
    return rest


def _numbers(run):
    """Yield (setting, violation) of every number out of its own range."""
    positive = ["model.layers", "model.width", "model.heads", "model.kv_heads", "model.head_dim", "model.ffn", "model.window",
                "model.max_positions", "parallel.sp_ulysses", "parallel.loss_chunk", "parallel.scatter_inner", "parallel.chunks",
                "train.batch", "train.seq", "train.microbatches", "train.steps", "model.rope_theta", "model.norm_eps",
                "optim.eps", "optim.clip", "precision.loss_scale", *(f"model.moe.{name}" for name in (
                    "top_k", "ffn", "every", "scale", "expert_groups", "top_groups", "capacity", "group"))]
    positive += [f"mesh.{axis}" for axis in AXES]
    values = {name: value for name, _, value in settings_of(run)}
    for name in positive:
        value = values[name]
        if value not in (None, "auto") and value <= 0:
            switch = ", or none to switch it off" if name in ("optim.clip", "model.window") else ""
            switch = ", or none for dropless" if name == "model.moe.capacity" else switch
            yield name, f"{name} = {value} must be greater than 0. Legal: {'1 or more' if isinstance(value, int) else 'any number above 0'}{switch}."
    given = values["parallel.layers_per_stage"]
    if given and min(given) <= 0:
        yield "parallel.layers_per_stage", (f"parallel.layers_per_stage = {text(given)}: every number must be greater than 0, since each stage "
                                            f"needs a layer. Legal: 1 or more each.")
    autos = [f"mesh.{axis}" for axis, size in run.mesh.sizes.items() if size == "auto"]
    for name in autos[1:]:
        yield name, (f"{name} = auto beside {autos[0]} = auto: one axis can be filled from the number of devices. "
                     f"Legal: a number for one of them.")
    if values["model.vocab"] < 2:
        yield "model.vocab", f"model.vocab = {values['model.vocab']} must be at least 2. Legal: 2 or more (256 for bytes)."
    for name in [name for name in values if name.startswith("parallel.zero.")]:
        if values[name] not in (0, 1, 2, 3):
            yield name, f"{name} = {values[name]} is not a ZeRO stage. Legal: 0, 1, 2, 3."
    for name in ("model.dropout", "optim.b1", "optim.b2", "optim.momentum", "model.moe.jitter", "model.moe.dropout"):
        if not 0 <= values[name] < 1:
            yield name, f"{name} = {values[name]} is out of range. Legal: from 0 to less than 1, such as {'0.9' if values[name] >= 1 else '0'}."
    moe = [f"model.moe.{name}" for name in ("experts", "first_dense", "shared", "bias_rate", "aux_weight", "aux_warmup", "z_weight")]
    for name in ("optim.lr", "optim.weight_decay", "optim.warmup", "train.seed", *moe):
        if values[name] < 0:
            yield name, f"{name} = {values[name]} must not be negative. Legal: 0 or more."
    if not 0 <= values["optim.final"] <= 1:
        yield "optim.final", f"optim.final = {values['optim.final']} is a part of optim.lr. Legal: from 0 to 1."
    if values["train.seed"] >= 2 ** 32:
        yield "train.seed", f"train.seed = {values['train.seed']} does not fit 32 bits. Legal: 0 to {2 ** 32 - 1}."


def _pipeline(run):
    """A schedule that exists, layers that fit it, a lowering that can run it."""
    if run.mesh.pp == 1:
        return
    if run.parallel.lowering == "annotated":
        yield (f"parallel.lowering = annotated with mesh.pp = {run.mesh.pp}: stages run different layers at one time, and XLA has no sharding "
               f"constraint that says so. Legal: manual.")
    yield from placing.faults(run)


def ulysses_degree(run):
    """Ways that sp splits the heads inside attention: sp (ulysses), sp_ulysses (hybrid), 1 (ring, allgather)."""
    kind = run.parallel.sp_kind
    return run.mesh.sp if kind == "ulysses" else (run.parallel.sp_ulysses or 1) if kind == "hybrid" else 1


def ring_degree(run):
    """Ways that sp splits the sequence inside attention."""
    return max(run.mesh.sp // ulysses_degree(run), 1)


def _heads(run):
    model, tp = run.model, run.mesh.tp
    heads, kv = model.heads, model.kv_heads
    if model.style == "llama" and model.head_dim % 2:
        yield f"model.head_dim = {model.head_dim} is odd: RoPE rotates pairs. Nearest: {model.head_dim - 1 or 2}, {model.head_dim + 1}."
    if heads % kv:
        yield f"model.kv_heads = {kv} does not divide model.heads = {heads} (each KV head serves a whole group). Legal: {listed(divisors(heads))}."
    fits = [n for n in divisors(heads) if kv % n == 0 or n % kv == 0]
    if heads % tp:
        yield (f"mesh.tp = {tp} does not divide model.heads = {heads} (each device needs whole heads). "
               f"Legal tp for {heads} heads, {kv} of them KV: {listed(fits)}.")
    elif tp not in fits:
        yield (f"mesh.tp = {tp} does not fit model.kv_heads = {kv}: tp must divide the KV heads, or be a multiple of them "
               f"(then each KV head is copied to tp / kv_heads devices). Legal tp: {listed(fits)}.")
    if run.parallel.sp_kind == "hybrid" and (run.parallel.sp_ulysses is None or run.mesh.sp % run.parallel.sp_ulysses):
        yield (f"parallel.sp_ulysses = {text(run.parallel.sp_ulysses)} must divide mesh.sp = {run.mesh.sp} when sp_kind = hybrid. "
               f"Legal: {listed(divisors(run.mesh.sp))}.")
    elif not heads % kv and tp in fits:
        yield from _ulysses_heads(run)


def _ulysses_heads(run):
    heads, kv, tp, inner = run.model.heads, run.model.kv_heads, run.mesh.tp, ulysses_degree(run)
    queries, keys = heads // tp, max(kv // tp, 1)
    legal = [n for n in divisors(queries) if keys % n == 0 or n % keys == 0]
    if inner not in legal:
        name = "mesh.sp" if run.parallel.sp_kind == "ulysses" else "parallel.sp_ulysses"
        yield (f"{name} = {inner} with mesh.tp = {tp}: Ulysses gives each device whole heads, so {heads} heads must be divisible by "
               f"tp·{name.split('.')[1]} = {tp * inner} (KV heads, {kv}, are copied if fewer). Legal {name} at this tp: {listed(legal)}.")


def _sequence(run):
    seq, mesh, parallel = run.train.seq, run.mesh, run.parallel
    by_zero_r = parallel.zero_r and parallel.remat == "full"
    by_tp = parallel.tp_sequence or by_zero_r or moe_checks.tokens_over_tp(run)
    border = mesh.sp * (mesh.tp if by_tp else 1)
    zigzag = parallel.sp_order == "zigzag" and ring_degree(run) > 1
    step = lcm(border, 2 * ring_degree(run)) if zigzag else border
    if seq % step:
        why = "tp_sequence" if parallel.tp_sequence else "zero_r" if by_zero_r else "moe_tp"
        what = [f"mesh.sp = {mesh.sp}"] + [f"mesh.tp = {mesh.tp} ({why})"] * (border != mesh.sp)
        what += [f"2·{ring_degree(run)} chunks (zigzag)"] * zigzag
        plain = f" Without zigzag: multiples of {border}." if zigzag and border != step else ""
        yield f"train.seq = {seq} must be a multiple of {step}, for {' and '.join(what)}. Nearest: {nearest(seq, step)}.{plain}"
    if run.model.max_positions is not None and seq > run.model.max_positions:
        yield f"train.seq = {seq} is longer than model.max_positions = {run.model.max_positions}. Legal: train.seq up to {run.model.max_positions}."


def _batch(run):
    batch, m, mesh = run.train.batch, run.train.microbatches, run.mesh
    ways = m * mesh.batch
    if batch % ways:
        split = " · ".join(f"mesh.{axis} {getattr(mesh, axis)}" for axis in mesh.live(BATCH_AXES))
        split = " · ".join(filter(None, [f"train.microbatches {m}", split]))
        yield (f"train.batch = {batch} must be a multiple of {ways} = {split}: each micro-batch gives every device whole sequences. "
               f"Nearest: {nearest(batch, ways)}.")


def _steps(run):
    """Two-step reduce-scatters need equal groups."""
    inner = run.parallel.scatter_inner
    for axis in REPLICA_AXES:
        size = getattr(run.mesh, axis)
        if inner and getattr(run.parallel.zero, axis) and size > inner and (size % inner or inner == 1):
            yield (f"parallel.scatter_inner = {inner} must be 2 or more and divide mesh.{axis} = {size}, over which ZeRO scatters gradients. "
                   f"Legal: {listed(n for n in divisors(size) if 1 < n < size) or 'none, to scatter in one step'}.")


def _widths(run):
    model, tp = run.model, run.mesh.tp
    if model.ffn % tp and "dense" in kinds(model):
        yield (f"mesh.tp = {tp} does not divide model.ffn = {model.ffn}. Nearest ffn: {nearest(model.ffn, tp)}; "
               f"legal tp: {listed(divisors(model.ffn))}.")
    if model.vocab % tp and not run.parallel.pad_vocab:
        yield (f"model.vocab = {model.vocab} does not split over mesh.tp = {tp}. parallel.pad_vocab = true pads it to "
               f"{padded_vocab(model, run.mesh)} and masks the padding out of the loss.")


def _precision(run):
    precision = run.precision
    for name in ("compute", "params"):
        if getattr(precision, name) == "float16" and precision.loss_scale is None:
            yield f"precision.{name} = float16 needs precision.loss_scale (for example 1024), or gradients underflow; bfloat16 needs none."
    master = precision.master
    if master in ("bfloat16", "float16"):
        yield f"precision.master = {master} keeps no more than the weights do. Legal: float32, float64, none."
    elif master and BYTES[master] < max(BYTES[precision.params], BYTES[precision.compute]):
        yield f"precision.master = {master} is narrower than params = {precision.params} or compute = {precision.compute}. Legal: float64."
    if "float64" not in (precision.params, master) and precision.compute == "float64":
        yield f"precision.compute = float64 with params = {precision.params} computes in more than it keeps. Legal: params float64."


def _short_of_steps(run):
    """Why the schedule never begins; "" if it does."""
    optim, steps = run.optim, run.train.steps
    if optim.schedule == "constant" or optim.warmup < steps:
        return ""
    return (f"optim.warmup = {optim.warmup} leaves no step for the {optim.schedule} schedule of train.steps = {steps}. "
            f"Legal: optim.warmup up to {steps - 1}, or more steps.")


def check_data(run):
    """Violations that matter only when jaxpara reads the text itself (`train`), not for batches given by the caller."""
    if run.data.path is not None and not Path(run.data.path).exists():
        yield f"data.path = {run.data.path}: there is no such file or folder (seen from {Path.cwd()})."
    if run.model.vocab < 256:
        yield f"model.vocab = {run.model.vocab} is too small for data.tokenizer = byte, which has 256 tokens. Legal: 256 or more."


def idle(run):
    """Yield (setting, value, reason) of every value that differs from the neutral one and yet does nothing."""
    mesh, model, parallel, optim = run.mesh, run.model, run.parallel, run.optim
    one = lambda axis: f"mesh.{axis} = 1."
    for axis in ("dp", "fsdp", "sp", "ep", "pp"):
        stage = getattr(parallel.zero, axis)
        if stage and getattr(mesh, axis) == 1:
            yield f"parallel.zero.{axis}", stage, one(axis)
    if mesh.sp == 1:
        yield "parallel.sp_kind", parallel.sp_kind, one("sp")
    if parallel.sp_order != "contiguous" and mesh.sp == 1:
        yield "parallel.sp_order", parallel.sp_order, one("sp")
    elif parallel.sp_order != "contiguous" and parallel.sp_kind != "allgather" and ring_degree(run) == 1:
        yield "parallel.sp_order", parallel.sp_order, "Ulysses gives every device the whole sequence, so its order balances nothing."
    if parallel.sp_ulysses is not None and (mesh.sp == 1 or parallel.sp_kind != "hybrid"):
        yield "parallel.sp_ulysses", parallel.sp_ulysses, one("sp") if mesh.sp == 1 else f"parallel.sp_kind = {parallel.sp_kind}, not hybrid."
    if parallel.tp_sequence and mesh.tp == 1:
        yield "parallel.tp_sequence", True, one("tp")
    if parallel.remat_save != "attention" and parallel.remat != "selective":
        yield "parallel.remat_save", parallel.remat_save, f"parallel.remat = {parallel.remat}, not selective."
    if parallel.zero_r and (mesh.tp == 1 or parallel.tp_sequence or parallel.remat != "full"):
        copies = "tp_sequence leaves no copies to shard." if parallel.tp_sequence else "it shards the inputs that remat = full keeps."
        reason = one("tp") if mesh.tp == 1 else copies
        yield "parallel.zero_r", True, reason
    larger = [axis for axis in REPLICA_AXES if getattr(parallel.zero, axis) and getattr(mesh, axis) > (parallel.scatter_inner or 0)]
    if parallel.scatter_inner and (not larger or parallel.lowering == "annotated"):
        reason = "under annotated XLA chooses." if larger else "no axis with a ZeRO stage is larger."
        yield "parallel.scatter_inner", parallel.scatter_inner, reason
    yield from _idle_pipeline(run)
    yield from moe_checks.idle(run)
    if run.precision.master and run.precision.params in ("float32", "float64"):
        yield "precision.master", run.precision.master, f"params = {run.precision.params} need no wider copy."
    defaults = {name: value for name, _, value in settings_of(resolve(Run()))}
    adam, cyclic = optim.name == "adamw", optim.schedule != "constant"
    unused = {"optim.b1": adam, "optim.b2": adam, "optim.eps": adam, "optim.momentum": optim.name == "momentum", "optim.final": cyclic,
              "model.rope_theta": model.style == "llama", "model.qk_norm": model.style == "llama"}
    values = {name: value for name, _, value in settings_of(run)}
    for name, used in unused.items():
        if not used and values[name] != defaults[name]:
            yield name, values[name], {"optim.momentum": f"optim.name = {optim.name}.", "optim.final": "optim.schedule = constant."}.get(
                name, f"optim.name = {optim.name}." if name.startswith("optim") else f"model.style = {model.style}.")


def _idle_pipeline(run):
    parallel, neutral = run.parallel, Run().parallel
    changed = lambda name: getattr(parallel, name) != getattr(neutral, name)
    if run.mesh.pp == 1:
        for name in filter(changed, ("schedule", "chunks", "schedule_file", "layers_per_stage", "gather_once", "remat_tick")):
            yield f"parallel.{name}", getattr(parallel, name), "mesh.pp = 1."
        return
    table = f"parallel.schedule_file = {parallel.schedule_file}"
    if parallel.schedule_file is not None and changed("schedule"):
        yield "parallel.schedule", parallel.schedule, f"{table} is the schedule."
    if parallel.gather_once and not any(getattr(parallel.zero, axis) == 3 for axis in run.mesh.live(REPLICA_AXES)):
        yield "parallel.gather_once", True, "no axis of more than one device has ZeRO stage 3, which alone gathers weights."
    if not parallel.remat_tick and placing.divergent(run):
        other = table if parallel.schedule_file is not None else f"parallel.schedule = {parallel.schedule}"
        yield "parallel.remat_tick", False, f"{other} computes every chunk again from its input; only circular can keep more."


def _notes(run):
    notes = list(_pipeline_notes(run))
    if padded_vocab(run.model, run.mesh) != run.model.vocab:
        notes.append(f"model.vocab = {run.model.vocab} is stored as {padded_vocab(run.model, run.mesh)} rows (mesh.tp = {run.mesh.tp}); "
                     "the padding is masked out of the loss.")
    if run.precision.params in ("bfloat16", "float16") and run.precision.master is None:
        notes.append(f"precision.params = {run.precision.params} without precision.master: updates smaller than about 1/256 of a weight "
                     "are lost to rounding (float32 master keeps them).")
    return notes


def _pipeline_notes(run):
    """What a legal pipeline costs before anything is measured: its bubble, its padding."""
    if run.mesh.pp == 1 or any(placing.faults(run)):
        return
    table, layers, counted = placing.schedule(run), placing.stack(run), placing.counted
    p, m, v, file = table.stages, table.microbatches, table.chunks, run.parallel.schedule_file
    words = f"{counted(p, 'stage')}{f' of {v} chunks' * (v > 1)}"
    yield f"pipeline: {table.kind if file is None else file}, {words}, {counted(m, 'micro-batch', 'es')}: bubble {100 * _bubble(table):.1f} %."
    if m < p and file is None:
        yield (f"train.microbatches = {m} is less than mesh.pp = {p}, so stages wait for work. With {4 * p} micro-batches the bubble is "
               f"{100 * bubble_fraction(table.kind, p, 4 * p, v):.1f} %.")
    if layers.padded:
        extra = layers.rows.count(-1)
        yield (f"model.layers = {run.model.layers} over {words}: {layers.length} per chunk are stored and run, "
               f"{counted(extra, 'row')} {'is' if extra == 1 else 'are'} padding.")


@cache
def _bubble(table):
    """Idle part of a step if F = B = W and hops take no time. Simulating a large table takes seconds, and a run is checked several times."""
    if table.kind not in KINDS:
        return abs(simulate(table).bubble_fraction)
    return bubble_fraction(table.kind, table.stages, table.microbatches, table.chunks)
