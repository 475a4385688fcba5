"""Draft models: texts are the target's own whatever is drafted; caches follow the text; decisions stop drafting; refusals."""

import copy

import pytest
import torch

pytest.importorskip("transformers")

from support.generation import BUSHY, Monotone, assert_as_alone, disturbed
from support.grammars import random_automaton
from support.small_models import ARCHITECTURES, JUDGED, VOCABULARY, ragged_prompts, small_model, whole_prompts

import pass_ext
from pass_ext import EarlyExitDraft, MultiCandidate, NGram, PaSS, Plain, Speculative, Tree, generate
from pass_ext.decoding.accept import DECODING_RULES
from pass_ext.decoding.drafting.candidates import Proposal
from pass_ext.decoding.drafting.from_draft_model import ModelDrafter
from pass_ext.decoding.session.session import Session

pytestmark = pytest.mark.usefixtures("one_thread")

NOT_LEFT_EARLY = (
    "gemma2",
    "phi",
    "gpt_neox",
    "opt",
)  # not of Llama's form: test_early_exit.py tests that they are refused
LIMITS = dict(max_new_tokens=24, eos_token_id=[])


@pytest.fixture(scope="module")
def near(llama):
    """A draft that is often right."""
    return disturbed(llama, 0.06)


def lookahead_for(model, vocabulary=VOCABULARY):
    torch.manual_seed(0)
    slots = pass_ext.LookaheadEmbedding(3, model.get_input_embeddings().weight.shape[1], vocabulary=vocabulary)
    torch.nn.init.normal_(slots.weight, std=0.5)
    return slots


def methods_for(model, draft):
    slots = lookahead_for(model)
    methods = {
        "chain": Speculative(draft, 4),
        "chain and n-grams": Speculative(draft, 3, ngram=NGram(longest=2, shortest=1, tokens=5)),
        "branching": MultiCandidate(draft, (3, 2, 1)),
        "tree": MultiCandidate(draft, BUSHY),
        "with look-ahead": MultiCandidate(draft, (2, 2), lookahead=PaSS(slots, tree=Tree([-1, 0, 0, 1]), rows=24)),
        "with everything": MultiCandidate(
            draft, (2, 1, 1), lookahead=PaSS(slots, rows=12), ngram=NGram(shortest=1), decision=confident
        ),
    }
    if model.config.model_type not in NOT_LEFT_EARLY:
        methods["left early"] = MultiCandidate(EarlyExitDraft(model, layers=1), (3, 1), decision=confident)
    return methods


def confident(level):
    """A decision: goes on where the best child is likely."""
    return level.logprobs[:, 0].exp()


def of_transformers(model, ids, mask):
    made = model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return made[:, ids.shape[1] :]


# ---- the text ----


@pytest.mark.parametrize(
    "architecture", [pytest.param(name, marks=pytest.mark.slow if name in JUDGED else ()) for name in ARCHITECTURES]
)
def test_greedy_is_that_of_transformers(architecture):
    """Targets of every architecture, with drafts of the same and of another architecture; ragged batches with padding."""
    model = small_model(architecture)
    ids, mask = ragged_prompts(6, seed=5)
    want = of_transformers(model, ids, mask)
    methods = methods_for(model, disturbed(model, 0.05))
    if architecture != "llama":  # joining candidates to the tree is the same code for all
        methods = {name: methods[name] for name in ("chain", "tree", "left early") if name in methods}
    for name, method in {**methods, "strangers": Speculative(small_model("qwen2", seed=7), 3)}.items():
        got = generate(model, ids, method, attention_mask=mask, **LIMITS)
        assert torch.equal(got.sequences[:, ids.shape[1] :], want), name
        if name not in ("strangers", "left early"):
            assert got.stats.mean_acceptance_length > 1.4, name


def test_a_seed_gives_one_text_whatever_drafts(llama, near):
    ids, mask = ragged_prompts(7, seed=2)
    sampling = dict(temperature=[0.0, 0.3, 0.7, 1.0, 1.3, 0.9, 0.5], top_k=20, top_p=0.95, seeds=list(range(7)))
    want = generate(llama, ids, Plain(), attention_mask=mask, **LIMITS, **sampling)
    for name, method in methods_for(llama, near).items():
        got = generate(llama, ids, method, attention_mask=mask, **LIMITS, **sampling)
        assert torch.equal(got.sequences, want.sequences) and got.stats.num_accepted_tokens > 10, name
        alone = {key: value[3:4] if isinstance(value, list) else value for key, value in sampling.items()}
        got = generate(llama, ids[3:4], method, attention_mask=mask[3:4], **LIMITS, **alone)
        assert torch.equal(got.sequences, want.sequences[3:4]), name


@pytest.mark.parametrize("rule", DECODING_RULES)
@pytest.mark.parametrize("has_grammar", [False, True])
def test_a_request_is_judged_in_a_batch_as_alone(llama, near, rule, has_grammar):
    """Requests that differ in all they can, whose drafting stops at different levels, and some of which end early."""
    if has_grammar and rule == "longest_branch":
        pytest.skip("takes no grammar")
    ids, mask = ragged_prompts(4, seed=2)
    is_drawn_again = DECODING_RULES[rule].drafts == "with"
    coldest = 0.4 if is_drawn_again else 0.0  # alone, a greedy request has no two equal candidates
    of_each = dict(temperature=[0.5, 1.3, coldest, 0.9], top_k=[0, 5, 3, 20], seeds=[3, 50, 7, 1])
    if has_grammar:
        of_each["grammar"] = [*(random_automaton(VOCABULARY, seed=seed) for seed in range(3)), None]
    shape = (1, 1, 1) if rule == "block" else (2, 1, 1)
    decision = confident if has_grammar else None
    method = MultiCandidate(near, shape, replacement=is_drawn_again, decision=decision)
    options = dict(rule=rule, max_new_tokens=24, eos_token_id=[] if has_grammar else [5, 6, 7])
    got = assert_as_alone(llama, method, ids, mask, of_each, **options)
    assert got.stats.num_accepted_tokens > 4 and (has_grammar or min(got.lengths) < max(got.lengths))


# ---- the draft ----


@pytest.mark.parametrize(
    ("rule", "name"),
    [
        *(("coupled", name) for name in ("chain", "tree", "chain and n-grams", "with everything")),
        *(("rejection", name) for name in ("chain", "tree")),  # the rule refuses candidates of several origins
    ],
)
def test_drafts_depend_on_the_text_alone(llama, near, monkeypatch, name, rule):
    """Every step's candidates are those of a drafter that reads the whole text again: the caches follow the text."""
    method = methods_for(llama, near)[name]
    true, compared, lags = ModelDrafter.draft, [], []

    def draft(self, levels, first=None):
        if getattr(self, "fresh", False):
            return true(self, levels, first)
        lags.append(max(len(text) - 1 - held for text, held in zip(self._texts, self._calls._held, strict=True)))
        found = true(self, levels, first)
        anew = ModelDrafter(self._draft, self.tree, self._context, self._decision)
        anew.fresh = True
        anew.begin(self._calls._session)
        again = anew.draft(levels, first)
        for one, other in zip(found.candidates, again.candidates, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                assert (one.tree, one.tokens, one.draft_rows) == (other.tree, other.tokens, other.draft_rows)
                compared.append(one.tree.max_depth)
        assert (found.draft_logits is None) == (again.draft_logits is None) == (rule == "coupled")
        if found.draft_logits is not None:
            torch.testing.assert_close(found.draft_logits, again.draft_logits, rtol=1e-4, atol=1e-4)
        return found

    monkeypatch.setattr(ModelDrafter, "draft", draft)
    ids, mask = ragged_prompts(5, longest=12, seed=3)
    sampling = dict(temperature=0.7, seeds=range(5)) if rule == "rejection" else {}
    generate(llama, ids, method, attention_mask=mask, rule=rule, **LIMITS, **sampling)
    assert len(compared) > 20 and max(compared) >= 2 and max(lags) > 1


def test_prompts_longer_than_what_is_read_at_once(llama, near):
    ids, mask = ragged_prompts(3, longest=700, seed=1)
    want = generate(llama, ids, Plain(), attention_mask=mask, **LIMITS).sequences
    got = generate(llama, ids, Speculative(near, 3), attention_mask=mask, **LIMITS)
    assert torch.equal(got.sequences, want) and got.stats.mean_acceptance_length > 2


def test_the_draft_may_have_another_dtype(llama, near):
    ids, mask = ragged_prompts(4)
    want = generate(llama, ids, Plain(), attention_mask=mask, **LIMITS).sequences
    got = generate(llama, ids, Speculative(copy.deepcopy(near).bfloat16(), 4), attention_mask=mask, **LIMITS)
    assert torch.equal(got.sequences, want) and got.stats.mean_acceptance_length > 2
    sampling = dict(temperature=0.8, seeds=[1, 2, 3, 4], rule="rejection")
    got = generate(
        llama, ids, MultiCandidate(copy.deepcopy(near).bfloat16()), attention_mask=mask, **LIMITS, **sampling
    )
    assert got.lengths == (24,) * 4 and got.stats.mean_acceptance_length > 2


@pytest.mark.parametrize("tokens", [VOCABULARY - 30, VOCABULARY + 40])
def test_vocabularies_may_differ_by_padding(llama, tokens):
    draft = small_model("llama", vocab_size=tokens)
    ids = torch.randint(3, VOCABULARY - 30, (3, 6), generator=torch.Generator().manual_seed(0))
    want = generate(llama, ids, Plain(), **LIMITS).sequences
    seen = []
    method = MultiCandidate(draft, (3, 1), decision=lambda level: seen.append(level) or level.logprobs[:, 0] > -99)
    assert torch.equal(generate(llama, ids, method, **LIMITS).sequences, want)
    assert {level.logits.shape[1] for level in seen} == {VOCABULARY}
    assert max(int(level.tokens.max()) for level in seen) < VOCABULARY
    for rule in ("rejection", "traversal"):
        got = generate(llama, ids, method, temperature=0.9, seeds=[1, 2, 3], rule=rule, **LIMITS)
        assert got.sequences.max() < VOCABULARY


def test_one_call_per_level_for_all_requests(llama, near, monkeypatch):
    calls = []
    watch = near.register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        ids, mask = ragged_prompts(6, longest=20)
        got = generate(llama, ids, MultiCandidate(near, (2, 2, 1)), attention_mask=mask, **LIMITS)
    finally:
        watch.remove()
    assert len(calls) <= 3 * (got.stats.model_calls - 1) + 1, "and one for the prompts"


def test_no_more_levels_than_tokens_are_wanted(llama, near):
    ids = whole_prompts(1, longest=6)
    for new_tokens in (1, 2, 3):
        calls = []
        watch = near.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        got = generate(llama, ids, Speculative(near, 5), max_new_tokens=new_tokens, eos_token_id=[])
        watch.remove()
        assert got.lengths == (new_tokens,) and len(calls) <= new_tokens - 1


@pytest.mark.parametrize("make", [Speculative, MultiCandidate], ids=["chain", "tree"])
def test_a_draft_that_knows_the_law_is_always_right(make):
    """Coupled candidates get the noise of their own positions, so they are exactly the tokens that the target draws."""
    ids, options = torch.tensor([[1, 2, 3], [4, 5, 6]]), dict(max_new_tokens=13, temperature=1.0, seeds=[1, 2])
    shape = 3 if make is Speculative else (2, 1, 2)
    made = generate(Monotone(), ids, make(Monotone(), shape), rule="coupled", **options)
    assert torch.equal(made.sequences, generate(Monotone(), ids, **options).sequences)
    assert made.stats.model_calls == 4, "the prompts' own token, and three steps of three candidates and one more"


# ---- decisions ----


def test_a_decision_says_which_requests_go_on(llama, near):
    """Request 1 stops after the first level, request 2 after the second, the others go on to the end."""
    ids, mask = ragged_prompts(4, longest=8)
    asked = []

    def decision(level):
        asked.append(level)
        assert level.tokens.shape == level.logprobs.shape and len(level.logits) == len(level.requests)
        assert level.hidden is None and bool((level.logprobs[level.tokens >= 0] <= 0).all())
        return ~((level.requests == 1) | ((level.requests == 2) & (level.depth == 2)))

    drafts = drafts_of(llama, ids, mask, MultiCandidate(near, (2, 1, 1), decision=decision))
    depths = [{drafted[b].tree.max_depth for drafted in drafts if drafted[b] is not None} for b in range(4)]
    assert depths[1] == {1} and max(depths[2]) == 2 and max(depths[0]) == max(depths[3]) == 3
    assert {level.depth for level in asked} == {1, 2}, "no decision after the last level"
    assert not any(bool((level.requests == 1).any()) for level in asked if level.depth == 2)


def drafts_of(model, ids, mask, method, **options):
    """The candidates of every step."""
    drafts, true = [], ModelDrafter.draft
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            ModelDrafter,
            "draft",
            lambda self, *arguments: drafts.append(true(self, *arguments).candidates) or Proposal(drafts[-1]),
        )
        generate(model, ids, method, attention_mask=mask, **LIMITS, **options)
    return drafts


def test_scores_are_compared_with_the_threshold(llama, near):
    ids, mask = ragged_prompts(2, longest=8)

    class Scores:
        def __init__(self, threshold):
            self.threshold = threshold

        def __call__(self, level):
            return torch.full((len(level.requests),), 0.4)

    for threshold, depth in ((0.3, 3), (0.4, 1), (0.5, 1)):
        drafts = drafts_of(llama, ids, mask, MultiCandidate(near, (2, 1, 1), decision=Scores(threshold)))
        assert max(drafted[0].tree.max_depth for drafted in drafts if drafted[0]) == depth


def test_hidden_rows_are_given_to_those_that_need_them(llama, near):
    ids, mask = ragged_prompts(3, longest=8)

    class Hidden:
        needs_hidden = True

        def __call__(self, level):
            logits = near.lm_head(level.hidden)
            torch.testing.assert_close(logits, level.logits, rtol=1e-4, atol=1e-4)
            return logits[:, 0] > -99

    got = generate(llama, ids, MultiCandidate(near, (2, 2), decision=Hidden()), attention_mask=mask, **LIMITS)
    assert torch.equal(got.sequences, generate(llama, ids, Plain(), attention_mask=mask, **LIMITS).sequences)


def test_a_decision_of_the_wrong_shape_is_refused(llama, near):
    ids = whole_prompts(1)
    with pytest.raises(ValueError, match=r"one score for each of the 1 rows, got \[5\]"):
        generate(llama, ids, MultiCandidate(near, decision=lambda level: torch.zeros(5)), **LIMITS)
    with pytest.raises(ValueError, match="got list"):
        generate(llama, ids, MultiCandidate(near, decision=lambda level: [1.0]), **LIMITS)


def test_stopped_requests_are_not_read_again(llama, near):
    """After the prompts, a level's call has only the rows of requests that draft on, and no text is read twice."""
    ids, mask = ragged_prompts(3, longest=20)
    rows = []
    watch = near.register_forward_pre_hook(
        lambda _module, _arguments, options: rows.append(options["inputs_embeds"].shape[1]), with_kwargs=True
    )
    stops = MultiCandidate(near, (2, 1, 1, 1), decision=lambda level: level.requests == 0)
    try:
        generate(llama, ids, stops, attention_mask=mask, **LIMITS)
    finally:
        watch.remove()
    assert sum(rows[:2]) >= mask.sum() - 3 * 9, "the prompts"
    # A step: all roots with the unread tokens above them, then at most 3 + 2, 5 + 2, 7 + 2 rows of request 0 alone.
    assert max(rows[2:]) <= 3 * 9 and min(rows[2:]) >= 1
    steps = [start for start, count in enumerate(rows) if count in (3, 4, 5, 6)]
    assert len(steps) > 5


@pytest.mark.parametrize("positions", [20, 34])
def test_a_draft_of_fewer_positions_stops_drafting(positions):
    target = small_model("opt")
    draft = small_model("opt", max_position_embeddings=positions)
    ids, mask = ragged_prompts(3, longest=18)
    want = generate(target, ids, Plain(), attention_mask=mask, **LIMITS)
    got = generate(target, ids, Speculative(draft, 4), attention_mask=mask, **LIMITS)
    assert torch.equal(got.sequences, want.sequences) and 0 < got.stats.num_draft_tokens < 3 * 24 * 4


def test_an_early_exit_of_another_model_has_caches_of_its_own(llama, near):
    ids, mask = ragged_prompts(4)
    want = generate(llama, ids, Plain(), attention_mask=mask, **LIMITS).sequences
    for other in (near, small_model("llama", hidden_size=32), small_model("llama", num_hidden_layers=5)):
        draft = EarlyExitDraft(other, layers=len(other.model.layers))
        got = generate(llama, ids, Speculative(draft, 3), attention_mask=mask, **LIMITS)
        assert torch.equal(got.sequences, want)
        if other is near:
            assert got.stats.mean_acceptance_length > 2


def test_the_inverse_rule_gives_one_text_for_a_seed(llama, near):
    """As under rule coupled, drafts decide how far a step gets and nothing else, whoever drafts and whatever the batch."""
    ids, mask = ragged_prompts(3)
    options = dict(temperature=0.9, top_p=0.95, seeds=[5, 6, 7], rule="coupled_inverse", **LIMITS)
    want = generate(llama, ids, Plain(), attention_mask=mask, **options)
    for method in (MultiCandidate(near, (3, 2)), Speculative(near, 3, ngram=NGram(shortest=1, branches=2)), NGram()):
        got = generate(llama, ids, method, attention_mask=mask, **options)
        assert torch.equal(got.sequences, want.sequences)
    alone = generate(llama, ids[2:], Plain(), attention_mask=mask[2:], **options | {"seeds": 7})
    assert torch.equal(alone.sequences[0, -alone.lengths[0] :], want.sequences[2, -want.lengths[2] :])
    assert not torch.equal(generate(llama, ids, Plain(), attention_mask=mask, **options | {"rule": "coupled"}).sequences,
                           want.sequences)  # fmt: skip


def test_every_rule_is_greedy_at_temperature_0(llama, near):
    ids, mask = ragged_prompts(3)
    want = generate(llama, ids, Plain(), attention_mask=mask, **LIMITS).sequences
    for rule in pass_ext.RULES:
        for method in (MultiCandidate(near, (3, 2)), Speculative(near, 3, ngram=NGram(shortest=1, branches=2))):
            assert torch.equal(generate(llama, ids, method, attention_mask=mask, rule=rule, **LIMITS).sequences, want)


def test_plans_that_come_out_plain(llama, near):
    ids = whole_prompts(1)
    never = MultiCandidate(near, "auto", hit_rates=[[0.0, 0.0]])
    assert generate(llama, ids, never, **LIMITS).stats.num_draft_tokens == 0
    assert generate(llama, ids, never, rule="longest_branch", **LIMITS).lengths == (24,)
    generate(
        llama, ids, MultiCandidate(near, "auto", hit_rates=[[0.9, 0.05]] * 4), rule="block", temperature=1.0, **LIMITS
    )


def test_drafting_never_waits_for_the_gpu(cuda, llama, near):
    """Drafting without a decision synchronises once only, to read the tokens."""
    ids, mask = (x.cuda() for x in ragged_prompts(4, longest=12))
    target, draft = copy.deepcopy(llama).cuda(), copy.deepcopy(near).cuda()
    methods = [MultiCandidate(draft, (3, 2, 1)), Speculative(draft, 4)]
    options = dict(attention_mask=mask, temperature=0.8, seeds=[1, 2, 3, 4], rule="rejection", **LIMITS)
    true, read = ModelDrafter.draft, torch.Tensor.tolist

    def watched(self, *arguments):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return true(self, *arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def awaited(self):
        torch.cuda.set_sync_debug_mode("default")
        return read(self)

    for method in methods:
        generate(target, ids, method, **options)  # trees are packed for the first time, kernels loaded
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ModelDrafter, "draft", watched)
            patch.setattr(torch.Tensor, "tolist", awaited)
            patch.setattr(Session, "packed", packed_before(Session.packed))
            generate(target, ids, method, **options)


def packed_before(pack):
    """Lets packing synchronise: a new shape is copied to the device with a wait, cached shapes are not."""

    def quiet(self, trees):
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")
        try:
            return pack(self, trees)
        finally:
            torch.cuda.set_sync_debug_mode(mode)

    return quiet


# ---- refusals ----


def test_refusals(llama, near):
    ids = whole_prompts(2)

    def refused(method, match, **options):
        with pytest.raises((ValueError, TypeError), match=match):
            generate(llama, ids, method, **LIMITS, **options)

    warm = dict(temperature=1.0)
    refused(Speculative(near), "several candidates of one parent: use MultiCandidate, got a chain", rule="kseq", **warm)
    refused(MultiCandidate(near), r"use MultiCandidate\(replacement=True\)", rule="kseq", **warm)
    refused(MultiCandidate(near, replacement=True), "use rule rejection_with_replacement or kseq", **warm)
    refused(MultiCandidate(near), "rule 'block' takes chains, got a tree with 16 branches", rule="block", **warm)
    without_q = "'coupled' or 'typical' or 'coupled_inverse'"
    together = f"rule must be {without_q} for n-gram and draft model candidates together, got 'rejection'"
    refused(MultiCandidate(near, ngram=NGram()), together, rule="rejection", **warm)
    refused(MultiCandidate(near, ngram=NGram()), "got n-gram and draft model candidates", rule="longest_branch", **warm)
    refused(
        Plain(),
        r"method must be MultiCandidate\(...\) without lookahead or ngram, got no candidates",
        rule="longest_branch",
    )
    refused(Speculative(near), "use MultiCandidate", rule="longest_branch")
    refused(MultiCandidate(near), "takes no logits_processor", rule="longest_branch", logits_processor=lambda i, x: x)
    refused(Speculative("near"), "Speculative: draft_model: model must be a transformers model that writes text")
    other = small_model("llama", vocab_size=VOCABULARY + 2000)
    refused(Speculative(other), "vocabulary has 2097 tokens, the target's 97: more than padding")


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda d: Speculative(d, 0), 'length, if not "auto", must be a whole number, 1 to 32, got 0'),
        (lambda d: Speculative(d, True), "got True"),
        (lambda d: MultiCandidate(d, "deep"), "branching must be numbers"),
        (lambda d: MultiCandidate(d, 4), 'branching must be numbers, a Tree or "auto", got 4'),
        (lambda d: MultiCandidate(d, ()), "branching must have 1 to 32 levels, got 0"),
        (lambda d: MultiCandidate(d, (4, 4, 4, 4)), "at most 256 rows, got 341"),
        (lambda d: MultiCandidate(d, Tree([-1, 0, 1, 0])), "numbered level by level"),
        (lambda d: MultiCandidate(d, Tree.chain(2).with_lookahead(2)), "look-ahead slots"),
        (lambda d: MultiCandidate(d, decision=3), "decision must be callable, got int"),
        (lambda d: MultiCandidate(d, lookahead=Plain()), "lookahead must be a PaSS or None, got Plain"),
    ],
)
def test_settings_that_make_no_sense(near, make, match):
    with pytest.raises((ValueError, TypeError), match=match):
        make(near)


class Words:
    """A tokenizer with a vocabulary and nothing else."""

    def __init__(self, words):
        self.words = words

    def get_vocab(self):
        return {word: number for number, word in enumerate(self.words)}


def test_other_tokenizers_are_refused(near):
    own = Words(["a", "b", "c"])
    Speculative(near, tokenizers=(own, Words(["a", "b", "c", "padding"])))
    with pytest.raises(
        ValueError, match=r"1 is token 'b' for the target and 'c' for the draft \(2 of 3 tokens differ\)"
    ):
        Speculative(near, tokenizers=(own, Words(["a", "c", "b"])))
    with pytest.raises(ValueError, match="3 of 3 tokens differ"):
        Speculative(near, tokenizers=(own, Words(["x", "y", "z"])))
    with pytest.raises(ValueError, match="it has no token"):
        MultiCandidate(near, tokenizers=(Words(map(str, range(3000))), Words(map(str, range(1000)))))
