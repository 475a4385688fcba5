"""python -m tools.op_families: every op of the schema has all of its files, and a missing one is named."""

import shutil
import sys

import pytest
from support.paths import ROOT

import pass_ext
from tools import op_families
from tools.op_families import PARTS, cpu_only, family_of, find, ops_of, report

OP = "tree_mask"
OWN = [part for part in PARTS if any("{family}" in path for path in part.paths)]


@pytest.fixture
def copy(tmp_path):
    """The files of every op, without all others."""
    files = {ROOT / where for op in ops_of(ROOT) for part in PARTS for state, where in [find(op, part, ROOT)]}
    for file in [ROOT / "pass_ext/_library/__init__.py", *filter(lambda file: file.exists(), files)]:
        (tmp_path / file.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, tmp_path / file.relative_to(ROOT))
    return tmp_path


def test_no_op_lacks_a_file():
    lines, complaints = report(ROOT, [])
    assert complaints == []
    assert set(ops_of(ROOT)) == set(pass_ext._library.op_names()) <= set(lines)
    assert cpu_only(ROOT) == pass_ext._library.CPU_ONLY


def test_a_copy_without_faults_has_no_complaints(copy):
    assert report(copy, []) == report(ROOT, [])


@pytest.mark.parametrize("part", OWN, ids=lambda part: part.name)
def test_a_missing_file_is_named(copy, part, monkeypatch, capsys):
    (copy / find(OP, part, copy)[1]).unlink()
    named = [f"{op}: {part.name}: {part.paths[0].format(family='tree')} is missing" for op in ("tree_prepare", OP)]
    assert report(copy, [])[1] == named
    monkeypatch.setattr(sys, "argv", ["op_families", "--root", str(copy), "tree"])
    assert op_families.main() == 1
    assert named[0] in capsys.readouterr().out


@pytest.mark.parametrize(
    "part", [part for part in PARTS if part.pattern and part.name != "schema"], ids=lambda p: p.name
)
def test_a_file_without_the_op_is_named(copy, part):
    file = copy / find(OP, part, copy)[1]
    file.write_text(file.read_text().replace(OP, "tree_musk"))
    assert report(copy, [])[1] == [f"{OP}: {part.name}: {file.relative_to(copy)} lacks it"]


def test_an_op_that_is_new_in_the_schema_has_nothing(copy):
    schema = copy / "csrc/schema.cpp"
    schema.write_text(
        schema.read_text().replace("  // linear\n", '  library.def("planted_rows(Tensor x) -> Tensor");\n')
    )
    complaints = report(copy, ["planted"])[1]
    assert len(complaints) == len(PARTS) - 1 and len(report(copy, [])[1]) == len(complaints)
    assert "planted_rows: CUDA kernels: csrc/cuda/planted.cuh is missing" in complaints
    assert "planted_rows: samples: tests/support/samples.py lacks it" in complaints


def test_only_a_stated_reason_excuses(copy):
    library = copy / "pass_ext/_library/__init__.py"
    library.write_text(library.read_text().replace('"layer_stack":', '"layer_heap":'))
    missing = [f"layer_stack: {part.name}" for part in PARTS if part.on_gpu and part.pattern]
    assert [line.rpartition(":")[0] for line in report(copy, [])[1]] == missing
    (copy / "csrc/cpu/cache_kernels-inl.h").write_text("")
    assert "so it needs no excuse" in report(copy, ["cache"])[1][0]


def test_a_familys_name_must_be_one(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["op_families", "trees"])
    with pytest.raises(SystemExit):
        op_families.main()
    assert "FAMILY must be the first word of an op in csrc/schema.cpp (accept, " in capsys.readouterr().err


def test_families_are_where_the_gpu_run_and_the_smoke_tests_look():
    from benchmarks.gpu.stages import FAMILIES

    families = {family_of(op) for op in ops_of(ROOT) if op not in cpu_only(ROOT)}
    assert families == set(FAMILIES)
