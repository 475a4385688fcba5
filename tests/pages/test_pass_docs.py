"""docs/guide/pass.md, the pages that go on from it, and the first block of README.md: they run, on small files of models, and
give the model's own text."""

import re

import pytest
import torch
from support.code_blocks import blocks_of, run_blocks

import pass_ext

pytest.importorskip("transformers")
pytest.importorskip("gguf")

from support.generation import replace_shipped_slots
from support.gguf_files import write_gguf
from support.paths import ROOT

PAGE, README = ROOT / "docs/guide/pass.md", ROOT / "README.md"
FURTHER = [ROOT / f"docs/guide/{name}.md" for name in ("sessions", "exactness", "models")]

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="an sdist has no docs")


@pytest.fixture
def names(monkeypatch, tmp_path):
    """The files of a small model that the pages name, and slots that fit it in place of the shipped ones."""
    monkeypatch.setenv("PASS_EXT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    model, tokenizer = pass_ext.load_checkpoint(write_gguf(tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf"))
    for part in (model, tokenizer):
        part.save_pretrained("HuggingFaceTB/SmolLM2-135M-Instruct")
    asked = replace_shipped_slots(monkeypatch, model)
    yield dict(inputs=tokenizer("Why do cats purr?", return_tensors="pt"))
    assert asked == ["smollm2-135m-instruct"]


def check_text(names):
    """`result` is the text of plain decoding."""
    plain = pass_ext.generate(names["model"], names["input_ids"], max_new_tokens=200)
    assert torch.equal(names["result"].sequences, plain.sequences) and plain.stats.tokens > 20


def test_the_blocks_of_the_page_run(names, capsys):
    blocks = [block for block in blocks_of(PAGE) if block[0] == "python"]
    assert len(blocks) == 3
    run_blocks(PAGE, blocks[:1], names)
    check_text(names)
    first = names.pop("model")
    run_blocks(PAGE, blocks[1:], names)
    for page in FURTHER:
        further = [block for block in blocks_of(page) if block[0] == "python"]
        assert len(further) == 1, page
        run_blocks(page, further, names)
    assert names["model"] is not first and names["model"].dtype == torch.bfloat16
    assert str(names["plan"]) in capsys.readouterr().out
    assert names["session"].prefix_lens.tolist() == [names["result"].sequences.shape[1] - 1]


def test_the_first_block_of_the_readme_runs(names):
    run_blocks(README, [block for block in blocks_of(README) if block[0] == "python"][:1], names)
    check_text(names)


def test_the_page_names_every_argument_of_the_methods():
    page = PAGE.read_text()
    for method in (pass_ext.NGram, pass_ext.PaSS):
        signature = re.search(rf"`{method.__name__}\((.*?)\)`", page)[1]
        assert [part.split("=")[0].strip() for part in signature.split(",")] == list(method.__dataclass_fields__)
        for part in signature.split(","):
            name, _, default = part.strip().partition("=")
            if default:
                assert repr(method.__dataclass_fields__[name].default).strip("'") == default.strip('"')


def test_another_picture_is_found(tmp_path):
    from tools.pictures import cycles

    (tmp_path / "docs/guide").mkdir(parents=True)
    svg = (ROOT / cycles.PATH).read_text()
    assert cycles.check(ROOT) is None
    for wrong in ("", svg.replace("lazy", "idle")):
        (tmp_path / cycles.PATH).write_text(wrong)
        assert "does not show these cycles" in cycles.check(tmp_path)
    titles = dict(cycles.CYCLES)
    assert {title: cycles.tokens_of(calls) for title, calls in titles.items()} == {
        title: int(re.search(r"(\d+) tokens", title)[1]) for title in titles
    }
