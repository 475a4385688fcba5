"""Drafting methods from outside the package: objects with ``drafters(context)`` work as the package's own methods do."""

import contextlib
import time
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from support.chi_square import counted, fit
from support.generation import Monotone, distribution_of_texts
from support.small_models import ragged_prompts, small_model, whole_prompts

import pass_ext
from pass_ext import Plain, Tree, generate
from pass_ext.drafting import Candidates, HostDecides, Proposal

pytestmark = pytest.mark.usefixtures("one_thread")

LIMITS = dict(max_new_tokens=24, eos_token_id=[])


class Dictionary:
    """A method: continues each text by a dictionary ``{last token: continuation}``."""

    def __init__(self, entries, **settings):
        self.entries, self.settings, self.made = entries, settings, []

    def drafters(self, context):
        self.made.append(DictionaryDrafter(self.entries, **self.settings))
        return self.made[-1:]


class DictionaryDrafter(pass_ext.Drafter):
    name = "dictionary"

    def __init__(self, entries, **settings):
        self.entries = entries
        self.max_depth = max(map(len, entries.values()))
        for name, value in settings.items():
            setattr(self, name, value)

    def propose(self, batch):
        chains = [
            self.entries.get(text[-1], ())[:levels] for text, levels in zip(batch.texts, batch.levels, strict=True)
        ]
        return Proposal([self.candidates(chain) if chain else None for chain in chains])

    def candidates(self, chain):
        return Candidates(Tree.chain(len(chain)), chain)


class Bigrams:
    """A method with a distribution: draws children of the root from a table of logits ``[V, V]``, by the last token."""

    def __init__(self, table, width, spoil=lambda logits: logits):
        self.table, self.width, self.spoil = table, width, spoil

    def drafters(self, context):
        return [BigramDrafter(self, context)]


class BigramDrafter(pass_ext.Drafter):
    name, max_depth = "bigram", 1

    def __init__(self, method, context):
        self.method, self.context = method, context

    def propose(self, batch):
        requests = [b for b, levels in enumerate(batch.levels) if levels]
        candidates, width = [None] * len(batch.texts), self.method.width
        logits = self.method.table[[batch.texts[b][-1] for b in requests]]
        tokens, _ = self.context.draw(logits, width, requests)
        for row, b in enumerate(requests):
            candidates[b] = Candidates(Tree.from_branching((width,)), tokens[row].tolist(), [row] + [-1] * width)
        return Proposal(candidates, self.method.spoil(logits))


class Repeating:
    """A model that writes 0, 1, 2 again and again."""

    embedding = torch.eye(8, 16)

    def __call__(self, rows, positions, attend, wanted):
        attend(0, *[rows[:, None]] * 3)
        following = torch.eye(8)[(positions + 1) % 3]
        return following if wanted is None else following[wanted]


RIGHT = {0: [1, 2, 0], 1: [2, 0, 1], 2: [0, 1, 2]}
WRONG = {token: [5, 5, 5] for token in range(3)}


def entries_of(texts, tokens=3):
    """For each token the tokens that followed it last in these texts."""
    entries = {}
    for text in texts:
        for place in range(len(text) - tokens):
            entries[text[place]] = text[place + 1 : place + 1 + tokens]
    return entries


# ---- the text ----


def test_the_text_is_that_of_plain_decoding(llama):
    """Ragged prompts with padding; greedy by every rule, and with each request's own sampling parameters."""
    ids, mask = ragged_prompts(6, seed=5)
    samplings = [dict(rule=rule) for rule in pass_ext.RULES]
    samplings += [dict(temperature=[0.0, 0.3, 0.7, 1.0, 1.3, 0.9], top_k=20, top_p=0.95, seeds=list(range(6)))]
    for sampling in samplings:
        want = generate(llama, ids, Plain(), attention_mask=mask, **LIMITS, **sampling)
        method = Dictionary(entries_of(want.sequences[:, 9:].tolist()))
        got = generate(llama, ids, method, attention_mask=mask, **LIMITS, **sampling)
        assert torch.equal(got.sequences, want.sequences), sampling
        assert got.stats.num_accepted_tokens > 20 and got.stats.model_calls < want.stats.model_calls, sampling


def test_logits_processors_and_streamers_are_as_with_any_method(llama):
    ids = whole_prompts(1)
    told = SimpleNamespace(put=lambda tokens: None, end=lambda: None, steps=[])
    told.put_step = lambda tokens, accepted: told.steps.append((tokens, accepted))
    options = dict(LIMITS, logits_processor=lambda ids, scores: scores.index_fill(1, ids[0, -1:], float("-inf")))
    want = generate(llama, ids, Plain(), **options).sequences
    method = Dictionary(entries_of(want[:, 20:].tolist()))
    got = generate(llama, ids, method, streamer=told, **options)
    assert torch.equal(got.sequences, want)
    assert sum(len(tokens) for tokens, _ in told.steps) == 24 and max(accepted for _, accepted in told.steps) == 3


RULES = [
    ("coupled", 2), ("rejection", 2), ("rejection_with_replacement", 2), ("block", 1), ("traversal", 2), ("kseq", 2),
    ("rejection", None), ("coupled", None), ("traversal", None), ("kseq", None),
]  # fmt: skip


def distance(rule, width, spoil=lambda logits: logits):
    """Chi square of 2,000 texts of three tokens over five against the model itself, in standard deviations."""
    vocabulary, prompt, requests, new_tokens = 5, [3, 1, 4, 1], 2000, 3
    model = small_model("llama", vocab_size=vocabulary, sharpness=4.0)
    table = 2 * torch.randn(vocabulary, vocabulary, generator=torch.Generator().manual_seed(0))
    likeliest = {
        token: [int(following), int(table[following].argmax())] for token, following in enumerate(table.argmax(1))
    }
    method = Dictionary(likeliest) if width is None else Bigrams(table, width, spoil)
    got = generate(
        model, torch.tensor(prompt).expand(requests, -1), method, max_new_tokens=new_tokens, temperature=0.9,
        seeds=range(requests), rule=rule, eos_token_id=[],
    )  # fmt: skip
    assert requests / 10 < got.stats.num_accepted_tokens < got.stats.num_draft_tokens, "drafts take part"
    distribution = distribution_of_texts(model, prompt, vocabulary, new_tokens, 0.9)
    chi_square, freedom = fit(counted(got.sequences[:, -new_tokens:], vocabulary), distribution)
    return (chi_square - freedom) / (2 * freedom) ** 0.5


@pytest.mark.parametrize("rule,width", RULES)
def test_sampled_text_has_the_models_distribution(rule, width):
    """Candidates with draft logits, drawn in the rule's mode; and fixed candidates (no width), which have none."""
    assert distance(rule, width) < 5


@pytest.mark.parametrize("rule,width", [("coupled", 1), ("coupled", 2), ("rejection", 1), ("block", 1)])
def test_a_drafter_that_knows_the_models_distribution_is_always_right(rule, width):
    """Its draws are where and how the rule expects them: under the target's noise, or from the logits that it names."""
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    method = Bigrams(Monotone.logits.repeat(50, 1), width)
    got = generate(Monotone(), ids, method, max_new_tokens=13, temperature=1.0, seeds=[1, 2], rule=rule)
    assert got.stats.model_calls == 7, "the prompts' own token, and six steps of one candidate and one more"


def test_draft_logits_that_nothing_was_drawn_from_are_found():
    assert distance("rejection", 2, spoil=lambda logits: -logits) > 20


# ---- counts ----


def test_statistics_count_its_candidates():
    ids = torch.tensor([[0, 1, 2, 0, 1, 2]])
    stats = generate(Repeating(), ids, Dictionary(RIGHT), max_new_tokens=12).stats
    # The prompt's own token, two steps of three drafts and the target's token, and a step of two drafts that ends the text.
    assert stats.model_calls == 4 and stats.acceptance_histogram == (0, 0, 1, 2)
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (3, 8, 8)
    stats = generate(Repeating(), ids, Dictionary(WRONG), max_new_tokens=12).stats
    assert stats.model_calls == 12 and stats.acceptance_histogram == (10, 0, 0, 0)


def test_batch_holds_the_logits_after_each_text(llama):
    """A drafter may read the target's last call: the token that the target added is the best of these logits."""
    ids, mask = ragged_prompts(4, seed=2)
    want = generate(llama, ids, Plain(), attention_mask=mask, **LIMITS)
    method, seen = Dictionary(entries_of(want.sequences[:, 9:].tolist())), []

    class Watching(DictionaryDrafter):
        def propose(self, batch):
            best = batch.last_logits().argmax(1).tolist()
            seen.extend(best[b] == text[-1] for b, text in enumerate(batch.texts) if batch.candidates[b] is not None)
            assert all(0 <= levels <= left for levels, left in zip(batch.levels, batch.remaining, strict=True))
            return super().propose(batch)

    method.drafters = lambda context: [Watching(method.entries)]
    got = generate(llama, ids, method, attention_mask=mask, **LIMITS)
    assert torch.equal(got.sequences, want.sequences) and len(seen) > 20 and all(seen)


# ---- pauses ----


class Timed(Repeating):
    """Repeating, by a made-up clock that calls alone move: further rows are dear, or cost nothing."""

    def __init__(self, monkeypatch, dear):
        self.seconds, self.dear = 1000.0, dear
        monkeypatch.setattr(time, "perf_counter", lambda: self.seconds)

    def __call__(self, rows, *rest):
        self.seconds += 0.030 + (self.dear if len(rows) > 1 else 0.0)
        return super().__call__(rows, *rest)


class Paced(Dictionary):
    def drafters(self, context):
        self.settings = {"pace": context.pace()}
        return super().drafters(context)


@pytest.mark.parametrize(
    ("kind", "dear", "entries", "fewest", "most"),
    [
        (Dictionary, 0.012, WRONG, 198, 198),
        (Paced, 0.012, WRONG, 5, 40),
        (Paced, 0.0, WRONG, 190, 198),
        (Paced, 0.012, RIGHT, 48, 52),
    ],
    ids=["without a pace it never does", "what loses pauses", "what costs nothing goes on", "what pays goes on"],
)
def test_drafting_that_does_not_pay_pauses(monkeypatch, kind, dear, entries, fewest, most):
    """By the time that steps take."""
    got = generate(Timed(monkeypatch, dear), torch.tensor([[0, 1, 2]]), kind(entries), max_new_tokens=200)
    assert got.sequences[0].tolist() == [place % 3 for place in range(203)]
    assert fewest <= got.stats.num_drafts <= most


# ---- several drafters, and their conditions ----


class Several:
    """A method with two dictionaries."""

    def __init__(self, *entries):
        self.entries = entries

    def drafters(self, context):
        first, second = map(DictionaryDrafter, self.entries)
        second.name = "second dictionary"
        return [first, second]


def test_candidates_of_several_drafters_are_one_tree():
    ids, seen = torch.tensor([[0, 1, 2]]), []

    class Counting(Repeating):
        def __call__(self, rows, *rest):
            seen.append(len(rows))
            return super().__call__(rows, *rest)

    mixed = {token: [chain[0], 6] for token, chain in RIGHT.items()}
    got = generate(Counting(), ids, Several(mixed, RIGHT), max_new_tokens=9)
    assert got.sequences[0].tolist() == [place % 3 for place in range(12)]
    assert seen == [3, 5, 5], "root, the shared first token, the wrong second one, and two right ones"
    with pytest.raises(
        ValueError,
        match="or 'typical' or 'coupled_inverse' for dictionary and second dictionary candidates together, got 'kseq'",
    ):
        generate(Repeating(), ids, Several(mixed, RIGHT), max_new_tokens=9, temperature=1.0, rule="kseq")


def test_a_class_that_inherits_nothing_will_do():
    held = []

    class Bare:
        name, rules, pace, prompt_slots, deepest_row, max_depth, taps = "bare", ("coupled",), None, 0, 0, 3, ()
        is_silent = False

        def device_rows(self, *, is_synthetic):
            raise HostDecides("it looks a table up")

        @contextlib.contextmanager
        def attached(self):
            held.append("in")
            yield
            held.append("out")

        def begin(self, session):
            held.append(session.requests)

        def propose(self, batch):
            return Proposal([Candidates.from_chains([[7, 7], RIGHT[batch.texts[0][-1]][: batch.levels[0]]])])

    ids, method = torch.tensor([[0, 1, 2]]), SimpleNamespace(drafters=lambda context: (Bare(),))
    got = generate(Repeating(), ids, method, max_new_tokens=9)
    assert got.sequences[0].tolist() == [place % 3 for place in range(12)] and got.stats.model_calls == 3
    assert held == ["in", 1, "out"]


# ---- refusals ----


def test_refusals():
    def refused(method, match, **options):
        with pytest.raises((ValueError, TypeError), match=match):
            generate(Repeating(), torch.tensor([[0, 1, 2]]), method, max_new_tokens=9, **options)

    narrow = Dictionary(RIGHT, rules=("coupled", "typical"))
    generate(
        Repeating(), torch.tensor([[0, 1, 2]]), narrow, max_new_tokens=9, rule="rejection"
    )  # greedy: no rule judges
    refused(
        narrow, "generate: rule must be 'coupled' or 'typical' for dictionary candidates, got 'rejection'",
        rule="rejection", temperature=1.0,
    )  # fmt: skip
    alone = r"rule 'longest_branch' .*: method must be MultiCandidate\(...\) without lookahead or ngram, got dictionary"
    refused(Dictionary(RIGHT), alone, rule="longest_branch")
    refused(Dictionary(RIGHT, name="draft model"), "rule must be .* got 'longest_branch'", rule="longest_branch")
    refused("fast", r"generate: method must be Plain\(\), .* or an object with drafters\(context\) .*, got str")
    deep = "DictionaryDrafter.propose: candidates must be at most max_depth 2 levels deep, got 3"
    refused(Dictionary(RIGHT, max_depth=2), deep)
    short = "DictionaryDrafter.propose: candidates must be one or None for each of the 1 requests, got 2"
    refused(Dictionary(RIGHT, propose=lambda batch: Proposal([None, None])), short)
    refused(
        Dictionary(RIGHT, propose=lambda batch: [None]),
        "propose: result must be a pass_ext.drafting.Proposal, got list",
    )
    with pytest.raises(ValueError, match="Candidates: tokens must be 3, one for each node below the root, got 2"):
        Candidates(Tree.chain(3), [1, 2])
