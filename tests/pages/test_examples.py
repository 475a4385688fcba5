"""examples/: each script runs and does what it says, and its assertions are able to fail."""

import importlib
import importlib.util
import runpy
import sys

import pytest
import torch
from support.paths import ROOT

import pass_ext

SCRIPT = ROOT / "examples" / "tree_decoding.py"

needs_examples = pytest.mark.skipif(not SCRIPT.exists(), reason="an sdist has no examples")


@pytest.fixture
def tree_decoding():
    spec = importlib.util.spec_from_file_location("tree_decoding", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(one_thread, monkeypatch, capsys):
    """Runs an example in this process, as a module or as a script: the numbers of tokens per call that it prints."""

    def run(name, device="cpu", new_tokens=40, is_script=False):
        script = ROOT / "examples" / f"{name}.py"
        monkeypatch.setattr(sys, "argv", [str(script), "--device", device, "--new-tokens", str(new_tokens)])
        monkeypatch.syspath_prepend(script.parent if is_script else ROOT)
        if is_script:
            runpy.run_path(str(script), run_name="__main__")
        else:
            runpy.run_module(f"examples.{name}", run_name="__main__")
        return [float(line.split(":")[1].split()[0]) for line in capsys.readouterr().out.splitlines()]

    return run


@needs_examples
def test_tree_decoding_gives_the_texts_of_plain_decoding(run):
    greedy, sampled = run("tree_decoding")
    assert greedy > 1.5 and sampled > 1.2, "trees are accepted, and a call gives more than one token"


@needs_examples
def test_tree_decoding_on_a_gpu(cuda, run):
    run("tree_decoding", "cuda")


def decode(module, temperature):
    torch.manual_seed(0)
    model = module.Model().requires_grad_(False)
    prompts, seeds = [[1, 2, 3, 4], [9, 8, 7, 6, 5, 4, 3]], [1, 2]
    texts, per_call = module.decode_by_trees(model, prompts, 40, temperature, seeds)
    plain = [
        module.decode_plainly(model, *each, 40, temperature, seed) for *each, seed in zip(prompts, seeds, strict=True)
    ]
    return texts, plain, per_call


FAULTS = {  # op, position of the argument, change
    "the cache keeps other nodes than were accepted": (
        "cache_commit_", 3, lambda path: torch.where(path > 0, path - 1, path),
    ),
    "nodes see no key of the cache": ("attention_tree", 3, torch.zeros_like),
    "nodes see other branches": ("attention_tree", 5, lambda visible: torch.full_like(visible, -1)),
}  # fmt: skip


@needs_examples
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.replace(" ", "-"))
def test_a_fault_in_a_step_shows_in_the_texts(tree_decoding, one_thread, monkeypatch, fault):
    """The comparison detects a fault: without it the texts are equal, with it they differ."""
    texts, plain, per_call = decode(tree_decoding, 0.0)
    assert texts == plain and per_call > 1.0
    op, place, spoil = FAULTS[fault]
    original = getattr(pass_ext, op)

    def faulty(*arguments, **named):
        return original(*arguments[:place], spoil(arguments[place]), *arguments[place + 1 :], **named)

    monkeypatch.setattr(pass_ext, op, faulty)
    texts, plain, _ = decode(tree_decoding, 0.0)
    assert texts != plain


@needs_examples
def test_the_plain_decoder_writes_one_text_by_every_method(run):
    plain, ngrams, both, *sampled = run("plain_decoder")
    assert plain == sampled[0] == 1.0
    assert min(ngrams, both) > 1.5 and min(sampled[1:]) > 1.2


# ---- draft models ----

DRAFTING = ["speculative", "multi_candidate"]


@needs_examples
@pytest.mark.parametrize(("name", "is_script"), [("speculative", False), ("multi_candidate", True)])
def test_draft_models_give_the_texts_of_plain_decoding(name, is_script, run):
    pytest.importorskip("transformers")
    own, transformers = run(name, new_tokens=24, is_script=is_script)
    assert own > 1.5 and transformers > 1.1


@needs_examples
def test_a_text_after_a_picture_is_the_models_own(run):
    pytest.importorskip("transformers")
    (tokens,) = run("pictures")
    assert tokens > 1


@needs_examples
@pytest.mark.parametrize("name", DRAFTING)
def test_an_example_insists_on_the_text_of_plain_decoding(name, one_thread, monkeypatch):
    """generate writes one wrong token wherever a draft model is used."""
    module, original = importlib.import_module(f"examples.{name}"), pass_ext.generate
    module.with_a_decoder_of_your_own("cpu", 12)

    def faulty(model, ids, method, **options):
        made = original(model, ids, method, **options)
        if not isinstance(method, pass_ext.Plain):
            made.sequences[-1, -1] += 1
        return made

    monkeypatch.setattr(pass_ext, "generate", faulty)
    with pytest.raises(AssertionError, match="the texts differ"):
        module.with_a_decoder_of_your_own("cpu", 12)
