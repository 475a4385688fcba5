"""Runs the op tests and random calls in both sanitized builds: ``make sanitize``.

Races do not depend on the instruction set, and ThreadSanitizer makes everything many times slower: it sees the best one only.
"""

import argparse
import sys
from pathlib import Path

from sanitize import HERE, ROOT, SANITIZERS, build, run

# Beside test_<family>.py. opcheck and the tests of torch.compile are left out: they call the same kernels.
MORE_TESTS = (
    "adapted_layer", "attention_codes", "attention_masks", "attention_merge", "attention_one_row", "attention_refusals",
    "logprobs", "lookahead_embedding", "kept_rows", "next_tree", "pages", "seed_stability", "support",
)  # fmt: skip

# Not compiled code, which calls the same kernels, and no test of times, which a sanitizer makes longer.
SELECTED = "not compile and not without_a_processor"


def op_tests() -> list[Path]:
    """The test files that call kernels with values of every kind: of every source in csrc/cpu that has one, and MORE_TESTS."""
    families = (path.stem for path in ROOT.glob("csrc/cpu/*.cpp"))
    return sorted(path for name in (*families, *MORE_TESTS) for path in (ROOT / "tests").rglob(f"test_{name}.py"))


def threads_of(sanitizer: str) -> int:
    return 4 if sanitizer == "thread" else 1


def pytest_of(sanitizer: str, files: list[Path], selected: str = SELECTED) -> list[object]:
    """The arguments of Python that run these test files."""
    device = "best-cpu" if sanitizer == "thread" else "cpu"
    pytest = ["-m", "pytest", "-c", ROOT / "pyproject.toml", "--rootdir", ROOT, "-p", "no:cacheprovider", "-q"]
    pytest += ["-o", "timeout=3600", "--capture", "sys"]  # a report is written by C, and would be lost
    return [*pytest, *files, "--device", device, "-m", "not slow", "-k", selected]


def random_calls(calls: int) -> list[object]:
    return [HERE / "fuzz_ops.py", "--calls", calls, "--seconds", 300]


def check(sanitizer: str, calls: int, selected: str) -> bool:
    """Builds, then runs both; prints the first that fails."""
    build(sanitizer)
    commands = {
        "is it in use?": ["-W", "ignore", "-c", f"import pass_ext; assert pass_ext.status().sanitize == {sanitizer!r}"],
        "the op tests": pytest_of(sanitizer, op_tests(), selected),
        "random calls": random_calls(calls),
    }
    for name, command in commands.items():
        print(f"== {sanitizer}: {name}", flush=True)
        if status := run(sanitizer, *command, threads=threads_of(sanitizer)):
            print(f"== {sanitizer}: {name} failed (exit status {status})", flush=True)
            return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m sanitize", description=__doc__)
    parser.add_argument("sanitizers", nargs="*", default=SANITIZERS, help=" and ".join(SANITIZERS))
    parser.add_argument("--calls", type=int, default=2200, help="random calls")
    parser.add_argument("-k", dest="selected", default=SELECTED, help="only these of the op tests, as in pytest")
    chosen = parser.parse_args()
    return 0 if all(check(sanitizer, chosen.calls, chosen.selected) for sanitizer in chosen.sanitizers) else 1


if __name__ == "__main__":
    sys.exit(main())
