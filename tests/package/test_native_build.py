"""Which libraries a build makes, keeps and deletes, with compilers that only write empty files: `make demo` and `make test`
share a checkout, and neither may destroy what the other needs, nor leave a library of other sources.
"""

import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="not a checkout")

COMPILER = f"""#!{sys.executable}
import os, sys
from pathlib import Path
words = sys.argv[1:]
if words == ["--list-gpu-arch"]:
    print("compute_80 compute_90 compute_100")
elif words == ["-V"]:
    print("release 12.8, V12.8.1")
else:
    source = next((word for word in words if word.endswith((".cpp", ".cu"))), "")
    if source.endswith(os.environ.get("BROKEN", "nothing is")):
        sys.exit(1)
    out = Path(words[words.index("-o") + 1])
    out.write_text(" ".join(words))
    if "-MF" in words:
        included = [word for before, word in zip(words, words[1:]) if before == "-include"]
        Path(words[words.index("-MF") + 1]).write_text(f"{{out}}: {{' '.join([source, *included])}}")
"""
FULL = {"PASS_EXT_CUDA": "auto", "TORCH_CUDA_ARCH_LIST": "8.0;9.0;10.0+PTX"}
NATIVE = {"PASS_EXT_CUDA": "native"}


class Machine:
    """A checkout of little C++ and CUDA, a torch, and compilers that compile nothing."""

    def __init__(self, folder):
        self.checkout, self.programs, self.torch = folder / "checkout", folder / "programs", folder / "lib" / "torch"
        for place in (self.checkout / "pass_ext", self.checkout / "csrc", self.programs, self.torch / "lib"):
            place.mkdir(parents=True)
        shutil.copytree(ROOT / "csrc" / "build", self.checkout / "csrc" / "build")
        for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, self.checkout / name)
        for name in ("schema.cpp", "cpu/a.cpp", "cuda/a.cu", "cuda/b.cu"):
            self.write(name)
        (self.torch / "__init__.py").touch()
        for name in ("nvcc", "g++"):
            self.program(name, COMPILER)

    def write(self, name):
        """A source file, newer than anything built before."""
        source = self.checkout / "csrc" / name
        source.parent.mkdir(exist_ok=True)
        source.touch()

    def program(self, name, text):
        (self.programs / name).write_text(text)
        (self.programs / name).chmod(0o755)

    def plug_in(self, *gpus):
        """GPUs, and a torch with CUDA."""
        lines = "\n".join(gpus)
        self.program("nvidia-smi", f"#!/bin/sh\ncat <<END\n{lines}\nEND\n")
        (self.torch / "lib" / "libtorch_cuda.so").touch()

    def build(self, *, fails=False, **settings):
        """What setup.py says."""
        ninja = Path(sys.executable).parent
        settings |= {"PATH": f"{self.programs}:{ninja}:/usr/bin:/bin", "PYTHONPATH": str(self.torch.parent)}
        done = subprocess.run(
            [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
            capture_output=True, text=True, cwd=self.checkout, env=settings,
        )  # fmt: skip
        print(done.stdout, done.stderr)
        assert (done.returncode != 0) == fails, done.stderr
        return done.stdout

    @property
    def architectures(self):
        """Those that the CUDA library was compiled for; None: there is no library."""
        library = self.checkout / "pass_ext" / "_C_cuda.so"
        (self.checkout / "pass_ext" / "_C.so").read_text()
        info = runpy.run_path(str(self.checkout / "pass_ext" / "_build_info.py"))
        assert bool(info["architectures"]) == bool(info["cuda"])
        assert library.exists() or not info["architectures"]
        return info["architectures"] if library.exists() else None


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def check_nothing_compiled(said):
    assert "compile" not in said and "link" not in said and said.count("ninja: no work to do") >= 1


def test_without_a_gpu_a_native_build_has_no_cuda(machine):
    assert "CUDA no (no GPU here" in machine.build(**NATIVE)
    assert machine.architectures is None


def test_a_torch_without_cuda_counts_as_no_gpu(machine):
    machine.plug_in("9.0")
    (machine.torch / "lib" / "libtorch_cuda.so").unlink()
    machine.build(**NATIVE)
    assert machine.architectures is None


@pytest.mark.parametrize(
    ("gpus", "wished", "architectures"),
    [
        (["9.0"], None, ["9.0"]),
        (["9.0", "8.0", "9.0"], None, ["8.0", "9.0"]),
        (["9.0"], "8.0+PTX", ["8.0+PTX"]),  # a list that the user gave
        (["7.5"], None, None),  # older than what the kernels need
        (["12.0"], None, None),  # newer than what nvcc knows
        (["7.5"], "8.0", None),
        (["No devices were found"], None, None),
    ],
)
def test_a_native_build_is_for_the_gpus_here(machine, gpus, wished, architectures):
    machine.plug_in(*gpus)
    machine.build(**NATIVE, **({"TORCH_CUDA_ARCH_LIST": wished} if wished else {}))
    assert machine.architectures == architectures


def test_a_full_build_after_a_native_one_adds_the_cuda_library_alone(machine):
    machine.build(**NATIVE)
    said = machine.build(**FULL)
    compiled = [line.split("csrc/")[-1] for line in said.splitlines() if "] compile" in line]
    assert sorted(compiled) == ["cuda/a.cu", "cuda/b.cu"], "in either order: two compilers run side by side"
    assert machine.architectures == ["8.0", "9.0", "10.0+PTX"]


def test_joined_files_are_one_and_compiled_again_when_any_of_them_changes(machine):
    for stem in ("adapter", "tree"):
        machine.write(f"cuda/{stem}.cu")
    machine.build(**FULL)
    objects = machine.checkout / "build" / "inplace" / "cuda" / "csrc" / "cuda"
    assert sorted(path.name for path in objects.glob("*.o")) == ["a.cu.o", "b.cu.o", "tree.cu.o"]
    machine.write("cuda/adapter.cu")
    said = machine.build(**FULL)
    assert [line.split("csrc/")[-1] for line in said.splitlines() if "] compile" in line] == ["cuda/tree.cu"]
    words = (objects / "tree.cu.o").read_text().split()
    assert words[words.index("-include") + 1] == str(machine.checkout / "csrc/cuda/adapter.cu")


@pytest.mark.parametrize("gpus", [[], ["8.0", "10.0"]])
def test_a_native_build_after_a_full_one_does_nothing(machine, gpus):
    machine.build(**FULL)
    if gpus:
        machine.plug_in(*gpus)
    check_nothing_compiled(machine.build(**NATIVE, MAX_JOBS="1"))
    assert machine.architectures == ["8.0", "9.0", "10.0+PTX"]
    check_nothing_compiled(machine.build(**FULL))


def test_a_full_library_without_code_for_the_gpu_here_is_built_for_it(machine):
    machine.build(PASS_EXT_CUDA="auto", TORCH_CUDA_ARCH_LIST="8.0+PTX")
    machine.plug_in("9.0")
    machine.build(**NATIVE)
    assert machine.architectures == ["9.0"]


@pytest.mark.parametrize("change", ["changed source", "new source", "deleted source", "setup.py", "another nvcc"])
def test_a_native_build_deletes_a_library_of_other_sources(machine, change):
    machine.build(**FULL)
    if change == "another nvcc":
        machine.program("nvcc", COMPILER.replace("12.8", "13.0"))
    elif change == "deleted source":
        (machine.checkout / "csrc" / "cuda" / "b.cu").unlink()
    elif change == "setup.py":
        text = (machine.checkout / "setup.py").read_text()
        (machine.checkout / "setup.py").write_text(text.replace("-fmad=false", "-fmad=true"))
    else:
        machine.write("cuda/a.cu" if change == "changed source" else "cuda/c.cu")
    machine.build(**NATIVE)
    assert machine.architectures is None


def test_cuda_0_deletes_even_a_current_library(machine):
    machine.build(**FULL)
    machine.build(PASS_EXT_CUDA="0")
    assert machine.architectures is None


def test_a_cuda_build_that_fails_leaves_no_library_of_the_sources_before(machine):
    machine.build(**FULL)
    machine.write("cuda/a.cu")
    machine.build(fails=True, BROKEN="a.cu", **FULL)
    assert not (machine.checkout / "pass_ext" / "_C_cuda.so").exists()
    machine.build(**NATIVE)
    assert machine.architectures is None
    machine.build(**FULL)
    assert machine.architectures == ["8.0", "9.0", "10.0+PTX"]


PYTHON = f"""#!/bin/sh
case "$2" in
pip) echo "pip for $PASS_EXT_CUDA, $TORCH_CUDA_ARCH_LIST: $*" ;;
pass_ext) echo "pass_ext $3" ;;
*) exec {sys.executable} "$@" ;;
esac
"""


def make(machine, target):
    """What make says; Python is this one, and pip installs nothing."""
    shutil.copy(ROOT / "Makefile", machine.checkout)
    python = machine.checkout / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True, exist_ok=True)
    (machine.checkout / "tests").mkdir(exist_ok=True)
    machine.program("python", PYTHON)
    shutil.copy(machine.programs / "python", python)
    (machine.checkout / ".venv" / ".torch").touch()
    settings = {"PATH": f"{machine.programs}:/usr/bin:/bin", "PYTHONPATH": str(machine.torch.parent)}
    command = ["make", target]
    done = subprocess.run(command, capture_output=True, text=True, cwd=machine.checkout, env=settings, check=True)
    print(done.stdout, done.stderr)
    return done.stdout


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_make_builds_for_the_demo_what_this_machine_can_load_and_for_the_tests_one_architecture(machine):
    ninja = shutil.which("ninja", path=Path(sys.executable).parent)
    if ninja is not None:
        (machine.programs / "ninja").symlink_to(ninja)
    said = make(machine, ".venv/.demo")
    assert "pip for native, : -m pip install" in said and machine.architectures is None
    said = make(machine, ".venv/.dev")
    assert "pip for , 9.0: -m pip install" in said, "pip would build something else"
    assert "compile" in said and "cpu/a.cpp" not in said
    assert machine.architectures == ["9.0"]
    said = make(machine, "build-demo")
    check_nothing_compiled(said)
    assert machine.architectures == ["9.0"]


def test_an_old_setuptools_is_named(tmp_path):
    """Ubuntu's 65 has no bdist_wheel: without the sentence its ModuleNotFoundError is all that one sees."""
    old = tmp_path / "setuptools"
    old.mkdir()
    (old / "__init__.py").write_text('__version__ = "65.5.0"')
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import runpy; runpy.run_path('setup.py')"],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 1
    assert "building needs setuptools>=77, got 65.5.0: pip install -U setuptools, or drop --no-build" in done.stderr
