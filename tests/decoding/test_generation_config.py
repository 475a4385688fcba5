"""generate and a model's generation_config: every processor that changes greedy texts in transformers does so here."""

import pytest
import torch

pytest.importorskip("transformers")

from support.generation import Prophet, unpadded
from support.small_models import VOCABULARY, ragged_prompts, small_model
from transformers import GenerationConfig, WatermarkingConfig

from pass_ext import MultiCandidate, NGram, Plain, Speculative, custom_generate, generate

COLUMNS, NEW = 9, 12
ENDS = {"eos_token_id": [5, 6], "pad_token_id": 0}
MANY_ENDS = list(range(5, 45))

# Options of the config; each makes one processor of transformers, the last one several in transformers' order.
ASKED = {
    "repetition_penalty": {"repetition_penalty": 1.7},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.6},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "bad_words_ids": {"bad_words_ids": [[token] for token in range(7, 50)] + [[60, 61]]},
    "min_length": {"min_length": COLUMNS + 7, "eos_token_id": MANY_ENDS},
    "min_new_tokens": {"min_new_tokens": 8, "eos_token_id": MANY_ENDS},
    "forced_eos_token_id": {"forced_eos_token_id": 3},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (2, 1.9), "eos_token_id": [5, 6, 7]},
    "suppress_tokens": {"suppress_tokens": list(range(7, 50))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(3, 60))},
    "sequence_bias": {"sequence_bias": [[[17], 4.0], [[40], -3.0], [[17, 18], 5.0]]},
    "several": {"repetition_penalty": 1.5, "suppress_tokens": list(range(7, 30)), "min_new_tokens": 5},
}


@pytest.fixture
def asking(llama, monkeypatch):
    """Gives the model a generation_config for the test."""

    def ask(**asked):
        config = GenerationConfig(**{**ENDS, **asked})
        monkeypatch.setattr(llama, "generation_config", config)
        return config

    return ask


def of_transformers(model, ids, mask):
    return model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)


@pytest.mark.parametrize("name", ASKED)
def test_greedy_is_that_of_transformers(llama, predicted, asking, name, monkeypatch):
    """A ragged batch: transformers' processors read its padding too."""
    ids, mask = ragged_prompts(5, longest=COLUMNS, seed=3)
    asking(**{key: value for key, value in ASKED[name].items() if key == "eos_token_id"})
    without = of_transformers(llama, ids, mask)
    asking(**ASKED[name])
    want = of_transformers(llama, ids, mask)
    assert want.shape != without.shape or not torch.equal(want, without), "the option shows"
    options = dict(max_new_tokens=NEW, attention_mask=mask)
    for method in (Plain(), NGram(longest=2, shortest=1, branches=2)):
        assert torch.equal(generate(llama, ids, method, **options).sequences, want)
    Prophet(monkeypatch, unpadded(want, mask))
    got = generate(llama, ids, predicted, **options)
    assert torch.equal(got.sequences, want) and got.stats.mean_acceptance_length > 1.4


def test_a_forced_first_token(llama, asking):
    asking(forced_bos_token_id=11)
    ids = torch.tensor([[1], [4]])
    want = of_transformers(llama, ids, torch.ones_like(ids))
    assert want[:, 1].tolist() == [11, 11]
    assert torch.equal(generate(llama, ids, NGram(), max_new_tokens=NEW).sequences, want)


def test_values_that_are_not_finite_are_removed(llama, asking, monkeypatch):
    ids, mask = ragged_prompts(3, longest=COLUMNS)
    monkeypatch.setattr(llama.lm_head, "forward", lambda x, own=llama.lm_head.forward: spoiled(own(x)))
    asking()
    with pytest.raises(RuntimeError, match="NaN"):
        generate(llama, ids, max_new_tokens=NEW, attention_mask=mask)
    asking(remove_invalid_values=True)
    want = of_transformers(llama, ids, mask)
    assert torch.equal(generate(llama, ids, NGram(), max_new_tokens=NEW, attention_mask=mask).sequences, want)


def spoiled(logits):
    return logits.index_fill(-1, torch.tensor([8, 30]), torch.nan)


def test_padding_on_the_right_counts_as_on_the_left(llama, asking):
    asking(repetition_penalty=1.7, encoder_repetition_penalty=1.3, min_length=COLUMNS + 3)
    ids, mask = ragged_prompts(4, longest=COLUMNS, seed=3)
    want = of_transformers(llama, ids, mask)
    lengths = mask.sum(1).tolist()
    right, seen = (torch.stack([row.roll(n, 0) for row, n in zip(x, lengths, strict=True)]) for x in (ids, mask))
    got = generate(llama, right, NGram(), max_new_tokens=NEW, attention_mask=seen)
    assert torch.equal(got.sequences[:, COLUMNS:], want[:, COLUMNS:])


def test_the_callers_processors_come_after_those_of_the_config(llama, asking):
    asking(suppress_tokens=list(range(7, 50)))
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    seen = []

    def processor(texts, scores):
        seen.append(scores[:, 7:50].max().item())
        return scores + 3 * (torch.arange(VOCABULARY) % 3 == 0)

    got = generate(llama, ids, NGram(), max_new_tokens=NEW, logits_processor=processor).sequences
    assert set(seen) == {-torch.inf}
    want = llama.generate(input_ids=ids, max_new_tokens=NEW, do_sample=False, logits_processor=[processor])
    assert torch.equal(got, want) and not torch.equal(want, of_transformers(llama, ids, torch.ones_like(ids)))
    assert torch.equal(
        generate(llama, ids, NGram(), max_new_tokens=NEW, logits_processor=[processor]).sequences, want
    ), "a list of them is one"


def test_another_generation_config_takes_the_place_of_the_models(llama, asking):
    ids, mask = ragged_prompts(3, longest=COLUMNS)
    options = dict(max_new_tokens=NEW, attention_mask=mask)
    asking()
    plain = generate(llama, ids, **options).sequences
    asking(repetition_penalty=1.8)
    penalised = of_transformers(llama, ids, mask)
    assert not torch.equal(plain, penalised)
    assert torch.equal(generate(llama, ids, generation_config=GenerationConfig(), **options).sequences, plain)
    given = asking(repetition_penalty=1.8)
    asking()
    assert torch.equal(generate(llama, ids, generation_config=given, **options).sequences, penalised)


def test_sampling_belongs_to_the_arguments(llama, asking):
    """The config's sampling, beams and lengths are not read: greedy is the default."""
    ids, mask = ragged_prompts(3, longest=COLUMNS)
    asking()
    want = of_transformers(llama, ids, mask)
    asking(do_sample=True, temperature=2.0, top_k=3, top_p=0.4, typical_p=0.3, max_length=4, num_beams=2)
    assert torch.equal(generate(llama, ids, max_new_tokens=NEW, attention_mask=mask).sequences, want)


def test_a_seed_gives_one_text_for_each_method(llama, predicted, asking, monkeypatch):
    """Penalties act before sampling, whatever drafts."""
    asking(repetition_penalty=1.7, suppress_tokens=list(range(7, 30)))
    ids, mask = ragged_prompts(4, longest=COLUMNS)
    options = dict(max_new_tokens=NEW, attention_mask=mask, temperature=0.9, top_k=20, seeds=7)
    want = generate(llama, ids, **options).sequences
    draft = small_model("llama", num_hidden_layers=1)
    for method in (NGram(shortest=1), Speculative(draft, 3), MultiCandidate(draft, (2, 2))):
        assert torch.equal(generate(llama, ids, method, **options).sequences, want)
    Prophet(monkeypatch, unpadded(want, mask))
    assert torch.equal(generate(llama, ids, predicted, **options).sequences, want)
    unasked = generate(llama, ids, generation_config=GenerationConfig(**ENDS), **options).sequences
    assert not torch.equal(unasked, want)
    again = llama.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=NEW, do_sample=True, temperature=0.9, top_k=20,
        custom_generate=custom_generate(seeds=7),
    )  # fmt: skip
    assert torch.equal(again, want)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"guidance_scale": 1.5}, r"guidance_scale must be 1 or None .* got 1.5"),
        (
            {"watermarking_config": WatermarkingConfig()},
            "watermarking_config must be None .* got Watermark",
        ),
    ],
    ids=["guidance", "watermark"],
)
def test_unimplemented_options_are_refused(llama, asking, asked, message):
    asking(**asked)
    with pytest.raises(ValueError, match=f"generation_config: {message}"):
        generate(llama, torch.tensor([[5, 6]]), max_new_tokens=2)
    generate(llama, torch.tensor([[5, 6]]), max_new_tokens=2, generation_config=GenerationConfig())


def test_the_longest_branch_takes_none(llama, asking):
    asking(repetition_penalty=1.2)
    draft = small_model("llama", num_hidden_layers=1)
    with pytest.raises(
        ValueError, match=r"longest_branch.*generation_config asks for .*RepetitionPenaltyLogitsProcessor"
    ):
        generate(llama, torch.tensor([[5, 6]]), MultiCandidate(draft), max_new_tokens=2, rule="longest_branch")


def test_a_config_for_a_model_that_is_not_transformers():
    from support.generation import Decoder

    with pytest.raises(TypeError, match="generation_config must be None for Decoder"):
        generate(Decoder(), torch.tensor([[5]]), max_new_tokens=1, generation_config=GenerationConfig())
