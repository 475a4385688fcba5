"""The import rules, checked on every file: the tables here are the only place where they are written. Also other rules that
grep can check.
"""

import ast
import re
from functools import cache

import pytest
from support.paths import ROOT

CSRC = ROOT / "csrc"
PACKAGE = ROOT / "pass_ext"

# Place of a file -> beginnings allowed for its quoted includes.
CPP_INCLUDES = {
    "core": ("core/",),
    "host": ("core/", "host/"),
    "cpu": ("core/", "host/", "cpu/"),
    "cuda/*.cuh": (
        "core/",
        *(
            "cuda/primitives.cuh",
            "cuda/pairs.cuh",
            "cuda/numbers.cuh",
            "cuda/block.cuh",
            "cuda/bins.cuh",
            "cuda/row",
            "cuda/accept_",
            "cuda/shard_rows.cuh",
            "cuda/attention_",
            "cuda/attention.cuh",  # attention to codes differs in its tiles alone
            "cuda/linear",  # a layer is made of its products
            "cuda/step.cuh",
            "cuda/recall_counts.cuh",
            "cuda/recurrent_",
            "cuda/next_",
        ),
    ),
    "cuda/*.cu": (
        *("core/", "host/", "cuda/runtime.h", "cuda/counters.h"),
        *("cuda/attention", "cuda/logprobs.cuh", "cuda/support.cuh"),
    ),
    "cuda/*.h": ("host/", "cuda/primitives.cuh"),
    "schema.cpp": (),
}
# The same for torch's headers, in angle brackets.
TORCH_INCLUDES = {
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

# Room of pass_ext -> rooms that it may import besides its own, from the ground up: each line names rooms of lines above it.
# Imports inside functions and for types count too.
MAY_IMPORT = {
    "reference": (),
    "_library": (),
    "ops": ("_library",),
    "distributed": ("_library", "ops"),
    "testing": ("_library",),
    "huge_pages": (),
    "weights": ("huge_pages", "ops"),
    "checkpoint": ("huge_pages", "weights"),
    "tree": ("ops",),
    "modules": ("ops",),
    "decoding": ("checkpoint", "_library", "ops", "distributed", "tree", "modules", "weights"),
    "layers": ("huge_pages", "ops", "weights"),
    "drafting": ("ops", "modules", "decoding"),
    "integrations": ("_library", "ops", "tree", "modules", "decoding"),
    "training": ("ops", "checkpoint", "tree", "modules", "decoding"),
    "pass_ext": (
        "_library",
        "checkpoint",
        "ops",
        "tree",
        "modules",
        "decoding",
        "layers",
        "distributed",
        "drafting",
        "integrations",
    ),  # pass_ext/__init__.py
    "demo": ("checkpoint", "weights", "decoding", "pass_ext"),
    "bench": ("pass_ext",),
    "__main__": ("_library", "checkpoint", "weights", "decoding", "training", "pass_ext", "demo", "bench"),
}
# The same for pass_ext/decoding/, where a room may import all rooms of lines above its own.
DECODING_FLOORS = (
    ("arguments", "sampling", "stats"),
    ("models",),
    ("session", "requests"),
    ("accept", "methods"),
    ("synthetic",),
    ("planning",),
    ("drafting",),
    ("loop",),
    ("generation",),
)
# The same for benchmarks/.
BENCHMARKS_FLOORS = (
    ("harness",),
    ("ops", "decoding", "architectures", "kernel_code"),
    ("pages", "kernel_time", "serving", "grammar", "accepted", "trust"),
    ("gpu", "contenders", "versions"),
)


def place_of(path):
    relative = path.relative_to(CSRC)
    if len(relative.parts) == 1:
        return relative.name
    return f"cuda/*{path.suffix}" if relative.parts[0] == "cuda" else relative.parts[0]


def violations(path, text):
    """The includes of a C++ file that break the rules."""
    name, place = str(path.relative_to(CSRC)), place_of(path)
    breaking = []
    for include in re.findall(r'^\s*#include\s+"([^"]+)"', text, re.M):
        header_of_its_source = include == name.replace(".cu", ".cuh") and name.endswith(".cu")
        if not (header_of_its_source or include.startswith(CPP_INCLUDES[place] or ("nothing",))):
            breaking.append(include)
    for include in re.findall(r"^\s*#include\s+<([^>]+)>", text, re.M):
        if BANNED.search(include) or (
            "torch/" in include and not include.startswith(TORCH_INCLUDES[place] or ("nothing",))
        ):
            breaking.append(include)
        if "cuda" in include and "torch" not in include and include not in CUDA_HEADERS.get(name, ()):
            breaking.append(include)
    return breaking


CPP_FILES = sorted(p for p in CSRC.rglob("*") if p.suffix in {".h", ".cpp", ".cu", ".cuh"})


@pytest.mark.parametrize("path", CPP_FILES, ids=lambda p: str(p.relative_to(CSRC)))
def test_includes_follow_the_rules(path):
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
        if path.name not in ("primitives.cuh", "pairs.cuh"):
            assert machine.findall(path.read_text()) == [], path


def test_addresses_are_taken_in_one_file():
    """host/tensor.h refuses a tensor without memory, so no kernel reads null."""
    for path in CPP_FILES:
        taken = re.findall(r"data_ptr\w*\(|get_data_ptr", path.read_text())
        assert bool(taken) == (path == CSRC / "host/tensor.h"), path


def test_schemas_live_in_one_file():
    for path in CPP_FILES:
        blocks = re.findall(r"STABLE_TORCH_LIBRARY(_FRAGMENT)?\(", path.read_text())
        assert len(blocks) == (path.name == "schema.cpp"), path


def modules_of(folder):
    """Module name -> its file."""
    found = {}
    for path in folder.rglob("*.py"):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(text, modules):
    """The modules among these that a text imports, at any depth of the code, for types too."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in modules else node.module)
    return found & modules.keys()


MODULES = modules_of(PACKAGE)


@cache
def imports_in(folder):
    """Module name -> the modules of the folder that it imports; of a folder that an sdist has not: none."""
    modules = modules_of(folder)
    return {name: imports_of(path.read_text(), modules) for name, path in modules.items()}


@pytest.fixture
def imports():
    return imports_in(PACKAGE)


@pytest.fixture
def benchmarks_imports():
    return imports_in(ROOT / "benchmarks")


def circle_in(imports):
    """Modules that import each other in a circle, or []."""
    done, way = set(), []

    def follow(module):
        if module in way:
            return way[way.index(module) :]
        if module in done:
            return []
        way.append(module)
        for other in sorted(imports.get(module, ())):
            if found := follow(other):
                return found
        way.pop()
        done.add(module)
        return []

    return next((found for module in sorted(imports) if (found := follow(module))), [])


def room_of(module, base="pass_ext"):
    """The first part of a module's name after the base; the base itself is its face."""
    parts = module.removeprefix(base).strip(".").split(".")
    return parts[0] or base


def breaches(imports, may_import, base="pass_ext"):
    """``module -> other`` for each import that the table does not allow."""
    return [
        f"{module} -> {other}"
        for module, others in imports.items()
        for other in others
        if other.startswith(base)
        and room_of(other, base) not in (room_of(module, base), *may_import[room_of(module, base)])
    ]


def below(floors):
    """Room -> the rooms of lines above its own in the table."""
    return {
        room: [other for line in floors[:floor] for other in line] for floor, line in enumerate(floors) for room in line
    }


DECODING = below(DECODING_FLOORS)
MAY_IMPORT_OF_BENCHMARKS = {room: ["benchmarks", *rooms] for room, rooms in below(BENCHMARKS_FLOORS).items()}
MAY_IMPORT_OF_BENCHMARKS["benchmarks"] = []  # benchmarks/__init__.py pins threads and imports nothing


def test_every_room_of_the_package_has_its_floor():
    rooms = {room_of(name) for name in MODULES} - {"_build_info"}
    assert rooms == MAY_IMPORT.keys()
    order = list(MAY_IMPORT)
    assert all(set(MAY_IMPORT[room]) <= set(order[:floor]) for floor, room in enumerate(order)), "from the ground up"
    inside = {room_of(name, "pass_ext.decoding") for name in MODULES if name.startswith("pass_ext.decoding.")}
    assert inside == DECODING.keys()


def test_no_modules_import_each_other_in_a_circle(imports, benchmarks_imports):
    assert circle_in(imports) == []
    assert circle_in(benchmarks_imports) == []


def test_no_import_runs_upward(imports, benchmarks_imports):
    assert (
        breaches({name: others for name, others in imports.items() if room_of(name) != "_build_info"}, MAY_IMPORT) == []
    )
    inside = {name: others for name, others in imports.items() if name.startswith("pass_ext.decoding.")}
    assert breaches(inside, DECODING, "pass_ext.decoding.") == []
    assert breaches(benchmarks_imports, MAY_IMPORT_OF_BENCHMARKS, "benchmarks") == []


def test_planted_imports_are_found(imports):
    """A circle through a function and a type, and an import of a room above."""
    lazy = "def f():\n    from pass_ext.tree.tree import Tree\n"
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import pass_ext.ops.tree\n"
    planted = dict(imports)
    planted["pass_ext.ops.common.kernels"] = imports["pass_ext.ops.common.kernels"] | imports_of(lazy, MODULES)
    assert {"pass_ext.ops.common.kernels", "pass_ext.tree.tree"} <= set(circle_in(planted))
    planted.pop("pass_ext._build_info", None)
    assert breaches(planted, MAY_IMPORT) == ["pass_ext.ops.common.kernels -> pass_ext.tree.tree"]
    planted = imports | {"pass_ext._library": imports_of(typed, MODULES)}
    assert "pass_ext._library" in circle_in(planted)
    planted = {"pass_ext.decoding.models.packed": {"pass_ext.decoding.loop"}}
    assert breaches(planted, DECODING, "pass_ext.decoding.") != []
    planted = {"benchmarks.harness.cases": {"benchmarks.pages.ops"}}
    assert breaches(planted, MAY_IMPORT_OF_BENCHMARKS, "benchmarks") != []
    planted = {"pass_ext.decoding.loop": {"pass_ext.reference.accept"}}
    assert breaches(planted, MAY_IMPORT) != [], "no other code may compute with the specification"


def test_drafting_and_planning_never_ask_for_a_methods_class():
    """What drafts for a method, and its plan, are found in one table each."""
    asks = re.compile(r"isinstance\([^)]*\b(Plain|NGram|PaSS|Speculative|MultiCandidate|Method)\b")
    assert asks.search("if isinstance(method, (NGram, PaSS)):")
    for folder in ("drafting", "planning"):
        for path in (PACKAGE / "decoding" / folder).glob("*.py"):
            assert not asks.search(path.read_text()), path


def own_copies(text):
    """The calls in a text that copy numbers to a device by themselves, not by ``uploaded`` or ``sent``."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    made = {node: ast.unparse(node.func) for node in calls}
    return [
        ast.unparse(node)
        for node, name in made.items()
        if (name == "torch.tensor" and any(keyword.arg == "device" for keyword in node.keywords))
        or (name.endswith(".copy_") and made.get(node.args[0]) == "torch.tensor")
        or name.endswith(".pin_memory")
    ]


def test_numbers_reach_a_device_in_one_way():
    """A copy from memory that is not pinned waits for all that a GPU has been given to do: a step would wait unseen."""
    planted = "at = torch.tensor(filled(rows), device=logits.device)\nprice.copy_(torch.tensor(prices))\nx.pin_memory()"
    assert len(own_copies(planted)) == 3
    for room in ("decoding", "tree", "integrations"):
        for path in (PACKAGE / room).rglob("*.py"):
            assert own_copies(path.read_text()) == [], path


def test_every_source_file_opens_by_saying_what_it_is():
    for path in CPP_FILES:
        assert path.read_text().startswith("// "), path
    for path in [path for name in ("pass_ext", "tests", "benchmarks", "tools") for path in (ROOT / name).rglob("*.py")]:
        assert path.read_text().startswith('"""'), path
