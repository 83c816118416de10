"""What a compiled program communicates, read from its text. No JAX."""
from jaxpara.hlo.attribute import axes_of, groups_over, owner_of, phase_of
from jaxpara.hlo.groups import group_size
from jaxpara.hlo.parse import Collective, HloError, bits, collectives, parse

__all__ = ["Collective", "HloError", "axes_of", "bits", "collectives", "group_size", "groups_over", "owner_of", "parse", "phase_of"]
