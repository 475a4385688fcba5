"""Writes benchmarks/results/gpu-status.md: the content hash of each kernel file, and the GPU tests that ran with that content.

    a kernel file is verified on a GPU  =  a benchmarks/results/*/verified-<commit>.json has its hash, with tests and no failure

A kernel-code/same-code-<commit>.json can show that a file with another hash has the code of a verified one.

`python -m benchmarks.pages.gpu_status` writes the page, `--check` compares it and writes nothing.
"""

import argparse
import functools
import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.harness import markdown, template

PAGE = Path("benchmarks/results/gpu-status.md")
SAME_CODE = Path("benchmarks/results/kernel-code")
"""The folder of the records of benchmarks.gpu.same_code."""


def kernel_files(root: Path) -> list[Path]:
    """Every csrc/cuda/*.cuh, sorted by name."""
    return sorted((root / "csrc" / "cuda").glob("*.cuh"))


def with_headers(file: Path, root: Path) -> list[Path]:
    """The file and the project headers that it includes, directly or not, each once, in order of first mention."""
    files: dict[Path, None] = {}
    waiting = [file]
    while waiting:
        path = waiting.pop()
        if path in files:  # with all that it includes
            continue
        files[path] = None
        headers = (root / "csrc" / name for name in reversed(_included(path.read_text())))
        waiting += (header for header in headers if header.exists())
    return list(files)


@functools.cache  # a header has many users
def _included(text: str) -> list[str]:
    return re.findall(r'^\s*#\s*include\s+"([^"]+)"', text, flags=re.MULTILINE)


def content_hash(file: Path, root: Path) -> str:
    """The first 16 hex digits of the sha256 over the contents of `with_headers`, one after the other."""
    digest = hashlib.sha256()
    for path in with_headers(file, root):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def read_records(root: Path) -> list[dict[str, Any]]:
    """Every verified-<commit>.json, oldest first."""
    paths = sorted(root.glob("benchmarks/results/*/verified*.json"))
    return sorted((json.loads(path.read_text()) for path in paths), key=lambda record: record["date"])


def is_verified(entry: dict[str, Any]) -> bool:
    """True if tests of the kernel ran and none failed, by its entry in a record."""
    return bool(entry["tests_passed"] > 0 and entry["tests_failed"] == 0)


def read_same_code(root: Path) -> list[dict[str, Any]]:
    """Every same-code-<commit>.json, oldest first."""
    paths = sorted((root / SAME_CODE).glob("same-code-*.json"))
    return sorted((json.loads(path.read_text()) for path in paths), key=lambda record: record["date"])


def claims(name: str, current: str, records: list[dict[str, Any]], same: list[dict[str, Any]]) -> list[str]:
    """What was verified on a GPU about a kernel file whose hash is `current`, or about files whose code it has."""
    entries = [(record, record["kernels"][name]) for record in records if name in record["kernels"]]
    found = [
        _describe_run(record, entry) for record, entry in entries if is_verified(entry) and entry["hash"] == current
    ]
    if found:
        return found
    for i, code in enumerate(same):
        entry = code["kernels"].get(name, {})
        if entry.get("hash") != current:
            continue
        on_these = [record for record in records if runs(code["architecture"], record)]
        earlier = {file: claims(file, was, on_these, same[:i]) for file, was in entry["before"].items()}
        if all(earlier.values()):
            part = {file: "" if file == name else f" as part of {file}" for file in earlier}
            since = f", the same machine code since ({code['commit']})"
            return [f"{claim}{part[file]}{since}" for file, found in earlier.items() for claim in found]
    return []


def runs(architecture: str, record: dict[str, Any]) -> bool:
    """True if the GPU of a record runs machine code of this architecture, such as sm_90."""
    capability = record["machine"]["gpu"].get("compute_capability", "")
    return architecture == f"sm_{capability.replace('.', '')}"


def describe_state(name: str, current: str, records: list[dict[str, Any]], same: list[dict[str, Any]]) -> str:
    """The state of a kernel file whose hash is now `current`, for the page."""
    if found := claims(name, current, records, same):
        return "; ".join(found)
    verified = [record for record in records if name in record["kernels"] and is_verified(record["kernels"][name])]
    if verified:
        return f"not verified on a GPU since {verified[-1]['date'][:10]} ({verified[-1]['commit']})"
    return "not verified on a GPU"


def _describe_run(record: dict[str, Any], entry: dict[str, Any]) -> str:
    sanitized = [f"{count} under {tool}" for tool, count in entry["sanitized"].items()]
    failed = [f"{entry['failed_before']} failed in an earlier run"] if entry.get("failed_before") else []
    ran = ", ".join([f"{entry['tests_passed']} tests", *sanitized, *failed])
    return f"{record['date'][:10]}, {record['machine']['gpu']['name']}, commit {record['commit']}: {ran}"


def render(root: Path) -> str:
    """The page."""
    records, same = read_records(root), read_same_code(root)
    rows = []
    for file in kernel_files(root):
        current = content_hash(file, root)
        rows.append([str(file.relative_to(root)), current, describe_state(file.name, current, records, same)])
    return template.page(__file__, {}, kernels=markdown.table(["kernels", "hash", "on a GPU"], rows, left=3))


def main() -> int:
    """Entry point of `python -m benchmarks.pages.gpu_status`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where the page is out of date")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository")
    options = parser.parse_args()
    page, text = options.root / PAGE, render(options.root)
    if not options.check:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(text)
    elif not page.exists() or page.read_text() != text:
        print(
            f"{PAGE} does not show the kernels and records: run python -m benchmarks.pages.gpu_status", file=sys.stderr
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
