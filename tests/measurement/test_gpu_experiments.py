"""The library and the experiments of a GPU run, with stand-ins for its compiler, stamps and profile: builds with a switch."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.paths import ROOT

from benchmarks.gpu import large_model, library, stamps, variants


def stamped(*cycles, nanoseconds=1000):
    """The stamps of a block whose phases end after so many cycles; None: it does not have this phase."""
    begun = 5000
    ends = [(begun + end, 70_000 + nanoseconds * end // max(filter(None, cycles))) if end else (0, 0) for end in cycles]
    return [(begun, 70_000), *ends]


NOTHING = [(0, 0)] * len(stamps.PHASES)


def test_phases_are_those_of_the_block_that_walked():
    """2,000 cycles are 1 us: 500 of scanning are 0.25."""
    other = stamped(400, 900, None, None, None, None, None, None, None)
    walked = stamped(500, 700, 1500, None, None, None, 1600, 1610, 2000)
    assert stamps.phases_of([*other, *walked, *NOTHING]) == pytest.approx(
        {"scanned": 0.25, "last of row": 0.1, "described": 0.4, "last of step": 0.05, "divided": 0.005, "walked": 0.195}
    )
    for blocks in ([*other, *NOTHING], [*walked, *walked]):
        with pytest.raises(ValueError, match=r"one block must have walked, [02] have"):
            stamps.phases_of(blocks)


def test_the_names_of_phases_are_those_of_the_kernel():
    text = (ROOT / "csrc/cuda/rows.cuh").read_text()
    names = text.partition("enum class Phase {")[2].partition("}")[0].replace("\n", " ").split(",")
    assert [name.strip().replace("_", " ") for name in names] == [*stamps.PHASES, "count"]
    assert f"kStampedBlocks = {stamps.BLOCKS};" in text
    switches = " ".join(variants.VARIANTS.values()).replace("-D", "").split()
    kernels = "".join(path.read_text() for path in (ROOT / "csrc/cuda").glob("*.cuh"))
    assert all(switch.partition("=")[0] in kernels for switch in switches)


def test_stamps_are_read_through_the_library():
    def take(memory):
        memory[0], memory[1], memory[2 * stamps.BLOCKS * len(stamps.PHASES) - 1] = 7, 8, 9
        return 0

    read = stamps.take(SimpleNamespace(pass_ext_take_stamps=take))
    assert len(read) == stamps.BLOCKS * len(stamps.PHASES) and read[0] == (7, 8) and read[-1] == (0, 9)
    with pytest.raises(RuntimeError, match="cannot be read"):
        stamps.take(SimpleNamespace(pass_ext_take_stamps=lambda memory: 700))


def test_kernels_are_sorted_by_their_time():
    events = [
        SimpleNamespace(key=key, self_device_time_total=us, count=8) for key, us in (("a", 4), ("b", 8), ("c", 0))
    ]
    assert large_model.by_time(events, 4) == [
        {"kernel": "b", "us": 2.0, "launches": 2.0},
        {"kernel": "a", "us": 1.0, "launches": 2.0},
    ]


# ---- builds ----


@pytest.mark.parametrize(
    ("loaded", "built", "words"),
    [
        (True, ("8.0", "9.0"), ""),
        (True, ("9.0+PTX",), ""),
        (True, ("8.0+PTX",), "only PTX for 9.0"),
        (True, ("8.0", "10.0"), "must have machine code for 9.0, it has 8.0, 10.0"),
        (False, (), "does not load: no such file"),
    ],
)
def test_a_carried_library_that_does_not_fit_says_so(loaded, built, words):
    found = library.trouble("9.0", loaded, "no such file", built)
    assert words in found and bool(words) == bool(found)


STATUS = """
import types
def status():
    return types.SimpleNamespace(cuda_loaded=True, cuda_reason=None, cuda_architectures={})
"""
SETUP = """
import os, pathlib, sys
sys.exit(3) if os.path.exists("no-compiler") else None
assert sys.argv[1:] == ["build_ext", "--inplace"] and os.environ["PASS_EXT_CUDA"] == "1"
architectures = (os.environ["TORCH_CUDA_ARCH_LIST"],)
pathlib.Path("pass_ext/__init__.py").write_text(pathlib.Path("status.py").read_text().format(architectures))
"""


@pytest.mark.parametrize(
    ("package", "words"),
    [
        (STATUS.format(("9.0",)), None),
        (STATUS.format(("8.0",)), "it must have machine code for 9.0, it has 8.0"),
        ("raise ImportError('libc.so.6: version GLIBC_2.40 not found')", "GLIBC_2.40 not found"),
        ("import os; os.abort()", "loading it ends with status -6"),
        ("import time; time.sleep(60)", "it does not load within 2 s"),
    ],
    ids=["fits", "another GPU", "another Linux", "dies", "hangs"],
)
def test_a_carried_library_that_cannot_be_used_is_built(tmp_path, monkeypatch, package, words):
    """Whatever it does to the process that loads it."""
    (tmp_path / "pass_ext").mkdir()
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    (tmp_path / "pass_ext/__init__.py").write_text(package)
    (tmp_path / "status.py").write_text(STATUS)
    (tmp_path / "setup.py").write_text(SETUP)
    monkeypatch.setattr(library, "LOAD_SECONDS", 2.0 if "sleep" in package else 60.0)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # the package changes within a second
    if words is None:
        assert library.made_ready("9.0", tmp_path) == "carried here"
        return
    (tmp_path / "no-compiler").touch()
    with pytest.raises(SystemExit, match=r"(?s)and building it: .* exit status 3"):
        library.made_ready("9.0", tmp_path)
    (tmp_path / "no-compiler").unlink()
    how = library.made_ready("9.0", tmp_path)
    assert how.startswith("built here: ") and words in how
    (tmp_path / library.OBJECTS).parent.mkdir(parents=True)
    (tmp_path / library.OBJECTS).touch()
    assert library.made_ready("9.0", tmp_path) == "built here: its objects lie here"  # it may be older than the sources


def test_a_run_begins_where_pass_ext_cannot_be_imported(tmp_path):
    """All that comes before the library is built imports without it."""
    (tmp_path / "pass_ext").mkdir()
    (tmp_path / "pass_ext/__init__.py").write_text("raise ImportError('not built')")
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    command = [sys.executable, "-c", "from benchmarks.gpu.__main__ import all_stages; all_stages('9.0')"]
    subprocess.run(command, cwd=tmp_path, check=True)


COMPILER = """#!/bin/sh
# Appends its options to the output: compiler and linker of one library.
while [ $# -gt 0 ]; do
  case $1 in -o) out=$2; shift ;; *) words="$words $1" ;; esac; shift
done
echo "$words" > "$out"
"""


def test_a_variant_compiles_one_file_and_links_the_objects_of_the_ordinary_build(tmp_path):
    from benchmarks import ROOT as REPOSITORY

    sys.path.append(str(REPOSITORY / "csrc" / "build"))
    from ninja_build import build_file

    (tmp_path / "pass_ext" / "ops").mkdir(parents=True)
    for name in ("__init__.py", "_C.so", "_C_cuda.so"):
        (tmp_path / "pass_ext" / name).write_text(name)
    cuda, compiler = tmp_path / "build" / "inplace" / "cuda", tmp_path / "nvcc"
    cuda.mkdir(parents=True)
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    sources = ["csrc/cuda/accept.cu", "csrc/cuda/draft.cu"]
    for source in sources:
        (tmp_path / source).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / source).write_text("")
    text = build_file(
        tmp_path, f"touch $out.d; {compiler} -O3 -c $in -o $out", f"{compiler} -shared $in -o $out", sources,
        tmp_path / "pass_ext" / "_C_cuda.so",
    )  # fmt: skip
    (cuda / "build.ninja").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        subprocess.run(["ninja", "-C", cuda], check=True, capture_output=True)
        variants.build("twice", tmp_path)
        (tmp_path / "pass_ext" / "later.py").write_text("")
        variants.build("twice", tmp_path)
    folder = variants.folder_of("twice", tmp_path)
    compiled = (folder / "csrc/cuda/accept.cu.o").read_text()
    assert compiled == f" -O3 -DPASS_EXT_STAMPS -DPASS_EXT_FINISH_TWICE -c {tmp_path}/csrc/cuda/accept.cu\n"
    assert not (folder / "csrc/cuda/draft.cu.o").exists()
    linked = (folder / "pass_ext" / "_C_cuda.so").read_text()
    assert linked == f" -shared csrc/cuda/accept.cu.o {cuda}/csrc/cuda/draft.cu.o\n"
    assert (tmp_path / "pass_ext" / "_C_cuda.so").read_text() != linked
    links = {path.name for path in (folder / "pass_ext").iterdir() if path.is_symlink()}
    assert links == {"__init__.py", "_C.so", "ops", "later.py"}
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    assert (variants.folder_of("twice", moved) / "pass_ext" / "__init__.py").read_text() == "__init__.py"
    shutil.rmtree(moved / cuda.relative_to(tmp_path))
    tmp_path = moved
    with pytest.raises(SystemExit, match="build first"):
        variants.build("twice", tmp_path)


def test_a_process_of_a_variant_imports_its_package(tmp_path):
    """Python takes a module from the working folder before PYTHONPATH."""
    from benchmarks.gpu import stages

    folder = tmp_path / "stamps"
    (folder / "pass_ext").mkdir(parents=True)
    (folder / "pass_ext" / "__init__.py").write_text("")
    (folder / "where.py").write_text("import pass_ext, benchmarks; print(pass_ext.__file__, benchmarks.__file__)")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "folder_of", lambda name: tmp_path / name)
        command = stages._by_variant("stamps", "where")
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert said == [str(folder / "pass_ext/__init__.py"), str(ROOT / "benchmarks/__init__.py")]


def test_the_ordinary_library_is_never_timed_as_a_variant(tmp_path):
    """Where a link of the variant leads nowhere, Python would find the package of PYTHONPATH."""
    from benchmarks.gpu import stages

    ordinary, folder = tmp_path / "ordinary" / "pass_ext", tmp_path / "twice" / "pass_ext"
    for package in (ordinary, folder):
        package.mkdir(parents=True)
    (ordinary / "__init__.py").write_text("")
    (folder / "__init__.py").symlink_to(tmp_path / "elsewhere")
    program = tmp_path / "where.py"
    program.write_text("from benchmarks.gpu.variants import check_imported; check_imported(); print('the right one')")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "folder_of", lambda name: tmp_path / name)
        patch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ordinary.parent), str(ROOT)]))
        patch.setattr(stages, "ROOT", tmp_path)
        command = stages._by_variant("twice", "where")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and f"it comes from {ordinary}" in done.stderr
    (folder / "__init__.py").unlink()
    (folder / "__init__.py").symlink_to("../../ordinary/pass_ext/__init__.py")
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout == "the right one\n"


def test_experiments_need_the_objects_of_a_build(monkeypatch, tmp_path):
    from benchmarks.gpu import stages

    for exists in (True, False):
        monkeypatch.setattr(stages, "OBJECTS", (tmp_path / "build.ninja") if exists else tmp_path / "nothing")
        (tmp_path / "build.ninja").touch()
        states = {stage.name: stage.impossible for stage in stages._experiments()}
        assert [bool(state) for state in states.values()] == [not exists] * 3
        assert [*states] == ["variants", "stamps", "twice"]


def test_the_profiled_cases_exist():
    from benchmarks.gpu import profiled, stages

    assert {*stages.PROFILED, *stages.PROFILED_LATER} == {*profiled.CASES}


def test_trained_slots_are_raced_on_the_prompts(monkeypatch, tmp_path):
    """On a tiny model whose slots are its own table's: the same texts by every contender, kept after each prompt."""
    pytest.importorskip("transformers")
    from support.small_models import small_model

    from benchmarks.decoding.prompts import Prompt
    from benchmarks.gpu import trained
    from benchmarks.harness import evidence

    model = small_model("llama")
    table = model.get_input_embeddings().weight
    make = trained.LookaheadEmbedding.from_table
    monkeypatch.setattr(trained.LookaheadEmbedding, "from_pretrained", lambda name: make(3, table.detach()))
    monkeypatch.setattr(
        trained, "read_prompts", lambda domain, *_: [Prompt(domain, "a", (1, 2, 3)), Prompt(domain, "b", (4, 5))]
    )
    path = tmp_path / "evidence-1.jsonl"
    monkeypatch.setenv(evidence.PATH, str(path))
    result = trained.measure(model, None, 60, tokens=8)
    assert len(result["runs"]) == 6 * 4 and all(run["differs_at"] is None for run in result["runs"])
    names = {run["contender"] for run in result["runs"]}
    assert names == {"Plain", "PaSS, one pass", "PaSS, two passes", "transformers"}
    kept = evidence.results(evidence.read(path))[trained.FILE]
    assert kept["runs"] == result["runs"]


def test_texts_that_differ_are_told(monkeypatch):
    """The same methods on the CPU write the same texts; a method whose texts are others is named."""
    pytest.importorskip("transformers")
    from benchmarks.gpu import texts

    assert texts.of_family("llama", "cpu") == "same"
    chosen = texts.methods

    def other(model, draft):
        model.get_output_embeddings().weight.data.neg_()
        return {"NGram": chosen(model, draft)["NGram"]}

    monkeypatch.setattr(texts, "methods", other)
    assert texts.of_family("llama", "cpu") == "NGram: 4 of 4 greedy texts are not the CPU's"
