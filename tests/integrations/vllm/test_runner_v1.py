"""Runner V1's ``_sample`` on made-up runners: seeds, positions, look-ahead ids, observers, processors, log-probabilities."""

import dataclasses
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy
import pytest
import torch

from pass_ext import draft_sample
from pass_ext.integrations.vllm.sampling import runner_v1
from pass_ext.integrations.vllm.sampling.chains import seed_of

VOCABULARY = 40


class SamplerOutput(NamedTuple):
    sampled_token_ids: torch.Tensor
    logprobs_tensors: Any


@pytest.fixture(autouse=True)
def outputs(monkeypatch):
    """``vllm.v1.outputs``, where vLLM is not installed."""
    for name in ("vllm", "vllm.v1", "vllm.v1.outputs"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["vllm.v1.outputs"].SamplerOutput = SamplerOutput


@dataclasses.dataclass
class Metadata:
    temperature: Any = None
    top_k: Any = None
    top_p: Any = None
    all_random: bool = False
    no_penalties: bool = True
    allowed_token_ids_mask: Any = None
    bad_words_token_ids: dict = dataclasses.field(default_factory=dict)
    logitsprocs: Any = dataclasses.field(
        default_factory=lambda: SimpleNamespace(argmax_invariant=[], non_argmax_invariant=[])
    )
    output_token_ids: list = dataclasses.field(default_factory=list)
    spec_token_ids: Any = None
    max_num_logprobs: Any = None
    logprob_token_ids: Any = None
    thinking_budget_state_holder: Any = None


class Batch:
    def __init__(self, names, metadata):
        self.req_ids, self.sampling_metadata, self.num_reqs = list(names), metadata, len(names)
        self.generators, self.updates = {}, []

    def update_async_output_token_ids(self):
        self.updates.append("outputs")

    def update_async_spec_token_ids(self, ids):
        self.updates.append(ids)


class Drafter:
    def __init__(self):
        self.steps = []

    def observe(self, step):
        self.steps.append(step)


class Sampler:
    logprobs_mode = "raw_logprobs"

    def compute_logprobs(self, logits):
        return logits.log_softmax(-1)

    def gather_logprobs(self, logprobs, count, tokens):
        return logprobs.gather(1, tokens[:, None])[:, 0], count

    def gather_specific_token_logprobs(self, logprobs, ids, tokens):
        return logprobs, ids, tokens

    def apply_temperature(self, logits, temperature, all_random):
        return logits.div_(temperature.where(temperature > 0, 1.0)[:, None])

    def apply_logits_processors(self, logits, metadata, predict_bonus_token):
        assert not predict_bonus_token
        return logits.index_fill_(1, torch.tensor([3]), -torch.inf)


class RejectionSampler:
    """Bans, in each row, the tokens of the text that row stands after: what penalties and bad words read."""

    def apply_logits_processors(self, logits, metadata, its):
        row = 0
        for output, spec, count in zip(
            metadata.output_token_ids, metadata.spec_token_ids, its.num_draft_tokens, strict=True
        ):
            assert len(spec) == count and metadata.thinking_budget_state_holder is None
            for i in range(count):
                text = [*output, *spec[:i]]
                assert all(-1 <= id < VOCABULARY for id in text)
                logits[row, [id for id in text if id >= 0]] = -torch.inf
                row += 1
        assert row == len(logits)
        return logits


def config(rule="coupled", **changes):
    return SimpleNamespace(
        additional_config={"pass_ext": {"rule": rule}},
        speculative_config=None,
        model_config=SimpleNamespace(use_fp64_gumbel=False),
        **changes,
    )


def a_runner(texts, drafts=None, metadata=None, seeds=None, discarded=(), rule="coupled"):
    """(runner, spec_decode_metadata) of requests with these text lengths and draft ids; texts count the root."""
    names = [f"request-{b}" for b in range(len(texts))]
    counts = [0] * len(texts) if drafts is None else [len(ids) for ids in drafts]
    seeds = seeds or [None] * len(texts)
    runner = SimpleNamespace(
        vllm_config=config(rule),
        device=torch.device("cpu"),
        input_batch=Batch(names, metadata or Metadata()),
        requests={
            name: SimpleNamespace(sampling_params=SimpleNamespace(seed=s)) for name, s in zip(names, seeds, strict=True)
        },
        seq_lens=torch.tensor([t + n for t, n in zip(texts, counts, strict=True)] + [99], dtype=torch.int32),
        discard_request_mask=SimpleNamespace(np=numpy.array([b in discarded for b in range(len(texts))] + [True])),
        use_async_scheduling=False,
        _draft_token_req_ids=None,
        _get_spec_decode_draft_probs=lambda its: None,
        sampler=Sampler(),
        rejection_sampler=RejectionSampler(),
    )
    if drafts is None:
        return runner, None
    bounds = numpy.cumsum([n + 1 for n in counts])
    return runner, SimpleNamespace(
        draft_token_ids=torch.tensor([id for ids in drafts for id in ids], dtype=torch.int32),
        num_draft_tokens=counts,
        bonus_logits_indices=torch.tensor(bounds - 1),
        target_logits_indices=torch.tensor(
            [e - 1 - n + i for e, n in zip(bounds, counts, strict=True) for i in range(n)], dtype=torch.int64
        ),
    )


def rows_of(texts, drafts, seed=0):
    """Logits that depend on the text alone: [N, V]."""
    rows = []
    for b, ids in enumerate(drafts):
        for i in range(len(ids) + 1):
            generator = torch.Generator().manual_seed(hash((seed, b, texts[b], tuple(ids[:i]))) % 2**31)
            rows.append(torch.randn(VOCABULARY, generator=generator) * 2)
    return torch.stack(rows)


WARM = dict(temperature=torch.tensor([0.0, 0.8, 1.2]), top_p=torch.tensor([1.0, 0.9, 1.0]), all_random=False)


def plain_token(logits, b, position, seed):
    """The plain sampler's token of request b of WARM."""
    tokens, _ = draft_sample(
        logits[None], 1, mode="coupled", temperature=[float(WARM["temperature"][b])], top_p=[float(WARM["top_p"][b])],
        seeds=[seed], positions=[position],
    )  # fmt: skip
    return int(tokens)


def test_a_token_is_a_function_of_seed_position_and_logits():
    texts, seeds = [5, 9, 30], [1, -7, 2**64 - 3]
    wrapped = [1, -7, -3]
    logits = rows_of(texts, [[]] * 3)
    runner, its = a_runner(texts, metadata=Metadata(**WARM), seeds=seeds)
    output = runner_v1.sample(runner, logits, its)
    first = [plain_token(logits[b], b, texts[b], wrapped[b]) for b in range(3)]
    assert output.sampled_token_ids.tolist() == [[token] for token in first]
    assert output.sampled_token_ids.dtype == torch.int32 and output.logprobs_tensors is None

    drafts = [[first[0], 1], [], [first[2]]]  # right drafts, and a wrong one
    logits = rows_of(texts, drafts)
    runner, its = a_runner(texts, drafts, Metadata(**WARM), seeds)
    emitted = runner_v1.sample(runner, logits, its).sampled_token_ids
    assert emitted[:, 0].tolist() == first
    assert emitted[0, 1] == plain_token(logits[1], 0, 6, 1) and emitted[2, 1] == plain_token(logits[5], 2, 31, -3)
    assert emitted[1].tolist() == [first[1], -1, -1]


def test_a_request_without_a_seed_keeps_a_fresh_one():
    requests = [SimpleNamespace(sampling_params=SimpleNamespace(seed=None)) for _ in range(2)]
    seeds = [seed_of(request) for request in requests]
    assert seeds[0] != seeds[1] and seeds == [seed_of(request) for request in requests]


def test_seeds_follow_the_batch():
    """vLLM makes new metadata whenever its batch changes; a seed must not stay after at a place of the batch."""
    texts, logits = [5, 5, 5], rows_of([5, 5, 5], [[]] * 3)[:1].repeat(3, 1)
    same = dict(temperature=torch.ones(3), top_p=None, all_random=True)
    runner, _ = a_runner(texts, metadata=Metadata(**same), seeds=[1, 2, 3])
    before = runner_v1.sample(runner, logits, None).sampled_token_ids.flatten().tolist()
    runner.input_batch.req_ids.reverse()
    runner.input_batch.sampling_metadata = Metadata(**same)
    assert runner_v1.sample(runner, logits, None).sampled_token_ids.flatten().tolist() == before[::-1]


def test_an_observer_sees_the_models_logits_and_look_ahead_ids():
    texts, drafts = [5, 9], [[VOCABULARY, VOCABULARY + 1], [3, VOCABULARY]]
    logits = rows_of(texts, drafts)
    logits[3, 3] = 50.0  # the draft of request 1 is right
    metadata = Metadata(no_penalties=False, output_token_ids=[[1, 2], [3, 4]], spec_token_ids=drafts)
    runner, its = a_runner(texts, drafts, metadata)
    runner.drafter = Drafter()
    before = logits.clone()
    output = runner_v1.sample(runner, logits, its)
    (step,) = runner.drafter.steps
    assert step.logits is logits and torch.equal(logits, before)
    assert step.tokens.tolist() == [-1, VOCABULARY, VOCABULARY + 1, -1, 3, VOCABULARY]
    assert step.drafts == (2, 2) and step.positions.tolist() == [5, 9]
    assert step.request_ids == ["request-0", "request-1"] and step.sampling.is_greedy
    assert step.emitted.tolist() == output.sampled_token_ids.tolist()
    # Request 1 had 3 in its text already, so the processors ban it, whatever the model likes.
    assert step.emitted[:, 1].tolist() == [-1, -1] and 3 not in step.emitted.tolist()[1]


def test_processors_see_the_drafts_before_each_row():
    texts, right = [5, 9], [7, 8]
    drafts = [right, []]
    logits = torch.zeros(4, VOCABULARY)
    logits[0, 7], logits[1, 7], logits[1, 8], logits[2, 8], logits[2, 9], logits[3, 1] = 5.0, 6.0, 5.0, 6.0, 5.0, 5.0
    metadata = Metadata(bad_words_token_ids={0: [[1]]}, output_token_ids=[[1], [2]], spec_token_ids=drafts)
    runner, its = a_runner(texts, drafts, metadata)
    assert runner_v1.sample(runner, logits, its).sampled_token_ids.tolist() == [[7, 8, 9], [1, -1, -1]]


def test_processors_of_a_step_without_speculation():
    logits = torch.zeros(1, VOCABULARY)
    logits[0, 3], logits[0, 4] = 5.0, 4.0
    runner, _ = a_runner([5], metadata=Metadata(allowed_token_ids_mask=torch.zeros(1)))
    assert runner_v1.sample(runner, logits, None).sampled_token_ids.tolist() == [[4]]
    assert logits[0, 3] == 5.0


def test_a_thinking_budget_forces_rows_as_vllm_lays_them_out():
    """vLLM's holder takes the last rows of all requests first, then the rows in front of drafts."""

    class Holder:
        def __init__(self):
            self.calls = []

        def has_tracked_requests(self):
            return True

        def update_state(self, outputs, spec, repeat_indices):
            self.calls.append(spec)

        def apply_to_logits(self, logits, predict_bonus_token, spec):
            self.calls.append((predict_bonus_token, logits[:, 0].tolist()))
            return logits.index_fill(1, torch.tensor([30 if predict_bonus_token else 31]), 99.0)

    drafts = [[31, VOCABULARY], []]
    logits = torch.zeros(4, VOCABULARY)
    logits[:, 0] = torch.arange(4)
    holder = Holder()
    metadata = Metadata(output_token_ids=[[1], [2]], spec_token_ids=drafts, thinking_budget_state_holder=holder)
    runner, its = a_runner([5, 9], drafts, metadata)
    emitted = runner_v1.sample(runner, logits, its).sampled_token_ids.tolist()
    assert emitted == [[31, 31, -1], [30, -1, -1]]
    # the made-up processors ban nothing that decides here, and leave column 0 alone
    assert holder.calls == [[[31, -1], []], (True, [2.0, 3.0]), (False, [0.0, 1.0])]


@pytest.mark.parametrize(("state", "acts"), [({"min_toks": {}}, False), ({"min_toks": {0: 1}}, True), ({}, True)])
def test_idle_processors_of_vllm_cost_nothing(state, acts):
    processors = SimpleNamespace(argmax_invariant=[], non_argmax_invariant=[SimpleNamespace(**state)])
    logits = torch.zeros(1, VOCABULARY)
    logits[0, 3] = 5.0
    runner, _ = a_runner([5], metadata=Metadata(logitsprocs=processors))
    assert (runner_v1.sample(runner, logits, None).sampled_token_ids.tolist() == [[3]]) == (not acts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_processors_after_the_temperature(dtype):
    """min-p and the user's own: on logits that are divided by the temperature, which then is not applied again."""

    class KeepsEight:
        def apply(self, logits):
            self.seen = logits.clone()
            return logits.masked_fill_(logits < logits.topk(8).values[:, -1:], -torch.inf)

    processor, texts = KeepsEight(), [5, 9, 30]
    metadata = Metadata(**WARM, logitsprocs=SimpleNamespace(argmax_invariant=[processor], non_argmax_invariant=[]))
    logits = rows_of(texts, [[]] * 3).to(dtype)
    before = logits.clone()
    scaled = logits.float() / torch.tensor([1.0, 0.8, 1.2])[:, None]
    eight = scaled.where(scaled >= scaled.topk(8).values[:, -1:], -torch.inf)
    for seed in range(20):
        runner, _ = a_runner(texts, metadata=metadata, seeds=[seed] * 3)
        emitted = runner_v1.sample(runner, logits, None).sampled_token_ids.flatten()
        assert torch.equal(logits, before) and torch.equal(processor.seen, scaled)
        warm = (WARM["temperature"] > 0).float()
        tokens, _ = draft_sample(
            eight, 1, mode="coupled", temperature=warm, top_p=WARM["top_p"], seeds=[seed] * 3, positions=texts
        )
        assert emitted.tolist() == tokens.flatten().tolist()


def test_requests_inside_their_prompt():
    """Their tokens are not told to the observer; a CPU generator leaves the batch, another moves on by what vLLM takes back."""

    class Generator:
        device, offset = torch.device("cuda"), 8

        def get_offset(self):
            return self.offset

        def set_offset(self, offset):
            self.offset = offset

    runner, _ = a_runner([5, 9, 30], metadata=Metadata(), discarded=(0, 1))
    runner.drafter = Drafter()
    runner.input_batch.generators = {0: torch.Generator(), 1: Generator(), 2: torch.Generator()}
    output = runner_v1.sample(runner, rows_of([5, 9, 30], [[]] * 3), None)
    assert runner.drafter.steps[0].emitted[:2].tolist() == [[-1], [-1]]
    assert (runner.drafter.steps[0].emitted[2] == output.sampled_token_ids[2]).all()
    assert list(runner.input_batch.generators) == [1, 2] and runner.input_batch.generators[1].offset == 12


def test_async_scheduling_updates_what_processors_read():
    runner, its = a_runner([5], [[3]])
    runner.use_async_scheduling, runner._draft_token_req_ids = True, ["request-0"]
    runner._get_draft_token_ids_cpu = lambda: ([[4]], ["request-0"])
    runner_v1.sample(runner, rows_of([5], [[3]]), its)
    assert runner.input_batch.updates == ["outputs", [[4]]]


def test_draft_probabilities_reach_the_rule():
    """A draft that the target gives as often as the draft model is accepted always; as a fixed proposal, half the time."""
    drafts, texts = [[3, 4], [], [5]], [5, 9, 30]
    probs = torch.zeros(3, VOCABULARY)
    probs[[0, 1, 2], [3, 4, 5]] = probs[:, 9] = 0.5
    logits = torch.full((6, VOCABULARY), -torch.inf)
    logits[[2, 3, 5], 7] = logits[[0, 1, 4], [3, 4, 5]] = logits[[0, 1, 4], 9] = 0.0
    metadata = Metadata(temperature=torch.ones(3), all_random=True)

    def texts_of(seed, draft_probs):
        runner, its = a_runner(texts, drafts, metadata, [seed] * 3, rule="rejection")
        runner._get_spec_decode_draft_probs = lambda its: draft_probs
        return runner_v1.sample(runner, logits, its).sampled_token_ids.tolist()

    assert all(texts_of(seed, probs) == [[3, 4, 7], [7, -1, -1], [5, 7, -1]] for seed in range(20))
    fixed = [texts_of(seed, None)[2][0] for seed in range(60)]
    assert 15 < fixed.count(5) < 45 and set(fixed) == {5, 9}


def test_steps_of_one_runner_with_other_numbers_of_drafts():
    texts = [5, 9]
    runner, _ = a_runner(texts)
    for drafts in ([[3], [4]], [[3, 4], []], [[], [4, 3]], [[3], [4]]):
        other, its = a_runner(texts, drafts)
        runner.seq_lens = other.seq_lens
        logits = rows_of(texts, drafts)
        emitted = runner_v1.sample(runner, logits, its).sampled_token_ids
        assert emitted.tolist() == runner_v1.sample(other, logits, its).sampled_token_ids.tolist()


def test_raw_logprobs_of_every_emitted_token():
    drafts = [[3], []]
    logits = rows_of([5, 9], drafts)
    logits[0, 3] = 50.0
    runner, its = a_runner([5, 9], drafts, Metadata(max_num_logprobs=2))
    output = runner_v1.sample(runner, logits, its)
    gathered, count = output.logprobs_tensors
    ids, expected = output.sampled_token_ids.long(), logits.log_softmax(-1)
    assert count == 2
    assert torch.equal(gathered[:3], expected[[0, 1, 2], [ids[0, 0], ids[0, 1], ids[1, 0]]])


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_logprobs_with_processors(mode):
    """The made-up processors ban token 3."""
    logits = rows_of([5], [[]])
    metadata = Metadata(allowed_token_ids_mask=torch.zeros(1), max_num_logprobs=2)
    runner, _ = a_runner([5], metadata=metadata)
    runner.sampler.logprobs_mode = mode
    output = runner_v1.sample(runner, logits, None)
    source = logits if mode.startswith("raw") else logits.index_fill(1, torch.tensor([3]), -torch.inf)
    assert output.logprobs_tensors[0] == source.log_softmax(-1)[0, int(output.sampled_token_ids)]


def test_logprobs_of_chosen_ids():
    drafts = [[], [3]]
    runner, its = a_runner([5, 9], drafts, Metadata(logprob_token_ids={1: [8, 9]}))
    _, ids, tokens = runner_v1.sample(runner, rows_of([5, 9], drafts), its).logprobs_tensors
    assert ids == {2: [8, 9], 3: [8, 9]} and len(tokens) == 4


@pytest.mark.parametrize("metadata", [dict(), WARM])
def test_synthetic_acceptance_is_by_vllms_rates(metadata):
    """Drafts are accepted by coins; the token after them is the plain sampler's; a look-ahead id is never accepted."""
    texts, drafts = [5, 9, 30], [[7, 8, 9], [4], [6, VOCABULARY, 3]]
    logits = rows_of(texts, drafts)

    def emitted(rates, seeds=(1, 2, 3)):
        runner, its = a_runner(texts, drafts, Metadata(**metadata), list(seeds))
        runner.vllm_config.speculative_config = SimpleNamespace(
            rejection_sample_method="synthetic", synthetic_acceptance_rates=rates
        )
        return runner_v1.sample(runner, logits, its).sampled_token_ids

    def own(b, row, position):
        return plain_token(logits[row], b, position, b + 1) if metadata else int(logits[row].argmax())

    assert emitted([1.0, 1.0, 1.0]).tolist() == [
        [7, 8, 9, own(0, 3, 8)], [4, own(1, 5, 10), -1, -1], [6, own(2, 7, 31), -1, -1],
    ]  # fmt: skip
    assert emitted([1.0, 0.0, 0.0]).tolist()[0] == [7, own(0, 1, 6), -1, -1]
    assert emitted([0.0, 0.0, 0.0])[:, 0].tolist() == [own(0, 0, 5), own(1, 4, 9), own(2, 6, 30)]
    assert (emitted([1.0, 1.0, 1.0])[:, 0] == torch.tensor([7, 4, 6])).all()
