"""A GPU run keeps its evidence however it ends: tried with stand-ins for its stages, and by killing it."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from support.paths import ROOT

# Tests that pass and fail, one that hangs in C, one that aborts its process, a module that cannot be imported, and a benchmark
# that dies half way. Each test writes its name into another file when it ends: the witness.
MODULES = {
    "accept": """
        @pytest.mark.parametrize("backend", ["cuda"])
        @pytest.mark.parametrize("number", range(12))
        def test_many(backend, number):
            time.sleep(0.05)
            witness(number)
            assert number != 5
    """,
    "cache": """
        @pytest.mark.parametrize("backend", ["cuda"])
        @pytest.mark.parametrize("number", range(3))
        def test_middle_one_hangs(backend, number):
            if number == 1:
                ctypes.CDLL(None).sleep(600)
            witness(number)
    """,
    "draft": """
        @pytest.mark.parametrize("backend", ["cuda"])
        @pytest.mark.parametrize("number", range(3))
        def test_middle_one_aborts(backend, number):
            if number == 1:
                os.abort()
            witness(number)
    """,
    "recall": """
        import sys, types
        made = {"allocation.all.allocated": 0}
        gpu = types.SimpleNamespace(memory_stats=lambda: made, is_available=lambda: False)
        sys.modules["torch"] = types.SimpleNamespace(cuda=gpu)

        @pytest.mark.parametrize("backend", ["cuda"])
        @pytest.mark.parametrize("number", range(2))
        def test_first_one_makes_no_tensor(backend, number):
            made["allocation.all.allocated"] += number
            witness(number)
    """,
    "tree": """
        raise ImportError("no such library")
    """,
}
HEAD = """
import ctypes, os, time
import pytest

def witness(number):
    with open(os.environ["WITNESS"], "a") as file:
        file.write(f"{__name__} {number}\\n")
"""
BENCH = """
import os
from benchmarks.harness import evidence
for rows in range(1, 4):
    evidence.add_result("bench_accept.json", {"quick": False, "rows": list(range(rows))})
os._exit(3)
"""
RUN = """
import os, sys, time
from pathlib import Path
from benchmarks.gpu import record
from benchmarks.harness import evidence
from benchmarks.gpu.runner import Runner, Stage
CORES = "import os; print(len(os.sched_getaffinity(0)) > 1, 'OMP_PROC_BIND' in os.environ)"
folder = Path(sys.argv[1])
tests = lambda name: [sys.executable, "-m", "pytest", "-p", "benchmarks.gpu.outcomes", "-p", "no:cacheprovider",
                      "--continue-on-collection-errors", "-q", f"tests/test_{name}.py"]
path = folder / f"evidence-{sys.argv[2]}.jsonl"
machine = {"gpu": {"name": "Some GPU"}}
evidence.add(path, "run", date="2031-02-03T04:05:06Z", commit="0123456789ab", machine=machine, versions={},
             kernels=record.describe_kernels(Path(sys.argv[3])))
stages = [
    Stage("tests", {name: tests(name) for name in ("accept", "cache", "draft", "recall", "tree")}, 60,
          {"PASS_EXT_TEST_SECONDS": "2"}, restarts=3, fine=(0, 5), ended=(0, 5, 10)),
    Stage("bench_accept", {"accept": [sys.executable, "bench.py"]}, 10),
    Stage("sleeps", {"sleep": ["sleep", "600"]}, 1),
    Stage("elsewhere", {"x": ["false"]}, 1, impossible="no such tool"),
    Stage("cores", {"x": [sys.executable, "-c", CORES]}, 10, keeps_output=True),
    Stage("prints", {"x": ["echo", "a number: 7"]}, 10, keeps_output=True),
]
stages = [stage for stage in stages if stage.name in (sys.argv[4:] or [stage.name])]
os.environ["OMP_PROC_BIND"] = "true"  # what importing benchmarks does, and torch then binds this thread
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
sys.exit(0 if Runner(path, folder / "run.log", time.monotonic() + 100).run(stages) else 1)
"""


@pytest.fixture
def benchmarks_gpu():
    from benchmarks.gpu import record
    from benchmarks.harness import evidence

    return evidence, record


@pytest.fixture
def stand_in(tmp_path):
    """Makes a folder with the stand-ins and starts runs there."""
    (tmp_path / "tests").mkdir()
    for name, text in MODULES.items():
        lines = [line.removeprefix("        ") for line in text.splitlines()]
        (tmp_path / f"tests/test_{name}.py").write_text(HEAD + "\n".join(lines))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "bench.py").write_text(BENCH)
    (tmp_path / "run.py").write_text(RUN)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "WITNESS": str(tmp_path / "witness")}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # plugins take seconds to load

    def start(folder=tmp_path, *stages, **more):
        """Runs these stages, or all, with evidence in a folder and more in the environment."""
        command = [sys.executable, "run.py", folder, "1", ROOT, *stages]
        return subprocess.Popen(
            command, cwd=tmp_path, env=environment | more, stdout=subprocess.DEVNULL, start_new_session=True
        )

    return start


def outcomes_of(folder, evidence):
    outcomes = {}
    for path in sorted(folder.glob("evidence-*.jsonl")):
        outcomes |= evidence.outcomes(evidence.read(path), "tests")
    return outcomes


def witnessed(folder):
    text = (folder / "witness").read_text() if (folder / "witness").exists() else ""
    return [line.split() for line in text.splitlines()]


def test_a_run_gets_past_hanging_aborting_and_broken_tests(stand_in, tmp_path, benchmarks_gpu):
    evidence, record = benchmarks_gpu
    assert stand_in().wait(timeout=90) == 1
    outcomes = outcomes_of(tmp_path, evidence)
    assert outcomes == {
        **{f"tests/test_accept.py::test_many[{n}-cuda]": "failed" if n == 5 else "passed" for n in range(12)},
        **{f"tests/test_cache.py::test_middle_one_hangs[{n}-cuda]": "begun" if n == 1 else "passed" for n in range(3)},
        **{f"tests/test_draft.py::test_middle_one_aborts[{n}-cuda]": "begun" if n == 1 else "passed" for n in range(3)},
        **{
            f"tests/test_recall.py::test_first_one_makes_no_tensor[{n}-cuda]": ("nothing", "passed")[n]
            for n in range(2)
        },
        "tests/test_tree.py": "failed",
    }
    (merged,) = record.write(tmp_path)
    assert {name: state.split(",")[0] for name, state in merged["stages"].items()} == {
        "tests": "accept: failed with status 10; tree: failed with status 10",
        "bench_accept": "accept: failed with status 3",
        "sleeps": "sleep: cut off",
        "elsewhere": "left out: no such tool",
        "cores": "passed",
        "prints": "passed",
    }
    failed = {name: merged["kernels"][f"{name}.cuh"]["tests_failed"] for name in MODULES}
    assert failed == {"accept": 1, "cache": 1, "draft": 1, "recall": 0, "tree": 1}
    assert merged["kernels"]["recall.cuh"]["tests_passed"] == 1
    assert json.loads((tmp_path / "bench_accept.json").read_text())["rows"] == [0, 1, 2]
    texts = [fact["text"] for fact in evidence.read(tmp_path / "evidence-1.jsonl") if fact["kind"] == "text"]
    assert texts == [f"{len(os.sched_getaffinity(0)) > 1} False\n", "a number: 7\n"]
    assert "no such library" in (tmp_path / "run.log").read_text()


@pytest.mark.parametrize("seconds", [0.6, *(pytest.param(late, marks=pytest.mark.slow) for late in (1.2, 1.8))])
def test_a_killed_run_leaves_its_outcomes(stand_in, tmp_path, benchmarks_gpu, seconds):
    evidence, record = benchmarks_gpu
    process = stand_in()
    while len(witnessed(tmp_path)) < 4:  # pytest starts slowly, and on a busy machine its tests do
        assert process.poll() is None
        time.sleep(0.02)
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    process.wait()
    time.sleep(0.3)
    finished = witnessed(tmp_path)
    assert len(finished) > 3
    outcomes = outcomes_of(tmp_path, evidence)
    time.sleep(0.5)
    assert witnessed(tmp_path) == finished, "the tests died with the run"
    last = dict(finished)  # of each process: it may have been killed between witness and outcome
    for module, number in finished:
        (outcome,) = [o for test, o in outcomes.items() if f"{module}.py" in test and f"[{number}-" in test]
        other = {("test_accept", "5"): "failed", ("test_recall", "0"): "nothing"}
        assert outcome == other.get((module, number), "passed") or last[module] == number
    (merged,) = record.write(tmp_path)
    assert merged["kernels"]["accept.cuh"]["tests_passed"] > 0

    # The page shows the record, and the next run of this commit goes on, on another machine too.
    results = tmp_path / "root/benchmarks/results/some-gpu"
    results.mkdir(parents=True)
    (tmp_path / "root/csrc").symlink_to(ROOT / "csrc")
    (tmp_path / "verified-0123456789ab.json").rename(results / "verified-0123456789ab.json")
    page = [sys.executable, "-m", "benchmarks.pages.gpu_status", "--root", tmp_path / "root"]
    assert subprocess.run(page, cwd=ROOT).returncode == 0
    assert "accept.cuh" in (tmp_path / "root/benchmarks/results/gpu-status.md").read_text()
    other = tmp_path / "other"
    other.mkdir()
    stand_in(other, "tests", PASS_EXT_EARLIER=str(tmp_path)).wait(timeout=90)
    (other / "evidence-1.jsonl").rename(tmp_path / "evidence-2.jsonl")
    again = witnessed(tmp_path)[len(finished) :]
    passed = {tuple(line) for line in finished if line[1] != last[line[0]]} - {("test_accept", "5")}
    assert not passed & set(map(tuple, again)), "tests that passed are not run again"
    (merged,) = record.write(tmp_path)
    assert merged["kernels"]["accept.cuh"]["tests_passed"] == 11


def test_half_a_line_damages_no_other(tmp_path, benchmarks_gpu):
    evidence, _ = benchmarks_gpu
    path = tmp_path / "evidence-1.jsonl"
    evidence.add(path, "test", id="a")
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 2])
    evidence.add(path, "test", id="b")
    assert [fact["id"] for fact in evidence.read(path)] == ["a", "b"]


def test_a_tree_that_differs_from_its_commit_shares_nothing(tmp_path, benchmarks_gpu, monkeypatch):
    evidence, _ = benchmarks_gpu
    (tmp_path / "earlier").mkdir()
    paths = []
    for number, commit in enumerate(["0123456789ab", "0123456789ab-dirty", "unknown", "0123456789ab"]):
        paths.append(tmp_path / ("earlier" if number == 3 else "") / f"evidence-{number}.jsonl")
        evidence.add(paths[-1], "run", commit=commit)
    names = lambda path: [found.stem for found in evidence.of_same_commit(path)]  # noqa: E731
    assert names(paths[0]) == ["evidence-0"] and names(paths[1]) == names(paths[2]) == []
    monkeypatch.setenv(evidence.EARLIER, str(tmp_path / "earlier"))
    assert names(paths[0]) == ["evidence-0", "evidence-3"] and names(paths[1]) == []


def test_rows_are_appended_and_a_process_that_starts_again_starts_its_result(tmp_path, monkeypatch, benchmarks_gpu):
    """Each fact has what is new alone; of two runs of a commit the longer result stays."""
    evidence, record = benchmarks_gpu
    for number, (commit, lengths) in enumerate([("a", range(1, 401)), ("a", (3,)), ("b", (2,))]):
        path = tmp_path / f"evidence-{number}.jsonl"
        evidence.add(path, "run", commit=commit)
        time.sleep(0.002)  # runs are ordered by the millisecond
        monkeypatch.setenv(evidence.PATH, str(path))
        for _ in range(2):  # two processes
            monkeypatch.setattr(evidence, "_written", {})
            for length in lengths:
                result = {"quick": False, "commit": commit, "rows": [{"row": i} for i in range(length)], "last": length}
                evidence.add_result("kernel-time.json", result)
        assert evidence.results(evidence.read(path))["kernel-time.json"] == result
        assert len(record.results(tmp_path)["kernel-time.json"]["rows"]) == (400 if commit == "a" else 2)
    whole = len(json.dumps([{"row": i} for i in range(400)]))
    assert (tmp_path / "evidence-0.jsonl").stat().st_size < 60 * whole, (
        "written whole each time it is 400 times as much"
    )


def test_evidence_and_log_stay_below_what_comes_back(tmp_path, benchmarks_gpu, monkeypatch):
    """Long texts are cut, never outcomes; the log ends."""
    from benchmarks.gpu.runner import Runner

    evidence, _ = benchmarks_gpu
    monkeypatch.setattr(evidence, "ROOMY", 50_000)
    path = tmp_path / "evidence-1.jsonl"
    for number in range(200):
        evidence.add(path, "test", stage="tests", id=f"test_{number}", outcome="failed", reason="x" * 4000 + "the end")
    assert path.stat().st_size < 50_000 + 5_000 + 200 * 400
    facts = list(evidence.read(path))
    assert len(evidence.outcomes(facts, "tests")) == 200 and facts[-1]["reason"].endswith("the end")
    runner = Runner(path, tmp_path / "run.log", time.monotonic(), most_log=1_000)
    for _ in range(100):
        runner.say("a line of the log")
    assert 500 < (tmp_path / "run.log").stat().st_size <= 1_000


def test_a_run_whose_time_ends_in_the_middle_goes_on_in_another_folder(
    tmp_path, monkeypatch, benchmarks_gpu, capsys, request
):
    """The whole command on stand-ins: a stage that hangs is cut off with the run, and the next run begins with it."""
    import torch

    from benchmarks.gpu import __main__ as run
    from benchmarks.gpu import library, runner
    from benchmarks.gpu.runner import Stage
    from benchmarks.harness import machine

    evidence, record = benchmarks_gpu
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(library, "made_ready", lambda capability, seconds: f"carried here, for {capability}")
    monkeypatch.setattr(machine, "describe_machine", lambda: {"gpu": {"name": "Some GPU"}})
    monkeypatch.setattr(machine, "commit", lambda: "0123456789ab")
    monkeypatch.setattr(runner, "_LEAST", 0.2)
    for name in ("PYTHONPATH", "PASS_EXT_OUT", evidence.EARLIER):  # put back at the end
        monkeypatch.setenv(name, os.environ.get(name, ""))
    asleep = tmp_path / "asleep"
    asleep.touch()
    sleeps = ["sh", "-c", f"while [ -e {asleep} ]; do sleep 0.1; done"]
    stages = [
        Stage("first", {"x": ["true"]}, 10),
        Stage("crashes", {"x": ["sh", "-c", "kill -SEGV $$"]}, 10),
        Stage("hangs", {"x": ["sleep", "600"]}, 0.5),
        Stage("sleeps", {"x": sleeps}, 60),
        Stage("last", {"x": ["true"]}, 10),
    ]
    monkeypatch.setattr(run, "all_stages", lambda capability, families: stages)
    states = []
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a shell's background; what hangs must end at once
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, handler))
    for number, minutes in enumerate((17 / 60, 1)):  # a busy machine takes two seconds to the stage that sleeps
        out = tmp_path / f"out-{number}"
        monkeypatch.setenv("PASS_EXT_OUT", str(out))
        words = ["gpu", "--minutes", str(minutes), "--earlier", str(tmp_path / "out-0")]
        monkeypatch.setattr(sys, "argv", words if number else words[:3])
        assert run.main() == 1
        (path,) = out.glob("evidence-*.jsonl")
        assert evidence.run_of(path)["library"] == "carried here, for 9.0"
        ended = {fact["name"]: fact["state"] for fact in evidence.read(path) if fact["kind"] == "stage"}
        states.append(list(ended.values()))
        asleep.unlink(missing_ok=True)
        time.sleep(1)  # evidence is named by the second
    crashed, hung = "x: killed by signal -11", "x: cut off"
    assert states[0] == ["passed", states[0][1], hung, hung, "left out: no time"]
    assert states[1] == ["left out: passed in an earlier run", states[0][1], hung, "passed", "passed"]
    assert states[0][1] in (crashed, "x: killed by signal 11", "x: failed with status 139")
    kept = record.take_over(tmp_path, tmp_path / "root")
    assert kept == tmp_path / "root/benchmarks/results/some-gpu" and len([*kept.glob("evidence-*")]) == 4
    assert list(record.records(kept)[0]["stages"].values()) == states[1]


def test_the_command_at_the_end_writes_the_pages_and_commits(tmp_path, monkeypatch, benchmarks_gpu):
    """A page that fails commits nothing."""
    evidence, record = benchmarks_gpu
    root, out = tmp_path / "root", tmp_path / "out"
    for folder in (root / "benchmarks/results", root / "docs", out):
        folder.mkdir(parents=True)
    git = ["git", "-C", root, "-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    for key in ("GIT_AUTHOR", "GIT_COMMITTER"):
        monkeypatch.setenv(f"{key}_NAME", "a")
        monkeypatch.setenv(f"{key}_EMAIL", "a@b.c")
    path = out / "evidence-1.jsonl"
    facts = dict(commit="0123456789ab", date="2031-02-03T04:05:06Z", machine={"gpu": {"name": "Some GPU"}}, versions={})
    evidence.add(path, "run", **facts, kernels={})
    monkeypatch.setenv(evidence.PATH, str(path))
    evidence.add_result("large-model.json", {"quick": False, "rows": [1]})
    monkeypatch.setattr(sys, "argv", ["record", str(out), "--root", str(root), "--commit"])
    tracked = lambda: subprocess.run([*git, "ls-files"], capture_output=True, text=True).stdout.split()  # noqa: E731
    for fails in (True, False):
        pages = {True: "import sys; sys.exit(1)", False: "open('docs/page.md', 'w').write('a page')"}
        (root / "page.py").write_text(pages[fails])
        monkeypatch.setattr(record, "PAGES", ("page",))
        monkeypatch.setattr(record, "PAGE_OF_TIMES", "page")
        assert record.main() == fails
        assert bool(tracked()) != fails
    folder = "benchmarks/results/some-gpu"
    files = [
        f"{folder}/evidence-1.jsonl",
        f"{folder}/large-model.json",
        f"{folder}/verified-0123456789ab.json",
        "docs/page.md",
    ]
    assert tracked() == files  # here nothing ignores the evidence


def test_the_stages_name_existing_files_and_commands(benchmarks_gpu):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--list"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    from benchmarks.gpu.stages import BENCHES, FAMILIES, all_stages, files_of_families

    assert set(FAMILIES) == {path.stem.split("_")[0] for path in ROOT.glob("csrc/cuda/*.cu")} - {"debug"}
    assert all((ROOT / f"benchmarks/ops/{family}.py").exists() for family in BENCHES)
    files = files_of_families()
    assert all(files.values()) and "tests/decoding/test_generate.py" not in files["tree"]
    stages = {stage.name: stage for stage in all_stages("9.0")}
    names = list(stages)
    assert names[:4] == ["versions", "smoke", "tests", "memcheck"] and names.index("ncu") < names.index("tests-rest")
    assert len(set(names)) == len(all_stages("9.0"))
    assert sum(stages[name].seconds for name in names[: names.index("ncu") + 1]) < 720, "ten minutes, and a second run"
    of_all = [{*stages[name].jobs} | {*stages[f"{name}-rest"].jobs} for name in ("tests", "memcheck")]
    assert of_all[1] < of_all[0] and {"attention_group", "accept", "batch_invariant"} <= of_all[0]
    assert not {*stages["tests"].jobs} & {*stages["tests-rest"].jobs}
    few = {stage.name: stage for stage in all_stages("9.0", ["tree", "cache"])}
    assert [*few["tests"].jobs] == ["tree", "tree_class", "cache"] and "tests-rest" not in few
    with pytest.raises(SystemExit, match="no family trees; there are accept"):
        all_stages("9.0", ["trees"])
    from benchmarks.gpu.__main__ import chosen

    with pytest.raises(SystemExit, match="no stage ncx; there are versions"):
        chosen(all_stages("9.0"), "smoke,ncx")
