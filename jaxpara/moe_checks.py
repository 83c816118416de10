"""Rules of mixture-of-experts models, which of their settings would do nothing, and what there is to say of them. No JAX.

`jaxpara.checks` runs these beside its own, on a run whose every number is within its own range.
"""
from jaxpara.config import MoE, Parallel, settings_of
from jaxpara.params import capacity, kinds
from jaxpara.pipeline import placing

BALANCED = ("expert_choice", "sinkhorn")
"""Routings that look at all tokens of a group to choose the experts of one."""

FEW_TOKENS, MATRIX_UNIT = 8, 128
"""Tokens per expert below which a run is told so; rows that fill a matrix unit."""


def divisors(n):
    return [d for d in range(1, n + 1) if n % d == 0]


def nearest(value, step):
    """The multiples of `step` around `value`, as text."""
    low = value // step * step
    return f"{low}, {low + step}" if low else f"{step}"


def listed(values):
    return ", ".join(str(value) for value in values)


def wrong(run):
    """Yield every violation."""
    moe, ep = run.model.moe, run.mesh.ep
    if not moe.experts:
        if ep > 1:
            yield (f"mesh.ep = {ep}: ep splits experts and model.moe.experts = 0. "
                   f"Legal: mesh.ep 1 (dp or fsdp split the batch), or a model with experts.")
        return
    if moe.experts % ep:
        yield (f"model.moe.experts = {moe.experts} does not split over mesh.ep = {ep}. Legal mesh.ep for {moe.experts} experts: "
               f"{listed(divisors(moe.experts))}; it must also divide the devices that the other axes leave.")
    yield from _choice(moe)
    yield from _routing(run)
    yield from _losses(run)
    yield from _layers(run)
    yield from _widths(run)


def grouped(moe):
    """Whether tokens choose from some groups of experts only."""
    return moe.expert_groups > 1 and moe.routing != "expert_choice"


def _choice(moe):
    """Experts per token, of all experts and of groups of them."""
    groups, experts = moe.expert_groups, moe.experts
    if moe.top_k > experts:
        yield f"model.moe.top_k = {moe.top_k} is more than model.moe.experts = {experts}. Legal: 1 to {experts}."
    if not grouped(moe):
        return
    if experts % groups:
        yield (f"model.moe.expert_groups = {groups} does not divide model.moe.experts = {experts} (groups are of one size). "
               f"Legal: {listed(divisors(experts))}.")
    if moe.top_groups > groups:
        yield f"model.moe.top_groups = {moe.top_groups} is more than model.moe.expert_groups = {groups}. Legal: 1 to {groups}."
    if experts % groups or moe.top_groups > groups:
        return
    each = experts // groups
    if moe.top_groups * each < moe.top_k <= experts:
        yield (f"model.moe.top_k = {moe.top_k} is more than the {moe.top_groups * each} experts that model.moe.top_groups = {moe.top_groups} of "
               f"model.moe.expert_groups = {groups} leave to choose from. Legal: top_k 1 to {moe.top_groups * each}, or top_groups "
               f"{-(-moe.top_k // each)} to {groups}.")
    if each < 2 and moe.group_score == "top2":
        more = [n for n in divisors(experts) if moe.top_groups < n < experts]
        yield (f"model.moe.group_score = top2 needs two experts in a group, and model.moe.expert_groups = {groups} leaves one of "
               f"model.moe.experts = {experts} in each. Legal: top1{f', or expert_groups {listed(more)}' * bool(more)}.")


def _routing(run):
    """Token groups, and routings that need all of one."""
    moe, seq = run.model.moe, run.train.seq
    if (moe.capacity is not None or moe.routing in BALANCED) and seq % moe.group:
        near = [max(n for n in divisors(seq) if n < moe.group), *[n for n in divisors(seq) if n > moe.group][:1]]
        yield (f"model.moe.group = {moe.group} does not divide train.seq = {seq}: token groups are consecutive tokens of one row. "
               f"Nearest: {listed(near)}.")
    if moe.routing in BALANCED and run.mesh.ep > 1:
        yield (f"model.moe.routing = {moe.routing} with mesh.ep = {run.mesh.ep}: a router under ep sees only the tokens of its own device, so it "
               f"cannot balance experts over all tokens that they get. Legal: token_choice, or mesh.ep 1.")
    if moe.routing == "expert_choice" and moe.capacity is None:
        yield ("model.moe.routing = expert_choice needs model.moe.capacity: each expert chooses ceil(capacity · top_k · group / experts) tokens "
               "of a group. Legal: any number above 0, such as 1.0 (top_k experts per token on average).")
    if moe.routing == "expert_choice" and moe.drop_order == "position":
        yield ("model.moe.drop_order = position with model.moe.routing = expert_choice: experts choose by probability, not the first tokens. "
               "Legal: probability, or token_choice.")
    if moe.routing == "sinkhorn" and moe.bias_rate:
        yield (f"model.moe.bias_rate = {moe.bias_rate} with model.moe.routing = sinkhorn: its scores are balanced already, and so small that a bias "
               f"alone would decide. Legal: 0, or token_choice.")


def _losses(run):
    moe, m = run.model.moe, run.train.microbatches
    if moe.aux_scope == "global" and m > 1 and moe.aux_weight and moe.routing != "expert_choice":
        yield (f"model.moe.aux_scope = global with train.microbatches = {m}: the loads of the whole step are not known before its first backward "
               f"pass. Legal: sequence, microbatch, or train.microbatches 1.")


def _layers(run):
    """Some layer has experts; in a pipeline every chunk has them in the same places."""
    moe, layers, found = run.model.moe, run.model.layers, kinds(run.model)
    every, first = moe.every, moe.first_dense
    if "moe" not in found:
        legal = [f"first_dense up to {layers - every} with this every"] * (every <= layers)
        legal += [f"every up to {layers - first} with this first_dense"] * (first < layers)
        yield (f"model.moe.every = {every} and model.moe.first_dense = {first} leave none of model.layers = {layers} with experts: together they "
               f"must not be more than the layers. Legal: {', or '.join(legal) or f'first_dense 0 and every up to {layers}'}.")
    if run.mesh.pp == 1 or len(set(found)) == 1 or any(placing.faults(run)):
        return
    rows, length = placing.stack(run).rows, placing.stack(run).length
    patterns = {tuple(found[layer] for layer in rows[start:start + length]) for start in range(0, len(rows), length)}
    if -1 not in rows and len(patterns) == 1:
        return
    chunks = len(rows) // length
    even = divisors(layers // chunks)[1:] if layers % chunks == 0 else []
    legal = ["every 1"] + [f"every {listed(even)} in even chunks of {layers // chunks} layers"] * bool(even)
    legal += [f"this every and model.layers {nearest(layers, chunks * every)} in even chunks"] * (every not in [1, *even])
    yield (f"model.moe.every = {every} and model.moe.first_dense = {first} with mesh.pp = {run.mesh.pp}: stages run one program, so each of the "
           f"{chunks} chunks must hold equally many layers, with experts at the same places. Legal: first_dense 0, with {'; or '.join(legal)}.")


def _widths(run):
    model, tp, found = run.model, run.mesh.tp, kinds(run.model)
    said = "dense" in found and model.moe.ffn == model.ffn      # of model.ffn, from which it may be derived
    if "moe" in found and run.parallel.moe_tp == "width" and model.moe.ffn % tp and not said:
        yield (f"mesh.tp = {tp} does not divide model.moe.ffn = {model.moe.ffn}. Nearest ffn: {nearest(model.moe.ffn, tp)}; legal tp: "
               f"{listed(divisors(model.moe.ffn))}; or parallel.moe_tp = tokens, which splits no expert.")


def tokens_over_tp(run):
    """Whether the MoE layer's tokens are split over tp."""
    return run.parallel.moe_tp == "tokens" and "moe" in kinds(run.model)


def idle(run):
    """Yield (setting, value, reason) of every value that differs from the neutral one and yet does nothing."""
    moe = run.model.moe
    neutral = {f"model.moe.{name}": value for name, _, value in settings_of(MoE())}
    neutral |= {f"parallel.{name}": getattr(Parallel(), name) for name in ("moe_transport", "moe_tp")}
    neutral["model.moe.group"] = run.train.seq if moe.experts else None
    values = {name: value for name, _, value in settings_of(run) if name in neutral}
    if not moe.experts:
        reasons = dict.fromkeys(neutral, "model.moe.experts = 0.")
    else:
        reasons = _reasons(run)
    for name, reason in reasons.items():
        if values[name] != neutral[name]:
            yield name, values[name], reason
    if moe.experts and moe.renormalise and moe.routing == "expert_choice":
        yield "model.moe.renormalise", True, "under model.moe.routing = expert_choice a token's experts keep their own scores."


def _reasons(run):
    """{setting: why it does nothing} for a model with experts."""
    moe, reasons = run.model.moe, {}
    because = lambda reason, *names: reasons.update({f"model.moe.{name}": reason for name in names if f"model.moe.{name}" not in reasons})
    if moe.routing == "expert_choice":
        because("model.moe.routing = expert_choice balances loads by construction.", "aux_weight", "aux_scope", "aux_warmup", "bias_rate")
        because("model.moe.routing = expert_choice: no token chooses.", "expert_groups", "top_groups", "group_score")
        because("model.moe.routing = expert_choice has its capacity in evaluation too.", "eval_capacity")
    elif moe.capacity is None:
        because("model.moe.capacity = none, so no token is dropped.", "drop_order", "eval_capacity")
        if moe.routing == "token_choice":
            because("model.moe.capacity = none, and only a capacity or sinkhorn looks at token groups.", "group")
    if not moe.aux_weight:
        because("model.moe.aux_weight = 0.", "aux_scope", "aux_warmup")
    if moe.expert_groups == 1:
        because("model.moe.expert_groups = 1.", "top_groups", "group_score")
    elif moe.top_groups == moe.expert_groups:
        because(f"model.moe.top_groups = {moe.top_groups} are all groups.", "expert_groups", "group_score")
    if run.mesh.ep == 1:
        reasons["parallel.moe_transport"] = "mesh.ep = 1."
    if run.mesh.tp == 1:
        reasons["parallel.moe_tp"] = "mesh.tp = 1."
    return reasons


def notes(run, settled=True):
    """Yield what there is to say of a legal run. settled: whether its mesh is known, no axis still "auto"."""
    moe = run.model.moe
    if not moe.experts:
        return
    if run.model.style == "gpt2":
        yield "model.style = gpt2 with model.moe.experts: experts have no biases; attention, norms and dense layers keep theirs."
    if moe.top_k == 1 and moe.renormalise and moe.routing != "expert_choice":
        losses = "aux_weight and z_weight" if moe.aux_weight or moe.z_weight else "aux_weight and z_weight, which are 0"
        yield (f"model.moe.top_k = 1 with model.moe.renormalise = true: every gate is 1, so the router learns only from its "
               f"auxiliary losses ({losses}).")
    if moe.routing in BALANCED:
        yield (f"model.moe.routing = {moe.routing}: a token's experts depend on later tokens of its group, in evaluation too, so the loss is not "
               f"that of a model that writes token by token.")
    if moe.capacity is not None:
        yield _capacity_note(moe)
    if settled:
        yield from _token_notes(run)


def _capacity_note(moe):
    most = capacity(moe)
    verb = "chooses" if moe.routing == "expert_choice" else "takes"
    when = "" if moe.eval_capacity or moe.routing == "expert_choice" else ", in training only"
    never = "; none is ever dropped" * (most == moe.group and moe.routing != "expert_choice")
    return f"model.moe.capacity = {moe.capacity}: each expert {verb} {most} of {moe.group} tokens{when}{never}."


def _token_notes(run):
    """In numbers: rows that are sent for nothing, and experts with little work."""
    moe, mesh = run.model.moe, run.mesh
    split = mesh.sp * (mesh.tp if tokens_over_tp(run) else 1)
    tokens = run.train.batch * run.train.seq // (run.train.microbatches * mesh.batch * split)
    sent, used = mesh.ep * tokens * min(moe.top_k, moe.experts // mesh.ep), tokens * moe.top_k
    if mesh.ep > 1 and run.parallel.moe_transport == "all_to_all" and moe.capacity is None and sent > used:
        yield (f"parallel.moe_transport = all_to_all without model.moe.capacity has room for the worst case: a device sends {sent:,} rows per layer "
               f"and micro-batch, of which {used:,} hold tokens. A capacity, or ragged on TPU and GPU, sends fewer.")
    each = used * mesh.ep / moe.experts
    if each < FEW_TOKENS:
        yield (f"An expert gets {each:.3g} tokens of a micro-batch on each device that has it, on average; a matrix unit is full from "
               f"{MATRIX_UNIT} on. Larger micro-batches or fewer experts give more.")
