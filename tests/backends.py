"""Marks of tests that compile for accelerators: the plugin must be installed, no such device is needed."""
import pytest

from jaxpara.mesh import plugins

needs_tpu = pytest.mark.skipif("tpu" not in plugins(), reason='needs libtpu: pip install "jaxpara[tpu]"')
needs_gpu = pytest.mark.skipif("gpu" not in plugins(), reason='needs the CUDA plugin, 4 GB: pip install "jaxpara[gpu]"')
