"""Drafting methods from outside the package: objects after ``pass_ext.DraftingMethod`` work as the package's own methods do."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from support.chi_square import counted, fit
from support.generation import Monotone, distribution_of_texts
from support.small_models import ragged_prompts, small_model, whole_prompts

import pass_ext
from pass_ext import Plain, Tree, generate
from pass_ext.decoding.drafting import drafter as drafter_module
from pass_ext.decoding.drafting.rows import pace
from pass_ext.decoding.planning.run_times import run_times
from pass_ext.decoding.planning.step_times import StepTimes
from pass_ext.drafting import Candidates, Proposal

pytestmark = pytest.mark.usefixtures("one_thread")

LIMITS = dict(max_new_tokens=24, eos_token_id=[])
TIMES = StepTimes((1, 4), (0.030, 0.042))


class Dictionary:
    """A method: continues each text by a dictionary ``{last token: continuation}``."""

    def __init__(self, entries, **settings):
        self.entries, self.settings, self.made = entries, settings, []

    def drafters(self, context):
        self.made.append(DictionaryDrafter(self.entries, **self.settings))
        return self.made[-1:]


class DictionaryDrafter(pass_ext.Drafter):
    name = "dictionary"

    def __init__(self, entries, seconds=0.0, **settings):
        self.entries, self.seconds, self.gained = entries, seconds, []
        self.max_depth = max(map(len, entries.values()))
        for name, value in settings.items():
            setattr(self, name, value)

    def propose(self, batch):
        chains = [
            self.entries.get(text[-1], ())[:levels] for text, levels in zip(batch.texts, batch.levels, strict=True)
        ]
        return Proposal([self.candidates(chain) if chain else None for chain in chains])

    def candidates(self, chain):
        return Candidates(Tree.chain(len(chain)), chain, seconds=self.seconds)

    def learn(self, gained):
        self.gained.append(list(gained))


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


def test_a_drafter_learns_the_tokens_of_each_step():
    ids = torch.tensor([[0, 1, 2, 0, 1, 2], [2, 0, 1, 2, 0, 1]])
    method = Dictionary(RIGHT)
    got = generate(Repeating(), ids, method, max_new_tokens=12)
    (gained,) = [drafter.gained for drafter in method.made]
    assert gained[0] == [1, 1] and len(gained) == got.stats.model_calls
    assert tuple(map(sum, zip(*gained, strict=True))) == got.lengths


def test_batch_holds_the_logits_behind_each_text(llama):
    """A drafter may read the target's last call: the token that the target added is the best of these logits."""
    ids, mask = ragged_prompts(4, seed=2)
    want = generate(llama, ids, Plain(), attention_mask=mask, **LIMITS)
    method, seen = Dictionary(entries_of(want.sequences[:, 9:].tolist())), []

    class Watching(DictionaryDrafter):
        def propose(self, batch):
            best = batch.last_logits().argmax(1).tolist()
            seen.extend(best[b] == text[-1] for b, text in enumerate(batch.texts) if batch.steps[b] is not None)
            assert all(0 <= levels <= left for levels, left in zip(batch.levels, batch.remaining, strict=True))
            return super().propose(batch)

    method.drafters = lambda context: [Watching(method.entries)]
    got = generate(llama, ids, method, attention_mask=mask, **LIMITS)
    assert torch.equal(got.sequences, want.sequences) and len(seen) > 20 and all(seen)


# ---- pauses ----


class Timed(Repeating):
    """Repeating, with calls that take their time by a made-up clock."""

    def __init__(self, clock, times):
        self.clock, self.times = clock, times

    def __call__(self, rows, positions, attend, wanted):
        self.clock.seconds += self.times.at(len(rows))
        return super().__call__(rows, positions, attend, wanted)


class TimedDictionary(Dictionary):
    """Dictionary, with drafts that take their seconds by this clock."""

    def __init__(self, clock, entries, **settings):
        super().__init__(entries, **settings)
        self.clock = clock

    def drafters(self, context):
        class Drafter(DictionaryDrafter):
            def candidates(drafter, chain):
                self.clock.seconds += drafter.seconds
                return super().candidates(chain)

        self.made.append(Drafter(self.entries, **self.settings))
        return self.made[-1:]


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(seconds=1000.0)
    monkeypatch.setattr(pace.time, "perf_counter", lambda: now.seconds)
    run_times.cache_clear()
    yield now
    run_times.cache_clear()


def drafts_of_200(clock, times=TIMES, **settings):
    """The number of steps with drafts in a text of 200 tokens."""
    entries = settings.pop("entries", WRONG)
    run_times.cache_clear()
    method = TimedDictionary(clock, entries, **settings)
    got = generate(Timed(clock, times), torch.tensor([[0, 1, 2]]), method, max_new_tokens=200)
    assert got.sequences[0].tolist() == [place % 3 for place in range(203)]
    return got.stats.num_drafts


def test_drafting_that_does_not_pay_pauses(clock):
    flat = StepTimes((1, 64), (0.03, 0.03))
    assert drafts_of_200(clock) == 198, "without step times it never does"
    assert 5 <= drafts_of_200(clock, step_times=TIMES) < 60
    assert drafts_of_200(clock, flat, step_times=TIMES, pauses=False) >= 196, "a drafter that costs nothing goes on"
    assert drafts_of_200(clock, flat, step_times=TIMES) >= 196, "the time that steps take decides, not the planned time"
    assert drafts_of_200(clock, step_times=TIMES, entries=RIGHT) == 49, "what pays pauses for two steps, to time them"
    assert drafts_of_200(clock, step_times=TIMES, entries=RIGHT, seconds=0.27) < 40, "its own seconds count"


def test_step_times_can_be_those_of_the_target(monkeypatch, clock):
    asked = []
    monkeypatch.setattr(
        drafter_module, "measured_times", lambda target, graphs: asked.append((target.model, graphs)) or TIMES
    )

    class Measured(Dictionary):
        def drafters(self, context):
            self.settings = {"step_times": context.measured_times()}
            return super().drafters(context)

    model = Timed(clock, TIMES)
    stats = generate(model, torch.tensor([[0, 1, 2]]), Measured(WRONG), max_new_tokens=200).stats
    assert stats.num_drafts < 60 and asked == [(model, False)]


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
        name, rules, step_times, pauses, prompt_slots, deepest_row, max_depth = (
            "bare",
            ("coupled",),
            None,
            True,
            0,
            0,
            3,
        )

        @contextlib.contextmanager
        def attached(self):
            held.append("in")
            yield
            held.append("out")

        def begin(self, session):
            held.append(session.requests)

        def propose(self, batch):
            return Proposal([Candidates.from_chains([[7, 7], RIGHT[batch.texts[0][-1]][: batch.levels[0]]])])

        def learn(self, gained):
            pass

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
