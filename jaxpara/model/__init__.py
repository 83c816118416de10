"""The model, written once: nnx modules that read as single-device code. `ctx` is the only parallel word in it."""
from jaxpara.model.gpt import GPT

__all__ = ["GPT"]
