"""The import rules, checked on every file: the tables here are the only place where they are written. And other rules that
grep can see.
"""

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

# Rooms of pass_ext, from the ground up: a module imports rooms on lines above its own, and its own room. Imports inside of
# functions and for types count too.
FLOORS = (
    "cache_folder", "reference",
    "_library",
    "ops",
    "tree", "modules", "checkpoint", "testing",
    "decoding",
    "integrations", "training",
    "pass_ext",  # the face: pass_ext/__init__.py
    "demo",
    "__main__",
)  # fmt: skip
SIDE_BY_SIDE = (
    ("cache_folder", "reference"),
    ("tree", "modules", "checkpoint", "testing"),
    ("integrations", "training"),
)
NOT_FOR = {"ops": {"reference", "cache_folder"}, "training": {"integrations"}}
"""What a room does not import although it lies below."""
DECODING_FLOORS = (
    "sampling", "stats", "profiling",
    "models",
    "methods", "rules",
    "session", "requests",
    "planning",
    "drafting",
    "loop",
    "generation",
)  # fmt: skip
MOST_SIDE_BY_SIDE = 12


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
IMPORTS = {name: imports_of(path.read_text(), MODULES) for name, path in MODULES.items()}


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
    """The first part of a module's name behind the base; the base itself is its face."""
    parts = module.removeprefix(base).strip(".").split(".")
    return parts[0] or base


def upward(imports, floors, beside=(), base="pass_ext"):
    """ "module -> other" for each import of a room that lies above, or beside."""
    together = {room: set(rooms) - {room} for rooms in beside for room in rooms}
    found = []
    for module, others in imports.items():
        room = room_of(module, base)
        for other in others:
            theirs = room_of(other, base)
            if theirs == room or not other.startswith(base) or not {room, theirs} <= set(floors):
                continue
            if floors.index(theirs) > floors.index(room) or theirs in together.get(room, ()):
                found.append(f"{module} -> {other}")
    return found


def test_every_room_of_the_package_has_its_floor():
    rooms = {room_of(name) for name in MODULES} - {"_build_info"}
    assert rooms == set(FLOORS)
    inside = {room_of(name, "pass_ext.decoding") for name in MODULES if name.startswith("pass_ext.decoding.")}
    assert inside == set(DECODING_FLOORS)


def test_no_modules_import_each_other_in_a_circle():
    assert circle_in(IMPORTS) == []


def test_no_import_runs_upward():
    assert upward(IMPORTS, FLOORS, SIDE_BY_SIDE) == []
    inside = {name: others for name, others in IMPORTS.items() if name.startswith("pass_ext.decoding.")}
    assert upward(inside, DECODING_FLOORS, base="pass_ext.decoding") == []
    for room, banned in NOT_FOR.items():
        used = {room_of(other) for name, others in IMPORTS.items() if room_of(name) == room for other in others}
        assert not used & banned, room


def test_planted_imports_are_found():
    """A circle through a function and a type, and an import of a room above."""
    lazy = "def f():\n    from pass_ext.tree.tree import Tree\n"
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import pass_ext.ops.tree\n"
    planted = dict(IMPORTS)
    planted["pass_ext.ops.fakes"] = IMPORTS["pass_ext.ops.fakes"] | imports_of(lazy, MODULES)
    assert {"pass_ext.ops.fakes", "pass_ext.tree.tree"} <= set(circle_in(planted))
    assert upward(planted, FLOORS, SIDE_BY_SIDE) == ["pass_ext.ops.fakes -> pass_ext.tree.tree"]
    planted = IMPORTS | {"pass_ext._library": imports_of(typed, MODULES)}
    assert "pass_ext._library" in circle_in(planted)
    planted = {"pass_ext.decoding.models.packed": {"pass_ext.decoding.loop"}}
    assert upward(planted, DECODING_FLOORS, base="pass_ext.decoding") != []


def test_no_folder_holds_more_than_a_dozen_rooms():
    for folder in {path.parent for path in MODULES.values()}:
        rooms = [
            p
            for p in folder.iterdir()
            if (p.suffix == ".py" and p.name not in ("__init__.py", "__main__.py", "_build_info.py"))
            or (p / "__init__.py").is_file()
        ]
        assert len(rooms) <= MOST_SIDE_BY_SIDE, (folder, len(rooms))


def test_every_source_file_opens_by_saying_what_it_is():
    for path in CPP_FILES:
        assert path.read_text().startswith("// "), path
    for path in [*PACKAGE.rglob("*.py"), *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        assert path.read_text().startswith('"""'), path
