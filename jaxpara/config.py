"""What a training run is: frozen dataclasses, no JAX.

`Run` holds one dataclass per subject. `None` in a field means "derive it"; `jaxpara.settings.load` returns runs with every
such field filled in (`resolve`) and every violation reported at once (`jaxpara.checks`). Names are the field's own: see the
comment beside each.
"""
from dataclasses import dataclass, field, fields, replace
from math import prod
from typing import Literal

AXES = ("pp", "dp", "fsdp", "ep", "sp", "tp")
"""Mesh axes, slow network first. Always all present; size 1 when unused."""

BATCH_AXES = ("dp", "fsdp", "ep")
"""Axes that split the sequences of a batch."""

Dtype = Literal["float64", "float32", "bfloat16", "float16"]
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class MoE:
    """Mixture of experts in place of the feed-forward block. Experts have no biases; their activation is that of model.style."""
    experts: int = 0                            # E; 0 = a dense model
    top_k: int = 2                              # K, experts per token
    ffn: int | None = None                      # width of one expert; none = model.ffn
    every: int = 1                              # every k-th layer has experts, the last of each k
    first_dense: int = 0                        # so many layers at the start have none
    shared: int = 0                             # experts that every token passes as well, as one MLP of `shared` times the width
    routing: Literal["token_choice", "expert_choice", "sinkhorn"] = "token_choice"     # who chooses whom; the last two with ep = 1
    score: Literal["softmax", "sigmoid"] = "softmax"    # of the router's logits
    renormalise: bool = True                    # the chosen experts' weights add up to 1
    scale: float = 1.0                          # of the routed experts' sum
    expert_groups: int = 1                      # group-limited routing: experts in so many groups,
    top_groups: int = 1                         # of which a token chooses from the best so many,
    group_score: Literal["top2", "top1"] = "top2"   # by the sum of each group's two best scores, or its best
    bias_rate: float = 0.0                      # loss-free balancing: step of the selection bias against measured load; 0 = no bias
    jitter: float = 0.0                         # the router's input times a number from 1 - jitter to 1 + jitter, in training
    noise: bool = False                         # learned noise on the router's logits, in training
    dropout: float = 0.0                        # part of the tokens that pass by the experts, in training
    aux_weight: float = 0.0                     # of the load-balance loss
    aux_scope: Literal["sequence", "microbatch", "global"] = "sequence"     # over which tokens loads are counted
    aux_warmup: int = 0                         # steps from 0 to aux_weight
    z_weight: float = 0.0                       # of the squared log-normaliser of the router's logits
    capacity: float | None = None               # c: each expert takes ceil(c·K·G/E) tokens of a group of G; none = dropless
    group: int | None = None                    # G: consecutive tokens of one row; none = the row
    drop_order: Literal["probability", "position"] = "probability"  # who stays: the best scores, or the first of the row
    eval_capacity: bool = False                 # capacity holds in evaluation too


@dataclass(frozen=True)
class Model:
    style: Literal["gpt2", "llama"] = "llama"   # gpt2: LayerNorm, learned positions, GELU, biases. llama: RMSNorm, RoPE, SwiGLU
    layers: int = 4
    width: int = 128                            # H, the residual stream
    heads: int = 4                              # N_q
    kv_heads: int | None = None                 # N_kv; none = heads
    head_dim: int | None = None                 # d; none = width / heads
    ffn: int | None = None                      # H_ffn; none = 4·width (gpt2), 8/3·width rounded up to a multiple of 32 (llama)
    vocab: int = 256                            # V; padded to a multiple of tp in storage, never in numbers
    tied: bool | None = None                    # head shares the token embedding; none = true for gpt2, false for llama
    window: int | None = None                   # sliding attention window in tokens; none = whole document
    dropout: float = 0.0                        # after the embedding and at each block's exit
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    qk_norm: bool = False                       # RMSNorm of each query and key head (llama)
    max_positions: int | None = None            # rows of the learned position table; none = train.seq. llama: only a limit on seq
    moe: MoE = field(default_factory=MoE)

    @property
    def random(self):
        """Whether training draws random numbers beyond the first weights."""
        return bool(self.dropout or self.moe.experts and (self.moe.jitter or self.moe.noise or self.moe.dropout))


@dataclass(frozen=True)
class Mesh:
    """Devices along each axis; one axis may be "auto": filled from the number of devices."""
    pp: int | Literal["auto"] = 1               # pipeline stages
    dp: int | Literal["auto"] = 1               # batch, meant for the slow network
    fsdp: int | Literal["auto"] = 1             # batch, meant for sharded parameters
    ep: int | Literal["auto"] = 1               # experts; of all else the batch
    sp: int | Literal["auto"] = 1               # sequence, through attention
    tp: int | Literal["auto"] = 1               # width of the matrices

    @property
    def sizes(self):
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def size(self):
        return prod(self.sizes.values())

    @property
    def auto(self):
        """The axis still to be filled, or None."""
        return next((axis for axis, size in self.sizes.items() if size == "auto"), None)

    @property
    def text(self):
        """fsdp2·sp2·tp2; "one device" when every axis has size 1."""
        return "·".join(f"{axis}{size}" for axis, size in self.sizes.items() if size != 1) or "one device"

    def live(self, axes=AXES):
        """The axes among `axes` with more than one device: the only ones that can carry traffic."""
        return tuple(axis for axis in axes if getattr(self, axis) > 1)

    @property
    def batch(self):
        """N_dp·N_ep of SPEC: ways the batch is split."""
        return prod(getattr(self, axis) for axis in BATCH_AXES)


@dataclass(frozen=True)
class Zero:
    """ZeRO stage of each replica axis: 0 nothing, 1 optimizer state, 2 + gradients, 3 + parameters are sharded over it."""
    dp: int = 0
    fsdp: int = 3
    sp: int = 0
    ep: int = 0
    pp: int = 0


@dataclass(frozen=True)
class Parallel:
    zero: Zero = field(default_factory=Zero)
    lowering: Literal["manual", "annotated"] = "manual"   # manual: our collectives in one shard_map. annotated: XLA's choice
    check_vma: bool = True                      # let shard_map check which values vary over which axes
    sp_kind: Literal["ring", "ulysses", "allgather", "hybrid"] = "ring"
    sp_ulysses: int | None = None               # hybrid: the inner (Ulysses) degree; the ring is sp / sp_ulysses
    sp_order: Literal["contiguous", "zigzag", "striped"] = "contiguous"
    tp_sequence: bool = False                   # Megatron sequence parallelism: norms and residual on S/tp tokens
    pad_vocab: bool = True                      # pad the vocabulary to a multiple of tp, masked; false = refuse instead
    remat: Literal["none", "full", "selective"] = "none"
    remat_save: Literal["attention", "matmuls"] = "attention"   # selective: what is kept, everything else is recomputed
    zero_r: bool = False                        # ZeRO-R: recompute from 1/tp of each layer input, gathered again in backward
    scatter_inner: int | None = None            # ZeRO's reduce-scatters over one larger axis in two steps, the second among this many neighbours
    loss_chunk: int = 1024                      # tokens per device whose logits exist at one time
    schedule: Literal["circular", "gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zb_v", "dualpipe_v"] = "circular"  # of the pipeline
    chunks: int | None = None                   # v, runs of layers per stage; none = 2 for interleaved, zb_v and dualpipe_v, else 1
    schedule_file: str | None = None            # pipeline table from a CSV (stage,tick,op,microbatch,chunk) instead of `schedule`
    layers_per_stage: tuple[int, ...] | None = None     # such as 3,2,2,1: one number per stage, or per chunk in model order; none = even
    gather_once: bool = False                   # pipelines: gather ZeRO-3 weights once per step and keep them, not in every tick
    remat_tick: bool = True                     # circular: of a tick keep its input only, and compute it again in the backward pass
    moe_transport: Literal["all_to_all", "gather", "ragged"] = "all_to_all"     # how tokens travel over ep; ragged: TPU and GPU only
    moe_tp: Literal["width", "tokens"] = "width"    # tp in the MoE layer: splits each expert's width, or the tokens


@dataclass(frozen=True)
class Precision:
    compute: Dtype = "float32"                  # activations, and weights as the matrix unit sees them
    params: Dtype = "float32"                   # weights as stored
    master: Dtype | None = None                 # optimizer's own copy of 16-bit weights; none = no copy
    loss_scale: float | None = None             # static; required where float16 appears, undone before the update

    def stored(self, parameter):
        """Dtype of a `params.Parameter` as stored: a router's is at least float32."""
        return "float32" if parameter.wide and BYTES[self.params] < 4 else self.params

    def computed(self, parameter):
        """Dtype of a `params.Parameter` as the model sees it: a router's is at least float32."""
        return "float32" if parameter.wide and BYTES[self.compute] < 4 else self.compute

    def gradient(self, microbatches):
        """Dtype in which gradients are reduced and summed: at least float32 when accumulated or when there is a master copy, else the
        parameters' own (δ_grad of SPEC section 1)."""
        narrow = BYTES[self.params] < 4
        return (self.master or "float32") if narrow and (self.master or microbatches > 1) else self.params

    @property
    def optimizer(self):
        """Dtype of the optimizer's tensors (δ_opt): the master copy's, else the parameters'."""
        return self.master or self.params

    @property
    def wide(self):
        """Whether any part needs 64-bit mode."""
        return "float64" in (self.compute, self.params, self.master)


@dataclass(frozen=True)
class Optim:
    name: Literal["adamw", "sgd", "momentum"] = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.1                   # matrices only: no decay of norms, biases
    clip: float | None = 1.0                    # global gradient norm; none = no clipping
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    momentum: float = 0.9
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup: int = 0                             # steps from 0 to lr
    final: float = 0.1                          # lr at the last step, as a part of lr (cosine, linear)


@dataclass(frozen=True)
class Data:
    path: str | None = None                     # file or folder of text; none = the standard library of this Python
    tokenizer: Literal["byte"] = "byte"


@dataclass(frozen=True)
class Train:
    batch: int = 8                              # B: global sequences per optimizer step
    seq: int = 128                              # S: tokens per sequence
    microbatches: int = 1                       # m: micro-batches whose gradients are accumulated
    steps: int = 100
    seed: int = 0


@dataclass(frozen=True)
class Run:
    name: str = "run"
    model: Model = field(default_factory=Model)
    mesh: Mesh = field(default_factory=Mesh)
    parallel: Parallel = field(default_factory=Parallel)
    precision: Precision = field(default_factory=Precision)
    optim: Optim = field(default_factory=Optim)
    data: Data = field(default_factory=Data)
    train: Train = field(default_factory=Train)
    notes: tuple[str, ...] = ()                 # what the loader has to say: idle recipe values, padding, bf16 without a master

    def change(self, **parts):
        """Copy with some fields of some parts replaced: `run.change(mesh=dict(tp=2), name="x")`. Nests to any depth."""
        return _change(self, parts)

    def set(self, name, value):
        """Copy with one setting replaced, by its dotted name: `run.set("parallel.zero.dp", 1)`."""
        *parents, leaf = name.split(".")
        change = {leaf: value}
        for parent in reversed(parents):
            change = {parent: change}
        return self.change(**change)


def _change(node, parts):
    return replace(node, **{name: _change(getattr(node, name), value) if isinstance(value, dict) else value
                            for name, value in parts.items()})


def resolve(run):
    """Fill every field that is `None` for "derive it"."""
    model, width = run.model, run.model.width
    gpt2 = model.style == "gpt2"
    fill = lambda value, default: default if value is None else value
    ffn = 4 * width if gpt2 else -(-8 * width // 3 // 32) * 32
    model = replace(model,
                    kv_heads=fill(model.kv_heads, model.heads),
                    head_dim=fill(model.head_dim, width // model.heads if model.heads > 0 else 0),
                    ffn=fill(model.ffn, ffn),
                    tied=fill(model.tied, gpt2),
                    max_positions=fill(model.max_positions, run.train.seq if gpt2 else None))
    if model.moe.experts:
        model = replace(model, moe=replace(model.moe, ffn=fill(model.moe.ffn, model.ffn), group=fill(model.moe.group, run.train.seq)))
    return replace(run, model=model)


def fill_auto(run, devices):
    """Fill the "auto" axis of the mesh so that the mesh has `devices` devices; raises ConfigError when it cannot."""
    from jaxpara.errors import ConfigError
    axis = run.mesh.auto
    if axis is None:
        return run
    rest = prod(size for size in run.mesh.sizes.values() if size != "auto")
    if devices % rest:
        raise ConfigError(f"mesh.{axis} = auto cannot be filled: the other axes multiply to {rest}, which does not divide "
                          f"{devices} devices. Nearest device counts: {max(devices // rest, 1) * rest}, {(devices // rest + 1) * rest}.")
    return run.change(mesh={axis: devices // rest})


def settings_of(node, prefix=""):
    """Yield (dotted name, annotation, value) of every leaf setting below a dataclass instance."""
    for item in fields(node):
        value = getattr(node, item.name)
        if hasattr(value, "__dataclass_fields__"):
            yield from settings_of(value, f"{prefix}{item.name}.")
        elif item.name != "notes":
            yield prefix + item.name, item.type, value
