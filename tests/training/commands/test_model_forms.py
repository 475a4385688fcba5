"""Frozen models that are not plain tensors in one place: quantised (torchao, bitsandbytes), offloaded, placed by device_map."""

import json
import shlex
from functools import partial

import pytest
import torch
from support.alive import Alive
from support.small_models import BYTES, byte_tokenizer, small_model
from support.training_models import SETTINGS, WEIGHTS, Letters, counting, slots_for, windows_of

from pass_ext.__main__ import main
from pass_ext.checkpoint import load_checkpoint
from pass_ext.training.common.frozen_model import bytes_of
from pass_ext.training.common.options import PACKAGES
from pass_ext.training.common.run import Windows
from pass_ext.training.lookahead.dry_run import kept_bytes, memory_of
from pass_ext.training.lookahead.loop import LookaheadTrainer, step_loss

pytest.importorskip("transformers")
for package in ("accelerate", *PACKAGES):
    pytest.importorskip(package)

OPTIONS = (
    "--lookahead 3 --transition-rank 2 --deep --adapter-rank 2 --anchors 4 --batch 3 --steps 8 --length 24 --held-out 2"
)
PLACES = {f"model.{name}": "cpu" for name in ("embed_tokens", "norm", "rotary_emb", "layers.0")} | {"lm_head": "cpu"}


def torchao(kind, **settings):
    form = {"_type": kind, "_version": 2, "_data": settings}
    return {"quantization_config": {"quant_method": "torchao", "quant_type": {"default": form}}}


INT4 = dict(
    weight_dtype={"_type": "torch.dtype", "_data": "int4"},
    granularity={"_type": "PerGroup", "_version": 1, "_data": {"group_size": 32}},
)
# --model-args, and by how much of a loss they change it.
FORMS = {
    "offloaded to disk": ({"device_map": {**PLACES, "model.layers.1": "disk"}}, 0),
    "device_map": ({"device_map": "auto"}, 0),
    "int8": (torchao("Int8WeightOnlyConfig"), 0.02),
    "fp8": (torchao("Float8WeightOnlyConfig"), 0.05),
    "int4": (torchao("IntxWeightOnlyConfig", **INT4), 0.15),
    "bitsandbytes": ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}, 0.02),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("forms")
    ids = dict.fromkeys(("eos_token_id", "pad_token_id", "bos_token_id"), BYTES)
    small_model("llama", vocab_size=BYTES + 1, intermediate_size=128, **ids).save_pretrained(path / "model")
    byte_tokenizer().save_pretrained(path / "model")
    (path / "texts").mkdir()
    for number in range(60):
        (path / f"texts/{number}.txt").write_text(f"line {number} of a text\n" * 40)
    return path


def arguments_of(form, folder):
    """The keywords; skips a test whose package is missing."""
    keywords, _ = FORMS[form]
    if "quantization_config" in keywords:
        pytest.importorskip(keywords["quantization_config"]["quant_method"])
    return {**keywords, "offload_folder": str(folder / "offloaded")} if "disk" in form else keywords


def line_of(folder, out, *more):
    places = ["--model", str(folder / "model"), "--data", str(folder / "texts"), "--out", str(folder / out)]
    return ["train", *places, *shlex.split(OPTIONS), *more]


def losses_of(folder, out, *more):
    main(line_of(folder, out, "--continuations", "20", "--sample-tokens", "8", *more))
    return json.loads((folder / out / "lookahead.json").read_text())["losses"]


@pytest.fixture(scope="module")
def plain(folder):
    return losses_of(folder, "plain", "--sample-share", "0")


@pytest.mark.parametrize("form", FORMS)
def test_steps_beside_a_model_in_this_form(folder, plain, form):
    config = folder / f"{form}.json"  # where keywords are an object
    config.write_text(json.dumps({"model-args": arguments_of(form, folder), "sample-share": 0}))
    losses = losses_of(folder, form, "--config", str(config))
    assert losses == pytest.approx(plain, rel=FORMS[form][1], abs=1e-4)
    assert FORMS[form][1] == 0 or losses != plain


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_those_of_the_same_weights_in_full_and_no_weight_is_kept(folder, form):
    if form == "bitsandbytes":
        pytest.skip("its products round the inputs too")
    keywords = arguments_of(form, folder)
    model, _ = load_checkpoint(folder / "model", torch.float32, **keywords)
    whole, _ = load_checkpoint(folder / "model", torch.float32)
    for part, other in zip(whole.modules(), model.modules(), strict=True):
        if hasattr(getattr(other, "weight", None), "dequantize") and hasattr(other.weight, "__tensor_flatten__"):
            part.weight.data = other.weight.dequantize()
    window, found, kept = windows_of(counting(9, 24)).at(0), [], []
    for one in (model, whole):
        slots = slots_for(whole, adapters=1)
        loss = step_loss(one, slots, window, WEIGHTS)
        parameters = list(slots.parameters())
        kept.append(kept_bytes(partial(step_loss, one, slots, window, WEIGHTS), [*one.parameters(), *parameters]))
        found.append((loss, *torch.autograd.grad(loss, parameters)))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert kept[0] <= 1.01 * kept[1], "but for the norms of offloaded layers"
    bits = {"int8": 8, "fp8": 8, "int4": 10}  # torchao keeps four bits in eight, and scales of groups
    linear = model.model.layers[1].mlp.up_proj.weight
    assert bytes_of(linear) == pytest.approx(linear.numel() * bits.get(form, 0 if "disk" in form else 32) / 8, rel=0.15)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A model that is more than half of a step's memory in 8 bits."""
    path = tmp_path_factory.mktemp("wide")
    sizes = dict(hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8, head_dim=64)
    small_model("llama", vocab_size=256, **sizes).save_pretrained(path / "model")
    byte_tokenizer().save_pretrained(path / "model")
    return path


@pytest.mark.parametrize("form", sorted({*FORMS} - {"device_map"}))  # on one CPU a plain model
def test_a_step_takes_the_memory_that_the_plan_says(wide, form):
    keywords = arguments_of(form, wide)
    if "disk" in form:
        keywords["device_map"] = {**PLACES, **{f"model.layers.{layer}": "disk" for layer in (1, 2, 3)}}
    model, _ = load_checkpoint(wide / "model", torch.float32, **keywords)
    model.requires_grad_(False)
    windows = Windows(Letters(), (), counting(9, 96), 1.0, 96, 2, 4, 4, 0)
    trainer = LookaheadTrainer(model, slots_for(model, 4, adapters=1).float(), windows, SETTINGS)
    plan = memory_of(trainer, model, rows=2 * 4 * 4, loss="kl")
    assert plan["model"] > 0.5 * sum(plan.values())
    with Alive() as alive:
        for parameter in (*model.parameters(), *trainer.module.parameters()):
            alive.add(parameter)
        trainer.run(2)
    assert alive.peak == pytest.approx(sum(plan.values()), rel=0.15)


@pytest.mark.parametrize(
    ("keywords", "more", "message"),
    [
        ({"device_map": {**PLACES, "model.layers.1": "cpu", "lm_head": "disk"}}, "", "the output layer must stay in memory"),
        ({"device_map": {**PLACES, "model.layers.1": "disk"}}, "--step-dtype bfloat16", "--step-dtype must be --dtype"),
        ({"tp_plan": "auto"}, "", "tp_plan divides the model among the ranks"),
        ({"no_such_keyword": 1}, "", "cannot be loaded with --model-args {'no_such_keyword': 1}"),
        ({"quantization_config": {"quant_method": "none such"}}, "", "cannot be loaded with --model-args"),
    ],
)  # fmt: skip
def test_forms_that_cannot_be_trained_get_a_sentence(folder, keywords, more, message):
    keywords = {**keywords, "offload_folder": str(folder / "offloaded")} if "device_map" in keywords else keywords
    with pytest.raises(SystemExit, match=message):
        main(line_of(folder, "refused", "--model-args", json.dumps(keywords), *shlex.split(more)))


@pytest.mark.parametrize("text", ["device_map", "[1]", '{"dtype": "float16"}'])
def test_keywords_must_be_an_object(folder, text, capsys):
    with pytest.raises(SystemExit):
        main(line_of(folder, "refused", "--model-args", text))
    assert "argument --model-args: must be" in capsys.readouterr().err
