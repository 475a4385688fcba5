"""``speaking_whisper``: a tiny random Whisper with the tokens of its own generate."""

from transformers import GenerationConfig

from benchmarks.architectures.encoders import tiny_model

_TOKENS = dict(
    is_multilingual=True,
    lang_to_id={"<|en|>": 50, "<|de|>": 51},
    task_to_id={"transcribe": 52, "translate": 53},
    prev_sot_token_id=54,
    no_timestamps_token_id=60,  # timestamps begin after it
    max_initial_timestamp_index=8,
    return_timestamps=False,
)


def speaking_whisper(layers=2):
    """The model, of so many layers in its decoder."""
    model = tiny_model("whisper", layers)
    ends = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)
    # A text never has the pad token: Whisper's own generate counts those as the end.
    config = GenerationConfig(max_length=40, suppress_tokens=[0, 7, 9], begin_suppress_tokens=[11, 2], **ends)
    for name, value in _TOKENS.items():
        setattr(config, name, value)
    model.generation_config = config
    return model
