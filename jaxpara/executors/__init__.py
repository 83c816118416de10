"""Pipelines as programs: the circular scan, differentiated as a whole, and the one that runs any legal table."""
from jaxpara.executors.circular import circular
from jaxpara.executors.relay import relay
from jaxpara.executors.scheduled import scheduled

__all__ = ["circular", "relay", "scheduled"]
