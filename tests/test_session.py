"""Sessions between generations: what a text leaves behind, and what a generation may start from."""

import pytest
import torch

pytest.importorskip("transformers")

from small_models import small_model

from pass_ext import NGram, generate

IDS = torch.tensor([[5, 6, 7, 8, 9], [5, 6, 7, 8, 5]])


@pytest.fixture(scope="module")
def llama():
    return small_model("llama")


@pytest.fixture(scope="module")
def whole(llama):
    return generate(llama, IDS, max_new_tokens=12, eos_token_id=[]).sequences


def test_a_session_holds_all_but_the_last_token(llama, whole, monkeypatch):
    """Texts that end inside of an accepted block too: they end by a criterion, at 11 and at 9 tokens."""
    from pass_ext.decoding.drafting import NGramIndex

    texts = iter(whole.tolist() * 99)
    monkeypatch.setattr(
        NGramIndex, "proposals", lambda self, tokens, branches, text=texts: [next(text)[len(self) :][:tokens]]
    )
    ends = {11: whole[0, :11], 9: whole[1, :9]}

    def stopping(text, scores):
        end = ends.get(text.shape[1])
        return end is not None and torch.equal(text[0], end)

    got = generate(llama, IDS, NGram(tokens=6), max_new_tokens=12, eos_token_id=[], stopping=stopping, keep_cache=True)
    assert got.lengths == (6, 4) and got.stats.model_calls == 2, "both ended inside of one block"
    assert got.session.prefix_lens.tolist() == [10, 8]
