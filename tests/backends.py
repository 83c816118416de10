"""Marks of tests that compile for accelerators: the plugin must be installed, no such device is needed."""
import os

import pytest

from jaxpara.mesh import plugins

needs_tpu = pytest.mark.skipif("tpu" not in plugins(), reason='needs libtpu: pip install "jaxpara[tpu]"')
needs_gpu = pytest.mark.skipif("gpu" not in plugins(), reason='needs the CUDA plugin, 4 GB: pip install "jaxpara[gpu]"')


def on_day(part, parts):
    """Mark of a long test that runs every `parts`-th day, `part` days late; ROTATION says the day."""
    today = int(os.environ.get("ROTATION", 0)) % parts == part
    return pytest.mark.skipif(False, reason="its day is today") if today else pytest.mark.slow
