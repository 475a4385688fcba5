"""Prompts with pictures: texts are transformers' own, token for token, by every method, alone and in ragged batches."""

import copy
import io
from functools import cache, partial

import pytest
import torch

transformers = pytest.importorskip("transformers")

from packaging.version import Version  # noqa: E402
from support.generation import slots_for  # noqa: E402
from support.grammars import random_automaton  # noqa: E402
from support.pictures import llava_processor, random_picture  # noqa: E402
from support.small_models import VOCABULARY, small_model  # noqa: E402
from transformers import AutoModelForImageTextToText, DynamicCache  # noqa: E402

from benchmarks.architectures import models  # noqa: E402
from benchmarks.architectures.pictures import (  # noqa: E402
    BY_GRID,
    PICTURED,
    SOUNDING,
    audio_token,
    image_token,
    llava_of,
    prompts,
    sound_of,
    tiny_model,
)
from benchmarks.architectures.whole_prompts import classes  # noqa: E402
from pass_ext import (  # noqa: E402
    EarlyExitDraft,
    MultiCandidate,
    NGram,
    PaSS,
    Plain,
    Session,
    Speculative,
    Tree,
    custom_generate,
    generate,
)
from pass_ext.checkpoint import demo_model, load_checkpoint  # noqa: E402
from pass_ext.decoding.drafting.draft_calls import DraftCalls  # noqa: E402
from pass_ext.decoding.drafting.drafter import Drafter  # noqa: E402
from pass_ext.decoding.drafting.from_ngrams import NGramDrafter  # noqa: E402
from pass_ext.decoding.models.any_model import packed_model  # noqa: E402
from pass_ext.decoding.models.whole_prompts import WholePrompts  # noqa: E402
from pass_ext.drafting import Candidates, Proposal  # noqa: E402

if Version(transformers.__version__) < Version("5.24"):
    pytest.skip("configs of earlier versions have other fields to make tiny", allow_module_level=True)

PICTURE, SMALL = (4, 8), (4, 4)
BEFORE, AFTER = [5, 6], [7, 8, 5, 6, 7]
OPTIONS = dict(max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=[96])


@cache
def model_of(name, auto=AutoModelForImageTextToText):
    return tiny_model(name, auto)


def own_text(model, inputs, **options):
    return model.generate(**inputs, **{**OPTIONS, **options})


def first_logits(model, inputs):
    return own_text(model, inputs, max_new_tokens=1, return_dict_in_generate=True, output_logits=True).logits[0]


def ours(model, inputs, method=None, **options):
    return generate(
        model, inputs["input_ids"], method, prompt=inputs, max_new_tokens=12, eos_token_id=[96], **options
    ).sequences


@pytest.mark.parametrize("name", PICTURED)
def test_texts_after_a_picture_are_transformers_own(name):
    model = model_of(name)
    inputs = prompts(model, [*BEFORE, PICTURE, *AFTER])
    own = own_text(model, inputs)
    changed = prompts(model, [*BEFORE, PICTURE, *AFTER], seed=1)
    assert not torch.equal(*map(partial(first_logits, model), (inputs, changed))), "the picture changes nothing"
    method = NGram(longest=2, shortest=1)
    assert torch.equal(own, own_text(model, inputs, custom_generate=custom_generate(method)))
    assert torch.equal(own, ours(model, inputs)) and torch.equal(own, ours(model, inputs, method))
    assert torch.equal(own_text(model, changed), ours(model, changed))


@pytest.mark.parametrize("name", ["llava", "qwen2_vl", "qwen3_vl", "qwen3_5", "gemma3", "idefics3"])
def test_prompts_of_a_batch_may_differ(name):
    """One with two pictures, one without, one with one, ragged."""
    model = model_of(name)
    if name == "idefics3":  # its processor pads the pictures of all prompts to one number
        texts = [[*BEFORE, PICTURE, 9], [5, PICTURE, 7, 8]]
    else:
        texts = [[5, PICTURE, 6, SMALL, 7, 8], [5, 6, 7, 8, 5, 6], [9, 9, PICTURE, 5, 6]]
    inputs = prompts(model, *texts)
    own = own_text(model, inputs)
    for method in (None, NGram(longest=2, shortest=1)):
        assert torch.equal(own, ours(model, inputs, method))
        assert torch.equal(own, own_text(model, inputs, custom_generate=custom_generate(method)))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_prompts_whose_rows_see_those_after_them(attention):
    """PaliGemma. By "sdpa" the rows of a text alone see each other too, by "eager" they do not."""
    model = tiny_model("paligemma", AutoModelForImageTextToText)
    model.set_attn_implementation(attention)
    inputs = prompts(model, [*BEFORE, PICTURE, *AFTER])
    causal = inputs | {"token_type_ids": torch.ones_like(inputs["input_ids"])}
    assert not torch.equal(*map(partial(first_logits, model), (inputs, causal)))
    ids = torch.tensor([[*BEFORE, *AFTER], [0, 0, *AFTER]])
    alone = dict(input_ids=ids, attention_mask=(ids > 0).long())
    for given in (inputs, causal, prompts(model, [5, PICTURE, 6, 7], [PICTURE, 5, 6, 7, 8, 5]), alone):
        own = own_text(model, given)
        for method in (None, NGram(longest=2, shortest=1)):
            assert torch.equal(own, own_text(model, given, custom_generate=custom_generate(method)))
            assert torch.equal(own, ours(model, given, method))
    texts = generate(model, ids, attention_mask=alone["attention_mask"], max_new_tokens=12, eos_token_id=[96])
    assert torch.equal(texts.sequences, own_text(model, alone))
    past = [(torch.zeros(2, 2, 2, 16),) * 2] * 2, 2
    with pytest.raises(ValueError, match=r"session\.past must be None for paligemma, which the model reads whole"):
        generate(model, ids, max_new_tokens=1, session=Session(model, past=past))


@pytest.mark.parametrize("name", BY_GRID)
def test_rows_after_a_picture_have_fewer_positions_than_rows(name, monkeypatch):
    model = model_of(name)
    inputs = prompts(model, [*BEFORE, (8, 16), *AFTER])
    own, session = own_text(model, inputs), Session(model)
    assert torch.equal(own, ours(model, inputs, NGram(), session=session))
    assert session.offsets.tolist() == [8 - 32]  # of 4 times 8 rows, the longer side counts
    first = [logprobs_of(model, inputs)]
    monkeypatch.setattr(WholePrompts, "_offsets", lambda self, *rest: [0])
    first.append(logprobs_of(model, inputs))
    assert not torch.allclose(*first), "a row's position changes nothing"


def test_rotary_embeddings_of_three_axes_alone(monkeypatch):
    """As transformers 4 has M-RoPE: a rotary embedding that is called with positions of one axis fails there."""
    model = model_of("qwen2_vl")
    inputs = prompts(model, [*BEFORE, PICTURE, *AFTER])
    own, rotary = own_text(model, inputs), type(model.model.language_model.rotary_emb)
    forward, axes = rotary.forward, []

    def of_three(self, x, position_ids):
        axes.append(position_ids[:, :, None, :].shape[0])  # an IndexError for one
        return forward(self, x, position_ids)

    monkeypatch.setattr(rotary, "forward", of_three)
    result = generate(model, inputs["input_ids"], prompt=inputs, max_new_tokens=12, eos_token_id=[96])
    assert torch.equal(own, result.sequences) and result.stats.backend == "fused" and set(axes) == {3}


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_5"])
def test_a_session_goes_on_after_a_picture_with_its_offsets(name):
    """A second turn of text alone over ``past`` is the whole conversation's text; without its offsets it is not."""
    model = model_of(name)
    inputs, session = prompts(model, [*BEFORE, (8, 16), *AFTER]), Session(model)
    said = ours(model, inputs, session=session)
    held = session.prefix_lens.tolist()
    layers = [(k[:, : held[0]].clone(), v[:, : held[0]].clone()) for k, v in session.caches]
    states = [state.clone() for state in session.states]
    ids = torch.cat([said, torch.tensor([AFTER])], 1)
    whole = dict(inputs, input_ids=ids, attention_mask=torch.ones_like(ids))
    if "mm_token_type_ids" in whole:
        kinds = whole["mm_token_type_ids"]
        whole["mm_token_type_ids"] = torch.nn.functional.pad(kinds, (0, ids.shape[1] - kinds.shape[1]))
    options = dict(max_new_tokens=12, eos_token_id=[96], logprobs=0)
    expected = generate(model, ids, prompt=whole, **options)
    texts = {}
    for offsets in (session.offsets, None):
        later = Session(model, past=(layers, held, states, offsets))
        texts[offsets is None] = generate(model, ids, NGram(longest=2, shortest=1), session=later, **options)
    assert torch.equal(texts[False].sequences, expected.sequences)
    torch.testing.assert_close(texts[False].logprobs[0].raw, expected.logprobs[0].raw, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(texts[True].logprobs[0].raw[:1], expected.logprobs[0].raw[:1], atol=1e-4)
    with pytest.raises(ValueError, match="offsets must be one for each of 1 prompts"):
        generate(model, ids, session=Session(model, past=(layers, held, states, [0, 0])), **options)


def logprobs_of(model, inputs):
    options = dict(prompt=inputs, max_new_tokens=2, eos_token_id=[], logprobs=0)
    return generate(model, inputs["input_ids"], **options).logprobs[0].raw


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_5", "llava"])
def test_every_method_writes_the_same_texts(name):
    model = model_of(name)
    inputs = prompts(model, [5, PICTURE, 6, 5, 6, 5], [*BEFORE, SMALL, *AFTER])
    vocabulary = model.get_input_embeddings().num_embeddings
    methods = {
        "slots": PaSS(slots_for(model), tree=Tree.from_branching((2, 2)), rows=12),
        "draft model": Speculative(small_model("llama", vocab_size=vocabulary), length=3),
        "trees": MultiCandidate(small_model("llama", vocab_size=vocabulary), branching=(2, 1), ngram=NGram()),
    }
    one = prompts(model, [*BEFORE, PICTURE, *AFTER])  # alone its steps are the device's
    assert torch.equal(own_text(model, one), ours(model, one, methods["slots"]))
    for options in ({}, dict(temperature=1.0, seeds=[3, 8])):
        plain = ours(model, inputs, **options)
        for method, text in ((each, ours(model, inputs, each, **options)) for each in methods.values()):
            assert torch.equal(plain, text), method
    assert not torch.equal(plain, ours(model, inputs))


@pytest.mark.parametrize("name", ["llava", "qwen3_vl", "paligemma"])
def test_the_first_token_is_drawn_from_the_call_that_has_read_the_prompt(name):
    """Its logits are transformers' own to the bit, by every method, and no call comes after it."""
    model = model_of(name)
    inputs = prompts(model, [*BEFORE, PICTURE, *AFTER])
    own = first_logits(model, inputs)
    for method in (Plain(), NGram(), PaSS(slots_for(model), tree=Tree.from_branching((2, 2)), rows=12)):
        custom = custom_generate(method)
        assert torch.equal(own, first_logits(model, inputs | dict(custom_generate=custom))), method
        one = generate(model, inputs["input_ids"], method, prompt=inputs, max_new_tokens=1, temperature=1.0, seeds=1)
        assert one.stats.model_calls == custom.stats.model_calls == 1, method
    words = torch.tensor([[*BEFORE, *AFTER]])
    calls = generate(model, words, max_new_tokens=3, eos_token_id=[]).stats.model_calls
    assert calls == 3, "the prompt's call counts, whoever has read it"


class Reader(Drafter):
    """Drafts nothing and keeps the hidden states that it is given."""

    max_depth, taps = 1, (0, 1, "last")

    def __init__(self):
        self.hidden = []

    def drafters(self, context):
        return [self]

    def propose(self, batch):
        self.hidden.append(batch.hidden)
        return Proposal([None] * len(batch.texts))


@pytest.mark.parametrize("name", ["llava", "qwen3_vl", "qwen3_5"])
def test_drafters_with_taps_get_the_states_after_a_picture(name):
    """They come from the call that has read the picture."""
    model, reader = model_of(name), Reader()
    inputs = prompts(model, [*BEFORE, PICTURE, *AFTER], [5, 6, SMALL, 8])
    ours(model, inputs, reader)
    out = model(**inputs, output_hidden_states=True).hidden_states
    for b, count in enumerate((len(AFTER), 1)):
        own = torch.stack([out[0][b, -count:], out[1][b, -count:], out[-1][b, -count:]], 1)
        torch.testing.assert_close(reader.hidden[0][b], own, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_5", "gemma3", "llava"])
def test_texts_of_one_prompt_read_its_picture_once(name, monkeypatch):
    model = model_of(name)
    inputs, rows = prompts(model, [5, PICTURE, 6, 7], [5, 6, SMALL, 8]), []
    true = WholePrompts._call

    def counted(self, *rest):
        rows.append(len(self._ids))
        return true(self, *rest)

    monkeypatch.setattr(WholePrompts, "_call", counted)
    options = dict(temperature=1.0, seeds=5, num_return_sequences=3)
    texts = ours(model, inputs, **options)
    assert rows == [2] and len(set(map(tuple, texts[:3].tolist()))) == 3
    assert torch.equal(texts, ours(model, inputs, NGram(shortest=1), **options))
    rows.clear()
    same = custom_generate(NGram(shortest=1), seeds=5)
    sampled = dict(do_sample=True, top_k=0, num_return_sequences=3, custom_generate=same)
    assert torch.equal(own_text(model, inputs, **sampled), texts) and rows == [2]


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_5", "llava", "gemma3"])
def test_a_second_turn_has_another_picture(name):
    """Over transformers' cache of the first turn, which may be ours."""
    model, first = model_of(name), None
    whole = prompts(model, [*BEFORE, PICTURE, *AFTER])
    count, columns = dict(max_new_tokens=4, eos_token_id=None), whole["input_ids"].shape[1] + 4
    for method in (None, custom_generate(NGram(shortest=1))):
        cache = full_or_own_cache(model)
        half = own_text(
            model, whole, **count, past_key_values=cache, return_dict_in_generate=True, custom_generate=method
        )
        first = half.sequences if first is None else first
        assert torch.equal(first, half.sequences)
        new = prompts(model, [*([1] * columns), 9, SMALL, 7, 8], seed=3)
        new["input_ids"][:, :columns] = half.sequences
        texts = []
        for second in (None, custom_generate(NGram(shortest=1))):
            copied = copy.deepcopy(half.past_key_values)
            texts.append(own_text(model, new, **count, past_key_values=copied, custom_generate=second))
        assert torch.equal(*texts)


def full_or_own_cache(model):
    """All keys, which a cache by the config of a model with windows does not hold."""
    return DynamicCache(config=model.config) if model.config.model_type == "qwen3_5" else DynamicCache()


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_5", "llava"])
def test_transformers_goes_on_from_our_cache(name):
    """Also where the last step went beyond the text's end: states are those after its last token but one."""
    model = model_of(name)
    inputs = prompts(model, [*BEFORE, PICTURE, 5, 6, 5, 6])
    whole = own_text(model, inputs, max_new_tokens=9, eos_token_id=None)
    ours_ = dict(custom_generate=custom_generate(NGram(shortest=1, tokens=5)), return_dict_in_generate=True)
    half = own_text(model, inputs, max_new_tokens=4, eos_token_id=None, **ours_)
    ids = half.sequences
    again = dict(input_ids=ids, attention_mask=torch.ones_like(ids), past_key_values=half.past_key_values)
    assert torch.equal(own_text(model, again, max_new_tokens=5, eos_token_id=None), whole)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_5"])
def test_log_probabilities_grammars_and_stored_keys(name):
    """What holds after texts holds after pictures."""
    model = model_of(name)
    inputs = prompts(model, [*BEFORE, PICTURE, *AFTER], [5, 6, SMALL, 8])
    own = own_text(model, inputs, eos_token_id=None, return_dict_in_generate=True, output_logits=True)
    options = dict(prompt=inputs, max_new_tokens=12, eos_token_id=[])
    found = generate(model, inputs["input_ids"], NGram(shortest=1), logprobs=0, support=True, **options)
    logits = torch.stack(own.logits, 1).log_softmax(-1)
    tokens = own.sequences[:, inputs["input_ids"].shape[1] :]
    expected = logits.gather(2, tokens[..., None])[..., 0]
    torch.testing.assert_close(torch.stack([each.raw for each in found.logprobs]), expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(torch.stack([each.ids for each in found.support]), tokens)
    grammar = random_automaton(VOCABULARY, seed=3)
    for more in (dict(grammar=grammar), dict(temperature=0.9, seeds=3, grammar=grammar), {"session": torch.int8}):
        texts = []
        for method in (Plain(), NGram(shortest=1), PaSS(slots_for(model), tree=Tree.from_branching((2, 2)), rows=12)):
            session = Session(model, cache_dtype=torch.int8) if "session" in more else None
            given = {name: value for name, value in more.items() if name != "session"}
            texts.append(generate(model, inputs["input_ids"], method, session=session, **options, **given).sequences)
        assert torch.equal(texts[0], texts[1]) and torch.equal(texts[0], texts[2])


class Knowing(Drafter):
    """Drafts what the text will be."""

    max_depth = 5

    def __init__(self, text):
        self.text = text.tolist()

    def drafters(self, context):
        return [self]

    def propose(self, batch):
        (text,) = batch.texts
        chain = self.text[len(text) : len(text) + min(batch.levels[0], self.max_depth)]
        return Proposal([Candidates.from_chains([chain]) if chain else None])


def test_states_after_a_picture_are_those_where_the_text_ended(monkeypatch):
    """A step that was right went beyond the end token: what came of it is read again, and the picture is not."""
    model = model_of("qwen3_5")
    inputs = prompts(model, [*BEFORE, PICTURE, *AFTER])
    own, columns = own_text(model, inputs, eos_token_id=None), inputs["input_ids"].shape[1]
    end = next(place for place in range(columns + 2, columns + 6) if own[0, place] not in own[0, columns:place])
    forget, dropped = Session.forget, []
    monkeypatch.setattr(Session, "forget", lambda self, requests: dropped.append(requests) or forget(self, requests))
    sessions = Session(model), Session(model)
    options = dict(prompt=inputs, max_new_tokens=12, eos_token_id=int(own[0, end]))
    for session, method in zip(sessions, (Plain(), Knowing(own[0])), strict=True):
        text = generate(model, inputs["input_ids"], method, session=session, **options).sequences
        assert torch.equal(text, own[:, : end + 1])
    assert dropped == [[0]], "no step went beyond the end"
    assert torch.equal(*(session.prefix_lens for session in sessions))
    for plain, drafted in zip(*(session.states for session in sessions), strict=True):
        torch.testing.assert_close(drafted, plain, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", SOUNDING)
def test_texts_after_sound_are_transformers_own(name):
    auto = getattr(transformers, "AutoModelForMultimodalLM", None)
    if auto is None:
        pytest.skip("this transformers does not have the class")
    model = model_of(name, auto)
    inputs, rows = sound_of(model)
    ids = torch.tensor([[*BEFORE, *[audio_token(model.config)] * rows, *AFTER]])
    inputs |= dict(input_ids=ids, attention_mask=torch.ones_like(ids))
    changed = {name: 1 - 3 * value if value.is_floating_point() else value for name, value in inputs.items()}
    assert not torch.equal(*map(partial(first_logits, model), (inputs, changed))), "the sound changes nothing"
    own = own_text(model, inputs)
    assert torch.equal(own, ours(model, inputs, NGram(shortest=1)))
    assert torch.equal(own, own_text(model, inputs, custom_generate=custom_generate(NGram(shortest=1))))


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_embeddings_of_a_prompt(name):
    """Beside ids, which say what the last row is."""
    model = small_model("llama") if name == "llama" else models.tiny_model(name)
    ids = torch.tensor([[*BEFORE, *AFTER], [9, *AFTER, 9]])
    embeds = model.get_input_embeddings()(ids).clone()
    embeds[:, 1:4] = torch.randn(2, 3, embeds.shape[2], generator=torch.Generator().manual_seed(0))
    inputs = dict(input_ids=ids, inputs_embeds=embeds, attention_mask=torch.ones_like(ids))
    own = own_text(model, inputs)
    assert torch.equal(own, ours(model, inputs, NGram(shortest=1)))
    assert torch.equal(own, own_text(model, inputs, custom_generate=custom_generate(NGram(shortest=1))))


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_vl"])
def test_embeddings_of_a_prompt_without_ids(name):
    """transformers gives the new tokens alone then. Drafters read these and the prompt's last token."""
    model = (
        small_model("llama") if name == "llama" else model_of(name) if name == "qwen3_vl" else models.tiny_model(name)
    )
    embeds = model.get_input_embeddings()(torch.tensor([[*BEFORE, *AFTER], [9, *AFTER, 9]])).clone()
    embeds[:, 1:4] = torch.randn(2, 3, embeds.shape[2], generator=torch.Generator().manual_seed(0))
    inputs = dict(inputs_embeds=embeds, attention_mask=torch.ones(embeds.shape[:2], dtype=torch.long))
    own = own_text(model, inputs)
    assert own.shape[1] <= OPTIONS["max_new_tokens"]
    for method in (Plain(), NGram(shortest=1), PaSS(slots_for(model), tree=Tree.from_branching((2, 2)), rows=12)):
        assert torch.equal(own, own_text(model, inputs, custom_generate=custom_generate(method)))
    sampled = dict(do_sample=True, top_k=5, return_dict_in_generate=True)
    texts = [
        own_text(model, inputs, **sampled, custom_generate=custom_generate(m, seeds=3)) for m in (Plain(), NGram())
    ]
    assert torch.equal(texts[0].sequences, texts[1].sequences)
    for option, reader in (
        (dict(repetition_penalty=1.3), "RepetitionPenalty"),
        (dict(max_time=9.0), "MaxTimeCriteria"),
    ):
        with pytest.raises(
            ValueError, match=f"{reader}.* reads the ids of a prompt: give input_ids with inputs_embeds"
        ):
            own_text(model, inputs, **option, custom_generate=custom_generate())
    embeds[1, -1] += 1
    with pytest.raises(ValueError, match=r"must end with the row of a token of .* prompt 1 ends with a row that is no"):
        own_text(model, inputs, custom_generate=custom_generate())


@pytest.mark.parametrize("name", ["llava", "qwen3_vl", "gemma3"])
def test_early_exits_after_a_picture(name):
    """The first layers go on from the keys and positions of the whole model, which has read the picture."""
    model = model_of(name)
    inputs = prompts(model, [*BEFORE, PICTURE, *AFTER], [5, 6, SMALL, 8])
    draft = EarlyExitDraft(model, layers=1)
    for options in ({}, dict(temperature=1.0, seeds=[3, 8])):
        plain = ours(model, inputs, **options)
        for method in (Speculative(draft, length=3), MultiCandidate(draft, branching=(2, 1))):
            assert torch.equal(plain, ours(model, inputs, method, **options))
    whole = Speculative(EarlyExitDraft(model, layers=2), length=3)  # drafts what the model says
    result = generate(model, inputs["input_ids"], whole, prompt=inputs, max_new_tokens=12, eos_token_id=[])
    assert result.stats.mean_acceptance_length > 3.5


def test_placeholders_are_compared_once(monkeypatch):
    """And again where a hook could embed them otherwise."""
    from pass_ext.decoding.models import limits

    model, calls = tiny_model("llava", AutoModelForImageTextToText), []
    compare = limits.replaced_ids
    monkeypatch.setattr(limits, "replaced_ids", lambda *given: calls.append(given) or compare(*given))
    inputs = prompts(model, [*BEFORE, PICTURE, *AFTER])
    first = ours(model, inputs)
    assert torch.equal(ours(model, inputs), first) and len(calls) == 1
    hook = model.get_input_embeddings().register_forward_hook(lambda part, given, out: out)
    assert torch.equal(ours(model, inputs), first) and len(calls) == 2
    hook.remove()
    assert torch.equal(ours(model, inputs), first) and len(calls) == 2
    monkeypatch.setattr(limits, "replaced_ids", lambda *given: calls.append(given))  # its calls have failed
    model.config.video_token_id = 94
    ours(model, inputs), ours(model, inputs)
    assert len(calls) == 4


def test_hooks_in_an_encoder_leave_the_decoder_its_fused_forward():
    """transformers hooks a vision tower whose hidden states it wants, and leaves the hooks there."""
    model = tiny_model("llava", AutoModelForImageTextToText)
    inputs = prompts(model, [*BEFORE, PICTURE, *AFTER])
    for _ in range(2):
        result = generate(model, inputs["input_ids"], prompt=inputs, max_new_tokens=4, eos_token_id=[])
    assert any(part._forward_hooks for part in model.model.vision_tower.modules())
    assert result.stats.backend == "fused"


def test_n_grams_and_draft_models_read_what_is_after_the_picture(monkeypatch):
    """The text ends as it went on into a picture: its placeholders would follow."""
    model = model_of("llava")
    inputs, seen = prompts(model, [7, 8, PICTURE, 9, 7, 8]), []
    propose, known = NGramDrafter.propose, DraftCalls._known_to_draft

    def proposed(self, batch):
        proposal = propose(self, batch)
        seen.extend(token for part in proposal.candidates if part for token in part.tokens)
        return proposal

    monkeypatch.setattr(NGramDrafter, "propose", proposed)
    ours(model, inputs, NGram(shortest=1))
    assert seen and image_token(model.config) not in seen
    seen.clear()
    monkeypatch.setattr(DraftCalls, "_known_to_draft", lambda self, ids: seen.append(ids.tolist()) or known(self, ids))
    draft = small_model("llama", vocab_size=model.get_input_embeddings().num_embeddings)
    ours(model, inputs, Speculative(draft, length=2))
    assert seen[0][:3] == [9, 7, 8] and not any(image_token(model.config) in ids for ids in seen)


@pytest.mark.slow  # test_texts_after_a_picture_are_transformers_own shows the same on tiny models
def test_a_picture_before_smollm2():
    """The bytes of a picture, a real processor, a random vision tower and SmolLM2's text model."""
    text, tokenizer = load_checkpoint(demo_model(), torch.float32, weights="dense")
    placeholder = "<filename>"  # a token of its table that no text here has
    processor = llava_processor(tokenizer, placeholder)
    model = llava_of(text.config, tokenizer.convert_tokens_to_ids(placeholder))
    model.model.language_model, model.lm_head = text.model, text.lm_head
    image = pytest.importorskip("PIL.Image")
    data = io.BytesIO()
    random_picture(side=200).save(data, "jpeg")
    said = ["<filename>\nWrite a list of ten animals: dog, cat,", "The sea is blue. The sky is blue. The sea"]
    processor.tokenizer.padding_side = "left"
    inputs = processor(images=[image.open(data)], text=said, padding=True, return_tensors="pt")
    options = dict(max_new_tokens=24, do_sample=False)
    own = model.generate(**inputs, **options)
    method = custom_generate(NGram())
    assert torch.equal(own, model.generate(**inputs, **options, custom_generate=method))
    assert method.stats.mean_acceptance_length > 1
    other = processor(images=[random_picture(seed=1)], text=said, padding=True, return_tensors="pt")
    logits = [model(**each).logits[0, -1] for each in (inputs, other)]
    assert not torch.allclose(*logits, atol=1e-2), "the picture changes nothing"
    slots = PaSS("smollm2-135m-instruct")
    assert torch.equal(own, model.generate(**inputs, **options, custom_generate=custom_generate(slots)))


# ---- refusals ----


def test_bad_prompts_are_refused():
    model, session = model_of("llava"), Session(model_of("llava"))
    inputs = prompts(model, [*BEFORE, PICTURE, *AFTER])
    ids, picture = inputs["input_ids"], inputs["pixel_values"]
    text = torch.tensor([[*BEFORE, *AFTER]])

    def refused(match, ids=ids, kind=ValueError, target=model, session=None, **prompt):
        with pytest.raises(kind, match=match):
            generate(target, ids, prompt=prompt, max_new_tokens=2, session=session)

    asked = "LlavaForConditionalGeneration cannot read prompts with pixel_values; give what .* processor makes"
    refused(asked, ids=text, pixel_values=picture)
    refused(asked, ids=ids[:, 1:3], pixel_values=picture)
    refused(asked, pixel_values=picture.repeat(2, 1, 1, 1))
    refused(asked, pixel_values=picture[:, :1])
    refused(asked, pixel_values="a picture")
    refused("the input image_grid of llava is not supported, got Tensor", image_grid=picture)
    refused("prompt has other input_ids than the argument input_ids", input_ids=ids + 1, pixel_values=picture)
    refused("prompt must be None for function", kind=TypeError, target=callable_model(), pixel_values=picture)
    refused("prompts must end with a token, .* ends in a row of pixel_values", ids=ids[:, :-5], pixel_values=picture)
    padded = torch.cat([ids, ids[:, :1]], 1), torch.tensor([[1] * ids.shape[1] + [0]])
    refused("must be padded on the left", ids=padded[0], attention_mask=padded[1], pixel_values=picture)
    session.past = [(torch.zeros(1, 2, 2, 16),) * 2] * 2, 2
    refused("session.past must be None with prompt", session=session, pixel_values=picture)
    two = ids.repeat(2, 1)
    invariant = Session(model, batch_invariant=True)
    refused("takes one prompt with pictures", ids=two, session=invariant, pixel_values=picture.repeat(2, 1, 1, 1))
    embeds = model.get_input_embeddings()(text)
    refused(
        r"inputs_embeds must come with the input_ids of all its rows, \[1, 7\]", ids=text[:, 1:], inputs_embeds=embeds
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pix2struct", "takes no position_ids, so rows of a tree cannot be given their places"),
        ("kyutai_speech_to_text", "embeds tokens by KyutaiSpeechToTextEmbeddings, which has no table of rows"),
        ("t5gemma2", "attends to its encoder's rows and its text in one softmax, which pass_ext does not implement"),
    ],
)
def test_what_a_model_has_is_refused_by_name(name, message):
    with pytest.raises(ValueError, match=f"^{name}.* {message}"):
        packed_model(tiny_model(name, getattr(transformers, classes()[name])))


@pytest.mark.parametrize("name", ["kosmos-2", "kosmos-2.5"])
def test_models_that_count_positions_by_ids_are_refused(name):
    """Their texts would be others, also after text alone."""
    model = model_of(name)
    with pytest.raises(ValueError, match=r"kosmos.* counts positions by ids"):
        model.generate(input_ids=torch.tensor([BEFORE]), **OPTIONS, custom_generate=custom_generate())


def callable_model():
    def model(rows, positions, attend, wanted):
        raise AssertionError

    model.embedding = torch.zeros(97, 64)
    return model
