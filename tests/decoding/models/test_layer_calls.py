"""layer_calls: the architectures whose layers compute by the two layer ops in a generation, with the bits that they had, and
layers that must stay as they are.
"""

import copy
import gc
import pickle
import weakref
from collections import Counter
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from support.generation import slots_for
from support.small_models import ARCHITECTURES, prompts, small_model
from transformers import AutoConfig, AutoModelForCausalLM

from pass_ext import PaSS, Tree, generate
from pass_ext.decoding.models.patching import attachment, layer_calls, layer_stack
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
    """Counts the calls of both ops."""
    counts = Counter()
    for name in ("_before", "_after"):
        op = getattr(layer_calls, name)
        monkeypatch.setattr(layer_calls, name, lambda *a, op=op, name=name: counts.update([name]) or op(*a))
    return counts


@contextmanager
def without_layer_calls(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(attachment, "layer_calls", lambda model: nullcontext(layer_stack.LayerStack()))
        patch.setattr(attachment, "KEPT", "_of_this_test")
        yield


def known_layers(model):
    """What calls have shown of the layers; None: a layer is called as it is."""
    layers = vars(model)[attachment.KEPT].shadow.get_decoder().layers
    return [getattr(vars(layer).get("forward"), "layer_call", None) for layer in layers]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", WHOLE)
def test_whole_layers_give_the_logits_that_they_gave(architecture, dtype, calls, monkeypatch):
    """Both halves of every layer run from the second call on, and nothing changes by a bit."""
    model, ids = model_of(architecture, dtype), prompts(1, 7)[0]
    method = PaSS(slots_for(model), tree=Tree.from_branching((2, 2)), rows=12, slots=2)
    logits = []
    tap = model.get_output_embeddings().register_forward_hook(lambda _, inputs, out: logits.append(out.clone()))
    with without_layer_calls(monkeypatch):
        before = generate(model, ids, method, **OPTIONS)
    expected, logits = logits, []
    after = generate(model, ids, method, **OPTIONS)
    tap.remove()
    assert torch.equal(after.sequences, before.sequences)
    assert len(logits) == len(expected)
    for ours, theirs in zip(logits, expected, strict=True):
        assert_same_bits(ours, theirs)
    assert [known.is_right for known in known_layers(model)] == [True] * 2
    assert calls["_before"] >= 2 * (after.stats.model_calls - 1)
    assert not any("forward" in vars(layer) for layer in model.get_decoder().layers)


@pytest.mark.parametrize("length", [7, 12, 70])
def test_a_rotary_embedding_of_a_part_of_each_head(length):
    model, ids = model_of("phi3", partial_rotary_factor=0.5), prompts(1, length)[0]
    ours = generate(model, ids, **OPTIONS)
    assert ours.sequences.tolist() == model.generate(ids, **GREEDY).tolist()
    assert [known.is_right for known in known_layers(model)] == [True] * 2


@pytest.mark.parametrize("any_rows", [False, True], ids=["", "as on a GPU"])
@pytest.mark.parametrize("length", [7, 12, 70])
def test_layers_that_compute_with_positions_stay(length, any_rows, monkeypatch):
    """Queries of ministral3 are scaled by their position, which the ops do not know; at the first positions by 1."""
    if any_rows:
        monkeypatch.setattr(layer_calls, "_may_compare", lambda rows, most: True)
    rotary = dict(
        rope_type="yarn", rope_theta=1e4, factor=2.0, original_max_position_embeddings=8, llama_4_scaling_beta=3.0,
        beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0,
    )  # fmt: skip
    model, ids = model_of("ministral3", rope_parameters=rotary), prompts(1, length)[0]
    ours = generate(model, ids, **OPTIONS)
    assert ours.sequences.tolist() == model.generate(ids, **GREEDY).tolist()
    assert True not in [known.is_right for known in known_layers(model)]


@pytest.mark.parametrize(
    ("refuses", "is_right"),
    [(lambda rows, named: rows.shape[1] == 8, True), (lambda rows, named: named["position_ids"].max() > 1000, False)],
    ids=["some of a prompt's rows", "other positions"],
)
def test_a_layer_that_cannot_be_called_to_be_compared(refuses, is_right, monkeypatch):
    """Where it does not take some rows of a prompt, a step shows what it computes; else it stays."""
    monkeypatch.setattr(layer_calls, "_may_compare", lambda rows, most: True)
    model, ids = model_of("llama"), prompts(1, 70)[0]
    layer = type(model.get_decoder().layers[0])
    forward = layer.forward

    def refusing(self, hidden_states, **named):
        if refuses(hidden_states, named):
            raise ValueError("not such rows")
        return forward(self, hidden_states, **named)

    monkeypatch.setattr(layer, "forward", refusing)
    ours = generate(model, ids, **OPTIONS)
    assert ours.sequences.tolist() == model.generate(ids, **GREEDY).tolist()
    assert [known.is_right for known in known_layers(model)] == [is_right] * 2


@pytest.mark.parametrize("architecture", WHOLE)
def test_some_rows_of_a_prompt_show_what_layers_compute(architecture, monkeypatch):
    """As on a GPU, where prompts of any length are looked at so that no step compares."""
    compare, compared = layer_calls._compare, []
    monkeypatch.setattr(layer_calls, "_may_compare", lambda rows, most: True)

    def counting(original, known, call, rows, named):
        compared.append(rows.shape[1])
        compare(original, known, call, rows, named)

    monkeypatch.setattr(layer_calls, "_compare", counting)
    model, ids = model_of(architecture), prompts(1, 70)[0]
    ours = generate(model, ids, **OPTIONS)
    assert ours.sequences.tolist() == model.generate(ids, **GREEDY).tolist()
    assert compared == [70, 70] and [known.is_right for known in known_layers(model)] == [True] * 2


@pytest.mark.parametrize("architecture", NOT)
def test_other_layers_stay(architecture, calls):
    model, ids = small_model(architecture), prompts(1, 7)[0]
    text = generate(model, ids, **OPTIONS).sequences
    assert not calls
    assert torch.equal(text, model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0))


def test_layers_without_rotary_embedding(calls):
    """smollm3 rotates in some of its layers only."""
    model, ids = model_of("smollm3", no_rope_layers=[1, 0]), prompts(1, 7)[0]
    generate(model, ids, **OPTIONS)
    assert [(known.is_right, known.rotates) for known in known_layers(model)] == [(True, True), (True, False)]


def test_a_layer_is_believed_by_its_numbers_only(calls):
    """A class that adds a number to its output, with parts of llama's names."""
    model, ids = model_of("llama"), prompts(1, 7)[0]
    kind = type(model.model.layers[1])

    class Strange(kind):
        def forward(self, *arguments, **named):
            return super().forward(*arguments, **named) + 0.25

    model.model.layers[1].__class__ = Strange
    expected = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(generate(model, ids, **OPTIONS).sequences, expected)
    assert [known.is_right for known in known_layers(model)] == [True, False]


def test_replaced_weights_are_used():
    """Between generations, and in the middle of one."""
    model, ids = model_of("llama"), prompts(1, 7)[0]
    generate(model, ids, **OPTIONS)

    class Streamer:
        put = end = lambda *_: None

        def __init__(self):
            self.steps = 0

        def put_step(self, tokens, accepted):
            self.steps += 1
            if self.steps == 3:
                replace()

    def replace():
        layer = model.model.layers[0].mlp
        layer.down_proj.weight = nn.Parameter(-2 * layer.down_proj.weight, requires_grad=False)

    in_place = model.model.layers[1].input_layernorm.weight
    in_place.mul_(3)  # the same tensor: its new numbers are read
    expected = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(generate(model, ids, **OPTIONS).sequences, expected)
    text = generate(model, ids, streamer=Streamer(), **OPTIONS).sequences
    # The tokens behind the replacement come from the new weights, and from keys and values of the old ones.
    before = ids.shape[1] + 3
    assert torch.equal(text[:, :before], expected[:, :before]) and not torch.equal(text, expected)
    replace()
    expected = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(generate(model, ids, **OPTIONS).sequences, expected)


@pytest.mark.parametrize("place", ["layer.mlp", "layer.self_attn.o_proj", "layer.input_layernorm", "layer.mlp.act_fn"])
def test_hooks_on_parts_are_called(place, calls):
    """A layer whose parts have hooks stays as it is; hooks on the layer itself are called anyway."""
    model, ids = model_of("llama"), prompts(1, 7)[0]
    seen = []
    part = eval(place, {"layer": model.model.layers[0]})
    part.register_forward_hook(lambda *_: seen.append(1))
    model.model.layers[1].register_forward_hook(lambda *_: seen.append(2))
    stats = generate(model, ids, **OPTIONS).stats
    assert seen.count(1) == seen.count(2) == stats.model_calls
    assert known_layers(model)[0] is None and known_layers(model)[1].is_right


def test_adapted_layers_stay(calls):
    model, ids = model_of("llama"), prompts(1, 7)[0]

    class Adapted(nn.Linear):
        def forward(self, input):
            return super().forward(input) * 1.5

    projection = model.model.layers[0].self_attn.q_proj
    projection.__class__ = Adapted
    expected = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(generate(model, ids, **OPTIONS).sequences, expected)
    assert known_layers(model)[0] is None and known_layers(model)[1].is_right


def test_deep_vectors_reach_whole_layers(calls):
    model, ids = model_of("llama"), prompts(1, 7)[0]
    lookahead = slots_for(model, deep_layers=2)
    with torch.no_grad():
        lookahead.deep.mul_(6)
    expected = generate(model, ids, **OPTIONS).sequences
    got = generate(model, ids, PaSS(lookahead, tree=Tree.from_branching((3, 2)), rows=16, slots=2), **OPTIONS)
    assert torch.equal(got.sequences, expected)


def test_a_weight_that_died_is_not_remembered():
    model, ids = model_of("llama"), prompts(1, 7)[0]
    generate(model, ids, **OPTIONS)
    layers = [model, *model.model.layers]
    assert attachment.KEPT in vars(model)
    alive = [weakref.ref(layer) for layer in layers]
    del model, layers
    gc.collect()
    assert [layer() for layer in alive] == [None, None, None]


def _with_a_layer_that_stays(model):
    model.model.layers[-1].mlp.register_forward_hook(lambda *_: None)


def _with_a_hook_that_knows_it(model):
    model.model.norm.register_forward_hook(lambda *_: model and None)


def _with_an_attribute_that_knows_it(model):
    model.model.norm.owner = model.forward


@pytest.mark.parametrize(
    "spoil", [_with_a_layer_that_stays, _with_a_hook_that_knows_it, _with_an_attribute_that_knows_it]
)
def test_a_model_that_ends_is_not_remembered(spoil):
    model, ids = model_of("llama"), prompts(1, 7)[0]
    spoil(model)
    for _ in range(2):
        generate(model, ids, **OPTIONS)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copied_model_finds_its_own_parts(copied):
    model, ids = model_of("llama"), prompts(1, 7)[0]
    text = generate(model, ids, **OPTIONS).sequences
    other = copied(model)
    assert torch.equal(generate(other, ids, **OPTIONS).sequences, text)
    assert vars(other)[attachment.KEPT].owner() is other and vars(model)[attachment.KEPT].owner() is model


@pytest.mark.parametrize("setting", ["eps", "scaling", "residual"])
def test_changed_numbers_are_used(setting):
    """Between generations; the layers are checked anew."""
    model, ids = model_of("granite" if setting == "residual" else "llama"), prompts(1, 7)[0]
    former = generate(model, ids, **OPTIONS).sequences
    for layer in model.model.layers:
        if setting == "eps":
            layer.input_layernorm.variance_epsilon = layer.post_attention_layernorm.variance_epsilon = 30.0
        elif setting == "scaling":
            layer.self_attn.scaling *= 9
        else:
            layer.residual_multiplier *= -3
    expected = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert not torch.equal(former, expected)
    assert torch.equal(generate(model, ids, **OPTIONS).sequences, expected)


def test_hooks_for_every_module_are_called(calls):
    model, ids = model_of("llama"), prompts(1, 7)[0]
    seen = Counter()
    hook = nn.modules.module.register_module_forward_hook(lambda part, *_: seen.update([type(part).__name__]))
    try:
        stats = generate(model, ids, **OPTIONS).stats
    finally:
        hook.remove()
    assert not calls and seen["LlamaMLP"] == 2 * stats.model_calls
