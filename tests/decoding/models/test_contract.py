"""The laws of every model that decoding serves × the table of tiny models, one of each kind (tests/support/kinds.py).

What one kind has beside these is in the file of its name.
"""

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from packaging.version import Version

if Version(transformers.__version__) < Version("5.24"):
    pytest.skip("the models are those of transformers 5.24", allow_module_level=True)

from emulator.ops import EMULATED
from support.generation import greedy_of_transformers, slots_for
from support.gpu_widths import use_widths_of_a_gpu
from support.kinds import GREEDY, KINDS, NEW, all_methods, model_of, ragged, some_methods, text, text_of
from support.small_models import prompts, ragged_prompts

import pass_ext
from pass_ext import NGram, PaSS, Plain, Session, Tree, generate
from pass_ext.decoding.models.parts import cache_name
from pass_ext.decoding.session import session as sessions
from pass_ext.integrations.transformers.processors import NotedRows
from pass_ext.testing import assert_same_bits
from pass_ext.training.lookahead.states import with_states

SAMPLED = ("one pass, deep", "right trees")  # slots, and drafts of a model
CODES = {torch.int8: {}, torch.float8_e4m3fn: dict(temperature=0.9, seeds=3)}
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def ours(model, ids, mask=None, method=None, new=NEW, **options):
    return generate(model, ids, method, max_new_tokens=new, attention_mask=mask, eos_token_id=[], **options).sequences


# ---- texts ----


@kinds
def test_every_method_writes_the_models_text(kind):
    """And the same sample by a seed."""
    model, (ids, mask) = model_of(kind.name), ragged()
    want, sampling = text(kind.name), dict(temperature=0.8, seeds=3)
    sample, methods = ours(model, ids, mask, **sampling), all_methods(kind, model)
    if not kind.is_deep:  # no list of as many layers as its config counts
        with pytest.raises(ValueError, match=r"has no list of \d+ layers whose inputs could be read or shifted"):
            ours(model, ids, mask, methods.pop("one pass, deep"))
    for name, method in methods.items():
        assert torch.equal(ours(model, ids, mask, method), want), name
        if name in SAMPLED:
            assert torch.equal(ours(model, ids, mask, method, **sampling), sample), name
    assert len(want[:, -NEW:].unique()) > 10 and not torch.equal(sample, want)


@kinds
def test_several_texts_of_one_prompt(kind):
    model, ids, options = model_of(kind.name), prompts(2, 7)[0], dict(temperature=0.9)
    want = ours(model, ids.repeat_interleave(2, 0), seeds=[5, 6, 7, 8], **options)
    assert torch.equal(
        ours(model, ids, method=NGram(shortest=1), seeds=[5, 7], num_return_sequences=2, **options), want
    )


@kinds
def test_long_prompts_are_read_in_pieces(kind, monkeypatch):
    """150 tokens at once; the shorter prompt begins and ends inside of pieces."""
    monkeypatch.setattr("pass_ext.decoding.session.reading.MAX_TREE_NODES", 150)
    for place, number in kind.pieces.items():
        monkeypatch.setattr(place, number)
    ids = torch.randint(3, 90, (2, 400), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :199] = 0
    for changes in kind.long:
        model = kind.model(max_position_embeddings=1024, **changes)
        want = text_of(kind, model, ids, mask, 8)
        for method in (Plain(), NGram(shortest=1)):
            assert torch.equal(ours(model, ids, mask, method, new=8), want), (changes, method)


# ---- bits ----


def _bits():
    """Each kind in each session, in one dtype quickly and in the other slowly, as the same is shown."""
    for name, kind in KINDS.items():
        for is_invariant in kind.sessions:
            for dtype in (torch.float32, torch.bfloat16):
                quick = is_invariant == (dtype is torch.float32)
                session = "batch-invariant" if is_invariant else "plain"
                marks = [] if quick else pytest.mark.slow
                yield pytest.param(kind, is_invariant, dtype, id=f"{name}-{session}-{dtype}", marks=marks)


@pytest.mark.parametrize(("kind", "is_invariant", "dtype"), _bits())
@pytest.mark.usefixtures("one_thread")
def test_a_row_has_the_bits_that_it_has_alone(kind, is_invariant, dtype):
    """In a ragged batch, and beside the rows of drafts and slots; over codes too."""
    model = kind.for_bits(kind.model(**kind.of_bits)).to(dtype)
    ids, mask = ragged_prompts(3, longest=9)
    methods = NGram(shortest=1, tokens=4), PaSS(slots_for(model), tree=Tree.from_branching((3, 2)), rows=24)
    for codes in (None,) if kind.coded or is_invariant else (None, torch.float8_e4m3fn):

        def noted(ids, mask=None, method=None, codes=codes):
            rows, session = NotedRows(), Session(model, batch_invariant=is_invariant, cache_dtype=codes)
            options = dict(max_new_tokens=NEW, eos_token_id=[], session=session, logits_processor=rows)
            return rows.of(generate(model, ids, method, attention_mask=mask, **options))

        alone = [noted(row[seen][None]) for row, seen in zip(ids, mask.bool(), strict=True)]
        for method in methods:
            for rows, *theirs in zip(noted(ids, mask, method), *alone, strict=True):
                for row, own in zip(rows, theirs, strict=True):
                    assert_same_bits(row, own[0])


# ---- caches ----


@kinds
def test_every_method_writes_plains_text_over_codes(kind):
    """Greedy, or by a seed."""
    model, (ids, mask) = model_of(kind.name), ragged()
    if kind.coded:
        with pytest.raises(ValueError, match=kind.coded):
            ours(model, ids, mask, session=Session(model, cache_dtype=torch.int8))
        return
    for codes, options in CODES.items():
        session = Session(model, cache_dtype=codes, capacity=64)
        plain, *others = (
            ours(model, ids, mask, method, session=session, **options) for method in some_methods(model).values()
        )
        assert all(torch.equal(text, plain) for text in others), codes
        assert all(keys.dtype is codes and values.dtype is codes for keys, values in session.caches)


@kinds
def test_a_session_is_used_again_grows_and_begins_with_a_past(kind, monkeypatch):
    monkeypatch.setattr(sessions, "_FIRST_POSITIONS", 10)
    model, ids = model_of(kind.name), prompts(3, 8)[0]
    session = Session(model, capacity=40)
    want = ours(model, ids, session=session)
    assert torch.equal(ours(model, ids, method=NGram(shortest=1), session=session), want)
    half = session
    if kind.keeps_states:  # after so many tokens alone
        half = Session(model)
        ours(model, ids[:, :5], new=1, session=half)
    states = [state.clone() for state in half.states]
    layers = [(keys[:, :5].clone(), values[:, :5].clone()) for keys, values in half.caches]
    lengths = 5 if kind.keeps_states else [5, 3, 4]
    past = (layers, lengths, states) if states else (layers, lengths)
    begun = Session(model, past=past)
    assert torch.equal(ours(model, ids, method=NGram(shortest=1), session=begun), want)
    if len(layers) > 1:
        with pytest.raises(ValueError, match="the model has more layers than 1, which `past` is of"):
            ours(model, ids, session=Session(model, past=(layers[:1], *past[1:])))
    session.past = past  # into the caches that are there
    assert torch.equal(ours(model, ids, session=session), want)


@kinds
def test_transformers_caches_go_in_and_out(kind):
    """Whoever goes on writes the same text. Prompts of one length where padding would move what the model counts."""
    model, custom = model_of(kind.name), pass_ext.custom_generate(NGram(shortest=1))
    ids, mask = ragged_prompts(4, longest=12)
    if kind.keeps_states or kind.alone:  # a state is after some tokens of each prompt
        ids, mask = prompts(4, 7)
    want, half = greedy_of_transformers(model, ids, mask, NEW, **GREEDY), NEW // 2
    assert torch.equal(greedy_of_transformers(model, ids, mask, NEW, **GREEDY, custom_generate=custom), want)
    options = dict(**GREEDY, return_dict_in_generate=True)
    if kind.exchange:
        with pytest.raises(ValueError, match=rf"^custom_generate: .* {kind.exchange}"):
            greedy_of_transformers(model, ids, mask, half, custom_generate=custom, **options)
        return
    for first, second in ((custom, None), (custom, custom), *([(None, custom)] if kind.is_read else [])):
        cache = None
        for how, given in ((first, ids), (second, want[:, : ids.shape[1] + half])):
            seen = torch.cat((mask, mask.new_ones(len(mask), given.shape[1] - ids.shape[1])), 1)
            more = {} if cache is None else {cache_name(type(model).forward): cache}
            if how is not None:
                more["custom_generate"] = how
            result = greedy_of_transformers(model, given, seen, half, **more, **options)
            cache = result.past_key_values
        assert torch.equal(result.sequences, want), (first, second)


# ---- on a GPU ----


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, id=name, marks=pytest.mark.slow if kind.emulated is None else [])
        for name, kind in KINDS.items()
    ],
)
@pytest.mark.usefixtures("one_thread")
def test_kernels_and_widths_of_a_gpu_on_the_emulator(kind, monkeypatch):
    """Caches are as wide as on a GPU, which pads rows to the heads of its kernels."""
    model, (ids, mask) = kind.model(**kind.emulated or {}), ragged_prompts(2, longest=7)
    all_codes = (None,) if kind.coded else (None, torch.int8)
    want = [ours(model, ids, mask, new=5, session=Session(model, cache_dtype=codes)) for codes in all_codes]
    use_widths_of_a_gpu(monkeypatch)
    with EMULATED.active():
        for codes, its in zip(all_codes, want, strict=True):
            session = Session(model, cache_dtype=codes)
            assert torch.equal(ours(model, ids, mask, NGram(shortest=1, tokens=3), new=5, session=session), its), codes
            header = 0 if codes is None else 16
            assert all((values.shape[-1] - header) % 64 == 0 for _, values in session.caches)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@kinds
def test_on_a_gpu(kind):
    """The CPU's texts, and over codes Plain's."""
    model, (ids, mask) = kind.model(**kind.of_bits), ragged()
    want = {None: ours(model, ids, mask)}
    model, ids, mask = model.cuda(), ids.cuda(), mask.cuda()
    for codes in (None,) if kind.coded else (None, torch.int8):
        for name, method in some_methods(model).items():
            session = Session(model, cache_dtype=codes, cuda_graphs=False)
            got = ours(model, ids, mask, method, session=session).cpu()
            assert torch.equal(got, want.setdefault(codes, got)), (codes, name)
    if kind.graphless:
        with pytest.warns(UserWarning, match=f"cannot be a CUDA graph.*{kind.graphless}"):
            assert torch.equal(ours(model, ids, mask, session=Session(model)).cpu(), want[None])
    custom = pass_ext.custom_generate(NGram(shortest=1))
    got = greedy_of_transformers(model, ids, mask, NEW, **GREEDY, custom_generate=custom)
    assert torch.equal(got.cpu(), want[None])


# ---- training ----


@kinds
def test_slots_are_trained_or_the_reason_is_named(kind):
    if not kind.untrained:
        with_states(model_of(kind.name), 4)
        return
    with pytest.raises(SystemExit, match=rf"slots cannot be trained for \w+: {kind.untrained}"):
        with_states(model_of(kind.name), 64)
