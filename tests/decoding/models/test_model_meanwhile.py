"""A model during and after generations that are nested, in threads, or continue a session."""

import copy
import pickle
import threading

import pytest
import torch

pytest.importorskip("transformers")

from support.generation import slots_for
from support.small_models import prompts, small_model

from benchmarks.architectures.models import tiny_model
from pass_ext import NGram, PaSS, Session, Tree, generate
from pass_ext.decoding.models.any_model import packed_model
from pass_ext.decoding.models.slots import PlacedSlots
from pass_ext.modules.slot_adapters import SlotAdapters
from pass_ext.training.lookahead.adapters import adapter_sizes

IDS = torch.tensor([[5, 6, 7, 8, 9]])
OPTIONS = dict(max_new_tokens=8, eos_token_id=[])


@pytest.fixture
def deep(llama):
    """Slots whose logits depend on the vectors that they add to the layers' inputs."""
    lookahead = slots_for(llama, deep_layers=2)
    with torch.no_grad():
        lookahead.deep.mul_(6)
    return PaSS(lookahead, tree=Tree.from_branching((8, 4)), rows=64, slots=2)


class During:
    """A streamer that calls something at each step."""

    def __init__(self, call):
        self._call = call

    def put(self, tokens):
        pass

    def put_step(self, tokens, accepted):
        self._call()

    def end(self):
        pass


def test_deep_slots_shift_layers_with_a_used_session_too(llama, deep, monkeypatch):
    generate(llama, IDS, deep, **OPTIONS)  # a layer's first call adds by torch
    shifted = []
    embed = torch.Tensor.__add__  # every shift is a sum; the model's own are counted alike in both runs
    monkeypatch.setattr(torch.Tensor, "__add__", lambda a, b: shifted.append(1) or embed(a, b))
    session = Session(llama)
    first = generate(llama, IDS, deep, session=session, **OPTIONS)
    sums = len(shifted)
    again = generate(llama, IDS, deep, session=session, **OPTIONS)
    assert torch.equal(again.sequences, first.sequences)
    assert len(shifted) == 2 * sums
    assert again.stats.acceptance_histogram == first.stats.acceptance_histogram


def test_layers_get_the_vectors_of_deep_slots(llama, deep):
    inputs_seen = []
    taps = [
        llama.model.register_forward_pre_hook(
            lambda _, __, named: inputs_seen.append(named["inputs_embeds"]), with_kwargs=True
        ),
        llama.model.layers[0].input_layernorm.register_forward_pre_hook(
            lambda _, inputs: inputs_seen.append(inputs[0])
        ),
    ]
    try:
        generate(llama, IDS, deep, **OPTIONS)
    finally:
        for tap in taps:
            tap.remove()
    added = torch.cat(
        [(layer - embedded)[0] for embedded, layer in zip(inputs_seen[0::2], inputs_seen[1::2], strict=True)]
    )
    added = added[added.abs().amax(1) > 0]
    slots = deep.lookahead.deep[0]
    assert len(added) > 0
    assert (
        (added[:, None] - slots).abs().amax(2).amin(1) < 1e-5
    ).all()  # each row is shifted by the vector of one slot


def test_offsets_for_a_model_that_is_not_attached(llama):
    adapted = packed_model(llama)
    with pytest.raises(RuntimeError, match="LlamaForCausalLM is not attached"):
        slots = PlacedSlots(torch.zeros(1, 64), torch.zeros(2, 1, 64)).of_call(torch.tensor([-1]))
        adapted(torch.zeros(1, 64), torch.zeros(1).long(), None, None, slots)


class InOrder(torch.nn.Module):
    """A layer that finds its modules in a plain list, where torch does not look for them."""

    def __init__(self, layer, kind):
        super().__init__()
        self.layer, self._order = layer, kind([layer])
        self.self_attn = layer.self_attn

    def forward(self, hidden, **named):
        return self._order[0](hidden, **named)


@pytest.mark.parametrize("kind", (list, tuple))
def test_a_list_of_modules_holds_those_of_the_shadow(llama, kind):
    want = [generate(llama, ids, **OPTIONS).sequences for ids in (IDS, IDS.flip(1))]
    llama.model.layers = torch.nn.ModuleList(InOrder(layer, kind) for layer in llama.model.layers)
    with torch.no_grad():
        logits = llama(IDS, use_cache=False).logits
    assert torch.equal(logits[:, -1].argmax(-1), want[0][:, IDS.shape[1]])  # the same model still
    for ids, sequences in zip((IDS, IDS.flip(1)), want, strict=True):
        assert torch.equal(generate(llama, ids, NGram(shortest=1), **OPTIONS).sequences, sequences)


def test_a_generation_inside_of_one_with_deep_slots(llama, deep):
    want = generate(llama, IDS, **OPTIONS)
    wanted = generate(llama, IDS, deep, **OPTIONS).stats
    inside = []
    for method in (None, deep):
        streamer = During(lambda method=method: inside.append(generate(llama, IDS, method, **OPTIONS)))
        outer = generate(llama, IDS, deep, streamer=streamer, **OPTIONS)
        assert torch.equal(outer.sequences, want.sequences)
        assert outer.stats.acceptance_histogram == wanted.acceptance_histogram
    assert all(torch.equal(got.sequences, want.sequences) for got in inside)
    assert inside[-1].stats.acceptance_histogram == wanted.acceptance_histogram


def test_the_first_of_two_threads_ends_first(llama, deep):
    """The second generation begins during the first and ends after it; then the model is as it was before both."""
    want = generate(llama, IDS, **OPTIONS).sequences
    before = llama.config._attn_implementation
    second_runs, first_ended, got = threading.Event(), threading.Event(), {}

    def second():
        def wait():
            second_runs.set()
            assert first_ended.wait(10)

        got["second"] = generate(llama, IDS, NGram(), streamer=During(wait), **OPTIONS).sequences

    other = threading.Thread(target=second)

    def begin():
        if not other.ident:
            other.start()
            assert second_runs.wait(10)

    got["first"] = generate(llama, IDS, deep, streamer=During(begin), **OPTIONS).sequences
    first_ended.set()
    other.join(10)
    assert torch.equal(got["first"], want) and torch.equal(got["second"], want)
    assert llama.config._attn_implementation == before
    assert not any("forward" in vars(part) or part._forward_pre_hooks for part in llama.modules())
    llama(IDS)


@pytest.mark.parametrize("places", ["all", "some", "none"])
def test_a_longer_text_with_other_slots_meanwhile(places):
    """In another thread, between the steps of the first; adapters of some layers alone are another way through the layers."""
    llama = small_model("llama", head_dim=64)  # heads that the kernels take as they are
    tree = Tree.from_branching((8, 4))

    def method(seed):
        if places == "none":
            slots = slots_for(llama, seed=seed)
        else:
            sizes = adapter_sizes(llama, 4)
            sizes = {place: size for place, size in sizes.items() if places == "all" or place.startswith("0.")}
            adapters = SlotAdapters(sizes)
            slots = slots_for(llama, adapters=adapters)
            for number, parameter in enumerate(adapters.parameters()):
                torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(100 * seed + number))
        return PaSS(slots, tree=tree, rows=64, slots=2)

    one, other, options = method(1), method(2), dict(max_new_tokens=40, eos_token_id=[])
    long = torch.cat([prompts(1, 1050)[0], IDS], 1)
    alone = [generate(llama, IDS, one, **options), generate(llama, long, other, **options)]
    assert alone[0].stats.acceptance_histogram != generate(llama, IDS, other, **options).stats.acceptance_histogram
    inside = []

    def begin():
        if not inside:
            thread = threading.Thread(target=lambda: inside.append(generate(llama, long, other, **options)))
            thread.start()
            thread.join(60)

    outer = generate(llama, IDS, one, streamer=During(begin), **options)
    for got, want in zip((outer, *inside), alone, strict=True):
        assert torch.equal(got.sequences, want.sequences)
        assert got.stats.acceptance_histogram == want.stats.acceptance_histogram


def of_pass_ext(model):
    """What a model has of pass_ext's in its parts."""
    found = {name for part in model.modules() for name in vars(part) if name == "forward" or "pass_ext" in name}
    hooks = [
        hook for part in model.modules() for hook in (*part._forward_hooks.values(), *part._forward_pre_hooks.values())
    ]
    return (
        found | set(hooks) | {part.config._attn_implementation for part in model.modules() if hasattr(part, "config")}
    )


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "other thread"])
def test_a_copy_made_meanwhile_has_none_of_our_parts(deep, way):
    """It computes with its own weights, and gradients reach all of them."""
    copies, model = [], small_model("llama")
    sizes = adapter_sizes(model, 2)
    adapted = PaSS(slots_for(model, adapters=SlotAdapters(sizes), deep_layers=2), tree=Tree.chain(3), rows=12)

    def take():
        made = pickle.loads(pickle.dumps(model)) if way == "pickle" else copy.deepcopy(model)
        copies.append(made.requires_grad_(True))

    def during():
        if way == "other thread":
            thread = threading.Thread(target=take)
            thread.start()
            thread.join(30)
        else:
            take()

    want = model(IDS).logits
    generate(model, IDS, adapted, streamer=During(during), max_new_tokens=4, eos_token_id=[])
    during()
    model.lm_head.weight.data.mul_(2)
    for made in copies:
        assert of_pass_ext(made) == {"eager"}
        logits = made(IDS).logits
        assert torch.equal(logits, want)
        logits.sum().backward()
        assert all(parameter.grad is not None for parameter in made.parameters())
        assert torch.equal(
            generate(made, IDS, **OPTIONS).sequences, generate(small_model("llama"), IDS, **OPTIONS).sequences
        )


def test_attention_that_the_caller_sets_meanwhile_stays():
    model = small_model("llama")
    want = generate(model, IDS, **OPTIONS).sequences
    streamer = During(lambda: model.set_attn_implementation("sdpa"))
    assert torch.equal(generate(model, IDS, streamer=streamer, **OPTIONS).sequences, want)
    assert {part.config._attn_implementation for part in model.modules() if hasattr(part, "config")} == {"sdpa"}
    assert torch.equal(generate(model, IDS, **OPTIONS).sequences, want)


def test_a_model_whose_parts_were_replaced_by_functions():
    """As patching libraries do it: a function around the former forward, of a layer or of the whole decoder."""
    for place in ("model", "model.layers.1", "model.layers.0.self_attn", "model.layers.1.mlp.up_proj"):
        model = small_model("llama")
        part, seen = model.get_submodule(place), []
        former = part.forward

        def forward(*inputs, former=former, seen=seen, **named):
            seen.append(1)
            out = former(*inputs, **named)
            return out * 2 if isinstance(out, torch.Tensor) else out

        part.forward = (
            forward if place.endswith("mlp") else lambda *inputs, forward=forward, **named: forward(*inputs, **named)
        )
        options = dict(attention_mask=torch.ones_like(IDS), max_new_tokens=8, do_sample=False, eos_token_id=None)
        want = model.generate(IDS, **options)
        seen.clear()
        assert torch.equal(generate(model, IDS, **OPTIONS).sequences, want), place
        assert seen, place


def test_parts_in_eval_mode_stay_so():
    model = small_model("llama").train()
    model.model.layers[0].eval()
    modes = [part.training for part in model.modules()]
    generate(model, IDS, max_new_tokens=1)
    assert [part.training for part in model.modules()] == modes and len(set(modes)) == 2


@pytest.mark.parametrize(
    ("name", "changes"),
    [("gpt2", dict(attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5)), ("llama", dict(attention_dropout=0.5))],
)
def test_nothing_is_dropped_from_a_model_in_training_mode(name, changes):
    model = tiny_model(name, **changes)
    want = generate(model, IDS, **OPTIONS).sequences
    model.train()
    for method in (None, NGram(shortest=1)):
        assert torch.equal(generate(model, IDS, method, **OPTIONS).sequences, want)
