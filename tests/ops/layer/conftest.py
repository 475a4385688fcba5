"""The backends of the layer ops."""

import pytest


@pytest.fixture
def cpu(backend):
    if not backend.name.startswith("cpu"):
        pytest.skip("the layer ops are for the CPU only")
    return backend
