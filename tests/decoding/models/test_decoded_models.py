"""Which models ``generate`` takes: transformers' that it would decode wrongly are refused by name and left as they were; what
models of one's own get wrong is named in the words of ``PackedModel``.
"""

import re
import sys

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from packaging.version import Version
from support.paths import ROOT
from support.small_models import SIZES

sys.path.append(str(ROOT))  # for benchmarks; at the end, so that an installed pass_ext stays the one that is tested
import pass_ext
from benchmarks.architectures.models import model_types, tiny_model
from pass_ext import generate
from pass_ext.decoding.models.row_attention import unsupported

_SHAPE = dict(SIZES, num_hidden_layers=1, max_position_embeddings=64)
_DECODER = dict(
    vocab_size=97,
    d_model=64,
    decoder_layers=1,
    encoder_layers=1,
    num_hidden_layers=1,
    decoder_attention_heads=4,
    decoder_ffn_dim=96,
    is_decoder=True,
    is_encoder_decoder=False,
    forced_eos_token_id=None,
)
IDS = torch.tensor([[5, 6, 7]])


def model_of(architecture, **shape):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **shape)).eval().requires_grad_(False)


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.24"), reason="other forms of the caches")
@pytest.mark.parametrize("architecture", ["bart", "mbart", "blenderbot", "pegasus"])
def test_a_table_takes_the_positions_that_its_model_does_not(architecture):
    model = model_of(architecture, **_DECODER)
    options = dict(attention_mask=torch.ones_like(IDS), do_sample=False, eos_token_id=None, pad_token_id=0)
    want = model.generate(IDS, max_new_tokens=12, **options)
    for method in (None, pass_ext.NGram(shortest=1, branches=2)):
        assert torch.equal(generate(model, IDS, method, max_new_tokens=12, eos_token_id=[]).sequences, want)


def test_models_that_take_no_positions():
    with pytest.raises(ValueError, match=r"roformer: \w+ForCausalLM.forward takes no position_ids"):
        generate(tiny_model("roformer"), IDS, max_new_tokens=2)


REASONS = {
    **dict.fromkeys(("rwkv", "xlstm"), "keeps a state of each text in code of its own"),
    "blt": ": BltForCausalLM.forward fails on packed rows (inputs_embeds",
}


@pytest.mark.parametrize("name", REASONS)
def test_models_that_trees_cannot_be_computed_with_say_why(name):
    with pytest.raises(ValueError, match=rf"^{name}:? ?{re.escape(REASONS[name].removeprefix(': '))}"):
        generate(tiny_model(name), IDS, max_new_tokens=2)


@pytest.mark.parametrize("name", ["got_ocr2", "moss_transcribe_diarize", "whisper"])
def test_a_decoder_counts_and_not_what_is_around_it(name):
    """got_ocr2's encoder of pictures has attention of its own; the others' decoders take the positions that their models do not
    name."""
    if name not in model_types():
        pytest.skip("this transformers does not have it")
    model = tiny_model(name)
    options = dict(attention_mask=torch.ones_like(IDS), do_sample=False, eos_token_id=None, pad_token_id=0)
    want = model.generate(IDS, max_new_tokens=12, **options)
    slots = pass_ext.LookaheadEmbedding.from_table(2, model.get_input_embeddings().weight)
    tree = pass_ext.Tree([-1, 0, 0, 1, 2])
    for method in (pass_ext.NGram(shortest=1, branches=2), pass_ext.PaSS(slots, tree=tree, rows=16)):
        got = generate(model, IDS, method, max_new_tokens=12, eos_token_id=[])
        assert torch.equal(got.sequences, want)
    ours = pass_ext.custom_generate(pass_ext.NGram(shortest=1))
    half = model.generate(IDS, max_new_tokens=6, custom_generate=ours, return_dict_in_generate=True, **options)
    options |= dict(attention_mask=torch.ones_like(half.sequences), past_key_values=half.past_key_values)
    assert torch.equal(model.generate(half.sequences, max_new_tokens=6, **options), want)


def test_a_cache_whose_places_count_padding_is_refused():
    """transformers gives positions to no model whose forward does not take them, and its caches count padding then."""
    if "moss_transcribe_diarize" not in model_types():
        pytest.skip("this transformers does not have it")
    model, mask = tiny_model("moss_transcribe_diarize"), torch.tensor([[1, 1, 1], [0, 1, 1]])
    ids, ours = IDS.repeat(2, 1), pass_ext.custom_generate()
    options = dict(attention_mask=mask, do_sample=False, eos_token_id=None, pad_token_id=0, max_new_tokens=4)
    want = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, custom_generate=ours, **options), want)
    with pytest.raises(ValueError, match="moss_transcribe_diarize caches keys at places that count padding"):
        model.generate(ids, custom_generate=ours, return_dict_in_generate=True, **options)


def test_whispers_table_of_positions_ends():
    model = model_of("whisper", **{**_DECODER, "max_target_positions": 12, "pad_token_id": 0})
    assert generate(model, IDS, max_new_tokens=10, eos_token_id=[]).lengths == (10,)
    with pytest.raises(ValueError, match="whisper has a table of 12 positions and none after them"):
        generate(model, IDS, max_new_tokens=11, eos_token_id=[])


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("doge", {"keep_window_size": 4}, "doge computes with its attention_mask"),
    ],
)
def test_unimplemented_attention_arguments_are_refused(architecture, changes, message):
    model = model_of(architecture, **_SHAPE, **changes)
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=message):
        generate(model, IDS, max_new_tokens=2)
    assert model.config._attn_implementation == before


def test_a_config_without_a_token_that_ends_texts():
    """roc_bert's, of transformers 5.24."""
    model = tiny_model("roc_bert")
    assert Version(transformers.__version__) < Version("5.24") or not hasattr(model.config, "eos_token_id")
    options = dict(attention_mask=torch.ones_like(IDS), do_sample=False, eos_token_id=None, pad_token_id=0)
    want = model.generate(IDS, max_new_tokens=8, **options)
    got = generate(model, IDS, pass_ext.NGram(shortest=1), max_new_tokens=8, eos_token_id=[])
    assert torch.equal(got.sequences, want)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_layers_that_are_not_causal(attention):
    """By "sdpa" rows of a prompt then see those after them; rows of a text that is written have a causal mask."""
    model = model_of("llama", **_SHAPE)
    model.set_attn_implementation(attention)
    causal = model(IDS).logits
    model.model.layers[0].self_attn.is_causal = False
    assert torch.equal(model(IDS).logits, causal) == (attention == "eager")
    for ids in (IDS, IDS[:, :1]):
        want = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
        for method in (None, pass_ext.NGram(shortest=1)):
            got = generate(model, ids, method, max_new_tokens=8, eos_token_id=[])
            assert torch.equal(got.sequences, want), method


def test_one_row_that_sees_all_is_no_bidirectional_model():
    """GPT-2 of transformers 4.57 passes is_causal=False for a single row."""
    module = model_of("llama", **_SHAPE).model.layers[0].self_attn
    assert unsupported(module, 1, 0.0, {"is_causal": False}) is None
    assert unsupported(module, 2, 0.0, {"is_causal": False}) == "LlamaAttention is not causal"


def test_unknown_tensors_are_refused(monkeypatch):
    from transformers.models.llama import modeling_llama

    model = model_of("llama", **_SHAPE)
    forward = modeling_llama.LlamaAttention.forward
    monkeypatch.setattr(
        modeling_llama.LlamaAttention, "forward", lambda *a, **k: forward(*a, **k, position_bias=torch.ones(3))
    )
    with pytest.raises(ValueError, match="LlamaAttention hands down 'position_bias'"):
        generate(model, IDS, max_new_tokens=2)


ROPES = {
    "longrope": ("phi3", dict(type="longrope", short_factor=[1.0] * 8, long_factor=[4.0] * 8)),
    "dynamic": ("llama", dict(rope_type="dynamic", factor=4.0)),
}


@pytest.mark.parametrize("kind", ROPES)
def test_frequencies_that_change_with_the_length(kind):
    """Frequencies stay the same up to 20 tokens: the prompt's 3, the new ones, and the deepest row."""
    architecture, rope = ROPES[kind]
    original = {"original_max_position_embeddings": 20} if kind == "longrope" else {"max_position_embeddings": 20}
    model = model_of(architecture, **{**_SHAPE, "pad_token_id": 0, **original, "rope_scaling": rope})
    want = model.generate(
        IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=17, do_sample=False, eos_token_id=None
    )[0]
    slots = pass_ext.LookaheadEmbedding.from_table(2, model.get_input_embeddings().weight)
    groups = pass_ext.Tree.chain(2).with_lookahead({0: 2, 2: 2})
    draft = model_of("llama", **_SHAPE)
    ahead = pass_ext.PaSS(slots, tree=groups, rows=8)
    methods = (
        (None, 17),
        (pass_ext.NGram(), 9),
        (pass_ext.NGram(tokens=5), 12),
        (ahead, 13),
        (pass_ext.PaSS(slots, tree=groups, rows=8, ngram=pass_ext.NGram(tokens=6)), 11),
        (pass_ext.Speculative(draft, 5), 12),
        (pass_ext.MultiCandidate(draft, (2, 1), lookahead=ahead), 13),
    )
    for method, most in methods:
        got = generate(model, IDS, method, max_new_tokens=most, eos_token_id=[]).sequences[0]
        assert torch.equal(got, want[: 3 + most]), method
        message = f"{architecture} changes its rotary frequencies after 20 tokens.*got 21"
        with pytest.raises(ValueError, match=message):
            generate(model, IDS, method, max_new_tokens=most + 1)


@pytest.mark.parametrize("turn", [1, -1])
def test_the_shortest_limit_of_a_models_layers_decides(turn):
    """Each kind of layers has rotary frequencies of its own; neither kind's limit is that of the other."""
    kinds = ["full_attention", "sliding_attention"]
    ropes = [
        dict(rope_type="dynamic", factor=2.0, rope_theta=1e4),
        dict(
            rope_type="longrope", factor=2.0, rope_theta=1e4, original_max_position_embeddings=20,
            short_factor=[1.0] * 8, long_factor=[4.0] * 8,
        ),
    ][::turn]  # fmt: skip
    shape = {**_SHAPE, "max_position_embeddings": 40, "head_dim": 16, "num_hidden_layers": 2, "num_key_value_heads": 2}
    model = model_of("gemma3_text", **shape, layer_types=kinds, rope_parameters=dict(zip(kinds, ropes, strict=True)))
    assert generate(model, IDS, max_new_tokens=17, eos_token_id=[]).lengths == (17,)
    with pytest.raises(ValueError, match=r"gemma3_text changes its rotary frequencies after 20 tokens.*got 21"):
        generate(model, IDS, max_new_tokens=18)


def test_the_longest_text_of_a_batch_decides():
    model = model_of("llama", **{**_SHAPE, "max_position_embeddings": 20, "rope_scaling": ROPES["dynamic"][1]})
    ids = torch.tensor([[0, 0, 0, 5], [5, 6, 7, 8]])
    seen = (ids != 0).long()
    assert generate(model, ids, attention_mask=seen, max_new_tokens=16, eos_token_id=[]).lengths == (16, 16)
    with pytest.raises(ValueError, match=r"after 20 tokens.*got 21"):
        generate(model, ids, attention_mask=seen, max_new_tokens=17)


def test_attention_scaled_by_the_number_of_a_row(monkeypatch):
    from transformers.models.llama4.modeling_llama4 import Llama4TextAttention

    model = model_of("llama4_text", **_SHAPE, head_dim=16, num_local_experts=2, layer_types=["full_attention"])
    monkeypatch.setattr(Llama4TextAttention, "forward", lambda self, hidden_states, **others: None)
    with pytest.raises(ValueError, match=r"llama4_text scales attention.*attn_temperature_tuning"):
        generate(model, IDS, max_new_tokens=2)


def test_attention_of_their_own():
    shape = dict(vocab_size=97, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=96)
    model = model_of("gpt_neox_japanese", **shape)
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match="gpt_neox_japanese: GPTNeoXJapaneseForCausalLM has attention of its own"):
        generate(model, IDS, max_new_tokens=1)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("architecture", ["codegen", "gptj"])
def test_attention_of_their_own_before_it_could_be_switched(architecture):
    """transformers 5.24 made it replaceable."""
    model = model_of(architecture, vocab_size=97, n_embd=64, n_layer=2, n_head=4, n_positions=64, rotary_dim=8)
    model.requires_grad_(False).apply(lambda part: part.weight.mul_(3) if isinstance(part, torch.nn.Linear) else None)
    if Version(transformers.__version__) < Version("5.24"):
        with pytest.raises(ValueError, match=f"{architecture}: .* has attention of its own"):
            generate(model, IDS, max_new_tokens=1)
        return
    options = dict(max_new_tokens=12, do_sample=False, eos_token_id=None, attention_mask=torch.ones_like(IDS))
    want = model.generate(IDS, **options)
    assert torch.equal(generate(model, IDS, pass_ext.NGram(shortest=1), max_new_tokens=12).sequences, want)
    assert len(want.unique()) > 4  # not one token again and again, which any attention would give


_VISION = dict(hidden_size=48, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
TABLES = {
    "gpt2": dict(vocab_size=97, n_embd=64, n_layer=1, n_head=4, n_positions=20),
    "opt": dict(
        vocab_size=97,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        ffn_dim=96,
        word_embed_proj_dim=64,
        max_position_embeddings=20,
    ),
    "ctrl": dict(vocab_size=97, n_embd=64, n_layer=1, n_head=4, dff=96, n_positions=20),  # a table of sines
}


@pytest.mark.parametrize("architecture", TABLES)
def test_texts_that_end_at_the_last_position(architecture):
    """The last new token needs no position; drafts may lie after the last position."""
    model = model_of(architecture, **TABLES[architecture])
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    options = dict(attention_mask=torch.ones_like(IDS), do_sample=False, eos_token_id=None, pad_token_id=0)
    want = model.generate(IDS, max_new_tokens=18, **options)
    slots = pass_ext.LookaheadEmbedding.from_table(3, model.get_input_embeddings().weight)
    for method in (
        pass_ext.Plain(),
        pass_ext.NGram(longest=2, shortest=1, tokens=8),
        pass_ext.PaSS(slots, tree=pass_ext.Tree.chain(3), rows=16),
        pass_ext.MultiCandidate(model, (2, 2, 1, 1)),
    ):
        assert torch.equal(generate(model, IDS, method, max_new_tokens=18, eos_token_id=[]).sequences, want), method
        with pytest.raises(ValueError, match=rf"{architecture} has a table of 20 positions.* within 21 tokens, got 22"):
            generate(model, IDS, method, max_new_tokens=19, eos_token_id=[])
    # Another position seldom changes the text.
    scores = generate(model, IDS, max_new_tokens=18, eos_token_id=[], logprobs=0).logprobs[0].raw
    rows = model(want[:, :-1]).logits[0, -18:].log_softmax(1)
    torch.testing.assert_close(scores, rows.gather(1, want[0, -18:, None])[:, 0], rtol=0, atol=1e-4)
    with pytest.raises((IndexError, RuntimeError)):
        model.generate(IDS, max_new_tokens=19, **options)


def test_rotary_models_go_past_their_positions():
    model = model_of("llama", **{**_SHAPE, "max_position_embeddings": 5})
    want = model.generate(
        IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=9, do_sample=False, eos_token_id=None
    )
    assert torch.equal(generate(model, IDS, max_new_tokens=9, eos_token_id=[]).sequences, want)


@pytest.mark.parametrize("architecture", ["gemma3", "gemma4"])
@pytest.mark.parametrize("token", [90, 91, 92, 7])
def test_tokens_that_stand_for_pictures_and_sound(architecture, token):
    """gemma4 embeds its padding in their place, in every layer too, gemma3 the tokens themselves; as a prompt's last token, and
    among others."""
    model = tiny_model(architecture)
    ids = torch.tensor([[5, 90, 6, 92, 7, 91, token]])
    options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False, eos_token_id=None)
    want = model.generate(ids, **options)
    draft = pass_ext.MultiCandidate(model, (2, 1))
    for method in (None, pass_ext.NGram(shortest=1), draft):
        assert torch.equal(generate(model, ids, method, max_new_tokens=16, eos_token_id=[]).sequences, want), method
    # What they get from a table of each layer seldom changes the text.
    scores = generate(model, ids, max_new_tokens=16, eos_token_id=[], logprobs=0).logprobs[0].raw
    rows = model(want[:, :-1]).logits[0, -16:].log_softmax(1)
    torch.testing.assert_close(scores, rows.gather(1, want[0, -16:, None])[:, 0], rtol=0, atol=1e-4)


def test_placeholders_that_are_embedded_by_no_token_of_the_table(monkeypatch):
    from transformers.models.gemma3 import modeling_gemma3

    forward = modeling_gemma3.Gemma3Model.forward

    def replacing(self, input_ids=None, inputs_embeds=None, **named):
        if input_ids is not None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
            inputs_embeds[input_ids == self.config.image_token_id] = 0.5
        return forward(self, inputs_embeds=inputs_embeds, **named)

    model = tiny_model("gemma3")
    monkeypatch.setattr(modeling_gemma3.Gemma3Model, "forward", replacing)
    with pytest.raises(ValueError, match="gemma3 embeds token 90, which its config names as a placeholder, otherwise"):
        generate(model, IDS, max_new_tokens=2)


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        (
            "git",
            {"vision_config": _VISION},
            "git computes with its attention_mask",
        ),
    ],
)
def test_refusals_name_the_model(architecture, changes, message):
    model = model_of(architecture, **_SHAPE, **changes)
    for run in (
        lambda: generate(model, IDS, max_new_tokens=2),
        lambda: model.generate(IDS, max_new_tokens=2, custom_generate=pass_ext.custom_generate(), use_cache=False),
    ):
        with pytest.raises(ValueError, match=message):
            run()


def test_errors_of_the_model_are_explained_at_the_first_call_only(monkeypatch):
    """Errors of later calls, and of machines without memory, are raised unchanged."""
    model = model_of("llama", **_SHAPE)
    forward = model.model.forward
    outcomes = []

    def fails(*given, **named):
        outcome = outcomes.pop(0)
        if outcome is not None:
            raise outcome
        return forward(*given, **named)

    monkeypatch.setattr(model.model, "forward", fails)
    for fate, kind, message in (
        ([RuntimeError("size of a")], ValueError, r"^llama: LlamaForCausalLM.forward fails .* RuntimeError: size of a"),
        ([None, RuntimeError("size of a")], RuntimeError, "^size of a"),
        ([torch.OutOfMemoryError("no memory")], torch.OutOfMemoryError, "^no memory"),
    ):
        outcomes[:] = fate
        with pytest.raises(kind, match=message):
            generate(model, IDS, max_new_tokens=3)


def test_every_layer_must_attend():
    """A layer that mixes rows otherwise would give a wrong text without an error."""
    model = model_of("llama", **{**_SHAPE, "num_hidden_layers": 2})
    model.model.layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states.cumsum(1), None)
    with pytest.raises(ValueError, match=r"^llama: 1 of 2 layers attended"):
        generate(model, IDS, max_new_tokens=2)


# ---- models of one's own ----


class Own:
    """A PackedModel whose layers differ in scale, cap and window; ``change`` takes what a layer gives to ``attend``."""

    LAYERS = (
        {"window": 3},
        {"softcap": 1.5},
        {"scale": 0.02, "sinks": torch.tensor([0.5, 2.0])},
        {"scale": 0.05, "softcap": 2.0, "window": 5},
        {"chunk": 4},
    )

    def __init__(self, change=lambda layer, q, k, v: (q, k, v), change_logits=lambda logits: logits):
        random = torch.Generator().manual_seed(1)
        self.embedding, self.head = torch.randn(2, 50, 32, generator=random)
        self.weights = torch.randn(len(self.LAYERS), 4, 32, 32, generator=random) / 32**0.5
        self.change, self.change_logits = change, change_logits

    def __call__(self, rows, positions, attend, wanted):
        x = rows + 2 * (positions[:, None] * torch.arange(1, 33)).float().cos()
        for layer, (weights, options) in enumerate(zip(self.weights, self.LAYERS, strict=True)):
            q, k, v = (2 * (x @ weight).unflatten(1, (-1, 16)) for weight in weights[:3])
            q, k, v = self.change(layer, q, k[:, :1], v[:, :1])
            x = x + attend(layer, q, k, v, **options).flatten(1).float() @ weights[3]
        return self.change_logits((x if wanted is None else x[wanted]) @ self.head.T)


def attend_densely(layer, q, k, v, scale=None, softcap=0.0, window=-1, sinks=None, chunk=-1):
    """The formula, for the rows of one text."""
    scores = torch.einsum("ihd,jgd->hij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
    seen = (distance >= 0) & ((distance < window) | (window < 0))
    if chunk >= 0:
        places = torch.arange(len(q))
        seen &= places[:, None] // chunk == places // chunk
    scores = scores.where(seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(q), 1)], dim=-1)
    return torch.einsum("hij,jgd->ihd", scores.softmax(-1)[..., : len(q)], v)


def test_the_options_of_each_layer_are_as_documented():
    model, text = Own(), IDS[0].tolist()
    for _ in range(12):
        rows = model.embedding[text]
        text.append(int(model(rows, torch.arange(len(text)), attend_densely, None)[-1].argmax()))
    for method in (pass_ext.Plain(), pass_ext.NGram(longest=1, shortest=1, branches=2)):
        assert generate(model, IDS, method, max_new_tokens=12).sequences.tolist() == [text], method


@pytest.mark.parametrize("parameter", ["scale", "softcap", "window", "sinks", "chunk"])
def test_each_of_them_changes_the_text_of_that_model(parameter, monkeypatch):
    texts = [generate(Own(), IDS, max_new_tokens=12).sequences]
    without = tuple({name: x for name, x in layer.items() if name != parameter} for layer in Own.LAYERS)
    monkeypatch.setattr(Own, "LAYERS", without)
    assert not torch.equal(texts[0], generate(Own(), IDS, max_new_tokens=12).sequences)


def test_layers_of_a_model_of_ones_own_attend_once_and_in_order():
    class Again(Own):
        def __call__(self, rows, positions, attend, wanted):
            return super().__call__(
                rows, positions, lambda layer, *qkv, **more: attend(layer // 2, *qkv, **more), wanted
            )

    with pytest.raises(ValueError, match="layers must attend once each and in order: expected layer 1, got 0"):
        generate(Again(), IDS, max_new_tokens=2)


GIVEN = r"got q torch\.\w+ \[.*\], k torch\.\w+ \[.*\], v torch\.\w+ \[.*\]$"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda layer, q, k, v: (q, k, v.bfloat16()), "^attend, layer 0: q, k and v must have one dtype: convert them"),
        (
            lambda layer, q, k, v: (q.bfloat16() if layer else q, k, v),
            "^attend, layer 1: q, k and v must have one dtype",
        ),
        (
            lambda layer, q, k, v: (q, k[1:], v[1:]),
            r"^attend, layer 0: q must be \[3, heads, D\].*: the call has 3 rows",
        ),
        (lambda layer, q, k, v: (q.flatten(1), k, v), r"^attend, layer 0: q must be \[3, heads, D\]"),
        (lambda layer, q, k, v: (q, k[..., :8], v), "^attend, layer 0: k must have the D of q"),
        (lambda layer, q, k, v: (q, k.expand(-1, 2, -1), v), "^attend, layer 0: k must have .* the heads of v"),
        (
            lambda layer, q, k, v: (q[:, :1], k.expand(-1, 2, -1), v.expand(-1, 2, -1)),
            "^attend, layer 0: .* q a multiple",
        ),
    ],
)
def test_what_a_model_of_ones_own_gives_to_attend_is_named(change, message):
    with pytest.raises(ValueError, match=f"{message}.*{GIVEN}"):
        generate(Own(change), IDS, max_new_tokens=3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda logits: logits.repeat(2, 1),
            r"Own must return logits \[1, V\], of rows\[wanted\] alone: .* got \[2, 50\]",
        ),
        (lambda logits: logits[None], r"Own must return logits \[1, V\].* got \[1, 1, 50\]"),
        (lambda logits: (logits,), r"Own must return logits \[1, V\].* got tuple"),
    ],
)
def test_logits_of_a_model_of_ones_own_have_the_rows_that_are_wanted(change, message):
    with pytest.raises(ValueError, match=message):
        generate(Own(change_logits=change), IDS, max_new_tokens=3)


def test_a_model_of_ones_own_that_ignores_wanted_is_named():
    class Ignores(Own):
        def __call__(self, rows, positions, attend, wanted):
            return super().__call__(rows, positions, attend, None)

    with pytest.raises(ValueError, match=r"Ignores must .*: wanted has 1 of the 3 rows; got \[3, 50\]"):
        generate(Ignores(), IDS, max_new_tokens=3)
