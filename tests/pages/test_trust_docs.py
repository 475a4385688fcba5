"""docs/trust.md shows the committed results, the laws are enumerated again for one rule, and counts are worked out by hand."""

import json
import shutil
from pathlib import Path

import pytest
from support.paths import ROOT

PAGE, RESULTS = Path("docs/trust.md"), Path("benchmarks/results/trust")
pytestmark = pytest.mark.skipif(not (ROOT / RESULTS).exists(), reason="an sdist has no results")


@pytest.fixture
def trust():
    from benchmarks.pages import trust

    return trust


def result_of(name):
    return json.loads((ROOT / RESULTS / f"{name}.json").read_text())


def test_the_page_shows_the_committed_results(trust):
    assert (ROOT / PAGE).read_text() == trust.render(ROOT), "run: python -m benchmarks.pages.trust"


def test_a_changed_result_changes_the_page(trust, tmp_path):
    shutil.copytree(ROOT / RESULTS, tmp_path / RESULTS)
    for record in ROOT.glob("benchmarks/results/*/verified-*.json"):
        (tmp_path / record.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(record, tmp_path / record.relative_to(ROOT))
    before = trust.render(tmp_path)
    assert before == (ROOT / PAGE).read_text()
    path = tmp_path / RESULTS / "laws.json"
    result = json.loads(path.read_text())
    result["rows"][0]["error"] = 0.25
    path.write_text(json.dumps(result))
    assert "| 2e-01 |" in trust.render(tmp_path) != before


def test_the_results_are_right_and_name_no_path():
    laws = result_of("laws")["rows"]
    assert all(row["error"] < 1e-12 and row["compiled error"] < 1e-5 and row["outcomes"] > 100 for row in laws)
    compared = result_of("bits")["compared"]
    small = {name: one for name, one in compared.items() if "batches of 6" not in name}
    assert {one["differ"] for one in small.values()} == {0} and len(small) > 10
    assert all(row["nmse"] < 5e-4 for row in result_of("errors")["rows"])
    assert str(ROOT) not in "".join(path.read_text() for path in (ROOT / RESULTS).glob("*.json"))


def test_the_laws_are_enumerated_again():
    from benchmarks.trust import laws

    again, (row,) = laws._of_rule("block"), [row for row in result_of("laws")["rows"] if row["rule"] == "block"]
    assert {key: again[key] for key in ("problems", "outcomes", "compiled outcomes")} == {
        key: row[key] for key in ("problems", "outcomes", "compiled outcomes")
    }
    assert again["error"] < 1e-12 and again["compiled error"] < 1e-5


def test_lines_of_code_by_hand(tmp_path):
    from benchmarks.trust.lines import lines_of

    (tmp_path / "a.py").write_text("# no\n\nx = 1  # yes\n    # no\n'''yes'''\n")
    (tmp_path / "a.h").write_text("// no\nint x;\n\n  // no\n#pragma once\n")
    assert lines_of(tmp_path / "a.py") == 2 and lines_of(tmp_path / "a.h") == 2


def test_branches_of_two_instances_count_once():
    from benchmarks.trust import coverage

    def instance(*counts):
        branches = [{"count": count, "throw": False} for count in counts] + [{"count": 0, "throw": True}]
        return {"line_number": 3, "branches": branches}

    counts = {}
    report = [
        {"file": "/x/csrc/core/accept.h", "lines": [instance(1, 0), instance(0, 0)]},
        {"file": "csrc/core/accept.h", "lines": [instance(0, 4)]},
        {"file": "/x/csrc/cpu/accept.cpp", "lines": [instance(0, 0)]},
        {"file": "/usr/include/core/accept.h", "lines": [instance(0, 0)]},
    ]
    coverage.add(counts, {"files": report[:1]})
    assert counts == {("accept.h", 3, 0): 1, ("accept.h", 3, 1): 0}
    assert coverage.files_of(counts)[0]["missed"][0]["line"] == 3
    coverage.add(counts, {"files": report[1:]})
    (row,) = coverage.files_of(counts)
    assert (row["branches"], row["taken"], row["missed"]) == (2, 2, [])


def test_faults_are_counted_by_folder(trust, tmp_path):
    from benchmarks.trust import mutants

    found = {
        "as it is: tests/a.py": "survived",
        "csrc/core/a.h:1:2 '<' -> '>'": "killed",
        "csrc/core/b.h:1:2 '<' -> '>'": "survived",
        "pass_ext/decoding/loop/a.py:3:4 '1' -> '2'": "timed out",
    }
    (tmp_path / "results.json").write_text(json.dumps({key: {"result": result} for key, result in found.items()}))
    result = mutants.measure(tmp_path / "results.json")
    assert result["folders"] == {
        "csrc/core": {"killed": 1, "survived": 1},
        "pass_ext/decoding/loop": {"timed out": 1},
    }
    assert [one["fault"] for one in result["survivors"]] == ["csrc/core/b.h:1:2 '<' -> '>'"]
    page = trust.faults(result | {"date": "2031-02-03", "commit": "0123456789ab", "cpu": "Some CPU"})
    assert "**2 of 3** that changed the code (67%). 3 of the 200 planned" in page
    assert "| all | 1 | 1 | 1 | 0 | 0 |" in page


def test_the_end_of_random_calls_is_read():
    from benchmarks.trust.random import counted

    output = (
        "seed 0, call 0, 0 s\na: 2 results, 1 refusals\nb: 3 results, 4 refusals\n10 calls as they should be, 0 not\n"
    )
    assert counted(output) == {"ops": 2, "calls": 10, "results": 5, "refusals": 5, "wrong": 0}
    with pytest.raises(ValueError, match="must end with its counts"):
        counted("Segmentation fault")
