"""generate(grammar=…): every method writes the text of plain decoding under the grammar's masks, token by token; only allowed
candidates meet the model; forced tokens are drafted; texts end where the grammar says. The grammar is a small automaton.
"""

import pytest
import torch

pytest.importorskip("transformers")

from support.chi_square import counted, fit
from support.generation import Mixer, methods_for, slots_for
from support.grammars import Automaton, distribution_of_texts, plain_text, random_automaton
from support.small_models import VOCABULARY, ragged_prompts, small_model

import pass_ext
from pass_ext import EarlyExitDraft, Grammar, MultiCandidate, NGram, PaSS, Plain, Session, Speculative, Tree, generate
from pass_ext.decoding.requests.grammar import Guide
from pass_ext.decoding.requests.guides import Guides
from pass_ext.drafting import SyntheticAcceptance
from pass_ext.integrations.grammar import allow_tokens

pytestmark = pytest.mark.usefixtures("one_thread")

ENDS = tuple(range(5, 20))
NEW = 20


def all_methods(model):
    draft = EarlyExitDraft(model, layers=1)
    return methods_for(model) | {
        "a draft's chain": Speculative(draft, length=3),
        "a draft's tree": MultiCandidate(draft, (3, 2), ngram=NGram(longest=2, shortest=1, tokens=4)),
    }


def unpadded_prompts(ids, mask):
    return [row[seen.bool()].tolist() for row, seen in zip(ids, mask, strict=True)]


def grammars(count):
    """For each text an automaton of its own, the third one complete nowhere, and one text without any."""
    made = [
        random_automaton(VOCABULARY, seed=seed, complete=(1, 3) if seed != 2 else (), ends=ENDS)
        for seed in range(count)
    ]
    return [*made[:-1], None]


class Free(Automaton):
    """Allows every token everywhere: the same text as without a grammar."""

    def __init__(self, vocabulary=VOCABULARY):
        super().__init__({0: dict.fromkeys(range(vocabulary), 0)}, complete=(0,))

    def fork(self):
        return Free(len(self.table[0]))


def wanted_texts(model, ids, mask, each, ends=ENDS, new=NEW, laws=None):
    prompts = unpadded_prompts(ids, mask)
    laws = [{}] * len(prompts) if laws is None else laws
    return [
        plain_text(model, prompt, Free() if grammar is None else grammar, new, ends=ends, **law)
        for prompt, grammar, law in zip(prompts, each, laws, strict=True)
    ]


def new_tokens(got, ids):
    return [
        row[ids.shape[1] : ids.shape[1] + count].tolist() for row, count in zip(got.sequences, got.lengths, strict=True)
    ]


# ---- the text ----


def check_greedy(model):
    ids, mask = ragged_prompts(6, seed=3)
    each = grammars(6)
    want = wanted_texts(model, ids, mask, each)
    for name, method in all_methods(model).items():
        got = generate(model, ids, method, max_new_tokens=NEW, attention_mask=mask, eos_token_id=ENDS, grammar=each)
        assert new_tokens(got, ids) == want, name
        assert got.stats.ahead_calls == 0 and (got.stats.num_accepted_tokens > 0) == (name != "plain"), name
    return want


def test_greedy_texts_are_those_of_plain_decoding_under_masks(llama):
    want = check_greedy(llama)
    assert any(text[-1] in ENDS for text in want) and any(len(text) == NEW for text in want), "some end early"
    assert not any(token in ENDS for token in want[2]), "a grammar that is complete nowhere never ends"


def test_a_seed_gives_the_text_of_plain_sampling_under_masks(llama):
    """Each request with its own temperature, filters and seed; filters act on the allowed tokens."""
    ids, mask = ragged_prompts(6, seed=4)
    each = grammars(6)
    temperatures, top_k = [0.0, 0.5, 0.8, 1.0, 1.2, 1.0], [0, 0, 5, 0, 3, 8]
    laws = [
        dict(temperature=torch.tensor([t]), top_k=torch.tensor([k]), top_p=0.95, seeds=torch.tensor([40 + b]))
        for b, (t, k) in enumerate(zip(temperatures, top_k, strict=True))
    ]
    want = wanted_texts(llama, ids, mask, each, laws=laws)
    for name, method in all_methods(llama).items():
        got = generate(
            llama, ids, method, max_new_tokens=NEW, attention_mask=mask, eos_token_id=ENDS, grammar=each,
            temperature=temperatures, top_k=top_k, top_p=0.95, seeds=range(40, 46),
        )  # fmt: skip
        assert new_tokens(got, ids) == want, name
    assert len(set(map(tuple, want))) == 6


def test_samples_follow_the_grammar_of_their_prompt(llama):
    ids, mask = ragged_prompts(2, seed=4)
    each, seeds = [random_automaton(VOCABULARY, seed=seed) for seed in range(2)], (40, 60)
    of_samples = [b for b in range(2) for _ in range(2)]
    laws = [
        dict(temperature=torch.tensor([1.0]), seeds=torch.tensor([seeds[b] + i % 2])) for i, b in enumerate(of_samples)
    ]
    repeated = ids[of_samples], mask[of_samples]
    want = wanted_texts(llama, *repeated, [each[b] for b in of_samples], ends=(), new=8, laws=laws)
    for method in (Plain(), NGram(shortest=1)):
        got = generate(
            llama, ids, method, max_new_tokens=8, attention_mask=mask, eos_token_id=[], grammar=each, temperature=1.0,
            seeds=seeds, num_return_sequences=2,
        )  # fmt: skip
        assert new_tokens(got, ids) == want


def test_an_open_grammar_changes_nothing(llama):
    ids, mask = ragged_prompts(4)
    options = dict(max_new_tokens=16, attention_mask=mask, temperature=1.0, seeds=range(4), eos_token_id=[])
    want = generate(llama, ids, Plain(), **options)
    for method in (NGram(shortest=1), PaSS(slots_for(llama), tree=Tree.from_branching((3, 2)), rows=16)):
        assert torch.equal(generate(llama, ids, method, grammar=Free(), **options).sequences, want.sequences)


def test_logits_processors_come_before_the_mask(llama):
    ids, mask = ragged_prompts(2)
    grammar = random_automaton(VOCABULARY, seed=9)
    options = dict(max_new_tokens=12, attention_mask=mask, eos_token_id=[], grammar=grammar)
    lift = dict(logits_processor=lambda ids, scores: scores.index_fill(1, (ids[0, -1:] + 1) % VOCABULARY, 1e4))
    want, got = (generate(llama, ids, method, **options, **lift).sequences for method in (Plain(), NGram(shortest=1)))
    assert torch.equal(want, got)
    text = want[0, ids.shape[1] :].tolist()
    assert all(token in grammar.allowed_after(text[:i]) for i, token in enumerate(text))
    assert not torch.equal(want, generate(llama, ids, **options).sequences)


def test_used_again_in_a_session(llama):
    ids = ragged_prompts(1, seed=8)[0][:, -6:]
    options = dict(
        max_new_tokens=12, eos_token_id=[], grammar=random_automaton(VOCABULARY, seed=1), session=Session(llama)
    )
    first = generate(llama, ids, NGram(shortest=1), **options)
    again = generate(llama, ids, NGram(shortest=1), **options)
    assert torch.equal(first.sequences, again.sequences)


# ---- the distribution ----

# Six tokens: after 0 and 1 half of them, after others nearly all; 5 is always followed by 2, then 4.
SMALL = Automaton({0: {0: 1, 1: 1, 3: 0, 5: 2}, 1: {1: 0, 2: 0, 4: 1, 5: 2}, 2: {2: 3}, 3: {4: 0}})


def distance(rule, method, grammar=SMALL):
    """Chi square of 1,500 texts of three tokens over six, in standard deviations."""
    vocabulary, prompt, requests, length = 6, [3, 1, 4, 1], 1500, 3
    model = small_model("llama", vocab_size=vocabulary, sharpness=4.0)
    lookahead = pass_ext.LookaheadEmbedding(2, 64, vocabulary=vocabulary)
    torch.manual_seed(1)
    torch.nn.init.normal_(lookahead.weight, std=0.5)
    draft = EarlyExitDraft(model, layers=1)
    methods = {
        "look-ahead": PaSS(lookahead, tree=Tree.from_branching((2, 1)), rows=12),
        "look-ahead chain": PaSS(lookahead, tree=Tree.chain(2), rows=12),
        "chain": Speculative(draft, length=2),
        "tree": MultiCandidate(draft, (2, 1)),
        "with replacement": MultiCandidate(draft, (2, 1), replacement=True),
        "n-grams": NGram(shortest=1, tokens=2),
        "outside": Outside(),
    }
    got = generate(
        model, torch.tensor(prompt).expand(requests, -1), methods[method], max_new_tokens=length, temperature=0.9,
        seeds=range(requests), rule=rule, eos_token_id=[], grammar=grammar,
    )  # fmt: skip
    assert requests / 10 < got.stats.num_accepted_tokens, "drafts take part"
    truth = distribution_of_texts(model, prompt, vocabulary, length, 0.9, grammar)
    assert abs(float(truth.sum()) - 1) < 1e-6
    counts = counted(got.sequences[:, -length:], vocabulary)
    assert not counts[truth == 0].any(), "only allowed texts"
    chi_square, freedom = fit(counts[truth > 0], truth[truth > 0])
    return (chi_square - freedom) / (2 * freedom) ** 0.5


class Outside:
    """A method from outside the package that draws two children from a distribution of its own, without any mask."""

    def drafters(self, context):
        return [OutsideDrafter(context)]


class OutsideDrafter(pass_ext.Drafter):
    name, max_depth = "outside", 1
    table = 1.5 * torch.randn(6, 6, generator=torch.Generator().manual_seed(3))

    def __init__(self, context):
        self.context = context

    def propose(self, batch):
        requests = [b for b, levels in enumerate(batch.levels) if levels]
        candidates, logits = [None] * len(batch.texts), self.table[[batch.texts[b][-1] for b in requests]]
        tokens, _ = self.context.draw(logits, 2, requests)
        for row, b in enumerate(requests):
            candidates[b] = pass_ext.drafting.Candidates(Tree.from_branching((2,)), tokens[row].tolist(), [row, -1, -1])
        return pass_ext.drafting.Proposal(candidates, logits)


LAWS = [
    ("rejection", "tree"), ("rejection", "look-ahead"), ("traversal", "tree"), ("block", "chain"),
    ("block", "look-ahead chain"), ("rejection_with_replacement", "with replacement"), ("kseq", "with replacement"),
    ("rejection", "n-grams"), ("kseq", "n-grams"), ("rejection", "outside"), ("traversal", "outside"), ("coupled", "outside"),
]  # fmt: skip


@pytest.mark.parametrize("rule,method", LAWS)
def test_sampled_texts_have_the_models_distribution_under_the_grammar(rule, method):
    assert distance(rule, method) < 5


# ---- the rows of the model's call ----


def calls_of(monkeypatch):
    """Collects the trees and ids of every call after the prompts."""
    seen, call = [], Session.call

    def spied(self, trees, ids, *more, **named):
        seen.append((trees, ids.tolist()))
        return call(self, trees, ids, *more, **named)

    monkeypatch.setattr(Session, "call", spied)
    return seen


def test_forbidden_candidates_never_meet_the_model(llama, monkeypatch):
    """Every row of every step is allowed by the grammar, or a look-ahead slot."""
    seen = calls_of(monkeypatch)
    ids = ragged_prompts(1, seed=6)[0][:, -8:]
    grammar = random_automaton(VOCABULARY, seed=4, complete=(1, 2), ends=ENDS)
    for name, method in methods_for(llama).items():
        seen.clear()
        got = generate(llama, ids, method, max_new_tokens=NEW, eos_token_id=ENDS, grammar=grammar)
        text, rows = got.sequences[0, 8:].tolist(), 0
        assert len(seen) == got.stats.model_calls
        for trees, tokens in seen[1:]:
            starts = [i for i in range(len(text)) if text[i] == tokens[0]]
            parents = trees.parents.tolist()
            nodes = [row for row in range(1, len(tokens)) if tokens[row] >= 0]
            paths = {0: []}
            for row in nodes:
                paths[row] = [*paths[parents[row]], tokens[row]]
            assert any(
                all(paths[row][-1] in grammar.allowed_after([*text[: i + 1], *paths[row][:-1]], ENDS) for row in nodes)
                for i in starts
            ), name
            rows += len(nodes)
        assert rows == got.stats.num_draft_tokens, name


def test_the_caller_s_grammar_stays_where_it_is_and_masks_are_filled_once(llama):
    ids, mask = ragged_prompts(3)
    grammar = random_automaton(VOCABULARY, seed=4)
    method = PaSS(slots_for(llama), tree=Tree.from_branching((3, 2)), rows=16, ngram=NGram(shortest=1))
    got = generate(llama, ids, method, max_new_tokens=NEW, attention_mask=mask, eos_token_id=[], grammar=grammar)
    assert grammar.states == [0] and grammar.counts["fork"] == 3
    places = got.stats.num_draft_tokens + 3 * got.stats.model_calls  # every node, and every root
    assert 0 < grammar.counts["fill_mask"] <= places


def test_a_step_moves_the_grammar_once_through_the_tree():
    """Depth first: each edge is accepted once at first, and walked again only for masks of other branches."""
    grammar = Automaton({0: {0: 0, 1: 0}})
    guide = Guide(grammar, 2, ())
    guides = Guides([guide], 2, torch.device("cpu"))
    tree = Tree.from_branching((2, 2, 2))
    depth_first = [tree.path(node) for node in tree.leaves]
    tokens = [0] * len(tree)
    for node in range(len(tree)):
        tokens[node] = int(node > 0 and tree.children(tree.parents[node])[1] == node)
    masks = guides.of_nodes([tree], [tokens], slots=True)
    assert masks.tolist() == [[3]] * 15 and grammar.counts["fill_mask"] == 15
    assert grammar.counts["accept"] <= sum(len(path) for path in depth_first)
    again = dict(grammar.counts)
    assert guides.of_nodes([tree], [tokens], slots=True).tolist() == masks.tolist() and grammar.counts == again


# ---- forced tokens and ends ----

FORCED = {place: {10 + place: place + 1} for place in range(18)} | {18: {}}


def test_forced_tokens_are_drafted_for_free(llama):
    """A grammar with one text: the prompt's call, a step of 16 forced tokens, and the rest with the end token."""
    ids = torch.tensor([[3, 4]])
    for method in (PaSS(slots_for(llama), tree=Tree.chain(2), rows=8), NGram()):
        got = generate(llama, ids, method, max_new_tokens=40, eos_token_id=7, grammar=Automaton(FORCED, complete=(18,)))
        assert new_tokens(got, ids) == [[*range(10, 28), 7]]
        assert got.stats.model_calls == 3 and got.stats.num_accepted_tokens >= 15
    plain = generate(llama, ids, Plain(), max_new_tokens=40, eos_token_id=7, grammar=Automaton(FORCED, complete=(18,)))
    assert torch.equal(plain.sequences, got.sequences) and plain.stats.model_calls == plain.stats.tokens == 19


class Forks:
    """Three children of every root, whether the grammar allows them or not."""

    def drafters(self, context):
        return [ForkDrafter()]


class ForkDrafter(pass_ext.Drafter):
    name, max_depth = "forks", 1

    def propose(self, batch):
        fork = pass_ext.drafting.Candidates(Tree.from_branching((3,)), [10, 11, 12])
        return pass_ext.drafting.Proposal([fork if levels else None for levels in batch.levels])


class Watched(Mixer):
    """Keeps the positions of the rows of every call."""

    def __init__(self):
        super().__init__("cpu")
        self.calls = []

    def __call__(self, rows, positions, attend, wanted):
        self.calls.append(positions.tolist())
        return super().__call__(rows, positions, attend, wanted)


# A choice of three, nine forced tokens after each, and a choice that leads back: the root of the next step.
THREE = {0: {10: 1, 11: 11, 12: 21}, 30: {5: 0, 6: 0}} | {
    10 * chain + place: {40 + place: 30 if place == 9 else 10 * chain + place + 1}
    for chain in range(3)
    for place in range(1, 10)
}


@pytest.mark.parametrize("requests", [1, 2])
def test_forced_tokens_have_a_budget(requests):
    """16 in a step of each request, after all leaves together, and none for which the text has no room."""
    model, ids = Watched(), torch.tensor([[3, 4]] * requests)
    want = generate(Mixer("cpu"), ids, max_new_tokens=44, eos_token_id=[], grammar=Automaton(THREE))
    for new in (2, 5, 23, 44):
        model.calls.clear()
        got = generate(model, ids, Forks(), max_new_tokens=new, eos_token_id=[], grammar=Automaton(THREE))
        assert torch.equal(got.sequences, want.sequences[:, : 2 + new])
        assert max(map(max, model.calls)) < 2 + new - 1, "the target adds the last token itself"
        rows = max(map(len, model.calls))
        assert rows == requests * (1 + 3 + 16) if new == 44 else rows <= requests * (1 + 3 + 16)
        assert got.stats.num_draft_tokens == sum(map(len, model.calls[1:])) - requests * (got.stats.model_calls - 1)


class Overflowing(Automaton):
    """Sets every bit after the vocabulary, as a library does whose words are all ones at first."""

    def fill_mask(self, words):
        super().fill_mask(words)
        words[-1] |= -1 << VOCABULARY % 32

    def fork(self):
        return Overflowing(self.table, self.complete, self.states[-1], self.guess)


@pytest.mark.parametrize("end", [[], 7], ids=["no end token", "an end token"])
def test_bits_after_the_vocabulary_allow_nothing(llama, end):
    """Texts, calls and the place where a text ends are those of the same grammar without such bits; the last word of a mask
    has one token."""
    last = VOCABULARY - 1
    table = {0: {3: 1, 9: 1, last: 1}, 1: {last: 2}, 2: {last: 3}, 3: {8: 4}, 4: {}}
    ids = torch.tensor([[3, 4], [5, 6]])
    for method in (Plain(), NGram(), PaSS(slots_for(llama), tree=Tree.from_branching((3, 2)), rows=16)):
        options = dict(max_new_tokens=20, eos_token_id=end)
        want, got = (
            generate(llama, ids, method, grammar=kind(table, complete=(4,)), **options)
            for kind in (Automaton, Overflowing)
        )
        assert torch.equal(got.sequences, want.sequences) and got.lengths == want.lengths == (4 + (end == 7),) * 2
        assert got.stats.model_calls == want.stats.model_calls
        assert got.stats.acceptance_histogram == want.stats.acceptance_histogram


def test_a_grammars_guess_is_drafted_and_judged(llama):
    """Guesses may be wrong: the text stays the same, with more accepted tokens where they are right."""
    ids = torch.tensor([[3, 4, 5]])
    table = {0: dict.fromkeys(range(20, 40), 0)}
    want = generate(llama, ids, max_new_tokens=16, eos_token_id=[], grammar=Automaton(table))
    text = want.sequences[0, 3:].tolist()
    for guess in ([text[1], text[1]], text[2:4], [50], [31, 200, -1]):
        never = NGram(longest=9, shortest=9)
        got = generate(llama, ids, never, max_new_tokens=16, eos_token_id=[], grammar=Automaton(table, guess=guess))
        assert torch.equal(got.sequences, want.sequences), guess
        assert (got.stats.num_draft_tokens > 0) == (guess != [50]), "a forbidden guess is no candidate"
        assert all(20 <= token < 40 for token in text)


def test_without_an_end_token_a_text_ends_where_nothing_may_follow(llama):
    """At a target's token, inside an accepted block, and at the limit."""
    ids = torch.tensor([[3, 4], [5, 6]])
    each = [Automaton(FORCED, complete=(18,)), Automaton({0: {9: 1, 8: 1}, 1: {}}, complete=(1,))]
    for method in (Plain(), NGram(), PaSS(slots_for(llama), tree=Tree.chain(2), rows=8)):
        got = generate(llama, ids, method, max_new_tokens=40, eos_token_id=[], grammar=each)
        assert got.lengths == (18, 1) and new_tokens(got, ids)[0] == list(range(10, 28))
    assert generate(llama, ids, max_new_tokens=5, eos_token_id=[], grammar=each).lengths == (5, 1)


def test_a_dead_end_is_an_error_that_says_where(llama):
    grammar = Automaton({0: {9: 1}, 1: {}})
    with pytest.raises(RuntimeError, match="request 0: no token is allowed after 3 tokens"):
        generate(llama, torch.tensor([[3, 4]]), max_new_tokens=5, eos_token_id=7, grammar=grammar)


def test_a_grammar_that_contradicts_itself_is_found(llama):
    class Wrong(Automaton):
        def accept(self, token):
            return False

        def fork(self):
            return Wrong(self.table)

    with pytest.raises(
        RuntimeError, match=r"grammar Wrong\.accept must take the tokens of its mask, got False for token 9"
    ):
        generate(llama, torch.tensor([[3, 4]]), max_new_tokens=5, eos_token_id=[], grammar=Wrong({0: {9: 0}}))


# ---- the guide ----


@pytest.mark.parametrize("vocabulary", [31, 32, 33, 97])
def test_a_guide_agrees_with_its_automaton_along_random_paths(vocabulary):
    generator = torch.Generator().manual_seed(vocabulary)
    ends = (5, vocabulary - 1)
    grammar = random_automaton(vocabulary, seed=vocabulary, complete=(0, 2), ends=ends)
    guide, text = Guide(grammar, vocabulary, ends), []
    for _ in range(60):
        path = []
        for _ in range(int(torch.randint(5, (), generator=generator))):
            allowed = sorted(grammar.allowed_after([*text, *path]))
            others = torch.randint(-1, vocabulary + 40, (1,), generator=generator).tolist()
            choices = allowed if allowed and torch.rand((), generator=generator) < 0.8 else others
            path.append(choices[int(torch.randint(len(choices), (), generator=generator))])
        allowed = grammar.allowed_after([*text, *path], ends)
        words = guide.mask(path).tolist()
        ended = any(token in ends for token in path) and guide.allows(path)
        bits = {v for v in range(32 * len(words)) if words[v // 32] >> v % 32 & 1}
        after = any(token in ends and guide.allows(path[: i + 1]) for i, token in enumerate(path))
        assert bits == (set(range(32 * len(words))) if after else allowed), (text, path)
        assert guide.allows(path) == (grammar.state_after(path and [*text, *path]) is not None or ended)
        new = path[: guide.allowed_count(path)]
        if new and not any(token in ends for token in new):
            assert guide.advance(new) == (len(new), False)
            text += new


def test_words_of_allowed_tokens():
    words = torch.full((3,), 7, dtype=torch.int32)
    allow_tokens(words, [0, 31, 33, 95])
    assert [word & 0xFFFFFFFF for word in words.tolist()] == [1 << 31 | 1, 2, 1 << 31]
    for wrong, came in (
        ([7] * 3, "list"),
        (words.long(), r"torch.int64 \[3\]"),
        (words[None], r"torch.int32 \[1, 3\]"),
    ):
        with pytest.raises(
            TypeError, match=f"allow_tokens: words must be one row of int32, as fill_mask gets it, got {came}"
        ):
            allow_tokens(wrong, [0])


# ---- refusals ----

REFUSED = {
    "too few": (dict(grammar=[Free()]), ValueError, r"one or None for each of the 2 requests, got 1"),
    "a class": (dict(grammar=Automaton), TypeError, "grammar must be like pass_ext.Grammar, got the class Automaton"),
    "a string": (
        dict(grammar='{"type": "object"}'),
        TypeError,
        "got str without accept, rollback, fill_mask, forced, fork",
    ),
    "run ahead": (dict(grammar=Free(), run_ahead=True), ValueError, "a grammar's masks are made on the host, got True"),
    "coins": (
        dict(grammar=Free(), rule=SyntheticAcceptance(0.5)),
        ValueError,
        "rule must be a name with a grammar, .* got Synth",
    ),
    "longest branch": (dict(grammar=Free(), rule="longest_branch"), ValueError, "grammar must be None .* got Free"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(llama, name):
    arguments, error, message = REFUSED[name]
    arguments = {**arguments, "session": Session(llama, run_ahead=arguments.get("run_ahead"))}
    arguments.pop("run_ahead", None)
    with pytest.raises(error, match=message):
        generate(llama, torch.tensor([[3, 4], [5, 6]]), max_new_tokens=5, **arguments)


def test_none_for_all_is_no_grammar(llama):
    """Then the loop may run ahead as usual."""
    ids = torch.tensor([[3, 4]])
    options = dict(max_new_tokens=5, eos_token_id=[], session=Session(llama, run_ahead=True))
    assert generate(llama, ids, grammar=[None], **options).stats.ahead_calls > 0


def test_the_interface_has_defaults():
    class Least(Grammar):
        accept = rollback = fill_mask = lambda self, *_: True
        may_end = True

    grammar = Least()
    assert grammar.forced() == () and type(grammar.fork()) is Least and grammar.fork() is not grammar
