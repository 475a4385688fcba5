"""Prompts with random pictures or sound for the classes whose processors give other tensors than most: by the config's name.

Each is what the processor gives for one prompt, with a placeholder for every row that the model puts in.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.architectures.picture_sizes import PATCH, SIDE

BEFORE, AFTER = [5, 6], [7, 8, 5, 6]
FRAMES = 4  # of a video


def _text(token: int | None, count: int) -> dict[str, Tensor]:
    """A text with so many placeholders."""
    ids = torch.tensor([[*BEFORE, *[token or 0] * count, *AFTER]])
    return dict(input_ids=ids, attention_mask=torch.ones_like(ids))


def _pixels(*shape: int) -> Tensor:
    return torch.randn(*shape, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))


def _patches(count: int = 8) -> Tensor:
    """Rows of patches, each after the row and column where it is."""
    places = torch.cartesian_prod(torch.arange(2), torch.arange(count // 2)) + 1
    noise = torch.randn(count, 3 * PATCH**2, generator=torch.Generator().manual_seed(0))
    return torch.cat([places.float(), noise], 1)[None]


def _of_queries(model: Any, token: int, frames: int = 0) -> dict[str, Tensor]:
    question = torch.tensor([[5, 6, 7]])
    pixels = _pixels(1, frames) if frames else _pixels(1)
    return dict(
        _text(token, model.config.num_query_tokens * max(frames, 1)),
        pixel_values=pixels,
        qformer_input_ids=question,
        qformer_attention_mask=torch.ones_like(question),
    )


def _florence2(model: Any) -> dict[str, Tensor]:
    pixels = _pixels(1)
    rows = model.get_image_features(pixels).pooler_output
    return dict(_text(model.config.image_token_id, rows.shape[:-1].numel()), pixel_values=pixels)


def _idefics(model: Any) -> dict[str, Tensor]:
    text = _text(None, 0)
    return dict(text, pixel_values=_pixels(1, 1), image_attention_mask=torch.ones_like(text["input_ids"])[..., None])


def _kosmos2(model: Any) -> dict[str, Tensor]:
    text = _text(90, model.config.latent_query_num)
    return dict(text, pixel_values=_pixels(1), image_embeds_position_mask=(text["input_ids"] == 90).long())


def _mllama(model: Any) -> dict[str, Tensor]:
    tiles, text = model.config.vision_config.max_num_tiles, _text(90, 1)
    seen = torch.zeros(1, 1, tiles, dtype=torch.long)
    seen[..., 0] = 1
    return dict(
        text,
        pixel_values=_pixels(1, 1, tiles),
        aspect_ratio_ids=torch.ones(1, 1, dtype=torch.long),
        aspect_ratio_mask=seen,
        cross_attention_mask=seen[:, None].expand(1, text["input_ids"].shape[1], 1, tiles).contiguous(),
    )


def _udop(model: Any) -> dict[str, Tensor]:
    text = _text(None, 0)
    boxes = torch.tensor([0.1, 0.1, 0.4, 0.4]).expand(1, text["input_ids"].shape[1], 4).contiguous()
    return dict(text, bbox=boxes, pixel_values=_pixels(1))


def _kyutai(model: Any) -> dict[str, Tensor]:
    wave = torch.randn(1, 1, 6 * model.config.codec_config.frame_size, generator=torch.Generator().manual_seed(0))
    return dict(input_values=wave, padding_mask=torch.ones_like(wave, dtype=torch.long))


def _voxtral_realtime(model: Any) -> dict[str, Tensor]:
    rows, bins = len(BEFORE + AFTER) + 12, model.config.audio_config.num_mel_bins  # a row of sound for each of the text
    frames = rows * model.config.audio_length_per_tok
    features = torch.randn(1, bins, frames, generator=torch.Generator().manual_seed(0))
    return dict(_text(None, 0), input_features=features)


def _thinker(model: Any) -> dict[str, Tensor]:
    from benchmarks.architectures.pictures import prompts

    return prompts(model.thinker, [*BEFORE, (4, 8), *AFTER])


def _protein(model: Any) -> dict[str, Tensor]:
    protein = torch.tensor([[5, 6, 7, 8]])
    return dict(_text(None, 0), protein_input_ids=protein, protein_attention_mask=torch.ones_like(protein))


WRITERS = {
    "blip": "text_decoder",
    **dict.fromkeys(("instructblip", "instructblipvideo"), "language_model"),
    **dict.fromkeys(("qwen2_5_omni", "qwen3_omni_moe"), "thinker"),
}
"""The part whose generate the class's own one calls."""
OWN: dict[str, Callable[[Any], dict[str, Tensor]]] = {
    "evolla": _protein,
    "florence2": _florence2,
    "idefics": _idefics,
    "instructblip": lambda model: _of_queries(model, model.config.image_token_index),
    "instructblipvideo": lambda model: _of_queries(model, model.config.video_token_index, FRAMES),
    "kosmos-2": _kosmos2,
    "kyutai_speech_to_text": _kyutai,
    "mllama": _mllama,
    "pix2struct": lambda model: dict(flattened_patches=_patches(), attention_mask=torch.ones(1, 8, dtype=torch.long)),
    "pp_formulanet": lambda model: dict(pixel_values=_pixels(1)),
    **dict.fromkeys(("qwen2_5_omni", "qwen3_omni_moe"), _thinker),
    "t5gemma2": lambda model: dict(
        _text(model.config.image_token_index, model.config.encoder.mm_tokens_per_image), pixel_values=_pixels(1)
    ),
    "udop": _udop,
    "vision-encoder-decoder": lambda model: dict(pixel_values=torch.randn(1, 3, 16, 16)),
    "voxtral_realtime": _voxtral_realtime,
}
