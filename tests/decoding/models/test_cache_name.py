"""The cache by its names in transformers before 5.24 and since."""

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from packaging.version import Version
from support.small_models import small_model

from pass_ext.decoding.models.parts import cache_name, given_cache

NOW = "cache" if Version(transformers.__version__) >= Version("5.24") else "past_key_values"


def _former(ids, past_key_values=None, use_cache=True):
    """A forward of another package, that has not followed."""


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_cache_is_found_by_either_name(name):
    cache = transformers.DynamicCache()
    assert given_cache({name: cache, "use_cache": True}) is cache
    assert given_cache({name: None}) is given_cache({}) is None


def test_a_forward_is_asked_for_its_own_name():
    model = small_model("llama")
    assert cache_name(_former) == "past_key_values"
    assert cache_name(model.forward) == cache_name(model.get_decoder().forward) == NOW
    ids = torch.tensor([[5, 6, 7]])
    result = model(ids, use_cache=True)
    assert cache_name(type(result)) == NOW
    assert result[NOW].get_seq_length() == 3
