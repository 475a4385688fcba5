"""Tiny multimodal models with random weights, and prompts with random pictures or sound of the right shapes for them."""

import torch

import benchmarks.architectures.models as tiny

SIDE, PATCH, WIDTH = 32, 8, 64
SIZES = dict(
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
CHANGES = {
    "qwen2_vl": dict(text_config=_MROPE),
    "voxtral": dict(audio_config=dict(intermediate_size=256, max_source_positions=16)),
    "qwen2_audio": dict(audio_config=dict(max_source_positions=16)),
    "qwen2_5_vl": dict(text_config=_MROPE, vision_config=dict(window_size=32)),
}
# A picture for each of the classes: rows of patches with their grid, or pixels.
BY_GRID = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")
BY_PIXELS = ("llava", "gemma3", "internvl", "aya_vision", "cohere2_vision", "ovis2", "deepseek_vl")
IN_A_ROW = ("idefics2", "idefics3", "smolvlm")
WITH_SIZES = ("mistral3", "lighton_ocr")
SOUNDING = ("voxtral", "qwen2_audio")
PICTURED = (*BY_GRID, *BY_PIXELS, *IN_A_ROW, *WITH_SIZES, "gemma4")


def tiny_model(name, auto, seed=0):
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
    torch.manual_seed(seed)
    model = auto.from_config(config, attn_implementation="eager").float().eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "mm_input_projection" in name:  # it begins as zeros, by which no picture changes a text
            parameter.normal_()
    return model


def sound_of(model, seed=0):
    """What a processor gives for one piece of sound beside the ids, and how many rows of the text it takes."""
    config, noise = model.config.audio_config, torch.Generator().manual_seed(seed)
    frames = 2 * config.max_source_positions
    inputs = dict(input_features=torch.randn(1, config.num_mel_bins, frames, generator=noise))
    if model.config.model_type == "qwen2_audio":
        inputs["feature_attention_mask"] = torch.ones(1, frames, dtype=torch.long)
        return inputs, ((frames - 1) // 2 + 1 - 2) // 2 + 1
    return inputs, config.max_source_positions * config.hidden_size // config.intermediate_size


def picture_of(model, seed=0, rows=(4, 8)):
    """What a processor gives for one picture beside the ids, and how many rows of the text it takes."""
    name, noise = model.config.model_type, torch.Generator().manual_seed(seed)
    if name in BY_GRID:
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


def image_token(config):
    """The token that stands for a row of a picture."""
    return getattr(config, "image_token_id", None) or config.image_token_index


def prompts(model, *texts, seed=0):
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
    kinds = {"gemma3": "token_type_ids", "gemma4": "mm_token_type_ids", **dict.fromkeys(BY_GRID, "mm_token_type_ids")}
    if model.config.model_type in kinds:
        inputs[kinds[model.config.model_type]] = ((ids == token) & (mask == 1)).long()
    return dict(input_ids=ids, attention_mask=mask, **inputs)


def random_picture(seed=0, side=40):
    """A PIL picture of random pixels."""
    from PIL import Image

    pixels = torch.randint(0, 256, (side, side, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def llava_processor(tokenizer):
    """The processor of a Llava with pictures of SIDE, whose placeholder is a token of its own."""
    from transformers import CLIPImageProcessor, LlavaProcessor

    tokenizer.add_tokens(["<image>"], special_tokens=True)
    size = dict(size=dict(shortest_edge=SIDE), crop_size=dict(height=SIDE, width=SIDE))
    return LlavaProcessor(
        CLIPImageProcessor(**size),
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
    )


def llava_of(text_config, image_token):
    """A Llava with a tiny vision tower, around a text model of this config: all random."""
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=SIDE,
        patch_size=PATCH,
    )
    torch.manual_seed(0)
    config = LlavaConfig(vision_config=vision, text_config=text_config, image_token_index=image_token)
    model = LlavaForConditionalGeneration._from_config(config, attn_implementation="eager")
    return model.float().eval().requires_grad_(False)


def llava_with_processor():
    """A tiny Llava that reads bytes and pictures, with its processor."""
    from support.small_models import BYTES, byte_tokenizer, small_model

    text = small_model("llama", vocab_size=BYTES + 2).config
    model = llava_of(text, BYTES + 1)
    model.generation_config.pad_token_id = model.generation_config.eos_token_id = BYTES
    return model, llava_processor(byte_tokenizer())
