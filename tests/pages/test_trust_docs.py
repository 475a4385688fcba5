"""docs/trust.md shows the committed results, the laws are enumerated again for one rule, and counts are worked out by hand."""

import json
import shutil
import subprocess
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
    for record in [*ROOT.glob("benchmarks/results/*/verified-*.json"), *ROOT.glob("benchmarks/results/*/texts.json")]:
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


HEADER = """\
#pragma once
template <int kind>
inline int some(int a) {
  if (kind == 1 && a > 0) return 1;  // kind 1: a > 0, two branches; else none
  return a > 2 ? 3 : 4;
}
inline int rest(int a, int b) {
  struct Guard { int& x; ~Guard() { ++x; } } guard{a};  // so that a call that throws has a way out
  int found = 0;
  for (int i = 0; i < b && i < 9; ++i)
    if (may_throw(i)) found = i;
  auto is_odd = [&](int i) { return i % 2 == 1 && i > a; };
  return is_odd(found) ? 0 : 1;
}
"""
PART = """\
int may_throw(int i);
#include "core/some.h"
int %s(int a) { return %s; }
"""
MAIN = """\
int one(int), two(int);
int may_throw(int i) { if (i > 9) throw i; return i > 1; }
int main() { return one(1) + two(0) + two(5) == 0; }
"""
BY_HAND = {4: (2, 2), 5: (2, 1), 10: (4, 3), 11: (2, 2), 12: (4, 1), 13: (2, 1)}
"""Line -> its branches and those taken. Line 4 has some in one of two instances, 1 > 0 and 0 > 0; no value in line 5 exceeds 2.
rest(1, 3) ends before i is 9, and finds 2; the lambda sees that 2 is even, and no more."""


@pytest.mark.skipif(not (shutil.which("gcov") and shutil.which("g++")), reason="gcov reads what g++ counts")
def test_branches_by_hand(tmp_path):
    from benchmarks.trust import coverage

    coverage.check_versions()
    folder = tmp_path / "csrc" / "core"
    folder.mkdir(parents=True)
    (tmp_path / "build").mkdir()
    (folder / "some.h").write_text(HEADER)
    parts = {"one": "some<1>(a) + some<2>(a - 9) + rest(a, 3)", "two": "some<1>(a) + some<2>(a - 4)"}
    for name, value in parts.items():
        (tmp_path / f"csrc/{name}.cpp").write_text(PART % (name, value))
    (tmp_path / "csrc/main.cpp").write_text(MAIN)
    compiler = tmp_path / "compiler"
    compiler.write_text(coverage.COMPILER)
    compiler.chmod(0o755)
    sources = [tmp_path / f"csrc/{name}.cpp" for name in (*parts, "main")]
    for source in sources:
        command = [compiler, "-O2", f"-I{tmp_path}/csrc", "-c", source, "-o", tmp_path / f"build/{source.stem}.o"]
        subprocess.run(command, check=True)
    subprocess.run([compiler, *tmp_path.glob("build/*.o"), "-o", tmp_path / "run"], check=True)
    subprocess.run([tmp_path / "run"], check=True)
    counts = coverage.taken(tmp_path)
    lines = {}
    for (_, _, line, _, _), count in counts.items():
        branches, taken = lines.get(line, (0, 0))
        lines[line] = branches + 1, taken + (count > 0)
    assert lines == BY_HAND
    (row,) = coverage.files_of(counts, folder)
    assert (row["file"], row["branches"], row["taken"]) == ("some.h", 16, 10)
    assert [(one["line"], one["branches"]) for one in row["missed"]] == [(5, 1), (10, 1), (12, 3), (13, 1)]


def test_calls_that_may_throw_are_no_branches():
    from benchmarks.trust import coverage

    counts = [(1, False), (0, False), (7, False), (0, True), (2, False), (3, False)]
    found = coverage.without_exceptions([{"count": count, "throw": throw} for count, throw in counts])
    assert [branch["count"] for branch in found] == [1, 0, 2, 3]


def test_faults_are_counted_by_folder(trust, tmp_path):
    from benchmarks.trust import mutants

    found = {
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
    shown = trust.faults(result)
    assert (shown["noticed"], shown["real"]) == (2, 3) and shown["left"].startswith(" 3 of the 200 planned were tried")
    assert "| all | 1 | 1 | 1 | 0 | 0 |" in shown["faults"]


def test_the_end_of_random_calls_is_read():
    from benchmarks.trust.sanitized import counted

    output = (
        "seed 0, call 0, 0 s\na: 2 results, 1 refusals\nb: 3 results, 4 refusals\n10 calls as they should be, 0 not\n"
    )
    assert counted(output) == {"ops": 2, "calls": 10, "results": 5, "refusals": 5, "wrong": 0}
    with pytest.raises(ValueError, match="must end with its counts"):
        counted("Segmentation fault")


def test_a_sanitized_run_goes_on_where_it_stopped(tmp_path, monkeypatch):
    import sanitize
    from sanitize import __main__ as command

    from benchmarks.trust import sanitized

    files = [ROOT / "tests/ops/test_tree.py", ROOT / "tests/ops/test_step.py"]
    library = tmp_path / "pass_ext" / "_C.so"
    library.parent.mkdir()
    library.write_text("the first build")
    calls = "a: 2 results, 1 refusals\n3 calls as they should be, 0 not\n"
    ran, ends = [], {files[0]: (0, "5 passed, 2 skipped in 3 s\n"), files[1]: (1, "ERROR: AddressSanitizer\n")}

    def run(words):
        found = [word for word in words if word in files]
        ran.extend(found)
        return ends[found[0]] if found else (0, calls)

    monkeypatch.setattr(sanitize, "build", lambda sanitizer: tmp_path)
    monkeypatch.setattr(command, "op_tests", lambda: files)
    monkeypatch.setattr(sanitized, "_run", run)
    result = sanitized.measure()
    assert (result["files"], result["passed"], result["wrong"]) == (1, 5, ["tests/ops/test_step.py"])
    assert result["random calls"] == 3 and ran == files
    ends[files[1]] = (0, "7 passed in 1 s\n")
    result = sanitized.measure()
    assert (result["files"], result["passed"], result["wrong"]) == (2, 12, []) and ran == [*files, files[1]]
    library.write_text("another build")
    assert sanitized.measure()["files"] == 2 and ran[3:] == files
