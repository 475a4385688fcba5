"""python -m tools.hub_kernel: the folder that Hugging Face's kernel-builder reads, and its build, which `kernels` loads beside
the installed package with the same bits from every op.
"""

import ast
import copy
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.code_blocks import blocks_of, run_blocks
from support.paths import ROOT
from support.samples import SAMPLES
from torch.utils._pytree import tree_leaves, tree_map_only

import pass_ext
from pass_ext.testing import assert_same_bits
from tools import hub_kernel

REPOSITORY = "someone/pass-ext"
pytestmark = pytest.mark.timeout(1800)  # a build on two busy cores


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder without build/."""
    folder = tmp_path_factory.mktemp("hub") / "kernel"
    hub_kernel.write(folder, REPOSITORY)
    return folder


@pytest.fixture(scope="module")
def modules(folder):
    """Path -> syntax tree of each Python file that is shipped."""
    return {path: ast.parse(path.read_text()) for path in (folder / "torch-ext").rglob("*.py")}


def test_build_toml_names_every_source_and_no_other(folder):
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML")
    build = tomllib.loads((folder / "build.toml").read_text())
    assert build["general"]["name"].replace("-", "_") == "pass_ext"
    assert build["general"]["version"] == int(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"][0]
    )
    listed = [*build["torch"]["src"], *build["kernel"]["pass_ext"]["src"]]
    sources = {path for path in ROOT.glob("csrc/**/*") if path.suffix in (".cpp", ".cu", ".h", ".cuh")}
    assert set(listed) == {str(path.relative_to(ROOT)) for path in sources}
    assert [name for name in listed if not (folder / name).exists()] == []
    assert [name for name in build["torch"]["src"] if "/cuda/" in name] == [], "the CPU's build has no nvcc"
    target = importlib.import_module("pass_ext._build_info").torch_target
    assert set(build["torch"]["stable-abi"].values()) == {target}
    flags = [*build["torch"]["cxx-flags"], *build["kernel"]["pass_ext"]["cuda-flags"][0:1]]
    assert [flag for flag in flags if flag not in (ROOT / "setup.py").read_text()] == []


def test_the_python_needs_torch_and_the_standard_library(modules, folder):
    """`Tree.draw` alone asks for more. An import of pass_ext would give the installed package, another than this."""
    for path, tree in modules.items():
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module] if node.level == 0 else []
                if node.level:
                    base = path.parents[node.level - 1] / (node.module or "").replace(".", "/")
                    assert base.with_suffix(".py").exists() or (base / "__init__.py").exists(), (path, node.module)
            others = {name.split(".")[0] for name in names} - sys.stdlib_module_names - {"torch"}
            assert others <= ({"matplotlib"} if path.parent.name == "tree" else set()), path


def test_the_ops_are_those_of_the_library_that_is_loaded(modules):
    for path, tree in modules.items():
        fixed = [node for node in ast.walk(tree) if ast.unparse(node).startswith("torch.ops.pass_ext")]
        assert fixed == [], path
        # kernel-builder refuses these decorators with a name that has no namespace of its own
        assert not re.search(r"^@(?:[\w.]+\.)?(custom_op|register_\w+)\(", path.read_text(), re.MULTILINE), path


def test_the_public_names_are_the_packages(folder):
    init = (folder / "torch-ext/pass_ext/__init__.py").read_text()
    names = json.loads(init.partition("__all__ = ")[2])
    assert set(names) - {"layers", "distributed"} <= set(pass_ext.__all__)
    families = {name.split("_")[0] for name in pass_ext._library.op_names()}
    hidden = {"adapter", "convolution", "layer", "linear", "quantize", "recall", "recurrent", "shard", "state", "step"}
    assert {name.split("_")[0] for name in names} >= families - hidden, "an op is missing"
    assert all(f"`{name}`" in (folder / "README.md").read_text() for name in names)
    assert (folder / "README.md").read_text() == (folder / "CARD.md").read_text()


def test_a_folder_with_files_is_refused(tmp_path):
    (tmp_path / "letter").touch()
    with pytest.raises(SystemExit, match="FOLDER must be new or empty"):
        hub_kernel.main([REPOSITORY, str(tmp_path)])


LOAD = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("kernel", sys.argv[1])
sys.modules["kernel"] = kernel = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernel)
tree = kernel.pack_trees([kernel.Tree.from_branching([2])])
print(tree.visible.flatten().tolist(), kernel._library.status().cuda_loaded, "pass_ext" in sys.modules)
"""


def test_it_runs_from_any_folder_without_the_package(folder, tmp_path):
    """With the library of this build, so with its namespace."""
    shutil.copytree(folder / "torch-ext/pass_ext", tmp_path / "kernel")
    shutil.copy(Path(pass_ext.__file__).parent / "_C.so", tmp_path / "kernel/_any_name.abi3.so")
    command = [sys.executable, "-c", LOAD, str(tmp_path / "kernel/__init__.py")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": ""})
    assert done.stdout == "[1, 3, 5] False False\n", done.stderr


# ---- built: minutes ----


@pytest.fixture(scope="module")
def variant(folder):
    """build/<variant>/ of the folder."""
    pytest.importorskip("kernels", reason="kernels is installed by make test")
    return hub_kernel.build(folder)


@pytest.fixture
def kernel(variant, monkeypatch):
    """The kernel, as `kernels` gives it."""
    monkeypatch.setenv("LOCAL_KERNELS", f"{REPOSITORY}={variant.parents[1]}")
    return importlib.import_module("kernels").get_local_kernel(variant.parents[1])


@pytest.mark.slow
def test_the_build_is_what_the_hub_asks_for(variant):
    rust = importlib.import_module("kernels._rust")
    assert [str(backend) for backend in rust.Build.open(variant.parents[1]).general.backends] == ["cpu", "cuda"]
    about = rust.Metadata.read_from_file(variant / "metadata.json")
    (library,) = variant.glob("*.so")
    assert library.name == f"{about.id}.abi3.so" and about.name.python_name == "pass_ext"
    about.digest.validate(rust.Digest.hash_variant(rust.DigestAlgorithm.SHA256, variant))


def clone(arguments):
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), copy.copy(arguments))


@pytest.mark.slow
def test_every_op_gives_the_bits_of_the_installed_package(kernel):
    ours, its = torch.ops.pass_ext, kernel._library.ops
    assert kernel._library.NAMESPACE == kernel.__name__ != "pass_ext"
    assert kernel._library.op_names() == pass_ext._library.op_names() == sorted(SAMPLES)
    for op, samples in SAMPLES.items():
        torch.manual_seed(0)
        for arguments in samples("cpu"):
            calls = []
            for namespace in (ours, its):
                given = clone(arguments)
                calls.append(tree_leaves([getattr(namespace, op)(*given), given]))
            for one, other in zip(*calls, strict=True):
                if isinstance(one, torch.Tensor):
                    assert_same_bits(other, one)


@pytest.mark.slow
def test_wrappers_fakes_and_gradients_are_its_own(kernel):
    ids, table = torch.tensor([2, -1, 0]), torch.randn(4, 8)
    gradients = []
    for package in (pass_ext, kernel):
        slots = torch.ones(1, 8, requires_grad=True)
        package.lookahead_embed(ids, table, slots).sum().backward()
        gradients.append(slots.grad)
    assert_same_bits(*gradients)
    assert kernel.lookahead_embed(ids.to("meta"), table.to("meta"), table[:1].to("meta")).shape == (3, 8)
    with pytest.raises(ValueError, match=r"^pass_ext::accept_tree: rule must be one of coupled, "):
        kernel.accept_tree(table, ids, ids, ids, 1, rule="none")


@pytest.mark.slow
def test_the_cards_example_runs(kernel, folder):
    torch.manual_seed(0)
    names = run_blocks(folder / "README.md", blocks_of(folder / "README.md"), {})
    assert names["pass_ext"] is kernel
    assert names["step"].emitted.tolist() == [[12, 17, 3]]
    assert_same_bits(names["k_cache"][0, 100:103], names["k"][[0, 2, 6]])


@pytest.mark.slow
def test_the_benchmarks_results_are_pytorchs(kernel, folder):
    spec = importlib.util.spec_from_file_location("benchmark", folder / "benchmarks/benchmark.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    workloads = [name.removeprefix("benchmark_") for name in vars(module.PassExt) if name.startswith("benchmark_")]
    assert workloads == ["attention", "accept"]
    for name in workloads:
        benchmark = module.PassExt()
        benchmark.kernel = kernel
        torch.manual_seed(benchmark.seed)
        benchmark.setup()
        getattr(benchmark, f"benchmark_{name}")()
        expected = getattr(benchmark, f"verify_{name}")()
        assert benchmark.out.shape == expected.shape and torch.allclose(benchmark.out, expected, atol=1e-2)
    assert (expected >= 0).sum() == 3, "two drafts are accepted"
