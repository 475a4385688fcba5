"""Files of trained modules: the message names the file and the part that is missing or wrong, in each of the three kinds."""

import json
import struct
import time
import tracemalloc

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from pass_ext import LookaheadEmbedding
from pass_ext.drafting import DecisionModel, ExitAdapter


def lookahead():
    embedding = LookaheadEmbedding(3, 16, rank=4, deep_layers=5, base_model="tiny", vocabulary=100)
    embedding.hit_rates = ((0.5, 0.25), (0.4, 0.125), (0.3, 0.0))
    embedding.greedy_hit_rates = ((0.625, 0.25), (0.5, 0.125), (0.375, 0.0))
    return embedding


def exit_adapter():
    adapter = ExitAdapter(2, 16, 4, vocabulary=torch.tensor([8, 2, 5]), base_model="tiny", base_vocabulary=9)
    adapter.hit_rates = ((0.5, 0.25), (0.4, 0.2))
    return adapter


def hidden_decision():
    return DecisionModel("hidden", 8, threshold=0.25, base_model="tiny", draft_model="small")


def entropy_decision():
    return DecisionModel("entropy", threshold=0.25, base_model="tiny", draft_model="small")


KINDS = {made.__name__: made for made in (lookahead, exit_adapter, hidden_decision, entropy_decision)}
LAYERS = ["layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"]
CLASSES = {
    "lookahead": LookaheadEmbedding,
    "exit_adapter": ExitAdapter,
    "hidden_decision": DecisionModel,
    "entropy_decision": DecisionModel,
}
KEYS = {
    "lookahead": ["base_model", "vocabulary", "hidden_size", "num_lookahead"],
    "exit_adapter": ["base_model", "vocabulary", "hidden_size", "layers", "rank"],
    "hidden_decision": ["kind", "dim", "threshold", "base_model", "draft_model"],
    "entropy_decision": ["kind", "dim", "threshold", "base_model", "draft_model"],
}
TENSORS = {
    "lookahead": ["lookahead", "transition_left", "transition_right"],
    "exit_adapter": ["down.weight", "up.weight"],
    "hidden_decision": [*LAYERS, "layers.2.weight", "layers.2.bias"],
    "entropy_decision": LAYERS,
}
TEXTS = ("base_model", "draft_model")  # any text is one
NUMBERS = {kind: [key for key in keys if key not in (*TEXTS, "kind", "threshold")] for kind, keys in KEYS.items()}


def whole(kind, path):
    """Tensors and metadata of a good file."""
    module = KINDS[kind]()
    module.training_record = {"command": "train"}
    module.save(path)
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118 (not a dict)


def spoilt(tensor, value):
    tensor = tensor.clone()
    tensor.view(-1)[-1] = value
    return tensor


DAMAGE = [  # kind, name of the part, change of tensors and metadata
    *((kind, key, lambda t, m, key=key: m.pop(key)) for kind in KINDS for key in KEYS[kind]),
    *((kind, name, lambda t, m, name=name: t.pop(name)) for kind in KINDS for name in TENSORS[kind]),
    *(
        (kind, key, lambda t, m, key=key, value=value: m.update({key: value}))
        for kind in KINDS
        for key in NUMBERS[kind]
        for value in ("", "-1", "2.5", "many", "1e400", "٣")
    ),
    *(
        (kind, name, lambda t, m, name=name, value=value: t.update({name: spoilt(t[name], value)}))
        for kind in KINDS
        for name in TENSORS[kind]
        for value in (float("nan"), float("inf"))
    ),
    *(
        (kind, name, lambda t, m, name=name: t.update({name: t[name].int()}))
        for kind in KINDS
        for name in TENSORS[kind]
    ),
    *(
        (kind, name, lambda t, m, name=name: t.update({name: t[name][:, None]}))
        for kind in KINDS
        for name in TENSORS[kind]
    ),
    *((kind, "strange", lambda t, m: t.update(strange=torch.ones(2))) for kind in KINDS),
    *(
        (kind, "training", lambda t, m, value=value: m.update(training=value))
        for kind in KINDS
        for value in ("{", "[1]", '"x"', "[" * 100_000)
    ),
    *(
        (kind, "threshold", lambda t, m, value=value: m.update(threshold=value))
        for kind in ("hidden_decision", "entropy_decision")
        for value in ("", "nan", "1.5", "-0.1", "high")
    ),
    ("entropy_decision", "kind", lambda t, m: m.update(kind="mlp")),
    ("entropy_decision", "dim", lambda t, m: m.update(kind="hidden")),
    ("hidden_decision", "dim", lambda t, m: m.update(kind="entropy")),
    *(
        (kind, "hit_rates", lambda t, m, row=row: m.update(hit_rates=f"[{row}, [0.5], [0.5]]"))
        for kind in ("lookahead", "exit_adapter")
        for row in (
            "[1.5]",
            "[-0.1]",
            "[NaN]",
            '["0.5"]',
            "[true]",
            "[null]",
            "[]",
            "0.5",
            "[0.6, 0.6]",
            "[1e400]",
            "{}",
        )
    ),
    *(
        (kind, "hit_rates", lambda t, m, value=value: m.update(hit_rates=value))
        for kind in ("lookahead", "exit_adapter")
        for value in ("", "[", "[]", "0.5", '{"0": [0.5]}', "[" * 100_000)
    ),
    ("lookahead", "hit_rates", lambda t, m: m.update(hit_rates="[[0.5]]")),
    ("lookahead", "greedy_hit_rates", lambda t, m: m.update(greedy_hit_rates="[[0.5]]")),
    ("lookahead", "greedy_hit_rates", lambda t, m: m.update(greedy_hit_rates="[[1.5], [0.5], [0.5]]")),
    ("lookahead", "deep", lambda t, m: t.update(deep=torch.zeros(0, 3, 16))),
    ("lookahead", "deep", lambda t, m: t.update(deep=torch.zeros(5, 2, 16))),
    ("lookahead", "transition_right", lambda t, m: t.update(transition_right=torch.zeros(16, 5))),
    ("lookahead", "deep", lambda t, m: t.update(deep=torch.tensor(0.0))),
    ("lookahead", "transition_left", lambda t, m: t.update(transition_left=torch.zeros(16, 0))),
    *(
        ("exit_adapter", "vocabulary", lambda t, m, ids=ids: t.update(vocabulary=ids))
        for ids in (
            torch.tensor([-1, 2]),
            torch.tensor([2, 9]),
            torch.tensor([2, 1 << 32]),
            torch.tensor([2, 2]),
            torch.tensor([2.0, 3.0]),
            torch.tensor([[2, 3]]),
            torch.tensor([], dtype=torch.int32),
        )
    ),
    (
        "exit_adapter",
        "vocabulary",
        lambda t, m: (m.update(vocabulary="0"), t.update(vocabulary=torch.tensor([1 << 32]))),
    ),
]


@pytest.mark.parametrize(("kind", "part"), list(dict.fromkeys((kind, part) for kind, part, _ in DAMAGE)))
def test_damage_is_named_with_its_file(kind, part, tmp_path):
    good = whole(kind, tmp_path / "whole")
    path = tmp_path / "damaged.safetensors"
    for change in [change for *which, change in DAMAGE if which == [kind, part]]:
        tensors, metadata = map(dict, good)
        change(tensors, metadata)
        assert metadata != good[1] or not same(tensors, good[0])
        save_file(tensors, path, metadata=metadata)
        with pytest.raises(ValueError, match="damaged") as caught:
            CLASSES[kind].load(path)
        message = str(caught.value)
        assert message.startswith(f"{path} is damaged: ") and part in message, message
        assert " must be " in message and (", got " in message or "but it is missing" in message), message
        assert len(message) < 700 + len(str(path)), "of a long text a part is shown"


def same(tensors, others):
    """True if both hold the same values in the same shapes and types."""
    return tensors.keys() == others.keys() and all(
        tensor.dtype == others[name].dtype and torch.equal(tensor, others[name]) for name, tensor in tensors.items()
    )


@pytest.mark.parametrize("kind", KINDS)
def test_whole_files_load(kind, tmp_path):
    tensors, _ = whole(kind, tmp_path / "whole")
    module = CLASSES[kind].load(tmp_path / "whole")
    assert module.training_record == {"command": "train"} and repr(module) == repr(KINDS[kind]())
    module.save(tmp_path / "again")
    with safe_open(tmp_path / "again", framework="pt") as file:
        assert same({name: file.get_tensor(name) for name in file.keys()}, tensors)  # noqa: SIM118


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "content",
    [
        lambda good: b"",
        lambda good: good[:5],
        lambda good: good[: len(good) // 4],
        lambda good: good[:-1],
        lambda good: b"<html>404: not found</html>" * 9,
        lambda good: b"\0" * len(good),
        lambda good: good[:9] + b"\xff" * 9 + good[18:],
    ],
    ids=["empty", "five bytes", "a quarter", "all but a byte", "HTML", "zeros", "garbled header"],
)
def test_other_files_are_refused_in_a_sentence(kind, content, tmp_path):
    whole(kind, tmp_path / "whole")
    path = tmp_path / "torn.safetensors"
    path.write_bytes(content((tmp_path / "whole").read_bytes()))
    with pytest.raises(ValueError, match=rf"^{path} is no .* file, or it was cut off: wanted a safetensors file"):
        CLASSES[kind].load(path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_a_missing_file_and_another_format(kind, tmp_path):
    load = CLASSES[kind].load
    with pytest.raises(ValueError, match=rf"^{tmp_path} is no .* file: .* got a folder"):
        load(tmp_path)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "absent")
    tensors, metadata = whole(kind, tmp_path / "whole")
    for form in (None, {}, metadata | {"format": "pass_ext.other.1"}):
        save_file(tensors, tmp_path / "other", metadata=form)
        with pytest.raises(
            ValueError, match=rf"^{tmp_path}/other is no .* file: its format is .* expected 'pass_ext\."
        ):
            load(tmp_path / "other")


HUGE = str(1 << 30)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("lookahead", {"num_lookahead": HUGE}),
        ("lookahead", {"hidden_size": HUGE}),
        ("exit_adapter", {"hidden_size": HUGE}),
        ("exit_adapter", {"rank": HUGE}),
        ("hidden_decision", {"dim": str(1 << 20)}),
        ("entropy_decision", {"kind": "hidden", "dim": str(1 << 20)}),
    ],
)
def test_nothing_is_allocated_by_metadata(kind, change, tmp_path, monkeypatch):
    """5 kB that claim a width of 2^20 took 2 GB and seconds before shapes were checked first."""
    tensors, metadata = whole(kind, tmp_path / "whole")
    path = tmp_path / "claims.safetensors"
    save_file(tensors, path, metadata=metadata | change)
    built = []
    for kind_of_module in (torch.nn.Linear, torch.nn.Parameter):
        monkeypatch.setattr(kind_of_module, "__init__", lambda *_, **__: built.append(1))
    monkeypatch.setattr(torch, "empty", lambda *_, **__: built.append(1))
    began = time.monotonic()
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"is damaged: .* of shape"):
        CLASSES[kind].load(path)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert not built and most < 1 << 20 and time.monotonic() - began < 1


def test_a_header_that_claims_what_the_file_has_not_is_refused(tmp_path):
    metadata = {"format": "pass_ext.lookahead.1", "base_model": "", "vocabulary": "9"}
    metadata |= {"hidden_size": HUGE, "num_lookahead": "1"}
    tensor = {"dtype": "F32", "shape": [1, 1 << 30], "data_offsets": [0, 4 << 30]}
    header = json.dumps({"__metadata__": metadata, "lookahead": tensor}).encode()
    (tmp_path / "x").write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
    with pytest.raises(ValueError, match="is no look-ahead embedding file, or it was cut off"):
        LookaheadEmbedding.load(tmp_path / "x")


def test_rates_of_greedy_texts_are_kept_apart(tmp_path):
    embedding = lookahead()
    embedding.save(tmp_path / "x")
    loaded = LookaheadEmbedding.load(tmp_path / "x")
    assert (loaded.hit_rates, loaded.greedy_hit_rates) == (embedding.hit_rates, embedding.greedy_hit_rates)
    embedding.greedy_hit_rates = None  # as files were before
    embedding.save(tmp_path / "x")
    assert LookaheadEmbedding.load(tmp_path / "x").greedy_hit_rates is None


def test_rates_that_were_rounded_up_to_one_still_load(tmp_path):
    embedding = LookaheadEmbedding(1, 4)
    embedding.hit_rates = ((0.33334, 0.33333, 0.33334),)
    embedding.save(tmp_path / "x")
    assert LookaheadEmbedding.load(tmp_path / "x").hit_rates == embedding.hit_rates


def test_a_vocabulary_that_int32_cannot_hold_is_refused():
    with pytest.raises(ValueError, match=f"ids from 0 to {(1 << 31) - 1}, got 2 to {1 << 32}"):
        ExitAdapter(1, 4, 2, vocabulary=torch.tensor([2, 1 << 32]))
    with pytest.raises(ValueError, match=r"must be integers, got torch\.float32"):
        ExitAdapter(1, 4, 2, vocabulary=torch.tensor([2.5, 3.5]))
