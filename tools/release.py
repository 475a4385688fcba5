"""What a release needs to know of this checkout. It needs neither pass_ext nor torch.

`python -m tools.release check v0.1.0`   exit 1 unless tag, pyproject.toml, its address and CHANGELOG.md's head agree
`python -m tools.release notes`          prints that section, which becomes the text of the release
`python -m tools.release label cu130`    makes the version of pyproject.toml 0.1.0+cu130, for a wheel that no index takes
"""

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSION = re.compile(r'^version = "([^"]+)"$', re.MULTILINE)


def version_of(root: Path) -> str:
    """The version in pyproject.toml."""
    match = VERSION.search((root / "pyproject.toml").read_text())
    if match is None:
        raise SystemExit('pyproject.toml has no line: version = "…"')
    return match[1]


def section(root: Path) -> tuple[str, str]:
    """The heading and the text of the first section of CHANGELOG.md."""
    parts = re.split(r"(?m)^## (.*)$", (root / "CHANGELOG.md").read_text(), maxsplit=2)
    if len(parts) < 3:
        raise SystemExit("CHANGELOG.md has no section")
    return parts[1].strip(), parts[2].strip()


def check(root: Path, tag: str) -> str:
    """Why this tag cannot be released; '' if it can."""
    version, (heading, text) = version_of(root), section(root)
    if tag != f"v{version}":
        return f"the tag is {tag}, and pyproject.toml says {version}: the tag must be v{version}"
    if not re.fullmatch(rf"{re.escape(version)} \(\d{{4}}-\d\d-\d\d\)", heading):
        return f"CHANGELOG.md must begin with '## {version} (YYYY-MM-DD)', got '## {heading}'"
    if not re.search(r"(?m)^\[project\.urls\]$", (root / "pyproject.toml").read_text()):
        return "pyproject.toml must say where the project lives, in a section [project.urls]"
    return "" if text else f"the section {version} of CHANGELOG.md is empty"


def label(root: Path, name: str) -> None:
    """Adds a local part to the version in pyproject.toml."""
    version = f"{version_of(root).split('+')[0]}+{name}"
    file = root / "pyproject.toml"
    file.write_text(VERSION.sub(f'version = "{version}"', file.read_text(), count=1))


def main() -> int:
    """Carries out the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["check", "notes", "label"])
    parser.add_argument("word", nargs="?", default="", help="the tag, or the label")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout")
    options = parser.parse_args()
    if options.command == "notes":
        print(section(options.root)[1])
    elif options.command == "label":
        label(options.root, options.word)
    elif wrong := check(options.root, options.word):
        print(f"release: {wrong}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
