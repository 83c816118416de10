"""Every pipeline of the matrix trains the same model as one device, under each schedule: see `test_matrix`.

Every day runs one small case of each kind in float64 with SGD, a quarter of the others, and an eighth with AdamW and in float32.
"""
import pytest

from equivalence.hard import make_run
from equivalence.matrix import PIPELINES, SMALLEST, settings
from equivalence.test_matrix import compare, rotating
from jaxpara.pipeline import KINDS
from jaxpara.pipeline.placing import divergent, schedule, stack


@pytest.mark.parametrize("case", SMALLEST + rotating(PIPELINES[len(SMALLEST):], 4))
def test_float64_sgd(case):
    compare(case, "float64", "sgd")


@pytest.mark.parametrize("case", rotating(PIPELINES, 8))
def test_float64_adamw(case):
    compare(case, "float64", "adamw")


@pytest.mark.parametrize("case", rotating(PIPELINES, 8))
def test_float32_sgd(case):
    """In the unchecked mode of shard_map."""
    compare(case, "float32", "sgd", {"parallel.check_vma": False})
