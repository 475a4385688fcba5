"""Builds the documentation site: `python -m tools.site`, or `make docs`, which installs mkdocs-material first.

The pages lie where they always do, and link to sources and results anywhere in the repository. So README.md, docs/ and all that
they reach are copied in the repository's own folders; a source file becomes a page that shows it.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = Path("build/site")
FENCED = re.compile(r"(^ *```.*?^ *```$)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(\]\()([^()\s#]+)((?:#[^()\s]*)?\))")
RAW = {".json", ".png", ".svg", ".txt"}  # the browser shows these; other files become pages
LANGUAGES = {
    ".cpp": "cpp",
    ".cu": "cuda",
    ".cuh": "cuda",
    ".h": "cpp",
    ".py": "python",
    ".toml": "toml",
    ".yml": "yaml",
}
SECTIONS = {
    "docs/guide": "Guides",
    "docs/ops": "Ops",
    "docs": "Documentation",
    "benchmarks": "Measured",
    "pass_ext": "Shipped files",
    "": "Contribute",
}


def title_of(page: Path) -> str:
    """A page's first heading, without marks."""
    heading = re.search(r"^# (.*)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return re.sub(r"[`*]", "", heading[1]) if heading else page.stem


def target(page: Path, link: str, root: Path = ROOT) -> Path | None:
    """The file in the repository that a page's link leads to; a folder's is its README.md or __init__.py."""
    if re.match(r"\w+:", link):
        return None
    path = (page.parent / link).resolve()
    if path.is_dir():
        path = next((file for name in ("README.md", "__init__.py") if (file := path / name).exists()), path)
    return path if path.is_file() and path.is_relative_to(root) else None


def for_markdown(text: str) -> str:
    """GitHub's Markdown for Python-Markdown: a blank line before a list, four spaces for what is inside an item."""
    lines: list[str] = []
    listed = False
    for line in text.split("\n"):
        item = re.match(r"( *)([-*]|\d+\.) ", line)
        if item and lines and lines[-1].strip() and not listed:
            lines.append("")
        if item:
            listed = True
        elif line.strip() and not line.startswith(" "):
            listed = False
        indent = len(line) - len(line.lstrip(" "))
        inside = listed and indent >= 2 and line.strip()
        lines.append(" " * (4 * max(1, indent // 3 if indent != 2 else 1)) + line.lstrip(" ") if inside else line)
    return "\n".join(lines)


def copy(root: Path, pages: Path) -> list[Path]:
    """Copies README.md, docs/ and what they reach; returns the pages in the order in which they were met."""
    docs = root / "docs"
    waiting = [docs / "README.md", root / "README.md", *sorted(docs.rglob("*.md")), root / "CHANGELOG.md"]
    met: list[Path] = []
    for page in waiting:  # grows while it is read
        if page in met:
            continue
        met.append(page)

        def led(match: re.Match[str], page: Path = page) -> str:
            file = target(page, match[2], root)
            if file is None:
                return match[0]
            link = os.path.relpath(file, page.parent)
            if file.suffix == ".md":
                waiting.append(file)
                return f"{match[1]}{link}{match[3]}"
            copied = pages / file.relative_to(root)
            copied.parent.mkdir(parents=True, exist_ok=True)
            if file.suffix in RAW:
                shutil.copy(file, copied)
                return f"{match[1]}{link}{match[3]}"
            copied.with_name(copied.name + ".md").write_text(source_page(file, root))
            return f"{match[1]}{link}.md)"

        parts = FENCED.split(page.read_text())
        text = "".join(part if part.lstrip().startswith("```") else LINK.sub(led, for_markdown(part)) for part in parts)
        copied = pages / page.relative_to(root)
        copied.parent.mkdir(parents=True, exist_ok=True)
        copied.write_text(text)
        for picture in re.findall(r'src(?:set)?="([^":]+)"', text):
            if (file := target(page, picture, root)) is not None:
                (pages / file.relative_to(root)).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, pages / file.relative_to(root))
    return met


def source_page(file: Path, root: Path) -> str:
    """A page that shows a source file; the search leaves it out."""
    name = file.relative_to(root)
    fence = "`" * 6
    head = f"---\nsearch:\n  exclude: true\n---\n\n# {name}\n"
    return f"{head}\n{fence}{LANGUAGES.get(file.suffix, 'text')}\n{file.read_text()}\n{fence}\n"


def navigation(root: Path, met: list[Path]) -> list[dict[str, object]]:
    """The pages in sections, in the order and with the names of docs/README.md; other pages have their titles."""
    contents = root / "docs" / "README.md"
    links = re.findall(r"\[([^\]]+)\]\(([^()\s#]+)\)", contents.read_text())
    names = {file: name for name, link in links if link.endswith(".md") and (file := target(contents, link, root))}
    titles = [title_of(page) for page in met]
    sections: dict[str, list[dict[str, str]]] = {name: [] for name in SECTIONS.values()}
    for page in dict.fromkeys([*names, *met]):
        path = page.relative_to(root).as_posix()
        if path not in ("README.md", "docs/README.md", "CHANGELOG.md"):
            folder = next(folder for folder in SECTIONS if not folder or path.startswith(folder + "/"))
            name = names.get(page, ".md")
            if name.endswith(".md"):  # a path is no name
                title = title_of(page)
                name = f"{title} ({page.parent.name})" if titles.count(title) > 1 else title
            sections[SECTIONS[folder]].append({name[0].upper() + name[1:]: path})
    sections["Documentation"].insert(0, {"Overview": "docs/README.md"})
    sections["Contribute"].append({"Changelog": "CHANGELOG.md"})
    order = ("Documentation", "Guides", "Ops", "Measured", "Shipped files", "Contribute")
    home: list[dict[str, object]] = [{"Home": "README.md"}]
    return home + [{name: sections[name]} for name in order]


def main() -> int:
    """Builds the site; returns mkdocs' exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages-only", action="store_true", help="copy the pages, without mkdocs")
    options = parser.parse_args()
    out = ROOT / OUT
    shutil.rmtree(out, ignore_errors=True)
    (out / "pages").mkdir(parents=True)
    nav = navigation(ROOT, copy(ROOT, out / "pages"))
    shutil.copy(ROOT / "tools" / "site.css", out / "pages")
    settings = {"INHERIT": "../../mkdocs.yml", "docs_dir": "pages", "site_dir": "html", "nav": nav}
    (out / "mkdocs.yml").write_text(json.dumps(settings, indent=1))  # JSON is YAML
    if options.pages_only:
        return 0
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(out / "mkdocs.yml")]
    status = subprocess.run(command, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}).returncode
    print(f"The site is in {OUT}/html" if status == 0 else "The site was not built")
    return status


if __name__ == "__main__":
    sys.exit(main())
