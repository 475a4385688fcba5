"""The page of bytes of layers with a state: its lines are what the emulator counts, and what they must be."""

import pytest
from support.paths import ROOT

from benchmarks.harness.markdown import row
from benchmarks.kernel_time import state_bytes


@pytest.mark.parametrize("layer", state_bytes.LAYERS)
def test_the_page_shows_what_the_emulator_counts(layer):
    assert row(state_bytes.line(layer, 4)) in (ROOT / state_bytes.PAGE).read_text().splitlines()


def test_a_state_is_loaded_once_in_a_step_and_moved_once_by_a_commit():
    counts = state_bytes.count("Qwen3-Next", 16)
    heads, _, dk, dv, _ = state_bytes.LAYERS["Qwen3-Next"]
    assert counts.state == counts.state_loads == counts.commit_loads == counts.commit_stores == 4 * heads * dk * dv
    assert counts.stores == 16 * heads * dv * (2 + 4)  # out and u
    assert counts.states == 3 * counts.state and counts.per_node(16) == 34 * counts.state
