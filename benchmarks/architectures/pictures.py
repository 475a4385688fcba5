"""Tiny models with random weights that read pictures or sound, and prompts with random ones of the right shapes for them."""

import inspect
from typing import Any

import torch
from torch import Tensor

import benchmarks.architectures.models as tiny
from benchmarks.architectures.encoders import tiny_model as encoder_and_decoder
from benchmarks.architectures.picture_sizes import CHANGES, PATCH, SIDE, SIZES

Inputs = dict[str, Tensor]

# A picture for each of these classes: rows of patches with their grid, or pixels.
BY_GRID = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")
BY_PIXELS = ("llava", "gemma3", "internvl", "aya_vision", "cohere2_vision", "ovis2", "deepseek_vl")
IN_A_ROW = ("idefics2", "idefics3", "smolvlm")
WITH_SIZES = ("mistral3", "lighton_ocr", "granite4_vision")
TILES = {**dict.fromkeys((*IN_A_ROW, "perception_lm"), 1), "granite_docling": 1, "granite4_vision": 2}
# Sound for each of these: a wave of so many samples; or mel features [bins, frames], or [frames, bins], and masks of frames.
OF_WAVES = {"omniasr": 1600, "vibevoice_asr": 64}
BY_FRAMES = ("fun_asr_nano", "granite_speech", "granite_speech_plus", "nemo_speechlm")
MASKS = {
    "qwen2_audio": ("feature_attention_mask",),
    **dict.fromkeys(("glmasr", "qwen3_asr", "fun_asr_nano", "nemo_speechlm"), ("input_features_mask",)),
    "moss_transcribe_diarize": ("input_features_mask", "padding_mask"),
}
SOUNDING = (
    "voxtral",
    "qwen2_audio",
    "glmasr",
    "qwen3_asr",
    "fun_asr_nano",
    "moss_transcribe_diarize",
    "omniasr",
    "granite_speech",
    "phi4_multimodal",
)
OF_SOUND = (*SOUNDING, "granite_speech_plus", "nemo_speechlm", "vibevoice_asr")
OF_PIXELS = (
    "paligemma",
    "got_ocr2",
    "qianfan_ocr",
    "blip-2",
    "aria",
    "llava_onevision",
    "vipllava",
    "perception_lm",
    "janus",
    "llama4",
    "fuyu",
    "hunyuan_vl",
    "video_llava",
)
PARTS = {"mistral4": "mistral3"}  # texts that a model with pictures has as a part
PICTURED = (*BY_GRID, *BY_PIXELS, *IN_A_ROW, *WITH_SIZES, "gemma4", "granite_docling")


def is_by_grid(config: Any) -> bool:
    """True if its pictures are rows of patches, with a grid."""
    vision = getattr(config, "vision_config", None)
    return all(hasattr(vision, field) for field in ("temporal_patch_size", "patch_size", "in_channels"))


def _fit_sections(text: Any) -> None:
    """Makes M-RoPE's sections as many as the pairs of a tiny head."""
    rope = getattr(text, "rope_parameters", None) or {}
    pairs = int(16 * rope.get("partial_rotary_factor", 1)) // 2
    is_glm = text.model_type.startswith("glm")  # its sections have a default
    if rope and (is_glm or "mrope_section" in rope) and sum(rope.get("mrope_section", ())) != pairs:
        first, second = pairs // 4, 3 * pairs // 8
        rope["mrope_section"] = [first, second, pairs - first - second]


def _stand_in(config: Any) -> None:
    """Has transformers build one convolution in place of a tower of timm, where timm is not installed."""
    from transformers import AutoModel, PreTrainedModel
    from transformers.modeling_outputs import BaseModelOutputWithPooling
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES
    from transformers.utils import is_timm_available

    vision = getattr(config, "vision_config", None)
    kind = MODEL_MAPPING_NAMES.get(getattr(vision, "model_type", ""))
    if is_timm_available() or kind != "TimmWrapperModel":
        return

    class Tower(PreTrainedModel):
        config_class = type(vision)
        main_input_name = "pixel_values"

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self._is_by_row = "embed_dim" in (config.model_args or {})
            width = config.model_args["embed_dim"] if self._is_by_row else config.hidden_size
            self.patches = torch.nn.Conv2d(3, width, PATCH, PATCH)
            self.post_init()

        def forward(self, pixel_values: Tensor, **_: Any) -> Any:
            made = self.patches(pixel_values)
            return BaseModelOutputWithPooling(last_hidden_state=made.flatten(2).mT if self._is_by_row else made)

    AutoModel.register(type(vision), Tower, exist_ok=True)


def tiny_model(name: str, auto: Any, seed: int = 0) -> Any:
    """The model, in float32."""
    if name == "vision-encoder-decoder":
        return encoder_and_decoder("trocr")
    config = tiny.tiny_config(PARTS.get(name, name), sizes=SIZES, changes=CHANGES.get(name, {}))
    if name in PARTS:
        config.text_config = tiny.tiny_config(name)
    _fit_sections(config.get_text_config(decoder=True))
    _stand_in(config)
    if name == "llama4":
        from transformers.modeling_outputs import MoeCausalLMOutputWithPast

        MoeCausalLMOutputWithPast.image_outputs = None  # transformers 5.24 asks it for some, which it has not
    torch.manual_seed(seed)
    build = getattr(auto, "from_config", None) or auto._from_config
    model = build(config, attn_implementation="eager").float().eval().requires_grad_(False)
    if hasattr(model, "speaker_map"):
        model.speaker_map = {"Chelsie": {}}  # asked for also where no sound is wanted
    for name, parameter in model.named_parameters():
        if "mm_input_projection" in name:  # it begins as zeros, by which no picture changes a text
            parameter.normal_()
    return model


def sound_of(model: Any, seed: int = 0) -> tuple[Inputs, int]:
    """What a processor gives for one piece of sound beside the ids, and how many rows of the text it takes."""
    config, noise = model.config, torch.Generator().manual_seed(seed)
    name, audio = config.model_type, getattr(config, "audio_config", None) or getattr(config, "encoder_config", config)
    length = 200 if name == "qwen3_asr" else 2 * getattr(audio, "max_source_positions", 16)
    if name == "phi4_multimodal":
        features = torch.randn(1, length, audio.input_size, generator=noise)
        count = length // audio.time_reduction
        return dict(audio_input_features=features, audio_embed_sizes=torch.tensor([count])), count
    if name in OF_WAVES:
        wave = torch.randn(1, 1, OF_WAVES[name], generator=noise)
        inputs = dict(input_values=wave, padding_mask=torch.ones(1, wave.shape[-1], dtype=torch.long))
    else:
        audio = getattr(audio, "asr_config", audio)
        bins = (getattr(audio, "num_mel_bins", 0) or audio.input_dim) * getattr(audio, "num_stacked_frames", 1)
        features = torch.randn(1, bins, length, generator=noise)
        inputs = dict(input_features=features.mT.contiguous() if name in BY_FRAMES else features)
    inputs |= {field: torch.ones(1, length, dtype=torch.long) for field in MASKS.get(name, ())}
    if name == "qwen2_audio":
        return inputs, ((length - 1) // 2 + 1 - 2) // 2 + 1
    return inputs, rows_of(model, "audio", inputs)


def rows_of(model: Any, modality: str, inputs: Inputs) -> int:
    """How many rows of a text the model's encoder makes of these tensors."""
    encode = getattr(model.base_model, f"get_{modality}_features", None) or getattr(model, f"get_{modality}_features")
    given = {"pixel_values" if name == "pixel_values_images" else name: value for name, value in inputs.items()}
    found = encode(**given)
    made = [found.get(name) for name in ("pooler_output", "last_hidden_state")] if isinstance(found, dict) else [found]
    made += [found["deepstack_features"][0][1]] if made == [None, None] else []  # rows for layers alone
    found = next(each for each in made if each is not None)
    return sum(x.shape[:-1].numel() for x in (found if isinstance(found, (list, tuple)) else [found]))


def picture_of(model: Any, seed: int = 0, rows: tuple[int, int] = (4, 8)) -> tuple[Inputs, int]:
    """What a processor gives for one picture beside the ids, and how many rows of the text it takes."""
    name, noise = model.config.model_type, torch.Generator().manual_seed(seed)
    if is_by_grid(model.config):
        vision = model.config.vision_config
        numbers = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        inputs = dict(
            pixel_values=torch.randn(rows[0] * rows[1], numbers, generator=noise),
            image_grid_thw=torch.tensor([[1, *rows]]),
        )
    elif name == "gemma4":
        places = torch.cartesian_prod(torch.arange(4), torch.arange(4))
        inputs = dict(
            pixel_values=torch.rand(1, 16, 3 * PATCH**2, generator=noise), image_position_ids=places[None].contiguous()
        )
    elif name == "hunyuan_vl":
        patches = torch.randn(rows[0] * rows[1], 3 * PATCH**2, generator=noise)
        inputs = dict(pixel_values=patches, image_grid_thw=torch.tensor([[1, *rows]]))
    elif name == "fuyu":
        inputs = dict(pixel_values=torch.randn(1, 4, 3 * PATCH**2, generator=noise))
    else:
        tiles = TILES.get(name, 0)
        pixels = torch.randn(1, *([tiles] if tiles else []), 3, SIDE, SIDE, generator=noise)
        inputs = {"pixel_values_images" if name == "video_llava" else "pixel_values": pixels}
        if name in WITH_SIZES:
            inputs["image_sizes"] = torch.tensor([[SIDE, SIDE]])
        if name == "granite_docling":
            inputs["pixel_attention_mask"] = torch.ones(1, tiles, dtype=torch.bool)
    return inputs, rows_of(model, "image", inputs)


def audio_token(config: Any) -> int:
    """The token that stands for a row of sound."""
    own = getattr(config, "audio_token_id", None) or getattr(config, "audio_token_index", None)
    return own or config.audio_config.audio_token_id


def image_token(config: Any) -> int:
    """The token that stands for a row of a picture."""
    return getattr(config, "image_token_id", None) or config.image_token_index


def prompts(model: Any, *texts: list[Any], seed: int = 0) -> Inputs:
    """Prompts, padded on the left: each a list of tokens and of pictures, which are their (rows, columns) of patches."""
    token, pad, parts, rows = image_token(model.config), 0, [], []
    for text in texts:
        ids = []
        for number, part in enumerate(text):
            if isinstance(part, int):
                ids.append(part)
                continue
            inputs, count = picture_of(model, seed + 10 * len(rows) + number, part)
            parts.append(inputs)
            ids += [token] * count
        rows.append(ids)
    longest = max(map(len, rows))
    ids = torch.tensor([[pad] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    inputs = {name: torch.cat([part[name] for part in parts]) for name in (parts[0] if parts else ())}
    kinds = {"gemma3": "token_type_ids", "paligemma": "token_type_ids", "gemma4": "mm_token_type_ids"}
    kind = kinds.get(model.config.model_type, "mm_token_type_ids" if is_by_grid(model.config) else "")
    if kind in inspect.signature(type(model).forward).parameters:
        is_picture = (ids == token) & (mask == 1)
        # PaliGemma's rows see each other where this is 0: in all of a prompt.
        inputs[kind] = torch.zeros_like(ids) if model.config.model_type == "paligemma" else is_picture.long()
    return dict(input_ids=ids, attention_mask=mask, **inputs)


def llava_of(text_config: Any, image_token: int, side: int = SIDE) -> Any:
    """A Llava with a tiny vision tower, around a text model of this config: all random."""
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=side,
        patch_size=PATCH,
    )
    torch.manual_seed(0)
    config = LlavaConfig(vision_config=vision, text_config=text_config, image_token_index=image_token)
    model = LlavaForConditionalGeneration._from_config(config, attn_implementation="eager")
    return model.float().eval().requires_grad_(False)
