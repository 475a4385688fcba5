"""Values of a wrong type at ``generate``, the methods and what goes into them: refused in words that name the argument."""

import inspect

import pytest
import torch
from support.generation import Decoder

import pass_ext

IDS = torch.tensor([[5, 6, 7]])
WRONG = ["3", 1.5, True, [1.5], None, (), {}, int, 2**64, -1, float("nan"), object(), torch.tensor(1.5), b"x", [None]]
SLOTS = pass_ext.LookaheadEmbedding(2, 16)


def strange_answers(function, arguments, name):
    """Refusals that do not name the argument."""
    strange = []
    for argument in arguments:
        for value in WRONG:
            try:
                function(**{argument: value})
            except Exception as error:
                words = str(error)
                has_words = argument in words and "must" in words and "object" not in words.split("must")[0]
                if not has_words and "a tree has" not in words and "is neither a file nor" not in words:
                    strange.append(f"{name} {argument}={value!r}: {type(error).__name__}: {words}")
    return strange


def test_generate():
    base = dict(model=Decoder(), input_ids=IDS, max_new_tokens=2)
    names = set(inspect.signature(pass_ext.generate).parameters) - {"logits_processor"}
    assert strange_answers(lambda **given: pass_ext.generate(**base | given), sorted(names), "generate") == []


FACES = {
    "Session": (pass_ext.Session, dict(model=Decoder())),
    "SyntheticAcceptance": (pass_ext.drafting.SyntheticAcceptance, {}),
    "NGram": (pass_ext.NGram, {}),
    "PaSS": (pass_ext.PaSS, dict(lookahead=SLOTS)),
    "Speculative": (pass_ext.Speculative, dict(draft_model=Decoder())),
    "MultiCandidate": (pass_ext.MultiCandidate, dict(draft_model=Decoder())),
    "Corpus": (pass_ext.drafting.Corpus, {}),
    "pack_trees": (pass_ext.pack_trees, dict(trees=[pass_ext.Tree.chain(2)])),
    "Tree": (pass_ext.Tree, {}),
    "from_branching": (pass_ext.Tree.from_branching, {}),
}


@pytest.mark.parametrize("name", FACES)
def test_what_a_user_makes(name):
    make, base = FACES[name]
    arguments = inspect.signature(make).parameters
    assert strange_answers(lambda **given: make(**base | given), arguments, name) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(logprobs=1.5), "generate: logprobs, if not None, must be a whole number, 0 to 64, got 1.5"),
        (dict(logprobs="3"), "generate: logprobs, if not None, must be a whole number, 0 to 64, got '3'"),
        (dict(seeds=2**64, temperature=1.0), r"seeds must be integers from -9\d+ to 9\d+, got 18446744073709551616"),
        (dict(top_k=2**40, temperature=1.0), r"top_k must be integers from -2\d+ to 2147483647, got 1099511627776"),
        (dict(method=pass_ext.NGram), r"method must be .*got the class NGram: write NGram\(\.\.\.\)"),
        (
            dict(max_new_tokens=2**40),
            "generate: max_new_tokens must be a whole number, 1 to 1073741824, got 1099511627776",
        ),
        (dict(eos_token_id=1.5), "generate: eos_token_id must be an id, a whole number of 64 bits, got 1.5"),
        (dict(eos_token_id=[True]), "generate: eos_token_id must be an id, .*got True"),
        (dict(streamer=[]), r"generate: streamer must have put\(tokens\) and end\(\), got list"),
        (dict(session=1), "generate: session must be a pass_ext.Session or None, got int"),
    ],
    ids=str,
)
def test_what_came_is_named(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        pass_ext.generate(Decoder(), IDS, **{"max_new_tokens": 2} | arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_trees_for_a_gpu_that_is_not_there():
    with pytest.raises(RuntimeError, match=r"pack_trees: device is cuda, but torch .* sees no GPU here"):
        pass_ext.pack_trees([pass_ext.Tree.chain(2)], "cuda")


def test_ngram_says_which_way_its_defaults_stand():
    with pytest.raises(
        ValueError, match="NGram: shortest must be at most longest, got shortest=2 and longest=1; give both"
    ):
        pass_ext.NGram(longest=1)
