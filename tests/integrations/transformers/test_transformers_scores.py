"""output_scores and output_logits through custom_generate: transformers' own rows, for every new token."""

import pytest
import torch

pytest.importorskip("transformers")

from support.generation import Prophet, methods_for, unpadded
from support.small_models import ragged_prompts, small_model
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import pass_ext
from pass_ext import NGram, custom_generate

NEW = 14
OUTPUTS = dict(return_dict_in_generate=True, output_scores=True, output_logits=True)


def run(model, ids, mask, method=None, **options):
    return model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=NEW, pad_token_id=0, custom_generate=method, **options
    )


def lengths_of(sequences, prompt, ends):
    """New tokens of each text, its end included."""
    new = sequences[:, prompt:].tolist()
    return [next((i + 1 for i, token in enumerate(row) if token in ends), len(row)) for row in new]


@pytest.fixture(scope="module")
def bound(llama):
    """Twice the error of the model in fp32 against fp64, twice because a penalty multiplies it; and roundings."""
    exact, errors = small_model("llama").double(), []
    for row, seen in zip(*ragged_prompts(8), strict=True):
        text = row[seen.bool()][None]
        errors.append((llama(text).logits.double() - exact(text).logits).abs().max())
    error = float(torch.stack(errors).max())
    assert 0 < error < 1e-4
    return 4 * error + 1e-5


@pytest.mark.parametrize("name", ["plain", "ngram", "one pass"])
@pytest.mark.parametrize(
    "processors", [{}, {"repetition_penalty": 1.3, "min_new_tokens": 4, "no_repeat_ngram_size": 2}]
)
def test_greedy_rows_are_those_of_transformers(llama, bound, monkeypatch, name, processors):
    ids, mask = ragged_prompts(5)
    options = dict(do_sample=False, **processors)
    texts = run(llama, ids, mask, eos_token_id=None, **options)[:, ids.shape[1] :]
    ends = texts[:2, 6].tolist()  # so some texts end inside a step
    options["eos_token_id"] = ends
    want = run(llama, ids, mask, **OUTPUTS, **options)
    if name == "one pass":
        Prophet(monkeypatch, unpadded(want.sequences, mask))
    loop = custom_generate(methods_for(llama)[name])
    got = run(llama, ids, mask, loop, **OUTPUTS, **options)
    assert torch.equal(got.sequences, want.sequences)
    assert name != "one pass" or loop.stats.num_accepted_tokens > 3
    lengths = lengths_of(got.sequences, ids.shape[1], ends)
    assert min(lengths) < max(lengths)
    for kind in ("scores", "logits"):
        ours, theirs = getattr(got, kind), getattr(want, kind)
        assert isinstance(ours, tuple) and len(ours) == len(theirs) == got.sequences.shape[1] - ids.shape[1]
        for step, (left, right) in enumerate(zip(ours, theirs, strict=True)):
            assert left.shape == right.shape and left.dtype == right.dtype == torch.float32
            lives = torch.tensor(lengths) > step
            torch.testing.assert_close(left[lives], right[lives], rtol=0, atol=bound)
            assert not left[~lives].any()


def test_sampled_scores_went_through_the_warpers(llama, bound):
    """And their log-softmax at the new tokens is what generate(logprobs=0) calls processed."""
    ids, mask = ragged_prompts(3)
    law = dict(temperature=0.7, top_k=30, top_p=0.9, min_p=0.02)
    loop = custom_generate(NGram(shortest=1), seeds=4)
    got = run(llama, ids, mask, loop, **OUTPUTS, do_sample=True, eos_token_id=None, renormalize_logits=True, **law)
    warpers = [TemperatureLogitsWarper(0.7), TopKLogitsWarper(30), TopPLogitsWarper(0.9), MinPLogitsWarper(0.02)]
    for logits, scores in zip(got.logits, got.scores, strict=True):
        expected = logits
        for warper in warpers:
            expected = warper(None, expected)
        torch.testing.assert_close(scores, expected.log_softmax(-1))
        assert scores.isinf().any()
    transitions = llama.compute_transition_scores(got.sequences, got.scores, normalize_logits=True)
    ours = pass_ext.generate(
        llama, ids, max_new_tokens=NEW, attention_mask=mask, seeds=4, eos_token_id=[], logprobs=0, **law
    )
    assert torch.equal(ours.sequences, got.sequences)
    torch.testing.assert_close(
        transitions, torch.stack([part.processed for part in ours.logprobs]), rtol=0, atol=2 * bound
    )


def test_outputs_are_there_only_where_they_are_asked_for(llama):
    ids, mask = ragged_prompts(2)
    options = dict(do_sample=False, eos_token_id=None)
    for name in ("scores", "logits"):
        got = run(
            llama, ids, mask, custom_generate(), return_dict_in_generate=True, **{f"output_{name}": True}, **options
        )
        assert len(getattr(got, name)) == NEW and getattr(got, "logits" if name == "scores" else "scores") is None
    assert isinstance(run(llama, ids, mask, custom_generate(), output_scores=True, **options), torch.Tensor)
    got = run(llama, ids, mask, custom_generate(), return_dict_in_generate=True, **options)
    assert got.scores is None and got.logits is None
