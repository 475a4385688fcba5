"""Rows that the device chooses at each place: texts of plain decoding, rows within their number, counts, ends, and steps
without a host read."""

import pytest
import torch

pytest.importorskip("transformers")

from support.generation import Mixer, NoHostReads, slots_for
from support.small_models import VOCABULARY, ragged_prompts, small_model, whole_prompts

from pass_ext import LookaheadEmbedding, NGram, PaSS, Plain, Session, Tree, generate
from pass_ext.decoding.loop.device_step import DeviceStep
from pass_ext.drafting import SyntheticAcceptance

ENDS = [5, 6, 7]
GREEDY, WARM = dict(), dict(temperature=0.8, seeds=31)
MIXED = dict(temperature=[0.0, 0.8, 1.2, 0.5], top_k=[0, 20] * 2, top_p=0.9, min_p=0.01, seeds=range(4))


def counts_of(result):
    stats = result.stats
    return stats.acceptance_histogram, stats.num_draft_tokens, stats.model_calls


@pytest.fixture
def chosen(monkeypatch):
    """The steps' rows, all of them and those that are nodes, of the requests of a test."""
    shapes, move = [], DeviceStep._next

    def spy(self, *arguments):
        move(self, *arguments)
        if self._rates is not None:
            shapes.append(self.report[:, 3:5].tolist())

    monkeypatch.setattr(DeviceStep, "_next", spy)
    return shapes


@pytest.mark.parametrize("law", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("rows", [8, 13])
def test_one_text_is_that_of_plain_decoding(llama, chosen, rows_called, law, rank, rows):
    method = PaSS(slots_for(llama, rank=rank), rows=rows)
    for seed in range(3):
        ids = whole_prompts(1, seed=seed)
        for length in (1, 2, 3, 20):
            options = dict(max_new_tokens=length, eos_token_id=[], **law)
            plain = generate(llama, ids, Plain(), **options)
            rows_called.clear()
            chosen.clear()
            ours = generate(llama, ids, method, **options)
            assert torch.equal(plain.sequences, ours.sequences)
            waiting = generate(llama, ids, method, session=Session(llama, run_ahead=False), **options)
            stats = ours.stats
            assert torch.equal(waiting.sequences, ours.sequences)
            assert counts_of(waiting) == counts_of(ours), "the host's steps have the same rows"
            assert stats.ahead_calls == stats.model_calls - 1 == len(chosen) - 1
            used, nodes = zip(*(step[0] for step in chosen[:-1]), strict=True) if len(chosen) > 1 else ((), ())
            called = rows_called[1 : 1 + len(used)]
            assert tuple(called) == used, "each call has the rows in use"
            assert rows_called[len(rows_called) // 2 + 1 :][: len(used)] == called
            assert stats.num_draft_tokens == sum(nodes) - len(nodes) and max(used, default=0) <= rows
            if length > 1:
                assert chosen[-1][0] == [1, 1] or stats.tokens == length


@pytest.mark.parametrize("ahead", [None, True], ids=["rows in use", "all rows"])
@pytest.mark.parametrize("law", [GREEDY, WARM, MIXED], ids=["greedy", "warm", "mixed"])
@pytest.mark.parametrize("rank", [0, 3])
def test_batches_with_ragged_ends(llama, chosen, rows_called, law, rank, ahead):
    """About three in a hundred tokens end a text. Where the host has read the step before, each call has the rows in use of the
    texts that go on."""
    ids, mask = ragged_prompts(4)
    method, shapes = PaSS(slots_for(llama, rank=rank), rows=11), set()
    for tokens in (1, 2, 5, 25):
        options = dict(attention_mask=mask, eos_token_id=ENDS, max_new_tokens=tokens, **law)
        plain = generate(llama, ids, Plain(), **options)
        rows_called.clear()
        chosen.clear()
        ours = generate(llama, ids, method, session=Session(llama, run_ahead=ahead), **options)
        assert torch.equal(plain.sequences, ours.sequences) and plain.lengths == ours.lengths
        assert ours.stats.ahead_calls == ours.stats.model_calls - 1
        for called, step in zip(rows_called[1:], chosen, strict=False):
            assert called == 4 * 11 if ahead else called <= sum(used for used, _ in step)
        shapes |= {tuple(shape) for step in chosen for shape in step}
        if not ahead:
            waiting = generate(llama, ids, method, session=Session(llama, run_ahead=False), **options)
            assert torch.equal(plain.sequences, waiting.sequences) and counts_of(waiting) == counts_of(ours)
    assert len(shapes) > 4


def test_a_text_that_has_ended_has_no_rows(llama, chosen, rows_called):
    ids, mask = ragged_prompts(2)
    options = dict(attention_mask=mask, max_new_tokens=25)
    whole = generate(llama, ids, Plain(), eos_token_id=[], **options)
    end = whole.sequences[0, ids.shape[1] + 4].item()
    assert end not in whole.sequences[1, ids.shape[1] :].tolist()
    rows_called.clear()
    got = generate(llama, ids, PaSS(slots_for(llama), rows=11), eos_token_id=[end], **options)
    assert got.lengths[0] <= 5 and got.lengths[1] == 25
    for called, (_, second) in zip(rows_called[-4:], chosen[-5:-1], strict=True):
        assert called == second[0]


def test_streamers_and_criteria_see_the_same(llama, chosen):
    class Streamer:
        def __init__(self):
            self.seen = []

        def put(self, tokens):
            self.seen += tokens.flatten().tolist()

        def end(self):
            self.seen.append("end")

    ids = whole_prompts(1)
    found = []
    for method in (Plain(), PaSS(slots_for(llama), rows=9)):
        streamer, calls = Streamer(), []

        def stop(tokens, scores, calls=calls):
            calls.append(tokens.shape[1])
            return len(calls) > 11

        result = generate(llama, ids, method, max_new_tokens=30, eos_token_id=[], streamer=streamer, stopping=stop)
        found.append((result.sequences.tolist(), streamer.seen, calls))
    assert found[0] == found[1] and chosen


def test_candidates_that_come_true(llama, chosen, monkeypatch):
    """Slots that offer the text itself: blocks are accepted, also after nodes that have no slots of their own."""
    import pass_ext.decoding.loop.device_step as module

    ids = whole_prompts(1)
    plain = generate(llama, ids, Plain(), max_new_tokens=40, eos_token_id=[])
    future, op, lasts = plain.sequences[0].tolist(), module.next_tree_, []

    def seer(rows, parents, lengths, *rest, offered=None, scores=None, first=0, **more):
        last = int(more["path"][0, more["num_accepted"][0]])
        if offered is not None:
            depths = (rows[2, 0] - (lengths[0] - 1)).tolist()
            for row in range(
                offered.shape[1]
            ):  # a slot after a node at depth d, slot j, predicts the token d + j + 2 after
                place = int(lengths[0]) + depths[first + row]
                if rows[0, 0, first + row] < 0 and place < len(future):
                    offered[0, row, 0] = future[place]
                    scores[0, row] -= 1.5
                    scores[0, row, 0] = -0.4
            lasts.append((last, bool((parents[0] == last)[first:].any() and (rows[0, 0] == -1).any())))
        op(rows, parents, lengths, *rest, offered=offered, scores=scores, first=first, **more)

    monkeypatch.setattr(module, "next_tree_", seer)
    got = generate(llama, ids, PaSS(slots_for(llama), rows=10), max_new_tokens=40, eos_token_id=[])
    assert torch.equal(got.sequences, plain.sequences)
    assert got.stats.mean_acceptance_length > 2, got.stats
    assert any(last > 0 for last, _ in lasts)


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (4, {}),
        (65, {}),
        (8, dict(tree=Tree.chain(1))),
        (8, dict(passes=2)),
        (8, dict(ngram=NGram())),
        (8, dict(rule="rejection", temperature=1.0)),
        (8, dict(rule=SyntheticAcceptance(0.7))),
        (8, dict(run_ahead=False)),
        (8, dict(logprobs=0)),
    ],
    ids=str,
)
def test_other_generations_follow_their_plan(llama, chosen, rows, options):
    asked = {name: options[name] for name in options if name not in ("tree", "passes", "ngram")}
    method = PaSS(slots_for(llama), rows=rows, **{name: options[name] for name in options.keys() - asked.keys()})
    session = Session(llama, run_ahead=asked.pop("run_ahead", None))
    generate(llama, whole_prompts(1), method, max_new_tokens=8, session=session, **asked)
    assert not chosen


# ---- no host read ----


@pytest.mark.parametrize("law", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("rank", [0, 3])
def test_a_step_reads_nothing_on_the_host(llama, monkeypatch, law, rank):
    """And every step is the same ops: outside the model one for the rows' tree, and those of a fixed step."""
    step, modes = DeviceStep._run, []

    def run(self):
        with NoHostReads.guarded(monkeypatch) as mode:
            step(self)
        modes.append(mode)

    ids, mask = ragged_prompts(3)
    method = PaSS(slots_for(llama, rank=rank), rows=9)
    monkeypatch.setattr(DeviceStep, "_run", run)
    model = Mixer("cpu")
    session = Session(model, run_ahead=True)
    generate(model, ids, method, max_new_tokens=12, attention_mask=mask, session=session, **law)
    steps = modes[2:]  # the first two are not recorded: a model shows in them what its Python does
    assert len(steps) > 1 and all(mode.ops == steps[0].ops for mode in steps)
    ours = [op.split(".")[1] for op in steps[0].ops if op.startswith("pass_ext.")]
    around = [op for op in ours if op in ("tree_prepare", "accept_tree", "cache_commit_", "draft_sample", "next_tree_")]
    assert around == ["tree_prepare", "accept_tree", "cache_commit_", "draft_sample", "next_tree_"]


@pytest.mark.parametrize("graphs", [False, True, None])
@pytest.mark.parametrize("law", [GREEDY, WARM], ids=["greedy", "warm"])
def test_steps_on_a_gpu_are_one_graph(cuda, law, graphs):
    model = small_model("llama").to(cuda.device)
    ids, mask = (x.to(cuda.device) for x in ragged_prompts(4))
    method = PaSS(slots_for(model, rank=3), rows=11)
    options = dict(max_new_tokens=25, attention_mask=mask, eos_token_id=ENDS, **law)
    plain = generate(model, ids, Plain(), **options)
    session = Session(model, cuda_graphs=graphs)
    first = generate(model, ids, method, session=session, **options)
    assert torch.equal(plain.sequences, first.sequences) and first.stats.ahead_calls > 0
    again = generate(model, ids, method, session=session, **options)
    assert torch.equal(plain.sequences, again.sequences)
    assert bool(session.fixed_steps) == (graphs is not False)


def test_on_every_backend(backend):
    """The kernels of each, in a loop that runs ahead."""
    ids, mask = (x.to(backend.device) for x in ragged_prompts(3, longest=7))
    slots = LookaheadEmbedding(2, 64, rank=3, vocabulary=VOCABULARY).to(backend.device)
    for parameter in slots.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    for law in (GREEDY, dict(WARM, seeds=3)):
        options = dict(max_new_tokens=6, attention_mask=mask, eos_token_id=ENDS, **law)
        model = Mixer(backend.device)
        plain = generate(model, ids, Plain(), session=Session(model, run_ahead=False), **options)
        got = generate(model, ids, PaSS(slots, rows=8), session=Session(model, run_ahead=True), **options)
        assert torch.equal(plain.sequences, got.sequences)
