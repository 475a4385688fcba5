"""Steps whose rows the device makes: texts, counts and calls are those of the host's steps, also where the host is a step
after; and a step without a host read."""

import random

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

pytest.importorskip("transformers")

from support.generation import BUSHY, Decoder, Mixer, NoHostReads, slots_for, unpadded
from support.small_models import VOCABULARY, ragged_prompts, small_model, whole_prompts

from pass_ext import (
    Drafter,
    LookaheadEmbedding,
    MultiCandidate,
    NGram,
    PaSS,
    Plain,
    Session,
    Tree,
    draft_sample,
    generate,
)
from pass_ext.decoding.accept import accept_function
from pass_ext.decoding.drafting.candidates import Candidates, Proposal
from pass_ext.decoding.drafting.slot_tokens import SlotTokens, TreeFiller
from pass_ext.decoding.loop import device_step
from pass_ext.decoding.loop.device_step import DeviceStep
from pass_ext.decoding.models.any_model import packed_model
from pass_ext.decoding.sampling import SamplingParams
from pass_ext.drafting import DeviceRows

ENDS = [5, 6, 7]
GREEDY, WARM = dict(), dict(temperature=0.8, seeds=31)
MIXED = dict(temperature=[0.0, 0.8, 1.2, 0.5, 0.0, 1.0], top_k=[0, 20] * 3, top_p=0.9, min_p=0.01, seeds=range(6))


def methods_of(model, deep_layers=2):
    slots, rich = slots_for(model), slots_for(model, rank=3, deep_layers=deep_layers)
    return {
        "plain": Plain(),
        "chain": PaSS(slots, tree=Tree.chain(3).with_lookahead({0: 3, 3: 3}), rows=24),
        "tree": PaSS(slots, tree=BUSHY, rows=24),
        "planned": PaSS(slots, rows=4),
        "chain with transitions": PaSS(rich, tree=Tree.chain(2), rows=24),
        "tree with transitions": PaSS(rich, tree=BUSHY.with_lookahead({0: 4, 2: 4, 7: 4}), rows=24),
    }


METHODS = ("plain", "chain", "tree", "planned", "chain with transitions", "tree with transitions")


def run_ahead(lag):
    """The argument that lets the host be so many steps after: 0 only where one text is the default."""
    return True if lag else None


def both(model, ids, method, lag=1, cuda_graphs=None, **options):
    """The results of the host's steps and of the device's; texts, counts and calls are equal."""
    waiting = generate(model, ids, method, session=Session(model, run_ahead=False), **options)
    session = Session(model, cuda_graphs=cuda_graphs, run_ahead=run_ahead(lag))
    ahead = generate(model, ids, method, session=session, **options)
    assert torch.equal(ahead.sequences, waiting.sequences) and ahead.lengths == waiting.lengths
    assert counts_of(ahead) == counts_of(waiting)
    assert waiting.stats.ahead_calls == waiting.stats.surplus_calls == 0
    assert ahead.stats.ahead_calls == ahead.stats.model_calls - 1, "all but the prompts' call"
    return waiting, ahead


def counts_of(result):
    stats = result.stats
    return stats.acceptance_histogram, stats.num_draft_tokens, stats.model_calls, stats.tokens


class Seer:
    """Candidates that come true often, the same in both loops: a function of request and position. One child of a right node
    is right, four times in five."""

    def __init__(self, monkeypatch, futures):
        self.futures = futures
        seer, op = self, device_step.next_tree_

        def fill(self, slots, requests, roots, positions, text=None):
            drafts = (seer.tokens(self.tree, *place) for place in zip(requests, positions, strict=True))
            return Proposal([Candidates(self.tree, own, groups=self._groups) for own in drafts])

        def next_tree_(rows, parents, lengths, *more, rates, **options):
            op(rows, parents, lengths, *more, rates=rates, **options)
            for b, length in enumerate(lengths.tolist()):
                nodes = int((rows[0, b] >= 0).sum())
                tree = Tree(parents[b, :nodes].tolist())
                if rates is None and nodes > 1 and rows[1, b, 1] >= 0:  # it has candidates
                    rows[1, b, 1:nodes] = torch.tensor(seer.tokens(tree, b, length - 1))
                    rows[0, b, 1:nodes] = rows[1, b, 1:nodes].clamp(min=0)

        monkeypatch.setattr(TreeFiller, "fill", fill)
        monkeypatch.setattr(device_step, "next_tree_", next_tree_)

    def tokens(self, tree, request, position):
        numbers, future, right, tokens = random.Random(f"{request}/{position}"), self.futures[request], {0}, {}
        for node in range(tree.num_nodes):
            children = tree.children(node)
            chosen = numbers.choice(children) if children and numbers.random() < 0.8 else None
            for child in children:
                place = position + tree.depths[child]
                if node in right and child == chosen and place < len(future):
                    tokens[child] = future[place]
                    right.add(child)
                else:
                    tokens[child] = numbers.randrange(VOCABULARY)
        return [tokens[node] for node in range(1, tree.num_nodes)]


@pytest.mark.parametrize("law", [GREEDY, WARM, MIXED], ids=["greedy", "warm", "mixed"])
@pytest.mark.parametrize("name", METHODS)
def test_texts_counts_and_calls_are_those_of_the_hosts_steps(llama, monkeypatch, name, law):
    """Ragged prompts; about three in a hundred tokens end a text. The second time candidates come true."""
    ids, mask = ragged_prompts(6)
    options = dict(attention_mask=mask, eos_token_id=ENDS, max_new_tokens=25, **law)
    waiting, _ = both(llama, ids, methods_of(llama)[name], **options)
    if name == "plain":
        return
    Seer(monkeypatch, unpadded(waiting.sequences, mask))
    seen, ahead = both(llama, ids, methods_of(llama)[name], **options)
    assert torch.equal(seen.sequences, waiting.sequences)
    assert ahead.stats.mean_acceptance_length > 1.5
    assert name == "planned" or sum(ahead.stats.acceptance_histogram[2:]) > 0


@pytest.mark.parametrize("lag", [0, 1])
def test_every_budget(llama, monkeypatch, lag):
    """Texts of 1 to 12 tokens, which end inside of blocks."""
    ids, mask = ragged_prompts(3 if lag else 1)
    method = methods_of(llama)["tree"]
    whole = generate(llama, ids, max_new_tokens=12, attention_mask=mask, eos_token_id=[])
    Seer(monkeypatch, unpadded(whole.sequences, mask))
    for tokens in range(1, 13):
        _, ahead = both(llama, ids, method, lag, max_new_tokens=tokens, attention_mask=mask, eos_token_id=[])
        assert torch.equal(ahead.sequences, whole.sequences[:, : ids.shape[1] + tokens])
        assert ahead.stats.surplus_calls <= lag


def test_a_step_too_many_is_thrown_away(llama):
    """An end token is seen one step late; a length is known beforehand."""
    ids = whole_prompts(1)
    whole = generate(llama, ids, max_new_tokens=12, eos_token_id=[])
    end = whole.sequences[0, -6].item()
    _, ahead = both(llama, ids, Plain(), max_new_tokens=12, eos_token_id=[end])
    assert ahead.stats.surplus_calls == 1 and ahead.lengths[0] < 12
    _, ahead = both(llama, ids, Plain(), max_new_tokens=12, eos_token_id=[])
    assert ahead.stats.surplus_calls == 0 and ahead.stats.model_calls == 12


class Recorder:
    def __init__(self):
        self.calls = []

    def put(self, tokens):
        self.calls.append(("put", tokens.flatten().tolist()))

    def put_step(self, tokens, accepted):
        self.calls.append(("put_step", tokens, accepted))

    def end(self):
        self.calls.append(("end",))


@pytest.mark.parametrize("lag", [0, 1])
def test_streamers_and_stopping_criteria(llama, monkeypatch, lag):
    """The same calls in the same order; a criterion ends texts inside of blocks."""
    ids = whole_prompts(1)
    method = methods_of(llama)["tree"]
    whole = generate(llama, ids, max_new_tokens=20, eos_token_id=[]).sequences
    Seer(monkeypatch, whole.tolist())
    for length in range(ids.shape[1] + 1, ids.shape[1] + 12):
        heard = []
        for ahead in (False, run_ahead(lag)):
            recorder, seen = Recorder(), []

            def stopping(text, scores, seen=seen, length=length):
                seen.append(text.tolist())
                return text.shape[1] >= length

            got = generate(
                llama, ids, method, max_new_tokens=20, eos_token_id=[], streamer=recorder, stopping=stopping,
                session=Session(llama, run_ahead=ahead),
            )  # fmt: skip
            assert torch.equal(got.sequences, whole[:, :length])
            heard.append((recorder.calls, seen, counts_of(got)))
        assert heard[0] == heard[1]


@pytest.mark.parametrize("lag", [0, 1])
def test_sessions(llama, monkeypatch, lag):
    """A session holds all but the last token of each text, also of those that ended early, and serves again."""
    ids, mask = ragged_prompts(6 if lag else 1)
    method = methods_of(llama)["tree with transitions"]
    options = dict(max_new_tokens=16, attention_mask=mask, eos_token_id=ENDS)
    Seer(monkeypatch, unpadded(generate(llama, ids, **options).sequences, mask))
    waits, ahead = Session(llama, run_ahead=False), Session(llama, run_ahead=run_ahead(lag))
    waiting = generate(llama, ids, method, session=waits, **options)
    generate(llama, ids, method, session=ahead, **options)
    lengths = waits.prefix_lens
    assert torch.equal(ahead.prefix_lens, lengths)
    for b, length in enumerate(lengths.tolist()):
        for ours, theirs in zip(ahead.caches, waits.caches, strict=True):
            for x, y in zip(ours, theirs, strict=True):
                torch.testing.assert_close(x[b, :length], y[b, :length])
    again = generate(llama, ids, method, session=ahead, **options)
    assert torch.equal(again.sequences, waiting.sequences)


@pytest.mark.quick_on("best", "emulated")
@pytest.mark.parametrize("law", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("rank", [0, 3])
def test_on_every_backend(backend, rank, law):
    ids, mask = (x.to(backend.device) for x in ragged_prompts(3, longest=7))
    model = Mixer(backend.device)
    slots = LookaheadEmbedding(2, 64, rank=rank, vocabulary=VOCABULARY).to(backend.device)
    for parameter in slots.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    for method in (Plain(), PaSS(slots, tree=Tree.from_branching((2, 1)), rows=9)):
        both(model, ids, method, max_new_tokens=6, attention_mask=mask, eos_token_id=ENDS, **law)


@pytest.mark.parametrize(
    ("method", "options", "reason"),
    [
        (NGram(), {}, "n-gram candidates are drafted on the host"),
        ("two passes", {}, "the root has no look-ahead slots in every step"),
        ("with ngrams", {}, "candidates of 2 drafters meet on the host"),
        (Plain(), dict(logits_processor=lambda ids, scores: scores), "logits processors run on the host"),
        (Plain(), dict(temperature=1.0, rule="rejection"), "rule 'rejection' is not 'coupled'"),
        ("draft model", dict(rule="longest_branch"), "rule 'longest_branch' is not 'coupled'"),
    ],
    ids=lambda value: None if isinstance(value, dict) else str(value),
)
def test_the_host_keeps_what_it_decides(llama, method, options, reason):
    slots = slots_for(llama)
    method = {
        "two passes": PaSS(slots, passes=2, tree=Tree.chain(2), rows=24),
        "with ngrams": PaSS(slots, tree=Tree.chain(2), rows=24, ngram=NGram()),
        "draft model": MultiCandidate(llama, (2,)),
    }.get(method, method)  # fmt: skip
    ids = whole_prompts(1)
    with pytest.raises(ValueError, match=f"Session: run_ahead must be False or None, because {reason}.*, got True"):
        generate(llama, ids, method, max_new_tokens=4, session=Session(llama, run_ahead=True), **options)
    assert generate(llama, ids, method, max_new_tokens=4, **options).stats.ahead_calls == 0


def test_the_default_is_the_step_that_costs_less(llama):
    """On the CPU: the device's for one text, and where rows are chosen at each place."""
    ids, mask = ragged_prompts(2)
    tree = Tree.chain(2).with_lookahead({0: 2, 1: 2, 2: 2})
    slots = slots_for(llama)
    for method, rows, ahead in (
        (Plain(), 1, True),
        (Plain(), 2, False),
        (PaSS(slots, tree=tree, rows=24), 1, True),
        (PaSS(slots, tree=tree, rows=24), 2, False),
        (PaSS(slots, tree=Tree.chain(2).with_lookahead({0: 2, 2: 2}), rows=24), 1, True),
        (PaSS(slots, rows=8), 2, True),
        (NGram(), 1, False),
    ):
        got = generate(llama, ids[:rows], method, max_new_tokens=5, attention_mask=mask[:rows])
        assert (got.stats.ahead_calls > 0) == ahead, (method, rows)


def test_a_text_that_has_ended_rests(llama, monkeypatch):
    """The device learns of the end: its rows stay, and its length and caches are left alone."""
    ids, mask = ragged_prompts(2)
    whole = generate(llama, ids, max_new_tokens=30, attention_mask=mask, eos_token_id=[])
    end = whole.sequences[0, ids.shape[1] + 2].item()
    assert end not in whole.sequences[1, ids.shape[1] :].tolist()
    lengths, advance = [], DeviceStep._advance

    def recorded(self, *arguments):
        advance(self, *arguments)
        lengths.append(self._lengths.tolist())

    monkeypatch.setattr(DeviceStep, "_advance", recorded)
    session = Session(llama, run_ahead=True)
    got = generate(llama, ids, max_new_tokens=30, attention_mask=mask, eos_token_id=[end], session=session)
    assert got.lengths[0] < 5 and got.lengths[1] == 30
    prompts = mask.sum(1).tolist()
    assert lengths[-1] == [prompts[0] + got.lengths[0] + 1, prompts[1] + 30], "one token after the end, and no more"


class FromOutside(Drafter):
    """Not a drafter of the package; its slots' logits alone rank the tokens."""

    recalls, key, name = False, ("outside",), "outside"

    def __init__(self, slots):
        self.slots, self.max_depth, self.prompt_slots = slots, 2, 2
        self.deepest_row = 4

    def drafters(self, context):
        return [self]

    def begin(self, session):
        session.set_slots(self.slots, 2)

    def device_rows(self, *, is_synthetic):
        return DeviceRows(Tree.chain(2).with_lookahead({0: 2, 2: 2}), self)

    def top_of_rows(self, logits, requests):
        tokens, scores = draft_sample(logits, 8, mode="top")
        return {"offered": tokens.view(requests, -1, 8), "scores": scores.view(requests, -1, 8)}

    def propose(self, batch):
        raise AssertionError("the device drafts")


def test_a_drafter_from_outside_may_run_on_the_device(llama):
    ids, mask = ragged_prompts(3)
    options = dict(max_new_tokens=20, attention_mask=mask, eos_token_id=[])
    got = generate(llama, ids, FromOutside(slots_for(llama)), session=Session(llama, run_ahead=True), **options)
    assert torch.equal(got.sequences, generate(llama, ids, **options).sequences)
    assert got.stats.ahead_calls > 0 and got.stats.num_draft_tokens > 0


# ---- one text on the CPU ----


@pytest.mark.parametrize("law", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("name", METHODS)
def test_one_text_has_the_calls_of_the_hosts_steps(llama, monkeypatch, rows_called, name, law):
    """Also their rows: no step has more than it needs."""
    for seed in range(3):
        ids = whole_prompts(1, seed=seed)
        options = dict(eos_token_id=ENDS, max_new_tokens=25, **law)
        waiting, _ = both(llama, ids, methods_of(llama)[name], 0, **options)
        with monkeypatch.context() as patch:
            Seer(patch, [waiting.sequences[0].tolist()])
            rows_called.clear()
            both(llama, ids, methods_of(llama)[name], 0, **options)
            calls = len(rows_called) // 2
            assert rows_called[:calls] == rows_called[calls:]
            if name == "chain" and law is GREEDY:
                assert {1, 4, 4 + 2 * 3} >= set(rows_called[1:calls]) > {4 + 2 * 3}, "full steps, and roots with slots"


# ---- no host read ----


@pytest.fixture
def no_host_reads(monkeypatch):
    """Fails if the host reads a tensor while a step runs."""
    step, modes = DeviceStep._run, []

    def run(self):
        with NoHostReads.guarded(monkeypatch) as mode:
            step(self)
        modes.append(mode)

    monkeypatch.setattr(DeviceStep, "_run", run)
    return modes


@pytest.mark.parametrize("law", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("name", METHODS)
def test_a_step_reads_nothing_on_the_host(llama, no_host_reads, name, law):
    """The model is one that reads nothing: on the CPU others may."""
    ids, mask = ragged_prompts(3)
    method = methods_of(llama, deep_layers=0)[name]
    model = Mixer("cpu")
    session = Session(model, run_ahead=True)
    generate(model, ids, method, max_new_tokens=12, attention_mask=mask, session=session, **law)
    steps = no_host_reads[2:]  # the first two are not recorded: a model shows in them what its Python does
    assert len(steps) > 1
    assert all(len(mode.ops) == len(steps[0].ops) for mode in steps), "every step is the same"


VIEWS = {"view", "_unsafe_view", "slice", "select", "expand", "unsqueeze", "alias", "detach"}


@pytest.mark.parametrize("rank", [0, 3])
def test_a_step_is_few_ops(no_host_reads, monkeypatch, rank):
    """Outside the model: look-ahead rows in, accept, commit, draft, next rows; each is one launch or two on a GPU."""
    slots = LookaheadEmbedding(2, 64, rank=rank, vocabulary=VOCABULARY)
    method = PaSS(slots, tree=Tree.from_branching((2, 1)).with_lookahead({0: 2, 1: 2}), rows=9)
    call = Mixer.__call__

    def uncounted(self, *arguments):
        with _disable_current_modes():
            return call(self, *arguments)

    monkeypatch.setattr(Mixer, "__call__", uncounted)
    model = Mixer("cpu")
    session = Session(model, run_ahead=True)
    generate(model, whole_prompts(1), method, max_new_tokens=6, session=session, eos_token_id=[])
    launched = [op.split(".")[1] for op in no_host_reads[-1].ops if op.split(".")[1] not in VIEWS]
    assert launched == ["lookahead_embed", "accept_tree", "cache_commit_", "draft_sample", "next_tree_"]


@torch.no_grad()
@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("law", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("recalls", [False, True], ids=["", "recalls"])
def test_a_step_runs_where_no_numbers_are(law, rank, recalls):
    """On the meta device any read of a tensor is an error."""
    device, requests = torch.device("meta"), 2
    model = Decoder()
    model.embedding = Decoder.embedding.to(device)
    adapted = packed_model(Decoder())
    adapted.model, adapted.table = model, model.embedding
    lookahead = LookaheadEmbedding(3, 64, rank=rank).to(device)
    session = Session(adapted, requests, 50)
    session.set_slots(lookahead, 3)
    session.add_layer(*[torch.empty(1, 1, 64, device=device)] * 2, (64, 64))
    tree = Tree.from_branching((2, 1))
    sampling = SamplingParams(**law).for_batch(requests, torch.device("cpu"))
    sampling = type(sampling)(**{name: v if v is None else v.to(device) for name, v in sampling.keywords().items()})
    offers = SlotTokens(lookahead, tree, model.embedding, None, recalls=recalls)
    rows = DeviceRows(tree.with_lookahead({0: 3, 2: 3}), offers)
    step = DeviceStep(session, rows, sampling, accept_function("coupled"), "never")
    step.renew(sampling, 1)
    logits = torch.empty(requests * 4, 9, device=device)
    step._advance_roots(step._accept(logits, *step._roots(3), 0), logits, 3)
    step._run()
    with pytest.raises(Exception, match="meta"):
        step.report.tolist()


# ---- on a GPU ----


@pytest.fixture
def no_synchronisation(monkeypatch):
    """Steps fail if they synchronise."""
    step = DeviceStep.__call__

    def run(self, **options):
        capturing = self._records != "never" and self._graph is None
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default" if capturing else "error")
        try:
            step(self, **options)
        finally:
            torch.cuda.set_sync_debug_mode(mode)

    monkeypatch.setattr(DeviceStep, "__call__", run)


@pytest.mark.parametrize("graphs", [False, True, None])
@pytest.mark.parametrize("law", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("name", METHODS)
def test_steps_on_a_gpu_never_synchronise(cuda, no_synchronisation, name, law, graphs):
    """The third step becomes a graph, which a session used again replays from its first step on."""
    model = small_model("llama").to(cuda.device)
    ids, mask = (x.to(cuda.device) for x in ragged_prompts(4))
    method = methods_of(model)[name]
    options = dict(max_new_tokens=25, attention_mask=mask, eos_token_id=ENDS, **law)
    both(model, ids, method, cuda_graphs=graphs, **options)
    assert generate(model, ids, method, **options).stats.ahead_calls > 0, "the default on a GPU"
    session = Session(model, cuda_graphs=graphs)
    generate(model, ids, method, session=session, **options)
    other = dict(options, seeds=77) if law else options
    again = generate(model, ids.flip(1), method, session=session, **dict(other, attention_mask=mask.flip(1)))
    waits = Session(model, run_ahead=False)
    alone = generate(model, ids.flip(1), method, session=waits, **dict(other, attention_mask=mask.flip(1)))
    assert torch.equal(again.sequences, alone.sequences)
    assert bool(session.fixed_steps) == (graphs is not False)


def test_a_model_that_no_graph_can_hold_runs_on_without_one(cuda):
    """Its calls wait for the device, which a recording refuses."""
    model = small_model("llama").to(cuda.device)
    ids, mask = (x.to(cuda.device) for x in ragged_prompts(3))
    options, stream = dict(max_new_tokens=12, attention_mask=mask), torch.cuda.current_stream()
    want = generate(model, ids, Plain(), **options).sequences
    hook = model.model.norm.register_forward_hook(
        lambda module, inputs, output: output * float(output.isfinite().all().item())
    )
    with pytest.warns(UserWarning, match="cannot be a CUDA graph"):
        assert torch.equal(generate(model, ids, Plain(), **options).sequences, want)
    assert torch.cuda.current_stream() == stream
    with pytest.raises(RuntimeError):
        generate(model, ids, Plain(), session=Session(model, cuda_graphs=True), **options)
    assert torch.cuda.current_stream() == stream
    hook.remove()
    assert torch.equal(generate(model, ids, Plain(), **options).sequences, want)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_step_is_recorded_on_the_devices_own_stream(cuda):
    """Another device is current: kernels on a stream of its own would run at once, and the graph would be empty."""
    model = small_model("llama").to("cuda:1")
    ids, mask = (x.to("cuda:1") for x in ragged_prompts(3))
    session = Session(model, cuda_graphs=False)
    want = generate(model, ids, Plain(), attention_mask=mask, max_new_tokens=20, session=session).sequences
    assert torch.equal(generate(model, ids, Plain(), attention_mask=mask, max_new_tokens=20).sequences, want)


class Zeros:
    """A model that writes token 0 alone; its look-ahead slots guess the same."""

    def __init__(self):
        self.embedding = torch.ones(VOCABULARY, 16)

    def __call__(self, rows, positions, attend, wanted):
        attend(0, *(rows.view(-1, 1, 16) for _ in range(3)))
        logits = rows.new_zeros(len(rows if wanted is None else wanted), VOCABULARY)
        logits[:, 0] = 1.0
        return logits


def test_candidates_of_token_0_are_judged():
    method = PaSS(LookaheadEmbedding(2, 16, vocabulary=VOCABULARY), tree=Tree.chain(2), rows=24)
    waiting, _ = both(Zeros(), torch.tensor([[3, 4]]), method, lag=0, max_new_tokens=13)
    assert waiting.sequences[0, 2:].tolist() == [0] * 13 and waiting.stats.model_calls == 5, "three tokens a call"
