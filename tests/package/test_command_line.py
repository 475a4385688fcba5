"""``python -m pass_ext``: what its commands say of themselves, and of what they are given wrongly."""

import re
import sys

import pytest

import pass_ext
from pass_ext.__main__ import main

COMMANDS = ("info", "demo", "bench", "convert", "train", "train-draft", "train-head", "train-decision")


def said(capsys, *words):
    """Everything that is printed until the command ends by itself."""
    with pytest.raises(SystemExit):
        main(list(words))
    return "".join(capsys.readouterr())


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_describes_the_command_and_every_option_in_plain_text(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    text = said(capsys, *([] if command is None else [command]), "--help")
    assert "`" not in text
    usage, description, *_ = text.split("\n\n")
    assert usage.startswith("usage: ") and re.match(r"[A-Z].*\.$", description, re.DOTALL)
    lines = text.splitlines()
    listed = [
        (line, after) for line, after in zip(lines, [*lines[1:], ""], strict=True) if re.match(r"  +(-|\w)", line)
    ]
    assert listed
    for line, after in listed:
        is_described = re.match(r"  +\S.*?\S  +\S", line) or re.match(r" {20,}\S", after)
        assert is_described or line.startswith("  {") or re.match(r" {20,}", line), line


def test_the_version_is_one_line(capsys):
    assert said(capsys, "--version") == f"pass_ext {pass_ext.__version__}\n"


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("train")])
def test_an_error_of_training_is_not_after_a_page_of_options(command, capsys):
    text = said(capsys, command)
    assert len(text.splitlines()) <= 3
    assert ": error: the following arguments are required: --model, --out" in text.splitlines()[-1]


@pytest.mark.parametrize("path", ["/nonexistent", "./none", "~/none", "a/b/c", "/none.gguf"])
@pytest.mark.parametrize("command", ["info", "convert"])
def test_a_path_to_nothing_is_named_before_transformers_is_imported(command, path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)  # an import of it raises
    kind = "file" if path.endswith(".gguf") else "folder"
    with pytest.raises(SystemExit) as end:
        main([command, path])
    assert str(end.value) == f"pass_ext {command}: no such model {kind}: {path}"


def test_a_name_on_the_hub_is_no_path():
    pytest.importorskip("transformers")
    with pytest.raises(SystemExit, match=r"^pass_ext info: (?!no such model)"):
        main(["info", "nobody/of.this-name_0"])
