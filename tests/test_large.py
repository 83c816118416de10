"""The large recipes build and compile here, on fake CPU devices, without allocating anything."""
import pytest

import jaxpara
from jaxpara.params import count

TARGET = "cpu:8"


@pytest.mark.parametrize("name,parameters,mesh", [("gpt2_124m", 124_439_808, "fsdp8"), ("llama3_8b", 8_030_261_248, "fsdp2·tp4"),
                                                  ("llama3_70b", 70_553_706_496, "tp8")])
def test_compiles(name, parameters, mesh):
    program = jaxpara.build(jaxpara.load(name), TARGET)
    assert count(program.run.model) == parameters
    assert program.run.mesh.text == mesh
    memory = program.lower().compile().memory_analysis()
    # parameters and two Adam tensors in float32, split over every device, and little else
    expected = 12 * parameters / 8
    assert expected <= memory.argument_size_in_bytes < 1.01 * expected
    assert memory.alias_size_in_bytes >= expected
