"""What a run needs and sends, from the config alone. No JAX."""
from jaxpara.plan.memory import model_state
from jaxpara.plan.traffic import Line, traffic

__all__ = ["Line", "model_state", "traffic"]
