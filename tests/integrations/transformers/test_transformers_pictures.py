"""model.generate(custom_generate=…) with pictures or sound: the text is transformers' own, or the input is refused by its name.

transformers encodes pictures before the loop from 5.23 on, and hands their rows to it in a dictionary.
"""

import inspect

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import AutoModelForImageTextToText, GenerationMixin  # noqa: E402
from transformers.modeling_outputs import BaseModelOutputWithPooling  # noqa: E402
from transformers.models.auto import modeling_auto  # noqa: E402

from benchmarks.architectures.pictures import tiny_model  # noqa: E402
from pass_ext import NGram, custom_generate  # noqa: E402
from pass_ext.decoding.models.whole_prompts import INPUTS as READ  # noqa: E402

CLASSES = sorted(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
# Tables of words or of picture tokens that no size of a config makes small.
_LARGE = ("aria", "glm46v", "glm4v", "glm4v_moe", "glm_ocr", "glmga", "gemma4_unified", "janus", "kosmos-2")
LARGE = (*_LARGE, "kosmos-2.5", "muse_glimmer", "qwen2_vl")
IMAGE, SIDE, ROWS = 90, 32, 4
PIXELS = torch.randn(1, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
SIZE = {"image_sizes": torch.tensor([[SIDE, SIDE]])}
PACKED = {"pixel_values": torch.randn(16, 3 * 2 * 8 * 8), "image_grid_thw": torch.tensor([[1, 4, 4]])}
ASKED = {"qformer_input_ids": torch.tensor([[5, 6]]), "qformer_attention_mask": torch.ones(1, 2, dtype=torch.long)}
OF_ONE = ("llava", "internvl", "aya_vision", "cohere2_vision", "got_ocr2", "ovis2", "deepseek_vl", "qianfan_ocr")
# What processors give for a picture of these sizes.
INPUTS = {
    **{name: {"pixel_values": PIXELS} for name in (*OF_ONE, "paligemma", "blip-2")},
    **{name: {"pixel_values": PIXELS[None]} for name in ("idefics2", "idefics3", "smolvlm")},
    **{name: {"pixel_values": PIXELS, **SIZE} for name in ("mistral3", "lighton_ocr")},
    **dict.fromkeys(("qwen3_vl", "qwen3_5", "qwen4_exp", "cosmos3_omni"), PACKED),
    "instructblip": {"pixel_values": PIXELS, **ASKED},
}
SOUND = ("moss_transcribe_diarize", "voxtral", "qwen2_audio", "glmasr", "granite_speech", "qwen3_asr")


def model_of(name, auto=AutoModelForImageTextToText):
    try:
        return tiny_model(name, auto)
    except Exception as error:
        pytest.skip(f"transformers does not build it from this config: {str(error)[:80]}")


def own_or_refused(model, ids, inputs):
    """Refuses a text that is not transformers' own."""
    options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, pad_token_id=0)
    method = custom_generate(NGram(longest=2, shortest=1))
    try:
        got = model.generate(input_ids=ids, **inputs, **options, custom_generate=method)
    except (ValueError, NotImplementedError) as error:
        words = (*inputs, "inputs_embeds", model.config.model_type, model.config.get_text_config().model_type)
        assert any(word in str(error) for word in words), str(error)
        return
    assert torch.equal(got, model.generate(input_ids=ids, **inputs, **options))


@pytest.mark.parametrize("name", INPUTS)
def test_a_picture_is_in_the_text_or_refused(name):
    if name not in CLASSES:
        pytest.skip("this transformers does not have it")
    model = model_of(name)
    config, inputs = model.config, INPUTS[name]
    encode = getattr(model.base_model, "get_image_features", None) or model.get_image_features
    rows = encode(**inputs)
    rows = getattr(rows, "pooler_output", rows)
    count = sum(x.shape[:-1].numel() for x in (rows if isinstance(rows, (list, tuple)) else [rows]))
    image = getattr(config, "image_token_id", None) or getattr(config, "image_token_index", IMAGE)
    own_or_refused(model, torch.tensor([[5, 6, *[image] * count, 7, 8]]), inputs)


@pytest.mark.parametrize("name", [name for name in CLASSES if name not in LARGE])
def test_encoded_pictures_are_in_the_text_or_refused(name):
    """Of every class, by the rows that its encoder would give. Those with a generate of their own hand rows on to that of a
    language model: test_a_picture_is_in_the_text_or_refused has such ones."""
    model = model_of(name)
    if model.config.is_encoder_decoder or getattr(type(model), "generate", None) is not GenerationMixin.generate:
        pytest.skip("it has an encoder, which is refused, or a generate of its own around that of a language model")
    if "mm_encoder_outputs" in inspect.signature(type(model).forward).parameters:
        rows = torch.randn(ROWS, model.config.get_text_config().hidden_size)
        inputs = {"mm_encoder_outputs": {"image": BaseModelOutputWithPooling(pooler_output=rows)}}
    else:
        inputs = {"pixel_values": PIXELS}
    own_or_refused(model, torch.tensor([[5, 6, *[IMAGE] * ROWS, 7, 8]]), inputs)


@pytest.mark.slow  # of the others in test_encoded_pictures_are_in_the_text_or_refused
@pytest.mark.parametrize("name", [name for name in CLASSES if name in LARGE])
def test_encoded_pictures_of_large_models_are_in_the_text_or_refused(name):
    test_encoded_pictures_are_in_the_text_or_refused(name)


@pytest.mark.parametrize("name", SOUND)
def test_sound_is_in_the_text_or_refused(name):
    auto = getattr(transformers, "AutoModelForMultimodalLM", None)
    if auto is None:
        pytest.skip("this transformers does not have the class")
    own_or_refused(model_of(name, auto), torch.tensor([[5, 6, 7, 8]]), {"input_features": torch.ones(1, 8, 12)})


# Of the methods that encode: options of their outputs; and what goes on after the prompt, where sound comes in step by step.
OPTIONS = {"return_dict", "output_attentions", "output_hidden_states", "kwargs", "args", "self"}
STEPWISE = {"cache", "use_cache", "padding_cache", "encoder_inputs_embeds"}
# Of classes with a generate of their own (InstructBLIP), and of Kosmos 2.5, which is refused.
OF_OTHERS = {"qformer_input_ids", "qformer_attention_mask", "flattened_patches"}


def test_whatever_an_encoder_takes_is_read_with_the_prompt():
    """A processor gives no input of these classes that is refused."""
    others = getattr(modeling_auto, "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES", {})
    unread = set()
    for kind in {*modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values(), *others.values()}:
        for modality in ("image", "video", "audio"):
            encode = getattr(getattr(transformers, kind), f"get_{modality}_features", None)
            taken = set(inspect.signature(encode).parameters) if encode is not None else set()
            unread |= {f"{kind}: {name}" for name in taken - OPTIONS - STEPWISE - OF_OTHERS - READ}
    assert not unread
