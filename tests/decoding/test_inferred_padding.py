"""``generate`` without attention_mask: padding as transformers infers it from pad_token_id. And its warning for long texts."""

import logging
import warnings

import pytest
import torch

transformers = pytest.importorskip("transformers")

from support.generation import Decoder  # noqa: E402
from support.small_models import VOCABULARY, ragged_prompts, small_model  # noqa: E402

from pass_ext import NGram, custom_generate, generate  # noqa: E402

NEW = 6


def of_transformers(model, ids, **options):
    return model.generate(ids, max_new_tokens=NEW, do_sample=False, **options)


def ours(model, ids, pad_token_id=None, **options):
    """The texts, and the warnings."""
    if pad_token_id is not None:
        own = {"eos_token_id": model.generation_config.eos_token_id, "pad_token_id": pad_token_id}
        options["generation_config"] = transformers.GenerationConfig(**own)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = generate(model, ids, NGram(shortest=1), max_new_tokens=NEW, **options)
    return result.sequences, [str(w.message) for w in caught if "generate: " in str(w.message)]


@pytest.mark.parametrize("pad", [None, 0, 9], ids=["the model's", "0", "9"])
@pytest.mark.parametrize("end", [None, [5, 6]], ids=["the model's end", "ends"])
def test_padding_is_inferred_as_in_transformers(llama, pad, end):
    """llama's own: pad 0, end 2."""
    ids, mask = ragged_prompts(4, longest=9, seed=2)
    ids = ids.where(ids != 9, 10).where(mask == 1, pad or 0)
    options = {} if pad is None else {"pad_token_id": pad}
    options |= {} if end is None else {"eos_token_id": end}
    text, said = ours(llama, ids, **options)
    assert torch.equal(text, of_transformers(llama, ids, **options)) and said == []
    assert torch.equal(text, ours(llama, ids, attention_mask=mask, **options)[0])
    one, _ = ours(llama, ids[:1], **options)
    assert torch.equal(one, of_transformers(llama, ids[:1], **options))


def test_a_given_mask_counts(llama):
    ids, mask = ragged_prompts(4, longest=9, seed=2)
    text, _ = ours(llama, ids, attention_mask=torch.ones_like(mask))
    assert torch.equal(text, of_transformers(llama, ids, attention_mask=torch.ones_like(mask)))
    assert not torch.equal(text, ours(llama, ids)[0])


def test_a_pad_id_inside_a_text_is_left_out_as_in_transformers_and_warned_of(llama):
    ids, _ = ragged_prompts(4, longest=9, seed=2)
    ids[2, -3] = 0
    text, said = ours(llama, ids)
    assert torch.equal(text, of_transformers(llama, ids))
    assert len(said) == 1 and "pad_token_id (0)" in said[0] and "prompt 2 has it between its tokens" in said[0]
    assert torch.equal(text[:, : ids.shape[1]], ids)


@pytest.mark.parametrize("pad", [2, None], ids=["given", "unset"])
def test_an_end_token_is_no_padding(pad):
    model = small_model("llama")
    model.generation_config.pad_token_id = None
    ids, mask = ragged_prompts(4, longest=9, seed=2)
    ids = ids.where(mask == 1, 2)
    options = {} if pad is None else {"pad_token_id": pad}
    text, said = ours(model, ids, **options)
    assert torch.equal(text, of_transformers(model, ids, **options))
    assert len(said) == 1 and "pad_token_id (2), which ends texts too, so it is read as text" in said[0]
    assert ours(model, ids, attention_mask=torch.ones_like(mask), **options)[1] == []
    assert ours(model, ids[:1], **options)[1] == []
    # A caller who gives no ends means whole texts, not other prompts.
    whole, _ = ours(model, ids, eos_token_id=[], **options)
    assert torch.equal(whole, ours(model, ids, eos_token_id=[], attention_mask=torch.ones_like(mask), **options)[0])


def test_no_pad_id_is_no_padding(llama):
    """A model of the caller's own has none: token 0 is text."""
    ids = torch.tensor([[0, 0, 7], [5, 0, 7]])
    text, said = ours(Decoder(), ids)
    assert torch.equal(text, ours(Decoder(), ids, attention_mask=torch.ones_like(ids))[0]) and said == []
    with pytest.raises(ValueError, match=r"prompt 1 has no tokens but pad_token_id \(3\); give attention_mask"):
        ours(llama, torch.tensor([[3, 4], [3, 3]]), pad_token_id=3)


@pytest.mark.parametrize(("new", "warns"), [(4, 0), (5, 0), (6, 1), (9, 1)])
def test_a_text_after_the_models_positions_is_warned_of_once_like_in_transformers(new, warns, monkeypatch):
    """At 12 positions and a prompt of 8 tokens; the model never reads the last new one."""
    ids = torch.randint(3, VOCABULARY, (1, 8))

    def said(call):
        transformers.generation.stopping_criteria.logger.warning_once.cache_clear()
        caught, logger = [], logging.getLogger("transformers.generation.stopping_criteria")
        monkeypatch.setattr(logger, "handle", caught.append)
        for _ in range(2):
            call()
        return [record.getMessage() for record in caught]

    model = small_model("llama", max_position_embeddings=12)
    options = dict(max_new_tokens=new, eos_token_id=None)
    theirs = said(lambda: model.generate(ids, do_sample=False, pad_token_id=0, **options))
    assert len(theirs) == warns
    assert said(lambda: generate(model, ids, **options | {"eos_token_id": []})) == theirs
    custom = dict(options, do_sample=False, pad_token_id=0, custom_generate=custom_generate())
    assert said(lambda: model.generate(ids, **custom)) == theirs
