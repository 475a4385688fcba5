"""Encoders beside decoders: texts are transformers' own, token for token, by every method; Whisper's generate whole."""

import copy
from functools import cache

import pytest
import torch

transformers = pytest.importorskip("transformers")

from packaging.version import Version  # noqa: E402
from support.pairwise import pairwise  # noqa: E402
from support.speech import speaking_whisper  # noqa: E402
from transformers import GenerationMixin  # noqa: E402

from benchmarks.architectures.encoders import NAMES, OPTIONS, inputs_of, methods, tiny_model  # noqa: E402
from pass_ext import (  # noqa: E402
    EarlyExitDraft,
    LookaheadEmbedding,
    MultiCandidate,
    NGram,
    PaSS,
    Session,
    Speculative,
    Tree,
    custom_generate,
    generate,
)
from pass_ext.decoding.models.encoders import Encoded  # noqa: E402
from pass_ext.decoding.planning.calibration import calibrate  # noqa: E402
from pass_ext.integrations.transformers.processors import NotedRows  # noqa: E402
from pass_ext.testing import assert_same_bits  # noqa: E402

if Version(transformers.__version__) < Version("5.24"):
    pytest.skip("configs of earlier versions have other fields to make tiny", allow_module_level=True)

BEGUN = torch.tensor([[1, 5, 6], [1, 7, 8]])
NEW = OPTIONS["max_new_tokens"]
ALL_METHODS = ("whisper", "bart", "t5")  # the others are decoders like these: a chain, and a tree with slots
model_of = cache(tiny_model)


def own(model, inputs, **options):
    return GenerationMixin.generate(model, **inputs, **{**OPTIONS, **options})


def ours(model, inputs, method=None, ids=BEGUN, **options):
    return generate(model, ids, method, prompt=inputs, max_new_tokens=NEW, eos_token_id=[], **options).sequences


@pytest.mark.parametrize("name", [name for name in NAMES if name != "m2m_100"])
def test_texts_are_transformers_own(name):
    model = model_of(name)
    inputs = inputs_of(model)
    want, known = own(model, inputs), methods(name, model)
    for kind in known if name in ALL_METHODS else ("NGram", "PaSS"):
        assert torch.equal(own(model, inputs, custom_generate=custom_generate(known[kind])), want), kind
    texts = torch.cat([want, own(model, inputs_of(model, seed=1))])  # which begin alike
    assert len(texts.unique(dim=0)) > 1, "the encoder's input changes nothing"


@pytest.mark.parametrize("name", ["whisper", "bart"])
def test_beginnings_samples_and_seeds(name):
    model = model_of(name)
    inputs = inputs_of(model)
    want = own(model, inputs, decoder_input_ids=BEGUN, decoder_start_token_id=1)
    drawn = ours(model, inputs, temperature=0.9, seeds=5, num_return_sequences=2)
    assert torch.equal(drawn[::2], ours(model, inputs, temperature=0.9, seeds=5))
    for kind, method in methods(name, model).items():
        assert torch.equal(ours(model, inputs, method), want), kind
        got = ours(model, inputs, method, temperature=0.9, seeds=5, num_return_sequences=2)
        assert torch.equal(got, drawn), kind
    options = dict(do_sample=True, num_return_sequences=2, seeds=3)
    texts = [
        own(model, inputs, custom_generate=custom_generate(method), **options) for method in (None, NGram(shortest=1))
    ]
    assert torch.equal(*texts)


def test_the_encoder_and_its_keys_are_computed_once(monkeypatch):
    model, counts = model_of("whisper"), {"encoder": 0, "keys": 0}

    def count(what):
        def hook(*_):
            counts[what] += 1

        return hook

    hooks = [model.model.encoder.register_forward_hook(count("encoder"))]
    hooks += [layer.encoder_attn.k_proj.register_forward_hook(count("keys")) for layer in model.model.decoder.layers]
    try:
        ours(model, inputs_of(model), NGram(shortest=1), num_return_sequences=3, temperature=0.9, seeds=5)
    finally:
        for hook in hooks:
            hook.remove()
    assert counts == {"encoder": 1, "keys": len(model.model.decoder.layers)}


def test_a_right_draft_has_the_sound_too():
    """Its own first layers, all of them, and the model itself as a draft: all drafts are accepted."""
    model, method = model_of("whisper"), custom_generate(Speculative(model_of("whisper"), 3))
    inputs = inputs_of(model)
    own(model, inputs, custom_generate=method)
    whole = generate(
        model, BEGUN, Speculative(EarlyExitDraft(model, 2), 3), prompt=inputs, max_new_tokens=NEW, eos_token_id=[]
    )
    for stats in (method.stats, whole.stats):
        assert stats.draft_acceptance_rate == 1 and stats.tokens_per_call > 2 * len(BEGUN), stats


@pytest.mark.usefixtures("one_thread")
def test_a_row_has_the_bits_that_it_has_alone():
    """In trees and in a batch, on the CPU, but for the encoder, which reads a batch together."""
    model = model_of("whisper")
    features = inputs_of(model)["input_features"][:1].repeat(2, 1, 1)
    rows = []
    for method in (None, MultiCandidate(model, (2, 2))):
        for ids in (BEGUN, BEGUN[:1]):
            noted, inputs = NotedRows(), {"input_features": features[: len(ids)]}
            result = generate(
                model, ids, method, prompt=inputs, max_new_tokens=NEW, eos_token_id=[], logits_processor=noted
            )
            rows.append(torch.stack(noted.of(result))[:, 0])
    torch.testing.assert_close(rows[0], rows[1], atol=1e-5, rtol=1e-5)
    assert_same_bits(rows[0], rows[2])
    assert_same_bits(rows[1], rows[3])


def test_an_8_bit_cache_writes_plains_text():
    model = model_of("whisper")
    texts = [
        ours(model, inputs_of(model), method, session=Session(model, cache_dtype=torch.int8))
        for method in (None, NGram(shortest=1))
    ]
    assert torch.equal(*texts)


def test_a_session_is_used_again_with_another_input():
    model, session = model_of("whisper"), Session(model_of("whisper"))
    for seed in (0, 1):
        inputs = inputs_of(model, seed=seed)
        want = own(model, inputs, decoder_input_ids=BEGUN)
        assert torch.equal(ours(model, inputs, NGram(shortest=1), session=session), want)


def test_logits_are_transformers_own():
    model = model_of("bart")
    inputs, options = inputs_of(model), dict(return_dict_in_generate=True, output_logits=True, output_scores=True)
    theirs, mine = (
        own(model, inputs, **options),
        own(model, inputs, **options, custom_generate=custom_generate(NGram())),
    )
    assert type(mine) is type(theirs)
    for name in ("logits", "scores"):
        torch.testing.assert_close(torch.stack(mine[name]), torch.stack(theirs[name]), atol=1e-4, rtol=1e-4)


def test_padding_of_the_encoders_input_may_stand_anywhere():
    keys = torch.randn(1, 3, 1, 16)
    model = model_of("bart")
    inputs = inputs_of(model, batch=1)
    padded = {name: torch.nn.functional.pad(value, (2, 0)) for name, value in inputs.items()}
    with torch.no_grad():
        outputs = model.get_encoder()(**inputs)
    outputs_padded = type(outputs)(last_hidden_state=torch.nn.functional.pad(outputs.last_hidden_state, (0, 0, 2, 0)))
    want = ours(model, {"encoder_outputs": outputs, "attention_mask": inputs["attention_mask"]}, ids=BEGUN[:1])
    got = ours(model, {"encoder_outputs": outputs_padded, "attention_mask": padded["attention_mask"]}, ids=BEGUN[:1])
    assert torch.equal(got, want)
    assert Encoded([(keys, keys)], torch.tensor([3], dtype=torch.int32), 16).layer_of(keys) is None


# ---- Whisper's own generate ----


def sound(frames, batch=2):
    return torch.randn(batch, 8, frames, generator=torch.Generator().manual_seed(4))


def transcribed(model, frames, method=None, **options):
    features = sound(frames)
    mask = torch.ones(len(features), frames, dtype=torch.long)
    return model.generate(features, attention_mask=mask, custom_generate=method, **options)


ASKED = {
    "language and task": (32, dict(language="de", task="translate")),
    "language found": (32, {}),
    "timestamps": (32, dict(language="en", return_timestamps=True)),
    "long": (100, dict(language="en", return_timestamps=True)),
    "long, on what was said": (100, dict(language="en", return_timestamps=True, condition_on_prev_tokens=True)),
    "prompt": (32, dict(language="en", prompt_ids=torch.tensor([54, 20, 21]))),
    "long, with silence": (
        100,
        dict(
            language="en",
            return_timestamps=True,
            no_speech_threshold=0.6,
            logprob_threshold=-20.0,
            compression_ratio_threshold=9.0,
            temperature=(0.0,),
        ),
    ),
}


def slots_of_whisper():
    torch.manual_seed(0)
    slots = LookaheadEmbedding(2, 32, vocabulary=97)
    torch.nn.init.normal_(slots.weight)
    return slots


METHODS = {
    "ngram": lambda model: NGram(shortest=1),
    "draft model": lambda model: Speculative(model_of("whisper", layers=1), 3),
    "tree of an early exit": lambda model: MultiCandidate(EarlyExitDraft(model, 1), (2, 1)),
    "one pass": lambda model: PaSS(slots_of_whisper(), tree=Tree([-1, 0, 0, 1]), rows=12),
}


@pytest.mark.parametrize(("asked", "method"), pairwise(list(ASKED), list(METHODS)))
def test_whispers_own_generate(asked, method):
    frames, options = ASKED[asked]
    model = speaking_whisper()
    want = transcribed(model, frames, **options)
    assert torch.equal(transcribed(model, frames, custom_generate(METHODS[method](model)), **options), want)
    assert len(want.unique()) > 3


# ---- refusals ----


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (None, "prompt must be what a processor gives for the encoder of whisper, such as input_features, got None"),
        ({"attention_mask": torch.ones(2, 4)}, "prompt must have input_features, which the encoder of whisper reads"),
        ({"input_features": torch.randn(2, 8, 30)}, "cannot read prompts with input_features"),
        (
            {"input_features": torch.randn(1, 8, 32)},
            "the encoder's inputs must be of 2 prompts, as many as input_ids has rows",
        ),
        ({"input_features": torch.randn(2, 8, 32), "pixel_values": torch.ones(1)}, "the input pixel_values of whisper"),
        ({"input_features": torch.randn(2, 8, 32), "decoder_input_ids": BEGUN}, "the decoder's beginning is input_ids"),
        (
            {"input_features": torch.randn(2, 8, 32), "input_ids": BEGUN},
            "the input input_ids of whisper is not supported",
        ),
    ],
)
def test_bad_inputs(prompt, message):
    with pytest.raises(ValueError, match=message):
        ours(model_of("whisper"), prompt)


def test_a_mask_of_other_rows_than_the_encoders():
    inputs = inputs_of(model_of("bart"))
    outputs = torch.randn(2, 5, 32)
    with pytest.raises(ValueError, match=r"attention_mask must be of the encoder's outputs, \[2, 5\], got \[2, 9\]"):
        ours(model_of("bart"), {"encoder_outputs": outputs, "attention_mask": inputs["attention_mask"]})


def test_a_batch_invariant_session_reads_one_input():
    model = model_of("whisper")
    with pytest.raises(ValueError, match=r"takes one prompt with pictures, sound or an encoder's input at a time"):
        ours(model, inputs_of(model), session=Session(model, batch_invariant=True))


@pytest.mark.parametrize("name", ["whisper", "bart", "t5", "trocr"])
def test_caches_go_both_ways(name):
    """What one has written, the other goes on from; a text of which no token is cached begins with the same cache."""
    model = model_of(name)
    inputs, draft = inputs_of(model), custom_generate(NGram(shortest=1))
    want = own(model, inputs)
    begun = dict(max_new_tokens=6, return_dict_in_generate=True)
    theirs, written = own(model, inputs, **begun), own(model, inputs, **begun, custom_generate=draft)
    assert torch.equal(theirs.sequences, written.sequences)
    for part in ("self_attention_cache", "cross_attention_cache"):
        pairs = zip(getattr(theirs.cache, part).layers, getattr(written.cache, part).layers, strict=True)
        for expected, layer in pairs:
            for x, y in ((expected.keys, layer.keys), (expected.values, layer.values)):
                torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)
    more, cache = dict(max_new_tokens=NEW - 6, custom_generate=draft), copy.deepcopy(written.cache)
    for cached in (theirs.cache, written.cache):
        assert torch.equal(own(model, inputs, decoder_input_ids=written.sequences, cache=cached, **more), want)
        assert int(cached.get_seq_length()) == want.shape[1] - 1, "a cache that the caller gave goes on"
    with pytest.raises(
        ValueError, match="decoder_input_ids must hold the whole text, the 16 cached tokens included, got 7"
    ):
        own(model, inputs, decoder_input_ids=written.sequences, cache=written.cache, **more)
    # transformers' generate reads cached tokens again, so its model goes on.
    given = {"encoder_outputs": model.get_encoder()(**inputs, return_dict=True)}
    given |= {name: mask for name, mask in inputs.items() if name == "attention_mask"}
    for column in range(6, NEW):
        logits = model(decoder_input_ids=want[:, column : column + 1], cache=cache, **given).logits
        assert torch.equal(logits[:, -1].argmax(-1), want[:, column + 1])


def test_a_cache_of_another_input_is_refused():
    model = model_of("bart")
    begun = own(model, inputs_of(model), max_new_tokens=4, return_dict_in_generate=True)
    other = inputs_of(model, seed=1)
    with pytest.raises(
        ValueError, match="past_key_values must be of the input that the encoder of bart reads now, got"
    ):
        own(model, other, decoder_input_ids=begun.sequences, cache=begun.cache, custom_generate=custom_generate())


@pytest.mark.parametrize(("name", "value"), [("encoder_repetition_penalty", 2.0), ("encoder_no_repeat_ngram_size", 2)])
def test_processors_that_read_the_encoders_ids(name, value):
    model, asked = model_of("bart"), transformers.GenerationConfig(**{name: value})
    with pytest.raises(ValueError, match=f"generation_config: {name} reads the encoder's ids"):
        ours(model, inputs_of(model), generation_config=asked)
    want = own(model, inputs_of(model), **{name: value})
    assert torch.equal(
        own(model, inputs_of(model), **{name: value}, custom_generate=custom_generate(NGram(shortest=1))), want
    )


def decoder_alone(model):
    """The decoder and output layer of a model with an encoder, which have the same weights."""
    kind, head = {
        "whisper": (transformers.WhisperForCausalLM, "proj_out"),
        "bart": (transformers.BartForCausalLM, "lm_head"),
    }[model.config.model_type]
    found = kind(type(model.config)(**model.config.to_dict())).eval().requires_grad_(False)
    found.model.decoder.load_state_dict(model.model.decoder.state_dict())
    getattr(found, head).load_state_dict(getattr(model, head).state_dict())
    return found


@pytest.mark.parametrize("name", ["whisper", "bart"])
def test_a_decoder_alone_drafts_by_what_the_target_has_heard(name):
    """Its config counts the encoder's layers too, three beside the decoder's two."""
    model = model_of(name)
    inputs, draft = inputs_of(model), decoder_alone(model)
    want = own(model, inputs)
    for method in (Speculative(draft, 3), MultiCandidate(draft, (2, 2))):
        inside = custom_generate(method)
        assert torch.equal(own(model, inputs, custom_generate=inside), want)
        made = generate(model, want[:, :1], method, prompt=inputs, max_new_tokens=NEW, eos_token_id=[])
        assert torch.equal(made.sequences, want)
        most = -(-NEW // (4 if isinstance(method, Speculative) else 3)) + 2  # every draft is right
        assert max(inside.stats.model_calls, made.stats.model_calls) <= most
    assert torch.equal(ours(model, inputs, Speculative(draft, "auto")), ours(model, inputs))


def test_a_layer_that_does_not_attend_to_the_encoder_is_noticed(monkeypatch):
    """Without the pooled rows, to which its decoder attends, it would write a text by itself."""
    from benchmarks.architectures.own_prompts import OWN
    from benchmarks.architectures.pictures import tiny_model as with_pictures
    from pass_ext.decoding.models import encoders

    model = with_pictures("pp_formulanet", transformers.AutoModelForImageTextToText)
    inputs, whole = OWN["pp_formulanet"](model), encoders._outputs_of
    begun = torch.tensor([[1, 5]])
    options = dict(decoder_input_ids=begun, max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None)
    made = generate(model, begun, NGram(shortest=1), prompt=inputs, max_new_tokens=4, eos_token_id=[])
    assert torch.equal(made.sequences, model.generate(**inputs, **options))

    def without(hidden):
        outputs = whole(hidden)
        outputs.pooler_output = None
        return outputs

    monkeypatch.setattr(encoders, "_outputs_of", without)
    with pytest.raises(
        ValueError, match="pp_formulanet: 0 of 2 layers attended to the encoder's rows; every layer must"
    ):
        generate(model, begun, prompt=inputs, max_new_tokens=2)


def test_a_draft_must_hear_as_the_target_does():
    from transformers import LlamaConfig, LlamaForCausalLM, WhisperForCausalLM

    class Deaf(WhisperForCausalLM):
        def forward(self, input_ids=None, inputs_embeds=None):
            raise AssertionError

    model = model_of("whisper")
    with pytest.raises(ValueError, match="must have the encoder that its layers attend to, got Deaf: load it with"):
        ours(model, inputs_of(model), Speculative(Deaf(type(model.config)(**model.config.to_dict())).eval(), 2))
    narrow = WhisperForCausalLM(type(model.config)(**{**model.config.to_dict(), "d_model": 16})).eval()
    with pytest.raises(
        ValueError, match="must attend to rows of 32 numbers, which the encoder of whisper makes, got Whis"
    ):
        ours(model, inputs_of(model), Speculative(narrow, 2))
    shape = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
    text = LlamaForCausalLM(LlamaConfig(**shape)).eval()
    with pytest.raises(ValueError, match="must have no encoder for llama, which has none, got WhisperForConditional"):
        generate(text, BEGUN, Speculative(model, 2), max_new_tokens=2)
    assert torch.equal(ours(model, inputs_of(model), Speculative(text, 2)), ours(model, inputs_of(model)))


def test_texts_alone():
    """Doors that have nothing for an encoder."""
    with pytest.raises(ValueError, match="whisper has an encoder, and this call has nothing for it to read"):
        calibrate(model_of("whisper"), model_of("whisper", layers=1), BEGUN.tolist(), ranks=2, levels=1)


def test_the_model_that_takes_no_positions():
    model = model_of("m2m_100")
    with pytest.raises(ValueError, match=r"m2m_100: M2M100ForConditionalGeneration.forward takes no position_ids"):
        ours(model, inputs_of(model))


def test_an_adapter_of_an_early_exit():
    from pass_ext.drafting import ExitAdapter

    with pytest.raises(ValueError, match="adapter must be None for WhisperForConditionalGeneration"):
        EarlyExitDraft(model_of("whisper"), adapter=ExitAdapter(1, 32, 8))
