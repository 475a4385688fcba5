"""Gemma 4's assistant: drafts are those of the formula around transformers' module, texts are Plain's."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from support.chi_square import chi_square_tail, counted, law_of_two
from support.heads import plain_loop
from support.recorded import Recorded
from support.small_models import WIDE, ragged_prompts, small_model

from pass_ext import NGram, Plain, Session, generate, load_drafter
from pass_ext.drafting import Assistant

if not hasattr(transformers, "Gemma4AssistantForCausalLM"):
    pytest.skip("transformers has no assistant of Gemma 4", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("one_thread")

LIMITS = dict(max_new_tokens=14, eos_token_id=[])
OF_KEYS = ("head_dim", "global_head_dim", "num_global_key_value_heads", "sliding_window")  # the model's own


def write_assistant(folder, target, seed=0, **changes):
    """A tiny assistant with random weights -> transformers' module."""
    torch.manual_seed(seed)
    text = target.config.get_text_config(decoder=True)
    settings = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=2,
        layer_types=["sliding_attention", "full_attention", "full_attention"], hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0, vocab_size=text.vocab_size,
    )  # fmt: skip
    settings |= {name: WIDE["gemma4_text"][name] for name in OF_KEYS}
    config = transformers.Gemma4AssistantConfig(
        text_config=transformers.Gemma4TextConfig(**settings), backbone_hidden_size=text.hidden_size, **changes
    )
    module = transformers.Gemma4AssistantForCausalLM(config).eval().requires_grad_(False)
    for parameter in module.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, 2.0 / parameter.shape[-1] ** 0.5)
    if module.masked_embedding is not None:
        module.masked_embedding.token_ordering.copy_(torch.randperm(text.vocab_size))
    module.save_pretrained(folder)
    return module


class PlainAssistant:
    """The assistant from the formula, for one text."""

    def __init__(self, target, module):
        self.target, self.module = target, module

    def chain(self, text, length):
        """Greedy drafts."""
        model, ids = self.target.model, torch.tensor([text[:-1]])
        out = model(ids, return_shared_kv_states=True)
        state, token, drafts = out.last_hidden_state[:, -1:], text[-1], []
        for _ in range(length):
            embedded = model.get_input_embeddings()(torch.tensor([[token]]))
            found = self.module(
                inputs_embeds=torch.cat((embedded, state), -1), position_ids=torch.tensor([[len(text) - 1]]),
                shared_kv_states=dict(out.shared_kv_states),
            )  # fmt: skip
            token, state = int(found.logits[0, 0].argmax()), found.last_hidden_state
            drafts.append(token)
        return drafts


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


@pytest.mark.parametrize("count", [1, 3, pytest.param(8, marks=pytest.mark.slow)])  # 3 shows the same
def test_texts_are_plains(target, tmp_path, count):
    write_assistant(tmp_path, target)
    method = load_drafter(tmp_path, target)
    ids, mask = ragged_prompts(count, longest=12, seed=count)
    sampled = dict(temperature=0.8, top_p=0.9, seeds=list(range(count)))
    for options in ({}, sampled, dict(sampled, rule="coupled_inverse"), dict(sampled, num_return_sequences=2)):
        options = dict(LIMITS, attention_mask=mask, **options)
        want = generate(target, ids, Plain(), **options).sequences
        for each in (method, replace(method, length=2, ngram=NGram(shortest=1))):
            assert torch.equal(generate(target, ids, each, **options).sequences, want)
    in_codes = [
        generate(target, ids, each, session=Session(target, cache_dtype=torch.int8), attention_mask=mask, **LIMITS)
        for each in (Plain(), method)
    ]
    assert torch.equal(in_codes[0].sequences, in_codes[1].sequences)


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
