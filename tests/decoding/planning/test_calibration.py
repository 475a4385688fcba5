"""Hit rates of a draft model, against counts from following every path step by step."""

import copy
from types import SimpleNamespace

import pytest
import torch
from support.small_models import VOCABULARY, small_model

from pass_ext import Tree
from pass_ext.decoding.models.any_model import packed_model
from pass_ext.decoding.planning import calibration
from pass_ext.decoding.planning.calibration import calibrate
from pass_ext.decoding.planning.plan import Costs, plan_step
from pass_ext.decoding.session.session import Session
from pass_ext.tree import pack_trees

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def target():
    return small_model("llama", seed=1)


def with_noise(model, noise, dtype=torch.float32):
    draft = small_model("llama", seed=1)
    generator = torch.Generator().manual_seed(5)
    for noisy, whole in zip(draft.parameters(), model.parameters(), strict=True):
        noisy.copy_(whole + noise * whole.std() * torch.randn(whole.shape, generator=generator))
    return draft.to(dtype)


@pytest.fixture(scope="module")
def texts(target):
    """Random prompts of 1 to 5 tokens with the target's greedy continuations; the last two are short."""
    generator = torch.Generator().manual_seed(3)
    texts = []
    for prompt, new in ((1, 40), (5, 25), (3, 33), (2, 0), (1, 0)):
        text = torch.randint(3, VOCABULARY, (prompt,), generator=generator).tolist()
        for _ in range(new):
            text.append(int(target(torch.tensor([text])).logits[0, -1].argmax()))
        texts.append(text)
    texts[-1] = [0]  # the lowest token
    return texts


def counted_by_following(model, draft, texts, ranks, levels, starts=None):
    """The rates, step by step from every root: ranks the target's greedy token among the draft's, and goes on while the text
    agrees with both."""
    counts = [[0] * (ranks + 1) for _ in range(levels)]
    for text, start in zip(texts, starts or [1] * len(texts), strict=True):
        greedy = model(torch.tensor([text])).logits[0].argmax(-1).tolist()
        ids = torch.tensor([text])
        logits = [dict(enumerate(row)) for row in draft(ids).logits[0].float().tolist()]
        for root in range(start - 1, len(text)):
            for level, place in enumerate(range(root, min(root + levels, len(text)))):
                known = {token: logit for token, logit in logits[place].items() if token < VOCABULARY}
                order = sorted(known, key=lambda token: (-known[token], token))[:ranks]
                right = greedy[place]
                counts[level][order.index(right) if right in order else ranks] += 1
                if right not in order or place + 1 == len(text) or text[place + 1] != right:
                    break
    return [[count / max(sum(row), 1) for count in row[:ranks]] for row in counts]


def same(found, expected, tolerance=1e-5):
    return torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=0, atol=tolerance)


@pytest.mark.parametrize(("ranks", "levels"), [(3, 4), (1, 2), (8, 6), (VOCABULARY + 5, 50)])
def test_rates_equal_counts_along_every_path(target, texts, ranks, levels, monkeypatch):
    monkeypatch.setattr(calibration, "_ROWS", 16)  # texts in several calls
    draft = with_noise(target, 0.25)
    found = calibrate(target, draft, texts, ranks=ranks, levels=levels)
    assert len(found) == levels and {len(row) for row in found} == {ranks}
    assert same(found, counted_by_following(target, draft, texts, ranks, levels))
    assert 0.1 < found[0][0] < 0.95
    if ranks > VOCABULARY:
        assert sum(found[0]) == pytest.approx(1, abs=1e-3) and not any(found[-1])


def test_the_target_is_its_own_best_draft(target, texts):
    found = calibrate(target, target, texts, ranks=2, levels=3)
    assert found == ((1.0, 0.0),) * 3
    assert plan_step(found, 64, Costs(lambda rows: 1.0, lambda rows: 0.01)).tree == Tree.chain(3)


def test_steps_begin_after_the_prompts(target, texts):
    draft, starts = with_noise(target, 0.25), [1, 5, 3, 2, 1]
    found = calibrate(target, draft, texts, ranks=3, levels=4, prompt_lengths=starts)
    assert same(found, counted_by_following(target, draft, texts, 3, 4, starts))
    assert found != calibrate(target, draft, texts, ranks=3, levels=4)


def test_a_path_ends_where_the_text_is_not_the_targets(target, texts):
    others = torch.randint(3, VOCABULARY, (30,), generator=torch.Generator().manual_seed(9)).tolist()
    found = calibrate(target, target, [others], ranks=1, levels=3)
    assert found[0] == (1.0,) and found[1] in ((0.0,), (1.0,))
    draft = with_noise(target, 0.25)
    mixed = [[*texts[0][:20], *others, *texts[1]]]
    assert same(calibrate(target, draft, mixed, levels=3), counted_by_following(target, draft, mixed, 8, 3))


class InSession:
    """A model's logits of a whole text, from the layers that ``calibrate`` calls. Eager layers round differently in bfloat16,
    which swaps near ties; how many depends on the processor."""

    def __init__(self, model):
        self._model = packed_model(model)

    def __call__(self, ids):
        with torch.no_grad(), self._model.attached():
            session = Session(self._model, 1, ids.shape[1])
            return SimpleNamespace(logits=session.call(pack_trees([Tree.chain(ids.shape[1] - 1)]), ids[0])[None])


def test_a_draft_in_bfloat16(target, texts):
    draft = with_noise(target, 0.25, torch.bfloat16)
    rates = calibrate(target, draft, texts, ranks=4, levels=3)
    assert same(rates, counted_by_following(target, InSession(draft), texts, 4, 3))
    assert sum(rates[0]) > 0.3


def padded(model, vocabulary):
    """The model with its vocabulary cut or padded to so many tokens; the new tokens are the likeliest of all."""
    model = copy.deepcopy(model)
    table, weight = model.get_input_embeddings().weight.data, model.get_output_embeddings().weight.data
    new = torch.zeros(max(0, vocabulary - VOCABULARY), table.shape[1])
    head = torch.nn.Linear(table.shape[1], vocabulary)
    head.weight.data = torch.cat([weight, new])[:vocabulary]
    head.bias.data = torch.full((vocabulary,), 1e4).masked_fill(torch.arange(vocabulary) < VOCABULARY, 0.0)
    model.set_input_embeddings(torch.nn.Embedding.from_pretrained(torch.cat([table, new])[:vocabulary]))
    model.set_output_embeddings(head)
    model.config.vocab_size = vocabulary
    return model


def test_vocabularies_that_differ_by_padding(target, texts):
    draft = with_noise(target, 0.25)
    found = calibrate(target, draft, texts, ranks=4, levels=3)
    assert calibrate(target, padded(draft, VOCABULARY + 31), texts, ranks=4, levels=3) == found
    shorter = max(map(max, texts)) + 1  # a token of the target beyond it would be a miss
    cut = calibrate(target, padded(draft, shorter), texts, ranks=4, levels=3)
    assert len(cut) == 3 and sum(cut[0]) > 0.3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(texts=[]), "at least one text"),
        (dict(texts=[[5], []]), "text 1 holds no tokens"),
        (dict(texts=[[5, VOCABULARY]]), f"ids from 0 to {VOCABULARY - 1}.* text 0 holds the id {VOCABULARY}"),
        (dict(ranks=0), "ranks must be"),
        (dict(levels=0), "levels must be"),
        (dict(prompt_lengths=[2]), "prompt_lengths must be a number from 1"),
        (dict(prompt_lengths=[1, 1]), "prompt_lengths must be"),
    ],
)
def test_calibration_refuses(target, changes, message):
    with pytest.raises(ValueError, match=message):
        calibrate(target, target, **(dict(texts=[[5]]) | changes))
    assert torch.is_grad_enabled()
