"""The law of the tokens that vLLM gets, for both runners: every draft, coin and draw, enumerated through the adapters.

The adapters' calls of accept_tree are caught, and the reference runs the rule on their arguments.
"""

from types import SimpleNamespace

import pytest
import torch
from support.enumeration import EXACT, FAULTY, Texts, outcomes

from pass_ext.decoding.sampling import BatchSampling
from pass_ext.integrations.vllm.sampling import chains, runner_v2
from pass_ext.ops.accept import AcceptResult
from pass_ext.reference.accept import TensorRequest, Walk
from pass_ext.reference.common.distribution import process

VOCABULARY, DRAFTS = 3, 2
TARGET = dict(temperature=0.75, top_k=2, top_p=0.9375)  # the same in single precision
DRAFT_TEMPERATURE = 0.75
RULES = ("coupled", "rejection", "block", "kseq")


class World:
    """Random logits of target and draft after each text."""

    def __init__(self, seed):
        self.generator, self.rows = torch.Generator().manual_seed(seed), {}

    def logits(self, text):
        if text not in self.rows:
            self.rows[text] = (torch.randn(2, VOCABULARY, generator=self.generator) * 1.5).double()
        return self.rows[text]

    def target(self, text):
        return process(self.logits(text)[0], **TARGET).probs

    def draft(self, text):
        return process(self.logits(text)[1], temperature=DRAFT_TEMPERATURE).probs


def through_v1(world, rule, text, has_q):
    """The arguments with which runner V1 calls accept_tree, a request without drafts in front."""
    packed = chains.PackedChains.of([0, DRAFTS], torch.device("cpu"))
    rows = [world.logits(text[:i])[0] for i in range(DRAFTS + 1)]
    probs = torch.stack([world.draft(text[:i]) for i in range(DRAFTS)])
    sampling = BatchSampling(
        torch.full((2,), TARGET["temperature"]), torch.full((2,), TARGET["top_k"]), torch.full((2,), TARGET["top_p"]),
        None, torch.zeros(2, dtype=torch.int64),
    )  # fmt: skip
    tokens = packed.tokens(torch.tensor(text))
    logits = torch.stack([torch.zeros_like(rows[0]), *rows])
    chains.accept_chains(packed, logits, tokens, rule, sampling, torch.tensor([1, 1]), probs if has_q else None)


def through_v2(world, rule, text, has_q):
    """The same of runner V2: processed logits, the draft's before the temperature, requests at places 4 and 2."""
    rows = [world.target(text[:i]).log() for i in range(DRAFTS + 1)]
    draft_logits = torch.full((5, DRAFTS, VOCABULARY), torch.nan, dtype=torch.float64)
    draft_logits[2] = torch.stack([world.logits(text[:i])[1] for i in range(DRAFTS)])
    runner_v2.PackedAccept(rule, None)(
        torch.stack([torch.zeros_like(rows[0]), *rows]),
        draft_logits if has_q else None,
        torch.tensor([0, 0, *text], dtype=torch.int32),
        torch.tensor([0, 1, DRAFTS + 2], dtype=torch.int32),
        torch.arange(DRAFTS + 2),
        torch.tensor([4, 2], dtype=torch.int32),
        torch.tensor([4, *[2] * (DRAFTS + 1)], dtype=torch.int32),
        torch.tensor([0, *range(DRAFTS + 1)], dtype=torch.int32),
        torch.full((5,), DRAFT_TEMPERATURE),
        torch.zeros(5, dtype=torch.int64),
        DRAFTS,
    )


class Caught:
    """accept_tree as the adapters call it: keeps the arguments, and gives no tokens."""

    def __call__(self, logits, tokens, parents, cu_nodes, max_depth, **keywords):
        self.arguments = SimpleNamespace(
            logits=logits, tokens=tokens, parents=parents, cu_nodes=cu_nodes, max_depth=max_depth,
            **{"draft_logits": None, "draft_rows": None, **keywords},
        )  # fmt: skip
        requests = len(cu_nodes) - 1
        emitted = torch.full((requests, max_depth + 1), -1)
        return AcceptResult(emitted, emitted.int(), emitted[:, 0].int(), emitted[:, 0].int())

    def last_request(self):
        """The last request as the reference's rules read it."""
        a = self.arguments

        def number(name, off):
            value = getattr(a, name, None)
            return off if value is None else float(value[-1]) if isinstance(value, torch.Tensor) else float(value)

        target = (number("temperature", 0.0), int(number("top_k", 0)), number("top_p", 1.0), number("min_p", 0.0))
        draft = (
            number("draft_temperature", target[0]), int(number("draft_top_k", target[1])),
            number("draft_top_p", target[2]), number("draft_min_p", target[3]),
        )  # fmt: skip
        first, last = a.cu_nodes.tolist()[-2:]
        rows = torch.arange(len(a.tokens)) if a.draft_rows is None else a.draft_rows
        return TensorRequest(
            a.parents[first:last].tolist(), a.max_depth, VOCABULARY, a.tokens[first:last].tolist(),
            a.logits[first:last], None, rows[first:last].tolist(), a.draft_logits, None, target, draft,
        )  # fmt: skip


def variation(monkeypatch, module, adapter, rule, has_q, world, change=lambda caught: None):
    """Total variation between the law of the next DRAFTS + 1 tokens and the target's."""
    caught = Caught()
    monkeypatch.setattr(module, "accept_tree", caught)
    masses = {}
    for first in range(VOCABULARY):
        for second in range(VOCABULARY):
            q = float(world.draft(())[first] * world.draft((first,))[second]) if has_q else 1.0 / VOCABULARY**2
            adapter(world, rule, (first, second), has_q)
            change(caught.arguments)
            request = caught.last_request()
            for probability, (stop, token), replay in outcomes(lambda chance, r=request: Walk(r, chance, rule).run()):
                text = (first, second)[:stop]
                for last, p in (dict(enumerate(replay.law)) if replay.law else {token: 1.0}).items():
                    masses[(*text, last)] = masses.get((*text, last), 0.0) + q * probability * p
    laws = {t: (SimpleNamespace(probs=world.target(t)), None) for t in texts_up_to(DRAFTS)}
    continued = completed(Texts(VOCABULARY, laws), masses)
    truth = completed(Texts(VOCABULARY, laws), {(): 1.0})
    return 0.5 * sum(abs(continued[text] - truth[text]) for text in truth)


def texts_up_to(length):
    texts, every = [()], [()]
    for _ in range(length):
        texts = [(*text, token) for text in texts for token in range(VOCABULARY)]
        every += texts
    return every


def completed(world, masses):
    """The distribution of DRAFTS + 1 tokens, from the masses of shorter texts continued by the target."""
    masses, done = dict(masses), {}
    for length in range(DRAFTS + 1):
        for text, mass in [(t, m) for t, m in masses.items() if len(t) == length]:
            for token, p in enumerate(world.at(text)[0].probs.tolist()):
                masses[(*text, token)] = masses.get((*text, token), 0.0) + mass * p
    for text in texts_up_to(DRAFTS + 1):
        if len(text) == DRAFTS + 1:
            done[text] = masses.get(text, 0.0)
    return done


RUNNERS = {"v1": (chains, through_v1), "v2": (runner_v2, through_v2)}


@pytest.mark.parametrize("has_q", [True, False])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("runner", RUNNERS)
def test_the_law_is_the_targets(monkeypatch, runner, rule, has_q):
    for seed in range(3):
        assert variation(monkeypatch, *RUNNERS[runner], rule, has_q, World(seed)) < EXACT


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_wrong_row_of_the_draft_shows(monkeypatch, runner):
    def change(arguments):
        arguments.draft_rows = arguments.draft_rows.where(
            arguments.draft_rows < 0, arguments.draft_rows.clamp(min=0) ^ 1
        )

    assert variation(monkeypatch, *RUNNERS[runner], "rejection", True, World(0), change) > FAULTY
