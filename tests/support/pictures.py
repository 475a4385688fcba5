"""A tiny model that reads pictures, with a real processor."""

import torch

from benchmarks.architectures.pictures import PATCH, SIDE, llava_of


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


def llava_with_processor():
    """A tiny Llava that reads bytes and pictures, with its processor."""
    from support.small_models import BYTES, byte_tokenizer, small_model

    text = small_model("llama", vocab_size=BYTES + 2).config
    model = llava_of(text, BYTES + 1)
    model.generation_config.pad_token_id = model.generation_config.eos_token_id = BYTES
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    return model, llava_processor(tokenizer)
