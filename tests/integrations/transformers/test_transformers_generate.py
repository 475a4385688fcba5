"""model.generate(custom_generate=pass_ext.custom_generate(method)): transformers' own result, for the usual arguments."""

import threading

import pytest
import torch

transformers = pytest.importorskip("transformers")

from support.generation import BUSHY, Prophet, unpadded  # noqa: E402
from support.small_models import VOCABULARY, Tokens, ragged_prompts, small_model  # noqa: E402
from transformers import (  # noqa: E402
    DynamicCache,
    LogitsProcessor,
    StaticCache,
    StoppingCriteria,
)

import pass_ext  # noqa: E402
from pass_ext import NGram, PaSS, custom_generate  # noqa: E402

AT_LEAST_5 = int(transformers.__version__.split(".")[0]) >= 5
NEW = 20


class EvenAfterOdd(LogitsProcessor):
    """An even token after an odd one, for every second request: it depends on text and request."""

    def __call__(self, ids, scores):
        odd = (ids[:, -1] % 2 == 1) & (torch.arange(len(ids)) % 2 == 0)
        return scores.masked_fill(odd[:, None] & (torch.arange(scores.shape[1]) % 2 == 1), -torch.inf)


class ThreeMultiples(StoppingCriteria):
    """Ends a text whose last three tokens hold two multiples of three."""

    def __call__(self, ids, scores, **_):
        return (ids[:, -3:] % 3 == 0).sum(1) >= 2


OPTIONS = {
    "plain": {},
    "several ends": {"eos_token_id": [5, 6, 7, 8, 9, 10]},
    "no end": {"eos_token_id": None},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "min_new_tokens": {"min_new_tokens": 8, "eos_token_id": list(range(5, 30))},
    "max_length": {"max_new_tokens": None, "max_length": 31},
    "bad words": {"bad_words_ids": [[5], [9, 11], [30], [31], [32]]},
    "no repeats": {"no_repeat_ngram_size": 2},
    "forced end": {"forced_eos_token_id": 3, "eos_token_id": 3},
    "bias": {"sequence_bias": {(17,): 4.0, (40, 41): -3.0}},
    "suppressed": {"suppress_tokens": list(range(3, 40)), "begin_suppress_tokens": list(range(40, 70))},
    "renormalised": {"renormalize_logits": True},
    "penalty and ban": {"repetition_penalty": 1.5, "bad_words_ids": [[7], [8]], "min_new_tokens": 5},
    "prefixes": {"prefix_allowed_tokens_fn": lambda request, ids: [(int(ids[-1]) * 7 + k) % 97 for k in range(30)]},
    "a processor of the user": {"processor": EvenAfterOdd},
    "criterion": {"criterion": ThreeMultiples},
    "encoder penalty": {"encoder_repetition_penalty": 1.4},
}


def run(model, ids, mask, method=None, **options):
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": [5, 6], **options}
    if "processor" in options:
        options["logits_processor"] = [options.pop("processor")()]
    if "criterion" in options:
        options["stopping_criteria"] = [options.pop("criterion")()]
    if method is not None:
        options["custom_generate"] = method
    return model.generate(input_ids=ids, attention_mask=mask, **options)


@pytest.mark.parametrize("name", OPTIONS)
def test_greedy_is_that_of_transformers(llama, predicted, name, monkeypatch):
    ids, mask = ragged_prompts(6, longest=12, seed=3)
    expected = run(llama, ids, mask, **OPTIONS[name])
    ours = custom_generate(NGram(longest=2, shortest=1, branches=2))
    assert torch.equal(run(llama, ids, mask, ours, **OPTIONS[name]), expected)
    Prophet(monkeypatch, unpadded(expected, mask))
    ours = custom_generate(predicted)
    assert torch.equal(run(llama, ids, mask, ours, **OPTIONS[name]), expected)
    assert ours.stats.mean_acceptance_length > 1.4, "candidates were accepted under these processors"
    if name not in ("plain", "no end", "renormalised"):
        plain = run(llama, ids, mask)
        assert plain.shape != expected.shape or not torch.equal(plain, expected), "the option shows"


def test_stop_strings(llama, predicted, monkeypatch):
    from transformers.generation import StopStringCriteria

    ids, mask = ragged_prompts(1, longest=12, seed=4)
    text = run(llama, ids, mask, eos_token_id=None)[0, ids.shape[1] :].tolist()
    stop = "".join(chr(97 + token) for token in text[8:10])
    criteria = {"stopping_criteria": [StopStringCriteria(Tokens(), [stop])], "eos_token_id": None}
    expected = run(llama, ids, mask, **criteria)
    assert expected.shape[1] < ids.shape[1] + NEW
    Prophet(monkeypatch, [torch.cat([ids[mask.bool()], torch.tensor(text)]).tolist()])
    assert torch.equal(run(llama, ids, mask, custom_generate(predicted), **criteria), expected)


def test_time_is_up(llama):
    ids, mask = ragged_prompts(2, longest=12)
    assert run(llama, ids, mask, custom_generate(), max_time=0.0).shape[1] == ids.shape[1] + 1


@pytest.mark.parametrize("architecture", ["gpt_neox", "opt", "gemma2", "mistral"])
@pytest.mark.parametrize("cache", [None, "static"])
def test_other_architectures_and_caches(architecture, cache):
    model = small_model(architecture)
    ids, mask = ragged_prompts(4, longest=12)
    options = {"cache_implementation": cache, "repetition_penalty": 1.3}
    expected = run(model, ids, mask, **options)
    assert torch.equal(run(model, ids, mask, custom_generate(NGram(shortest=1)), **options), expected)


# ---- caches: a chat that goes on ----


@pytest.mark.parametrize("ragged", [False, True], ids=["one text", "left-padded"])
@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
def test_a_cache_goes_in_and_comes_back(llama, kind, ragged):
    """Three turns: transformers' cache to pass_ext, pass_ext's to transformers; each text equals the text without a cache."""
    if ragged and kind is StaticCache and not AT_LEAST_5:
        pytest.skip("transformers 4.57 counts columns that are not zeros, and this padding's are")
    ids, mask = ragged_prompts(3, longest=9, seed=2)
    if not ragged:
        ids, mask = torch.randint(3, VOCABULARY, (1, 9)), torch.ones(1, 9, dtype=torch.long)
    cache = StaticCache(config=llama.config, max_cache_len=60) if kind is StaticCache else DynamicCache()
    texts, seen = ids, mask
    calls = []
    for method in (None, custom_generate(NGram(shortest=1)), custom_generate(), None):
        expected = run(llama, texts, seen, eos_token_id=None, max_new_tokens=6)
        options = {"past_key_values": cache, "eos_token_id": None, "max_new_tokens": 6}
        got = run(llama, texts, seen, method, **options)
        assert torch.equal(got, expected)
        assert int(cache.get_seq_length()) == got.shape[1] - 1
        calls.append(getattr(method, "stats", None))
        new = torch.randint(3, VOCABULARY, (len(ids), 3))
        texts = torch.cat([got, new], 1)
        seen = torch.nn.functional.pad(seen, (0, texts.shape[1] - seen.shape[1]), value=1)
    assert all(stats is None or stats.model_calls <= 6 for stats in calls)


def test_the_padding_of_a_returned_cache_is_finite(llama):
    """After a text that ended early the session holds no keys, and its memory may hold anything."""
    ids, mask = ragged_prompts(4, longest=9, seed=2)
    free = run(llama, ids, mask, eos_token_id=None)
    end = free[0, ids.shape[1] + 2].item()
    cache = DynamicCache()
    got = run(llama, ids, mask, custom_generate(), past_key_values=cache, eos_token_id=end)
    assert torch.equal(got, run(llama, ids, mask, eos_token_id=end)) and (got[:, -1] == 0).any(), "one ended early"
    for layer in cache.layers:
        assert layer.keys.shape[2] == got.shape[1] - 1
        assert layer.keys.isfinite().all() and layer.values.isfinite().all()


@pytest.mark.parametrize("ragged", [False, True], ids=["one text", "left-padded"])
def test_a_cache_of_the_whole_prompt(llama, ragged):
    """The last token is read again: the first new one needs its row."""
    ids, mask = ragged_prompts(3, longest=9, seed=2)
    if not ragged:
        ids, mask = ids[-1:, -5:], torch.ones(1, 5, dtype=torch.long)
    cache = DynamicCache()
    with torch.no_grad():
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        llama(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True)
    assert int(cache.get_seq_length()) == ids.shape[1]
    expected = run(llama, ids, mask, eos_token_id=None)
    ours = custom_generate()
    assert torch.equal(run(llama, ids, mask, ours, past_key_values=cache, eos_token_id=None), expected)
    assert int(cache.get_seq_length()) == expected.shape[1] - 1 and ours.stats.model_calls == NEW


def test_a_taken_cache_is_not_computed_again(llama, monkeypatch):
    ids, mask = torch.randint(3, VOCABULARY, (1, 9)), torch.ones(1, 9, dtype=torch.long)
    cache = DynamicCache()
    first = run(llama, ids, mask, custom_generate(), past_key_values=cache, eos_token_id=None)
    rows = []
    monkeypatch.setattr(
        llama.model.norm, "forward", lambda x, f=llama.model.norm.forward: rows.append(x.shape[1]) or f(x)
    )
    texts = torch.cat([first, ids[:, :4]], 1)
    run(llama, texts, torch.ones_like(texts), custom_generate(), past_key_values=cache, eos_token_id=None)
    assert rows[0] == 5, "the last token of the first answer and the four new tokens"


def test_a_dictionary_with_the_cache(llama):
    ids, mask = ragged_prompts(2, longest=8)
    for options in ({}, {"use_cache": False}):
        expected = run(llama, ids, mask, return_dict_in_generate=True, **options)
        got = run(llama, ids, mask, custom_generate(), return_dict_in_generate=True, **options)
        assert type(got) is type(expected) and torch.equal(got.sequences, expected.sequences)
        assert (got.past_key_values is None) == (expected.past_key_values is None)
    full = run(llama, ids, mask, return_dict_in_generate=True, eos_token_id=None)
    ours = run(llama, ids, mask, custom_generate(), return_dict_in_generate=True, eos_token_id=None)
    seen = torch.nn.functional.pad(mask, (0, NEW - 1), value=1).bool()
    for mine, theirs in zip(ours.past_key_values.layers, full.past_key_values.layers, strict=True):
        for name in ("keys", "values"):
            a, b = (getattr(layer, name).transpose(1, 2) for layer in (mine, theirs))
            torch.testing.assert_close(a[seen], b[seen], atol=3e-5, rtol=1e-5)


# ---- sampling ----


def test_sampled_text_is_a_function_of_the_seed(llama, predicted):
    ids, mask = ragged_prompts(2, longest=8)
    options = {"do_sample": True, "temperature": 0.9, "top_k": 30, "num_return_sequences": 3}
    texts = [
        run(llama, ids, mask, custom_generate(method, seeds=11), **options)
        for method in (None, predicted, NGram(shortest=1))
    ]
    assert torch.equal(texts[0], texts[1]) and torch.equal(texts[0], texts[2])
    assert len(set(map(tuple, texts[0].tolist()))) == 6, "copies of a prompt get different texts"
    again = run(llama, ids, mask, custom_generate(), seeds=[11, 12, 13, 11, 12, 13], **options)
    assert torch.equal(again, texts[0]), "seeds may come with the call"
    direct = pass_ext.generate(
        llama, ids, max_new_tokens=NEW, attention_mask=mask, temperature=0.9, top_k=30, seeds=11, eos_token_id=[5, 6]
    )
    width = min(direct.sequences.shape[1], texts[0].shape[1])
    assert torch.equal(direct.sequences[:, :width], texts[0][::3, :width])
    torch.manual_seed(5)
    first = run(llama, ids, mask, custom_generate(), **options)
    torch.manual_seed(5)
    two = run(llama, ids, mask, custom_generate(predicted), **options)
    assert torch.equal(first, two) and not torch.equal(first, texts[0])


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7, "top_k": 4},
        {"top_p": 0.6, "top_k": 0},
        {"min_p": 0.2, "temperature": 1.3, "top_k": 6},
        {"typical_p": 0.7, "top_k": 5},
        {"epsilon_cutoff": 0.1, "repetition_penalty": 1.5, "top_k": 0},
    ],
    ids=str,
)
def test_the_distribution_of_sampled_tokens(options):
    """Two tokens of a vocabulary of 8, counted over seeds, against transformers' own processors on the model's logits."""
    model = small_model("llama", sharpness=1.5, vocab_size=8)
    prompt, count = torch.tensor([[3, 5, 6]]), 1500
    options = {"do_sample": True, "eos_token_id": None, "max_new_tokens": 2, **options}
    ones = torch.ones_like(prompt)
    method = custom_generate(PaSS(slots_for_vocabulary(model), tree=BUSHY, rows=24), seeds=0)
    got = run(model, prompt, ones, method, num_return_sequences=count, **options)[:, 3:]
    seen = torch.zeros(8, 8).index_put_((got[:, 0], got[:, 1]), torch.ones(count), accumulate=True) / count
    distribution = torch.zeros(8, 8)
    for token, p in enumerate(next_distribution(model, prompt, options)):
        if p > 0:
            distribution[token] = p * next_distribution(model, torch.cat([prompt, torch.tensor([[token]])], 1), options)
    assert (seen[distribution == 0] == 0).all(), "forbidden tokens never come"
    assert (distribution == 0).any(), "they forbid something"
    error = (distribution * (1 - distribution) / count).sqrt()
    assert ((seen - distribution).abs() <= 4.5 * error + 1e-9).all()


def slots_for_vocabulary(model):
    torch.manual_seed(0)
    return pass_ext.LookaheadEmbedding(4, model.get_input_embeddings().weight.shape[1], vocabulary=8)


@torch.no_grad()
def next_distribution(model, ids, options):
    config = transformers.GenerationConfig(**{key: value for key, value in options.items() if key != "max_new_tokens"})
    config._eos_token_tensor = None
    processors = model._get_logits_processor(
        generation_config=config, input_ids_seq_length=3, encoder_input_ids=ids, logits_processor=[]
    )
    return processors(ids, model(ids).logits[:, -1]).softmax(-1)[0]


def test_warpers_become_parameters_only_where_the_order_allows():
    from pass_ext.integrations.transformers.processors import sampling_parameters

    warm, few = transformers.TemperatureLogitsWarper(0.7), transformers.TopKLogitsWarper(5)
    nucleus, least = transformers.TopPLogitsWarper(0.9), transformers.MinPLogitsWarper(0.1)
    typical, ban = transformers.TypicalLogitsWarper(0.8), transformers.InfNanRemoveLogitsProcessor()
    parameters = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1}
    usual = [ban, warm, few, nucleus, least]
    assert sampling_parameters(usual, sample=True) == (parameters, [ban])
    assert sampling_parameters([*usual, transformers.LogitNormalization()], sample=True) == (parameters, [ban])
    assert sampling_parameters([warm, few, typical], sample=True) == ({"temperature": 1.0}, [warm, few, typical])
    assert sampling_parameters([warm, few, warm, nucleus], sample=True) == (
        {"temperature": 0.7, "top_p": 0.9},
        [warm, few],
    )
    assert sampling_parameters([few, few], sample=True) == ({"temperature": 1.0, "top_k": 5}, [few])
    wide = transformers.TopPLogitsWarper(0.9, min_tokens_to_keep=3)
    assert sampling_parameters([warm, wide], sample=True) == ({"temperature": 1.0}, [warm, wide])
    assert sampling_parameters([ban, warm, few], sample=False) == ({"temperature": 0.0}, [ban])


# ---- streaming, refusals ----


class Recorder:
    def __init__(self):
        self.tokens, self.ends = [], 0

    def put(self, tokens):
        self.tokens += tokens.flatten().tolist()

    def end(self):
        self.ends += 1


class Steps(Recorder):
    """Takes whole steps of pass_ext."""

    def put_step(self, tokens, accepted):
        self.tokens += tokens


@pytest.mark.parametrize("kind", [Recorder, Steps])
def test_a_streamer_gets_what_transformers_would_give_it(llama, kind):
    ids, mask = torch.randint(3, VOCABULARY, (1, 6)), torch.ones(1, 6, dtype=torch.long)
    theirs, ours = Recorder(), kind()
    text = run(llama, ids, mask, streamer=theirs)
    assert torch.equal(run(llama, ids, mask, custom_generate(NGram(shortest=1)), streamer=ours), text)
    assert ours.tokens == theirs.tokens == text[0].tolist() and ours.ends == theirs.ends == 1


class Letters:
    """Tokens written as letters."""

    def decode(self, tokens, **_):
        return "".join(chr(97 + token) for token in tokens)


def test_the_reader_of_a_streamer_sees_the_end(llama):
    """A thread writes, another one reads until end(): without that it would wait for ever."""
    ids, mask = torch.randint(3, VOCABULARY, (1, 6)), torch.ones(1, 6, dtype=torch.long)
    streamer = transformers.TextIteratorStreamer(Letters(), skip_prompt=True, timeout=60.0)
    options = {"streamer": streamer, "eos_token_id": None}
    writer = threading.Thread(target=run, args=(llama, ids, mask, custom_generate()), kwargs=options)
    writer.start()
    read = "".join(streamer)
    writer.join()
    expected = run(llama, ids, mask, eos_token_id=None)[0, 6:].tolist()
    assert read == Letters().decode(expected)


def test_a_streamer_does_not_end_after_an_error_like_that_of_transformers(llama):
    ids, mask = torch.randint(3, VOCABULARY, (1, 6)), torch.ones(1, 6, dtype=torch.long)

    class Fails(StoppingCriteria):
        def __call__(self, ids, scores, **_):
            raise RuntimeError("no more")

    recorders = []
    for method in (None, custom_generate()):
        recorders.append(Recorder())
        with pytest.raises(RuntimeError, match="no more"):
            run(llama, ids, mask, method, streamer=recorders[-1], stopping_criteria=[Fails()])
    assert [recorder.ends for recorder in recorders] == [0, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, "beam_search"),
        ({"prompt_lookup_num_tokens": 3}, r"prompt_lookup_num_tokens is not .*got 3; give .*NGram\(tokens"),
        ({"assistant_early_exit": 1}, "assistant_early_exit is not implemented, got 1; give .*EarlyExitDraft"),
        ({"assistant_model": "the model"}, r"assistant_model is not implemented, .*Speculative\(assistant_model"),
        ({"synced_gpus": True}, "synced_gpus must be False.*got True"),
        ({"negative_prompt_ids": torch.ones(1, 3)}, "negative_prompt_ids is not implemented, got Tensor"),
        ({"negative_prompt_attention_mask": torch.ones(1, 3)}, "negative_prompt_attention_mask is not implemented"),
        ({"guidance_scale": 1.5}, "guidance_scale"),
        ({"return_dict_in_generate": True, "output_attentions": True}, "output_attentions"),
        ({"return_dict_in_generate": True, "output_hidden_states": True}, "output_hidden_states"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_unsupported_options_are_refused_by_name(llama, options, message):
    ids = torch.randint(3, VOCABULARY, (1, 6))
    if "assistant_model" in options:
        options = {"assistant_model": llama}
    with pytest.raises(ValueError, match=message):
        run(llama, ids, torch.ones_like(ids), custom_generate(), **options)


def test_a_cache_with_code_of_its_own_is_refused(llama):
    """pass_ext reads and writes layers themselves, so an ``update`` of the caller's would never run."""
    updates = []

    class Own(DynamicCache):
        def update(self, keys, values, *arguments, **named):
            updates.append(len(keys))
            return super().update(keys, values, *arguments, **named)

    class OwnLayer(transformers.cache_utils.DynamicLayer):
        pass

    OwnLayer.__name__ = "DynamicLayer"
    ids = torch.randint(3, VOCABULARY, (1, 6))
    with pytest.raises(ValueError, match=r"must be a DynamicCache or StaticCache itself .*got Own"):
        run(llama, ids, torch.ones_like(ids), custom_generate(), past_key_values=Own())
    layered = DynamicCache()
    layered.layers.append(OwnLayer())
    with pytest.raises(ValueError, match="a cache of DynamicLayer is not supported"):
        run(llama, ids, torch.ones_like(ids), custom_generate(), past_key_values=layered)
    assert updates == []


def test_inputs_and_caches_that_do_not_fit_are_refused(llama):
    ids = torch.randint(3, VOCABULARY, (1, 6))
    ones = torch.ones_like(ids)
    with pytest.raises(ValueError, match="inputs_embeds must come with the input_ids of all its rows"):
        llama.generate(
            input_ids=ids[:, :4], inputs_embeds=llama.get_input_embeddings()(ids), custom_generate=custom_generate()
        )
    with pytest.raises(ValueError, match="room for 25 tokens, got 10"):
        run(llama, ids, ones, custom_generate(), past_key_values=StaticCache(config=llama.config, max_cache_len=10))
    mistral = small_model("mistral")
    cache = DynamicCache(config=mistral.config)
    run(mistral, ids, ones, past_key_values=cache)
    with pytest.raises(ValueError, match="sliding window"):
        run(mistral, torch.cat([ids, ids], 1), torch.ones(1, 12), custom_generate(), past_key_values=cache)


@pytest.mark.parametrize(("processes", "is_shared"), [(2, True), (2, False), (1, True)])
def test_weights_that_processes_share_are_refused(llama, monkeypatch, processes, is_shared):
    """ZeRO-3 and FSDP want equally many calls from all processes."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: processes)
    monkeypatch.setattr(transformers.integrations.fsdp, "is_fsdp_managed_module", lambda model: is_shared)
    ids = torch.randint(3, VOCABULARY, (1, 6))
    call = lambda: custom_generate()(llama, ids, generation_config=prepared_config())  # noqa: E731
    if processes > 1 and is_shared:
        with pytest.raises(ValueError, match="weights must lie in one process, got 2 that share them"):
            call()
    else:
        assert call().shape == (1, 9)


def prepared_config():
    """A config as transformers prepares it for a loop."""
    config = transformers.GenerationConfig(max_length=9)
    config._pad_token_tensor = torch.tensor(0)
    return config


def test_a_name_that_there_is_not():
    with pytest.raises(AttributeError, match="no attribute 'custom'"):
        pass_ext.custom  # noqa: B018
