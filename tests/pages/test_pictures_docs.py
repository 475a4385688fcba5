"""docs/guide/pictures.md: its blocks run, with a real processor and tiny models, and give the models' own texts."""

import json
import re

import pytest
import torch
from support.code_blocks import blocks_of, run_blocks
from support.paths import ROOT

pytest.importorskip("transformers")
pytest.importorskip("PIL")

from support.pictures import llava_with_processor, random_picture
from support.speech import speaking_whisper
from transformers import GenerationMixin

import pass_ext
from benchmarks.architectures import encoders, picture_times, whole_prompts

PAGE = ROOT / "docs/guide/pictures.md"

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="an sdist has no docs")


def test_the_table_shows_its_result_and_the_page_its_counts():
    result = json.loads((ROOT / whole_prompts.RESULT).read_text())
    table = (ROOT / whole_prompts.PAGE).read_text()
    assert table == whole_prompts.render(result) and "**wrong**" not in table.partition("## ")[2]
    right, refused = (int(count) for count in re.findall(r"## .*: (\d+)", table))
    assert f"of {len(result['rows'])} of" in PAGE.read_text()
    for words in (f"sound in {right},", f"{refused} are refused"):
        assert words in PAGE.read_text().replace("\n", " ")


def test_the_page_shows_what_a_picture_costs():
    result, page = json.loads(picture_times.RESULT.read_text()), PAGE.read_text().replace("\n", " ")
    reading = (
        f"reading {result['seconds, ours, 400']:.2f} s beside {result['seconds, own, 400']:.2f} s of transformers' own call, "
        f"and {result['seconds, ours, 1600']:.2f} s beside {result['seconds, own, 1600']:.2f} s with 1,600 rows"
    )
    ratios = f"pairs are {result['reading, 400']:.3f} and {result['reading, 1600']:.3f}"
    machine = f"{result['machine']['model']}, {result['machine']['torch_threads']} threads, {result['date'][:10]}"
    for words in (machine, reading, ratios, f"a token after it {result['token']:.2f} times"):
        assert words in page


def test_the_blocks_of_the_page_run():
    model, processor = llava_with_processor()
    whisper, sound = speaking_whisper(), {"input_features": torch.randn(1, 8, 32)}
    begun = torch.tensor([[1, 5, 6]])
    names = dict(pass_ext=pass_ext, model=model, processor=processor, picture=random_picture(), sound=sound)
    names |= dict(whisper=whisper, distilled=speaking_whisper(1), begun=begun)
    run_blocks(PAGE, [block for block in blocks_of(PAGE) if block[0] == "python"], names)
    expected = model.generate(**names["inputs"], max_new_tokens=40, do_sample=False)
    assert torch.equal(names["text"], expected) and torch.equal(names["same"], expected)
    assert torch.equal(names["said"], whisper.generate(**sound, return_timestamps=True))
    options = dict(decoder_input_ids=begun, max_new_tokens=40, do_sample=False)
    assert torch.equal(names["more"], GenerationMixin.generate(whisper, **sound, **options))


def test_the_table_of_encoders_shows_its_result():
    result, table = json.loads((ROOT / encoders.RESULT).read_text()), (ROOT / encoders.PAGE).read_text()
    assert table == encoders.render(result) and "| **wrong** |" not in table
