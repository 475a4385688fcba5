"""What the three training commands have in common: bfloat16, short texts, Ctrl-C, the log, what is kept, permissions, help."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest
import torch
from support.paths import ROOT
from support.small_models import save_byte_model

from pass_ext import LookaheadEmbedding
from pass_ext.__main__ import main
from pass_ext.drafting import DecisionModel, ExitAdapter
from pass_ext.training.common.options import PACKAGES

pytest.importorskip("transformers")
for package in PACKAGES:
    pytest.importorskip(package)

COMMANDS = {
    "train": "--lookahead 3 --transition-rank 2 --anchors 4 --checkpoint-every 2 --steps 5 --length 24",
    "train-draft": "--layers 1 2 --rank 4 --vocabulary 60 --batch 32 --document-tokens 500 --steps 5 --length 24",
    "train-decision": "--draft exit:1 --kind hidden --texts 6 --places 6 --epochs 2 --batch 8 --levels 2 --length 24",
}
CLASSES = {"train": LookaheadEmbedding, "train-draft": ExitAdapter, "train-decision": DecisionModel}
NAMES = {"train": "lookahead", "train-draft": "exit", "train-decision": "decision-hidden"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of two small layers with a token per byte, and texts, some of them held out."""
    path = tmp_path_factory.mktemp("tiny")
    save_byte_model(path / "model")
    (path / "texts").mkdir()
    for number in range(30):
        (path / f"texts/part {number}.txt").write_text(f"line {number} of a text\n" * 40)
    return path


def line_of(name, folder, out, *more):
    line = [name, "--model", str(folder / "model"), "--data", str(folder / "texts"), "--out", str(out)]
    return [*line, "--continuations", "10", "--sample-tokens", "16", *shlex.split(COMMANDS[name]), *more]


def result_of(name, out):
    return CLASSES[name].load(out / f"{NAMES[name]}.safetensors")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_in_bfloat16_says_how_far_it_is_and_leaves_files_that_others_may_read(folder, tmp_path, name, capsys):
    before = os.umask(0o022)
    try:
        main(line_of(name, folder, tmp_path / "out", "--dtype", "bfloat16"))
    finally:
        os.umask(before)
    assert result_of(name, tmp_path / "out").training_record["evaluation"]["places"] > 0
    assert all(parameter.isfinite().all() for parameter in result_of(name, tmp_path / "out").parameters())
    modes = {file.name: oct(file.stat().st_mode & 0o777) for file in (tmp_path / "out").iterdir()}
    assert set(modes.values()) == {"0o644"}, modes
    said = capsys.readouterr().out
    phases = ["sampling, batches of samples", "sampling, batches of held-out"]
    phases += {
        "train": ["training", "evaluating, held-out texts"],
        "train-draft": ["hidden states, tokens", "1 layers, steps", "2 layers, steps", "evaluating on .* texts, exits"],
        "train-decision": ["reading, texts", "training", "evaluating, held-out texts"],
    }[name]
    for phase in phases:
        assert re.search(rf"^{phase}: 0 of [\d,]+$", said, re.M), phase
        assert re.search(
            rf"^{phase}: ([\d,]+) of \1, ((loss [\d.]+, )?[\d,]+ tokens/s, )?in \d:\d\d:\d\d$", said, re.M
        ), phase
    if name == "train":
        assert re.search(r"^training: 2 of 5, loss [\d.]+, [\d,]+ tokens/s, \d:\d\d:\d\d left$", said, re.M)
        assert result_of(name, tmp_path / "out").fingerprint
    if name == "train-draft":
        first = said.index("the hidden states take 0 MB, in memory and in ")
        assert first < said.index("hidden states, tokens: 0 of")
        assert result_of(name, tmp_path / "out").fingerprint


@pytest.mark.parametrize("name", COMMANDS)
def test_held_out_texts_that_are_too_short_are_passed_over(folder, tmp_path, name):
    """A continuation of one token: no slot, no depth and hardly a place is after it."""
    main(line_of(name, folder, tmp_path / "out", "--sample-tokens", "1"))
    found = result_of(name, tmp_path / "out").training_record["evaluation"]
    assert found["places"] == 0 if name != "train-decision" else found["places"] > 0


def test_a_prompt_as_long_as_a_tree_is_passed_over(folder, tmp_path):
    """Its chains leave no room for what was written after it."""
    prompts = tmp_path / "prompts"
    prompts.write_text("\n".join(f"{n} " + "word " * 120 for n in range(30)))
    more = ["--self-distill", str(prompts), "--levels", "16", "--evaluation-places", "32", "--continuations", "0"]
    main(line_of("train-decision", folder, tmp_path / "out", *more))
    assert result_of("train-decision", tmp_path / "out").training_record["evaluation"]["places"] > 0


@pytest.mark.parametrize("name", COMMANDS)
def test_other_texts_may_be_held_out_when_a_command_is_repeated(folder, tmp_path, name, capsys):
    one_exit = ["--layers", "2"] if name == "train-draft" else []  # of several the evaluation chooses
    main(line_of(name, folder, tmp_path / "out", *one_exit))
    first = result_of(name, tmp_path / "out")
    samples = (tmp_path / "out/samples.jsonl").read_bytes()
    capsys.readouterr()
    main(line_of(name, folder, tmp_path / "out", *one_exit, "--held-out", "1"))
    again = result_of(name, tmp_path / "out")
    assert (tmp_path / "out/samples.jsonl").read_bytes() == samples
    for mine, theirs in zip(again.parameters(), first.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert 0 < again.training_record["evaluation"]["places"] < first.training_record["evaluation"]["places"]
    if name == "train":
        assert "going on from step 5 of 5" in capsys.readouterr().out
    main(line_of(name, folder, tmp_path / "out", *one_exit, "--held-out", "0"))
    assert result_of(name, tmp_path / "out").training_record["evaluation"]["places"] == 0


STEPS = {"train": "--steps", "train-draft": "--steps", "train-decision": "--epochs"}


@pytest.mark.parametrize(
    "name", ["train", *(pytest.param(name, marks=pytest.mark.slow) for name in list(COMMANDS)[1:])]
)
def test_ctrl_c_ends_a_command_with_a_sentence_and_it_goes_on(folder, tmp_path, name, capsys):
    out, log = tmp_path / "out", tmp_path / "log"
    line = line_of(name, folder, out, STEPS[name], "1000000")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with log.open("w") as said:
        running = subprocess.Popen(
            [sys.executable, "-m", "pass_ext", *line], stdout=said, stderr=subprocess.PIPE, text=True, env=environment
        )
        try:
            end = time.monotonic() + 240
            while not re.search(r"^(training|1 layers, steps): [1-9]", log.read_text(), re.M):
                assert running.poll() is None and time.monotonic() < end, log.read_text()
                time.sleep(0.1)
            running.send_signal(signal.SIGINT)
            errors = running.communicate(timeout=120)[1]
        finally:
            running.kill()
    assert running.returncode == 1
    assert errors.splitlines()[-1] == f"stopped: {out} keeps what was written, and the same command goes on from there"
    assert "Traceback" not in errors and "Traceback" not in log.read_text()
    if name == "train":
        done = len(torch.load(out / "checkpoint.pt", weights_only=True)["losses"])
        main([*line, "--minutes", "1e-9"])
        assert f"going on from step {done} of 1000000" in capsys.readouterr().out
        assert result_of(name, out).training_record["steps"] == done + 1


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_the_default_of_every_option(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        main([name, "--help"])
    _, _, listed = capsys.readouterr().out.partition("\noptions:\n")
    options = re.split(r"\n  (?=-)", listed.removeprefix("  "))
    needed = ("-h", "--model", "--out", "--draft ", "--kind")
    assert len(options) > 15
    for option in options:
        assert option.startswith(needed) or "default: " in option, option


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--seed -1", "--seed must be from 0 to 4294967295, got -1"),
        ("--seed 99999999999999", "--seed must be from 0 to 4294967295, got 99999999999999"),
        ("--device nowhere", "--device must be one that torch can use here, as cpu or cuda, got 'nowhere': "),
        ("--name a/b", "--name must be a file's name without its ending, got 'a/b'"),
        ("--name ''", "--name must be a file's name without its ending, got ''"),
        ("--out /dev/null/x", "--out must be a folder that can be written, got '/dev/null/x': "),
        ("--self-distill /bin/sh", "--self-distill must be a text file in UTF-8, got '/bin/sh': "),
    ],
    ids=["seed", "large seed", "device", "name", "empty name", "out", "prompts"],
)
def test_what_cannot_be_gets_a_sentence_before_anything_is_loaded(folder, tmp_path, name, more, message):
    with pytest.raises(SystemExit, match=f"^{re.escape(message)}"):
        main(line_of(name, folder, tmp_path / "out", *shlex.split(more)))


@pytest.mark.parametrize("name", COMMANDS)
def test_the_result_is_there_before_its_evaluation(folder, tmp_path, name, capsys):
    """An evaluation that cannot be: a held-out sample whose ids no model has."""
    out = tmp_path / "out"
    main(line_of(name, folder, out))
    wanted = result_of(name, out)
    (out / f"{NAMES[name]}.safetensors").unlink()
    held_out = out / "held-out.jsonl"
    held_out.write_text(re.sub(r'"ids": \[', '"ids": [999999, ', held_out.read_text()))
    with pytest.raises((IndexError, RuntimeError)):
        main(line_of(name, folder, out))
    found = result_of(name, out)
    assert found.training_record["evaluation"] == {"places": 0}
    assert "written, not yet evaluated: " in capsys.readouterr().out
    if name != "train-draft":  # of several exits the evaluation chooses
        for mine, theirs in zip(found.parameters(), wanted.parameters(), strict=True):
            assert torch.equal(mine, theirs)
