"""The benchmark of look-ahead slots: which texts it chooses, what it counts, and that the committed page shows its result."""

import json

import pytest
import torch

pytest.importorskip("transformers")

from support.generation import slots_for
from support.paths import ROOT
from support.small_models import small_model

from benchmarks.decoding.prompts import Prompt
from benchmarks.harness import by_machine, picture
from benchmarks.pages import batches, second_model
from benchmarks.pages.lookahead import slot_aims, slot_texts, slots
from benchmarks.pages.lookahead.slots import Text, judged

pytestmark = pytest.mark.skipif(not (ROOT / by_machine.RESULTS).exists(), reason="an sdist has no results")


@pytest.fixture
def file(tmp_path, llama):
    path = tmp_path / "slots.safetensors"
    slots_for(llama, rank=3).save(path)
    return str(path)


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


def test_texts_are_counted_after_their_prompts(llama, file):
    rows = list(slot_texts.measure(llama, [file], {"chat": [[5, 6, 7], [8, 9]]}, 9))
    assert len(rows) == (4 + 1) + (3 + 1) + (2 + 1)
    for row in rows:
        assert row["texts"] == 2 and 1 <= row["tokens per call"] <= 5
        if row["method"] == "Plain":
            assert row["tokens per call"] == 1 and row["speed"] == 1
    table = "\n".join(slot_texts.lines_of(rows))
    assert table.count("two passes, 8 rows") == 1 and "Plain" not in table


def test_texts_that_loop_are_apart(monkeypatch):
    model = small_model("llama")
    prompts = [Prompt("chat", str(i), (5 + i, 6, 7)) for i in range(12)]
    monkeypatch.setattr(slots, "read_prompts", lambda domain, tokenizer, most: prompts[:most])
    texts = slots.texts_of(model, None, "chat", wanted=2, tokens=40)
    kinds = [text.kind for text in texts]
    assert {"T 0.8"} < set(kinds) <= {"greedy", "greedy, loops", "T 0.8"} and max(map(kinds.count, kinds)) == 2
    for text in texts:
        assert text.prompt == 3 and slots.loops(text.ids[3:]) == (text.kind == "greedy, loops")


def test_the_picture_of_a_second_model_shows_its_result():
    result = json.loads(second_model.RESULT.read_text())
    assert picture.tells(second_model.PICTURE, second_model.story(result))
    assert picture.is_redrawn(second_model.PICTURE, lambda path: second_model.draw(path, result))
    page = (ROOT / "docs/guide/training.md").read_text()
    for by_temperature in result["tokens_per_call"].values():
        for numbers in by_temperature.values():
            assert " | ".join(f"{number:.2f}" for number in numbers.values()) in page


def test_batches_by_hand():
    """Two texts of 96 tokens in 2 seconds are 96 tokens/s; rounds are compared one by one."""
    row = {
        "batch": 2,
        "setting": "greedy",
        "seconds": {"Plain": [3.0, 2.0, 2.0], "PaSS": [1.5, 2.5, 1.6]},
        "calls": {"Plain": 96, "PaSS": 60},
    }
    result = dict(date="2031-02-03", commit="0123456789ab", versions={"torch": "9"}, model="M", slots="S", rows=[row],
                  machine={"model": "C", "torch_threads": 2})  # fmt: skip
    assert "| 2 | greedy | 96 | 1.25 × |" in batches.render(result)


def _result(tops, one, two, tokens):
    hits = dict(file=slot_aims.FILE, kind="greedy", domain="all", scores="with transitions")
    shared = {"file": slot_aims.FILE, "sampling": "greedy", "tokens per call": tokens}
    written = [
        shared | {"method": method, "domain": domain, "speed": speed}
        for method, speeds in ((slot_texts.EIGHT, one), (slot_texts.TWO, two))
        for domain, speed in zip(("code", "prose", "chat"), speeds, strict=True)
    ]
    return {"rows": [hits | {"top 1": tops}, hits | {"scores": "raw", "top 1": [0.0] * 4}], "written": written}


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        ({}, []),
        ({"tops": [0.60, 0.45, 0.349, 0.30]}, ["top 1"]),
        ({"tokens": 2.4}, ["tokens per call"]),
        ({"one": (1.59, 2.0, 2.0)}, ["speed against Plain"]),
        ({"two": (1.0, 1.0, 1.6)}, ["one pass against two"]),
    ],
    ids=str,
)
def test_an_aim_is_missed_where_one_domain_or_slot_falls_short(change, missed):
    result = _result(
        **({"tops": [0.60, 0.45, 0.35, 0.30], "one": (1.6, 2.0, 2.0), "two": (1.0, 1.0, 1.0), "tokens": 2.5} | change)
    )
    aims = slot_aims.aims_of(result)
    assert len(aims) == 4, "no row tells of the sampled texts, and of rows by measured times"
    assert [[part for part in missed if part in aim.aim] for aim in aims if not aim.met] == [missed] * len(missed)
    assert slot_aims.lines_of(result | {"rows": [], "written": []}) == []
