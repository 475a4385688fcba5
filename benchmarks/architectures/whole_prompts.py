"""The classes of transformers that read pictures or sound, and which of them pass_ext decodes after such prompts.

    text       a prompt of text alone, by `model.generate(custom_generate=…)`
    pictures   a prompt with a random picture or sound, by Plain, NGram, PaSS and Speculative
    same       transformers' own greedy text, token for token
    refused    a sentence with the reason

What is given: "pixels", "sound" or "its own", the tensors that its processor gives; or "rows", random ones in place of
those that the encoder makes, where the shapes that it takes are not written here; or nothing.

`python -m benchmarks.architectures.whole_prompts [name …]` judges them and writes
benchmarks/results/architectures/whole_prompts.json and .md; `--check` compares the page.
"""

import inspect
import sys
from pathlib import Path
from typing import Any

import torch

import pass_ext
from benchmarks.architectures.own_prompts import AFTER, BEFORE, OWN, WRITERS
from benchmarks.architectures.picture_sizes import SIDE, WIDTH
from benchmarks.architectures.pictures import (
    OF_PIXELS,
    OF_SOUND,
    PICTURED,
    audio_token,
    is_by_grid,
    prompts,
    sound_of,
    tiny_model,
)
from benchmarks.architectures.table import command
from benchmarks.harness.markdown import table
from benchmarks.harness.template import page
from pass_ext import LookaheadEmbedding, NGram, PaSS, Plain, Speculative, Tree
from pass_ext.decoding.models.any_model import packed_model

RESULT = Path("benchmarks/results/architectures/whole_prompts.json")
PAGE = RESULT.with_suffix(".md")
SAME, NEW, IMAGE, SOUND, ROWS = "same", 8, 90, 92, 4
OPTIONS: dict[str, Any] = dict(max_new_tokens=NEW, do_sample=False)
_THINKING = dict(generation_mode="text", thinker_max_new_tokens=NEW, thinker_eos_token_id=None, thinker_do_sample=False)
OWN_OPTIONS: dict[str, dict[str, Any]] = dict.fromkeys(("qwen2_5_omni", "qwen3_omni_moe"), _THINKING)


def classes() -> dict[str, str]:
    """Name of a config -> the class that reads it: of pictures and text, then those of sound and text."""
    from transformers.models.auto import modeling_auto

    pictured = dict(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    others = dict(getattr(modeling_auto, "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES", {}))
    return {name: str(kind) for name, kind in sorted(pictured.items())} | {
        name: str(kind) for name, kind in sorted(others.items()) if name not in pictured
    }


def inputs_of(name: str, model: Any) -> tuple[str, dict[str, Any]]:
    """What is given, and the prompt."""
    if name in OWN:
        return "its own", OWN[name](model)
    if name in (*PICTURED, *OF_PIXELS) or is_by_grid(model.config):
        try:
            return "pixels", prompts(model, [*BEFORE, (4, 8), *AFTER])
        except Exception:  # its shapes are others
            if name in PICTURED:
                raise
    parameters = inspect.signature(type(model).forward).parameters
    rows: dict[str, Any] = {}
    token, count, given = IMAGE, ROWS, "nothing"
    if name in OF_SOUND:
        sound, count = sound_of(model)
        rows, token, given = dict(sound), audio_token(model.config), "sound"
    elif "mm_encoder_outputs" in parameters:
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        width = getattr(model.config.get_text_config(decoder=True), "hidden_size", WIDTH)
        encoded = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(1))
        rows = {"mm_encoder_outputs": {"image": BaseModelOutputWithPooling(pooler_output=encoded)}}
        token, given = getattr(model.config, "image_token_id", IMAGE) or IMAGE, "rows"
    elif "pixel_values" in parameters:  # beside the text, which has no placeholders
        rows, count, given = {"pixel_values": torch.randn(1, 3, SIDE, SIDE)}, 0, "pixels"
    ids = torch.tensor([[*BEFORE, *[token] * count, *AFTER]])
    return given, dict(input_ids=ids, attention_mask=torch.ones_like(ids), **rows)


def methods(model: Any) -> dict[str, Any]:
    """Name -> method."""
    torch.manual_seed(0)
    table = packed_model(model).table
    slots = LookaheadEmbedding(3, table.shape[1], vocabulary=table.shape[0])
    torch.nn.init.normal_(slots.weight)
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4)
    draft = LlamaForCausalLM(LlamaConfig(vocab_size=table.shape[0], **sizes)).eval().requires_grad_(False)
    return {
        "Plain": Plain(),
        "NGram": NGram(longest=2, shortest=1, tokens=4),
        "PaSS": PaSS(slots, tree=Tree.from_branching((2, 2)), rows=16),
        "Speculative": Speculative(draft, 3),
    }


def judge(name: str) -> dict[str, Any]:
    """The line of one class."""
    import transformers

    kinds = [transformers.AutoModelForImageTextToText, getattr(transformers, "AutoModelForMultimodalLM", None)]
    line: dict[str, Any] = {"architecture": name, "class": classes()[name]}
    for kind in filter(None, (*kinds, getattr(transformers, classes()[name]))):  # not every class has an auto class
        try:
            model = tiny_model(name, kind)
            break
        except Exception as error:
            line["not tried"] = f"transformers cannot build it: {_short(error)}"
    else:
        return line
    line.pop("not tried", None)
    writer = getattr(model, WRITERS.get(name, ""), model)
    refused = _refusal(writer)
    if refused:
        return line | {"given": "nothing", "text": refused, "pictures": refused}
    model.generation_config.pad_token_id = writer.generation_config.pad_token_id = 0
    if getattr(model.config, "is_encoder_decoder", False):
        model.generation_config.decoder_start_token_id = 1
    ids = torch.tensor([[*BEFORE, *AFTER]])
    line["text"] = _outcome(model, dict(input_ids=ids, attention_mask=torch.ones_like(ids)))
    try:
        line["given"], inputs = inputs_of(name, model)
    except Exception as error:
        line["given"], line["pictures"] = "nothing", f"not tried: no picture of its shapes: {_short(error)}"
        return line
    line["pictures"] = "not tried: no prompt of its shapes" if line["given"] == "nothing" else _outcome(model, inputs)
    if line["given"] == "rows" and line["pictures"].startswith("not tried"):  # other models take a list, a picture each
        encoded = inputs["mm_encoder_outputs"]["image"]
        encoded.pooler_output = (encoded.pooler_output,)
        line["pictures"] = _outcome(model, inputs)
    return line


def _refusal(model: Any) -> str:
    """Why a model is refused, whatever it is given; "": it is not."""
    if not hasattr(model, "generate"):
        return "refused: it has no generate, as it writes no text"
    try:
        with packed_model(model).attached():
            return ""
    except (ValueError, TypeError, NotImplementedError) as error:
        return f"refused: {_short(error)}"


def _outcome(model: Any, inputs: dict[str, Any]) -> str:
    """``SAME``; or what went wrong, by which method."""
    options = OWN_OPTIONS.get(model.config.model_type, OPTIONS)
    try:
        own = model.generate(**_again(inputs), **options)
    except Exception as error:
        return f"not tried: transformers' own generate fails: {_short(error)}"
    try:
        for name, method in methods(getattr(model, WRITERS.get(model.config.model_type, ""), model)).items():
            ours = pass_ext.custom_generate(method)
            got = model.generate(**_again(inputs), **options, custom_generate=ours)
            if ours.stats is None:
                return "refused: its own generate is no loop over tokens, and calls no custom_generate"
            if not torch.equal(own, got):
                return f"another text by {name}"
    except (ValueError, TypeError, NotImplementedError) as error:
        return f"refused: {_short(error)}"
    except Exception as error:
        return f"fails: {type(error).__name__}: {_short(error)}"
    return SAME


def _again(inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs, whose dictionaries transformers changes, once more."""
    return {name: dict(value) if isinstance(value, dict) else value for name, value in inputs.items()}


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:240]


def render(result: dict[str, Any]) -> str:
    """The page of a result."""
    lines = result["rows"]
    right = [line for line in lines if line.get("pictures") == SAME]
    untried = [line for line in lines if "not tried" in line or line["pictures"].startswith("not tried")]
    others = [line for line in lines if line not in right and line not in untried]
    left = [
        [line["architecture"], _cell(line.get("text", "")), _why(line.get("not tried", line.get("pictures", "")))]
        for line in untried
    ]
    heads = ["architecture", "text", "why not"]
    return page(
        __file__,
        result["versions"],
        date=result["date"][:10],
        new=NEW,
        right=len(right),
        right_lines=table(
            ["architecture", "given", "text"],
            ([line["architecture"], line["given"], _cell(line["text"])] for line in right),
            left=3,
        ),
        others=len(others),
        other_lines=table(
            ["architecture", "given", "text", "why not"],
            ([line["architecture"], line["given"], _cell(line["text"]), _why(line["pictures"])] for line in others),
            left=4,
        ),
        untried_lines=["", f"## Not tried: {len(left)}", "", *table(heads, left, left=3), ""] if left else "",
    )


def _cell(outcome: str) -> str:
    if outcome == SAME:
        return "yes"
    return (
        "" if outcome.startswith("not tried") or not outcome else "no" if outcome.startswith("refused") else "**wrong**"
    )


def _why(outcome: str) -> str:
    return outcome.removeprefix("refused: ").removeprefix("not tried: ").replace("|", "\\|")


def main() -> int:
    """Entry point."""
    return command(__doc__, RESULT, PAGE, classes, judge, render)


if __name__ == "__main__":
    sys.exit(main())
