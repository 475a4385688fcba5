"""Models with layers that keep a state: gated delta nets, Kimi, Mamba 1 and 2, short convolutions, alone and beside attention.
The texts are transformers' own by every method; states are those of plain decoding to the bit, wherever a text ends.

test_architectures.py judges every family by batches of ragged prompts, and where transformers goes on from our cache.
"""

import inspect
import sys
import textwrap

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from packaging.version import Version
from support.generation import slots_for
from support.paths import ROOT
from support.small_models import prompts, small_model

sys.path.append(str(ROOT))  # for benchmarks; at the end, so that an installed pass_ext stays the one that is tested
import pass_ext
from benchmarks.architectures import models
from benchmarks.architectures.models import tiny_model
from pass_ext import MultiCandidate, NGram, PaSS, Plain, Session, Speculative, Tree, generate
from pass_ext.training.lookahead.states import with_states

if Version(transformers.__version__) < Version("5.24"):
    pytest.skip("the functions are those of transformers 5.24", allow_module_level=True)

FAMILIES = (
    "qwen3_next",
    "lfm2",
    "nemotron_h",
    "falcon_h1",
    "mamba",
    "kimi_linear",
    "zamba",
    "minimax",
    "qwen4_exp_text",
)
NEW = 8


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return tiny_model(request.param)


@pytest.fixture(scope="module")
def qwen():
    return tiny_model("qwen3_next")


def written(model, ids, new=NEW, **options):
    """transformers' greedy continuation of each prompt by itself."""
    options.update(do_sample=False, eos_token_id=None, pad_token_id=0)
    return torch.cat([model.generate(row[None], max_new_tokens=new, **options) for row in ids])


def ours(model, ids, method=None, new=NEW, **options):
    return generate(model, ids, method, max_new_tokens=new, eos_token_id=[], **options)


def methods(model):
    slots = slots_for(model, 3)
    return {
        "ngram": NGram(longest=2, shortest=1, tokens=4, branches=2),
        "fixed rows": PaSS(slots, tree=Tree([-1, 0, 0, 1, 1, 2, 3]), rows=24),
        "chosen rows": PaSS(slots, rows=12),
        "two passes": PaSS(slots, passes=2, tree=Tree.from_branching((2, 2)), rows=24),
        "right drafts": MultiCandidate(model, (2, 2, 1)),
    }


def states_of(model, ids, new):
    """The states after plain steps to the end of a text of so many new tokens."""
    session = Session(model)
    ours(model, ids, new=new, session=session)
    return session.states


def same(states, others):
    return len(states) == len(others) > 0 and all(map(torch.equal, states, others))


# ---- texts ----


def test_one_text_is_transformers_own_by_every_method(model):
    ids = prompts(1, 9)[0]
    expected, drawn = written(model, ids), ours(model, ids, temperature=0.8, seeds=3).sequences
    assert torch.equal(ours(model, ids).sequences, expected)
    for name, method in methods(model).items():
        assert torch.equal(ours(model, ids, method).sequences, expected), name
        assert torch.equal(ours(model, ids, method, temperature=0.8, seeds=3).sequences, drawn), name


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3_next", dict(hidden_act="gelu")),
        ("bamba", dict(time_step_limit=(0.2, 0.5))),
        ("mamba", dict(use_bias=True)),
    ],
)
def test_settings_of_such_layers(family, changes):
    """The limits of Mamba-2's step size are for prompts: transformers' cached steps have none."""
    model, ids = tiny_model(family, **changes), prompts(1, 9)[0]
    expected = written(model, ids)
    assert not torch.equal(expected, written(tiny_model(family), ids))
    assert torch.equal(ours(model, ids, MultiCandidate(model, (2, 2))).sequences, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_texts_in_16_bits_are_plain_ones(model, dtype):
    """Their functions are compared in 16 bits too."""
    small, ids = tiny_model(model.config.model_type).to(dtype), prompts(2, 9)[0]
    expected = ours(small, ids, new=6).sequences
    assert torch.equal(ours(small, ids, MultiCandidate(small, (2, 2)), new=6).sequences, expected)


def test_a_compiled_model(qwen):
    """Its layers that keep a state are not compiled."""
    ids = prompts(1, 9)[0]
    got = ours(torch.compile(qwen, backend="eager"), ids, NGram(tokens=3), new=4)
    assert torch.equal(got.sequences, written(qwen, ids, new=4))


def test_steps_that_run_ahead(model):
    ids = prompts(3, 7)[0]
    expected = written(model, ids)
    for method in (Plain(), methods(model)["fixed rows"], methods(model)["chosen rows"]):
        got = ours(model, ids, method, session=Session(model, run_ahead=True))
        assert torch.equal(got.sequences, expected) and got.stats.ahead_calls


def test_long_prompts_and_common_beginnings(qwen):
    """Prompts of more rows than a call has, three of which have a beginning in common."""
    common = prompts(1, 1100)[0]
    ids = torch.cat([common.repeat(3, 1), prompts(3, 5, seed=1)[0]], 1)
    assert torch.equal(ours(qwen, ids, new=6).sequences, written(qwen, ids, new=6))


def test_samples_of_one_prompt(model):
    ids = prompts(2, 60)[0]
    options = dict(temperature=0.8, new=6)
    got = ours(model, ids, seeds=[5, 9], num_return_sequences=2, **options).sequences
    alone = [ours(model, ids[seed // 9, None], seeds=seed, **options).sequences for seed in (5, 6, 9, 10)]
    assert torch.equal(got, torch.cat(alone))


def test_hybrid_targets_and_drafts_in_every_pair():
    ids = prompts(2, 8, padding=(3, 0))
    family = [tiny_model(name) for name in ("qwen3_next", "mamba", "llama")]
    for target in family:
        expected = ours(target, ids[0], attention_mask=ids[1]).sequences
        for draft in family:
            got = ours(target, ids[0], Speculative(draft, 3), attention_mask=ids[1])
            assert torch.equal(got.sequences, expected)
            assert (got.stats.tokens_per_call > 3) == (draft is target)


def test_layers_that_share_a_module(monkeypatch):
    """The attention of zamba's hybrid layers is one module, which does not know its layer."""
    kinds = ["linear_attention", "hybrid"] * 2
    shape = dict(num_hidden_layers=4, layers_block_type=kinds, attention_hidden_size=128)
    monkeypatch.setitem(models.CHANGES, "zamba", shape)
    model, ids = tiny_model("zamba"), prompts(2, 9)[0]
    assert torch.equal(ours(model, ids, MultiCandidate(model, (2, 2))).sequences, written(model, ids))


# ---- states ----


def test_trees_leave_the_states_of_plain_steps_to_the_bit():
    """With 32 heads, as torch's sigmoid and softplus give a row other bits where it is not whole vectors."""
    qwen = tiny_model("qwen3_next", linear_num_value_heads=32)
    for model in (qwen, tiny_model("lfm2")):
        ids = prompts(2, 9)[0]
        plain = Session(model)
        text = ours(model, ids, session=plain).sequences
        for method in methods(model).values():
            session = Session(model)
            assert torch.equal(ours(model, ids, method, session=session).sequences, text)
            if method.__class__ is not MultiCandidate:
                assert same(session.states, plain.states), "no step has gone beyond the end"


def test_a_request_that_has_ended_keeps_its_state_to_the_bit():
    """Text 0 ends at once, the others go on."""
    model, ids = tiny_model("qwen3_next", linear_num_value_heads=32), prompts(3, 9)[0]
    text = ours(model, ids).sequences
    end, alone = text[0, :11].tolist(), states_of(model, ids[:1], 2)
    for method in (Plain(), NGram(tokens=3), PaSS(slots_for(model, 3), rows=12)):
        session = Session(model)
        session.wants_states = False  # nothing is read again
        got = ours(model, ids, method, stopping=lambda text, _: text[0].tolist() == end, session=session)
        assert got.lengths == (2, NEW, NEW) and torch.equal(got.sequences[1:], text[1:])
        assert all(torch.equal(mine[0], its[0]) for mine, its in zip(session.states, alone, strict=True))


def test_a_session_has_the_states_at_each_texts_end(model):
    """Texts that end inside an accepted block, whose states go back."""
    ids = prompts(2, 9)[0]
    text = ours(model, ids).sequences
    session, ends = Session(model), (text[0, :11].tolist(), text[1, :13].tolist())
    got = ours(
        model,
        ids,
        MultiCandidate(model, (2, 2, 2, 1)),
        stopping=lambda text, _: text[0].tolist() in ends,
        session=session,
    )
    assert got.lengths == (2, 4) and got.stats.model_calls == 2, "both ended inside of one block"
    for b, length in enumerate(got.lengths):
        alone = states_of(model, ids[b : b + 1], length)
        assert all(torch.allclose(mine[b], its[0], atol=1e-4) for mine, its in zip(session.states, alone, strict=True))


def test_a_session_is_used_again_and_begins_with_a_past(model):
    ids = prompts(2, 9)[0]
    expected = written(model, ids)
    session = Session(model)
    ours(model, ids.flip(0), session=session)
    assert torch.equal(ours(model, ids, session=session).sequences, expected), "nothing is left of the texts before"
    half = Session(model)
    generate(model, ids[:, :6], max_new_tokens=1, eos_token_id=[], session=half)
    past = [tuple(x[:, :6].clone() for x in pair) for pair in half.caches], 6, [x.clone() for x in half.states]
    for begun in (Session(model, past=past), session):
        begun.past = past
        assert torch.equal(ours(model, ids, session=begun).sequences, expected)


def test_equal_prompts_after_different_states():
    """What prompts have in common is read once only where the states before it are equal too."""
    model, ids, fronts = tiny_model("mamba"), prompts(1, 70)[0].repeat(2, 1), prompts(2, 6, seed=1)[0]
    before = states_of(model, fronts, 1)
    got = ours(model, ids, session=Session(model, past=([], 6, before))).sequences
    for b in range(2):
        alone = Session(model, past=([], 6, [state[b : b + 1] for state in before]))
        assert torch.equal(got[b : b + 1], ours(model, ids[:1], session=alone).sequences)
    assert not torch.equal(got[0], got[1])


def test_the_states_before_each_prompt_are_those_of_its_samples():
    """In a new session, and in the states of a used one."""
    model, ids, fronts = tiny_model("mamba"), prompts(2, 9)[0], prompts(2, 6, seed=1)[0]
    before, options = states_of(model, fronts, 1), dict(temperature=0.8, new=6, num_return_sequences=2)
    alone = []
    for b, seed in enumerate((5, 9)):
        session = Session(model, past=([], 6, [state[b : b + 1] for state in before]))
        alone.append(ours(model, ids[b : b + 1], session=session, seeds=seed, **options).sequences)
    session = Session(model)
    for _ in range(2):
        session.past = [], 6, before
        got = ours(model, ids, session=session, seeds=[5, 9], **options).sequences
        assert torch.equal(got, torch.cat(alone))


def test_a_past_with_the_wrong_states(qwen):
    ids = prompts(2, 9)[0]
    half = Session(qwen)
    generate(qwen, ids[:, :6], max_new_tokens=1, eos_token_id=[], session=half)
    caches, states = half.caches, half.states
    for past, message in (
        ((caches, 6), "past must be .*states"),
        ((caches, 6, states[:1]), "more states than 1"),
        ((caches, 6, [state[:1] for state in states]), r"its states must be \[\[2, "),
        ((caches, [6, 9], states), "past holds 9 tokens, so prompts must be longer, got 9"),
        ((caches, 6, [*states[:1], states[1].half()]), "state 1, from `past` or a first call, is torch.float16"),
    ):
        with pytest.raises(ValueError, match=message):
            ours(qwen, ids, session=Session(qwen, past=past))
    llama = small_model("llama")
    with pytest.raises(ValueError, match="no layer of this model keeps one"):
        ours(llama, ids, session=Session(llama, past=(caches, 6, states)))


def test_rejected_rows_leave_no_trace(model):
    """Every candidate is a token whose embedding is NaN or huge."""
    other, draft = tiny_model(model.config.model_type), small_model("llama")
    draft.lm_head.weight.zero_()  # it drafts token 0
    texts = ((ids, ours(model, ids).sequences) for ids in (prompts(2, 9, seed)[0] for seed in range(9)))
    ids, expected = next((ids, text) for ids, text in texts if not (text == 0).any())
    for poison in (torch.nan, 1e30):
        other.get_input_embeddings().weight[0] = poison
        session = Session(other)
        got = ours(other, ids, Speculative(draft, 3), session=session)
        assert torch.equal(got.sequences, expected) and got.stats.num_draft_tokens > NEW
        assert all(state.isfinite().all() for state in session.states)


# ---- transformers' caches ----


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1", "zamba", "lfm2", "qwen4_exp_text"])
def test_a_text_goes_on_from_transformers_cache(family):
    model = tiny_model(family)
    ids, mask = prompts(3, 9, padding=(0, 4, 2))
    options = dict(do_sample=False, eos_token_id=None, pad_token_id=0)
    whole = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, **options)
    half = model.generate(ids, attention_mask=mask, max_new_tokens=5, return_dict_in_generate=True, **options)
    longer = torch.cat([mask, mask.new_ones(3, 5)], 1)
    method = pass_ext.custom_generate(NGram(longest=2, shortest=1, tokens=3))
    got = model.generate(
        half.sequences,
        attention_mask=longer,
        past_key_values=half.past_key_values,
        max_new_tokens=NEW - 5,
        custom_generate=method,
        **options,
    )
    assert torch.equal(got, whole)
    assert method.stats.model_calls <= NEW - 5 + 1


@pytest.mark.parametrize("family", ["falcon_h1", "zamba", "lfm2"])
def test_transformers_goes_on_from_our_cache(family):
    """Every kind of state lies in it as transformers' own steps read it."""
    model, (ids, mask) = tiny_model(family), prompts(2, 9)
    options = dict(do_sample=False, eos_token_id=None, pad_token_id=0)
    whole = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, **options)
    ours = pass_ext.custom_generate(NGram(longest=2, shortest=1, tokens=3))
    given = dict(max_new_tokens=5, custom_generate=ours, return_dict_in_generate=True)
    half = model.generate(ids, attention_mask=mask, **given, **options)
    longer = torch.cat([mask, mask.new_ones(2, 5)], 1)
    options |= dict(attention_mask=longer, past_key_values=half.past_key_values, max_new_tokens=NEW - 5)
    assert torch.equal(model.generate(half.sequences, **options), whole)


def test_caches_that_tell_no_length():
    model, (ids, mask) = tiny_model("mamba"), prompts(2, 9)
    options = dict(attention_mask=mask, do_sample=False, eos_token_id=None, pad_token_id=0, max_new_tokens=3)
    half = model.generate(ids, return_dict_in_generate=True, **options)
    longer = dict(options, attention_mask=torch.ones_like(half.sequences))
    with pytest.raises(ValueError, match="caches of mamba do not tell how many tokens they are of"):
        model.generate(
            half.sequences, past_key_values=half.past_key_values, custom_generate=pass_ext.custom_generate(), **longer
        )


# ---- the model ----


def test_the_callers_model_stays_as_it_is(model):
    ids = prompts(1, 9)[0]
    expected, before = written(model, ids), [dict(vars(part)) for part in model.modules()]
    seen = []

    class Streamer:
        def put(self, tokens):
            seen.append(written(model, ids, new=2))

        def end(self):
            pass

    generate(model, ids, max_new_tokens=3, eos_token_id=[], streamer=Streamer())
    assert [dict(vars(part)) for part in model.modules()] == before
    assert len(seen) == 4 and all(torch.equal(text, expected[:, :11]) for text in seen), "also while it runs"


def test_the_way_names_the_functions(qwen):
    way = ours(qwen, prompts(1, 9)[0], new=2).stats.backend
    assert way == "module: its layers keep states, by causal_conv1d_fn and torch_chunk_gated_delta_rule"


def test_hooks_that_replace_forwards():
    accelerate = pytest.importorskip("accelerate")
    model, ids = tiny_model("qwen3_next"), prompts(1, 9)[0]
    expected = written(model, ids)
    accelerate.hooks.add_hook_to_module(model.model.layers[0].linear_attn, accelerate.hooks.ModelHook())
    assert "forward" in vars(model.model.layers[0].linear_attn)
    assert torch.equal(ours(model, ids, NGram(tokens=3)).sequences, expected)
    model.model.layers[0].linear_attn.forward = lambda *inputs, **named: None
    del model.model.layers[0].linear_attn._old_forward
    with pytest.raises(ValueError, match=r"qwen3_next: somebody has replaced Qwen3NextGatedDeltaNet\.forward"):
        ours(model, ids)


# ---- functions of another version ----


def changed(monkeypatch, family, name, function):
    module = sys.modules[f"transformers.models.{family}.modeling_{family}"]
    theirs = getattr(module, name)
    monkeypatch.setattr(module, name, function(theirs))


def test_a_layer_that_gives_its_function_a_state_is_refused(monkeypatch):
    """Its rows would not continue the state of the session."""
    model = tiny_model("qwen3_next")
    module = sys.modules["transformers.models.qwen3_next.modeling_qwen3_next"]
    layer, space = module.Qwen3NextGatedDeltaNet, {}
    source = textwrap.dedent(inspect.getsource(layer.forward))
    exec(source.replace("initial_state=recurrent_state", "initial_state=query.new_zeros(())"), vars(module), space)
    monkeypatch.setattr(layer, "forward", space["forward"])
    with pytest.raises(
        ValueError, match=r"torch_chunk_gated_delta_rule of .* is called with initial_state; pass_ext knows"
    ):
        ours(model, prompts(1, 9)[0], new=2)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen3_next", "torch_chunk_gated_delta_rule"),
        ("kimi_linear", "chunk_kimi_delta_attention"),
        ("bamba", "mamba2_chunk_scan"),
        ("mamba", "mamba_selective_scan"),
        ("lfm2", "causal_conv1d_fn"),
    ],
)
def test_a_function_that_computes_otherwise_is_refused(monkeypatch, family, name):
    import functools

    def scaled(theirs):
        @functools.wraps(theirs)
        def function(*inputs, **named):
            out = theirs(*inputs, **named)
            return (1.001 * out[0], *out[1:]) if isinstance(out, tuple) else 1.001 * out

        return function

    model, ids = tiny_model(family), prompts(1, 9)[0]
    ours(model, ids, new=2)
    changed(monkeypatch, family, name, scaled)
    with pytest.raises(ValueError, match=rf"{family}: {name} of .*modeling_{family} computes something else"):
        ours(model, ids, new=2)


def test_a_function_with_another_state_is_refused(monkeypatch):
    """Its output is the same; the texts after it would not be."""
    import functools

    def without_decay(theirs):
        @functools.wraps(theirs)
        def function(*inputs, output_final_state=False, **named):
            out, state = theirs(*inputs, output_final_state=output_final_state, **named)
            return out, None if state is None else state + 1.0

        return function

    changed(monkeypatch, "qwen3_next", "torch_chunk_gated_delta_rule", without_decay)
    with pytest.raises(ValueError, match=r"torch_chunk_gated_delta_rule .* computes something else"):
        ours(tiny_model("qwen3_next"), prompts(1, 9)[0], new=2)


def test_a_function_with_other_arguments_is_refused(monkeypatch):
    def renamed(theirs):
        def causal_conv1d_fn(x, weights, bias=None, **others):
            return theirs(x, weights, bias, **others)

        return causal_conv1d_fn

    changed(monkeypatch, "lfm2", "causal_conv1d_fn", renamed)
    with pytest.raises(ValueError, match=r"lfm2: causal_conv1d_fn of .* cannot be compared .KeyError: 'hidden_states'"):
        ours(tiny_model("lfm2"), prompts(1, 9)[0], new=2)


@pytest.mark.parametrize(
    ("family", "own"),
    [("recurrent_gemma", "RecurrentGemmaDecoderLayer"), ("zaya", "ZayaCCA")],
)
def test_states_in_code_of_their_own_are_refused(family, own):
    with pytest.raises(ValueError, match=f"{family} has {own}.* computes its state in code of its own"):
        ours(tiny_model(family), prompts(1, 9)[0], new=2)


def test_how_fast_lightning_attention_fades_changes_the_text():
    model, ids = tiny_model("minimax"), prompts(3, 9)[0]
    want = ours(model, ids).sequences
    next(part for part in model.modules() if hasattr(part, "slope_rate")).slope_rate += 0.5
    assert not torch.equal(ours(model, ids).sequences, want)


def test_lightning_attention_in_the_first_layer():
    """transformers' cache counts a text by its first layer, which keeps no keys here: its text without a cache counts."""
    model = tiny_model("minimax", layer_types=["linear_attention", "full_attention"], num_hidden_layers=2)
    for ids in prompts(3, 9):
        want = model.generate(
            ids, do_sample=False, eos_token_id=None, pad_token_id=0, max_new_tokens=NEW, use_cache=False
        )
        for name, method in methods(model).items():
            assert torch.equal(ours(model, ids, method).sequences, want), name


@pytest.mark.parametrize("changed_result", [0, 1])
def test_lightning_attention_that_computes_otherwise_is_refused(monkeypatch, changed_result):
    from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

    theirs = MiniMaxLightningAttention.forward

    def forward(*inputs, **named):
        return tuple(1.001 * x if i == changed_result else x for i, x in enumerate(theirs(*inputs, **named)))

    monkeypatch.setattr(MiniMaxLightningAttention, "forward", forward)
    with pytest.raises(ValueError, match=r"minimax has MiniMaxLightningAttention, which computes something else"):
        ours(tiny_model("minimax"), prompts(1, 9)[0], new=2)


def test_a_cache_of_lightning_attention_stays_apart():
    from transformers.models.minimax.modeling_minimax import MiniMaxCache

    model, ids = tiny_model("minimax"), prompts(1, 9)[0]
    with pytest.raises(ValueError, match=r"custom_generate: past_key_values must be a DynamicCache.* got MiniMaxCache"):
        model.generate(ids, max_new_tokens=2, custom_generate=pass_ext.custom_generate(), cache=MiniMaxCache())
    with pytest.raises(SystemExit, match="slots cannot be trained for minimax: its lightning attention"):
        with_states(model, 64)


def test_a_rule_that_reads_a_token_again_is_refused(qwen):
    with pytest.raises(ValueError, match="rule 'longest_branch' reads each prompt's last token again"):
        ours(qwen, prompts(1, 9)[0], MultiCandidate(qwen, (2, 2)), rule="longest_branch", temperature=1.0, seeds=1)


def causal_conv1d_fn(*inputs, **named):
    raise AssertionError("nobody calls it")


def test_a_layer_that_calls_no_known_function_is_refused():
    """It has a method that would, so only the first call shows it."""
    model = tiny_model("lfm2")
    layer = model.model.layers[0].conv

    class Silent(type(layer)):
        def forward(self, hidden_states, **named):
            return hidden_states

        def convolved(self, hidden_states):
            return causal_conv1d_fn(hidden_states)

    layer.__class__ = Silent
    with pytest.raises(ValueError, match=r"lfm2: layers \[0\] keep a state, but called none of causal_conv1d_fn"):
        ours(model, prompts(1, 9)[0], new=2)


def test_a_norm_that_may_have_a_gate():
    """Without the gate it is a norm that an op computes."""
    model, ids = tiny_model("bamba"), prompts(2, 9)[0]
    norm = next(layer.mamba.norm for layer in model.model.layers if hasattr(layer, "mamba"))

    class Gated(type(norm)):
        def forward(self, hidden_states, gate=None):
            x = hidden_states if gate is None else hidden_states * torch.nn.functional.silu(gate)
            return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    norm.__class__ = Gated
    assert torch.equal(ours(model, ids, NGram(tokens=3)).sequences, written(model, ids))
