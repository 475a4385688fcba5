"""The checkpoint of every kind of head: what ``info`` says of it; bad ones, each refused with a sentence that says which."""

import logging
import shutil
from contextlib import nullcontext
from dataclasses import replace

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from safetensors.torch import load_file, save_file
from support.head_kinds import KINDS, head_of_kind
from support.small_models import small_model

from pass_ext import load_drafter
from pass_ext.__main__ import main

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(
        not hasattr(transformers.cache_utils, "DynamicIndexedLayer"), reason="DeepSeek-V4 came with transformers 5.24"
    ),
]

LAYER = {"MTP": "model.layers.2.", "MTP of a hybrid": "mtp.", "MTP of streams": "mtp.0."}
"""Where the MTP layer of a checkpoint begins: other tensors there are the model's own."""


@pytest.fixture(scope="module", params=KINDS)
def kind(request, tmp_path_factory):
    """Its name, its folder, and the head."""
    folder = tmp_path_factory.mktemp("head")
    return request.param, folder, head_of_kind(request.param, folder)


@pytest.fixture
def copied(kind, tmp_path):
    """The same with a folder that a test may spoil."""
    name, folder, head = kind
    return name, shutil.copytree(folder, tmp_path / "head"), head


def test_info_names_the_method(kind, capsys):
    _, folder, head = kind
    assert main(["info", "--drafter", str(folder)]) == 0
    said = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    assert said["method"].strip() == type(head.method).__name__ and int(said["tensors"]) > 5


def test_a_file_that_was_cut_off(copied):
    _, folder, head = copied
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(ValueError, match="was cut off") as error:
        load_drafter(folder, head.target)
    assert str(folder) in str(error.value)


def test_another_model_is_refused(kind):
    _, folder, _ = kind
    other = small_model("llama", vocab_size=131, hidden_size=32, num_hidden_layers=4)
    words = r"LlamaForCausalLM|this model has|this one has|must be \[.*by its config and the model, got"
    with pytest.raises(ValueError, match=words) as error:
        load_drafter(folder, other)
    assert str(folder) in str(error.value)


def test_a_length_of_nothing_is_refused(kind):
    with pytest.raises(ValueError, match=r"length.* must be .*, got 0"):
        replace(kind[2].method, length=0)


def test_a_tensor_without_a_use_is_named(copied, caplog):
    """In the log, or by an error where the model's own layer has no such part."""
    name, folder, head = copied
    file = folder / "model.safetensors"
    odd = f"{LAYER.get(name, '')}odd.weight"
    save_file(load_file(file) | {odd: torch.ones(1)}, file, metadata={"format": "pt"})
    is_in_the_layer = name in ("MTP", "MTP of streams")
    refused = (
        pytest.raises(ValueError, match=r"has a tensor .*odd\.weight, and a layer of")
        if is_in_the_layer
        else nullcontext()
    )
    with caplog.at_level(logging.WARNING, "pass_ext"), refused:
        load_drafter(folder, head.target)
    assert is_in_the_layer or odd in caplog.text
