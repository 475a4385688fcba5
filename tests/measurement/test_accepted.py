"""benchmarks.accepted: the shipped files bring the tokens per call that they brought when they were committed."""

import json

from benchmarks import accepted
from pass_ext.checkpoint import demo_model


def test_the_shipped_files_bring_their_tokens():
    kept = json.loads(accepted.RESULT.read_text())["counts"]
    assert accepted.fallen(accepted.measure(demo_model()), kept) == []


def test_a_file_that_brings_less_is_named():
    kept = {"slots": {"tokens": 200, "calls": 100}, "exit": {"tokens": 150, "calls": 100}}
    assert accepted.fallen(kept, kept) == []
    assert accepted.fallen(kept | {"slots": {"tokens": 197, "calls": 100}}, kept) == []
    (sentence,) = accepted.fallen(kept | {"slots": {"tokens": 195, "calls": 100}}, kept)
    assert sentence == "slots: 1.950 tokens per call, 2.000 are in benchmarks/results/accepted.json"
