"""The release workflow: what it may do, that every wheel is checked before it is published, and its shell steps themselves.

Steps that need no network run here, in a folder with files of these names; the others are parsed by bash.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.paths import ROOT

from tools import release

FILE = ROOT / ".github" / "workflows" / "release.yml"
pytestmark = pytest.mark.skipif(not FILE.exists(), reason="not a checkout")

WORKFLOW = yaml.safe_load(FILE.read_text()) if FILE.exists() else {"jobs": {}}
JOBS = WORKFLOW["jobs"]
STEPS = {step["name"]: (job, step) for job in JOBS for step in JOBS[job]["steps"] if "run" in step}
NETWORK = {
    "Install what the sdist needs",
    "Install the CUDA compiler",
    "Install what the build needs",
    "Install the wheel",
    "Make the release",
}
MINUTES = {"Build the wheel"}  # of compiling; tests/package/test_build_matrix.py builds a wheel out of the sdist
INSTALLED = {"Call it", "See that CUDA loads", "Check it for manylinux_2_28"}  # by the steps of NETWORK
OFFLINE = {"Check the tag", "Write the notes", "Build the sdist", "Unpack the sdist", "Label the version"} | {
    "Check its size",
    "Write the checksums",
}
CHANGELOG = "# Changelog\n\nForm.\n\n## 0.1.0 (2026-12-01)\n\n### Decode\n\n- One.\n\n## 0.0.9 (2026-11-01)\n\n- Two.\n"
PROJECT = '[project]\nname = "pass_ext"\nversion = "0.1.0"\n\n[project.urls]\nRepository = "https://example.org"\n'


def bash(step, folder, **environment):
    """Runs a step as GitHub's runner does."""
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", STEPS[step][1]["run"]]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment |= {"PATH": path, "PYTHON": sys.executable, "HOME": str(folder)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture
def checkout(tmp_path):
    """What the offline steps read of a checkout, with a version of its own."""
    shutil.copytree(ROOT / "tools", tmp_path / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    return tmp_path


# ---- what it may do ----


@pytest.mark.parametrize("name", ["ci.yml", "release.yml"])
def test_every_action_is_pinned_to_a_commit_and_names_its_tag(name):
    used = re.findall(r"(?m)^ +- uses: (.*)$", FILE.with_name(name).read_text())
    assert used and [line for line in used if not re.fullmatch(r"[\w/.-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line)] == []


def test_only_the_jobs_that_publish_may_write_and_only_for_a_tag():
    assert WORKFLOW["permissions"] == {"contents": "read"}
    may = {name: job["permissions"] for name, job in JOBS.items() if "permissions" in job}
    assert may == {
        "release": {"attestations": "write", "contents": "write", "id-token": "write"},
        "index": {"id-token": "write"},
    }
    for name in may:
        assert JOBS[name]["if"] == "github.event_name == 'push' && github.ref_type == 'tag'"
    assert JOBS["index"]["environment"] == "pypi"
    assert "secrets." not in FILE.read_text(), "trusted publishing stores no token"


def test_no_expression_is_pasted_into_a_shell():
    """A tag or branch may be named so that it would be a command."""
    assert [name for name, (_, step) in STEPS.items() if "${{" in step["run"]] == []


def test_nothing_is_published_that_was_not_called_in_a_fresh_environment():
    wheels = {entry["name"] for entry in JOBS["wheel"]["strategy"]["matrix"]["include"]}
    assert set(JOBS["smoke"]["strategy"]["matrix"]["wheel"]) == wheels
    assert [JOBS[name].get("needs") for name in ("wheel", "smoke", "release", "index")] == [
        "sources",
        "wheel",
        "smoke",
        "release",
    ]


def test_the_index_gets_one_wheel_a_platform_without_a_label():
    entries = JOBS["wheel"]["strategy"]["matrix"]["include"]
    index = [entry for entry in entries if entry["name"].startswith("index-")]
    assert sorted(entry["arch"] for entry in index) == ["aarch64", "x86_64"]
    assert [bool(entry["label"]) for entry in entries] == [entry not in index for entry in entries]
    names = [(entry["arch"], entry["label"]) for entry in entries]
    assert len(set(names)) == len(names), "two wheels would have one file name"
    assert {entry["most_mb"] for entry in entries if not entry["cuda"]} == {12}
    assert {entry["most_mb"] for entry in entries if entry["cuda"]} == {60}


# ---- the shell steps ----


def test_every_step_is_known_to_this_file():
    assert set(STEPS) == NETWORK | MINUTES | INSTALLED | OFFLINE


@pytest.mark.parametrize("step", sorted(STEPS))
def test_bash_can_read_every_step(step):
    done = subprocess.run(["bash", "-n"], input=STEPS[step][1]["run"], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr


def test_the_tag_must_be_the_version_and_the_changelog_dated(checkout):
    assert bash("Check the tag", checkout, TAG="v0.1.0").returncode == 0
    other = bash("Check the tag", checkout, TAG="v0.1.1; true")
    assert other.returncode == 1
    assert other.stderr == ("release: the tag is v0.1.1; true, and pyproject.toml says 0.1.0: the tag must be v0.1.0\n")
    (checkout / "CHANGELOG.md").write_text(CHANGELOG.replace("(2026-12-01)", "(unreleased)"))
    undated = bash("Check the tag", checkout, TAG="v0.1.0")
    assert undated.returncode == 1
    assert "must begin with '## 0.1.0 (YYYY-MM-DD)', got '## 0.1.0 (unreleased)'" in undated.stderr
    (checkout / "CHANGELOG.md").write_text(CHANGELOG)
    (checkout / "pyproject.toml").write_text(PROJECT.partition("\n\n")[0])
    nowhere = bash("Check the tag", checkout, TAG="v0.1.0")
    assert nowhere.returncode == 1 and "in a section [project.urls]" in nowhere.stderr


def test_an_empty_section_is_not_released(checkout):
    (checkout / "CHANGELOG.md").write_text("# Changelog\n\n## 0.1.0 (2026-12-01)\n\n## 0.0.9 (2026-11-01)\n\n- Two.\n")
    assert bash("Check the tag", checkout, TAG="v0.1.0").stderr.endswith("the section 0.1.0 of CHANGELOG.md is empty\n")


def test_the_notes_are_the_newest_section(checkout):
    assert bash("Write the notes", checkout).returncode == 0
    assert (checkout / "notes.md").read_text() == "### Decode\n\n- One.\n"


def test_the_notes_of_this_checkout_are_its_whole_section(tmp_path):
    text = release.section(ROOT)[1]
    assert text in (ROOT / "CHANGELOG.md").read_text() and "\n## " not in text and len(text) > 100


def test_a_label_makes_another_file_name(checkout):
    (checkout / "source").mkdir()
    for name in ("tools", "pyproject.toml"):
        shutil.move(checkout / name, checkout / "source" / name)
    for _ in range(2):
        assert bash("Label the version", checkout, LABEL="cu130").returncode == 0
    assert release.version_of(checkout / "source") == "0.1.0+cu130"


def test_the_size_of_the_wheel_is_limited(checkout):
    (checkout / "wheels").mkdir()
    wheel = checkout / "wheels" / "pass_ext-0.1.0-py3-none-manylinux_2_28_x86_64.whl"
    for size, status in ((2_000_000, 0), (2_000_001, 1)):
        wheel.write_bytes(b"\0" * size)
        done = bash("Check its size", checkout, MOST_MB="2")
        assert (done.returncode, done.stdout) == (status, f"{wheel.name}: {size} bytes of at most 2 MB\n")


def test_the_checksums_are_those_of_all_files(checkout):
    names = ("pass_ext-0.1.0-py3-none-any.whl", "pass_ext-0.1.0.tar.gz")
    (checkout / "dist").mkdir()
    for name in names:
        (checkout / "dist" / name).write_text(name)
    assert bash("Write the checksums", checkout).returncode == 0
    lines = (checkout / "dist" / "SHA256SUMS").read_text().splitlines()
    assert lines == [f"{hashlib.sha256(name.encode()).hexdigest()}  {name}" for name in names]


def test_the_sdist_unpacks_into_sources_that_can_be_labelled(tmp_path):
    """The sdist of this checkout, as the steps build it, unpack it and read it."""
    pytest.importorskip("build", reason="build is in the extra pass_ext[dev]")
    for name in ("csrc", "pass_ext", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "conftest.py").touch()
    for name in (
        "setup.py",
        "pyproject.toml",
        "MANIFEST.in",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
    ):
        shutil.copy(ROOT / name, tmp_path / name)
    for step in ("Build the sdist", "Unpack the sdist", "Label the version"):
        done = bash(step, tmp_path, LABEL="cpu")
        assert done.returncode == 0, done.stdout + done.stderr
    assert release.version_of(tmp_path / "source") == release.version_of(ROOT) + "+cpu"
    assert (tmp_path / "source" / "csrc" / "schema.cpp").exists()
