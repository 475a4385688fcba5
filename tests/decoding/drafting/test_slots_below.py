"""Look-ahead slots below a head's chain: drafts and calls are those of the formula, texts are Plain's."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")

from support.generation import assert_as_alone
from support.grammars import random_automaton
from support.head_kinds import head_of_kind
from support.heads import plain_loop
from support.recorded import Recorded
from support.small_models import whole_prompts

from pass_ext import LookaheadEmbedding, NGram, PaSS, Plain, Session, Tree, generate

pytestmark = pytest.mark.usefixtures("one_thread")

LIMITS = dict(max_new_tokens=16, eos_token_id=[])
SLOTS, ABOVE = 5, 2


def slots_of(target, rank=4, seed=1):
    torch.manual_seed(seed)
    table = target.get_input_embeddings().weight.detach()
    lookahead = LookaheadEmbedding.from_table(SLOTS, table, rank=rank)
    torch.nn.init.normal_(lookahead.weight, std=float(table.std()))
    if rank:
        torch.nn.init.normal_(lookahead.transition_right, std=0.05)
    return lookahead


@pytest.fixture(scope="module", params=["EAGLE-3", "P-EAGLE", "MTP"])
def head(request, tmp_path_factory):
    """Its method has slots after every node."""
    kind = head_of_kind(request.param, tmp_path_factory.mktemp("head"), length=ABOVE)
    lookahead = PaSS(slots_of(kind.target), rows=64, recall=False)
    return kind._replace(method=replace(kind.method, lookahead=lookahead))


class SlotsBelow:
    """The formula, for greedy texts: the head's chain, and below it the best tokens of slots after the token in front of the
    text's last one. first: the slot that drafts at level 1."""

    def __init__(self, head, first=0):
        self.head, self.first, self.lookahead = head, first, head.method.lookahead.lookahead
        self.table = head.target.get_input_embeddings().weight

    def chain(self, text, levels):
        chain = self.head.chain(text, min(levels, ABOVE))
        rows = torch.cat((self.table[text[:-1]], self.lookahead.weight))[None]
        logits = self.head.target(inputs_embeds=rows).logits[0, len(text) - 1 :]
        left, right = self.lookahead.transition_tables(self.table)
        for level in range(ABOVE, min(levels, SLOTS)):
            scores = logits[level - self.first].log_softmax(0)
            best = scores.topk(64).indices
            chain.append(int(best[(scores[best] + right[best] @ left[chain[-1]]).argmax()]))
        return chain


def test_drafts_and_calls_are_those_of_the_formula(head):
    if head.target.config.model_type != "llama":
        pytest.skip("the formula is for models that read rows of embeddings alone, as Llama's")
    ids = head.prompts(1)[0]
    recorded, prompt = Recorded(head.method), ids[0].tolist()
    got = generate(head.target, ids, recorded, **LIMITS)
    text, calls, drafts = plain_loop(SlotsBelow(head), head.target, prompt, 16, SLOTS)
    assert got.sequences[0].tolist() == text and got.stats.model_calls == calls
    assert recorded.tokens() == drafts and max(map(len, drafts)) == SLOTS
    assert recorded.tokens() != plain_loop(SlotsBelow(head, first=1), head.target, prompt, 16, SLOTS)[2]
    alone = generate(head.target, ids, replace(head.method, lookahead=None), **LIMITS)
    assert got.stats.num_draft_tokens > alone.stats.num_draft_tokens


@pytest.mark.parametrize("count", [1, 3, 8])
def test_texts_are_plains(head, count):
    """Greedy and by seed, ragged; slots after some nodes alone; beside n-grams, and under grammars."""
    ids, mask = head.prompts(count)
    warm = dict(temperature=[0.8, 0.0, 1.2, 0.5, 0.9, 1.0, 0.3, 0.7][:count], top_p=0.95, seeds=list(range(count)))
    few = replace(head.method, lookahead=replace(head.method.lookahead, rows=14, recall=True), ngram=NGram(shortest=1))
    grammars = [random_automaton(head.vocabulary, seed=seed) for seed in range(count)]
    for method, options in (
        (head.method, {}), (few, {}), (head.method, warm), (few, dict(warm, rule="typical", temperature=0.0)),
        (few, dict(warm, grammar=grammars)),
    ):  # fmt: skip
        options = dict(LIMITS, attention_mask=mask, **options) | dict(
            eos_token_id=[] if "grammar" in options else [3, 9]
        )
        want = generate(head.target, ids, Plain(), **options)
        got = generate(head.target, ids, method, **options)
        assert torch.equal(got.sequences, want.sequences) and got.lengths == want.lengths


def test_a_request_has_the_drafts_that_it_has_alone(head):
    ids, mask = head.prompts(4, longest=9, seed=2)
    of_each = dict(temperature=[0.5, 1.3, 0.0, 0.9], top_k=[0, 5, 3, 4], seeds=[3, 50, 7, 1])
    assert_as_alone(head.target, head.method, ids, mask, of_each, max_new_tokens=14, eos_token_id=[3, 9])


def test_a_session_that_goes_on(head):
    ids = whole_prompts(1, 9, vocabulary=head.vocabulary)
    session = Session(head.target, capacity=80)
    first = generate(head.target, ids, head.method, session=session, **LIMITS).sequences
    again = generate(head.target, first, head.method, session=session, **LIMITS).sequences
    assert torch.equal(again, generate(head.target, first, Plain(), **LIMITS).sequences)


def test_where_no_slots_pay_the_head_drafts_alone(head):
    """The limit of rows leaves no room for a group."""
    ids = head.prompts(1)[0]
    recorded = Recorded(replace(head.method, lookahead=replace(head.method.lookahead, rows=SLOTS + 1)))
    generate(head.target, ids, recorded, **LIMITS)
    assert {len(drafts) for drafts in recorded.tokens()} <= {1, ABOVE}
    assert all(not candidates.groups for _, candidates in recorded.of())


def test_settings_that_do_not_fit_are_refused(head):
    method, lookahead = head.method, head.method.lookahead
    for changes, message in (
        (dict(length=SLOTS), f"lookahead must have more slots than the chain has levels, {SLOTS}, got {SLOTS}"),
        (dict(branching=(2, 1)), "lookahead drafts below a chain: branching must be None"),
        (dict(lookahead=replace(lookahead, tree=Tree.chain(2))), "lookahead must have passes=1 and no tree"),
        (dict(lookahead=replace(lookahead, ngram=NGram())), "give ngram to .*, not to its lookahead"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(method, **changes)
    with pytest.raises(TypeError, match="lookahead must be a PaSS or None"):
        replace(method, lookahead=lookahead.lookahead)
    with pytest.raises(ValueError, match=r"look-ahead and .* candidates together, got 'rejection'"):
        generate(head.target, torch.tensor([[5, 6, 7]]), method, rule="rejection", temperature=1.0, **LIMITS)
    with pytest.raises(ValueError, match=r"embed|width|hidden|dim"):
        other = PaSS(LookaheadEmbedding(SLOTS, 8), rows=64)
        generate(head.target, torch.tensor([[5, 6, 7]]), replace(method, lookahead=other), **LIMITS)
