"""docs/performance.md: its numbers and their runs are what the committed results say, and a wrong one is found."""

import json
import re
import shutil
import statistics

import pytest
from support.paths import ROOT

from tools import performance

pytestmark = pytest.mark.skipif(not (ROOT / performance.PAGE).exists(), reason="an sdist has no docs")


@pytest.fixture
def tree(tmp_path):
    """A copy of everything that the page is made of."""
    for path in (ROOT / "csrc", ROOT / "benchmarks/results"):
        shutil.copytree(path, tmp_path / path.relative_to(ROOT))
    (tmp_path / "docs/guide").mkdir(parents=True)
    for page in performance.PARTS:
        shutil.copy(ROOT / page, tmp_path / page)
    assert performance.check(tmp_path) is None
    return tmp_path


def change(path, edit):
    """Changes a result in its file."""
    result = json.loads(path.read_text())
    edit(result)
    path.write_text(json.dumps(result))


def rows_of_page(root, columns):
    lines = (root / performance.PAGE).read_text().splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    return [row for row in cells if len(row) == columns and not set("".join(row)) <= set("- ")]


def test_the_page_shows_the_committed_results():
    assert performance.check(ROOT) is None, "run python -m tools.performance"


def test_every_number_names_its_run():
    rows = rows_of_page(ROOT, 6)
    numbers, runs = [row for row in rows if row[0].isdigit()], [row for row in rows if row[0].startswith("[")]
    assert [row[0] for row in numbers] == [str(i + 1) for i in range(len(performance.numbers(ROOT)))]
    assert {row[-1] for row in numbers} == {row[0] for row in runs}
    for file, command, date, commit, _machine, versions in runs:
        result = json.loads((ROOT / "docs" / re.search(r"\((.*)\)", file)[1]).read_text())
        assert (date, commit) == (result["date"][:10], result["commit"]) and not result.get("quick")
        module = command.strip("`").split()[2].replace(".", "/")
        assert (ROOT / f"{module}.py").exists() or (ROOT / module / "__main__.py").exists(), command
        known = result["facts"]["Plain"]["versions"] if "facts" in result else result["versions"]
        assert known["torch"] in versions


def test_numbers_by_other_code():
    """Some of them, worked out from the results a second time."""
    folder = ROOT / performance.RESULTS
    shown = {row[0]: row for row in rows_of_page(ROOT, 6)}
    races = [json.loads(path.read_text()) for path in ROOT.glob("benchmarks/results/*/contenders.json")]
    assert len(races) == 2
    assert shown["3"][1].startswith("`generate`, PaSS, adapters, "), "the newest race has both files"
    for place, race in zip(("2", "7"), sorted(races, key=lambda race: race["date"], reverse=True), strict=True):
        turns = race["rows"]
        disturbed = {turn["round"] for turn in turns if turn["others"] > 0.1}
        mine = [t["tokens"] / t["seconds"] for t in turns if t["contender"] == "PaSS" and t["round"] not in disturbed]
        assert shown[place][1:3] == [
            f"`generate`, PaSS, {race['machine']['cpu']['model']}",
            f"{statistics.median(mine):.1f} tokens/s",
        ]
    rows = json.loads((folder / "ops/cache.json").read_text())["rows"]
    first = {r["contender"]: r["median_us"] for r in rows if r["labels"] == rows[0]["labels"] and r["cache"] == "cold"}
    ours, others = first.pop("pass_ext"), first
    assert shown["11"][4] == f"{min(others.values()) / ours:.2f} ×"
    rows = json.loads((folder / "acceptance.json").read_text())["rows"]
    (mean,) = [
        r["mean_accepted"] for r in rows if (r["shape"], r["rule"], r["drafts"]) == ("tree", "coupled", "coupled")
    ]
    assert shown["12"][2] == f"{mean:.3f}"
    results = [json.loads(path.read_text()) for path in ROOT.glob("benchmarks/results/*/large-model.json")]
    newest = max(results, key=lambda result: result["date"])
    times = {row["contender"]: row["ms_per_token"] for row in newest["rows"]}
    assert shown["13"][4] == f"{times['transformers'] / times['pass_ext, Plain']:.1f} ×"


def test_the_files_own_bits_are_shown_beside_the_fastest_of_llama_cpp(tree):
    path = next(tree.glob("benchmarks/results/*/contenders.json"))
    race = json.loads(path.read_text()) | {"date": "2999-01-01", "rows": []}
    race["settings"]["most_others"] = 0.2
    speeds = {
        "Plain": 200,
        "PaSS": 250,
        "PaSS, adapters": 300,
        "Plain, bfloat16": 100,
        "llama.cpp, Q4_1": 90,
        "llama.cpp, Q4_0": 150,
    }
    for name, speed in speeds.items():
        for round, factor in ((0, 1.0), (1, 1.0), (2, 9.0)):
            row = {"round": round, "contender": name, "tokens": 100, "calls": 50, "seconds": 100 / speed / factor}
            row |= {"others": 0.1 if round < 2 else 0.3, "differs_at": None, "differs_from_float32_at": None}
            race["rows"].append(row)
    (path.parent / "stored-contenders.json").write_text(json.dumps(race))
    of_machine = [number for number in performance.numbers(tree) if number.file.parent.name == path.parent.name]
    plain, slots = (number for number in of_machine if "own bits" in number.what)
    assert (plain.ours, plain.ratio) == ("200.0 tokens/s", "1.33 × (1.33–1.33)")
    assert (slots.ours, slots.ratio) == ("300.0 tokens/s", "2.00 × (2.00–2.00)")
    assert plain.other == slots.other == "150.0 tokens/s, llama.cpp, Q4_0, its fastest"
    performance.write(tree)
    assert performance.check(tree) is None
    assert plain.what in (tree / "README.md").read_text()
    guide = (tree / performance.QUANTISED).read_text()
    assert "| PaSS, adapters | 300.0 |" in guide and "at most 20% of the cores" in guide


def test_each_part_of_a_run_with_the_files_own_bits_is_shown(tree):
    path = next(tree.glob("benchmarks/results/*/stored-weights.json"))
    result = json.loads(path.read_text())
    run = {"date": "2999-01-01T00:00:00Z", "commit": "abcdef"}
    read = [{"weights": form, "tokens": 6600, "tokens/s": speed} for form, speed in (("stored", 1234), ("dense", 567))]
    result["prompt"] = run | {"rows": read}
    result["layers"] = run | {"rows": [{"rows": 1, "ms a layer": 4.0}, {"rows": 8, "ms a layer": 6.0}]}
    result["products"]["rows"][0]["of read"] = {"4 bits": 0.625}
    path.write_text(json.dumps(result))
    performance.write(tree)
    guide = (tree / performance.QUANTISED).read_text()
    assert "| prompt of 6,600 tokens, tokens/s | 1,234.0 | 567.0 |" in guide
    assert "one row of 4096 × 4096: 4 bits 62%" in guide and "by rows: 1: 4.00, 8: 6.00" in guide
    assert "stored_weights layers`, 2999-01-01, commit abcdef" in guide


def test_without_a_run_on_a_gpu_its_numbers_are_left_out(tree):
    for path in tree.glob("benchmarks/results/nvidia-*/*.json"):
        path.unlink()
    performance.write(tree)
    assert "NVIDIA H100" not in (tree / performance.PAGE).read_text() and len(performance.numbers(tree)) == 12 + len(
        performance.stored_numbers(tree)
    )


def test_trained_slots_on_a_gpu_are_shown_by_texts_that_do_not_loop(tree):
    (large, *_) = tree.glob("benchmarks/results/nvidia-*/large-model.json")
    result = json.loads(large.read_text()) | {"runs": []}
    for name, seconds in (("Plain", 4.0), ("PaSS, one pass", 2.0), ("transformers", 8.0)):
        for looping in (False, False, True):
            run = {"contender": name, "looping": looping, "tokens": 100, "seconds": 0.001 if looping else seconds}
            result["runs"].append(run)
    (large.parent / "trained-slots.json").write_text(json.dumps(result))
    number = performance.gpu_numbers(tree)[-1]
    assert (number.ours, number.ratio) == ("50.0 tokens/s", "4.0 ×")
    assert number.other.startswith("12.5 tokens/s") and number.other.endswith("Plain 25.0")
    assert ", 2 texts that do not loop" in number.what


@pytest.mark.parametrize("name", performance.PARTS, ids=str)
def test_a_number_typed_by_hand_is_found(tree, name):
    page, part = tree / name, performance.PARTS[name](tree)
    number = re.search(r"\d+\.\d", part)[0]
    page.write_text(page.read_text().replace(part, part.replace(number, f"9{number}", 1)))
    assert performance.check(tree) == f"{name} must show the results"
    performance.write(tree)
    assert page.read_text() == (ROOT / name).read_text()


def test_a_changed_result_is_found(tree):
    def faster(result):
        for row in result["rows"]:
            row["median_us"] = row["median_us"] and 2 * row["median_us"]

    for name in ("ops/accept.json", "ops/attention.json", "ops/linear.json", "ops/cache.json"):
        before = (tree / performance.RESULTS / name).read_text()
        change(tree / performance.RESULTS / name, faster)
        assert performance.check(tree) is not None, name
        (tree / performance.RESULTS / name).write_text(before)
        assert performance.check(tree) is None


def test_what_a_result_lacks_is_said(tree):
    path, *others = tree.glob("benchmarks/results/*/contenders.json")
    for other in others:
        other.unlink()
    change(path, lambda race: race.update(rows=[row for row in race["rows"] if "vLLM" not in row["contender"]]))
    assert performance.check(tree) == "contenders.json has no vLLM, eager"
    path.unlink()
    assert performance.check(tree) == "there is no benchmarks/results/*/contenders.json"
    (tree / performance.RESULTS / "acceptance.json").unlink()
    assert performance.check(tree) == f"there is no {performance.RESULTS / 'acceptance.json'}"


def test_a_page_without_its_comments_is_said(tree):
    page = tree / performance.PAGE
    page.write_text(page.read_text().replace("<!-- /tools.performance -->", ""))
    assert performance.check(tree) == "docs/performance.md must show the results"
    with pytest.raises(ValueError, match="page must hold"):
        performance.write(tree)


def test_the_page_claims_a_gpu_only_where_a_record_does(tree):
    from benchmarks.pages.gpu_status import content_hash

    for record in tree.glob("benchmarks/results/*/verified-*.json"):
        record.unlink()
    assert "No GPU has run these kernels yet" in performance.text(tree)
    file = tree / "csrc/cuda/lookahead.cuh"
    kernel = {"hash": content_hash(file, tree), "tests_passed": 3, "tests_failed": 0, "sanitized": {}}
    machine = {"gpu": {"name": "Some GPU", "compute_capability": "9.0"}}
    record = {"date": "2031-02-03", "commit": "0123456789ab", "machine": machine, "kernels": {file.name: kernel}}
    folder = tree / "benchmarks/results/some-gpu"
    folder.mkdir()
    (folder / "verified-0123456789ab.json").write_text(json.dumps(record))
    assert "GPUs have run 1 of" in performance.text(tree) and performance.check(tree) is not None
    file.write_text(file.read_text() + "// changed\n")
    assert "No GPU has run these kernels yet" in performance.text(tree)
