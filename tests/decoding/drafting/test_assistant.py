"""Gemma 4's assistant: drafts are those of the formula around transformers' module, texts are Plain's."""

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from support.assistants import PlainAssistant, write_assistant
from support.chi_square import chi_square_tail, counted, law_of_two
from support.heads import plain_loop
from support.recorded import Recorded
from support.small_models import small_model

from pass_ext import generate, load_drafter
from pass_ext.drafting import Assistant

if not hasattr(transformers, "Gemma4AssistantForCausalLM"):
    pytest.skip("transformers has no assistant of Gemma 4", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("one_thread")

LIMITS = dict(max_new_tokens=14, eos_token_id=[])


@pytest.fixture(scope="module")
def target():
    return small_model("gemma4_text")


@pytest.mark.parametrize(
    "changes", [{}, dict(use_ordered_embeddings=True, num_centroids=97, centroid_intermediate_top_k=9)]
)
def test_drafts_are_those_of_the_formula(target, tmp_path, changes):
    module = write_assistant(tmp_path, target, **changes)
    method = load_drafter(tmp_path, target)
    assert method == Assistant(method.head, length=4)
    prompt = torch.randint(3, 97, (1, 11), generator=torch.Generator().manual_seed(1))  # longer than the window
    got = generate(target, prompt, recorded := Recorded(method), **LIMITS)
    text, calls, drafts = plain_loop(PlainAssistant(target, module), target, prompt[0].tolist(), 14, 4)
    assert got.sequences[0].tolist() == text and got.stats.model_calls == calls
    assert recorded.tokens() == drafts


def test_the_law_under_rejection(target, tmp_path):
    """The second new token is drawn beside drafts that were drawn from q: transformers' own path is wrong here."""
    write_assistant(tmp_path, target)
    method, prompt = load_drafter(tmp_path, target), [5, 17, 40]
    found = generate(
        target, torch.tensor([prompt]), method, max_new_tokens=2, eos_token_id=[], num_return_sequences=600,
        temperature=0.7, top_k=4, seeds=1, rule="rejection",
    ).sequences[:, 3:]  # fmt: skip
    assert chi_square_tail(counted(found, 97), law_of_two(target, prompt, 0.7, 4)) > 1e-4


def test_assistants_of_other_models_are_refused(target, tmp_path):
    write_assistant(tmp_path, target)
    with pytest.raises(ValueError, match=r"hidden size is 64, and that of this Gemma4ForCausalLM is 96"):
        load_drafter(tmp_path, small_model("gemma4_text", hidden_size=96))
    with pytest.raises(
        ValueError, match=r"the types full_attention, sliding_attention, and this LlamaForCausalLM has none"
    ):
        load_drafter(tmp_path, small_model("llama"))
    with pytest.raises(TypeError, match=r"Assistant: head must be one that load_drafter\(path, model\) has read"):
        generate(target, torch.tensor([[5, 6]]), Assistant("head"), max_new_tokens=3)
