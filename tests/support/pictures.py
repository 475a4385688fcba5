"""A tiny model that reads pictures, with a real processor."""

import torch

from benchmarks.architectures.pictures import PATCH, SIDE


def random_picture(seed=0, side=40):
    """A PIL picture of random pixels."""
    from PIL import Image

    pixels = torch.randint(0, 256, (side, side, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def llava_processor(tokenizer, placeholder="<image>"):
    """The processor of a Llava with pictures of SIDE."""
    from transformers import CLIPImageProcessor, LlavaProcessor

    size = dict(size=dict(shortest_edge=SIDE), crop_size=dict(height=SIDE, width=SIDE))
    return LlavaProcessor(
        CLIPImageProcessor(**size),
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        image_token=placeholder,
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
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    return model, llava_processor(tokenizer)
