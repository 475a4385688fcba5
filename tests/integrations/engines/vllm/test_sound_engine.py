"""PaSS in a vLLM engine after sound in the prompt: SmolLM2's text model after a random encoder of sound, in fp32.

The texts are vLLM's own without speculation; guesses are right as often as those of ``pass_ext.generate`` on the same prompts.
(vLLM's classes with pictures import torchvision, which has no build for this torch.)
"""

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
    Qwen2Config,
    WhisperFeatureExtractor,
)
from vllm_job import run_engine, sound

import pass_ext
from pass_ext.checkpoint import load_checkpoint

NEW, SLOTS, PLACEHOLDER = 48, "smollm2-135m-instruct-slots", "<filename>"  # a token of the table that no text here has
TEXTS = {
    f"{PLACEHOLDER}\nWrite a list of ten animals: dog, cat,": 0,
    f"The sea is blue. {PLACEHOLDER} The sky is blue. The sea": 1,
    "def add(a, b):\n    return a + b\n\ndef subtract(a, b):\n": None,
}
"""Prompt -> its sound."""


def model_and_processor(gguf):
    """SmolLM2 as a Qwen2 without biases, after a tiny encoder."""
    text, tokenizer = load_checkpoint(gguf, torch.float32, weights="dense")
    fields = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    fields += ("num_key_value_heads", "rms_norm_eps", "rope_parameters", "max_position_embeddings")
    config = Qwen2Config(**{name: getattr(text.config, name) for name in fields}, tie_word_embeddings=True)
    encoder = dict(d_model=32, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=48, num_mel_bins=128)
    placeholder = tokenizer.convert_tokens_to_ids(PLACEHOLDER)
    torch.manual_seed(0)
    model = Qwen2AudioForConditionalGeneration(
        Qwen2AudioConfig(text_config=config, audio_config=encoder, audio_token_index=placeholder)
    )
    language = model.model.language_model
    absent, unknown = language.load_state_dict(text.model.state_dict(), strict=False)
    assert not unknown and all(name.endswith("bias") for name in absent)
    for name in absent:
        language.get_parameter(name).data.zero_()
    model.lm_head.weight = text.lm_head.weight
    ends = dict(audio_token=PLACEHOLDER, audio_bos_token="", audio_eos_token="")
    return model.float().eval(), Qwen2AudioProcessor(WhisperFeatureExtractor(128), tokenizer, **ends)


def test_slots_after_sound(gguf, tmp_path):
    model, processor = model_and_processor(gguf)
    model.save_pretrained(tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    # transformers 5.19 writes one "model" more than vLLM knows.
    tensors = {name.replace(".model.model.", ".model."): tensor for name, tensor in load_file(weights).items()}
    save_file(tensors, weights, {"format": "pt"})
    processor.save_pretrained(tmp_path / "model")
    calls = [
        {
            "prompts": [processor.tokenizer(said).input_ids for said in TEXTS],
            "sounds": list(TEXTS.values()),
            "sampling": {"temperature": 0.0, "max_tokens": NEW, "ignore_eos": True},
            "batch": batch,
        }
        for batch in (1, 3)
    ]
    options = dict(dtype="float32", skip_tokenizer_init=False)
    plain = run_engine(tmp_path / "plain", tmp_path / "model", calls, **options)
    found = run_engine(
        tmp_path / "pass",
        tmp_path / "model",
        calls,
        {"PASS_EXT_VLLM": "on"},
        speculative_config={
            "method": "custom_class",
            "model": "pass_ext.integrations.vllm.PaSS",
            "num_speculative_tokens": 4,
        },
        additional_config={"pass_ext": {"slots": SLOTS, "pause": False}},
        **options,
    )
    assert found["texts"] == plain["texts"]

    method = pass_ext.PaSS(SLOTS, passes=2, rows=5, tree=pass_ext.Tree.chain(4))
    accepted = 0
    for (said, seed), theirs in zip(TEXTS.items(), plain["texts"][0], strict=True):
        sounds = {} if seed is None else dict(audio=[sound(seed)], sampling_rate=16000)
        inputs = processor(text=[said], return_tensors="pt", **sounds)
        ours = pass_ext.generate(
            model, inputs["input_ids"], method, prompt=dict(inputs), max_new_tokens=NEW, eos_token_id=[]
        )
        assert ours.sequences[0, inputs["input_ids"].shape[1] :].tolist() == theirs
        accepted += ours.stats.num_accepted_tokens
    of_vllm = found["counters"]["spec_decode_num_accepted_tokens"] / len(calls)
    assert accepted > 0 and abs(of_vllm - accepted) <= 0.1 * accepted
