"""Ordinary calls of a model while pass_ext decodes with it: from other threads, in the middle of pass_ext's calls, or between
them.
"""

import threading
from functools import partial

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from support.generation import slots_for
from support.small_models import prompts, small_model

from pass_ext import NGram, PaSS, Tree, generate

IDS = torch.tensor([[5, 6, 7, 8, 9]])
OPTIONS = dict(max_new_tokens=6, eos_token_id=[])
TEXTS = dict(max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0, return_dict_in_generate=True)


def deep_method(model, layers=2):
    """Slots that add to the input of every layer, so that a leaked shift shows."""
    lookahead = slots_for(model, deep_layers=layers)
    with torch.no_grad():
        lookahead.deep.mul_(6)
    return PaSS(lookahead, tree=Tree.from_branching((3, 2)), rows=16, slots=2)


def in_another_thread(call):
    """Returns the call's result in another thread; raises its error here."""
    result = {}

    def run():
        try:
            result["value"] = call()
        except Exception as error:
            result["error"] = error

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    if "error" in result:
        raise result["error"]
    return result["value"]


def flattened(results):
    if isinstance(results, torch.Tensor):
        return [results]
    return [tensor for part in results or () for tensor in flattened(part)]


def ordinary_calls(model, probabilities=False):
    """Logits without a mask and with padding, texts with both kinds of cache, probabilities, gradients, in one list."""
    ids, mask = prompts(2, 12, padding=(0, 5))
    results = [model(ids).logits, model(ids, attention_mask=mask).logits]
    for more in ({}, {"cache_implementation": "static"}):
        text = model.generate(ids, attention_mask=mask, output_logits=True, disable_compile=True, **TEXTS, **more)
        results += [text.sequences, text.logits]
    if probabilities:
        results += [model(ids, attention_mask=mask, output_attentions=True).attentions]
    with torch.enable_grad():
        rows = model.get_input_embeddings()(ids).requires_grad_()
        results += [torch.autograd.grad(model(inputs_embeds=rows).logits.logsumexp(-1).sum(), rows)]
    return [tensor.clone() for tensor in flattened(results)]


def assert_same(got, want):
    assert len(got) == len(want)
    for mine, theirs in zip(got, want, strict=True):
        assert mine.shape == theirs.shape and torch.equal(mine, theirs)


class InTheMiddle:
    """Runs ``call`` once in the middle of a call of pass_ext: after the first layer of the second forward."""

    def __init__(self, model, call):
        self._thread, self._call, self._passes, self.results = threading.get_ident(), call, 0, []
        self._hook = model.get_decoder().layers[0].register_forward_hook(self._hooked)

    def _hooked(self, *_):
        if threading.get_ident() == self._thread:
            self._passes += 1
            if self._passes == 2:
                self.results.append(in_another_thread(self._call))

    def __enter__(self):
        return self.results

    def __exit__(self, *_):
        self._hook.remove()


@pytest.mark.parametrize(
    ("architecture", "attention"), [("llama", "eager"), ("llama", "sdpa"), ("mistral", "sdpa"), ("gemma2", "eager")]
)
def test_another_thread_calls_the_model(architecture, attention):
    """mistral has a sliding window, gemma2 two kinds of masks and a softcap."""
    model = small_model(architecture)
    model.set_attn_implementation(attention)
    calls = partial(ordinary_calls, model, probabilities=attention == "eager")
    want, wanted = calls(), generate(model, IDS, **OPTIONS).sequences
    with InTheMiddle(model, calls) as results:
        got = generate(model, IDS, deep_method(model), **OPTIONS)
    assert torch.equal(got.sequences, wanted)
    assert len(results) == 1, "the other thread has called"
    assert_same(results[0], want)
    assert_same(calls(), want)
    assert model.config._attn_implementation == attention


def test_a_streamer_calls_the_model():
    """In the same thread, between pass_ext's calls."""
    model = small_model("llama")
    want, results = ordinary_calls(model), []

    class Streamer:
        put = end = lambda *_: None

        def put_step(self, tokens, accepted):
            results.append(ordinary_calls(model))

    generate(model, IDS, deep_method(model), streamer=Streamer(), **OPTIONS)
    assert results
    for got in results:
        assert_same(got, want)


def test_generations_and_ordinary_calls_at_once():
    model = small_model("llama", num_hidden_layers=3)
    model.set_attn_implementation("sdpa")
    texts, ids = generate(model, IDS, **OPTIONS).sequences, prompts(2, 9)[0]
    want, stop, counts, wrong = model(ids).logits, threading.Event(), {"ordinary": 0, "ours": 0}, []

    def ordinary():
        while not stop.is_set() or not counts["ordinary"]:
            try:
                if not torch.equal(model(ids).logits, want):
                    wrong.append("other logits")
            except Exception as error:
                wrong.append(repr(error))
            counts["ordinary"] += 1

    def ours(method):
        for _ in range(6):
            try:
                if not torch.equal(generate(model, IDS, method, **OPTIONS).sequences, texts):
                    wrong.append(f"another text by {method}")
            except Exception as error:
                wrong.append(repr(error))
            counts["ours"] += 1

    others = [threading.Thread(target=ordinary) for _ in range(2)]
    generations = [threading.Thread(target=ours, args=(m,)) for m in (None, NGram(), deep_method(model, layers=3))]
    for thread in others + generations:
        thread.start()
    for thread in generations:
        thread.join(60)
    stop.set()
    for thread in others:
        thread.join(60)
    assert wrong == [] and counts["ours"] == 18 and counts["ordinary"] > 5
    assert model.config._attn_implementation == "sdpa"


def test_attention_that_reads_its_name_in_the_config(monkeypatch):
    """transformers' flash attention does so. An attention without a mask function gets no mask."""
    names, masks = [], []

    def flash(module, query, key, value, attention_mask, **options):
        names.append(module.config._attn_implementation)
        masks.append(attention_mask)
        return transformers.AttentionInterface()["sdpa"](module, query, key, value, None, **options)

    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "flash_of_a_test", flash)
    model = small_model("llama")
    model.config._attn_implementation = (
        "flash_of_a_test"  # not by set_attn_implementation, which searches for a package
    )
    want = model(IDS).logits
    with InTheMiddle(model, lambda: model(IDS).logits) as results:
        generate(model, IDS, **OPTIONS)
    assert torch.equal(results[0], want)
    assert names == ["flash_of_a_test"] * 4 and masks == [None] * 4


def test_parts_that_name_another_attention_keep_it():
    """A config inside the model's config, with another attention, meanwhile too."""
    config = transformers.AutoConfig.for_model(
        "gemma3",
        text_config=dict(
            vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, head_dim=16,
        ),
        vision_config=dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28),
    )  # fmt: skip
    names = {"": "sdpa", "text_config": "eager", "vision_config": "sdpa"}
    config._attn_implementation = names
    model = transformers.Gemma3ForConditionalGeneration._from_config(config).eval()
    model.set_attn_implementation(names)

    def named():
        parts = (model.config, model.config.text_config, model.config.vision_config)
        return [part._attn_implementation for part in parts]

    before = named()
    assert before == ["sdpa", "eager", "sdpa"]
    seen = []

    class Streamer:
        put = end = lambda *_: None

        def put_step(self, tokens, accepted):
            seen.append(named())

    generate(model, IDS % 97, streamer=Streamer(), **OPTIONS)
    assert seen and all(names == before for names in seen) and named() == before


def test_models_that_share_a_config():
    """The generation that ends first leaves the other's attention in place."""
    first = small_model("llama")
    second = type(first)(first.config).eval().requires_grad_(False)
    second.load_state_dict(first.state_dict())
    want = generate(first, IDS, **OPTIONS).sequences
    got, begun, ended = {}, threading.Event(), threading.Event()

    class Waits:
        put = end = lambda *_: None

        def put_step(self, tokens, accepted):
            begun.set()
            assert ended.wait(20)

    def run():
        got["second"] = generate(second, IDS, streamer=Waits(), **OPTIONS).sequences

    class Begins:
        put = end = lambda *_: None

        def put_step(self, tokens, accepted):
            if not thread.ident:
                thread.start()
                assert begun.wait(20)

    thread = threading.Thread(target=run)
    before = first.config._attn_implementation
    got["first"] = generate(first, IDS, streamer=Begins(), **OPTIONS).sequences
    ended.set()
    thread.join(60)
    assert torch.equal(got["first"], want) and torch.equal(got["second"], want)
    assert first.config._attn_implementation == before
