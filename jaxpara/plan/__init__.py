"""What a run needs and sends, from the config alone. No JAX."""
from jaxpara.plan.memory import model_state
from jaxpara.plan.lines import Line, total
from jaxpara.plan.traffic import traffic

__all__ = ["Line", "model_state", "total", "traffic"]
