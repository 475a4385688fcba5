"""The grammar benchmark: its page counts valid and equal texts, its check knows valid texts."""

import json

import pytest
import torch
from support.paths import ROOT

if not (ROOT / "benchmarks").exists():
    pytest.skip("an sdist has no benchmarks", allow_module_level=True)

from support.grammars import Automaton

from benchmarks.grammar import page
from benchmarks.grammar.tasks import TASKS
from benchmarks.grammar.timed import Clock, Timed


def result():
    """Two texts by two methods."""
    rows = [
        {
            "library": "a library", "temperature": 0.0, "task": "person", "prompt": f"person {place}", "method": method,
            "valid": method == page.PLAIN or place == 0, "calls": calls, "drafted": 3, "accepted": 2, "seconds": seconds,
            "grammar_seconds": 0.004, "masks": 8, "tokens": [1, 2, 3 + (place and method != page.PLAIN)],
        }
        for place in (0, 1)
        for method, calls, seconds in ((page.PLAIN, 4, 2.0), ("NGram", 2, 1.0))
    ]  # fmt: skip
    settings = {"model": "m", "dtype": "float32", "length": 8, "versions": {"xgrammar": "0.2.8"}}
    machine = {"cpu": {"model": "a processor", "cores": 2, "torch_threads": 2}}
    return {"date": "2026-01-01T00:00:00Z", "commit": "abc", "machine": machine, "settings": settings, "rows": rows}


def test_the_page_counts_valid_and_equal_texts():
    text = page.render(result())
    assert "| Plain | 2 of 2 | 2 of 2 | 3.0 | 4.0 | 1.00 (1.00–1.00) | 1.00 | 2.0 |" in text
    assert "| NGram | 1 of 2 | 1 of 2 | 3.0 | 2.0 | 2.00 (2.00–2.00) | 2.00 | 4.0 |" in text
    assert "## a library, greedy" in text and "| a library | person | 4.0 | 2.0 |" in text and "xgrammar 0.2.8" in text


VALID = {
    "person": '{"name": "A", "age": 40, "profession": "baker", "hobbies": ["bread"], "married": true}',
    "ticket": '{"category": "billing", "priority": "low", "summary": "", "needs_reply": false}',
    "route": '{"title": "t", "stops": [{"place": "a", "minutes": 1}, {"place": "b", "minutes": 2}], "total_minutes": 3}',
    "appointment": "date: 2026-02-28, time: 09:30, place: pier 4",
}
WRONG = {
    "person": ["40", '"baker"', '["bread"]', "true"],
    "ticket": ['"billing"', '"low"', "false"],
    "route": ['"t"', '{"place": "b", "minutes": 2}', "3}"],
    "appointment": ["2026", "09:30", "pier", "4"],
}


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_the_check_finds_what_does_not_fit(task):
    valid = VALID[task.name]
    assert task.is_valid(valid) and len(set(task.prompts)) == len(task.prompts)
    assert not task.is_valid(valid[:-1] + "!") and not task.is_valid("") and not task.is_valid(valid + " x")
    for part in WRONG[task.name]:
        assert part in valid and not task.is_valid(valid.replace(part, "99999")), part
    if task.schema:
        entries = json.loads(valid)
        for name in entries:
            assert not task.is_valid(json.dumps({key: value for key, value in entries.items() if key != name}))
        assert not task.is_valid(json.dumps(entries | {"more": 1}))


def test_a_timed_grammar_is_the_grammar():
    clock, grammar = Clock(), Automaton({0: {3: 0, 5: 1}, 1: {}}, complete=(1,), guess=(5,))
    timed = Timed(grammar, clock).fork()
    words = torch.zeros(1, dtype=torch.int32)
    timed.fill_mask(words)
    assert words.tolist() == [8 + 32] and list(timed.forced()) == [5] and not timed.may_end
    assert timed.accept(5) and timed.may_end and not timed.accept(5)
    timed.rollback(1)
    assert not timed.may_end and clock.masks == 1 and clock.seconds > 0 and grammar.states == [0]
