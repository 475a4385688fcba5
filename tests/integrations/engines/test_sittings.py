"""`make test-engines` goes on where it stopped: tests that have passed are not run again."""

import shutil
import subprocess
import sys
from pathlib import Path

TESTS = """
from pathlib import Path

def test_good():
    pass

def test_not_yet():
    assert Path("mended").exists()
"""


def test_what_has_passed_is_not_run_again(tmp_path):
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "test_both.py").write_text(TESTS)

    def outcomes():
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--sittings",
            "passed",
            "test_both.py",
        ]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        names = [line.split(" ", 1)[1] for line in (tmp_path / "passed").read_text().splitlines()]
        return next(line[:2] for line in done.stdout.splitlines() if line.endswith("%]")), names, done.stdout

    good, not_yet = "test_both.py::test_good", "test_both.py::test_not_yet"
    assert outcomes()[:2] == (".F", [good])
    assert outcomes()[:2] == ("sF", [good])
    (tmp_path / "mended").touch()
    dots, names, text = outcomes()
    assert (dots, names) == ("s.", [good, not_yet])
    assert "In all sittings 2 tests have passed" in text
