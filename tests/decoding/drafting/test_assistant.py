"""Gemma 4's assistant: drafts are those of the formula around transformers' module, texts are Plain's."""

import copy
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers")

import transformers
from support.assistants import PlainAssistant, write_assistant
from support.chi_square import chi_square_tail, counted, law_of_two
from support.heads import plain_loop
from support.recorded import Recorded
from support.small_models import ragged_prompts, small_model

from pass_ext import generate, load_drafter
from pass_ext.decoding.drafting.heads.assistant import AssistantHead
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


class Calls(TorchDispatchMode):
    """Counts the ops inside."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        self.found[function.name().removesuffix(".default")] += 1
        return function(*arguments, **(named or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_draft_is_one_call_of_our_ops_for_all_requests(target, tmp_path, dtype):
    """Products, norms and attention are ours, none PyTorch's; a row has the bits that it has alone, in any batch."""
    write_assistant(tmp_path, target)
    model = copy.deepcopy(target).to(dtype)
    method = load_drafter(tmp_path, model)
    given, true = [], AssistantHead.__call__
    ids, mask = ragged_prompts(3, longest=9, seed=3)

    def called(head, embedded, states, session, requests):
        with Calls() as calls:
            logits, fed = true(head, embedded, states, session, requests)
        for i, b in enumerate(requests):
            alone = true(head, embedded[i : i + 1], states[i : i + 1], session, [b])
            assert torch.equal(alone[0], logits[i : i + 1]) and torch.equal(alone[1], fed[i : i + 1])
        given.append((len(requests), calls.found))
        return logits, fed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AssistantHead, "__call__", called)
        got = generate(model, ids, method, attention_mask=mask, max_new_tokens=8, eos_token_id=[])
    assert torch.equal(
        got.sequences, generate(model, ids, attention_mask=mask, max_new_tokens=8, eos_token_id=[]).sequences
    )
    assert max(requests for requests, _ in given) == 3
    layers = 3
    for _, calls in given:
        ours = {name: count for name, count in calls.items() if name.startswith("pass_ext::")}
        assert ours["pass_ext::linear_rows"] == 5 * layers + 3 and ours["pass_ext::attention_tree"] == layers
        assert ours["pass_ext::step_rms_norm"] == 5 * layers + 1
        assert not {"aten::mm", "aten::addmm", "aten::bmm", "aten::linear"} & calls.keys()
        assert not [name for name in calls if "scaled_dot_product" in name]
