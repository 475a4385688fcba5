"""The page of samples that draft for each other shows the committed result; its ratios are worked out by hand."""

import json

import pytest

from benchmarks.samples.__main__ import BATCHES, MOST, PAGE, RESULT, render

pytestmark = pytest.mark.skipif(not RESULT.exists(), reason="an sdist has no results")


def test_the_page_shows_the_committed_result():
    assert PAGE.read_text() == render(json.loads(RESULT.read_text())), "run: python -m benchmarks.samples --render"


def test_tokens_per_call_by_hand():
    """Two prompts of 60 tokens: 30 and 10 calls are 120 tokens in 40 calls, 3 each; a text that differs is counted."""

    def row(domain, own, corpus, same):
        each = {f"batch of {samples}": {"own text": own, "corpus": corpus, "same": same} for samples in BATCHES}
        series = {"own text": [own] * MOST, "corpus": [own, *[corpus] * (MOST - 1)], "same": same}
        return {"domain": domain, "prompt": "a", **each, "one after the other": series}

    rows = [row("code", 30, 20, True), row("chat", 10, 10, False)]
    result = dict(date="2031-02-03", commit="0123456789ab", versions={"torch": "9"}, model="M", prompts=2, tokens=60,
                  temperature=0.8, rows=rows)  # fmt: skip
    page = render(result)
    assert "| all | 4 in one batch | 2 | 3.00 | 4.00 | 1.33 × |" in page
    assert "| all | one after the other: the first | 2 | 3.00 | 3.00 | 1.00 × |" in page
    assert "| code | one after the other: 5 to 8 | 1 | 2.00 | 3.00 | 1.50 × |" in page
    assert "4 of 8 batches and series" in page and "prose" not in page
