"""``generate`` under ``torch.autocast``: transformers' greedy texts, near ties aside, by every method."""

import pytest
import torch

from pass_ext import MultiCandidate, NGram, Plain, generate
from tests.support.small_models import prompts, small_model

NEW = 24


@pytest.fixture(autouse=True)
def autocast():
    with torch.autocast("cpu", torch.bfloat16):
        yield


def assert_theirs_but_for_near_ties(model, ids, text):
    """Token for token; where another one comes first, transformers' bf16 logits of both differ by two roundings at most."""
    theirs = model.generate(ids, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)[0]
    assert len(text) == len(theirs)
    differing = (text != theirs).nonzero().flatten().tolist()
    if differing:
        at = differing[0]
        with torch.no_grad():
            logits = model(theirs[None, :at]).logits[0, -1].float()
        gap = logits[theirs[at]] - logits[text[at]]
        assert gap <= 2 * 2**-8 * logits[theirs[at]].abs(), f"token {at}: {gap} apart"
    return not differing


@pytest.mark.parametrize(
    "architecture", ["llama", "qwen3", "gemma", "gemma2", "mistral", "opt", "deepseek_v3", "llama4_text"]
)
def test_texts_are_those_of_transformers(architecture):
    model = small_model(architecture)
    same = 0
    for length in (3, 9):
        ids = prompts(1, length)[0]
        text = generate(model, ids, Plain(), max_new_tokens=NEW, eos_token_id=[]).sequences[0]
        same += assert_theirs_but_for_near_ties(model, ids, text)
    assert same >= 1


@pytest.mark.parametrize("method", [NGram(), MultiCandidate(None, branching=(2, 2))], ids=lambda x: type(x).__name__)
def test_drafts_change_near_ties_alone(method):
    model = small_model("qwen3")
    if isinstance(method, MultiCandidate):
        method = MultiCandidate(model, branching=method.branching)
    ids = prompts(1, 9)[0]
    assert_theirs_but_for_near_ties(
        model, ids, generate(model, ids, method, max_new_tokens=NEW, eos_token_id=[]).sequences[0]
    )


def test_a_refusal_names_autocast():
    """Of a model whose own code does not run in it."""
    model = small_model("llama")

    def fails(hidden):
        raise RuntimeError("expected mat1 and mat2 to have the same dtype")

    model.model.layers[0].mlp.forward = fails
    with pytest.raises(
        ValueError, match=r"under torch\.autocast, so pass_ext cannot decode it there: RuntimeError: expected mat1"
    ):
        generate(model, prompts(1, 4)[0], max_new_tokens=2)
