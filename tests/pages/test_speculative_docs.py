"""docs/guide/speculative.md and its block in README.md: they run, on a small pair of models, and give the target's own text;
the page's table is that of its script, its picture shows its tree, and it names every setting.
"""

import inspect
import re

import pytest
import torch
from support.code_blocks import blocks_of, run_blocks

import pass_ext

pytest.importorskip("transformers")

from support.generation import disturbed, replace_shipped_slots
from support.paths import ROOT
from support.small_models import prompts, small_model

PAGE, README = ROOT / "docs/guide/speculative.md", ROOT / "README.md"

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="an sdist has no docs")


@pytest.fixture
def names(monkeypatch, tmp_path, one_thread):
    """A target, a draft, a prompt, and slots that fit in place of the shipped ones."""
    monkeypatch.setenv("PASS_EXT_CACHE", str(tmp_path))
    model = small_model("llama")
    replace_shipped_slots(monkeypatch, model)
    return dict(model=model, draft_model=disturbed(model, 0.06), input_ids=prompts(1, 9)[0])


def test_the_blocks_of_the_page_run(names, capsys, monkeypatch):
    """Every text that a block calls `result` is the target's own, except under the approximate rule."""
    blocks = [block for block in blocks_of(PAGE) if block[0] == "python"]
    assert len(blocks) == 9
    want = names["model"].generate(names["input_ids"], max_new_tokens=200, do_sample=False)
    asked, compared = [], 0
    original = pass_ext.generate

    def remember(model, ids, method=None, **options):
        made = original(model, ids, method, **options)
        asked.append((made.sequences, options))
        return made

    monkeypatch.setattr(pass_ext, "generate", remember)
    for block in blocks:
        run_blocks(PAGE, [block], names)
    for sequences, options in asked:
        if options.get("temperature", 0) == 0:
            assert torch.equal(sequences, want[:, : sequences.shape[1]])
            compared += 1
        elif "rule" not in options:
            plain = original(names["model"], names["input_ids"], **options)
            assert torch.equal(sequences, plain.sequences)
            compared += 1
    assert len(asked) == 12 and compared == 9
    assert {options.get("rule") for _, options in asked} == {None, "block", "kseq", "longest_branch"}
    assert re.search("drafts accepted|plain decoding", capsys.readouterr().out), "a plan is shown"


def test_the_block_of_the_readme_runs(names):
    block = next(block for block in blocks_of(README) if "MultiCandidate" in block[1])
    names["pass_ext"] = pass_ext  # imported by the block before
    run_blocks(README, [block], names)
    want = names["model"].generate(names["input_ids"], max_new_tokens=200, do_sample=False)
    assert torch.equal(names["result"].sequences, want)


def test_the_page_names_every_argument_of_the_methods():
    page = PAGE.read_text()
    for method in (pass_ext.Speculative, pass_ext.MultiCandidate):
        shown = re.search(rf"`({method.__name__}\(draft_model, .*?=None\))`", page)[1]
        parameters = inspect.signature(method).parameters.values()
        written = [each.name if each.default is each.empty else f"{each.name}={each.default!r}" for each in parameters]
        assert shown == f"{method.__name__}({', '.join(written)})"


def test_the_page_names_every_rule_and_field():
    page = PAGE.read_text()
    from pass_ext.decoding.accept import DECODING_RULES

    table = page[page.index("| rule |") : page.index("Which one:")]
    for rule, asks in DECODING_RULES.items():
        row = next(line for line in table.splitlines() if f'`"{rule}"`' in line)
        assert ("approximate" in row) == (not asks.exact)
    for field in pass_ext.drafting.DraftLevel._fields:
        assert re.search(rf"`{field}( \[.*?\])?`", page), field


def test_the_page_names_every_part_of_a_drafter():
    page = PAGE.read_text()
    table = page[page.index("| member of a `Drafter` |") :].split("\n\n")[0]
    parts = {name for name in vars(pass_ext.Drafter) if not name.startswith("_")} | {"max_depth"}
    assert {"propose", "rules", "pace"} < parts
    for part in parts:
        assert re.search(rf"^\|[^|]*`{part}(\([a-z]*\))?`", table, re.M), part


ROWS = [  # rows of the table of rules: the answers of Speculative and MultiCandidate
    ("coupled", True, True, False), ("rejection", True, True, False), ("block", True, False, False),
    ("traversal", True, True, False), ("rejection_with_replacement", False, False, True), ("kseq", False, False, True),
    ("typical", True, True, False), ("longest_branch", False, True, False), ("coupled_inverse", True, True, False),
    ("adaptive_rejection", True, True, False), ("joint", True, True, False),
]  # fmt: skip


@pytest.mark.parametrize("rule,chain,tree,replaced", ROWS)
def test_the_table_of_rules_is_what_generate_takes(names, rule, chain, tree, replaced):
    draft = names["draft_model"]
    for method, taken in (
        (pass_ext.Speculative(draft, 2), chain),
        (pass_ext.MultiCandidate(draft, (2, 1)), tree),
        (pass_ext.MultiCandidate(draft, (2, 1), replacement=True), replaced),
    ):
        options = dict(max_new_tokens=4, temperature=1.0, seeds=1, rule=rule)
        if taken:
            assert pass_ext.generate(names["model"], names["input_ids"], method, **options).lengths == (4,)
        else:
            with pytest.raises(ValueError, match=rule):
                pass_ext.generate(names["model"], names["input_ids"], method, **options)


def test_another_picture_or_table_is_found(tmp_path):
    from tools import longest_branch
    from tools.pictures import levels

    assert levels.check(ROOT) is None is longest_branch.check(ROOT)
    (tmp_path / "docs/guide").mkdir(parents=True)
    svg = (ROOT / levels.PATH).read_text()
    for wrong in ("", svg.replace("sat", "lay")):
        (tmp_path / levels.PATH).write_text(wrong)
        assert "does not show this tree" in levels.check(tmp_path)
    page = PAGE.read_text()
    for wrong in (page.replace("0.3494", "0.35"), page.replace("<!-- tools.", "<!-- ")):
        (tmp_path / longest_branch.PAGE).write_text(wrong)
        assert "is not this one" in longest_branch.check(tmp_path)
    (tmp_path / longest_branch.PAGE).write_text(page)
    assert longest_branch.check(tmp_path) is None


def test_the_published_example():
    """p = (.6, .3, .1), two roots, kept with .3, .6, .9: a reader can work out the distribution by hand."""
    from tools import longest_branch as page

    draft = page.DRAFTS["good after rare tokens"]
    assert [float(page.acceptance(page.TARGET[token], draft[token])) for token in range(3)] == [0.3, 0.6, 0.9]
    first = page.first_token(page.distribution_of_texts(page.TARGET, draft, 2, 1, 2))
    p, kept, want = (0.6, 0.3, 0.1), (0.3, 0.6, 0.9), [0.0] * 3
    for one in range(3):
        for other in {0, 1, 2} - {one}:
            drawn = p[one] * p[other] / (1 - p[one])
            second = (1 - kept[one]) * kept[other]
            want[other] += drawn * second
            want[one] += drawn * (1 - second)
    assert [float(first[token,]) for token in range(3)] == pytest.approx(want)
    assert [round(x, 2) for x in want] == [0.35, 0.44, 0.21]
