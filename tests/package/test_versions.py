"""Files that name a version of Python, torch, CUDA or pass_ext agree, by docs/install.md and pyproject.toml."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/install.md", "CONTRIBUTING.md", "CHANGELOG.md")
BUILD = ("setup.py", "csrc/build/toolkit.py", "pyproject.toml", "Makefile", ".github/workflows/ci.yml")
MATRIX = r'\("(\d\.\d+)\.\d+", "(3\.\d+)"\)'  # an entry of OTHER_TORCH: torch and Python

pytestmark = pytest.mark.skipif(not (ROOT / ".github").exists(), reason="not a checkout")


def read(*names):
    return "\n".join((ROOT / name).read_text() for name in names)


def found(pattern, *names):
    """All versions that the pattern finds; there must be some."""
    versions = re.findall(pattern, read(*names))
    assert versions, f"{pattern} is nowhere in {names}"
    return set(versions)


def supported(name):
    """The oldest and the newest version, from the table of docs/install.md."""
    ((oldest, newest),) = re.findall(rf"\| {name} \| ([\d.]+) – ([\d.]+) \|", read("docs/install.md"))
    return oldest, newest


def versions_tested(name):
    """The versions that the table of docs/install.md names as tested."""
    (versions,) = re.findall(rf"\| {name} \| [\d.]+ – [\d.]+ \| (.*?) \|", read("docs/install.md"))
    return set(re.findall(r"\d\.\d+", versions))


def minor(version):
    """Such as 2.13 of 2.13.0."""
    return ".".join(version.split(".")[:2])


def test_python():
    oldest, newest = supported("Python")
    assert found(r'requires-python = ">=([\d.]+)"', "pyproject.toml") == {oldest}
    assert found(r"Python (3\.\d+ to 3\.\d+)", *PAGES) == {f"{oldest} to {newest}"}
    assert found(r'target-version = "py3(\d+)"', "pyproject.toml") == {oldest.removeprefix("3.")}
    (of_ci,) = re.findall(r"python: \[(.*)\]", read(".github/workflows/ci.yml"))
    assert re.findall(r"[\d.]+", of_ci) == [oldest, newest]
    assert {python for _, python in found(MATRIX, "tests/package/test_build_matrix.py")} <= versions_tested("Python")
    assert found(r'python-version: "([\d.]+)"', ".github/workflows/ci.yml") <= {oldest, newest}


def test_torch():
    oldest, newest = supported("torch")
    assert found(r"torch ?(?:>=|≥) ?([\d.]*\d)", *PAGES, *BUILD) == {oldest}
    assert found(r"torch from ([\d.]*\d) on", "CONTRIBUTING.md") == {oldest}
    (target,) = found(r'TORCH_TARGET = "0x(\w{4})0{12}"', "setup.py")
    assert f"{int(target[:2], 16)}.{int(target[2:], 16)}" == oldest
    assert found(r'"torch_target": "([\d.]+)"', "setup.py") == {oldest}
    installed = set(map(minor, found(r"TORCH \?= torch==([\d.]+)", "Makefile")))
    matrix = {torch for torch, _ in found(MATRIX, "tests/package/test_build_matrix.py")}
    assert versions_tested("torch") == installed | matrix
    in_order = sorted(versions_tested("torch"), key=lambda version: tuple(map(int, version.split("."))))
    assert (in_order[0], in_order[-1]) == (oldest, newest)
    assert set(map(minor, found(r"torch==([\d.]+)", ".github/workflows/ci.yml"))) == {oldest}


def test_cuda():
    (oldest,) = found(r"CUDA toolkit \(([\d.]+) or newer\)", "csrc/build/toolkit.py")
    assert found(r"`nvcc` \(?([\d.]*\d) or newer", *PAGES) == {oldest}
    assert set(map(minor, found(r"nvidia/cuda:([\d.]+)-", ".github/workflows/ci.yml"))) == {oldest}


def test_the_changelog_begins_with_the_version_of_the_package():
    (version,) = found(r'(?m)^version = "([\d.]+)"', "pyproject.toml")
    assert re.findall(r"(?m)^## \[?([\w.]+)\]?", read("CHANGELOG.md"))[0] == version
    assert not re.findall(
        rf"\b{re.escape(version)}\b", read("setup.py", "pass_ext/__init__.py", "Makefile", "README.md")
    )
