"""``python -m pass_ext train``: what it writes, how it goes on after any interruption, and what it refuses."""

import argparse
import dataclasses
import json
import re
import resource
import shlex
from collections import Counter
from pathlib import Path

import pytest
import torch
from support.paths import ROOT
from support.small_models import small_model
from support.training_models import SETTINGS, Letters, counting, slots_for, tiny_llama, windows_of

from pass_ext import LookaheadEmbedding, training
from pass_ext.training.common import options as shared
from pass_ext.training.common import own_texts, record
from pass_ext.training.common.documents import Document, is_held_out
from pass_ext.training.common.run import Run
from pass_ext.training.common.steps import rate_at
from pass_ext.training.lookahead import command, loop, pipeline
from pass_ext.training.lookahead.adapters import KINDS
from pass_ext.training.lookahead.loop import LookaheadTrainer

transformers = pytest.importorskip("transformers")


def options_for(out, **changes):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    line = ["--model", "tiny", "--out", str(out), "--steps", "6", "--length", "24", "--anchors", "4"]
    line += ["--lookahead", "2", "--sample-tokens", "12", "--checkpoint-every", "2", "--own-chats", "12"]
    line += ["--transition-rank", "2", "--warm-up", "2"]
    for name, value in changes.items():
        line += [f"--{name.replace('_', '-')}={value}"]
    return parser.parse_args(line)


def trained(out, console, **changes):
    documents = [Document(f"part {n}.py", "python", f"line {n} of a text\n" * 40) for n in range(30)]
    options = options_for(out, **changes)
    run = Run(options, "the command", tiny_llama(), Letters(), documents, ["Say hello.", "Count."], console)
    return LookaheadEmbedding.load(pipeline.train(run))


def test_the_command_trains_evaluates_resumes_and_repeats_itself(tmp_path):
    pytest.importorskip("matplotlib")
    rich = pytest.importorskip("rich.console")
    console = rich.Console(file=(tmp_path / "log").open("w"))
    whole = trained(tmp_path / "whole", console, continuations=20)
    facts = whole.training_record
    assert facts["command"] == "the command" and facts["steps"] == 6 and facts["evaluation"]["places"] > 0
    assert facts["machine"] == record.machine("cpu")
    assert whole.hit_rates is not None and len(whole.hit_rates) == 2 and len(whole.hit_rates[0]) == 16
    assert {"own samples", "documents", "held out"} == set(facts["data"])
    card = (tmp_path / "whole/lookahead.md").read_text()
    assert "the command" in card and "| 0 |" in card and (tmp_path / "whole/lookahead.svg").stat().st_size > 1000

    # stopped after the first step, then given the same command again
    stopped = trained(tmp_path / "parts", console, continuations=20, minutes=1e-9)
    assert stopped.training_record["steps"] == 1
    again = trained(tmp_path / "parts", console, continuations=20)
    for mine, theirs in zip(again.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert again.hit_rates == whole.hit_rates
    with pytest.raises(SystemExit, match="other settings or data"):
        trained(tmp_path / "parts", console, continuations=20, clip=0.5)
    with pytest.raises(SystemExit, match="samples of other settings"):
        trained(tmp_path / "parts", console, continuations=20, sample_tokens=9)


def test_slots_begin_at_what_the_first_layer_reads(tmp_path):
    """Gemma multiplies the rows of its table by the root of their width."""
    pytest.importorskip("matplotlib")
    console = pytest.importorskip("rich.console").Console(file=(tmp_path / "log").open("w"))
    documents = [Document(f"part {n}.py", "python", f"line {n} of a text\n" * 40) for n in range(30)]
    starts = []
    for name, scale in {"table": 1.0, "times eight": 8.0}.items():
        model = small_model("gemma3_text", vocab_size=100)
        model.get_input_embeddings().embed_scale.fill_(scale)
        options = options_for(tmp_path / name, own_chats=0, learning_rate=0, steps=1)
        path = pipeline.train(Run(options, "the command", model, Letters(), documents, [], console))
        starts.append(LookaheadEmbedding.load(path).weight)
    torch.testing.assert_close(starts[1], 8 * starts[0])


def test_the_command_trains_adapters_from_another_run(tmp_path):
    pytest.importorskip("matplotlib")
    console = pytest.importorskip("rich.console").Console(file=(tmp_path / "log").open("w"))
    bare = trained(tmp_path / "bare", console)
    start = str(tmp_path / "bare/lookahead.safetensors")
    options = dict(start=start, adapter_rank=3, adapter_learning_rate=0.02, loss="total-variation", curriculum=3)
    first = trained(tmp_path / "first", console, **options, minutes=1e-9)
    assert first.training_record["steps"] == 1 and first.num_lookahead == 2 and first.rank == 2
    whole, again = (trained(tmp_path / name, console, **options) for name in ("whole", "first"))
    assert len(whole.adapters.places) == 7 * tiny_llama().config.num_hidden_layers and whole.adapters.count == 1
    assert all(bool(up.any()) for _, _, up in whole.adapters.pairs())
    for mine, theirs in zip(again.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    facts = whole.training_record
    assert facts["adapters"]["parameters"] == sum(x.numel() for x in whole.adapters.parameters())
    assert facts["settings"]["start"].startswith(f"{start}, SHA-256 ")
    card = (tmp_path / "whole/lookahead.md").read_text()
    assert f"{facts['adapters']['parameters']:,} parameters, {facts['adapters']['share']:.2%} of the model's" in card
    with pytest.raises(SystemExit, match="must have --lookahead 3 slots, got 2"):
        trained(tmp_path / "other", console, start=start, lookahead=3)
    with pytest.raises(SystemExit, match="--start nothing: 'nothing' is neither a file"):
        trained(tmp_path / "other", console, start="nothing")
    more = trained(tmp_path / "more", console, start=str(tmp_path / "whole/lookahead.safetensors"))
    assert more.adapters is not None, "adapters of the file go on"
    earlier = more.training_record["earlier_runs"]
    assert [made["data"] for made in earlier] == [run.training_record["data"] for run in (bare, whole)]
    assert "earlier_runs" not in bare.training_record
    card = (tmp_path / "more/lookahead.md").read_text()
    assert card.count("```\nthe command\n```") == 3, "this run's and those of both before it"


def test_adapters_of_a_file_get_a_higher_rank_and_begin_with_its_products(tmp_path):
    pytest.importorskip("matplotlib")
    console = pytest.importorskip("rich.console").Console(file=(tmp_path / "log").open("w"))
    trained(tmp_path / "first", console, adapter_rank=2, adapter_learning_rate=0.05)
    start = str(tmp_path / "first/lookahead.safetensors")
    by_rank = {rank: trained(tmp_path / f"rank {rank}", console, start=start, adapter_rank=rank) for rank in (2, 5)}
    firsts = {rank: json.loads((tmp_path / f"rank {rank}/lookahead.json").read_text())["losses"][0] for rank in by_rank}
    assert firsts[2] == pytest.approx(firsts[5], abs=2e-4)
    before = LookaheadEmbedding.load(start).adapters
    for place, down, up in by_rank[5].adapters.pairs():
        assert down.shape[1] == up.shape[1] == 5 and bool(up[:, 2:].any()), "what is new is trained"
        assert (down[:, :2] - before.pair(place)[0]).abs().max() < 0.1
    assert {
        down.shape[1]
        for _, down, _ in trained(tmp_path / "less", console, start=start, adapter_rank=1).adapters.pairs()
    } == {2}


def test_a_budget_of_minutes_ends_the_steps_with_a_rate_of_zero(tmp_path):
    pytest.importorskip("matplotlib")
    console = pytest.importorskip("rich.console").Console(file=(tmp_path / "log").open("w"))
    options = dict(steps=1_000_000, time_budget=1.5 / 60, own_chats=30)
    slots = trained(tmp_path / "out", console, **options)
    facts = slots.training_record
    assert 1 < facts["steps"] < 100_000 and 1.5 <= facts["seconds"] < 30 and facts["evaluation"]["places"] > 0
    again = trained(tmp_path / "out", console, **options)
    assert again.training_record["steps"] == facts["steps"], "the budget is that of all calls of the command"
    settings = dataclasses.replace(SETTINGS, steps=1000, time_budget=4.0)
    trainer = LookaheadTrainer(tiny_llama(), slots_for(tiny_llama()), windows_of(counting(9, 24)), settings)
    assert trainer.expected_steps(0) == 1000
    for minutes, step, expected in (1, 50, 200), (2, 90, 180), (4, 170, 170), (0.1, 100, 1000):
        trainer.minutes = minutes
        assert trainer.expected_steps(step) == pytest.approx(expected) and trainer.is_over_budget == (minutes >= 4)
    rates = [rate_at(step, steps, 5) for step, steps in ((50, 200), (90, 180), (170, 170), (175, 170))]
    assert rates[0] > 0.85 and rates[1] == pytest.approx(0.5, abs=0.03) and rates[2] == rates[3] == 0


def test_samples_come_in_batches_of_the_size_and_temperatures_that_are_asked_for(tmp_path):
    pytest.importorskip("matplotlib")
    console = pytest.importorskip("rich.console").Console(file=(tmp_path / "log").open("w"))
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    options = options_for(tmp_path / "out", own_chats=0, continuations=150, sample_batch=16, held_out=3)
    options.sample_temperatures = [0.0, 0.7]
    documents = [Document(f"part {n}.py", "python", "".join(f"{n} {k} of\n" for k in range(90))) for n in range(30)]
    run = Run(options, "the command", tiny_llama(), Letters(), documents, [], console)
    batches, held_out = run.planned()
    assert [len(batch.names) for batch in batches] == [16] * 9 + [6]
    assert [batch.temperature for batch in batches] == [0.0, 0.7] * 5
    prompts = [tuple(ids) for batch in batches for ids in batch.prompts]
    assert len(set(prompts)) > 140, "documents give as many prefixes as are wanted"
    assert not any(is_held_out(name) for batch in batches for name in batch.names)
    assert [len(batch.names) for batch in held_out] == [3]
    texts = run.texts()
    assert {(sample.kind, sample.temperature) for sample in texts.samples} == {("python", 0.0), ("python", 0.7)}
    assert texts.documents == [document for document in documents if not is_held_out(document.name)] != documents
    for bad in ("-1", "nan"):
        line = ["--model", "m", "--out", str(tmp_path), "--own-chats", "2", "--sample-temperatures", "0", bad]
        with pytest.raises(SystemExit, match="--sample-temperatures must be at least 0"):
            command.check_arguments(parser.parse_args(line))


def test_so_many_held_out_chats_of_the_models_own_are_read_as_prompts_are(tmp_path):
    pytest.importorskip("matplotlib")
    console = pytest.importorskip("rich.console").Console(file=(tmp_path / "log").open("w"))
    options = options_for(tmp_path / "out", own_chats=90, sample_batch=15, held_out=2)
    texts = Run(options, "the command", tiny_llama(), Letters(), [], ["Say hello.", "Count."], console).texts()
    counted = Counter((sample.kind, sample.temperature) for sample in texts.held_out)
    assert max(counted.values()) == 2 and len(counted) > 1
    assert not any(is_held_out(sample.name) for sample in texts.samples)


def test_steps_may_have_another_type_than_samples(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    console = pytest.importorskip("rich.console").Console(file=(tmp_path / "log").open("w"))
    seen = []
    for kind in ("sample", "step_loss"):
        owner = own_texts if kind == "sample" else loop
        original = getattr(owner, kind)

        def noting(model, *arguments, original=original, kind=kind):
            seen.append((kind, model.get_input_embeddings().weight.dtype, model.get_output_embeddings().weight.dtype))
            return original(model, *arguments)

        monkeypatch.setattr(owner, kind, noting)
    mixed = trained(tmp_path / "mixed", console, step_dtype="bfloat16", steps=2)
    assert set(seen) == {("sample", *[torch.float32] * 2), ("step_loss", *[torch.bfloat16] * 2)}
    assert mixed.training_record["settings"]["step_dtype"] == "bfloat16"
    sharp = trained(tmp_path / "sharp", console, loss_temperature=0.5, steps=2)
    assert sharp.training_record["settings"]["loss_temperature"] == 0.5
    with pytest.raises(SystemExit, match="other settings or data"):
        trained(tmp_path / "mixed", console, steps=2)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--adapter-rank -1", "--adapter-rank must be at least 0, got -1"),
        ("--adapter-learning-rate nan", "--adapter-learning-rate must be at least 0, got nan"),
        ("--slot-weights 1", "--slot-weights must be 2 numbers above 0"),
        ("--slot-weights 1 0", "--slot-weights must be 2 numbers above 0"),
        ("--adapter-kinds q", "need --adapter-rank, got 0"),
        ("--adapter-by-slot", "need --adapter-rank, got 0"),
        ("--adapter-rank 129", "--adapter-rank must be at most 128, got 129"),
        ("--curriculum -1", "--curriculum must be at least 0, got -1"),
        ("--loss-temperature 0", "--loss-temperature must be above 0, got 0"),
        ("--loss-temperature nan", "--loss-temperature must be above 0, got nan"),
    ],
    ids=range(10),
)
def test_options_of_adapters_that_cannot_be(tmp_path, line, message):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    options = parser.parse_args(
        ["--model", "m", "--out", str(tmp_path), "--own-chats", "2", "--lookahead", "2", *line.split()]
    )
    with pytest.raises(SystemExit, match=message):
        command.check_arguments(options)


def test_the_kinds_of_the_command_are_those_of_the_models():
    assert tuple(KINDS) == command.KINDS


class Killed(BaseException):
    """No handler of errors may catch it, as none catches a SIGKILL."""


def killed_in(call, *, half=False, after=False, at=1):
    """Wraps ``call`` so that its ``at``-th call ends the program: before it, in its midst (half), or after it."""
    calls = []

    def ending(*arguments, **named):
        calls.append(arguments)
        if len(calls) == at and half:
            arguments[1].write(b"PK half of a checkpoint")
            arguments[1].flush()
        found = call(*arguments, **named) if len(calls) < at or after else None
        if len(calls) == at:
            raise Killed
        return found

    return ending


def test_a_run_that_is_killed_at_any_write_ends_with_the_same_parameters(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    console = pytest.importorskip("rich.console").Console(file=(tmp_path / "log").open("w"))
    whole, out = trained(tmp_path / "whole", console), tmp_path / "parts"
    kills = [  # in the order of a run, so that each starts from the files of the one before
        (Path, "write_text", dict()),  # the samples' header
        (own_texts.Path, "write_text", dict(after=True)),
        (own_texts, "asdict", dict(at=20)),
        (torch, "save", dict()),
        (torch, "save", dict(half=True)),
        (Path, "replace", dict()),
        (Path, "replace", dict(after=True)),
        (torch, "save", dict(half=True)),
        (Path, "replace", dict(at=2)),
        (LookaheadEmbedding, "save", dict()),
        (LookaheadEmbedding, "save", dict(after=True)),
        (pipeline, "card", dict()),
    ]
    for place, name, how in kills:
        with monkeypatch.context() as patched, pytest.raises(Killed):
            patched.setattr(place, name, killed_in(getattr(place, name), **how))
            trained(out, console)
    again = trained(out, console)
    for mine, theirs in zip(again.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert again.hit_rates == whole.hit_rates and again.training_record["steps"] == 6
    assert {file.name for file in out.iterdir()} == {file.name for file in (tmp_path / "whole").iterdir()}
    assert torch.load(out / "checkpoint.pt", weights_only=True)["seconds"] > 0


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: b"",
        lambda whole: whole[:100],
        lambda whole: whole[: len(whole) // 2],
        lambda whole: whole[:-1],
        lambda whole: b"\0" * len(whole),
        lambda whole: b"<html>404</html>",
    ],
    ids=["empty", "100 bytes", "half", "all but a byte", "zeros", "HTML"],
)
def test_a_damaged_checkpoint_gets_a_sentence(tmp_path, damage):
    trainer = LookaheadTrainer(tiny_llama(), slots_for(tiny_llama()), windows_of(counting(9, 24)), SETTINGS)
    path = tmp_path / "checkpoint.pt"
    trainer.save(path, "run", 1.5)
    assert trainer.restore(path, "run") == 1.5
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(
        SystemExit, match=rf"^{path} is damaged or was cut off: delete it to train from the first step on"
    ):
        trainer.restore(path, "run")


def test_a_checkpoint_with_parts_missing_gets_a_sentence(tmp_path):
    trainer = LookaheadTrainer(tiny_llama(), slots_for(tiny_llama()), windows_of(counting(9, 24)), SETTINGS)
    path = tmp_path / "checkpoint.pt"
    trainer.save(path, "run")
    state = torch.load(path, weights_only=True)
    for other in (
        [],
        *({name: part for name, part in state.items() if name != gone} for gone in state),
        state | {"module": {}},
        state | {"optimizer": {}},
        state | {"losses": None},
    ):
        torch.save(other, path)
        with pytest.raises(SystemExit, match=r"checkpoint\.pt is damaged or was cut off"):
            trainer.restore(path, "run")


def test_a_full_disk_keeps_the_checkpoint_before(tmp_path):
    trainer = LookaheadTrainer(tiny_llama(), slots_for(tiny_llama()), windows_of(counting(9, 24)), SETTINGS)
    path = tmp_path / "checkpoint.pt"
    trainer.save(path, "run", 1.0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(SystemExit, match=f"^{path} cannot be written, the checkpoint before it stays: "):
            trainer.save(path, "run", 2.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert trainer.restore(path, "run") == 1.0 and [file.name for file in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_pictures_keep_text_as_text_and_repeat_themselves(tmp_path):
    pytest.importorskip("matplotlib")
    losses = [3.0, 2.0, 1.5]
    for name in ("a.svg", "b.svg"):
        record.save_picture(losses, tmp_path / name, lambda axes: axes.set(xlabel="levels drafted"))
    picture = (tmp_path / "a.svg").read_text()
    assert ">loss</text>" in picture and ">mean of 25</text>" in picture and ">levels drafted</text>" in picture
    assert picture == (tmp_path / "b.svg").read_text()


def test_the_record_names_the_machine_that_trained(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"a GPU, {device}")
    assert record.machine("cpu").endswith(f"{torch.get_num_threads()} threads")
    assert record.machine("cuda:1") == "a GPU, cuda:1"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lookahead": 0}, "--lookahead must be at least 1, got 0"),
        ({"continuations": -1}, "--continuations must be at least 0, got -1"),
        ({"own_chats": -1}, "--own-chats must be at least 0, got -1"),
        ({"held_out": -2}, "--held-out must be at least 0, got -2"),
        ({"transition_rank": -4}, "--transition-rank must be at least 0, got -4"),
        ({"warm_up": -1}, "--warm-up must be at least 0, got -1"),
        ({"minutes": -0.5}, "--minutes must be at least 0, got -0.5"),
        ({"learning_rate": "nan"}, "--learning-rate must be at least 0, got nan"),
        ({"decay": -0.1}, "--decay must be at least 0, got -0.1"),
        ({"length": 3}, r"--length must be at least --lookahead \+ 2 = 4, got 3"),
        ({"own_chats": 0}, "nothing to train on: give --data"),
        ({"continuations": 4}, "takes its prefixes from --data"),
        ({"sample_share": 2}, "--sample-share must lie between 0 and 1, got 2"),
        ({"self_distill": "/no/such/file"}, "--self-distill names '/no/such/file'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_options_are_refused_before_anything_is_loaded(tmp_path, changes, message):
    with pytest.raises(SystemExit, match=message):
        training.run("train", options_for(tmp_path, **changes), ["x"])


def test_the_smallest_options_are_taken(tmp_path):
    command.check_arguments(options_for(tmp_path, warm_up=0, held_out=0, transition_rank=0, minutes=0, length=4))


def test_the_shipped_instructions_are_the_packages_own(tmp_path, monkeypatch):
    """The shipped instructions reach the run from any folder."""
    for package in shared.PACKAGES:
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pass_ext.training.common.run.load_frozen", lambda *_: (tiny_llama(), Letters()))
    seen = []
    monkeypatch.setattr(pipeline, "train", lambda run: seen.append(run.instructions))
    training.run("train", options_for(tmp_path, self_distill="shipped"), ["x"])
    assert seen == [shared.INSTRUCTIONS.read_text().splitlines()] and len(seen[0]) == 267


def test_the_guides_command_and_the_shipped_one_have_options_that_exist(monkeypatch):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    root = ROOT
    guide, _, _ = (
        (root / "docs/guide/training.md").read_text().replace("\\\n", " ").partition("## Train an early-exit draft")
    )
    shipped = LookaheadEmbedding.from_pretrained("smollm2-135m-instruct-slots").training_record["command"]
    lines = [line for line in guide.splitlines() if line.startswith("python -m pass_ext train")]
    assert len(lines) == 3 and "gemma" in lines[2], "a base model, which answers no instructions"
    monkeypatch.chdir(root)  # the shipped command ran there
    for line, instructions in (
        *((line.replace("cuda", "cpu"), "" if "gemma" in line else "shipped") for line in lines),
        (shipped, "pass_ext/training/instructions.txt"),
    ):
        options = parser.parse_args(training.with_config(parser, shlex.split(line)[4:]))
        assert options.lookahead == 4 and options.self_distill == instructions
        command.check_arguments(options)
    for option in re.findall(r"`(--[a-z-]+)", guide):
        assert option in parser.format_help(), option


@pytest.mark.parametrize("package", shared.PACKAGES)
def test_a_missing_package_is_named_before_anything_is_loaded(tmp_path, package, monkeypatch):
    monkeypatch.setattr(shared, "find_spec", lambda name: None if name == package else object())
    with pytest.raises(SystemExit, match=rf"training needs {package}: pip install 'pass_ext\[hf,train\]'"):
        training.run("train", options_for(tmp_path, data=tmp_path / "absent"), ["x"])


def test_missing_models_and_data_are_named(tmp_path):
    for package in shared.PACKAGES:
        pytest.importorskip(package)
    with pytest.raises(SystemExit, match=r"no\.gguf' cannot be loaded: no such model file"):
        training.run("train", options_for(tmp_path, model=tmp_path / "no.gguf"), ["x"])
    with pytest.raises(SystemExit, match="which does not exist"):
        training.run("train", options_for(tmp_path, data=tmp_path / "absent"), ["x"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match=r"holds no \.py"):
        training.run("train", options_for(tmp_path, data=tmp_path / "empty"), ["x"])
