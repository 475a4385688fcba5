"""computes_by_ops: the parts of each architecture that compute by the step ops, their results, and parts that must stay."""

from collections import Counter
from contextlib import contextmanager
from functools import wraps

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from support.small_models import ARCHITECTURES, prompts, small_model
from transformers import AutoConfig, AutoModelForCausalLM

import pass_ext
from pass_ext.decoding.models import module_ops
from pass_ext.testing import assert_same_bits

pytestmark = pytest.mark.usefixtures("one_thread")

MORE = dict.fromkeys(("granite", "olmo2", "smollm3", "glm", "cohere"), ARCHITECTURES["llama"]) | {
    "gemma3_text": ARCHITECTURES["gemma"]
}
LLAMA = dict(RMSNorm=5, MLP=2, Attention=2)
# cohere's norm subtracts the mean.
RECOGNISED = dict.fromkeys(("llama", "qwen2", "mistral", "gemma", "phi3", "granite", "smollm3", "qwen2_moe"), LLAMA) | {
    "qwen3": LLAMA | dict(RMSNorm=9),
    "gemma2": LLAMA | dict(RMSNorm=9),
    "olmo2": LLAMA | dict(RMSNorm=9),
    "gemma3_text": LLAMA | dict(RMSNorm=13),
    "glm": dict(RMSNorm=5, MLP=2),
    "cohere": dict(MLP=2),
    "phi": dict(Attention=2),
    "gpt_neox": dict(Attention=2),
    "opt": {},
}


def model_of(architecture, dtype=torch.float32):
    if architecture not in MORE:
        return small_model(architecture).to(dtype)
    torch.manual_seed(0)
    config = AutoConfig.for_model(architecture, **MORE[architecture])
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().to(dtype).requires_grad_(False)


@contextmanager
def by_ops(model):
    """Inside, norms and MLPs compute by their ops, as those of a model's shadow do."""
    free = [part for part in model.modules() if "forward" not in vars(part)]
    module_ops.computes_by_ops(model, lambda *_, **__: False)
    try:
        yield
    finally:
        for part in free:
            vars(part).pop("forward", None)


def replaced(model):
    """Kind of part -> how many have a forward of their own."""
    kinds = [type(part).__name__ for part in model.modules() if "forward" in vars(part)]
    return Counter(kind for name in kinds for kind in LLAMA if name.endswith(kind))


# ---- whole models ----


@pytest.mark.parametrize("architecture", RECOGNISED)
def test_each_architecture_gives_its_results(architecture):
    assert {*ARCHITECTURES, *MORE} <= {*RECOGNISED}
    ids = prompts(1, 12)[0]
    for dtype, near in ((torch.float32, dict(rtol=2e-5, atol=2e-6)), (torch.bfloat16, dict(rtol=2e-2, atol=2e-2))):
        model = model_of(architecture, dtype)
        for parameter in model.parameters():  # norms begin with weights of one or zero
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        with torch.no_grad():
            before = model(ids).logits
            with by_ops(model):
                assert replaced(model) == RECOGNISED[architecture]
                torch.testing.assert_close(model(ids).logits, before, **near)
            assert not replaced(model)
            assert_same_bits(model(ids).logits, before)


def test_every_part_of_a_call_as_it_is_runs_by_its_op(monkeypatch):
    calls = Counter()

    def counting(name):
        op = getattr(module_ops, name)
        return lambda *arguments: calls.update([name]) or op(*arguments)

    model, ids = small_model("llama"), prompts(1, 6)[0]
    model.register_forward_hook(lambda *_: None)  # so it runs as it is
    expected = model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)
    pass_ext.generate(model, ids, max_new_tokens=1)  # which parts are norms and gates is found out by the ops too
    for name in ("_norm", "_gate"):
        monkeypatch.setattr(module_ops, name, counting(name))
    got = pass_ext.generate(model, ids, max_new_tokens=4, eos_token_id=[])
    assert torch.equal(got.sequences, expected)
    assert calls["_norm"] == 5 * got.stats.model_calls and calls["_gate"] >= 2 * got.stats.model_calls


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "phi3"])
def test_calls_that_are_not_ours_compute_as_before(architecture):
    """Gradients are recorded, or the call is compiled."""
    model, ids = small_model(architecture), prompts(2, 7)[0]

    def results(grad):
        rows = model.get_input_embeddings()(ids).detach().requires_grad_(grad)
        logits = model(inputs_embeds=rows).logits
        return [logits.detach(), *(torch.autograd.grad(logits.logsumexp(-1).sum(), rows) if grad else ())]

    recorded = results(True)
    with by_ops(model):
        for value, expected in zip(results(True), recorded, strict=True):
            assert_same_bits(value, expected)
    norm = model.get_decoder().norm
    x = torch.randn(3, 64)
    with torch.no_grad():
        expected = torch.compile(norm.forward, backend="eager")(x)
        with by_ops(model):
            assert_same_bits(torch.compile(norm.forward, backend="eager", fullgraph=True)(x), expected)


def test_autocast_changes_nothing():
    model = small_model("llama")
    with torch.autocast("cpu", torch.bfloat16), by_ops(model):
        assert not replaced(model)


def test_the_callers_random_numbers_stay():
    model = small_model("llama")
    for cached in (module_ops._norm_form, module_ops._numbers_for_gate, module_ops._rotates_halves):
        cached.cache_clear()
    torch.manual_seed(3)
    with by_ops(model):
        drawn = torch.rand(4)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(4))


# ---- linear layers ----


class OfAMatrix(nn.Linear):
    def forward(self, input):
        product = input @ self.weight.T
        return product if self.bias is None else product + self.bias


class Halved(nn.Linear):
    def forward(self, input):
        return super().forward(input) / 2


class InCodes(nn.Linear):
    def forward(self, input):
        scale = input.abs().amax(-1, keepdim=True) / 127
        return super().forward((input / scale).round() * scale)


class WithFactor(OfAMatrix):
    def __init__(self, *sizes, **options):
        super().__init__(*sizes, **options)
        self.factor = 2.0

    def forward(self, input):
        return super().forward(input) * getattr(self, "factor", 1.0)


@pytest.mark.parametrize("bias", [False, True])
def test_linear_layers_are_recognised_by_what_they_compute(bias):
    """Then a row has the bits that it has alone."""
    x = torch.randn(70, 97)
    for kind, count in ((nn.Linear, 1), (OfAMatrix, 1), *((kind, 0) for kind in (Halved, InCodes, WithFactor))):
        layer = kind(97, 41, bias=bias).requires_grad_(False)
        before = layer(x)
        module_ops.computes_by_ops(layer, lambda *_, **__: True)
        assert ("forward" in vars(layer)) == count, kind
        with torch.no_grad():
            torch.testing.assert_close(layer(x), before, rtol=1e-5, atol=1e-5)
            if count:
                assert_same_bits(layer(x), torch.cat([layer(row) for row in x.split(1)]))
        with torch.enable_grad():
            assert_same_bits(layer(x), before)  # as before


# ---- parts that must be left alone ----


class Own(torch.Tensor):
    """A subclass, as torchao's and distributed tensors are."""


class Norm(nn.Module):
    """Like GemmaRMSNorm, a norm in two functions."""

    def __init__(self, width=32):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width), requires_grad=False)
        self.eps = 1e-3

    def normal(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x):
        return self.weight * self.normal(x)


class Plain(nn.Module):
    """A norm in one function; subclasses change its result."""

    def __init__(self, width=32):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width), requires_grad=False)
        self.eps = 1e-3

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class OfDeviations(Plain):
    def forward(self, x):
        return super().forward(x - x.mean(-1, keepdim=True))


class EpsOutside(Plain):
    def forward(self, x):
        return self.weight * (x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps))


class Scaled(Plain):
    def forward(self, x):
        return super().forward(x) * 1.001


class Wide(Plain):
    def forward(self, x):
        return super().forward(x).double()


class WithOthers(Plain):
    def forward(self, x):
        return super().forward(x), x


class WithState(Plain):
    def forward(self, x):
        return super().forward(x) * self.factor


def test_norms_are_recognised_by_what_they_compute():
    x = torch.randn(3, 32) * 0.1
    others = OfDeviations, EpsOutside, Scaled, Wide, WithOthers, WithState
    for kind, count in ((Norm, 1), (Plain, 1), *((kind, 0) for kind in others)):
        module = kind()
        module.factor = 2.0
        before = module(x)
        with torch.no_grad(), by_ops(module):
            assert ("forward" in vars(module)) == count, kind
            torch.testing.assert_close(module(x), before, rtol=1e-6, atol=1e-6)


def test_norms_that_are_not_plain_are_left_alone():
    def double(module):
        module.double()

    def two_weights(module):
        module.bias = nn.Parameter(torch.zeros(32))

    def wrapped(module):
        module.forward = type(module).forward.__get__(module)

    def meta(module):
        module.to("meta")

    def tensor_eps(module):
        module.eps = torch.tensor(1e-3)

    def own_weight(module):
        module.weight = nn.Parameter(module.weight.as_subclass(Own), requires_grad=False)

    def with_parts(module):
        module.inner = nn.Linear(2, 2)

    for change in (double, two_weights, wrapped, meta, tensor_eps, own_weight, with_parts):
        module = Plain()
        change(module)
        before = vars(module).get("forward")
        with by_ops(module):
            assert vars(module).get("forward") is before, change
        assert vars(module).get("forward") is before


def test_a_norm_whose_weight_is_replaced_meanwhile_uses_it():
    module, x, other = Plain(), torch.randn(3, 32), nn.Parameter(torch.randn(32), requires_grad=False)
    with torch.no_grad(), by_ops(module):
        called = torch.func.functional_call(module, {"weight": other}, (x,))
        module.weight = other
        assert_same_bits(called, Plain.forward(module, x))
        assert_same_bits(module(x), Plain.forward(module, x))
        assert module(x.double()).dtype == torch.float64


def mlp_of(model=None):
    return (model or small_model("llama")).model.layers[0].mlp


class Learned(nn.Module):
    """silu, until it is trained."""

    def __init__(self):
        super().__init__()
        self.beta = nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, x):
        return x * torch.sigmoid(self.beta * x)


def test_mlps_with_another_activation_are_left_alone():
    trained = Learned()
    trained.beta.fill_(1.01)
    hooked = nn.SiLU()
    hooked.register_forward_hook(lambda *_: None)
    wrapped = nn.SiLU()
    wrapped.forward = lambda x: nn.functional.silu(x)
    activations = (nn.SiLU(), 1), (nn.GELU(approximate="tanh"), 1), (nn.GELU(), 0), (nn.ReLU(), 0), (trained, 0)
    for activation, count in (*activations, (Learned(), 1), (hooked, 0), (wrapped, 0)):
        mlp, x = mlp_of(), torch.randn(4, 64)
        mlp.act_fn = activation
        with torch.no_grad():
            before = mlp(x)
            with by_ops(mlp):
                assert ("forward" in vars(mlp)) == count, activation
                torch.testing.assert_close(mlp(x), before, rtol=1e-5, atol=1e-5)


class Swapped(nn.Module):
    """The same parts in another order."""

    def __init__(self, mlp):
        super().__init__()
        for name, part in mlp.named_children():
            setattr(self, name, part)

    def forward(self, x):
        return self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)))


class Twice(Swapped):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * 2)


def test_mlps_with_another_formula_are_left_alone():
    for kind in (Swapped, Twice):
        mlp = kind(mlp_of())
        with by_ops(mlp):
            assert "forward" not in vars(mlp), kind


def test_attention_with_another_rotation_is_left_alone(monkeypatch):
    """One tensor, three, neighbouring pairs, or none of a tensor."""
    from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as neighbours
    from transformers.models.llama import modeling_llama

    halves = modeling_llama.apply_rotary_pos_emb
    others = neighbours, lambda q, k, cos, sin: q, lambda q, k, cos, sin: (*halves(q, k, cos, sin), q)
    for rotate in (*others, lambda q, k, cos, sin: (1, 2), lambda q, k, angles: (q, k), lambda *tensors: None):
        monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", rotate)
        model = small_model("llama")
        with by_ops(model):
            assert replaced(model) == dict(RMSNorm=5, MLP=2)


def _renaming(name, seen):
    """A decorator as that of transformers 5.24: what comes by an old name goes on by the new one."""

    def around(function):
        @wraps(function)
        def renamed(self, *arguments, **named):
            if f"old_{name}" in named:
                seen.append(name)
                named[name] = named.pop(f"old_{name}")
            return function(self, *arguments, **named)

        return renamed

    return around


@pytest.mark.parametrize("names", [["attention_mask"], ["attention_mask", "position_embeddings"]], ids=len)
def test_attention_keeps_its_decorators(names, monkeypatch):
    """A call by an old name does what it did; the rotation is the op's all the same, to the bit."""
    from transformers.models.llama import modeling_llama

    model, seen, theirs = small_model("llama"), [], []
    forward, halves = modeling_llama.LlamaAttention.forward, modeling_llama.apply_rotary_pos_emb

    def counted(*tensors):
        theirs.append(1)
        return halves(*tensors)

    for name in names:
        forward = _renaming(name, seen)(forward)
    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", forward)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", counted)
    attention, x = model.model.layers[0].self_attn, torch.randn(1, 5, 64)
    cos_sin = model.model.rotary_emb(x, torch.arange(5)[None])
    given = {"position_embeddings": cos_sin, "attention_mask": torch.zeros(1, 1, 5, 5)}
    old = {f"old_{name}" if name in names else name: value for name, value in given.items()}
    with torch.no_grad():
        before = attention(x, **given)[0]
        with by_ops(attention):
            theirs.clear()
            assert_same_bits(attention(x, **old)[0], before)
            assert seen == names[::-1] and not theirs
            assert_same_bits(attention(x.repeat(2, 1, 1), **given)[0][1:], before)  # of two texts: as before
            assert theirs


def test_hooks_run_as_before():
    model, ids, seen = small_model("llama"), prompts(1, 5)[0], []
    layer = model.model.layers[0]
    for part in (layer.mlp, layer.mlp.gate_proj, layer.input_layernorm, layer.self_attn):
        part.register_forward_hook(lambda part, *_: seen.append(type(part).__name__))
    with torch.no_grad():
        model(ids)
        before = list(seen)
        seen.clear()
        with by_ops(model):
            assert replaced(model) == LLAMA
            model(ids)
    assert seen == before == ["LlamaRMSNorm", "LlamaAttention", "Linear", "LlamaMLP"]
