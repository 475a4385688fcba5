"""docs/guide/transformers.md: its blocks run, on a small model, and give the model's own text."""

import re

import pytest
import torch
from support.code_blocks import blocks_of, run_blocks

transformers = pytest.importorskip("transformers")

from support.generation import replace_shipped_slots  # noqa: E402
from support.paths import ROOT  # noqa: E402
from support.small_models import Tokens, prompts, small_model  # noqa: E402

import pass_ext  # noqa: E402
from pass_ext.integrations.transformers import hub_generate  # noqa: E402

PAGE = ROOT / "docs/guide/transformers.md"

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="an sdist has no docs")


class Recorder:
    """A streamer that stores tokens."""

    def __init__(self):
        self.tokens = []

    def put(self, tokens):
        self.tokens += tokens.flatten().tolist()

    def end(self):
        """Nothing to do."""


def test_the_blocks_of_the_page_run(monkeypatch, tmp_path):
    """The text of every block, each stopped nowhere: no text of this model holds the word."""
    monkeypatch.setenv("PASS_EXT_CACHE", str(tmp_path))
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    model = small_model("llama")
    replace_shipped_slots(monkeypatch, model)
    slots = pass_ext.LookaheadEmbedding.from_pretrained("smollm2-135m-instruct")
    monkeypatch.setattr(hub_generate, "_slots", lambda path, modified: slots)
    input_ids, mask = prompts(1, 9)
    names = dict(
        pass_ext=pass_ext,
        model=model,
        assistant=model,
        slots=slots,
        streamer=Recorder(),
        tokenizer=Tokens(),
        input_ids=input_ids,
        inputs=dict(input_ids=input_ids, attention_mask=mask, do_sample=False),
    )
    expected = model.generate(**names["inputs"], max_new_tokens=200)
    blocks = [block for block in blocks_of(PAGE) if block[0] == "python"]
    assert len(blocks) == 3
    for block in blocks:
        run_blocks(PAGE, [block], names)
        assert torch.equal(names.pop("text"), expected)
    assert torch.equal(names["same"], expected)
    assert names["streamer"].tokens == expected[0].tolist()
    assert names["method"].stats.tokens > 0


@pytest.mark.parametrize(
    "argument",
    [
        "`use_mtp=True`",
        '`speculation_type="dflash"`',
        "`assistant_model=` with Gemma 4's assistant",
        "`assistant_ensemble_weight=`",
    ],
)
def test_the_page_says_what_to_do_in_place_of_transformers_own_drafters(argument):
    row = re.search(rf"^\| {re.escape(argument)} \| (.+) \|$", PAGE.read_text(), re.M)
    assert row is not None and ("load_drafter" in row[1] or "not the model's" in row[1])
