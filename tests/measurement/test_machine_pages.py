"""Pages of results: each machine's page shows its result, and one that does not is named."""

import pytest
from support.paths import ROOT

if not (ROOT / "benchmarks").exists():
    pytest.skip("an sdist has no benchmarks", allow_module_level=True)

from benchmarks.grammar import page as grammar
from benchmarks.harness import by_machine
from benchmarks.pages import batches, heads, hybrid, trained_head
from benchmarks.pages.lookahead import slots
from benchmarks.serving import page as serving

RESULTS = ROOT / by_machine.RESULTS
PAGES = {
    "batches": batches, "grammar*": grammar, "heads": heads, "hybrid": hybrid, "serving": serving, "slots": slots,
    "trained-head": trained_head,
}  # fmt: skip

pytestmark = pytest.mark.skipif(not RESULTS.exists(), reason="an sdist has no results")


@pytest.mark.parametrize("name", PAGES)
def test_the_pages_show_the_results(name, tmp_path):
    found = sorted(RESULTS.glob(f"*/{name}.json"))
    assert found, "measured on no machine"
    assert by_machine.write_pages(name, PAGES[name].render, check=True) == []
    folder = tmp_path / by_machine.RESULTS / "machine"
    folder.mkdir(parents=True)
    (folder / found[0].name).write_text(found[0].read_text())
    page = (folder / found[0].name).with_suffix(".md")

    def written(check):
        return by_machine.write_pages(name, PAGES[name].render, check=check, root=tmp_path)

    wrong = [f"benchmarks/results/machine/{page.name} does not show {found[0].name}"]
    assert written(check=True) == wrong, "no page yet"
    assert written(check=False) == written(check=True) == []
    assert page.read_text() == found[0].with_suffix(".md").read_text()
    page.write_text(page.read_text() + " ")
    assert written(check=True) == wrong


def test_what_is_wrong_is_said_with_the_command(capsys):
    assert by_machine.say([]) == 0
    assert by_machine.say(["a page does not show a result"], "benchmarks.x") == 1
    assert capsys.readouterr().err == "a page does not show a result: run python -m benchmarks.x\n"
