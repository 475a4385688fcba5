"""The benchmark of look-ahead slots: which texts it chooses, what it counts, and that the committed page shows its result."""

import json
import sys

import pytest
import torch

pytest.importorskip("transformers")

from support.generation import slots_for
from support.paths import ROOT
from support.small_models import small_model

sys.path.append(str(ROOT))  # for benchmarks; at the end, so that an installed pass_ext stays

from benchmarks.decoding.prompts import Prompt
from benchmarks.pages import slot_texts, slots
from benchmarks.pages.slots import RESULTS, Text, judged, render

pytestmark = pytest.mark.skipif(not RESULTS.exists(), reason="an sdist has no results")


@pytest.fixture
def file(tmp_path, llama):
    path = tmp_path / "slots.safetensors"
    slots_for(llama, rank=3).save(path)
    return str(path)


def test_the_pages_show_the_results():
    found = sorted(RESULTS.glob("*/slots.json"))
    assert found
    for path in found:
        assert path.with_suffix(".md").read_text() == render(json.loads(path.read_text()))


def test_rows_are_means_over_the_places_of_what_was_written(llama, file):
    texts = [
        Text("chat", "greedy", torch.arange(5, 30).tolist(), 4),
        Text("code", "greedy", torch.arange(30, 50).tolist(), 9),
        Text("code", "T 0.8", torch.arange(20, 50).tolist(), 9),
    ]
    rows = judged(llama, file, texts)
    places = {(row["kind"], row["domain"]): row["places"] for row in rows}
    slots_here = 4
    expected = {"chat": 25 - slots_here - 1 - 2, "code": 20 - slots_here - 1 - 7}
    assert places["greedy", "chat"] == expected["chat"] and places["greedy", "code"] == expected["code"]
    assert places["greedy", "all"] == sum(expected.values()) and ("T 0.8", "chat") not in places
    for row in rows:
        assert 0 <= row["chain"] <= slots_here and all(0 < share <= 1 for share in row["overlap"])
    whole, *parts = (
        next(row for row in rows if (row["kind"], row["domain"], row["scores"]) == ("greedy", domain, "raw"))
        for domain in ("all", "chat", "code")
    )
    mean = sum(row["overlap"][0] * row["places"] for row in parts) / whole["places"]
    assert abs(mean - whole["overlap"][0]) < 2e-4


def test_texts_are_counted_behind_their_prompts(llama, file):
    rows = list(slot_texts.measure(llama, [file], {"chat": [[5, 6, 7], [8, 9]]}, 9))
    assert len(rows) == len(slot_texts.LAWS) * 4
    for row in rows:
        assert row["texts"] == 2 and 1 <= row["tokens per call"] <= 5
        if row["method"] == "Plain":
            assert row["tokens per call"] == 1 and row["speed"] == 1
    table = "\n".join(slot_texts.lines_of(rows))
    assert table.count("two passes, 8 rows") == 3 and "Plain" not in table


def test_texts_that_loop_are_apart(monkeypatch):
    model = small_model("llama")
    prompts = [Prompt("chat", str(i), (5 + i, 6, 7)) for i in range(12)]
    monkeypatch.setattr(slots, "read_prompts", lambda domain, tokenizer, most: prompts[:most])
    texts = slots.texts_of(model, None, "chat", wanted=2, tokens=40)
    kinds = [text.kind for text in texts]
    assert set(kinds) <= {"greedy", "greedy, loops", "T 0.8"} and all(kinds.count(kind) <= 2 for kind in kinds)
    for text in texts:
        assert text.prompt == 3 and slots.loops(text.ids[3:]) == (text.kind == "greedy, loops")
