"""docs/guide/drafters.md: its blocks run on a small model and head and give its text; it names every type and setting."""

import inspect
import re

import pytest
import torch
from support.code_blocks import blocks_of, run_blocks

import pass_ext

pytest.importorskip("transformers.integrations.gguf")
pytest.importorskip("gguf")

from support.dflash_files import settings, tensors, written
from support.gguf_files import qwen35_files
from support.heads import eagle3_checkpoint
from support.mtp import model_with_mtp
from support.paths import ROOT
from support.small_models import prompts

from pass_ext.decoding.drafting.heads.load import FAMILIES

PAGE = ROOT / "docs/guide/drafters.md"

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="an sdist has no docs")


def test_the_blocks_of_the_page_run(monkeypatch, tmp_path, one_thread):
    monkeypatch.setenv("PASS_EXT_CACHE", str(tmp_path / "times"))
    monkeypatch.chdir(tmp_path)
    qwen35_files(tmp_path / "qwen", "qwen3_5_text", "Q8_0")[0].rename("Qwen3.5.gguf")
    (model, _), ids = model_with_mtp(tmp_path / "own", "llama", num_hidden_layers=4), prompts(1, 9)[0]
    eagle3_checkpoint(tmp_path / "head", model)
    made, original = [], pass_ext.generate
    monkeypatch.setattr(
        pass_ext, "generate", lambda *given, **named: made.append(original(*given, **named)) or made[-1]
    )
    vocabulary, width = model.get_input_embeddings().weight.shape
    block = settings("dflash2", True, width, vocabulary), tensors("dflash2", width, vocabulary)
    paths = dict(path=tmp_path / "head", dflash_path=written(tmp_path / "block", *block), own_path=tmp_path / "own")
    paths |= dict(
        tuned=model,
        folder=tmp_path / "tuned",
        slots=pass_ext.LookaheadEmbedding.from_table(4, model.get_input_embeddings().weight),
    )
    run_blocks(PAGE, list(blocks_of(PAGE)), dict(model=model, input_ids=ids, **paths))
    want = model.generate(ids, max_new_tokens=200, do_sample=False)
    assert len(made) == 10 and all(torch.equal(each.sequences, want) for each in made)


@pytest.mark.parametrize("method", [pass_ext.drafting.Eagle3, pass_ext.drafting.DFlash, pass_ext.drafting.Assistant])
def test_the_page_names_every_setting(method):
    page = PAGE.read_text()
    parameters = inspect.signature(method).parameters.values()
    written = [each.name if each.default is each.empty else f"{each.name}={each.default!r}" for each in parameters]
    heading = f"`{method.__name__}({', '.join(written)})`"
    assert heading in page
    for each in parameters:
        after = page if each.name == "head" else page.split(heading)[1]  # both take one
        assert re.search(rf"^\| `{each.name}` \|", after, re.M), each.name


def test_the_page_names_every_type():
    table = PAGE.read_text().split("| type, by its config |")[1].split("\n\n")[0]
    for name, family in FAMILIES.items():
        assert re.search(rf"`{name}`.*`{family.method.__name__}`", table), name
