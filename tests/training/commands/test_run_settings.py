"""What steers a training command: presets and files of options, logs, early stopping, SIGTERM, steps that are not finite, and
the plan of a dry run. Models are tiny, everything in this process.
"""

import json
import os
import re
import shlex
import signal
import sys
import threading
import time
import types

import pytest
import torch
from support.small_models import save_byte_model

from pass_ext import LookaheadEmbedding
from pass_ext.__main__ import main
from pass_ext.training.common.config import PRESETS
from pass_ext.training.common.options import PACKAGES
from pass_ext.training.lookahead import pipeline
from pass_ext.training.lookahead.loop import LookaheadTrainer

pytest.importorskip("transformers")
for package in PACKAGES:
    pytest.importorskip(package)

SHORT = "--continuations 40 --sample-tokens 16 --length 24 --anchors 4 --lookahead 3 --transition-rank 2 --batch 2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("settings")
    save_byte_model(path / "model")
    (path / "texts").mkdir()
    for number in range(60):
        (path / f"texts/part {number}.txt").write_text(f"line {number} of a text\n" * 40)
    return path


def line_of(folder, out, *more):
    line = ["train", "--model", str(folder / "model"), "--data", str(folder / "texts"), "--out", str(out)]
    return [*line, *shlex.split(SHORT), *more]


def loaded(out):
    return LookaheadEmbedding.load(out / "lookahead.safetensors")


def state_of(out):
    return torch.load(out / "checkpoint.pt", weights_only=True)


# ---- presets and files ----


def parsed(monkeypatch, *words):
    """The options that a command line gives, without the run."""
    seen = []
    monkeypatch.setattr("pass_ext.training.run", lambda command, options, line: seen.append((options, line)))
    main(["train", *words])
    return seen[0]


@pytest.mark.parametrize("form", ["yaml", "toml", "json"])
def test_a_file_of_options_stands_between_the_preset_and_the_command_line(tmp_path, monkeypatch, form):
    if form == "toml":
        pytest.importorskip("tomllib")
    values = {"model": "m", "out": "o", "steps": 7, "deep": False, "slot_weights": [1, 0.5, 0.25, 0.125], "seed": 3}
    values["preset"] = "slots+adapters"
    lines = {"yaml": ": ", "toml": " = "}.get(form)
    text = json.dumps(values) if lines is None else "\n".join(f"{k}{lines}{json.dumps(v)}" for k, v in values.items())
    file = tmp_path / f"run.{form}"
    file.write_text(text)
    options, line = parsed(monkeypatch, "--config", str(file), "--seed", "5")
    assert (options.model, options.out, options.steps, options.seed) == ("m", "o", 7, 5)
    assert options.adapter_rank == 8 and options.deep is False and options.slot_weights == [1, 0.5, 0.25, 0.125]
    assert line == ["python", "-m", "pass_ext", "train", "--config", str(file), "--seed", "5"]


def test_presets_are_options_that_exist_and_long_ones_end_early(monkeypatch):
    seen = {name: parsed(monkeypatch, "--preset", name, "--model", "m", "--out", "o")[0] for name in PRESETS}
    assert [seen[name].adapter_rank for name in seen] == [0, 8, 8] and all(options.deep for options in seen.values())
    assert [options.steps for options in seen.values()] == [1000, 3000, 20000] and seen["long"].patience
    assert parsed(monkeypatch, "--steps", "2", "--preset", "long", "--model", "m", "--out", "o")[0].steps == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stepz: 3", "there is no option 'stepz': did you mean steps?"),
        ("steps: {a: 1}", "steps must be a value or a list, got {'a': 1}"),
        ("- steps", "must hold options and their values, got list"),
        ("steps: [", "cannot be read: "),
        ("preset: best", "--preset must be one of slots, slots+adapters, long, got 'best'"),
        ("steps: many", "invalid int value: 'many'"),
    ],
    ids=range(6),
)
def test_a_file_of_options_that_cannot_be_gets_a_sentence(tmp_path, capsys, text, message):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(SystemExit) as end:
        main(["train", "--config", str(tmp_path / "run.yaml"), "--model", "m", "--out", str(tmp_path)])
    assert message in f"{end.value}{capsys.readouterr().err}"


def test_help_begins_with_the_ten_that_matter_first(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    first, _, further = capsys.readouterr().out.partition("\noptions:\n")[2].partition("\nfurther options:\n")
    ten = re.findall(r"^  (--[a-z-]+)", first, re.M)
    assert len(ten) == 10 and {"--model", "--data", "--out", "--preset", "--config", "--log", "--dry-run"} < set(ten)
    assert len(re.findall(r"^  --", further, re.M)) > 25


# ---- logs ----


@pytest.fixture
def stand_ins(tmp_path, monkeypatch):
    """wandb, trackio and TensorBoard's writer by their public calls, which are noted."""
    calls = []

    def tracker(name):
        package = types.ModuleType(name)
        package.init = lambda **how: calls.append((name, "init", how))
        package.log = lambda values, step: calls.append((name, step, values))
        package.finish = lambda: calls.append((name, "finish"))
        return package

    class SummaryWriter:
        def __init__(self, log_dir, purge_step):
            calls.append(("tensorboard", "init", log_dir, purge_step))

        def add_scalar(self, tag, value, step):
            calls.append(("tensorboard", step, tag, value))

        def close(self):
            calls.append(("tensorboard", "close"))

    board = types.ModuleType("torch.utils.tensorboard")
    board.SummaryWriter = SummaryWriter
    for name in ("wandb", "trackio", "tensorboard"):
        (tmp_path / f"{name}.py").write_text("")  # what find_spec looks for
        monkeypatch.setitem(sys.modules, name, tracker(name))
        sys.modules[name].__spec__ = types.SimpleNamespace(name=name)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    return calls


def test_losses_go_where_log_says(folder, tmp_path, stand_ins):
    main(line_of(folder, tmp_path / "out", "--steps", "3", "--log", "tensorboard", "wandb", "trackio"))
    losses = state_of(tmp_path / "out")["losses"]
    for name in ("wandb", "trackio"):
        first, *steps, last = [call[1:] for call in stand_ins if call[0] == name]
        assert first[0] == "init" and first[1]["project"] == "pass_ext" and first[1]["config"]["steps"] == 3
        assert [(step, values["loss"]) for step, values in steps] == list(enumerate(losses, 1))
        assert all(values["tokens_per_second"] > 0 for _, values in steps) and last == ("finish",)
    written = [call[1:] for call in stand_ins if call[0] == "tensorboard"]
    assert written[0] == ("init", str(tmp_path / "out/tensorboard/lookahead"), 1) and written[-1] == ("close",)
    assert [(step, value) for step, tag, value in written[1:-1] if tag == "loss"] == list(enumerate(losses, 1))


@pytest.mark.parametrize(("name", "wanted"), [("tensorboard", r"'pass_ext\[log\]'"), ("wandb", "wandb")])
def test_a_log_whose_package_is_missing_is_refused_before_anything_is_loaded(
    folder, tmp_path, monkeypatch, name, wanted
):
    monkeypatch.setattr("pass_ext.training.common.logs.find_spec", lambda package: None)
    with pytest.raises(SystemExit, match=f"--log {name} needs the package {name}: pip install {wanted}$"):
        main(line_of(folder, tmp_path / "out", "--log", name))


# ---- the end of a run ----


def test_early_stopping_keeps_the_best_parameters(folder, tmp_path, monkeypatch, capsys):
    scores = iter([1.5, 1.9, 1.7, 1.8, 1.6, 9.0])
    states = []

    def evaluated(model, embedding, *more):
        if len(states) < 5:
            states.append(embedding.weight.detach().clone())
            return {"places": 1, "accepted": {"tree 8": next(scores) - 1}}
        return {"places": 0}  # that of the result

    monkeypatch.setattr(pipeline, "evaluate", evaluated)
    out, more = tmp_path / "out", ("--steps", "40", "--evaluate-every", "2", "--patience", "3", "--warm-up", "1")
    main(line_of(folder, out, *more))
    assert len(state_of(out)["losses"]) == 10, "three scores below that of step 4"
    assert "the parameters of step 4, the best on held-out texts: 1.900" in capsys.readouterr().out
    assert torch.equal(loaded(out).weight, states[1].bfloat16()) and not torch.equal(states[1], states[4])
    assert loaded(out).training_record["options"]["patience"] == 3
    main(line_of(folder, out, *more))  # again: no further step
    assert len(state_of(out)["losses"]) == 10 and torch.equal(loaded(out).weight, states[1].bfloat16())


def test_the_score_is_of_held_out_texts(folder, tmp_path, capsys):
    main(line_of(folder, tmp_path / "out", "--steps", "4", "--evaluate-every", "2", "--patience", "1"))
    scores = state_of(tmp_path / "out")["scores"]
    assert list(scores) == [2, 4] and all(1 <= score < 5 for score in scores.values())
    wanted = 1 + loaded(tmp_path / "out").training_record["evaluation"]["accepted"]["tree 8"]
    assert abs(max(scores.values()) - wanted) < 0.05, "the file has the best parameters, rounded to bfloat16"
    with pytest.raises(SystemExit, match="--patience needs held-out texts"):
        main(line_of(folder, tmp_path / "none", "--steps", "4", "--patience", "1", "--held-out", "0"))


def test_sigterm_ends_the_step_saves_and_exits_0(folder, tmp_path, capsys):
    out = tmp_path / "out"

    def terminate():
        while not (out / "checkpoint.pt").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=terminate)
    thread.start()
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as end:
        main(line_of(folder, out, "--steps", "1000000", "--checkpoint-every", "2"))
    thread.join()
    assert end.value.code == 0 and signal.getsignal(signal.SIGTERM) == before
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"stopped: {out} keeps what was written")
    assert 2 <= len(state_of(out)["losses"]) < 1000000 and not (out / "lookahead.safetensors").exists()


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_step_that_is_not_finite_changes_nothing_and_is_named(folder, tmp_path, monkeypatch, where):
    out, original = tmp_path / "out", LookaheadTrainer.loss

    def poisoned(trainer, step):
        loss = original(trainer, step)
        if step != 5:
            return loss
        if where == "loss":
            return loss * torch.nan
        left = trainer.module.transition_left
        return loss + (left * 1e-30).sum().sqrt() * 0 + left.sum() * torch.inf - (left.sum() * torch.inf).detach()

    monkeypatch.setattr(LookaheadTrainer, "loss", poisoned)
    named = r"the loss \(nan\)" if where == "loss" else r".*the gradient of transition_left"
    with pytest.raises(
        SystemExit, match=rf"^step 6 of 9 is not finite: {named}.*; .*checkpoint\.pt keeps step 5\. Lower"
    ):
        main(line_of(folder, out, "--steps", "9", "--checkpoint-every", "2"))
    kept = state_of(out)
    assert len(kept["losses"]) == 5 and all(tensor.isfinite().all() for tensor in kept["module"].values())
    monkeypatch.setattr(LookaheadTrainer, "loss", original)
    main(line_of(folder, out, "--steps", "9", "--checkpoint-every", "2"))
    main(line_of(folder, tmp_path / "whole", "--steps", "9", "--checkpoint-every", "2"))
    assert torch.equal(loaded(out).weight, loaded(tmp_path / "whole").weight)


# ---- the plan ----


@pytest.mark.parametrize("data", ["texts", "own chats"])
def test_a_dry_run_prints_the_plan_and_writes_nothing(folder, tmp_path, capsys, data):
    line = line_of(folder, tmp_path / "out", "--steps", "50", "--dry-run", "--adapter-rank", "2")
    if data == "own chats":
        del line[line.index("--data") : line.index("--data") + 2]
        line += ["--continuations", "0", "--self-distill", "shipped"]
    main(line)
    plan = dict(re.findall(r"^([a-z -]+?)  +(.*)$", capsys.readouterr().out, re.M))
    assert list((tmp_path / "out").iterdir()) == []
    assert plan["steps"] == f"50, at most {50 * 2 * (24 + 4 * 3):,} rows"
    assert plan["a step"] == "2 texts of up to 24 tokens, 8 groups of 3 slots"
    assert int(plan["texts to write"].split(",")[0]) > (40 if data == "texts" else 200)
    assert re.fullmatch(r"[\d.]+ s a step, [\d.]+ hours", plan["time"])
    model = sum(p.numel() for p in save_byte_model(tmp_path / "again").parameters())
    assert plan["model"] == f"{model:,} parameters, frozen, float32"
    sizes = dict(re.findall(r"([a-z ]+) ([\d.]+) MB", plan["memory of a device"]))
    assert (
        float(sizes[" model"]) == pytest.approx(4 * model / 1e6, abs=0.06)
        and float(sizes[" kept for the gradient"]) > 0
    )
