"""layer_stack inside a generation: models whose layers, or whole calls, become one op, with the bits that they had; and models
whose calls must stay as they are.
"""

import functools
import pickle
import sys
import weakref
from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from support.generation import slots_for
from support.small_models import ARCHITECTURES, prompts
from transformers import AutoConfig, AutoModelForCausalLM

from pass_ext import NGram, PaSS, Session, Tree, generate
from pass_ext.decoding.models import fused_forward
from pass_ext.decoding.models.any_model import packed_model
from pass_ext.decoding.models.transformers import TransformersModel
from pass_ext.modules.slot_adapters import SlotAdapters
from pass_ext.testing import assert_same_bits
from pass_ext.training.lookahead.adapters import adapter_sizes

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS = dict(max_new_tokens=10, eos_token_id=[])
WIDE = dict(head_dim=64, hidden_size=64, num_attention_heads=2, num_key_value_heads=1)
MORE = dict.fromkeys(("granite", "olmo2", "smollm3"), ARCHITECTURES["llama"]) | {"gemma3_text": ARCHITECTURES["gemma"]}
PHI3 = dict(hidden_size=128, num_attention_heads=2, num_key_value_heads=1)  # its heads are as wide as its rows allow
WHOLE = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "phi3", "granite", "olmo2", "smollm3")


def model_of(architecture, dtype=torch.float32, **changes):
    torch.manual_seed(0)
    changes = (PHI3 if architecture == "phi3" else WIDE) | changes
    if architecture == "gemma3_text":  # rotary embeddings of both kinds
        changes = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=6) | changes
    if architecture in ("qwen2", "granite", "olmo2"):  # the size of their heads is no setting
        changes = PHI3 | {key: value for key, value in changes.items() if key not in WIDE}
    config = AutoConfig.for_model(architecture, **(MORE | ARCHITECTURES)[architecture] | changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().to(dtype).requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator).to(dtype)
        parameter.add_(noise * 0.1) if parameter.dim() == 1 else parameter.mul_(3)
    return model


@pytest.fixture
def calls(monkeypatch):
    """Counts the op's calls, and those that end with the output layer."""
    counts, op = Counter(), fused_forward._stack
    names = [argument.name for argument in op._schema.arguments]

    def counted(*arguments):
        named = dict(zip(names, arguments, strict=True))
        counts.update(["layers" if named["head"] is None else "whole"])
        if named["adapters"]:
            counts.update(["adapters"])
        return op(*arguments)

    monkeypatch.setattr(fused_forward, "_stack", counted)
    return counts


@contextmanager
def without_stack(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(fused_forward.FusedForward, "takes", lambda *_: False)
        yield


def generated(model, ids, *arguments, **options):
    """The result, and clones of all logits."""
    logits, called = [], TransformersModel.__call__

    def noted(self, *inputs, **named):
        out = called(self, *inputs, **named)
        logits.append(out.clone())
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransformersModel, "__call__", noted)
        result = generate(model, ids, *arguments, **OPTIONS | options)
    return result, logits


def assert_same_calls(ours, theirs):
    assert torch.equal(ours[0].sequences, theirs[0].sequences)
    assert len(ours[1]) == len(theirs[1])
    for mine, other in zip(ours[1], theirs[1], strict=True):
        assert_same_bits(mine, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", WHOLE)
def test_one_call_gives_the_logits_of_many(architecture, dtype, calls, monkeypatch):
    model, ids = model_of(architecture, dtype), prompts(1, 7)[0]
    slots = slots_for(model, deep_layers=model.config.num_hidden_layers)
    with torch.no_grad():
        slots.deep.mul_(6)
    method = PaSS(slots, tree=Tree.from_branching((2, 2)), rows=12, slots=2)
    for arguments in ((), (NGram(),), (method,)):
        with without_stack(monkeypatch):
            expected = generated(model, ids, *arguments)
        calls.clear()
        ours = generated(model, ids, *arguments)
        assert_same_calls(ours, expected)
        assert ours[0].stats.backend == "fused"
        assert calls["whole"] == ours[0].stats.model_calls, calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", ["llama", "phi3", "olmo2", "gemma2", "gemma3_text", "granite"])
@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
def test_one_call_computes_adapters(architecture, dtype, each, calls, monkeypatch):
    """With the bits of the layers module by module; where parts are joined (phi3), or a number scales the product (granite),
    the layers stay apart."""
    changes = dict(residual_multiplier=0.5) if architecture == "granite" else {}
    model, ids = model_of(architecture, dtype, **changes), prompts(1, 7)[0]
    adapters = SlotAdapters(adapter_sizes(model, 3), 2 if each else 1, scale=0.5)
    slots = slots_for(model, 2, adapters=adapters, deep_layers=model.config.num_hidden_layers)
    method = PaSS(slots, tree=Tree.from_branching((2, 2)), rows=12, slots=2)
    with without_stack(monkeypatch):
        expected = generated(model, ids, method)
    ours = generated(model, ids, method)
    assert_same_calls(ours, expected)
    assert torch.equal(ours[0].sequences, generate(model, ids, **OPTIONS).sequences)
    wanted = 0 if architecture in ("phi3", "granite") else ours[0].stats.model_calls - 3
    assert calls["adapters"] >= wanted and bool(wanted) == bool(calls["adapters"]), calls


def test_adapters_of_some_layers_keep_the_layers_apart(calls, monkeypatch):
    model, ids = model_of("llama"), prompts(1, 7)[0]
    sizes = adapter_sizes(model, {"q": 3, "down": 2})
    for places in (["0.self_attn.q_proj"], ["0.self_attn.q_proj", "1.mlp.down_proj"]):
        adapters = SlotAdapters({place: sizes[place] for place in places})
        method = PaSS(slots_for(model, adapters=adapters), tree=Tree.from_branching((2, 2)), rows=12, slots=2)
        with without_stack(monkeypatch):
            expected = generated(model, ids, method)
        calls.clear()
        assert_same_calls(generated(model, ids, method), expected)
        assert not calls["adapters"]


def test_adapters_that_are_not_contiguous(calls):
    model, ids = model_of("llama"), prompts(1, 7)[0]
    adapters = SlotAdapters(adapter_sizes(model, 3))
    method = PaSS(slots_for(model, adapters=adapters), tree=Tree.from_branching((2, 2)), rows=12, slots=2)
    expected = generated(model, ids, method)
    for sides in (adapters.down, adapters.up):
        for name, side in sides.items():
            sides[name] = torch.nn.Parameter(side.detach().mT.contiguous().mT)
    assert not any(down.is_contiguous() or up.is_contiguous() for _, down, up in adapters.pairs())
    assert_same_calls(generated(model, ids, method), expected)
    assert calls["adapters"]


def test_adapters_that_a_used_session_takes_over(calls):
    """The list of tensors that the op gets is kept: new numbers must reach it."""
    model, ids = model_of("llama"), prompts(1, 7)[0]

    def method_of(seed):
        slots = slots_for(model, adapters=SlotAdapters(adapter_sizes(model, 3)), seed=seed)
        return PaSS(slots, tree=Tree.from_branching((2, 2)), rows=12, slots=2)

    expected = [generated(model, ids, method_of(seed))[1] for seed in (1, 2)]
    assert not torch.equal(expected[0][2], expected[1][2])
    with packed_model(model).attached():
        session = Session(model)
        generate(model, ids, method_of(1), session=session, **OPTIONS)
        got = generated(model, ids, method_of(2), session=session)[1]
    assert calls["adapters"]
    for mine, other in zip(got[1:], expected[1][1:], strict=True):
        assert_same_bits(mine, other)


def test_batches_of_ragged_prompts(calls, monkeypatch):
    model, ids = model_of("llama"), prompts(3, 7)[0]
    options = OPTIONS | dict(attention_mask=torch.ones_like(ids))
    options["attention_mask"][1, :4] = 0
    with without_stack(monkeypatch):
        expected = generate(model, ids, NGram(), **options).sequences
    assert torch.equal(generate(model, ids, NGram(), **options).sequences, expected)
    assert calls["whole"]


@pytest.mark.parametrize("rope", [dict(rope_type="dynamic", factor=2.0), dict(rope_type="linear", factor=2.0)], ids=str)
def test_scaled_rotary_embeddings(rope, calls, monkeypatch):
    """Frequencies that depend on the text's length are computed for each call."""
    model, ids = (
        model_of("llama", rope_parameters=rope | dict(rope_theta=1e4), max_position_embeddings=64),
        prompts(1, 7)[0],
    )
    with without_stack(monkeypatch):
        expected = generated(model, ids)
    assert_same_calls(generated(model, ids), expected)
    assert calls["whole"]


KINDS = ("sliding_attention", "full_attention", "sliding_attention", "full_attention")
PLAIN, GROWING = dict(rope_type="default", rope_theta=1e4), dict(rope_type="dynamic", rope_theta=1e4, factor=2.0)


@pytest.mark.parametrize(
    ("full", "sliding", "has_table"), [(PLAIN, PLAIN | dict(rope_theta=5e3), True), (GROWING, PLAIN, False)], ids=str
)
def test_layers_with_rotary_embeddings_of_their_own(full, sliding, has_table, calls, monkeypatch):
    """gemma3's. Kinds come in another order than that of their names; frequencies that grow with the text, in layers of one
    kind, are computed for each call."""

    def model():
        ropes = dict(full_attention=full, sliding_attention=sliding)
        return model_of(
            "gemma3_text",
            num_hidden_layers=4,
            layer_types=list(KINDS),
            rope_parameters=ropes,
            max_position_embeddings=64,
        )

    ids, options = prompts(1, 7)[0], dict(max_new_tokens=30)
    with without_stack(monkeypatch):
        expected = generated(model(), ids, **options)
    ours = model()
    rotated = []
    former = type(ours.model.rotary_emb).forward
    counting = functools.wraps(former)(lambda *inputs: rotated.append(inputs[2]) or former(*inputs))
    monkeypatch.setattr(type(ours.model.rotary_emb), "forward", counting)
    got = generated(ours, ids, **options)
    assert_same_calls(got, expected)
    count = got[0].stats.model_calls
    assert calls["whole"] >= count - 3
    assert (len(rotated) < count) == has_table, len(rotated)
    changed, other = (model() for _ in range(2))
    for each in (changed, other):
        each.model.rotary_emb.full_attention_inv_freq.mul_(3)
    with without_stack(monkeypatch):
        expected = generated(other, ids, NGram())
    assert_same_calls(generated(changed, ids, NGram()), expected)


def test_a_model_that_moves_its_positions_is_called(calls, monkeypatch):
    model, ids = model_of("llama"), prompts(1, 7)[0]
    kind = type("Moved", (type(model.model),), {})

    def forward(self, *inputs, position_ids, **named):
        return super(kind, self).forward(*inputs, position_ids=2 * position_ids, **named)

    kind.forward = forward
    model.model.__class__ = kind
    with without_stack(monkeypatch):
        expected = generated(model, ids)
    assert_same_calls(generated(model, ids), expected)
    assert generated(model, ids)[0].stats.backend.startswith(
        "module: our ops give other keys in layer 0, at position 0"
    )


def test_a_model_that_adds_something_is_called(calls):
    """After its norm, between its layers, or to its logits."""
    ids = prompts(1, 7)[0]
    for place in ("model.norm", "lm_head", "model.layers.0", "model"):
        model = model_of("llama")
        part = model.get_submodule(place)
        kind = type(part)

        def forward(self, *inputs, kind=kind, **named):
            out = kind.forward(self, *inputs, **named)
            if isinstance(out, torch.Tensor):
                return out * 1.5
            out.last_hidden_state = out.last_hidden_state * 1.5
            return out

        part.__class__ = type(kind.__name__, (kind,), {"forward": forward})
        expected = model.generate(ids, max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0)
        result = generate(model, ids, **OPTIONS)
        assert torch.equal(result.sequences, expected), place
        reason = "keys in layer 1" if place == "model.layers.0" else "logits"
        assert result.stats.backend.startswith(f"module: our ops give other {reason}") or place in (
            "model.norm",
            "lm_head",
        )


@pytest.mark.parametrize("place", ["", "model", "model.norm", "lm_head", "model.rotary_emb", "model.layers.1"])
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_hooks_are_called(place, when, calls):
    model, ids, seen = model_of("llama"), prompts(1, 7)[0], []
    part = model.get_submodule(place)

    class Streamer:
        put = end = lambda *_: None
        steps = 0

        def put_step(self, tokens, accepted):
            self.steps += 1
            if self.steps == 5 and when == "meanwhile":
                part.register_forward_hook(lambda *_: seen.append(1))

    if when == "before":
        part.register_forward_hook(lambda *_: seen.append(1))
    stats = generate(model, ids, streamer=Streamer(), **OPTIONS).stats
    missed = 0 if when == "before" else 5
    # A table of the rotary embedding may be made once more.
    assert stats.model_calls - missed <= len(seen) <= stats.model_calls - missed + 1


@pytest.mark.parametrize("after", [False, True], ids=["parameter", "data"])
@pytest.mark.parametrize("place", ["model.norm", "lm_head", "model.layers.1.mlp.up_proj"])
def test_weights_replaced_meanwhile_are_used(place, after, calls, monkeypatch):
    """Another parameter, or other data after the same one."""
    ids = prompts(1, 7)[0]

    def text():
        model = model_of("llama")

        class Streamer:
            put = end = lambda *_: None
            steps = 0

            def put_step(self, tokens, accepted):
                self.steps += 1
                if self.steps == 5:
                    part = model.get_submodule(place)
                    if after:
                        part.weight.data = -part.weight.flip(0)
                    else:
                        part.weight = nn.Parameter(-part.weight.flip(0), requires_grad=False)

        return generate(model, ids, streamer=Streamer(), **OPTIONS).sequences

    with without_stack(monkeypatch):
        expected = text()
    calls.clear()
    assert torch.equal(text(), expected)
    assert calls["whole"] >= (7 if after else 1)


def test_calls_pass_one_key_for_all_weights(monkeypatch):
    """Packed once in a generation, and let go of after it: the model may go to a GPU, and its weights end."""
    model, ids = model_of("llama"), prompts(1, 7)[0]
    expected = generate(model, ids, **OPTIONS).sequences
    lengths, packs, op, pack = [], [], fused_forward._stack, fused_forward.PackedLayers
    monkeypatch.setattr(fused_forward, "_stack", lambda *given: lengths.append(len(given[2])) or op(*given))

    def packed(*arguments):
        made = pack(*arguments)
        packs.append(weakref.ref(made))
        return made

    monkeypatch.setattr(fused_forward, "PackedLayers", packed)
    result = generate(model, ids, **OPTIONS)
    assert torch.equal(result.sequences, expected)
    assert lengths == [1] * result.stats.model_calls
    assert [each() for each in packs] == [None]
    assert torch.equal(generate(pickle.loads(pickle.dumps(model)), ids, **OPTIONS).sequences, expected)


def test_a_call_that_fails_raises_its_error(monkeypatch):
    """And the next generation is as ever."""
    model, ids = model_of("llama"), prompts(1, 7)[0]
    expected = generate(model, ids, **OPTIONS).sequences
    op = fused_forward._stack

    def failing(*arguments):
        raise RuntimeError("pass_ext::layer_stack: out of memory")

    monkeypatch.setattr(fused_forward, "_stack", failing)
    with pytest.raises(Exception, match="out of memory"):
        generate(model, ids, **OPTIONS)
    monkeypatch.setattr(fused_forward, "_stack", op)
    assert torch.equal(generate(model, ids, **OPTIONS).sequences, expected)


def test_a_second_generation_begins_with_one_call(calls, monkeypatch):
    """What the first one's calls have shown is kept."""
    model, ids = model_of("llama"), prompts(1, 7)[0]
    with without_stack(monkeypatch):
        expected = generated(model, ids)
    generated(model, ids)
    calls.clear()
    again = generated(model, ids)
    assert_same_calls(again, expected)
    assert calls == {"whole": again[0].stats.model_calls}


def _other_rotation(model, monkeypatch):
    file = sys.modules[type(model).__module__]
    rotated = file.apply_rotary_pos_emb
    monkeypatch.setattr(file, "apply_rotary_pos_emb", lambda q, k, *rest: rotated(2 * q, k, *rest))


def _other_class(model, monkeypatch):
    class Shifted(type(model.model.norm)):
        def forward(self, rows):
            return super().forward(rows) + 0.5

    model.model.norm.__class__ = Shifted


def _other_numbers(model, _):
    """After the same parameter."""
    model.lm_head.weight.data = -model.lm_head.weight


CHANGES = dict(
    data=_other_numbers,
    window=lambda model, _: setattr(model.config, "sliding_window", 2),
    frequencies=lambda model, _: model.model.rotary_emb.inv_freq.mul_(3),
    eps=lambda model, _: setattr(model.model.norm, "variance_epsilon", 7.0),
    weight=lambda model, _: setattr(model.lm_head, "weight", nn.Parameter(-model.lm_head.weight, requires_grad=False)),
    rotation=_other_rotation,
    norm=_other_class,
    scale=lambda model, _: setattr(model.model.layers[1].self_attn, "scaling", 0.9),
    layer_eps=lambda model, _: setattr(model.model.layers[0].input_layernorm, "variance_epsilon", 30.0),
    residual=lambda model, _: setattr(model.model.layers[0], "residual_multiplier", -3.0),
)


@pytest.mark.parametrize("change", CHANGES)
def test_changes_between_generations_are_used(change, calls, monkeypatch):
    ids = prompts(1, 7)[0]
    architecture = ("granite", {}) if change == "residual" else ("mistral", dict(sliding_window=64))
    model, other = (model_of(architecture[0], **architecture[1]) for _ in range(2))
    former = generated(model, ids)
    CHANGES[change](model, monkeypatch)
    if change != "rotation":
        CHANGES[change](other, monkeypatch)
    assert calls["whole"]
    ours, expected = generated(model, ids), generated(other, ids)
    assert_same_calls(ours, expected)
    assert not torch.equal(ours[1][-1], former[1][-1])


def test_an_undisturbed_generation_looks_for_changes_once(calls, monkeypatch):
    """With a streamer, whose code may change the model, in each call."""
    model, ids = model_of("llama"), prompts(1, 7)[0]
    generated(model, ids)
    looked, look = [], fused_forward.FusedForward.is_current
    monkeypatch.setattr(fused_forward.FusedForward, "is_current", lambda self: looked.append(1) or look(self))
    stats = generated(model, ids)[0].stats
    assert len(looked) == 1 < stats.model_calls

    class Streamer:
        put = end = lambda *_: None

    stats = generated(model, ids, streamer=Streamer())[0].stats
    assert len(looked) == 1 + stats.model_calls


def test_a_used_session_looks_for_changes_again(calls):
    model, ids = model_of("llama"), prompts(1, 7)[0]
    with packed_model(model).attached():  # so that the parts in place stay the same
        session = Session(model)
        generate(model, ids, session=session, **OPTIONS)
        model.lm_head.weight = nn.Parameter(-model.lm_head.weight, requires_grad=False)
        ours = generated(model, ids, session=session)
    other = model_of("llama")
    other.lm_head.weight = nn.Parameter(-other.lm_head.weight, requires_grad=False)
    expected = generated(other, ids)
    assert torch.equal(ours[0].sequences, expected[0].sequences)
    torch.testing.assert_close(ours[1], expected[1])  # replaced weights are multiplied by torch


def test_layers_alone_are_one_call_without_norm_and_head(calls, monkeypatch):
    """If the final norm is no module that the op knows."""
    model, ids = model_of("llama"), prompts(1, 7)[0]
    _other_class(model, monkeypatch)
    with without_stack(monkeypatch):
        expected = generated(model, ids)
    calls.clear()
    ours = generated(model, ids)
    assert_same_calls(ours, expected)
    assert ours[0].stats.backend == "fused" and calls == {"layers": ours[0].stats.model_calls}


def test_many_rows_are_called_by_the_model(calls, monkeypatch):
    model, ids = model_of("llama"), prompts(1, 80)[0]
    with without_stack(monkeypatch):
        expected = generated(model, ids)
    assert_same_calls(generated(model, ids), expected)
    assert calls["whole"]
