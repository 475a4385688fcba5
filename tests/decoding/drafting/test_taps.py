"""Hidden states for drafters: ``batch.hidden`` has those of a plain forward of transformers, of every token that has become
text, once and in order, whatever was drafted and however the model is run."""

import random

import pytest
import torch

pytest.importorskip("transformers")

from support.generation import adapter_for, unpadded
from support.recorded import PauseAt
from support.small_models import prompts, ragged_prompts, small_model, whole_prompts

import pass_ext
from benchmarks.architectures.models import tiny_model
from pass_ext import EarlyExitDraft, Plain, Session, Speculative, generate
from pass_ext.decoding.models.taps import Taps
from pass_ext.drafting import Candidates, Proposal, drafters_of

pytestmark = pytest.mark.usefixtures("one_thread")

LIMITS = dict(max_new_tokens=12, eos_token_id=[])


class Reader(pass_ext.Drafter):
    """Collects what it sees; drafts chains of which some tokens are right."""

    name, max_depth = "reader", 4

    def __init__(self, taps, futures=None, pause=(), known=None):
        self.taps, self.futures, self.pause, self.known = taps, futures, pause, known or 0
        self.seen, self.ends, self.steps = [], [], 0

    def propose(self, batch):
        assert len(batch.hidden) == (len(batch.texts) if self.taps else 0)
        self.seen = self.seen or [[] for _ in batch.texts]
        for seen, states in zip(self.seen, batch.hidden or [torch.empty(0)] * len(batch.texts), strict=True):
            seen.append(states)
        if self.taps:  # all tokens but the last, whose row is still to come
            counts = [len(text) - 1 - self.known for text in batch.texts]
            assert [sum(map(len, seen)) for seen in self.seen] == counts
        self.steps += 1
        found = []
        for b, (text, levels) in enumerate(zip(batch.texts, batch.levels, strict=True)):
            chain = [] if self.futures is None or self.steps in self.pause else self.chain(b, text)[:levels]
            found.append(Candidates.from_chains([chain]) if chain else None)
        return Proposal(found)

    def chain(self, b, text):
        future, draw = self.futures[b][len(text) :][: self.max_depth], random.Random(len(text))
        return [token if draw.random() < 0.7 else (token + 1) % 50 for token in future]

    def states(self, b):
        return torch.cat(self.seen[b])


class Readers:
    """A method of these drafters, and of those of another method."""

    def __init__(self, *readers, beside=None):
        self.readers, self.beside = readers, beside

    def drafters(self, context):
        more = [] if self.beside is None else drafters_of(self.beside, context)
        return [*more, *self.readers]


def expected_states(model, text, taps):
    """Those of one forward of transformers on the whole text but its last token."""
    decoder, kept, layers = model.get_decoder(), {}, model.config.get_text_config().num_hidden_layers

    def keep_input(place):
        return lambda module, inputs, named: kept.__setitem__(
            place, (inputs[0] if inputs else named["hidden_states"])[0]
        )

    def keep_output(place):
        return lambda module, inputs, out: kept.__setitem__(
            place, (out if isinstance(out, torch.Tensor) else out[0])[0]
        )

    hooks = [layer.register_forward_pre_hook(keep_input(i), with_kwargs=True) for i, layer in enumerate(decoder.layers)]
    hooks.append(decoder.layers[-1].register_forward_hook(keep_output(layers)))
    hooks.append(decoder.register_forward_hook(keep_output("last")))
    with torch.no_grad():
        model(torch.tensor([text[:-1]]))
    for hook in hooks:
        hook.remove()
    return torch.stack([kept[place] for place in taps], dim=1)


def check(model, ids, mask, taps, known=None, beside=None, tolerance=2e-5, **options):
    """Generates with a reader: texts are Plain's, states those of a plain forward -> the reader and the texts."""
    plain = generate(model, ids, Plain(), attention_mask=mask, **LIMITS, **options).sequences
    texts = unpadded(plain, mask.repeat_interleave(len(plain) // len(mask), 0))
    reader = Reader(taps, texts, pause=(3, 4), known=known)
    found = generate(model, ids, Readers(reader, beside=beside), attention_mask=mask, **LIMITS, **options)
    assert torch.equal(found.sequences, plain)
    assert found.stats.tokens_per_call > 1
    for b, text in enumerate(texts):
        states, wanted = reader.states(b), expected_states(model, text, taps)
        torch.testing.assert_close(states, wanted[: len(states)], rtol=tolerance, atol=tolerance)
        assert len(states) >= len(text) - 1 - reader.max_depth - 1
    return reader, texts


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3"])
def test_states_are_those_of_a_plain_forward(family):
    """By our own forward after the first steps; Gemma's embeddings are multiplied in front of layer 0."""
    model = small_model(family)
    check(model, *prompts(1, 9), [model.config.num_hidden_layers, 1, "last", 0])


@pytest.mark.parametrize(
    "options", [{}, dict(temperature=0.9, seeds=3), dict(rule="rejection", temperature=0.9, seeds=3)]
)
@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_states_of_steps_in_which_drafting_pauses_come_with_the_next_proposal(family, options):
    """The device makes these steps, unless the rule is the host's alone; no drafter is asked in them."""
    model = small_model("llama") if family == "llama" else tiny_model(family)
    ids, _ = prompts(1, 9)
    plain = generate(model, ids, Plain(), **LIMITS, **options).sequences
    reader = Reader([1, "last"], plain.tolist())
    reader.pace = PauseAt((1, 2, 4))
    found = generate(model, ids, Readers(reader), **LIMITS, **options)
    assert reader.steps == reader.pace.step - (0 if "rule" in options else 3) and reader.pace.step > 5
    text = found.sequences[0].tolist()
    assert "rule" in options or text == plain[0].tolist()
    states, wanted = reader.states(0), expected_states(model, text, [1, "last"])
    torch.testing.assert_close(states, wanted[: len(states)], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "gpt_oss"])
def test_ragged_batches(family):
    check(small_model(family), *ragged_prompts(5), [0, "last", 2])


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2"])
def test_layers_that_keep_states(family):
    check(tiny_model(family), *prompts(1, 9), [0, 1, "last"])


def test_both_backends_have_the_same_bits():
    """A hook has the model run as it is."""
    model, (ids, mask) = small_model("llama"), ragged_prompts(3)
    taps = [0, 1, 2, "last"]
    fused, _ = check(model, ids, mask, taps)
    handle = model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    module, _ = check(model, ids, mask, taps)
    handle.remove()
    assert all(torch.equal(fused.states(b), module.states(b)) for b in range(3))


def test_prompts_in_pieces_with_one_beginning():
    """1,100 tokens are read in two pieces, their first 600 once for all three; texts are two of each prompt."""
    model = small_model("llama")
    ids = whole_prompts(3, 1100)
    ids[:, :600] = ids[0, :600]
    check(model, ids, torch.ones_like(ids), [1, "last"], num_return_sequences=2, temperature=0.8, seeds=3)


def test_a_session_that_goes_on():
    """``past`` has no hidden states: those of its tokens are left out."""
    model = small_model("llama")
    first = Session(model, capacity=100)
    ids = whole_prompts(2, 20)
    text = generate(model, ids, Plain(), session=first, **LIMITS).sequences
    second = Session(model, capacity=100, past=([(k[:, :25], v[:, :25]) for k, v in first.caches], 25))
    futures = generate(model, text, Plain(), **LIMITS).sequences.tolist()
    reader = Reader([1, "last"], futures, known=25)
    found = generate(model, text, Readers(reader), session=second, **LIMITS)
    assert found.sequences.tolist() == futures
    for b in range(2):
        wanted = expected_states(model, futures[b], [1, "last"])[25:]
        torch.testing.assert_close(reader.states(b), wanted[: len(reader.states(b))], rtol=2e-5, atol=2e-5)
    again = Reader([0], futures)
    generate(model, ids, Readers(again), session=second, **LIMITS)  # the session's texts begin anew, and its taps
    torch.testing.assert_close(again.states(0)[:20, 0], model.get_input_embeddings()(ids[0]))
    assert generate(model, ids, Plain(), session=second, **LIMITS).sequences.tolist() == text.tolist()
    assert second.text_states is None


def test_each_drafter_sees_its_own_taps_beside_an_early_exit():
    model = small_model("llama")
    ids, mask = ragged_prompts(3)
    texts = unpadded(generate(model, ids, Plain(), attention_mask=mask, **LIMITS).sequences, mask)
    readers = Reader(["last", 0], texts), Reader([], texts), Reader([0, 2], texts)
    exit_draft = Speculative(EarlyExitDraft(model, adapter=adapter_for(model)), 2)
    found = generate(model, ids, Readers(*readers, beside=exit_draft), attention_mask=mask, **LIMITS)
    assert unpadded(found.sequences, mask) == texts
    for b, text in enumerate(texts):
        for reader in (readers[0], readers[2]):
            states, wanted = reader.states(b), expected_states(model, text, reader.taps)
            torch.testing.assert_close(states, wanted[: len(states)], rtol=2e-5, atol=2e-5)


class Decoder:
    """A model of one's own with two layers: rows doubled and tripled."""

    embedding = torch.eye(8, 16)

    def __call__(self, rows, positions, attend, wanted, tap=None):
        for layer, factor in enumerate((2.0, 3.0)):
            if tap is not None:
                tap(layer, rows)
            attend(layer, *[rows[:, None]] * 3)
            rows = rows * factor
        if tap is not None:
            tap(2, rows)
            tap("last", -rows)
        following = torch.eye(8)[(positions + 1) % 3]
        return following if wanted is None else following[wanted]


def test_a_model_of_ones_own():
    reader = Reader([2, 0, "last"], [[0, 1, 2] * 6])
    generate(Decoder(), torch.tensor([[0, 1, 2, 0]]), Readers(reader), **LIMITS)
    states = reader.states(0)
    embeddings = torch.eye(8, 16)[[place % 3 for place in range(len(states))]]
    assert torch.equal(states, torch.stack([6 * embeddings, embeddings, -6 * embeddings], dim=1))


def test_what_cannot_be_tapped_is_refused():
    model, ids = small_model("llama"), whole_prompts(1, 5)
    for place in (3, -1, "first", True):
        with pytest.raises(ValueError, match=f'taps must be numbers from 0 to 2, .* or "last", got {place!r}'):
            generate(model, ids, Readers(Reader([0, place])), **LIMITS)

    class Untapped(Decoder):
        def __call__(self, rows, positions, attend, wanted):
            return super().__call__(rows, positions, attend, wanted)

    with pytest.raises(TypeError, match="give its __call__ a parameter tap"):
        generate(Untapped(), torch.tensor([[0, 1]]), Readers(Reader([0])), **LIMITS)
    with pytest.raises(ValueError, match=r"the model did not come to \[7\] in this call"):
        generate(Decoder(), torch.tensor([[0, 1]]), Readers(Reader([0, 7])), **LIMITS)


def test_without_taps_nothing_is_kept(monkeypatch):
    kept = []
    monkeypatch.setattr(Taps, "take", lambda self, place, rows: kept.append(place))
    model, ids = small_model("llama"), whole_prompts(1, 9)
    future = generate(model, ids, Plain(), **LIMITS).sequences.tolist()
    generate(model, ids, Readers(Reader([], future)), **LIMITS)
    assert kept == []
