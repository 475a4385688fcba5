"""docs/guide/reinforcement.md: its loop runs on a tiny model and learns, and its importance weights are exact."""

import pytest
import torch
from support.code_blocks import blocks_of, run_blocks

pytest.importorskip("transformers")

from support.paths import ROOT
from support.small_models import VOCABULARY, prompts, small_model

PAGE = ROOT / "docs/guide/reinforcement.md"

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="an sdist has no docs")


def test_the_loop_learns_and_its_weights_are_exact():
    model = small_model("llama").requires_grad_(True)
    ids = prompts(2, 5)[0]
    names = dict(model=model, prompts=ids, reward=lambda tokens: (tokens < VOCABULARY // 2).float().mean().item())
    (block,) = [block for block in blocks_of(PAGE) if block[0] == "python"]
    run_blocks(PAGE, [block], names)
    assert names["means"][-1] > names["means"][0] + 0.2

    texts, again = names["rollout"](7), names["rollout"](7)
    assert torch.equal(texts.sequences, again.sequences) and len(set(texts.lengths)) >= 1
    with torch.no_grad():
        for ratio in names["log_ratios"](texts):
            assert ratio.abs().max() < 1e-4
        changed = small_model("llama", seed=1)
        model.load_state_dict(changed.state_dict())
        for b, ratio in enumerate(names["log_ratios"](texts)):
            assert torch.allclose(ratio, by_hand(model, texts, b, ids.shape[1]), atol=1e-4)


@torch.no_grad()
def by_hand(model, texts, b, start):
    """The log ratios of a text, token by token, in float64."""
    wanted, at, support = [], 0, texts.support[b]
    for i in range(texts.lengths[b]):
        ids = support.ids[at : at + support.counts[i]].long()
        at += int(support.counts[i])
        law = (model(texts.sequences[b : b + 1, : start + i]).logits[0, -1, ids].double() / 0.8).log_softmax(0)
        (place,) = (ids == texts.sequences[b, start + i]).nonzero()[0]
        wanted.append(law[place].float() - texts.logprobs[b].processed[i])
    return torch.stack(wanted)
