"""The architectures that an own forward computes, layer by layer, with the bits that they have as they are; and models that
must run as they are.
"""

import copy
import gc
import pickle
import weakref
from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from support.generation import slots_for
from support.small_models import ARCHITECTURES, prompts, small_model
from transformers import AutoConfig, AutoModelForCausalLM

from pass_ext import PaSS, Tree, generate
from pass_ext.__main__ import main
from pass_ext.decoding.models import fused_forward, parts
from pass_ext.integrations.transformers.processors import NotedRows
from pass_ext.testing import assert_same_bits

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS = dict(max_new_tokens=8, eos_token_id=[])
GREEDY = dict(max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
MORE = dict.fromkeys(("granite", "olmo2", "smollm3", "ministral3"), ARCHITECTURES["llama"]) | {
    "gemma3_text": ARCHITECTURES["gemma"]
}
WHOLE = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "phi3", "granite", "olmo2", "smollm3")
# Experts, norms that subtract the mean, MLPs without a gate, rotated neighbours.
NOT = ("qwen2_moe", "phi", "gpt_neox", "opt")


def model_of(architecture, dtype=torch.float32, **changes):
    if architecture in MORE or changes:
        torch.manual_seed(0)
        config = AutoConfig.for_model(architecture, **(MORE | ARCHITECTURES)[architecture] | changes)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    else:
        model = small_model(architecture)
    model = model.to(dtype).requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():  # norms and biases begin with ones or zeros
        if parameter.dim() == 1:
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(dtype) * 0.1)
    return model


@pytest.fixture
def calls(monkeypatch):
    """Counts the calls of both ops, as on a GPU: the layers do not run as one stack."""
    monkeypatch.setattr(parts, "stack_of", lambda *_: None)
    counts = Counter()
    for name in ("_before", "_after"):
        op = getattr(fused_forward, name)
        monkeypatch.setattr(fused_forward, name, lambda *a, op=op, name=name: counts.update([name]) or op(*a))
    return counts


@contextmanager
def as_it_is(model):
    """A hook, even one that does nothing, has the model run as it is."""
    hook = model.register_forward_hook(lambda *_: None)
    try:
        yield
    finally:
        hook.remove()


def way(model, ids=None):
    return generate(model, prompts(1, 7)[0] if ids is None else ids, **OPTIONS).stats.backend


def with_rows(model, ids, method):
    """The result, and the logits of its tokens."""
    noted = NotedRows()
    result = generate(model, ids, method, logits_processor=noted, **OPTIONS)
    return result, torch.cat(noted.of(result))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", WHOLE)
def test_whole_layers_give_the_logits_that_they_gave(architecture, dtype, calls):
    """Both halves of every layer run from the second call on, and nothing changes by a bit."""
    model, ids = model_of(architecture, dtype), prompts(1, 7)[0]
    method = PaSS(slots_for(model), tree=Tree.from_branching((2, 2)), rows=12, slots=2)
    with as_it_is(model):
        before, rows_before = with_rows(model, ids, method)
    assert before.stats.backend.startswith("module: hooks") and not calls
    after, rows_after = with_rows(model, ids, method)
    assert torch.equal(after.sequences, before.sequences)
    assert_same_bits(rows_after, rows_before)
    assert after.stats.backend == "fused" and calls["_before"] >= 2 * (after.stats.model_calls - 1)
    assert not any("forward" in vars(layer) for layer in model.get_decoder().layers)


@pytest.mark.parametrize("length", [7, 12, 70])
def test_a_rotary_embedding_of_a_part_of_each_head(length):
    model, ids = model_of("phi3", partial_rotary_factor=0.5), prompts(1, length)[0]
    ours = generate(model, ids, **OPTIONS)
    assert ours.sequences.tolist() == model.generate(ids, **GREEDY).tolist()
    assert ours.stats.backend == "fused"


@pytest.mark.parametrize("length", [7, 12, 70])
def test_layers_that_compute_with_positions_stay(length):
    """Queries of ministral3 are scaled by their position, which the ops do not know; at the first positions by 1."""
    rotary = dict(
        rope_type="yarn", rope_theta=1e4, factor=2.0, original_max_position_embeddings=8, llama_4_scaling_beta=3.0,
        beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0,
    )  # fmt: skip
    model, ids = model_of("ministral3", rope_parameters=rotary), prompts(1, length)[0]
    ours = generate(model, ids, **OPTIONS)
    assert ours.sequences.tolist() == model.generate(ids, **GREEDY).tolist()
    assert ours.stats.backend.startswith("module: our ops give other")


def test_a_layer_that_cannot_be_called_to_be_compared(monkeypatch):
    model, ids = model_of("llama"), prompts(1, 70)[0]
    layer = type(model.get_decoder().layers[0])
    forward = layer.forward

    def refusing(self, hidden_states, **named):
        if named["position_ids"].max() > 1000:
            raise ValueError("not such rows")
        return forward(self, hidden_states, **named)

    monkeypatch.setattr(layer, "forward", refusing)
    ours = generate(model, ids, **OPTIONS)
    assert ours.sequences.tolist() == model.generate(ids, **GREEDY).tolist()
    assert ours.stats.backend == "module: it cannot be called to be compared: ValueError: not such rows"


@pytest.mark.parametrize("architecture", WHOLE)
def test_some_rows_of_a_prompt_show_what_layers_compute(architecture):
    """So that no step compares."""
    model, ids = model_of(architecture), prompts(1, 70)[0]
    ours = generate(model, ids, max_new_tokens=1)
    assert ours.sequences.tolist() == model.generate(ids, **GREEDY | dict(max_new_tokens=1)).tolist()
    assert ours.stats.backend == "fused"


@pytest.mark.parametrize("architecture", NOT)
def test_other_layers_stay(architecture, calls):
    model, ids = small_model(architecture), prompts(1, 7)[0]
    got = generate(model, ids, **OPTIONS)
    assert not calls and got.stats.backend.startswith(
        "module: it has no" if "_moe" not in architecture else "module: layer 0"
    )
    assert torch.equal(
        got.sequences, model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    )


def test_layers_without_rotary_embedding(calls):
    """smollm3 rotates in some of its layers only."""
    model, ids = model_of("smollm3", no_rope_layers=[1, 0]), prompts(1, 7)[0]
    got = generate(model, ids, **OPTIONS)
    assert got.stats.backend == "fused"
    assert torch.equal(got.sequences, model.generate(ids, **GREEDY))


def test_adapted_layers_stay(calls):
    model, ids = model_of("llama"), prompts(1, 7)[0]

    class Adapted(nn.Linear):
        def forward(self, input):
            return super().forward(input) * 1.5

    projection = model.model.layers[0].self_attn.q_proj
    projection.__class__ = Adapted
    expected = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(generate(model, ids, **OPTIONS).sequences, expected)
    assert way(model) == "module: layer 0 (LlamaDecoderLayer) has other parts than the layer ops"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda model: None,
        lambda model: model.model.layers[-1].mlp.register_forward_hook(lambda *_: None),
        lambda model: model.model.norm.register_forward_hook(lambda *_: model and None),
        lambda model: setattr(model.model.norm, "owner", model.forward),
    ],
    ids=["as it is", "a hook", "a hook that knows it", "an attribute that knows it"],
)
def test_a_model_that_ends_is_not_remembered(spoil):
    model, ids = model_of("llama"), prompts(1, 7)[0]
    spoil(model)
    for _ in range(2):
        generate(model, ids, **OPTIONS)
    alive = [weakref.ref(part) for part in (model, *model.model.layers)]
    del model
    gc.collect()
    assert [part() for part in alive] == [None, None, None]


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copied_model_finds_its_own_parts(copied):
    model, ids = model_of("llama"), prompts(1, 7)[0]
    text = generate(model, ids, **OPTIONS).sequences
    other = copied(model)
    assert torch.equal(generate(other, ids, **OPTIONS).sequences, text)
    assert way(other) == way(model) == "fused"


def test_hooks_for_every_module_are_called(calls):
    model, ids = model_of("llama"), prompts(1, 7)[0]
    seen = Counter()
    hook = nn.modules.module.register_module_forward_hook(lambda part, *_: seen.update([type(part).__name__]))
    try:
        stats = generate(model, ids, **OPTIONS).stats
    finally:
        hook.remove()
    assert not calls and seen["LlamaMLP"] == 2 * stats.model_calls


def test_info_says_how_a_model_is_run(tmp_path, capsys):
    for architecture, words in (
        ("llama", "fused"),
        ("gpt_neox", "module: it has no rotary embedding and final norm"),
    ):
        folder = tmp_path / architecture
        small_model(architecture).save_pretrained(folder)
        assert main(["info", str(folder)]) == 0
        way, weights = capsys.readouterr().out.splitlines()[-2:]
        assert way.startswith(f"{architecture}: {words}")
        assert weights.startswith("weights: ") and weights.endswith(" MB in float32")
    with pytest.raises(SystemExit, match="pass_ext info: "):
        main(["info", str(tmp_path / "none")])
