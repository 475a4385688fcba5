"""The import law of csrc/README.md and CONTRIBUTING.md, checked on every file, and other rules that grep can see."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CSRC = ROOT / "csrc"
PACKAGE = ROOT / "pass_ext"

# Where a file lies -> what its quoted includes may start with.
CPP_LAW = {
    "core": ("core/",),
    "host": ("core/", "host/"),
    "cpu": ("core/", "host/", "cpu/"),
    "cuda/*.cuh": (
        "core/",
        *("cuda/primitives.cuh", "cuda/block.cuh", "cuda/row", "cuda/accept_rows.cuh", "cuda/attention_"),
    ),
    "cuda/*.cu": ("core/", "host/", "cuda/runtime.h", "cuda/counters.h", "cuda/attention"),
    "cuda/*.h": ("host/", "cuda/primitives.cuh"),
    "schema.cpp": (),
}
# ... and of torch, by angle brackets.
TORCH_LAW = {
    "core": (),
    "host": ("torch/csrc/stable/", "torch/headeronly/"),
    "cpu": ("torch/csrc/stable/",),
    "cuda/*.cuh": (),
    "cuda/*.cu": ("torch/csrc/stable/",),
    "cuda/*.h": ("torch/csrc/stable/", "torch/csrc/inductor/aoti_torch/c/shim.h"),
    "schema.cpp": ("torch/csrc/stable/library.h",),
}
CUDA_HEADERS = dict.fromkeys(("cuda/primitives.cuh", "cuda/runtime.h", "cuda/counters.h"), ("cuda_runtime.h",))
BANNED = re.compile(r"ATen/|c10/|torch/extension\.h|torch/torch\.h|pybind11|Python\.h")

# Package -> what of pass_ext it may import.
PYTHON_LAW = {
    "_elf": set(),
    "_library": {"_elf"},
    "_build_info": set(),
    "reference": {"reference"},
    "ops": {"_library", "ops"},
    "cache_folder": set(),
    "checkpoint": {"cache_folder"},
    "decision": {"trained_file"},
    "decoding": {"cache_folder", "decision", "decoding", "early_exit", "lookahead", "ops", "trained_file", "tree"},
    "early_exit": {"trained_file"},
    "lookahead": {"ops", "trained_file"},
    "trained_file": set(),
    "tree": {"ops", "tree_picture"},
    "tree_picture": {"tree"},
    "integrations": {"decoding", "integrations", "lookahead", "ops", "tree"},
    "testing": {"_library"},
    "training": {"checkpoint", "decision", "decoding", "early_exit", "lookahead", "ops", "training", "tree"},
    "demo": {"", "cache_folder", "checkpoint", "decoding", "demo"},
    "__main__": {"", "_library", "demo", "training"},
    "__init__": {
        "_library",
        "decision",
        "decoding",
        "early_exit",
        "integrations",
        "lookahead",
        "ops",
        "tree",
    },  # integrations: when asked for
}


def place_of(path):
    relative = path.relative_to(CSRC)
    if len(relative.parts) == 1:
        return relative.name
    return f"cuda/*{path.suffix}" if relative.parts[0] == "cuda" else relative.parts[0]


def violations(path, text):
    """What in a C++ file's includes breaks the law."""
    name, place = str(path.relative_to(CSRC)), place_of(path)
    found = []
    for include in re.findall(r'^\s*#include\s+"([^"]+)"', text, re.M):
        own = include == name.replace(".cu", ".cuh") and name.endswith(".cu")
        if not (own or include.startswith(CPP_LAW[place] or ("nothing",))):
            found.append(include)
    for include in re.findall(r"^\s*#include\s+<([^>]+)>", text, re.M):
        if BANNED.search(include) or ("torch/" in include and not include.startswith(TORCH_LAW[place] or ("nothing",))):
            found.append(include)
        if "cuda" in include and "torch" not in include and include not in CUDA_HEADERS.get(name, ()):
            found.append(include)
    return found


CPP_FILES = sorted(p for p in CSRC.rglob("*") if p.suffix in {".h", ".cpp", ".cu", ".cuh"})


@pytest.mark.parametrize("path", CPP_FILES, ids=lambda p: str(p.relative_to(CSRC)))
def test_includes_keep_the_law(path):
    assert violations(path, path.read_text()) == []


def test_a_breach_is_seen():
    assert violations(CSRC / "core/x.h", '#include "host/checks.h"\n#include <ATen/ATen.h>\n') == [
        "host/checks.h",
        "ATen/ATen.h",
    ]
    assert violations(CSRC / "cuda/x.cuh", "#include <torch/csrc/stable/ops.h>\n#include <cuda_fp16.h>\n") != []
    assert violations(CSRC / "cuda/x.cu", '#include "cuda/lookahead.cuh"\n#include "cpu/isa.h"\n') != []
    assert violations(CSRC / "cpu/x.cpp", '#include "cuda/runtime.h"\n#include <torch/extension.h>\n') != []


def test_kernels_touch_the_machine_only_through_primitives():
    machine = re.compile(
        r"\b(threadIdx|blockIdx|blockDim|gridDim|__sync\w+|__shfl\w*|__ballot\w*|atomic[A-Z]\w+|asm|__shared__)\b"
    )
    for path in CSRC.glob("cuda/*.cuh"):
        if path.name != "primitives.cuh":
            assert machine.findall(path.read_text()) == [], path


def test_addresses_are_taken_in_one_file():
    """There a tensor without memory is refused, and no kernel reads null."""
    for path in CPP_FILES:
        taken = re.findall(r"data_ptr\w*\(|get_data_ptr", path.read_text())
        assert bool(taken) == (path == CSRC / "host/tensor.h"), path


def test_schemas_live_in_one_file():
    for path in CPP_FILES:
        blocks = re.findall(r"STABLE_TORCH_LIBRARY(_FRAGMENT)?\(", path.read_text())
        assert len(blocks) == (path.name == "schema.cpp"), path


def imports_of(path):
    """The parts of pass_ext that a module imports, at any depth of the code; '' is the package itself."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = (
                [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "pass_ext" else [node.module]
            )
        found |= {(name + ".").split(".")[1] for name in names if name.split(".")[0] == "pass_ext"}
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_keep_the_law(path):
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    allowed = PYTHON_LAW[part] | ({"_build_info"} if part == "_library" else set())
    assert imports_of(path) <= allowed


def test_every_source_file_opens_by_saying_what_it_is():
    for path in CPP_FILES:
        assert path.read_text().startswith("// "), path
    for path in [*PACKAGE.rglob("*.py"), *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        assert path.read_text().startswith('"""'), path
