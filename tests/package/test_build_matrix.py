"""The ways to build and install pass_ext, each in a fresh copy and a fresh environment, each followed by a call.

Also the stable ABI: one wheel, built from the sdist, runs on other Pythons and on older and newer torch. The first run
downloads those (gigabytes each) into build/matrix/, later runs find them there. Only `make test-all` runs this file.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from zipfile import ZipFile

import pytest
from support.paths import ROOT

CACHE = ROOT / "build" / "matrix"
# torch, and the preferred Python for it
OTHER_TORCH = [("2.10.0", "3.10"), ("2.11.0", "3.12"), ("2.14.1", "3.11"), ("2.15.0", "3.13")]
OURS = ("PASS_EXT_", "TORCH_CUDA_ARCH_LIST", "CUDA_HOME", "CUDA_PATH", "MAX_JOBS", "DEBUG", "PYTHONPATH")
SOURCES = ("csrc", "pass_ext", "setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on PATH")

SMOKE = Path(__file__).with_name("smoke.py").read_text()


def run(*command, fails=False, cwd=None, path=None, **environment):
    """Runs a command without the builder's own settings. Returns its whole output, which is shown if a test fails."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    inherited["PATH"] = path or f"{Path(sys.executable).parent}{os.pathsep}{inherited['PATH']}"
    done = subprocess.run(
        [str(part) for part in command],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=cwd, env=inherited | environment,
    )  # fmt: skip
    print(f"$ {' '.join(map(str, command))}\n{done.stdout}")
    assert (done.returncode != 0) == fails, done.stdout
    return done.stdout


def smoke(python, folder, *options):
    """Calls the op, forward and backward, against its specification; returns that process's report."""
    said = json.loads(run(python, "-W", "ignore", "-c", SMOKE, *options, cwd=folder).splitlines()[-1])
    assert said["without_kernel"] == []
    assert not (folder / "pass_ext").exists() or folder in Path(said["file"]).parents
    assert not said["context"]
    return said


def copy_sources(target):
    """The sources without anything that git ignores: never built in place."""
    ignored = shutil.ignore_patterns("*.so", "__pycache__", "_build_info.py")
    target.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, target / name)
    return target


@pytest.fixture
def checkout(tmp_path):
    return copy_sources(tmp_path / "checkout")


# ---- what a build needs ----


def path_without(*names, folder):
    """A PATH on which these names are missing and everything else is found."""
    folder.mkdir()
    for directory in [str(Path(sys.executable).parent), *os.environ["PATH"].split(os.pathsep)]:
        for program in Path(directory).glob("*"):
            link = folder / program.name
            if program.name not in names and not link.is_symlink():
                link.symlink_to(program)
    return str(folder)


def build(checkout, *, python=sys.executable, fails=False, **environment):
    """Builds the libraries of a checkout in place, as `pip install -e .` does."""
    return run(python, "setup.py", "build_ext", "--inplace", cwd=checkout, fails=fails, **environment)


def compiled_cuda(said):
    """The .cu that a build names: of those that are joined, the last."""
    return set(re.findall(r"compile .*/(csrc/cuda/\S+)", said))


def libraries(checkout):
    return sorted(library.name for library in (checkout / "pass_ext").glob("*.so"))


@needs_nvcc
def test_a_build_from_scratch_takes_less_than_90_s_on_two_cores(checkout):
    started = time.perf_counter()
    said = build(checkout, PASS_EXT_CUDA="1", TORCH_CUDA_ARCH_LIST="9.0", MAX_JOBS="2")
    seconds = time.perf_counter() - started
    print(f"CPU and sm_90 in {seconds:.0f} s")
    assert "pass_ext: CPU yes; CUDA yes (nvcc" in said
    assert "architectures 9.0)" in said
    assert libraries(checkout) == ["_C.so", "_C_cuda.so"]
    smoke(sys.executable, checkout)
    assert seconds < 90


@needs_nvcc
def test_a_second_build_compiles_nothing_and_a_touched_header_what_uses_it(checkout):
    options = {"PASS_EXT_CUDA": "1", "TORCH_CUDA_ARCH_LIST": "9.0"}
    first = compiled_cuda(build(checkout, **options))
    assert first
    assert "ninja: no work to do" in build(checkout, **options)
    (checkout / "csrc" / "cuda" / "runtime.h").touch()
    assert compiled_cuda(build(checkout, **options)) == first


@needs_nvcc
def test_cuda_0_builds_for_the_cpu_and_removes_an_older_cuda_library(checkout):
    (checkout / "pass_ext" / "_C_cuda.so").write_text("of an earlier build")
    said = build(checkout, PASS_EXT_CUDA="0")
    assert "pass_ext: CPU yes; CUDA no" in said
    assert libraries(checkout) == ["_C.so"]
    assert "this build of pass_ext has no CUDA kernels" in smoke(sys.executable, checkout)["reason"]


def test_cuda_1_without_nvcc_fails_with_the_three_ways_out(checkout, tmp_path):
    path = path_without("nvcc", folder=tmp_path / "path")
    said = build(checkout, fails=True, PASS_EXT_CUDA="1", path=path)
    assert said.endswith(
        "pass_ext: PASS_EXT_CUDA=1, but no nvcc was found. Either\n"
        "  install the CUDA toolkit (12.8 or newer) and put nvcc on PATH,\n"
        "  or set CUDA_HOME to the folder whose bin/ holds nvcc,\n"
        "  or set PASS_EXT_CUDA=0 for a CPU-only build.\n"
    )
    assert libraries(checkout) == []


def test_pip_shows_why_cuda_1_fails(checkout, tmp_path):
    path = path_without("nvcc", folder=tmp_path / "path")
    command = (sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-w", tmp_path, checkout)
    assert "or set PASS_EXT_CUDA=0 for a CPU-only build" in run(*command, fails=True, PASS_EXT_CUDA="1", path=path)


def test_auto_without_nvcc_builds_for_the_cpu_and_says_so(checkout, tmp_path):
    said = build(checkout, path=path_without("nvcc", folder=tmp_path / "path"))
    assert "pass_ext: CPU yes; CUDA no" in said
    assert libraries(checkout) == ["_C.so"]
    smoke(sys.executable, checkout)


@needs_nvcc
def test_auto_finds_nvcc_through_cuda_home_alone(checkout, tmp_path):
    home = tmp_path / "toolkit" / "bin"
    home.mkdir(parents=True)
    (home / "nvcc").write_text(f'#!/bin/sh\nexec "{shutil.which("nvcc")}" "$@"\n')
    (home / "nvcc").chmod(0o755)
    path = path_without("nvcc", folder=tmp_path / "path")
    said = build(checkout, CUDA_HOME=str(home.parent), TORCH_CUDA_ARCH_LIST="8.0+PTX", path=path)
    assert re.search(r"CUDA yes \(nvcc [\d.]+, architectures 8.0\+PTX\)", said)
    assert libraries(checkout) == ["_C.so", "_C_cuda.so"]


@pytest.mark.parametrize("value", ["yes", "2", ""])
def test_another_value_of_pass_ext_cuda_is_refused(checkout, value):
    said = build(checkout, fails=True, PASS_EXT_CUDA=value)
    assert said.endswith(f"pass_ext: PASS_EXT_CUDA must be auto, 1, 0 or native, got {value!r}\n")


@needs_nvcc
@pytest.mark.parametrize("value", ["9.9", "Hopper", "8.0,9.0", "90", "8.0;1.0"])
def test_an_unknown_architecture_is_refused_with_those_that_nvcc_knows(checkout, value):
    said = build(checkout, fails=True, TORCH_CUDA_ARCH_LIST=value)
    assert re.search(rf"TORCH_CUDA_ARCH_LIST names '{value.split(';')[-1]}'; \S*nvcc knows .*\b90, ", said)
    assert libraries(checkout) == []


@needs_nvcc
def test_without_an_architecture_list_every_default_that_nvcc_knows_is_built(checkout):
    said = build(
        checkout, fails=True, CXX="false", MAX_JOBS="1"
    )  # stops at the first file: its first message is enough
    architectures = re.search(r"architectures (.*)\)", said)[1].split()
    known = run("nvcc", "--list-gpu-arch")
    wanted = [
        arch for arch in ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0") if f"compute_{arch.replace('.', '')}" in known
    ]
    assert architectures == [*wanted[:-1], f"{wanted[-1]}+PTX"]


@pytest.mark.parametrize("cuda", ["0", pytest.param("1", marks=needs_nvcc)])
def test_a_path_with_spaces_builds_and_leaves_no_trace(tmp_path, cuda):
    checkout = copy_sources(tmp_path / "a folder with spaces")
    build(checkout, PASS_EXT_CUDA=cuda, TORCH_CUDA_ARCH_LIST="9.0")
    assert libraries(checkout) == ["_C.so", "_C_cuda.so"][: 1 + int(cuda)]
    smoke(sys.executable, checkout)
    assert "ninja: no work to do" in build(checkout, PASS_EXT_CUDA=cuda, TORCH_CUDA_ARCH_LIST="9.0")
    for library in libraries(checkout):
        assert b"with spaces" not in (checkout / "pass_ext" / library).read_bytes(), library


def test_a_debug_build_passes_the_smoke_call(checkout):
    build(checkout, DEBUG="1", TORCH_CUDA_ARCH_LIST="9.0")
    assert "debug = True" in (checkout / "pass_ext" / "_build_info.py").read_text()
    smoke(sys.executable, checkout)


def test_the_ninja_beside_this_python_is_used_when_path_has_none(checkout, tmp_path):
    if shutil.which("ninja", path=Path(sys.executable).parent) is None:
        pytest.skip("this environment has no ninja")
    build(checkout, PASS_EXT_CUDA="0", path=path_without("ninja", folder=tmp_path / "path"))
    assert libraries(checkout) == ["_C.so"]


# ---- environments ----


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """Links to all packages of this environment except pass_ext, so that torch is not installed once more."""
    folder = tmp_path_factory.mktemp("packages")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "pass_ext" not in entry.name and entry.suffix != ".pth":
            (folder / entry.name).symlink_to(entry)
    return folder


@pytest.fixture
def environment(tmp_path, packages):
    """A fresh environment of this Python that sees those packages; gives the path of its python."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "environment")
    python = tmp_path / "environment" / "bin" / "python"
    purelib = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    (Path(purelib) / "packages.pth").write_text(f"{packages}\n")
    return python


def pip(python, *arguments, **options):
    return run(sys.executable, "-m", "pip", "--python", python, *arguments, **options)


def check_uninstall(python, folder):
    pip(python, "uninstall", "-y", "pass_ext")
    assert "No module named 'pass_ext'" in run(python, "-c", "import pass_ext", cwd=folder, fails=True)


@pytest.mark.parametrize("editable", [(), ("-e",)], ids=["install", "editable"])
def test_pip_installs_a_checkout_into_an_environment_that_has_torch(checkout, environment, tmp_path, editable):
    pip(environment, "install", "--no-build-isolation", *editable, checkout, PASS_EXT_CUDA="0")
    home = checkout if editable else environment.parent.parent
    assert home in Path(smoke(environment, tmp_path)["file"]).parents
    assert "CPU kernels" in run(environment.with_name("pass_ext"), "info", cwd=tmp_path)
    check_uninstall(environment, tmp_path)


def test_a_build_without_torch_says_what_is_missing(checkout, packages, tmp_path):
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare")
    (tmp_path / "packages").mkdir()
    for name in ("setuptools", "_distutils_hack"):
        (tmp_path / "packages" / name).symlink_to(packages / name)
    python = tmp_path / "bare" / "bin" / "python"
    said = build(checkout, python=python, fails=True, PYTHONPATH=str(tmp_path / "packages"))
    assert "pass_ext: building needs torch>=2.10: pip install torch" in said


# ---- one wheel for all ----


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel built from the sdist, unpacked far from any checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    checkout = copy_sources(folder / "checkout")
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", folder, checkout)
    shutil.rmtree(checkout)
    (sdist,) = folder.glob("*.tar.gz")
    shutil.unpack_archive(sdist, folder / "unpacked")
    (sources,) = (folder / "unpacked").iterdir()
    options = ["--no-build-isolation", "--no-deps", "--no-cache-dir"]
    command = [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", folder / "wheel", sources]
    run(*command, TORCH_CUDA_ARCH_LIST="9.0+PTX")
    (built,) = (folder / "wheel").iterdir()
    return built


def test_the_wheel_is_for_every_python(wheel):
    tag = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
    assert re.fullmatch(rf"pass_ext-[\d.]+-{tag}\.whl", wheel.name)
    with ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/WHEEL")]
        lines = archive.read(name).decode().splitlines()
    assert f"Tag: {tag}" in lines
    assert "Root-Is-Purelib: false" in lines


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    kinds = (".py", ".typed", ".txt", ".md", ".safetensors")
    ours = {str(path.relative_to(ROOT)) for path in (ROOT / "pass_ext").rglob("*") if path.suffix in kinds}
    cuda = {"pass_ext/_C_cuda.so"} if shutil.which("nvcc") else set()
    with ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
        binaries = [archive.read(name) for name in inside if name.endswith(".so")]
    assert inside == ours | {"pass_ext/_build_info.py", "pass_ext/_C.so"} | cuda
    assert not any(str(wheel.parent.parent).encode() in binary for binary in binaries), "the build folder's name"


def test_the_wheel_runs_on_this_torch(wheel, environment, tmp_path):
    pip(environment, "install", "--no-deps", wheel)
    said = smoke(environment, tmp_path, "thorough")
    assert environment.parent.parent in Path(said["file"]).parents
    assert said["cuda_loaded"] == bool(said["torch_cuda"] and shutil.which("nvcc"))
    check_uninstall(environment, tmp_path)


def find_python(wished):
    """The preferred Python, or another one that all these torch support; from PATH or pyenv."""
    for version in dict.fromkeys([wished, "3.11", "3.12", "3.13"]):
        of_pyenv = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
        if found := of_pyenv or [path for path in [shutil.which(f"python{version}")] if path]:
            return version, found[0]
    pytest.skip(f"no Python {wished}, nor one from 3.11 to 3.13, found on PATH or in pyenv")


def environment_with(torch_version, wished_python):
    """The python of an environment with that torch from the package index, stored in build/matrix for the next run."""
    version, base = find_python(wished_python)
    folder = CACHE / f"torch-{torch_version}-python-{version}"
    python, complete = folder / "bin" / "python", folder / "complete"
    if not complete.exists():
        shutil.rmtree(folder, ignore_errors=True)
        CACHE.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(CACHE).free < 20e9:
            pytest.skip("an environment with another torch needs 20 GB of free disk")
        run(base, "-m", "venv", folder)
        # Constraints in this machine's pip configuration may name another torch.
        run(python, "-m", "pip", "install", f"torch=={torch_version}", PIP_CONSTRAINT=os.devnull)
        complete.touch()
    return python


@pytest.mark.parametrize(("torch_version", "python_version"), OTHER_TORCH, ids=lambda version: version)
def test_the_same_wheel_runs_on_other_torch(wheel, tmp_path, torch_version, python_version):
    python = environment_with(torch_version, python_version)
    run(python, "-m", "pip", "install", "--no-deps", "--force-reinstall", wheel)
    said = smoke(python, tmp_path, "thorough")
    print(said)
    assert said["torch"].split("+")[0] == torch_version
    assert CACHE in Path(said["file"]).parents
    assert said["cuda_loaded"] == bool(said["torch_cuda"] and shutil.which("nvcc")), said["reason"]
    check_uninstall(python, tmp_path)
