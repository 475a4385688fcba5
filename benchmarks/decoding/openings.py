"""Plain prose that the demo model writes: its answers to "Write the beginning of …", as --data of `train-head`.

The standard library's prose is docstrings; a head learns what its model writes, and that is other text too.

`python -m benchmarks.decoding.openings FILE` writes rows {"text": …} of JSON.
"""

import json
import sys
from itertools import product
from pathlib import Path

import torch

from pass_ext.checkpoint import demo_model, load_checkpoint
from pass_ext.training.common.frozen_model import sample

FORMS = (
    "a short story", "a novel", "a fairy tale", "a newspaper report", "an essay", "a travel report", "a history book's chapter",
    "an encyclopedia's article", "a magazine's article", "a science book for everybody", "a memoir", "a guide for beginners",
)  # fmt: skip
SUBJECTS = (
    "a harbour", "winter", "a lost key", "the night train", "a garden", "clocks", "a mountain village", "bees", "the theatre",
    "a storm", "an old school", "bridges", "the moon", "a market", "two sisters", "a river", "music", "a library", "the desert",
    "a doctor", "elections", "the kitchen", "a forest", "money", "horses", "a long journey", "the sea", "a hospital", "chess",
    "an invention", "the weather", "a museum", "memory", "a football club", "volcanoes", "a letter", "the city at night",
    "ships", "a painter", "sleep",
)  # fmt: skip
BATCH, TOKENS, TEMPERATURE = 96, 144, 0.9


def openings() -> list[str]:
    """The texts, always the same of one model and version."""
    model, tokenizer = load_checkpoint(demo_model(), torch.bfloat16)
    prompts = []
    for form, subject in product(FORMS, SUBJECTS):
        asked = f"Write the beginning of {form} about {subject}. Answer with the text alone."
        messages = [{"role": "user", "content": asked}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        prompts.append(tokenizer(text, add_special_tokens=False).input_ids)
    stop = frozenset({model.generation_config.eos_token_id})
    texts = []
    for number, at in enumerate(range(0, len(prompts), BATCH)):
        generator = torch.Generator().manual_seed(number)
        written = sample(model, prompts[at : at + BATCH], TOKENS, TEMPERATURE, generator, stop)
        texts += [tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in written]
        print(f"{len(texts)} of {len(prompts)}", file=sys.stderr)
    return texts


if __name__ == "__main__":
    Path(sys.argv[1]).write_text("".join(json.dumps({"text": text}) + "\n" for text in openings()))
