"""Runs the op tests and random calls in both sanitized builds: ``make sanitize``.

Races do not depend on the instruction set, and ThreadSanitizer makes everything many times slower: it sees the best one only.
"""

import argparse
import sys
from pathlib import Path

from sanitize import HERE, ROOT, SANITIZERS, build, run

# Beside test_<family>.py. opcheck and the tests of torch.compile are left out: they call the same kernels.
MORE_TESTS = (
    "adapted_layer", "attention_masks", "attention_merge", "attention_one_row", "attention_refusals", "lookahead_embedding",
    "next_rows", "next_tree", "seed_stability",
)  # fmt: skip


def op_tests() -> list[Path]:
    """The test files that call kernels with values of every kind: of every source in csrc/cpu that has one, and MORE_TESTS."""
    families = (path.stem for path in ROOT.glob("csrc/cpu/*.cpp"))
    return sorted(path for name in (*families, *MORE_TESTS) for path in (ROOT / "tests").rglob(f"test_{name}.py"))


def check(sanitizer: str, calls: int, selected: list[str]) -> bool:
    """Builds, then runs both; prints the first that fails."""
    build(sanitizer)
    threads, device = (4, "best-cpu") if sanitizer == "thread" else (1, "cpu")
    pytest = ["-m", "pytest", "-c", ROOT / "pyproject.toml", "--rootdir", ROOT, "-p", "no:cacheprovider", "-q"]
    pytest += ["-o", "timeout=3600", "--capture", "sys"]  # a report is written by C, and would be lost
    commands = {
        "is it in use?": ["-W", "ignore", "-c", f"import pass_ext; assert pass_ext.status().sanitize == {sanitizer!r}"],
        "the op tests": [*pytest, *op_tests(), "--device", device, "-m", "not slow", *selected],
        "random calls": [HERE / "fuzz_ops.py", "--calls", calls, "--seconds", 300],
    }
    for name, command in commands.items():
        print(f"== {sanitizer}: {name}", flush=True)
        if status := run(sanitizer, *command, threads=threads):
            print(f"== {sanitizer}: {name} failed (exit status {status})", flush=True)
            return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m sanitize", description=__doc__)
    parser.add_argument("sanitizers", nargs="*", default=SANITIZERS, help=" and ".join(SANITIZERS))
    parser.add_argument("--calls", type=int, default=2200, help="random calls")
    parser.add_argument("-k", dest="selected", help="only these of the op tests, as in pytest")
    chosen = parser.parse_args()
    selected = ["-k", chosen.selected or "not compile"]
    return 0 if all(check(sanitizer, chosen.calls, selected) for sanitizer in chosen.sanitizers) else 1


if __name__ == "__main__":
    sys.exit(main())
