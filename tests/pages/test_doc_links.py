"""Links in Markdown: every file and every heading that a page points to is there."""

import re
import subprocess

import pytest
from support.paths import ROOT

FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def pages():
    """Every page of the repository, except in builds and environments."""
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True)
    names = listed.stdout.split() if listed.returncode == 0 else []
    return [ROOT / name for name in names] or [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]


def anchors_of(text):
    """The anchors that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", text), re.MULTILINE)
    plain = [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def dead_links(page):
    """The link targets of a page that do not exist."""
    dead = []
    for target in re.findall(r"\]\(([^()\s]+)\)", FENCED.sub("", page.read_text())):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors_of(file.read_text())):
            dead.append(target)
    return dead


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    assert dead_links(page) == []


def test_dead_links_are_found(tmp_path):
    (tmp_path / "b.md").write_text("# One `two`, three\n```\n# no heading\n```\n")
    (tmp_path / "a.md").write_text(
        "[1](b.md) [2](b.md#one-two-three) [3](c.md) [4](b.md#no-heading) [5](https://x.y/z)\n"
    )
    assert dead_links(tmp_path / "a.md") == ["c.md", "b.md#no-heading"]
