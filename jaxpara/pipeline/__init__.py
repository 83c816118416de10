"""Pipeline schedules: data (`schedule`), builders, a checker, a simulator, CSV and text, layers per chunk. Nothing here needs JAX."""
from jaxpara.pipeline.builders import KINDS, build, wrong
from jaxpara.pipeline.check import Fault, checked, first_fault
from jaxpara.pipeline.layers import split_layers
from jaxpara.pipeline.schedule import Entry, Op, Schedule
from jaxpara.pipeline.simulate import Memory, Simulation, Times, memory, simulate
from jaxpara.pipeline.table import read, to_csv, to_text, write

__all__ = ["KINDS", "build", "wrong", "Fault", "checked", "first_fault", "split_layers", "Entry", "Op", "Schedule", "Memory", "Simulation", "Times",
           "memory", "simulate", "read", "to_csv", "to_text", "write"]
