"""Sizes of tiny models that read pictures or sound, beside those of ``models``: by the name of a config's field, and by class
and part where its default or the rule of another part asks for more."""

from typing import Any

from benchmarks.architectures.models import CHANGES as MODEL_CHANGES

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
    text_hidden_size=WIDTH,
    projector_hidden_size=WIDTH,
    projection_hidden_dim=WIDTH,
    num_position_embeddings=16,
    deepstack_visual_indexes=[0, 1],
)

_ALL = "full_attention"
_MROPE = dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 3, 3]))
_MROPE_OF_LATENTS = dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1]))
_STATES_THEN_ALL = dict(layer_types=["linear_attention", _ALL])
_CODES, _FIRST_CODE = 16, 60  # of a picture, each a token of the text
_CODER = dict(base_channels=32, channel_multiplier=[1, 1], num_res_blocks=1, resolution=SIDE, codebook_size=_CODES)
_GRANITE_SPEECH = dict(
    encoder_config=dict(hidden_dim=WIDTH, context_size=8, max_pos_emb=16),
    projector_config=dict(encoder_hidden_size=WIDTH),
    window_size=4,
    downsample_rate=2,
    audio_token_index=92,
)
_WAVES = dict(num_filters=4, downsampling_ratios=[2, 2, 4], depths=[1, 1, 1, 1])
_SAM = dict(global_attn_indexes=[1], window_size=2, output_channels=16, mlp_dim=96)

CHANGES: dict[str, dict[str, Any]] = {
    "qwen2_vl": dict(text_config=_MROPE),
    "dots3_note": dict(
        text_config=MODEL_CHANGES["dots3_note_text"],
        vision_config=dict(mlp_layer_types=["dense"] * 2, adapter_in_dim=WIDTH, adapter_out_dim=WIDTH),
        audio_config=dict(adapter_input_size=WIDTH, adapter_out_dim=WIDTH),
    ),
    "fast_vlm": dict(vision_config=dict(hidden_size=WIDTH)),
    "gemma3n": dict(
        text_config=MODEL_CHANGES["gemma3n_text"],
        vision_soft_tokens_per_image=16,
        vision_config=dict(hidden_size=WIDTH),
    ),
    "inkling_mm_model": dict(text_config=MODEL_CHANGES["inkling_text"], vision_config=dict(n_layers=8)),
    "instructblipvideo": dict(video_token_index=91),
    "mllama": dict(
        vision_config=dict(intermediate_layers_indices=[0, 1], vision_output_dim=3 * WIDTH, num_global_layers=1)
    ),
    "pp_formulanet": dict(
        vision_config=dict(
            _SAM, window_size=2, post_conv_in_channels=16, post_conv_mid_channels=16, post_conv_out_channels=16
        )
        | dict(decoder_hidden_size=WIDTH)
    ),
    "perception_lm": dict(vision_config=dict(model_args=dict(embed_dim=WIDTH)), vision_use_cls_token=False),
    "qwen2_5_omni": dict(
        thinker_config=dict(text_config=_MROPE, vision_config=dict(window_size=32), vision_start_token_id=91),
    ),
    "qwen3_omni_moe": dict(
        enable_audio_output=False,
        thinker_config=dict(text_config=_MROPE | dict(sliding_window=None), vision_start_token_id=91),
    ),
    # Windows of Qwen2.5's vision tower are of pixels.
    "qwen2_5_vl": dict(text_config=_MROPE, vision_config=dict(window_size=32)),
    "qwen2_5_omni_thinker": dict(text_config=_MROPE, vision_config=dict(window_size=32), vision_start_token_id=91),
    "qwen3_omni_moe_thinker": dict(text_config=_MROPE | dict(sliding_window=None), vision_start_token_id=91),
    "paddleocr_vl": dict(text_config=_MROPE),
    "cosmos3_edge": dict(text_config=_MROPE),
    "hunyuan_vl": dict(text_config=_MROPE),
    "hy_v4_vl": dict(text_config=_MROPE_OF_LATENTS),
    "voxtral": dict(audio_config=dict(intermediate_size=256, max_source_positions=16)),
    "qwen2_audio": dict(audio_config=dict(max_source_positions=16), audio_token_id=92),
    "fun_asr_nano": dict(adaptor_config=dict(intermediate_size=16)),
    "apertus1p5": dict(
        vision_config=dict(_CODER, attn_resolutions=[SIDE], latent_channels=WIDTH),
        audio_config=dict(codebook_dim=WIDTH, codebook_size=_CODES, num_filters=4, upsampling_ratios=[4, 4]),
        image_token_offset=_FIRST_CODE - _CODES,
        audio_token_offset=_FIRST_CODE,
    ),
    "chameleon": dict(
        vq_config=dict(_CODER, num_embeddings=_CODES),
        vocabulary_map={"<image>": 90}
        | {f"IMGIMG{''.join('ABCDEFGHIJ'[int(c)] for c in str(i))}Z": _FIRST_CODE + i for i in range(_CODES)},
    ),
    "emu3": dict(
        vq_config=_CODER,
        vocabulary_map={"<image>": 90, "<|extra_200|>": 89}
        | {f"<|visual token {i:06d}|>": _FIRST_CODE + i for i in range(_CODES)},
    ),
    "cohere_compass": dict(
        text_config=dict(
            layer_types=["sliding_attention", _ALL],
            rope_parameters={
                kind: dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 3, 3])
                for kind in ("sliding_attention", _ALL)
            },
        )
    ),
    "deepseek_ocr2": dict(
        vision_config=dict(sam_config=dict(_SAM, downsample_channels=[32, WIDTH])),
        text_config=dict(mlp_layer_types=["dense", "sparse"], num_experts_per_tok=2),
    ),
    "ernie4_5_vl_moe": dict(
        text_config=dict(
            moe_intermediate_size=[32, 32],
            rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[3, 3, 2]),
        )
    ),
    "florence2": dict(
        vision_config=dict(
            depths=[1, 1],
            patch_size=[7, 3],
            patch_stride=[4, 2],
            patch_padding=[3, 1],
            patch_prenorm=[False, True],
            embed_dim=[16, 32],
            num_heads=[2, 2],
            num_groups=[2, 2],
        )
    ),
    "granite4_vision": dict(
        deepstack_layer_map=[[0, 0], [1, 1]],
        spatial_target_layers=[0, 1],
        downsample_rate="1/2",
        image_grid_pinpoints=[[SIDE, SIDE]],
    ),
    "molmo2": dict(
        vision_config=dict(image_size=[SIDE, SIDE]),
        adapter_config=dict(vision_feature_layer=[0, 1]),
        image_patch_id=90,
    ),
    "nemo_speechlm": dict(
        audio_config=dict(
            asr_config=dict(num_key_value_heads=4),
            diarization_config=dict(
                audio_config=dict(num_key_value_heads=4), head_config=dict(audio_hidden_size=WIDTH)
            ),
        ),
        text_config=dict(layers_block_type=["mamba", "attention"]),
        word_timestamp_config=dict(blank_token_id=0),
    ),
    **dict.fromkeys(("granite_speech", "granite_speech_plus"), _GRANITE_SPEECH),
    "glmasr": dict(audio_config=dict(intermediate_size=4 * WIDTH)),
    "qwen3_asr": dict(audio_config=dict(downsample_hidden_size=16)),
    "vibevoice_asr": dict(
        acoustic_tokenizer_encoder_config=dict(_WAVES, vae_std=0.0), semantic_tokenizer_encoder_config=_WAVES
    ),
    "unlimited_ocr": dict(
        vision_config=dict(sam_config=dict(_SAM, downsample_channels=[32, WIDTH])),
        text_config=dict(num_key_value_heads=4),
    ),
    "lfm3_vl": dict(text_config=MODEL_CHANGES["lfm3"]),
    "llama4": dict(
        vision_config=dict(
            vision_output_dim=WIDTH, projector_input_dim=WIDTH, projector_output_dim=WIDTH, intermediate_size=4 * WIDTH
        )
    ),
    "phi4_multimodal": dict(
        audio_config=dict(ext_pw_out_channel=WIDTH, depthwise_separable_out_channel=WIDTH, nemo_conv_channels=WIDTH),
        vision_config=dict(crop_size=SIDE),
    ),
    "granite_docling": dict(vision_config=dict(scale_factor=2)),
    "kyutai_speech_to_text": dict(
        audio_pad_token_id=93, codebook_vocab_size=16, num_codebooks=2, codec_config=dict(upsample_groups=WIDTH)
    ),
    "glm5_next": dict(
        text_config=dict(
            index_kpool=2,
            qk_rope_head_dim=0,
            num_key_value_heads=4,
            layer_types=["linear_attention", "deepseek_sparse_attention"],
        )
    ),
    "muse_spark": dict(
        audio_config=dict(patch_sizes=[4, 4], hidden_sizes=[32, WIDTH], depths=[1, 1], out_hidden_size=WIDTH)
    ),
    "nemotron_h_omni": dict(vision_config=dict(video_temporal_patch_size=2)),
    **{name: dict(text_config=_STATES_THEN_ALL) for name in ("minicpm_ocr", "minicpmv4_6", "minicpmv4_7")},
}
