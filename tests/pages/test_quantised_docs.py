"""docs/guide/quantised.md: its blocks run, and it names every format that is read."""

import pytest
import torch
from support.code_blocks import blocks_of, run_blocks
from support.paths import ROOT

pytest.importorskip("transformers")
pytest.importorskip("gguf")

from support.gguf_files import write_gguf

from pass_ext.weights.formats import FORMATS

PAGE = ROOT / "docs/guide/quantised.md"

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="an sdist has no docs")


def test_the_blocks_of_the_page_run(monkeypatch, tmp_path):
    monkeypatch.setenv("PASS_EXT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    write_gguf(tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1")
    names = run_blocks(PAGE, blocks_of(PAGE), {})
    assert names["model"].lm_head.weight.dtype == torch.uint8 and names["dense"].lm_head.weight.dtype == torch.bfloat16


def test_the_page_names_every_format():
    table = PAGE.read_text().split("## What is read")[1].split("##")[0]
    for name in FORMATS:
        assert name in table
