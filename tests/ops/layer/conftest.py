"""The backends of layer_stack and layer_pack."""

import pytest


@pytest.fixture
def cpu(backend):
    if not backend.name.startswith("cpu"):
        pytest.skip("layer_stack is for the CPU only")
    return backend
