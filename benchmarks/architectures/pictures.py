"""Tiny models with random weights that read pictures or sound, and prompts with random ones of the right shapes for them."""

import inspect
from typing import Any

import torch
from torch import Tensor

import benchmarks.architectures.models as tiny

Inputs = dict[str, Tensor]

SIDE, PATCH, WIDTH = 32, 8, 64
SIZES: dict[str, Any] = dict(
    image_size=SIDE,
    patch_size=PATCH,
    depth=2,
    out_hidden_size=WIDTH,
    projection_dim=WIDTH,
    output_dim=WIDTH,
    mm_tokens_per_image=16,
    pooling_kernel_size=2,
    embed_dim=WIDTH,
    fullatt_block_indexes=[1],
    num_mel_bins=16,
)
_MROPE = dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 3, 3]))
# Windows of Qwen2.5's vision tower are of pixels.
CHANGES: dict[str, dict[str, dict[str, Any]]] = {
    "qwen2_vl": dict(text_config=_MROPE),
    "voxtral": dict(audio_config=dict(intermediate_size=256, max_source_positions=16)),
    "qwen2_audio": dict(audio_config=dict(max_source_positions=16)),
    "qwen2_5_vl": dict(text_config=_MROPE, vision_config=dict(window_size=32)),
}
# A picture for each of these classes: rows of patches with their grid, or pixels.
BY_GRID = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")
BY_PIXELS = ("llava", "gemma3", "internvl", "aya_vision", "cohere2_vision", "ovis2", "deepseek_vl")
IN_A_ROW = ("idefics2", "idefics3", "smolvlm")
WITH_SIZES = ("mistral3", "lighton_ocr")
SOUNDING = ("voxtral", "qwen2_audio")
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
)
PICTURED = (*BY_GRID, *BY_PIXELS, *IN_A_ROW, *WITH_SIZES, "gemma4")


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


def tiny_model(name: str, auto: Any, seed: int = 0) -> Any:
    """The model, in float32."""
    before = {size: tiny.SIZES.get(size) for size in SIZES}
    tiny.SIZES.update(SIZES)
    try:
        config = tiny.tiny_config(name)
    finally:
        tiny.SIZES.update({size: value for size, value in before.items() if value is not None})
        for size in [size for size, value in before.items() if value is None]:
            del tiny.SIZES[size]
    for part, changes in CHANGES.get(name, {}).items():
        for field, value in changes.items():
            setattr(getattr(config, part), field, value)
    if name == "qwen2_audio":
        config.audio_token_id = 92
    _fit_sections(config.get_text_config(decoder=True))
    torch.manual_seed(seed)
    model = auto.from_config(config, attn_implementation="eager").float().eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "mm_input_projection" in name:  # it begins as zeros, by which no picture changes a text
            parameter.normal_()
    return model


def sound_of(model: Any, seed: int = 0) -> tuple[Inputs, int]:
    """What a processor gives for one piece of sound beside the ids, and how many rows of the text it takes."""
    config, noise = model.config.audio_config, torch.Generator().manual_seed(seed)
    frames = 2 * config.max_source_positions
    inputs = dict(input_features=torch.randn(1, config.num_mel_bins, frames, generator=noise))
    if model.config.model_type == "qwen2_audio":
        inputs["feature_attention_mask"] = torch.ones(1, frames, dtype=torch.long)
        return inputs, ((frames - 1) // 2 + 1 - 2) // 2 + 1
    return inputs, config.max_source_positions * config.hidden_size // config.intermediate_size


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
    else:
        pixels = torch.randn(1, 3, SIDE, SIDE, generator=noise)
        inputs = dict(pixel_values=pixels[None] if name in IN_A_ROW else pixels)
        if name in WITH_SIZES:
            inputs["image_sizes"] = torch.tensor([[SIDE, SIDE]])
    encode = getattr(model.base_model, "get_image_features", None) or model.get_image_features
    found = encode(**inputs)
    found = getattr(found, "pooler_output", found)
    return inputs, sum(x.shape[:-1].numel() for x in (found if isinstance(found, (list, tuple)) else [found]))


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
        inputs[kind] = ((ids == token) & (mask == 1)).long()
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
