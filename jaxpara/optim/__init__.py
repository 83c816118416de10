"""Optimizers: unmodified optax, run in the global view."""
from jaxpara.optim.chains import optimizer, schedule

__all__ = ["optimizer", "schedule"]
