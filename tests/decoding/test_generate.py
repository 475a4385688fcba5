"""generate: every method writes the text of the model alone, whatever the batch, the padding and the drafts."""

import pytest
import torch

pytest.importorskip("transformers")

from support.chi_square import counted, fit
from support.generation import Prophet, distribution_of_texts, greedy_of_transformers, methods_for, slots_for, unpadded
from support.small_models import ARCHITECTURES, JUDGED, VOCABULARY, ragged_prompts, small_model, whole_prompts

import pass_ext
from pass_ext import NGram, PaSS, Plain, Session, Tree, generate


@pytest.mark.parametrize(
    "architecture", [pytest.param(name, marks=pytest.mark.slow if name in JUDGED else ()) for name in ARCHITECTURES]
)
def test_greedy_is_that_of_transformers(architecture, monkeypatch):
    """40 ragged prompts by every method, for each architecture; about three in a hundred tokens end a text."""
    model = small_model(architecture)
    ids, mask = ragged_prompts(40)
    want = greedy_of_transformers(model, ids, mask, 24, eos_token_id=[5, 6, 7])
    for name, method in methods_for(model).items():
        got = generate(model, ids, method, max_new_tokens=24, attention_mask=mask, eos_token_id=[5, 6, 7])
        assert torch.equal(got.sequences, want), name
        assert got.stats.tokens == sum(got.lengths) and got.stats.model_calls <= 24, name
    Prophet(monkeypatch, unpadded(want, mask))
    for name in ("one pass", "two passes", "one pass with ngrams"):
        got = generate(
            model, ids, methods_for(model)[name], max_new_tokens=24, attention_mask=mask, eos_token_id=[5, 6, 7]
        )
        assert torch.equal(got.sequences, want), name
        assert got.stats.mean_acceptance_length > 1.8, "the prophet is believed"
        assert sum(got.stats.acceptance_histogram[2:]) > 0, name


def test_a_seed_gives_one_text_whatever_the_method_and_the_batch(llama, monkeypatch):
    ids, mask = ragged_prompts(12)
    sampling = dict(temperature=torch.linspace(0, 1.1, 12), top_k=[0, 20] * 6, top_p=0.95)
    seeds = torch.arange(100, 112)
    want = generate(
        llama, ids, Plain(), max_new_tokens=20, attention_mask=mask, seeds=seeds, eos_token_id=[], **sampling
    )
    assert len(set(map(tuple, want.sequences[:, -20:].tolist()))) == 12
    for name, method in methods_for(llama).items():
        got = generate(
            llama, ids, method, max_new_tokens=20, attention_mask=mask, seeds=seeds, eos_token_id=[], **sampling
        )
        assert torch.equal(got.sequences, want.sequences), name
    Prophet(monkeypatch, unpadded(want.sequences, mask))
    for name in ("one pass", "two passes"):
        method = methods_for(llama)[name]
        got = generate(
            llama, ids, method, max_new_tokens=20, attention_mask=mask, seeds=seeds, eos_token_id=[], **sampling
        )
        assert torch.equal(got.sequences, want.sequences) and got.stats.mean_acceptance_length > 1.8, name
    monkeypatch.undo()
    alone = dict(temperature=sampling["temperature"][7:8], top_k=[20], top_p=0.95, seeds=[107], eos_token_id=[])
    got = generate(
        llama, ids[7:8], methods_for(llama)["one pass"], max_new_tokens=20, attention_mask=mask[7:8], **alone
    )
    assert torch.equal(got.sequences, want.sequences[7:8])


def test_fresh_seeds_come_from_the_generator(llama):
    ids, mask = ragged_prompts(2)

    def text(seed):
        generator = torch.Generator().manual_seed(seed)
        return generate(llama, ids, max_new_tokens=8, attention_mask=mask, temperature=1.0, seeds=generator).sequences

    assert torch.equal(text(1), text(1)) and not torch.equal(text(1), text(2))


SAMPLED = [
    ("coupled", "transition"), ("rejection", "two passes"), ("rejection", "ngram"), ("rejection", "transition"),
    ("traversal", "one pass"), ("kseq", "one pass"), ("rejection_with_replacement", "two passes"), ("block", "chain"),
]  # fmt: skip
# Rule "coupled" writes exactly the text of plain decoding: the tests above.
MORE_SAMPLED = [("coupled", "one pass"), ("coupled", "two passes"), ("coupled", "ngram"), ("rejection", "one pass")]


@pytest.mark.parametrize(
    "rule,name", [*SAMPLED, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE_SAMPLED)]
)
def test_sampled_text_has_the_models_law(rule, name):
    """Chi square of 3,000 texts of three tokens over six, against their probabilities by the model itself."""
    vocabulary, prompt, requests, new_tokens = 6, [3, 1, 4, 1], 3000, 3
    model = small_model("llama", vocab_size=vocabulary, sharpness=4.0)
    distribution = distribution_of_texts(model, prompt, vocabulary, new_tokens, 0.9)
    rich = name == "transition"
    lookahead = pass_ext.LookaheadEmbedding(2, 64, rank=4 * rich, deep_layers=2 * rich, vocabulary=vocabulary)
    if rich:
        torch.nn.init.normal_(lookahead.transition_right, std=20)
        torch.nn.init.normal_(lookahead.deep)
    method = {
        "one pass": PaSS(lookahead, tree=Tree.from_branching((2, 2)), rows=32),
        "transition": PaSS(lookahead, tree=Tree.from_branching((2, 2)), rows=32),
        "two passes": PaSS(lookahead, tree=Tree.from_branching((3, 1)), passes=2, rows=32),
        "chain": PaSS(lookahead, tree=Tree.chain(2), rows=32),
        "ngram": NGram(longest=2, shortest=1, tokens=2, branches=2),
    }[name]
    ids = torch.tensor(prompt).expand(requests, -1)
    seeds = torch.arange(requests)
    got = generate(
        model, ids, method, max_new_tokens=new_tokens, temperature=0.9, seeds=seeds, rule=rule, eos_token_id=[]
    )
    assert got.stats.num_accepted_tokens > requests / 10, "drafts take part"
    chi_square, freedom = fit(counted(got.sequences[:, -new_tokens:], vocabulary), distribution)
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5, (chi_square, freedom)


@pytest.mark.parametrize("side", ["left", "right", "both", "none"])
def test_padding_on_any_side(llama, side):
    ids, mask = ragged_prompts(6, longest=9)
    want = [
        generate(llama, row[own.bool()][None], max_new_tokens=7, eos_token_id=[]).sequences[0, own.sum() :]
        for row, own in zip(ids, mask, strict=True)
    ]
    lengths = mask.sum(1)
    if side == "none":
        same = ids[:, -1:]
        got = generate(llama, same, NGram(), max_new_tokens=7, eos_token_id=[]).sequences
        for row, only in zip(got, same, strict=True):
            assert torch.equal(row, generate(llama, only[None], max_new_tokens=7, eos_token_id=[]).sequences[0])
        return
    before = {"left": 9 - lengths, "right": 0 * lengths, "both": (9 - lengths) // 2}[side]
    moved = torch.full_like(ids, VOCABULARY - 1)  # the ids in the padding do not matter
    seen = torch.zeros_like(mask)
    for b, (start, length) in enumerate(zip(before.tolist(), lengths.tolist(), strict=True)):
        moved[b, start : start + length] = ids[b, 9 - length :]
        seen[b, start : start + length] = 1
    got = generate(llama, moved, methods_for(llama)["one pass"], max_new_tokens=7, attention_mask=seen, eos_token_id=[])
    assert torch.equal(got.sequences[:, :9], moved)
    assert got.sequences[:, 9:].tolist() == [row.tolist() for row in want]


def test_prompts_longer_than_a_call(llama):
    """A call has at most 1,024 rows, and a piece of many rows a call of its own: prompts of 1,500, 1,024, 1,000 and 3 tokens
    take five, and six where slots leave room for less."""
    longest = 1500
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCABULARY, (4, longest), generator=generator)
    mask = (torch.arange(longest) >= longest - torch.tensor([1500, 1024, 1000, 3])[:, None]).long()
    want = greedy_of_transformers(llama, ids, mask, 6, eos_token_id=None)
    for name in ("plain", "one pass"):
        got = generate(llama, ids, methods_for(llama)[name], max_new_tokens=6, attention_mask=mask, eos_token_id=[])
        assert torch.equal(got.sequences, want), name
        assert got.stats.model_calls <= 6 + 5


def test_an_end_inside_an_accepted_block(llama, monkeypatch):
    ids, mask = ragged_prompts(8)
    endless = generate(llama, ids, max_new_tokens=16, attention_mask=mask, eos_token_id=[])
    Prophet(monkeypatch, unpadded(endless.sequences, mask))
    new = endless.sequences[:, 24:]
    for ends in ([int(new[0, 3])], new[:, 6].tolist()):
        method = methods_for(llama)["one pass"]
        got = generate(llama, ids, method, max_new_tokens=16, attention_mask=mask, eos_token_id=ends)
        for b, row in enumerate(new.tolist()):
            length = next((i + 1 for i, token in enumerate(row) if token in ends), 16)
            assert got.lengths[b] == length
            assert got.sequences[b, 24:].tolist() == row[:length] + [0] * (max(got.lengths) - length)


def test_ngrams_are_no_longer_than_the_rest_of_the_text():
    """A model that repeats itself: every n-gram is right, and the last step's n-gram ends one token before the text."""
    rows = []

    class Repeating:
        embedding = torch.eye(8, 16)

        def __call__(self, given, positions, attend, wanted):
            attend(0, *[given[:, None]] * 3)
            rows.append(len(given))
            following = torch.eye(8)[(positions + 1) % 3]
            return following if wanted is None else following[wanted]

    ids = torch.tensor([[0, 1, 2, 0, 1, 2]])
    for new_tokens, calls in ((1, [6]), (2, [6, 1]), (3, [6, 2]), (6, [6, 5]), (9, [6, 7, 1]), (10, [6, 7, 2])):
        rows.clear()
        made = generate(Repeating(), ids, NGram(tokens=6), max_new_tokens=new_tokens)
        assert made.sequences[0, 6:].tolist() == [(6 + place) % 3 for place in range(new_tokens)]
        assert rows == calls


def test_one_new_token_takes_one_call(llama):
    ids, mask = ragged_prompts(3)
    for method in methods_for(llama).values():
        got = generate(llama, ids, method, max_new_tokens=1, attention_mask=mask)
        assert got.stats.model_calls == 1 and got.lengths == (1, 1, 1)


def test_logits_processors_see_each_nodes_own_path(llama, monkeypatch):
    from transformers import LogitsProcessorList, NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor

    ids, mask = ragged_prompts(5, longest=6)
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3), NoRepeatNGramLogitsProcessor(2)])
    want = []
    for row, own in zip(ids, mask, strict=True):  # one by one: penalties read padding too
        prompt = row[own.bool()][None]
        options = dict(repetition_penalty=1.3, no_repeat_ngram_size=2, eos_token_id=None)
        want.append(
            greedy_of_transformers(llama, prompt, torch.ones_like(prompt), 16, **options)[0, prompt.shape[1] :].tolist()
        )
    options = dict(max_new_tokens=16, attention_mask=mask, eos_token_id=[], logits_processor=processors)
    futures = [row[own.bool()].tolist() + new for row, own, new in zip(ids, mask, want, strict=True)]
    for name, method in methods_for(llama).items():
        assert generate(llama, ids, method, **options).sequences[:, 6:].tolist() == want, name
    Prophet(monkeypatch, futures)
    got = generate(llama, ids, methods_for(llama)["one pass"], **options)
    assert got.sequences[:, 6:].tolist() == want and got.stats.mean_acceptance_length > 1.8


def test_stopping_criteria_are_asked_after_every_token(llama, monkeypatch):
    ids = whole_prompts(1)
    endless = generate(llama, ids, max_new_tokens=16, eos_token_id=[]).sequences
    Prophet(monkeypatch, endless.tolist())
    asked = []

    def stop(text, scores):
        asked.append(text.shape[1])
        return torch.tensor([text.shape[1] == 24 + 7])

    got = generate(llama, ids, methods_for(llama)["one pass"], max_new_tokens=16, eos_token_id=[], stopping=stop)
    assert torch.equal(got.sequences, endless[:, : 24 + 7]) and asked == list(range(25, 24 + 8))


def test_streamers_get_every_token_once(llama, monkeypatch):
    ids = whole_prompts(1)
    endless = generate(llama, ids, max_new_tokens=16, eos_token_id=[]).sequences
    Prophet(monkeypatch, endless.tolist())

    class Streamer:
        def __init__(self):
            self.heard, self.ended = [], 0

        def put(self, tokens):
            self.heard.append(tokens.tolist())

        def end(self):
            self.ended += 1

    class StepStreamer(Streamer):
        steps = ()

        def put_step(self, tokens, accepted):
            self.steps = (*self.steps, (tokens, accepted))

    method = methods_for(llama)["one pass"]
    plain, by_step = Streamer(), StepStreamer()
    for streamer in (plain, by_step):
        generate(llama, ids, method, max_new_tokens=16, eos_token_id=[], streamer=streamer)
        assert streamer.ended == 1
    assert plain.heard == [ids.tolist()] + [[token] for token in endless[0, 24:].tolist()]
    assert by_step.heard == [ids.tolist()]
    assert [token for tokens, _ in by_step.steps for token in tokens] == endless[0, 24:].tolist()
    assert all(0 <= accepted <= len(tokens) for tokens, accepted in by_step.steps)
    assert max(accepted for _, accepted in by_step.steps) >= 2


def test_the_model_is_as_it_was(llama, monkeypatch, tmp_path):
    ids, mask = ragged_prompts(2)
    before = llama.config._attn_implementation

    def own_parts():
        return [(name, sorted(vars(part)), len(part._forward_pre_hooks)) for name, part in llama.named_modules()]

    parts = own_parts()
    llama.train()
    monkeypatch.setenv("PASS_EXT_CACHE", str(tmp_path))  # rows "auto": measuring attaches inside a generation
    for method in (Plain(), PaSS(slots_for(llama, deep_layers=2))):
        generate(llama, ids, method, max_new_tokens=2, attention_mask=mask)
        assert llama.config._attn_implementation == before and llama.training
    llama.eval()
    assert own_parts() == parts

    def fails(text, scores):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        generate(llama, ids, max_new_tokens=2, attention_mask=mask, stopping=fails)
    assert llama.config._attn_implementation == before and not llama.training


def test_nan_is_an_error_that_says_where():
    model = small_model("llama")
    with torch.no_grad():
        model.lm_head.weight[7] = float("nan")
    ids, mask = ragged_prompts(2)
    with pytest.raises(RuntimeError, match=r"request 0: NaN or \+inf among the logits after \d+ tokens"):
        generate(model, ids, max_new_tokens=2, attention_mask=mask)


class Silent:
    """A streamer that keeps nothing."""

    def put(self, tokens):
        pass

    def end(self):
        pass


def test_refusals(llama):
    ids, mask = ragged_prompts(2)
    lookahead = slots_for(llama)
    wrong = [
        (dict(max_new_tokens=0), "max_new_tokens must be a whole number, 1 to 1073741824, got 0"),
        (dict(max_new_tokens=1 << 40), "max_new_tokens must be a whole number, 1 to 1073741824, got 1099511627776"),
        (dict(rule="best"), "rule must be one of coupled"),
        (dict(temperature=-1.0), "temperature must be 0"),
        (dict(temperature=[1.0, 1.0, 1.0]), "temperature must be one number, or one for each of the 2"),
        (dict(temperature=1.0, top_p=0.0), "top_p must be in"),
        (dict(temperature=1.0, seeds=[0.5, 1]), "seeds must be integers"),
        (dict(attention_mask=mask[:, 1:]), "attention_mask must be"),
        (dict(attention_mask=0 * mask), "input_ids: prompt 0 has no tokens"),
        (dict(attention_mask=mask.to("meta")), "attention_mask must hold numbers, got a tensor on the meta device"),
        (dict(attention_mask=torch.tensor([[1, 0] * 12] * 2)), "has a hole"),
        (dict(method="fast"), "method must be Plain"),
        (dict(method=PaSS(lookahead, ngram=NGram()), rule="rejection", temperature=1.0), "n-gram and look-ahead"),
        (dict(method=PaSS(lookahead, tree=Tree.from_branching((2,))), rule="block", temperature=1.0), "got 2 branches"),
        (dict(method=PaSS(pass_ext.LookaheadEmbedding(2, 32))), "belongs to another model"),
        (dict(streamer=object()), r"streamer must have put\(tokens\) and end\(\), got object"),
        (dict(streamer=Silent()), "a streamer takes one request, got 2"),
    ]  # fmt: skip
    for changes, message in wrong:
        options = {"max_new_tokens": 2, "attention_mask": mask, **changes}
        with pytest.raises((ValueError, TypeError), match=message):
            generate(llama, ids, **options)
    for strange, message in [
        (ids[0], "input_ids must be integers"),
        (ids.float(), "input_ids"),
        (ids + 90, f"input_ids: prompt 0 holds the id .* are 0 to {VOCABULARY - 1}"),
        (ids[:, :0], "input_ids: prompt 0 has no tokens"),
        (ids.to("meta"), "input_ids must hold numbers, got a tensor on the meta device"),
    ]:
        with pytest.raises(ValueError, match=message):
            generate(llama, strange, max_new_tokens=2)
    with pytest.raises(TypeError, match="model must be a transformers model that writes text"):
        generate(object(), ids, max_new_tokens=2)
    for make, message in [
        (lambda: PaSS(lookahead, passes=3), "PaSS: passes must be a whole number, 1 to 2, got 3"),
        (lambda: PaSS(lookahead, rows=1), 'PaSS: rows, if not "auto", must be a whole number, 2 to 256, got 1'),
        (lambda: PaSS(lookahead, slots=9), "PaSS: slots must be a whole number, 1 to 4, got 9"),
        (lambda: PaSS(lookahead, tree=Tree.chain(5)), "5 levels deep"),
        (lambda: NGram(longest=1), "shortest must be at most longest"),
        (lambda: NGram(tokens=0), "NGram: tokens must be a whole number, 1 or more, got 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            make()
    smallest = PaSS(lookahead, rows=2, slots=4, tree=Tree.chain(4))
    assert (smallest.rows, smallest.num_slots) == (2, 4)


def test_slots_that_shift_layers_must_fit():
    opt = small_model("opt")  # its embeddings are half as wide as its layers
    method = PaSS(slots_for(opt, deep_layers=2), rows=12)
    with pytest.raises(ValueError, match="the slots' vectors per layer must be 64 wide in opt, got 32"):
        generate(opt, torch.tensor([[5, 6]]), method, max_new_tokens=2)
    deeper = PaSS(slots_for(small_model("llama"), deep_layers=3), rows=12)
    with pytest.raises(ValueError, match="3 layers"):
        generate(small_model("llama"), torch.tensor([[5, 6]]), deeper, max_new_tokens=2)


def test_models_that_cannot_be_decoded_are_refused_by_name():
    llama = small_model("llama")
    llama.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ValueError, match="llama has LlamaDecoderLayer, a layer of the kind linear_attention"):
        generate(llama, torch.tensor([[1, 2]]), max_new_tokens=1)


def test_a_session_is_used_again(llama):
    ids, mask = ragged_prompts(3)
    method = methods_for(llama)["one pass"]
    options = dict(max_new_tokens=12, attention_mask=mask, eos_token_id=[])
    session = Session(llama)
    first = generate(llama, ids, method, session=session, **options)
    again = generate(llama, ids.flip(0), method, session=session, **{**options, "attention_mask": mask.flip(0)})
    assert torch.equal(again.sequences, first.sequences.flip(0))
    for changes in (
        dict(input_ids=ids[:2], attention_mask=mask[:2]),
        dict(model=small_model("llama")),
    ):
        with pytest.raises(ValueError, match=r"session must be of this model, [23] requests and room for"):
            generate(**{"model": llama, "input_ids": ids, "method": method, **options, "session": session, **changes})


def test_a_text_goes_on_from_its_cache(llama):
    ids = whole_prompts(3)
    whole = generate(llama, ids, max_new_tokens=12, eos_token_id=[])
    session, method = Session(llama), methods_for(llama)["one pass"]
    begun = generate(llama, ids, method, max_new_tokens=5, eos_token_id=[], session=session)
    known = int(session.prefix_lens.min())
    assert known >= ids.shape[1] + 4
    past = [(keys[:, : ids.shape[1] + 4], values[:, : ids.shape[1] + 4]) for keys, values in session.caches]
    for method in methods_for(llama).values():
        rest = generate(
            llama,
            begun.sequences,
            method,
            max_new_tokens=7,
            eos_token_id=[],
            session=Session(llama, past=(past, ids.shape[1] + 4)),
        )
        assert torch.equal(rest.sequences, whole.sequences) and rest.stats.model_calls <= 7
    with pytest.raises(ValueError, match="past holds 28 tokens, so prompts must be longer, got 24"):
        generate(llama, ids, max_new_tokens=1, session=Session(llama, past=(past, 28)))


@pytest.mark.parametrize("name", ["plain", "one pass", "two passes", "one pass with ngrams"])
def test_recorded_steps_on_a_gpu(cuda, name):
    model = small_model("llama").cuda()
    ids, mask = (x.cuda() for x in ragged_prompts(6))
    options = dict(max_new_tokens=24, attention_mask=mask, eos_token_id=[])
    want = generate(model, ids, methods_for(model)[name], **options)
    session = Session(model, cuda_graphs=True)
    recorded = generate(model, ids, methods_for(model)[name], session=session, **options)
    again = generate(model, ids, methods_for(model)[name], session=session, **options)
    assert torch.equal(recorded.sequences, want.sequences) and torch.equal(again.sequences, want.sequences)


def test_a_profiler_sees_the_parts_of_a_step(llama):
    ids, mask = ragged_prompts(2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        got = generate(llama, ids, methods_for(llama)["one pass"], max_new_tokens=6, attention_mask=mask)
    seen = {event.key: event.count for event in profile.key_averages() if event.key.startswith("pass_ext::")}
    calls = got.stats.model_calls
    parts = {name: seen[f"pass_ext::{name}"] for name in ("draft", "verify", "accept", "commit")}
    assert parts == {"draft": calls - 1, "verify": calls, "accept": calls, "commit": calls}
