"""Models that other libraries have changed: peft's adapters, accelerate's offloading, quantised weights. generate writes the
changed model's text, or refuses it with a reason."""

import importlib.util
import subprocess
import sys

import pytest
import torch

pytest.importorskip("transformers")

from support.generation import slots_for
from support.small_models import ragged_prompts, small_model
from torch import nn

from pass_ext import EarlyExitDraft, NGram, PaSS, Speculative, Tree, custom_generate, generate
from pass_ext.decoding.models.any_model import packed_model

NEW = 8
IDS, MASK = ragged_prompts(3, longest=8, seed=1)
OPTIONS = dict(max_new_tokens=NEW, attention_mask=MASK, eos_token_id=[])


def of_transformers(model, **options):
    return model.generate(
        input_ids=IDS,
        attention_mask=MASK,
        max_new_tokens=NEW,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        **options,
    )[:, -NEW:]


def ours(model, method=None):
    return generate(model, IDS, method, **OPTIONS).sequences[:, -NEW:]


def look_ahead(model, **more):
    return PaSS(slots_for(model, **more), tree=Tree.chain(3), rows=24)


def noisy(model):
    """Gives trained parameters values that change the text."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.3)
    return model.eval()


# ---- peft ----


@pytest.fixture(scope="module")
def peft():
    return pytest.importorskip("peft")


def adapted(peft, name, **config):
    model = small_model("llama")
    return noisy(peft.get_peft_model(model, getattr(peft, name)(task_type="CAUSAL_LM", **config)))


CHANGE_LAYERS = {
    "LoraConfig": {"init_lora_weights": False},
    "IA3Config": {"init_ia3_weights": False},
    "AdaptionPromptConfig": {"adapter_len": 4, "adapter_layers": 2},
}


@pytest.mark.parametrize("name", CHANGE_LAYERS)
def test_adapters_in_layers_count(peft, name):
    """For the target, and for a draft of its first layers, which shares them."""
    model = adapted(peft, name, **CHANGE_LAYERS[name])
    want = of_transformers(model)
    assert not torch.equal(want, of_transformers(small_model("llama"))), "the adapter shows"
    for method in (None, NGram(shortest=1), look_ahead(model), Speculative(EarlyExitDraft(model, 1))):
        assert torch.equal(ours(model, method), want)
    assert torch.equal(of_transformers(model, custom_generate=custom_generate(NGram(shortest=1))), want)


def test_an_early_exit_draft_has_the_adapters_of_its_layers(peft):
    """All layers as a draft: every candidate comes true, with LoRA apart, merged and switched off."""
    model = adapted(peft, "LoraConfig", init_lora_weights=False)

    def draft_is_the_model(model):
        method = Speculative(EarlyExitDraft(model, 2), 3)
        got = generate(model, IDS, method, **OPTIONS)
        assert torch.equal(got.sequences[:, -NEW:], of_transformers(model))
        assert got.stats.draft_acceptance_rate == 1.0
        return got.sequences

    with_adapter = draft_is_the_model(model)
    base = model.get_base_model()
    assert EarlyExitDraft(model, 1).model is base
    draft = packed_model(EarlyExitDraft(model, 1))
    ours, theirs = (each.model.layers[0].self_attn.q_proj.lora_A["default"].weight for each in (draft.model, base))
    assert ours is theirs
    with model.disable_adapter():
        assert not torch.equal(draft_is_the_model(model), with_adapter)
    model.merge_adapter()
    assert torch.equal(draft_is_the_model(model), with_adapter)


CHANGE_CALLS = {
    "PromptTuningConfig": ("PROMPT_TUNING", {"num_virtual_tokens": 4}),
    "PromptEncoderConfig": ("P_TUNING", {"num_virtual_tokens": 4, "encoder_hidden_size": 16}),
    "PrefixTuningConfig": ("PREFIX_TUNING", {"num_virtual_tokens": 4}),
}


@pytest.mark.parametrize("name", CHANGE_CALLS)
def test_adapters_before_the_text_are_refused(peft, name):
    kind, config = CHANGE_CALLS[name]
    model = adapted(peft, name, **config)
    message = f"llama has a peft adapter of the kind {kind}, which puts learned tokens, keys or values before each text"
    for call in (
        lambda: ours(model),
        lambda: ours(model, NGram()),
        lambda: of_transformers(model, custom_generate=custom_generate()),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with model.disable_adapter():
        assert torch.equal(ours(model), of_transformers(small_model("llama")))
    base = model.get_base_model()  # unchanged afterwards
    assert torch.equal(of_transformers(base, custom_generate=custom_generate()), of_transformers(base))


def test_an_adapter_after_certain_tokens_is_refused(peft):
    model = adapted(peft, "LoraConfig", init_lora_weights=False, alora_invocation_tokens=[int(IDS[0, -3])])
    for call in (lambda: ours(model), lambda: of_transformers(model, custom_generate=custom_generate())):
        with pytest.raises(ValueError, match="llama has a peft adapter of the kind aLoRA"):
            call()


# ---- accelerate ----


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_offloaded_weights_come_for_each_call(where, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model = small_model("llama")
    want = of_transformers(model)
    device = torch.device("cpu")
    if where == "cpu":
        accelerate.cpu_offload(model, execution_device=device)
    else:
        accelerate.disk_offload(model, tmp_path, execution_device=device)
    assert model.get_input_embeddings().weight.is_meta
    for method in (None, NGram(shortest=1), look_ahead(model)):
        assert torch.equal(ours(model, method), want)
    assert torch.equal(of_transformers(model, custom_generate=custom_generate(NGram(shortest=1))), want)
    with pytest.raises(ValueError, match=r"transitions \(rank 3\).*that of llama is quantised or offloaded"):
        ours(model, look_ahead(model, rank=3))


def test_weights_that_were_never_loaded():
    with pytest.raises(ValueError, match="llama: the embedding table is on the meta device: load the model's weights"):
        ours(small_model("llama").to("meta"))


# ---- tensors of other kinds ----


class Halves(torch.Tensor):
    """A weight like those of quantising libraries: two parts instead of the numbers, and its own product."""

    @staticmethod
    def __new__(cls, big, small):
        return torch.Tensor._make_wrapper_subclass(cls, big.shape, dtype=big.dtype)

    def __init__(self, big, small):
        self.big, self.small = big, small

    @classmethod
    def of(cls, weight):
        big = weight.detach().round(decimals=1)
        return nn.Parameter(cls(big, weight.detach() - big), requires_grad=False)

    def whole(self):
        return self.big + self.small

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        if function in (nn.functional.linear, nn.functional.embedding):
            whole = [each.whole() if isinstance(each, cls) else each for each in arguments]
            return function(*whole, **(options or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*arguments, **(options or {}))

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), options=None):
        if function is torch.ops.aten.detach.default:
            return cls(arguments[0].big, arguments[0].small)
        raise NotImplementedError(f"Halves has no {function}")


def replace_weights(model, kinds):
    for part in model.modules():
        if type(part) in kinds:
            part.weight = Halves.of(part.weight)
    return model


@pytest.mark.parametrize("kinds", [(nn.Linear,), (nn.Linear, nn.Embedding)], ids=["layers", "and table"])
def test_weights_of_other_kinds_are_left_alone(kinds):
    want = of_transformers(small_model("llama"))
    model = replace_weights(small_model("llama"), kinds)
    assert type(model.lm_head.weight) is Halves
    for method in (None, NGram(shortest=1), look_ahead(model), Speculative(EarlyExitDraft(model, 1))):
        assert torch.equal(ours(model, method), want)
    assert torch.equal(of_transformers(model, custom_generate=custom_generate(NGram(shortest=1))), want)


def test_methods_that_need_the_tables_numbers_are_refused():
    from support.generation import Decoder, adapter_for

    model = replace_weights(small_model("llama"), (nn.Linear, nn.Embedding))
    with pytest.raises(ValueError, match=r"look-ahead slots with transitions \(rank 3\)"):
        ours(model, look_ahead(model, rank=3))
    draft = EarlyExitDraft(model, adapter=adapter_for(model, vocabulary=torch.tensor([4, 9])))
    with pytest.raises(
        ValueError, match=r"takes 2 rows of the model's head, which must be a plain tensor .* got Halves"
    ):
        ours(model, Speculative(draft))
    plain = Decoder()
    plain.embedding = Halves.of(plain.embedding)
    with pytest.raises(ValueError, match=r"model.embedding must be a plain tensor .* got Halves on cpu"):
        generate(plain, IDS[:, -1:], max_new_tokens=1)


@pytest.fixture(scope="module")
def torchao(tmp_path_factory):
    """Downloads the library if it is not installed: tens of megabytes, for these tests only."""
    if importlib.util.find_spec("torchao") is None:
        folder = str(tmp_path_factory.mktemp("torchao"))
        install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, "torchao"]
        subprocess.run(install, check=True)
        sys.path.append(folder)
    from torchao import quantization

    return quantization


def quantised_by_torchao(quantization, name, **options):
    model = small_model("llama")
    quantization.quantize_(model, getattr(quantization, f"{name}Config")(), **options)
    assert type(model.lm_head.weight).__module__.startswith("torchao")
    return model, (None, NGram(shortest=1), look_ahead(model), Speculative(EarlyExitDraft(model, 1)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("Int8WeightOnly", (nn.Linear,)),
        ("IntxWeightOnly", (nn.Linear,)),
        ("IntxWeightOnly", (nn.Linear, nn.Embedding)),
        ("Float8WeightOnly", (nn.Linear,)),
    ],
)
def test_torchao_computes_its_own_products(torchao, name, kinds):
    model, methods = quantised_by_torchao(torchao, name, filter_fn=lambda part, _: type(part) in kinds)
    want = of_transformers(model)
    for method in methods:
        assert torch.equal(ours(model, method), want)


@pytest.mark.slow
def test_torchao_with_activations_quantised_too(torchao):
    """Their rounding turns differences in the last bit, as between transformers' own attentions, into steps of a hundredth. So
    tokens are compared by the model's logits for them."""
    model, methods = quantised_by_torchao(torchao, "Int8DynamicActivationInt8Weight")
    for method in methods:
        for ids, seen in zip(IDS, MASK.bool(), strict=True):
            prompt = ids[seen][None]
            text = generate(model, prompt, method, max_new_tokens=NEW, eos_token_id=[]).sequences
            logits = model(text[:, :-1]).logits[0, prompt.shape[1] - 1 :]
            chosen = logits.gather(1, text[0, prompt.shape[1] :, None])[:, 0]
            assert (logits.amax(1) - chosen).max() < 0.05 < logits.std(1).min() / 4
