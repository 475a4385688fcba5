"""Decision models: their scores of a draft's rows, their labels and training, and their evaluation."""

import argparse
import json
import math
import sys
import types

import numpy as np
import pytest
import torch
from torch import nn

import pass_ext.modules.files
from pass_ext.decoding.models.any_model import packed_model
from pass_ext.decoding.models.packed import Adapted
from pass_ext.decoding.session.session import Session
from pass_ext.modules.decision import DecisionModel, DraftLevel
from pass_ext.training.decision import command, evaluation
from pass_ext.training.decision.evaluation import Chains, read_chains, with_levels, with_threshold
from pass_ext.training.decision.loop import (
    DecisionTrainer,
    Text,
    acceptance,
    class_weights,
    fresh,
    read_places,
    reading,
)
from pass_ext.tree import Tree, pack_trees

INF, NAN = math.inf, math.nan


def level_of(logits, hidden=None, tokens=None):
    rows = len(logits)
    tokens = torch.zeros(rows, 2, dtype=torch.int64) if tokens is None else tokens
    return DraftLevel(logits, hidden, tokens, torch.zeros(tokens.shape), torch.zeros(rows, dtype=torch.int64), 1)


def plain_scores(decision, rows):
    """sigmoid(W_n ... relu(W_1 x + b_1) ... + b_n) in numpy, fp64."""
    x = rows.double().numpy()
    for place, layer in enumerate(decision.layers):
        x = (np.maximum(x, 0) if place else x) @ layer.weight.detach().double().numpy().T + layer.bias.detach().numpy()
    return 1 / (1 + np.exp(-x[:, 0]))


def spread(decision):
    """Spreads the scores away from 0.5, so that a wrong layer shows."""
    with torch.no_grad():
        decision.layers[-1].weight.mul_(8)
    return decision


# ---- the model ----


def test_scores_are_those_of_the_formula():
    hidden = torch.randn(9, 24)
    decision = spread(fresh("hidden", 24, seed=1, threshold=0.4, base_model="", draft_model=""))
    assert [list(layer.weight.shape) for layer in decision.layers] == [[512, 24], [256, 512], [1, 256]]
    scores = decision(level_of(torch.randn(9, 50), hidden))
    assert scores.std() > 0.02 and decision.needs_hidden and decision.threshold == 0.4
    np.testing.assert_allclose(scores.detach().numpy(), plain_scores(decision, hidden), atol=1e-5)

    logits = 3 * torch.randn(7, 50)
    decision = spread(fresh("entropy", 0, seed=2, threshold=0.4, base_model="", draft_model=""))
    assert [list(layer.weight.shape) for layer in decision.layers] == [[44, 11], [1, 44]] and not decision.needs_hidden
    p = np.exp(logits.double().numpy())
    p /= p.sum(1, keepdims=True)
    top = -np.sort(-p, axis=1)[:, :10]
    rows = torch.from_numpy(np.concatenate([-(p * np.log(p)).sum(1, keepdims=True), top], axis=1))
    scores = decision(level_of(logits.bfloat16().float()))
    assert (scores.detach().numpy() != decision(level_of(logits)).detach().numpy()).any()
    np.testing.assert_allclose(decision(level_of(logits)).detach().numpy(), plain_scores(decision, rows), atol=1e-5)


def test_entropy_features_of_rows_whose_answer_is_known():
    decision = DecisionModel("entropy")
    peaked = torch.full((1, 40), -INF)
    peaked[0, 7] = 2.0
    assert decision.features(level_of(peaked)).tolist() == [[0.0, 1.0, *[0.0] * 9]]
    torch.testing.assert_close(
        decision.features(level_of(torch.zeros(1, 40))), torch.tensor([[math.log(40), *[1 / 40] * 10]])
    )
    halves = torch.full((1, 40), -INF)
    halves[0, [3, 30]] = 5.0
    torch.testing.assert_close(decision.features(level_of(halves)), torch.tensor([[math.log(2), 0.5, 0.5, *[0.0] * 8]]))
    few = torch.tensor([[0.0, math.log(3)]])  # fewer than ten tokens
    entropy = 0.25 * math.log(4) + 0.75 * math.log(4 / 3)
    torch.testing.assert_close(decision.features(level_of(few)), torch.tensor([[entropy, 0.75, 0.25, *[0.0] * 8]]))


def test_rows_that_say_nothing_stop():
    decision = DecisionModel("entropy")
    logits = torch.zeros(6, 30)
    logits[1, 4], logits[2], logits[3, 2] = NAN, -INF, INF
    tokens = torch.tensor([[5, 6]] * 4 + [[-1, -1], [3, -1]])
    scores = decision(level_of(logits, tokens=tokens))
    assert (scores > 0).tolist() == [True, False, False, False, False, True] and scores.isfinite().all()
    hidden = torch.zeros(4, 8)
    hidden[1, 2], hidden[2, 3] = NAN, INF
    scores = DecisionModel("hidden", 8)(level_of(torch.zeros(4, 30), hidden))
    assert (scores > 0).tolist() == [True, False, False, True] and scores.isfinite().all()


def test_wrong_hidden_rows_and_kinds_are_refused():
    decision = DecisionModel("hidden", 8, draft_model="small")
    with pytest.raises(ValueError, match=r"came without \(hidden=None\)"):
        decision(level_of(torch.zeros(2, 30)))
    with pytest.raises(ValueError, match=r"8 wide \(small\), got 9"):
        decision(level_of(torch.zeros(2, 30), torch.zeros(2, 9)))
    with pytest.raises(ValueError, match="kind must be one of hidden, entropy, got 'mlp'"):
        DecisionModel("mlp")
    for kind, dim in (("hidden", 0), ("entropy", 8)):
        with pytest.raises(ValueError, match="for kind 'hidden' only"):
            DecisionModel(kind, dim)
    with pytest.raises(ValueError, match=r"threshold must lie between 0 and 1, got 1\.5"):
        DecisionModel("entropy", threshold=1.5)


def test_forward_reads_nothing_back():
    """forward runs on the meta device, where every read of a value fails."""
    hidden = torch.empty(5, 8, device="meta")
    level = DraftLevel(
        torch.empty(5, 30, device="meta"),
        hidden,
        torch.empty(5, 2, dtype=torch.int64, device="meta"),
        torch.empty(5, 2, device="meta"),
        torch.empty(5, dtype=torch.int64, device="meta"),
        1,
    )
    for decision in (DecisionModel("hidden", 8, device="meta"), DecisionModel("entropy", device="meta")):
        assert decision(level).shape == (5,)


@pytest.mark.parametrize("kind", ["hidden", "entropy"])
def test_a_file_round_trip(kind, tmp_path, monkeypatch):
    dim = 8 if kind == "hidden" else 0
    decision = spread(DecisionModel(kind, dim, threshold=0.37, base_model="big", draft_model="small"))
    decision.training_record = {"command": "train", "evaluation": {"auc": 0.75}}
    path = tmp_path / f"big-decision-{kind}.safetensors"
    decision.save(path)
    again = DecisionModel.load(path, dim=dim, base_model="big")
    level = level_of(torch.randn(6, 40), torch.randn(6, 8))
    assert torch.equal(again(level), decision(level)) and not again(level).requires_grad
    for name in ("kind", "dim", "threshold", "base_model", "draft_model", "training_record"):
        assert getattr(again, name) == getattr(decision, name)
    assert repr(again) == repr(decision) and "threshold=0.37" in repr(again)

    monkeypatch.setattr(pass_ext.modules.files, "PRETRAINED", tmp_path)
    assert DecisionModel.from_pretrained(path.stem).threshold == 0.37
    assert DecisionModel.from_pretrained(path).threshold == 0.37
    with pytest.raises(ValueError, match=f"'absent' is neither a file nor one of the shipped names: {path.stem}"):
        DecisionModel.from_pretrained("absent")
    with pytest.raises(ValueError, match="base model: it has 'big', this model has 'other'"):
        DecisionModel.load(path, base_model="other")
    if kind == "hidden":
        with pytest.raises(ValueError, match="hidden size of the draft: it has 8, this model has 9"):
            DecisionModel.load(path, dim=9)


# ---- hidden rows ----


def head_inputs(model, ids):
    """``[T, d]``: the output layer's input when transformers runs the text by itself."""
    rows = []
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: rows.append(inputs[0][0]))
    model(input_ids=torch.tensor([ids]))
    hook.remove()
    return rows[0]


@pytest.mark.parametrize("architecture", ["llama", "opt", "gpt_neox"])
def test_kept_hidden_is_the_heads_input(architecture):
    pytest.importorskip("transformers")
    from support.small_models import small_model

    adapted = packed_model(small_model(architecture))
    tree, tokens = Tree([-1, 0, 0, 1, 1, 2, 4]), [5, 9, 14, 3, 77, 40, 8]
    paths = [[tokens[node] for node in tree.path(row)] for row in range(len(tree))]
    expected = torch.stack([head_inputs(adapted.model, path)[-1] for path in paths])
    packed, ids = pack_trees([tree]), torch.tensor(tokens)
    with torch.no_grad(), adapted.keeping_hidden() as hidden:
        with pytest.raises(RuntimeError, match="was not called yet"):
            _ = hidden.rows
        logits = Session(adapted, 1, 1).call(packed, ids)
        assert hidden.rows.shape == expected.shape
        torch.testing.assert_close(hidden.rows, expected, atol=2e-5, rtol=2e-5)
        head = adapted.model.get_output_embeddings()
        torch.testing.assert_close(head(hidden.rows), logits, atol=1e-4, rtol=1e-4)
        some = torch.tensor([6, 1, 3])
        Session(adapted, 1, 1).call(packed, ids, some)
    torch.testing.assert_close(hidden.rows, expected[some], atol=2e-5, rtol=2e-5)
    assert not head._forward_pre_hooks and not adapted.model._forward_pre_hooks and not adapted.model._forward_hooks


def test_kept_hidden_leaves_other_models_of_the_same_head_alone():
    pytest.importorskip("transformers")
    from support.small_models import small_model

    target, draft = small_model("llama"), small_model("llama", seed=1)
    draft.set_output_embeddings(target.get_output_embeddings())
    chain, ids = pack_trees([Tree.chain(2)]), torch.tensor([4, 5, 6])
    target, draft = packed_model(target), packed_model(draft)
    with torch.no_grad(), target.attached(), draft.keeping_hidden() as hidden:
        Session(draft, 1, 1).call(chain, ids)
        rows = hidden.rows.clone()
        Session(target, 1, 1).call(chain, ids)
        assert torch.equal(hidden.rows, rows)


def test_kept_hidden_of_a_model_that_computes_all_rows(monkeypatch):
    pytest.importorskip("transformers")
    from support.small_models import small_model

    adapted = packed_model(small_model("llama"))
    kind = type(adapted.model)
    forward = kind.forward
    monkeypatch.setattr(
        kind, "forward", lambda self, *inputs, logits_to_keep=0, **named: forward(self, *inputs, **named)
    )
    chain, ids, some = pack_trees([Tree.chain(2)]), torch.tensor([4, 5, 6]), torch.tensor([2, 0])
    with torch.no_grad(), adapted.keeping_hidden() as hidden:
        Session(adapted, 1, 1).call(chain, ids)
        rows = hidden.rows.clone()
        Session(adapted, 1, 1).call(chain, ids, some)
        torch.testing.assert_close(hidden.rows, rows[some])


def test_kept_hidden_of_a_callable_model():
    class Callable(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)

        def get_output_embeddings(self):
            return self.head

        def forward(self, rows, positions, attend, wanted):
            return self.head(rows if wanted is None else rows[wanted])

    model, rows = Callable(), torch.randn(5, 8)
    with Adapted(model).keeping_hidden() as hidden:
        model(rows, None, None, torch.tensor([3, 0]))
        assert torch.equal(hidden.rows, rows[[3, 0]])


def test_models_without_an_output_layer_are_refused():
    class Plain(nn.Module):
        embedding = torch.zeros(20, 8)

    with (
        pytest.raises(ValueError, match=r"get_output_embeddings\(\) gives, and Plain has none"),
        Adapted(Plain()).keeping_hidden(),
    ):
        pass


# ---- labels and learning ----


def test_labels_are_the_chance_of_acceptance():
    p, q = 2 * torch.randn(130, 30), 2 * torch.randn(130, 33)
    distributions = [x[:, :30].double().div(0.7).softmax(-1) for x in (p, q)]
    drawn = distributions[1].multinomial(40_000, replacement=True)  # min(1, p/q) of drawn tokens, on average
    ratio = (distributions[0].gather(1, drawn) / distributions[1].gather(1, drawn)).clamp(max=1).mean(1)
    labels = acceptance(p, q, 0.7)
    torch.testing.assert_close(labels.double(), ratio, atol=0.02, rtol=0)
    assert acceptance(p, q, 0).tolist() == (p.argmax(1) == q[:, :30].argmax(1)).float().tolist()
    assert torch.equal(acceptance(p, p, 0), torch.ones(130))


def test_classes_weigh_the_same():
    labels = torch.tensor([1.0] * 3 + [0.0] * 9)
    weights = class_weights(labels)
    assert float(weights[:3].sum()) == pytest.approx(6) and float(weights[3:].sum()) == pytest.approx(6)
    for same in (0.0, 1.0):
        with pytest.raises(ValueError, match=f"all 5 places have the label {int(same)}"):
            class_weights(torch.full((5,), same))


def separable(count=600, seed=0):
    """Logits that are peaked where the draft is right; one place in eight is right."""
    generator = torch.Generator().manual_seed(seed)
    labels = (torch.arange(count) % 8 == 0).float()
    logits = torch.randn(count, 40, generator=generator)
    logits[:, 3] += 2 + 4 * labels
    return logits, labels


def fit(decision, features, labels, **settings):
    trainer = DecisionTrainer(decision, features, labels, **settings)
    trainer.run()
    trainer.finish()
    return trainer.losses


def fitted(seed=0, balanced=True):
    logits, labels = separable()
    decision = fresh("entropy", 0, seed=seed, threshold=0.4, base_model="", draft_model="")
    losses = fit(
        decision,
        decision.features(level_of(logits)),
        labels,
        epochs=10,
        learning_rate=1e-2,
        batch=64,
        seed=seed,
        balanced=balanced,
    )
    return decision, losses


def test_separable_places_are_learnt_and_the_seed_decides_everything():
    decision, losses = fitted()
    logits, labels = separable(seed=5)
    scores = decision(level_of(logits))
    assert evaluation.auc(scores, labels) > 0.99 and sum(losses[-10:]) < 0.3 * sum(losses[:10])
    assert evaluation.accuracy(scores, labels, 0.5) > 0.95
    again, _ = fitted()
    assert all(torch.equal(a, b) for a, b in zip(decision.parameters(), again.parameters(), strict=True))
    other, _ = fitted(seed=1)
    assert not torch.equal(decision.layers[0].weight, other.layers[0].weight)


def test_balance_shows_in_the_scores_of_identical_places():
    labels = (torch.arange(800) % 8 == 0).float()
    means = {}
    for balanced in (True, False):
        decision = fresh("entropy", 0, seed=0, threshold=0.4, base_model="", draft_model="")
        fit(decision, torch.zeros(800, 11), labels, epochs=20, learning_rate=1e-2, batch=200, seed=0, balanced=balanced)
        means[balanced] = float(decision.logit(torch.zeros(1, 11)).sigmoid())
    assert means[True] == pytest.approx(0.5, abs=0.05) and means[False] == pytest.approx(1 / 8, abs=0.05)


def test_standardised_features_are_taken_into_the_first_layer():
    decision = spread(DecisionModel("hidden", 6))
    rows, mean, deviation = torch.randn(5, 6), torch.randn(6), torch.rand(6) + 0.5
    before = decision.logit((rows - mean) / deviation)
    decision.standardise(mean, deviation)
    torch.testing.assert_close(decision.logit(rows), before, atol=1e-4, rtol=1e-4)


# ---- evaluation ----


def test_auc_and_accuracy_equal_brute_force():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 7, (60,), generator=generator) / 7
    for labels in (torch.randint(0, 2, (60,), generator=generator).float(), torch.rand(60, generator=generator)):
        better = total = 0.0
        for s, y in zip(scores.tolist(), labels.tolist(), strict=True):
            for t, z in zip(scores.tolist(), labels.tolist(), strict=True):
                weight = y * (1 - z)
                total += weight
                better += weight * (1.0 if s > t else 0.5 if s == t else 0.0)
        assert evaluation.auc(scores, labels) == pytest.approx(better / total)
        right = sum(y if s > 0.4 else 1 - y for s, y in zip(scores.tolist(), labels.tolist(), strict=True)) / 60
        assert evaluation.accuracy(scores, labels, 0.4) == pytest.approx(right)
    assert evaluation.auc(scores, torch.ones(60)) is None


def test_calibration_has_a_row_for_each_tenth():
    rows = evaluation.calibration(torch.tensor([0.05, 0.01, 0.45, 1.0]), torch.tensor([0.0, 1.0, 1.0, 0.5]))
    assert [(row["from"], row["places"], row["accepted"]) for row in rows] == [
        (0.0, 2, 0.5),
        (0.4, 1, 1.0),
        (0.9, 1, 0.5),
    ]
    assert rows[0]["score"] == pytest.approx(0.03)


def test_outcomes_of_stopping():
    chains = Chains(
        torch.tensor([[0.9, 0.3, 0.9], [0.2, 0.9, 0.9], [0.8, 0.8, 0.1]]),
        torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 1.0], [0.5, 0.5, 1.0]]),
    )
    assert with_levels(chains, 3) == pytest.approx((3, (3 + 1 + 1.0) / 3))
    assert with_levels(chains, 1) == pytest.approx((1, 2.5 / 3))
    assert with_threshold(chains, 0.5) == pytest.approx(((2 + 1 + 3) / 3, (2 + 1 + 1.0) / 3))
    assert with_threshold(chains, 0.0) == with_levels(chains, 3)
    assert with_threshold(chains, 0.9) == with_levels(chains, 1)
    report = evaluation.chains_report(chains, 0.5, 0.25)
    assert report["chosen"]["levels_saved"] == pytest.approx(1 / 3, abs=1e-4)
    assert report["chosen"]["tokens_lost"] == pytest.approx(0.2, abs=1e-4)
    assert report["chosen"]["speed"] == pytest.approx((1 + 4 / 3) / 1.5, abs=1e-4)
    speeds = {at: evaluation.speed(with_threshold(chains, at), 0.25) for at in (0.0, 0.2, 0.35, 0.8, 0.9)}
    best = evaluation.best_threshold(chains, 0.25)
    assert evaluation.speed(with_threshold(chains, best), 0.25) == max(speeds.values())


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_places_and_chains_are_those_of_models_run_alone(temperature):
    pytest.importorskip("transformers")
    from support.training_models import tiny_llama

    target, draft = tiny_llama(), tiny_llama(seed=3)
    with torch.no_grad():  # a draft that is sometimes right
        for mine, theirs in zip(draft.parameters(), target.parameters(), strict=True):
            mine.copy_(theirs + 0.1 * mine)
    decision = spread(DecisionModel("hidden", 32)).requires_grad_(False)
    ids, places = torch.randint(3, 90, (14,)), torch.tensor([2, 6, 7, 12])
    text = Text(ids, places, "chat")
    with reading(target, draft, hidden=True) as pair:
        found = read_places(pair, [text, text], decision.features, temperature)
        chains = read_chains(pair, [text], decision, levels=3, temperature=temperature, seed=4)
        again = read_chains(pair, [text], decision, levels=3, temperature=temperature, seed=4)
    logits = [model(input_ids=ids[None]).logits[0, places] for model in (target, draft)]
    torch.testing.assert_close(found.labels[:4], acceptance(*logits, temperature), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found.features[4:], head_inputs(draft, ids.tolist())[places], atol=1e-4, rtol=1e-4)
    assert found.kinds == ["chat"] * 8
    assert torch.equal(chains.scores, again.scores) and torch.equal(chains.accepted, again.accepted)
    for row, place in enumerate(places.tolist()):
        path = ids[: place + 1].tolist()
        for level in range(3):
            score = decision(level_of(torch.zeros(1, 100), head_inputs(draft, path)[-1:]))
            torch.testing.assert_close(chains.scores[row, level], score[0], atol=1e-4, rtol=1e-4)
            p, q = (model(input_ids=torch.tensor([path])).logits[0, -1] for model in (target, draft))
            token = int(q.argmax())
            if temperature == 0:
                assert chains.accepted[row, level] == float(int(p.argmax()) == token)
                path.append(token)
            else:
                break
    if temperature > 0:  # tokens are drawn: the label is the mean acceptance
        with reading(target, draft, hidden=True) as pair:
            drawn = read_chains(pair, [text] * 300, decision, levels=1, temperature=temperature, seed=0)
        chances = drawn.accepted.view(300, 4)
        assert chances.std(0).max() > 0.05
        torch.testing.assert_close(chances.mean(0), found.labels[:4], atol=0.07, rtol=0)
    if temperature == 0:
        assert 0 < chains.accepted.mean() < 1


# ---- the command ----


def options_for(out, **changes):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    given = {
        "model": "tiny", "draft": "exit:1", "kind": "entropy", "out": str(out), "texts": 12, "length": 24, "places": 8,
        "own_chats": 12, "sample_tokens": 12, "evaluation_places": 5, "levels": 3, "epochs": 2, "batch": 32, **changes,
    }  # fmt: skip
    return parser.parse_args(
        [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"texts": 0}, "--texts must be at least 1, got 0"),
        ({"learning_rate": "nan"}, "--learning-rate must be at least 0, got nan"),
        ({"length": 1}, "--length must be at least 2, got 1"),
        ({"length": 2000}, "--length must be at most 1024, got 2000"),
        ({"levels": 200}, "--levels times --evaluation-places must be at most 512, got 200 · 5"),
        ({"own_chats": 0}, "nothing to train on: give --data"),
        ({"continuations": 4}, "takes its prefixes from --data"),
        ({"sample_share": 2}, "--sample-share must lie between 0 and 1, got 2"),
        ({"threshold": "high"}, "--threshold must be auto or lie between 0 and 1, got high"),
        ({"threshold": 1.2}, "--threshold must be auto or lie between 0 and 1, got 1.2"),
        ({"temperature": 1}, "--temperature is for --kind hidden"),
        ({"kind": "hidden", "temperature": -1}, "--temperature must be at least 0, got -1"),
        ({"self_distill": "/no/such/file"}, "--self-distill names '/no/such/file'"),
        ({"draft": "exit:"}, "--draft must be a model, exit:LAYERS or exit:NAME_OR_FILE, got 'exit:'"),
        ({"draft": "exit:0"}, "--draft exit:0 must leave at least 1 layer"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_options_are_refused_before_anything_is_loaded(tmp_path, changes, message):
    with pytest.raises(SystemExit, match=message):
        command.check_arguments(options_for(tmp_path, **changes))


def test_options_that_were_left_out_get_values(tmp_path):
    settled = {}
    for kind in ("hidden", "entropy"):
        options = options_for(tmp_path, kind=kind)
        command.check_arguments(options)
        settled[kind] = (options.temperature, options.threshold, options.name)
    assert settled == {"hidden": (1.0, 0.4, "decision-hidden"), "entropy": (0.0, 0.4, "decision-entropy")}


def test_exit_drafts_are_made_when_asked_for(monkeypatch):
    class EarlyExitDraft:
        def __init__(self, model, layers=None, adapter=None):
            if adapter == "absent":
                raise ValueError("'absent' is neither a file nor one of the shipped names")
            self.arguments = (model, layers, adapter)

    fake = types.ModuleType("pass_ext.decoding.models.early_exit")
    fake.EarlyExitDraft = EarlyExitDraft
    monkeypatch.setitem(sys.modules, "pass_ext.decoding.models.early_exit", fake)
    drafts = [command.load_draft(name, "model", None, torch.float32) for name in ("exit:3", "exit:smol")]
    assert [draft.arguments for draft in drafts] == [("model", 3, None), ("model", None, "smol")]
    with pytest.raises(SystemExit, match="--draft 'exit:absent': 'absent' is neither"):
        command.load_draft("exit:absent", "model", None, torch.float32)
    names = ("exit:3", "exit:/a/b-exit.safetensors", "/models/c.gguf", "exit:smol")
    assert list(map(command.draft_name, names)) == ["exit:3", "exit:b-exit", "c", "exit:smol"]


def test_another_tokenizer_is_refused(monkeypatch):
    def tokenizer(*tokens):
        return types.SimpleNamespace(get_vocab=lambda: {token: number for number, token in enumerate(tokens)})

    monkeypatch.setattr(command, "load_frozen", lambda *_: ("draft", tokenizer("a", "b", "c")))
    assert command.load_draft("other", None, tokenizer("a", "b"), torch.float32) == "draft"
    with pytest.raises(SystemExit, match="1 is token 'c' for the target"):
        command.load_draft("other", None, tokenizer("a", "c"), torch.float32)


@pytest.mark.parametrize("kind", ["hidden", "entropy"])
def test_the_command_trains_evaluates_and_repeats_itself(kind, tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    rich = pytest.importorskip("rich.console")
    from support.training_models import Letters, tiny_llama

    from pass_ext.training.common.documents import Document
    from pass_ext.training.common.run import Run
    from pass_ext.training.decision import pipeline

    console = rich.Console(file=(tmp_path / "log").open("w"))
    target, draft = tiny_llama(), tiny_llama(seed=3)
    with torch.no_grad():
        for mine, theirs in zip(draft.parameters(), target.parameters(), strict=True):
            mine.copy_(theirs + 0.2 * mine)
    documents = [Document(f"part {n}.py", "python", f"line {n} of a text\n" * 40) for n in range(30)]

    def trained(folder, **changes):
        options = options_for(folder, kind=kind, data="unread", continuations=20, **changes)
        command.check_arguments(options)
        run = Run(options, "the command", target, Letters(), documents, ["Say hello.", "Count."], console)
        return pipeline.train_for(draft, run)

    path = trained(tmp_path / "a")
    decision = DecisionModel.load(path)
    record, evaluation = decision.training_record, decision.training_record["evaluation"]
    assert decision.kind == kind and decision.threshold == 0.4 and decision.draft_model == "exit:1"
    assert record["command"] == "the command" and evaluation["places"] > 0 and evaluation["chains"]["levels"] == 3
    assert evaluation["chains"]["count"] == evaluation["places"]
    assert "threshold 0.4: " in record["summary"] and "of 3 levels drafted" in record["summary"]
    assert {"documents", "own samples", "places", "held out"} == set(record["data"])
    card = path.with_suffix(".md").read_text()
    assert "the command" in card and "always 3" in card and "score > 0.4" in card and record["summary"] in card
    assert path.with_suffix(".svg").stat().st_size > 1000
    assert len(json.loads(path.with_suffix(".json").read_text())["losses"]) == record["steps"]
    again = DecisionModel.load(trained(tmp_path / "b", threshold="auto"))
    assert all(torch.equal(a, b) for a, b in zip(decision.parameters(), again.parameters(), strict=True))
    speeds = {row["threshold"]: row["speed"] for row in again.training_record["evaluation"]["chains"]["thresholds"]}
    assert again.threshold in speeds
