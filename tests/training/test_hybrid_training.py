"""Slots of models whose layers keep a state: loss and gradients are those of the model's own forward, group by group."""

import argparse
import sys

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from packaging.version import Version
from support.paths import ROOT
from support.training_models import SETTINGS, WEIGHTS, Letters, counting, dense_loss, slots_for, windows_of

sys.path.append(str(ROOT))  # for benchmarks; at the end, so that an installed pass_ext stays the one that is tested
from benchmarks.architectures.models import tiny_model
from pass_ext import LookaheadEmbedding, PaSS, Tree, generate
from pass_ext.reference.recurrent import recurrent_tree_algebra
from pass_ext.training.common.documents import Document
from pass_ext.training.common.run import Run
from pass_ext.training.lookahead import command, pipeline
from pass_ext.training.lookahead.loop import LookaheadTrainer, step_loss
from pass_ext.training.lookahead.states import group_outputs, read_text, with_states

if Version(transformers.__version__) < Version("5.24"):
    pytest.skip("the functions are those of transformers 5.24", allow_module_level=True)

FAMILIES = ("qwen3_next", "lfm2", "bamba", "falcon_h1", "mamba", "jamba", "kimi_linear", "olmo_hybrid")


DEEP = ("qwen3_next", "lfm2", "kimi_linear")  # their layers lie where the expectation finds them


@pytest.mark.parametrize(("family", "deep"), [*((family, False) for family in FAMILIES), *((f, True) for f in DEEP)])
def test_loss_and_gradients_are_those_of_one_ordinary_forward_a_group(family, deep):
    model = tiny_model(family).requires_grad_(False)
    embedding = slots_for(model, deep=deep)
    window = windows_of(counting(9, 24)).at(3)
    expected = dense_loss(model, embedding, window, 0.8, "kl")
    loss = step_loss(with_states(model, 64), embedding, window, WEIGHTS, "kl")
    torch.testing.assert_close(loss, expected, atol=2e-5, rtol=2e-5)
    parameters = list(embedding.parameters())
    gradients = torch.autograd.grad(loss, parameters)
    for mine, theirs in zip(gradients, torch.autograd.grad(expected, parameters), strict=True):
        assert theirs.abs().max() > 1e-4
        torch.testing.assert_close(mine, theirs, atol=1e-3 * float(theirs.abs().max()), rtol=1e-3)


@pytest.mark.parametrize("form", ["delta", "additive"])
@pytest.mark.parametrize("decay", ["head", "channel", "element"])
def test_groups_are_the_algebra_of_the_reference(form, decay):
    torch.manual_seed(0)
    groups, slots, heads, key_heads, dk, dv = 5, 4, 4, 2, 6, 3
    q, k = torch.randn(2, groups, slots, key_heads, dk).double().requires_grad_()
    v, state = torch.randn(groups, slots, heads, dv).double(), torch.randn(groups, heads, dk, dv).double()
    beta = torch.rand(groups, slots, heads).double()
    shape = {"head": (heads,), "channel": (heads, dk), "element": (heads, dv)}[decay]
    log_decay = -torch.rand(groups, slots, *shape).double()
    options = dict(form=form, scale=0.3)
    if decay == "element":
        options["decay_rates"] = torch.rand(heads, dk, dv).double()
    got = group_outputs(q, k, v, log_decay, beta, state, **options)
    parents = torch.tensor([-1, *range(slots - 1)]).repeat(groups)
    rows = [x.flatten(0, 1) for x in (q, k, v, log_decay, beta)]
    cu_nodes = torch.arange(groups + 1) * slots
    expected, _ = recurrent_tree_algebra(*rows, state, parents, cu_nodes, **options)
    torch.testing.assert_close(got.flatten(0, 1), expected, rtol=1e-12, atol=1e-12)
    mine, theirs = (torch.autograd.grad(x.square().sum(), (q, k)) for x in (got, expected))
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_slots_learn_and_the_model_stays():
    model = tiny_model("qwen3_next").requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    embedding = slots_for(model, deep=False)
    trainer = LookaheadTrainer(with_states(model, 64), embedding, windows_of(counting(9, 24)), SETTINGS)
    trainer.run()
    assert sum(trainer.losses[-5:]) < 0.7 * sum(trainer.losses[:5]), trainer.losses
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any("forward" in vars(part) for part in model.modules())


def test_the_command_trains_slots_that_a_generation_takes(tmp_path):
    pytest.importorskip("matplotlib")
    console = pytest.importorskip("rich.console").Console(file=(tmp_path / "log").open("w"))
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    line = "--model tiny --steps 4 --length 24 --anchors 4 --lookahead 2 --sample-tokens 12 --own-chats 12 --batch 2"
    line += " --transition-rank 2 --warm-up 2 --adapter-rank 2 --continuations 20 --out"
    options = parser.parse_args([*line.split(), str(tmp_path / "out")])
    documents = [Document(f"part {n}.py", "python", f"line {n} of a text\n" * 40) for n in range(30)]
    model = tiny_model("qwen3_next").requires_grad_(False)
    path = pipeline.train(Run(options, "the command", model, Letters(), documents, ["Say hello.", "Count."], console))
    slots = LookaheadEmbedding.load(path)
    assert slots.training_record["evaluation"]["places"] > 0 and slots.adapters is not None
    ids = torch.tensor([[5, 6, 7, 8]])
    expected = generate(model, ids, max_new_tokens=12, eos_token_id=[]).sequences
    got = generate(
        model, ids, PaSS(slots, tree=Tree.from_branching((2, 1)), rows=8), max_new_tokens=12, eos_token_id=[]
    )
    assert torch.equal(got.sequences, expected) and got.stats.num_draft_tokens > 0


def test_texts_that_are_too_long_are_refused():
    model = with_states(tiny_model("lfm2"), 64)
    with pytest.raises(
        SystemExit, match="--length must be at most 1024 for a model with layers that keep a state, got 1025"
    ):
        read_text(model, torch.zeros(1, 1025, dtype=torch.int64))
