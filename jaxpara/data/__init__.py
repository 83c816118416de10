"""Packed sequences of text, the same for every mesh, and the order in which a sharded sequence stores its tokens. No JAX."""
from jaxpara.data.loader import Loader
from jaxpara.order import inverse, order

__all__ = ["Loader", "inverse", "order"]
