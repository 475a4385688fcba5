"""The models with an encoder beside the decoder that pass_ext decodes: each tiny and random, by every method.

    same      transformers' own greedy text of a batch of two, token for token
    refused   a sentence with the reason

`python -m benchmarks.architectures.encoders [name …]` judges them and writes
benchmarks/results/architectures/encoders.json and .md; `--check` compares the page.
"""

import sys
from pathlib import Path
from typing import Any

import torch

import pass_ext
from benchmarks.architectures.table import command
from benchmarks.harness.markdown import table
from benchmarks.harness.template import page
from pass_ext import EarlyExitDraft, LookaheadEmbedding, MultiCandidate, NGram, PaSS, Plain, Speculative, Tree

RESULT = Path("benchmarks/results/architectures/encoders.json")
PAGE = RESULT.with_suffix(".md")
SAME, NEW, VOCABULARY, WIDTH, HEADS = "same", 16, 97, 32, 4
OPTIONS: dict[str, Any] = dict(max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
TEXT = ("bart", "mbart", "marian", "pegasus", "plbart", "blenderbot", "blenderbot-small", "m2m_100", "t5")
NAMES = ("whisper", *TEXT, "trocr")
_CONFIG: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    d_model=WIDTH,
    encoder_layers=3,
    encoder_attention_heads=HEADS,
    decoder_attention_heads=HEADS,
    encoder_ffn_dim=48,
    decoder_ffn_dim=48,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=1,
    forced_eos_token_id=None,
)
_SOUND = dict(num_mel_bins=8, max_source_positions=16, max_target_positions=64)
_T5 = dict(d_kv=8, d_ff=48, num_layers=3, num_heads=HEADS)


def tiny_model(name: str, layers: int = 2, seed: int = 0) -> Any:
    """A random model in float32 and eval mode, without gradients. layers: of its decoder."""
    import transformers

    torch.manual_seed(seed)
    if name == "trocr":
        encoder = transformers.ViTConfig(
            hidden_size=24,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=16,
            patch_size=4,
        )
        decoder = transformers.TrOCRConfig(
            **{**_CONFIG, "decoder_layers": layers, "is_decoder": True, "add_cross_attention": True}
        )
        config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
        config.decoder_start_token_id, config.pad_token_id = 1, 0
        model: Any = transformers.VisionEncoderDecoderModel(config=config)
    else:
        more = {"whisper": _SOUND, "t5": {**_T5, "num_decoder_layers": layers}}.get(name, {})
        config = transformers.AutoConfig.for_model(name, **{**_CONFIG, "decoder_layers": layers, **more})
        kind = transformers.AutoModelForSpeechSeq2Seq if name == "whisper" else transformers.AutoModelForSeq2SeqLM
        model = kind.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval().requires_grad_(False)


def inputs_of(model: Any, batch: int = 2, seed: int = 0) -> dict[str, Any]:
    """What a processor would give; texts are ragged."""
    generator = torch.Generator().manual_seed(seed)
    if model.main_input_name == "input_features":
        return {"input_features": torch.randn(batch, 8, 32, generator=generator)}
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(batch, 3, 16, 16, generator=generator)}
    ids = torch.randint(3, VOCABULARY, (batch, 9), generator=generator)
    mask = (torch.arange(9) < torch.tensor([9, 5, 7, 3])[:batch, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def methods(name: str, model: Any) -> dict[str, Any]:
    """Name -> method; the draft models are another one with one layer, and the model itself, whose drafts are right."""
    torch.manual_seed(0)
    slots = LookaheadEmbedding(3, WIDTH, vocabulary=VOCABULARY)
    torch.nn.init.normal_(slots.weight)
    known = {
        "Plain": Plain(),
        "NGram": NGram(longest=2, shortest=1, tokens=4),
        "PaSS": PaSS(slots, tree=Tree.from_branching((2, 2)), rows=16),
        "Speculative": Speculative(tiny_model(name, 1, seed=1), 3),
        "right drafts": MultiCandidate(model, (2, 2)),
    }
    try:
        return known | {"early exit": Speculative(EarlyExitDraft(model, 1), 2)}
    except ValueError:  # a decoder without a last norm
        return known


def judge(name: str) -> dict[str, Any]:
    """The line of one model."""
    from transformers import GenerationMixin

    model = tiny_model(name)
    inputs, line = inputs_of(model), {"architecture": name, "class": type(model).__name__}
    # Whisper's own generate, of forced tokens and segments, is above transformers' general one.
    own = GenerationMixin.generate(model, **inputs, **OPTIONS)
    try:
        for kind, method in methods(name, model).items():
            ours = pass_ext.custom_generate(method)
            if not torch.equal(own, GenerationMixin.generate(model, **inputs, **OPTIONS, custom_generate=ours)):
                return line | {"text": f"another text by {kind}"}
            line["methods"] = [*line.get("methods", []), kind]
    except (ValueError, TypeError, NotImplementedError) as error:
        return line | {"text": f"refused: {' '.join(str(error).split())[:240]}"}
    return line | {"text": SAME, "distinct": len(own.unique())}


def render(result: dict[str, Any]) -> str:
    """The page of a result."""
    rows = []
    for line in result["rows"]:
        outcome = line["text"]
        word = "yes" if outcome == SAME else "no" if outcome.startswith("refused: ") else "**wrong**"
        why = ", ".join(line["methods"]) if outcome == SAME else outcome.removeprefix("refused: ")
        rows.append([line["architecture"], line["class"], word, why])
    lines = table(["architecture", "class", "decoded", "methods, or why not"], rows, left=4)
    return page(__file__, result["versions"], date=result["date"][:10], new=NEW, lines=lines)


def main() -> int:
    """Entry point."""
    return command(__doc__, RESULT, PAGE, lambda: NAMES, judge, render)


if __name__ == "__main__":
    sys.exit(main())
