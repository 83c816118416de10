"""From `config.Optim` to an optax chain. Clipping is not in it: `step.py` clips with the one norm it also reports."""
import optax

from jaxpara.params import parameters


def schedule(run):
    """Learning rate as a function of the step (from 0): warm-up, then constant, cosine or linear to `final`·lr."""
    optim, last = run.optim, run.train.steps - 1
    decay = max(last - optim.warmup, 1)
    after = {"constant": lambda: optax.constant_schedule(optim.lr),
             "cosine": lambda: optax.cosine_decay_schedule(optim.lr, decay, alpha=optim.final),
             "linear": lambda: optax.linear_schedule(optim.lr, optim.lr * optim.final, decay)}[optim.schedule]()
    if not optim.warmup:
        return after
    rise = optax.linear_schedule(optim.lr / (optim.warmup + 1), optim.lr, optim.warmup)
    return optax.join_schedules([rise, after], [optim.warmup])


def optimizer(run):
    """`optax.GradientTransformation` over a dict {parameter name: array}. Only matrices and embeddings are decayed."""
    optim, rate = run.optim, schedule(run)
    decayed = {parameter.name: parameter.matrix for parameter in parameters(run.model)}
    if optim.name == "adamw":
        return optax.adamw(rate, optim.b1, optim.b2, optim.eps, weight_decay=optim.weight_decay, mask=decayed)
    momentum = optim.momentum if optim.name == "momentum" else None
    decay = [optax.add_decayed_weights(optim.weight_decay, decayed)] * (optim.weight_decay > 0)
    return optax.chain(*decay, optax.sgd(rate, momentum))
