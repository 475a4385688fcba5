"""The mutation run: what it plants, what it chooses, and that known faults are noticed. All of it: python -m tests.mutation."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mutation.faults import Fault, choose, faults_of
from mutation.table import LEFT_OUT, TARGETS
from mutation.trial import ROOT, QuickestFirst

PYTHON = '''\
"""1 < 2"""
def f(a, b=1):  # a < b
    if a.size <= b and g(a, b):
        a.x = min(b, 3) @ a.y(b, b)
    return "a < b" if a is None else a - b
'''
CPP = """\
// if (a < b)
int f(int a) {
  if (a < 2 && g(a, b)) x = y;
  h(minimum(a, b), "1 + 1");
  return a << 1;
}
"""


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        (
            PYTHON,
            [
                "    if not (a.size <= b and g(a, b)):",
                "    if a.size < b and g(a, b):",
                "    if a.size <= b or g(a, b):",
                "    if a.size <= b and g(b, a):",
                "        pass",
                "        a.x = max(b, 3) @ a.y(b, b)",
                "        a.x = min(b, 4) @ a.y(b, b)",
                '    return "a < b" if not (a is None) else a - b',
                '    return "a < b" if a is not None else a - b',
                '    return "a < b" if a is None else a + b',
            ],
        ),
        (
            CPP,
            [
                "  if (!(a < 2 && g(a, b))) x = y;",
                "  if (a <= 2 && g(a, b)) x = y;",
                "  if (a < 3 && g(a, b)) x = y;",
                "  if (a < 2 || g(a, b)) x = y;",
                "  if (a < 2 && g(b, a)) x = y;",
                "  ;",
                '  h(maximum(a, b), "1 + 1");',
                "  return a >> 1;",
                "  return a << 2;",
            ],
        ),
    ],
    ids=["Python", "C++"],
)
def test_what_is_planted(source, lines):
    before = source.splitlines()
    planted = [fault.planted(source).splitlines() for fault in faults_of(source, source is PYTHON)]
    changed = [[one for one, other in zip(after, before, strict=True) if one != other] for after in planted]
    assert sorted(changed) == sorted([line] for line in lines)


def test_the_choice_depends_on_the_seed_alone():
    faults = faults_of((ROOT / "csrc/core/accept_walk.h").read_text(), False)
    assert len(faults) > 300 and choose(faults, 20, "1") == choose(faults, 20, "1") != choose(faults, 20, "2")
    assert len({fault.kind for fault in choose(faults, 20, "1")}) == 6


def test_the_quickest_tests_run_first_and_new_ones_before_them(tmp_path):
    (tmp_path / "seconds").write_text(json.dumps({"a": 3.0, "b": 0.1, "c": 2.1}))
    items = [SimpleNamespace(nodeid=name) for name in "abcd"]
    QuickestFirst(tmp_path / "seconds", tmp_path / "running").pytest_collection_modifyitems(items)
    assert "".join(item.nodeid for item in items) == "dbac", "c is not half of a"


def test_every_file_is_looked_at_or_left_out_by_name():
    files = [path for folder in ("core", "cpu") for path in ROOT.glob(f"csrc/{folder}/*")]
    files += (
        file
        for folder in ("decoding", "weights")
        for file in ROOT.glob(f"pass_ext/{folder}/**/*.py")
        if file.name != "__init__.py"
    )
    assert {str(path.relative_to(ROOT)) for path in files} == {*TARGETS, *LEFT_OUT}
    for _, tests in TARGETS.values():
        assert all((ROOT / test).exists() for test in tests if test.startswith("tests/"))
    for name, (sources, _) in TARGETS.items():
        assert not name.endswith(".cpp") or Path(name).stem in sources, f"{name} is not built again"
    assert all(before in (ROOT / name).read_text() for name, before, *_ in KNOWN)


KNOWN = [
    ("pass_ext/decoding/drafting/from_ngrams.py", "append(len(self._text) - 1)", "append(len(self._text))", "killed"),
    ("pass_ext/decoding/drafting/from_ngrams.py", "shortest", "shortest ", "survived"),  # nothing is changed
    ("csrc/core/draft.h", "rows.fill(tokens, logprobs, 0,", "rows.fill(tokens, logprobs, 1,", "killed"),
    ("csrc/core/draft.h", "  int64_t rows;", "  int64_t rows;  ", "same code"),
    ("csrc/core/draft.h", "  int64_t rows;", "  int64_t row;", "does not compile"),
]


ASK = """
import json, sys
from pathlib import Path
from tests.mutation.faults import Fault
from tests.mutation.trial import Trial
trial = Trial(Path("build/mutation").resolve())
for name, *fault in json.load(sys.stdin):
    print(json.dumps(trial.run(name, Fault(*fault))), flush=True)
"""


def outcomes(faults):
    """What became of each (file, fault): in a process of its own, for this one has pass_ext loaded already."""
    given = json.dumps([(name, *fault) for name, fault in faults])
    done = subprocess.run([sys.executable, "-c", ASK], cwd=ROOT, input=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_known_faults_are_told_from_none():
    sources = {name: (ROOT / name).read_text() for name, *_ in KNOWN}
    faults = []
    for name, before, after, _ in KNOWN:
        begin = sources[name].index(before)
        faults.append((name, Fault(begin, begin + len(before), after, "")))
    got = outcomes(faults)
    assert [outcome for outcome, *_ in got] == [wanted for *_, wanted in KNOWN], got
    assert all(why.startswith("tests/") for outcome, why, _ in got if outcome == "killed"), got
    for name, source in sources.items():
        assert (ROOT / "build/mutation/tree" / name).read_text() == (ROOT / name).read_text() == source


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_seeded_sample_is_noticed():
    """Of the rules and the drafting: none of these may survive."""
    faults = []
    for name in ("csrc/core/accept_walk.h", "pass_ext/decoding/drafting/from_ngrams.py"):
        source = (ROOT / name).read_text()
        faults += [(name, fault) for fault in choose(faults_of(source, name.endswith(".py")), 4, "a sample")]
    for (name, fault), got in zip(faults, outcomes(faults), strict=True):
        assert got[0] != "survived", (name, fault.described((ROOT / name).read_text()))
