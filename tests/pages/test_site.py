"""The site's pages as tools/site.py copies them: all are reached, their links lead to copies, and lists stay lists."""

import re
import shutil
import subprocess

import pytest
import yaml
from support.paths import ROOT

from tools import site

pytestmark = pytest.mark.skipif(not (ROOT / "mkdocs.yml").exists(), reason="not a checkout")


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """The folder of the copies, and the pages in the order in which they were met."""
    pages = tmp_path_factory.mktemp("pages")
    return pages, site.copy(ROOT, pages)


def test_every_page_of_docs_is_copied_and_stands_once_in_the_navigation(copied):
    pages, met = copied
    navigation = site.navigation(ROOT, met)
    listed = [path for section in navigation for entry in section.values() for path in paths_of(entry)]
    wanted = {page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").rglob("*.md")} | {
        "README.md",
        "CHANGELOG.md",
    }
    assert wanted <= set(listed) and len(set(listed)) == len(listed)
    assert [path for path in listed if not (pages / path).exists()] == []


def paths_of(entry):
    return [entry] if isinstance(entry, str) else [path for page in entry for path in page.values()]


def test_the_navigation_has_the_order_of_the_contents_page(copied):
    _, met = copied
    (guides,) = [section["Guides"] for section in site.navigation(ROOT, met) if "Guides" in section]
    links = re.findall(r"\]\((guide/[^)#]+)\)", (ROOT / "docs" / "README.md").read_text())
    in_order = [f"docs/{link}" for link in dict.fromkeys(links)]
    assert len(in_order) > 3 and paths_of(guides)[: len(in_order)] == in_order


def test_every_link_of_a_copy_leads_to_a_copy(copied):
    pages, _ = copied
    dead = []
    for page in pages.rglob("*.md"):
        text = site.FENCED.sub("", page.read_text()) if not page.name.endswith(".py.md") else ""
        links = re.findall(r"\]\(([^()\s#]+)[^()\s]*\)", text) + re.findall(r'src(?:set)?="([^":]+)"', text)
        dead += [(page.name, link) for link in links if ":" not in link and not (page.parent / link).exists()]
    assert dead == []


def test_a_source_file_becomes_a_page_that_the_search_leaves_out(copied):
    page = (copied[0] / "pass_ext" / "reference" / "accept.py.md").read_text()
    head, text = page.split("# pass_ext/reference/accept.py\n")
    assert yaml.safe_load(head.strip("-\n")) == {"search": {"exclude": True}}
    assert (ROOT / "pass_ext" / "reference" / "accept.py").read_text() in text and "``````python\n" in text


@pytest.mark.parametrize(
    ("github", "python_markdown"),
    [
        ("Text:\n- a\n- b", "Text:\n\n- a\n- b"),
        ("- a\n  goes on\n- b", "- a\n    goes on\n- b"),
        ("- a\n  - inner\n- b\n\nText", "- a\n    - inner\n- b\n\nText"),
        ("1. a\n   goes on\n2. b", "1. a\n    goes on\n2. b"),
        ("1. a\n\n   ![picture](a.svg)\n", "1. a\n\n    ![picture](a.svg)\n"),
        ("a - b\n  c", "a - b\n  c"),
    ],
)
def test_lists_are_written_as_the_sites_markdown_reads_them(github, python_markdown):
    assert site.for_markdown(github) == python_markdown


def test_a_links_folder_is_its_page(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "__init__.py").touch()
    assert site.target(tmp_path / "page.md", "a", tmp_path) == tmp_path / "a" / "__init__.py"
    assert site.target(tmp_path / "page.md", "https://x.y/a", tmp_path) is None
    assert site.target(tmp_path / "a" / "page.md", "../../b", tmp_path) is None


def test_the_citation_names_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    (version,) = re.findall(r'(?m)^version = "([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert citation["version"] == version and citation["license"] == "Apache-2.0"


@pytest.mark.slow
def test_mkdocs_builds_the_site_without_a_warning():
    """Also every anchor: a warning ends a strict build. `make docs` sets up what it needs."""
    python = ROOT / ".venv-docs" / "bin" / "python"
    if not python.exists() or shutil.which("make") is None:
        pytest.skip("make docs was not run here")
    done = subprocess.run([python, "-m", "tools.site"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    assert (ROOT / site.OUT / "html" / "search" / "search_index.json").stat().st_size > 100_000
