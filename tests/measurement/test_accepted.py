"""benchmarks.accepted: the shipped files bring the tokens per call that they brought when they were committed."""

import json

from benchmarks import accepted
from pass_ext.checkpoint import demo_model


def test_the_shipped_files_bring_their_tokens():
    kept = json.loads(accepted.RESULT.read_text())["counts"]
    assert accepted.fallen(accepted.measure(demo_model(), prompts=1), kept) == []


def test_a_file_that_brings_less_is_named():
    kept = {"slots": {"prose": [[150, 70], [50, 30]]}, "exit": {"prose": [[150, 100]]}}
    assert accepted.fallen(kept, kept) == []
    assert accepted.fallen(kept | {"slots": {"prose": [[150, 71], [47, 29]]}}, kept) == []
    assert accepted.fallen(kept | {"slots": {"prose": [[148, 70]]}}, kept) == [], "of the first prompt alone"
    (sentence,) = accepted.fallen(kept | {"slots": {"prose": [[150, 70], [45, 30]]}}, kept)
    assert sentence == "slots: 1.950 tokens per call, 2.000 are in benchmarks/results/accepted.json"
