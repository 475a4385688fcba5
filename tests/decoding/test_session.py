"""Sessions between generations: the caches that a generation leaves after, and those that one may start from."""

import pytest
import torch

pytest.importorskip("transformers")

from support.generation import slots_for
from support.small_models import small_model

from pass_ext import NGram, PaSS, Plain, Session, Tree, generate

IDS = torch.tensor([[5, 6, 7, 8, 9], [5, 6, 7, 8, 5]])


@pytest.fixture(scope="module")
def whole(llama):
    return generate(llama, IDS, max_new_tokens=12, eos_token_id=[]).sequences


def test_a_session_holds_all_but_the_last_token(llama, whole, monkeypatch):
    """Texts that end inside an accepted block: a criterion ends them at 11 and at 9 tokens."""
    from pass_ext.decoding.drafting.from_ngrams import NGramIndex

    texts = iter(whole.tolist() * 99)
    monkeypatch.setattr(
        NGramIndex, "proposals", lambda self, tokens, branches, allowed=None: [next(texts)[len(self) :][:tokens]]
    )
    ends = {11: whole[0, :11], 9: whole[1, :9]}

    def stopping(text, scores):
        end = ends.get(text.shape[1])
        return end is not None and torch.equal(text[0], end)

    session = Session(llama)
    got = generate(llama, IDS, NGram(tokens=6), max_new_tokens=12, eos_token_id=[], stopping=stopping, session=session)
    assert got.lengths == (6, 4) and got.stats.model_calls == 2, "both ended inside of one block"
    assert session.prefix_lens.tolist() == [10, 8]


def keys_and_values(layers=2, requests=2, columns=4, heads=2, width=16, dtype=torch.float32):
    return [tuple(torch.zeros(requests, columns, heads, width, dtype=dtype) for _ in range(2)) for _ in range(layers)]


@pytest.mark.parametrize(
    ("past", "message"),
    [
        ((keys_and_values(), 0), "past must be of 1 token or more, got 0"),
        ((keys_and_values(), -2), "past must be of 1 token or more, got -2"),
        ((keys_and_values(), 2.0), r"past must be of 1 token or more, got 2\.0"),
        (([], 2), "past must be of each layer, 1 or more, got 0"),
        ((keys_and_values(columns=3), 4), r"layer 0 must be \[2, 4 or more, heads, D\], got \[2, 3, 2, 16\]"),
        ((keys_and_values(requests=1), 2), r"layer 0 must be \[2, 2 or more, heads, D\], got \[1, 4, 2, 16\]"),
        (([(torch.zeros(2, 4, 64),) * 2], 2), "layer 0 must be"),
        ((keys_and_values(heads=4), 2), r"layer 0: .* \[4, 16\] .* \[2, 16\]"),
        ((keys_and_values(width=80), 2), r"layer 0: .* \[2, 80\] .* \[2, 16\]"),
        ((keys_and_values(dtype=torch.float16), 2), r"layer 0: .*torch.float16 .* torch.float32"),
        ((keys_and_values(layers=1), 2), "more layers than 1, which `past` is of"),
        ((keys_and_values(layers=3), 2), "2 layers attended, 3 in the first call or in `past`"),
        ((keys_and_values(columns=5), 5), "past holds 5 tokens, so prompts must be longer, got 5"),
    ],
)
def test_a_past_that_does_not_fit(llama, past, message):
    with pytest.raises((ValueError, RuntimeError), match=message):
        generate(llama, IDS, max_new_tokens=2, session=Session(llama, past=past))


def test_a_past_of_so_many_tokens_of_each_prompt(llama, whole):
    session, options = Session(llama), dict(max_new_tokens=12, eos_token_id=[])
    generate(llama, IDS, session=session, **options)
    past = [tuple(x[:, :4].clone() for x in pair) for pair in session.caches]
    for pair in past:
        for x in pair:
            x[1, 3] = torch.nan  # prompt 1 has three
    for method in (None, NGram(tokens=4)):
        begun = Session(llama, past=(past, [4, 3]))
        assert torch.equal(generate(llama, IDS, method, session=begun, **options).sequences, whole)
    with pytest.raises(ValueError, match=r"past must be of 1 token or more, got \[4\]"):
        generate(llama, IDS, session=Session(llama, past=(past, [4])), **options)


def test_a_past_goes_into_the_caches_that_are_there(llama, whole):
    """Recorded calls read the caches where they are."""
    options = dict(max_new_tokens=12, eos_token_id=[])
    session = Session(llama)
    generate(llama, IDS, session=session, **options)
    addresses = [cache.data_ptr() for layer in session.caches for cache in layer]
    past = [tuple(x[:, :3].clone() for x in layer) for layer in session.caches]
    for keys, values in session.caches:
        keys.zero_(), values.zero_()
    session.past = past, 3
    assert torch.equal(generate(llama, IDS, session=session, **options).sequences, whole)
    assert [cache.data_ptr() for layer in session.caches for cache in layer] == addresses
    session.past = keys_and_values(layers=3), 3
    with pytest.raises(ValueError, match="past must be of each layer, 2, got 3"):
        generate(llama, IDS, session=session, **options)
    session.past = keys_and_values(heads=1), 3
    with pytest.raises(ValueError, match=r"layer 0: .* \[2, 16\] .* given now torch.float32 \[1, 16\]"):
        generate(llama, IDS, session=session, **options)


def test_a_session_does_not_write_into_the_embeddings_it_began_with(llama):
    first, second = slots_for(llama, seed=0, deep_layers=2), slots_for(llama, seed=1, deep_layers=2)
    kept = [parameter.clone() for parameter in first.parameters()]
    tree = Tree.chain(4)
    options = dict(max_new_tokens=6, eos_token_id=[])
    session = Session(llama)
    generate(llama, IDS, PaSS(first, tree=tree, rows=16), session=session, **options)
    generate(llama, IDS, PaSS(second, tree=tree, rows=16), session=session, **options)
    assert all(torch.equal(now, then) for now, then in zip(first.parameters(), kept, strict=True))


def test_a_used_session_takes_over_the_vectors_of_layers(llama):
    """The slots' own embeddings are the same, so only these vectors make other drafts."""
    tree, options = Tree.from_branching((8, 4)), dict(max_new_tokens=40, eos_token_id=[])

    def method(seed):
        slots = slots_for(llama, seed=0, deep_layers=2)
        torch.nn.init.normal_(slots.deep, std=3.0, generator=torch.Generator().manual_seed(seed))
        return PaSS(slots, tree=tree, rows=64, slots=2)

    alone = [generate(llama, IDS, method(seed), **options).stats.acceptance_histogram for seed in (1, 2)]
    assert alone[0] != alone[1]
    session = Session(llama)
    generate(llama, IDS, method(1), session=session, **options)
    assert generate(llama, IDS, method(2), session=session, **options).stats.acceptance_histogram == alone[1]


def test_caches_grow_with_the_texts(llama):
    """Ragged prompts around the number of positions that caches begin with, and a limit that no memory would hold."""
    model = small_model("llama", max_position_embeddings=4096)
    ids = torch.randint(3, 97, (2, 1020), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :40] = 0
    options = dict(attention_mask=mask, eos_token_id=[])
    want = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert torch.equal(generate(model, ids, max_new_tokens=12, **options).sequences, want)
    ends = [int(want[0, 1026]), int(want[1, 1026])]
    for method in (None, NGram(), PaSS(slots_for(model), tree=Tree.chain(3), rows=12)):
        got = generate(model, ids, method, max_new_tokens=1 << 30, attention_mask=mask, eos_token_id=ends)
        for length, text, whole in zip(got.lengths, got.sequences, want, strict=True):
            assert 1 <= length <= 7 and torch.equal(text[: 1020 + length], whole[: 1020 + length])


def test_inference_mode_and_sessions(whole):
    """A model, slots and a session made in inference mode are used in it and outside."""
    options = dict(max_new_tokens=12, eos_token_id=[])
    with torch.inference_mode():
        model = small_model("llama")
        method = PaSS(slots_for(model, rank=3, deep_layers=2), tree=Tree.chain(3), rows=16, slots=3)
        session = Session(model)
        inside = generate(model, IDS, method, session=session, **options)
    outside = generate(model, IDS, method, session=session, **options)
    with torch.inference_mode():
        again = generate(model, IDS, method, session=session, **options)
        session.past = [tuple(x[:, :3].clone() for x in layer) for layer in session.caches], 3
    after = generate(model, IDS, method, session=session, **options)
    for got in (inside, outside, again, after):
        assert torch.equal(got.sequences, whole)


def test_a_session_has_the_room_that_it_is_given_and_otherwise_grows(llama, whole):
    large, first = Session(llama, capacity=40), Session(llama)
    for session in (large, first):
        assert torch.equal(
            generate(llama, IDS, session=session, max_new_tokens=6, eos_token_id=[]).sequences, whole[:, :11]
        )
        assert torch.equal(generate(llama, IDS, session=session, max_new_tokens=12, eos_token_id=[]).sequences, whole)
    small = Session(llama, capacity=11)
    with pytest.raises(ValueError, match=r"room for 17 tokens; it is of 0 requests and 11 tokens\. Make a new one"):
        generate(llama, IDS, session=small, max_new_tokens=12, eos_token_id=[])
    with pytest.raises(ValueError, match="1 requests and room for 11 tokens; it is of 2 requests and 40 tokens"):
        generate(llama, IDS[:1], session=large, max_new_tokens=6, eos_token_id=[])


class OneLayer:
    """Queries, keys and values are the embeddings; values in memory of their own where ``copies``."""

    def __init__(self, copies):
        self.copies, self.embedding = copies, torch.randn(50, 16, generator=torch.Generator().manual_seed(0))

    def __call__(self, rows, positions, attend, wanted):
        heads = rows.view(-1, 1, 16)
        mixed = attend(0, heads, heads, heads.clone() if self.copies else heads).flatten(1)
        return (mixed if wanted is None else mixed[wanted]) @ self.embedding.T


def test_one_cache_holds_keys_that_are_their_values():
    texts, shared = [], []
    for copies in (True, False):
        session = Session(model := OneLayer(copies))
        texts.append(generate(model, IDS, NGram(tokens=4), max_new_tokens=12, session=session).sequences)
        keys, values = session.caches[0]
        shared.append(keys.data_ptr() == values.data_ptr())
    assert torch.equal(*texts) and shared == [False, True]


def test_a_session_serves_every_method_after_any_other(llama, whole):
    """With look-ahead slots after none, of another number, with and without vectors per layer and adapters."""
    deep = PaSS(slots_for(llama, deep_layers=2), tree=Tree.chain(3), rows=16, slots=3)
    adapted = PaSS(slots_for(llama, rank=3), tree=Tree.chain(2), rows=12, slots=2)
    plain_slots = [PaSS(slots_for(llama), tree=Tree.chain(n), rows=12, slots=n) for n in (3, 2)]
    session = Session(llama)
    for method in (Plain(), plain_slots[0], plain_slots[1], Plain(), deep, adapted, NGram(), *plain_slots):
        got = generate(llama, IDS, method, session=session, max_new_tokens=12, eos_token_id=[])
        assert torch.equal(got.sequences, whole)
        assert got.stats.model_calls > 0 and session.prefix_lens.tolist() == [16, 16]


def test_recorded_steps_are_kept_for_slots_of_the_same_shapes_alone(llama):
    """They read the memory of the slots."""
    session, step = Session(llama), object()
    first, second, third = (PaSS(slots_for(llama), tree=Tree.chain(n), rows=12, slots=n) for n in (2, 2, 3))
    generate(llama, IDS, first, session=session, max_new_tokens=3)
    address = session.slots.weight.data_ptr()
    session.fixed_steps["recorded"] = step
    generate(llama, IDS, second, session=session, max_new_tokens=3)
    assert session.slots.weight.data_ptr() == address and session.fixed_steps["recorded"] is step
    generate(llama, IDS, third, session=session, max_new_tokens=3)
    assert "recorded" not in session.fixed_steps


def test_a_session_in_use_is_refused_until_its_generation_ends(llama, whole):
    session, other = Session(llama), Session(llama)

    class Nested:
        """A streamer that generates."""

        def __init__(self, session):
            self.session = session

        def put(self, tokens):
            generate(llama, IDS[:1], session=self.session, max_new_tokens=2)

        def end(self):
            pass

    options = dict(session=session, max_new_tokens=12, eos_token_id=[])
    with pytest.raises(RuntimeError, match=r"^generate: session is in use by a generation .*give another Session"):
        generate(llama, IDS[:1], streamer=Nested(session), **options)
    got = generate(llama, IDS[:1], streamer=Nested(other), **options)
    assert torch.equal(got.sequences, whole[:1])
