"""Slots, methods, prophets and small decoders for tests of generate."""

import copy
import random
from contextlib import contextmanager

import torch
from support.small_models import VOCABULARY
from torch.utils._python_dispatch import TorchDispatchMode

import pass_ext
from pass_ext import (
    NGram,
    PaSS,
    Plain,
    Tree,
    generate,
)
from pass_ext.decoding import generation
from pass_ext.decoding.drafting.candidates import Candidates, Proposal
from pass_ext.decoding.drafting.from_slots import LookaheadDrafter
from pass_ext.decoding.drafting.slot_tokens import TreeFiller
from pass_ext.modules.exit_adapter import ExitAdapter

BUSHY = Tree([-1, 0, 0, 0, 1, 1, 2, 4, 4, 7])


def slots_for(model, count=4, seed=0, **more):
    torch.manual_seed(seed)
    width = model.get_input_embeddings().embedding_dim
    slots = pass_ext.LookaheadEmbedding(count, width, vocabulary=VOCABULARY, **more)
    for parameter in slots.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return slots


def methods_for(model):
    lookahead, layers = slots_for(model), getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", 2)
    return {
        "plain": Plain(),
        "ngram": NGram(longest=3, shortest=1, tokens=5, branches=2),
        "one pass": PaSS(lookahead, tree=BUSHY, rows=24),
        "two passes": PaSS(lookahead, passes=2, tree=Tree.from_branching((3, 2, 1)), rows=24),
        "one pass, planned": PaSS(lookahead, rows=12),
        "one pass, deep": PaSS(
            slots_for(model, rank=3, deep_layers=0 if model.config.model_type == "opt" else layers),
            tree=BUSHY.with_lookahead({0: 4, 2: 4, 7: 4}),
            rows=24,
        ),
        "one pass with ngrams": PaSS(
            lookahead, tree=Tree.chain(3), rows=24, ngram=NGram(longest=2, shortest=1, tokens=6)
        ),
    }


def greedy_of_transformers(model, ids, mask, new_tokens, **options):
    return model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, **options)


class Prophet:
    """Candidates that come true often: it drafts the continuations in `futures` and spoils some, so that trees are accepted to
    every depth and last accepted nodes are of every kind. The host makes the rows: a device fills trees by itself.
    """

    def __init__(self, monkeypatch, futures, seed=0):
        self.futures, self.random = futures, random.Random(seed)  # prompt + continuation, by request
        prophet = self

        def fill(self, slots, requests, roots, positions, text=None):
            drafts = (prophet.tokens(self.tree, b, at) for b, at in zip(requests, positions, strict=True))
            return Proposal([Candidates(self.tree, own, groups=self._groups) for own in drafts])

        def offered(self, batch, active, predicting):
            return prophet.offered(self.prompt_slots, [batch.texts[b] for b in active], active, predicting)

        monkeypatch.setattr(TreeFiller, "fill", fill)
        monkeypatch.setattr(LookaheadDrafter, "_offered", offered)
        monkeypatch.setattr(generation, "_device_rows", lambda *_: None)

    def offered(self, slots, texts, requests, predicting):
        """Three tokens for each slot, of which one comes true, four times in five."""
        if not any(predicting):
            return {}
        tokens = torch.full((len(texts), slots, 3), -1)
        for i, (text, request, rows) in enumerate(zip(texts, requests, predicting, strict=True)):
            for slot in range(len(rows)):
                found, place = self.random.sample(range(VOCABULARY), 3), len(text) + slot
                future = self.futures[request]
                if place < len(future) and self.random.random() < 0.8:
                    found[0] = future[place]
                tokens[i, slot] = torch.tensor(found)
        scores = torch.tensor([0.7, 0.2, 0.05]).log().expand(tokens.shape).contiguous()
        return {"offered": tokens, "scores": scores, "first": 1}

    def tokens(self, tree, request, root_position):
        """One child of each right node is right, four times in five; the others are noise."""
        future, right, tokens = self.futures[request], {0}, {}
        for node in range(tree.num_nodes):
            children = tree.children(node)
            chosen = self.random.choice(children) if children and self.random.random() < 0.8 else None
            for child in children:
                place = root_position + tree.depths[child]
                if node in right and child == chosen and place < len(future):
                    tokens[child] = future[place]
                    right.add(child)
                else:
                    tokens[child] = self.random.randrange(-1, VOCABULARY)
        return [tokens[node] for node in range(1, tree.num_nodes)]


def unpadded(sequences, mask):
    seen = torch.nn.functional.pad(mask.bool(), (0, sequences.shape[1] - mask.shape[1]), value=True)
    return [row[own].tolist() for row, own in zip(sequences, seen, strict=True)]


def replace_shipped_slots(monkeypatch, model):
    """``from_pretrained`` makes slots that fit the model -> a list that collects the names asked for."""
    names = []

    def from_pretrained(name):
        names.append(name)
        return pass_ext.LookaheadEmbedding.from_table(3, model.get_input_embeddings().weight)

    monkeypatch.setattr(pass_ext.LookaheadEmbedding, "from_pretrained", from_pretrained)
    return names


def assert_as_alone(model, method, ids, mask, of_each, **options):
    """Texts of a batch, and how many drafts each step accepted, are those of each request by itself.

    of_each: arguments with a number, or another value, for each request.
    """
    together = generate(model, ids, method, attention_mask=mask, **of_each, **options)
    histogram = [0] * len(together.stats.acceptance_histogram)
    for b, (row, seen) in enumerate(zip(ids, mask.bool(), strict=True)):
        own = {name: values[b : b + 1] for name, values in of_each.items()}
        alone = generate(model, row[seen][None], method, **own, **options)
        assert together.lengths[b] == alone.lengths[0], b
        new = together.sequences[b, len(row) :][: alone.lengths[0]]
        assert torch.equal(new, alone.sequences[0, int(seen.sum()) :]), b
        for accepted, steps in enumerate(alone.stats.acceptance_histogram):
            histogram[accepted] += steps
    assert list(together.stats.acceptance_histogram) == histogram
    return together


class Decoder:
    """A model of one layer without weights."""

    embedding = torch.eye(9, 64)

    def __call__(self, rows, positions, attend, wanted):
        x = attend(0, *(rows.unflatten(1, (1, 64)),) * 3).flatten(1) - rows
        return (x if wanted is None else x[wanted]) @ self.embedding.T


class Monotone:
    """A model whose rows all give the same logits, whatever they read; so do look-ahead slots."""

    embedding = torch.randn(50, 16, generator=torch.Generator().manual_seed(2))
    logits = torch.randn(50, generator=torch.Generator().manual_seed(3))

    def __call__(self, rows, positions, attend, wanted):
        attend(0, *[rows[:, None]] * 3)
        return self.logits.repeat(len(rows) if wanted is None else len(wanted), 1)


def adapter_for(model, layers=1, rank=5, vocabulary=None):
    """An adapter that changes the hidden states."""
    torch.manual_seed(3)
    table = model.get_input_embeddings().weight
    adapter = ExitAdapter(layers, table.shape[1], rank, vocabulary=vocabulary, base_vocabulary=len(table))
    with torch.no_grad():
        adapter.up.weight.normal_(0, 0.5)
    return adapter


def disturbed(model, size, seed=0):
    model = copy.deepcopy(model)
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * size * parameter.std())
    return model


def distribution_of_texts(model, prompt, vocabulary, new_tokens, temperature):
    """Every text, and its probability by the model itself."""
    texts = torch.cartesian_prod(*[torch.arange(vocabulary)] * new_tokens)
    whole = torch.cat([torch.tensor(prompt).expand(len(texts), -1), texts], 1)
    logits = model(whole[:, :-1]).logits[:, len(prompt) - 1 :].double() / temperature
    return logits.log_softmax(-1).gather(2, texts[:, :, None]).sum((1, 2)).exp()


# ---- steps that the device runs without the host ----


class Mixer:
    """A model of one layer; the emulator has all ops that it needs."""

    def __init__(self, device):
        generator = torch.Generator().manual_seed(2)
        self.embedding, *self.weights = (
            torch.randn(rows, 64, generator=generator).to(device) for rows in (VOCABULARY, 64, 64, 64)
        )

    def __call__(self, rows, positions, attend, wanted):
        x = rows + (positions[:, None] * torch.arange(1, 65, device=rows.device)).float().cos()
        x = rows + attend(0, *((x @ weight / 8)[:, None] for weight in self.weights))[:, 0] * 4
        return (x if wanted is None else x[wanted]) @ self.embedding.T


class HostRead(AssertionError):
    pass


class NoHostReads(TorchDispatchMode):
    """Fails at every op whose result or shape the host has to wait for, and counts the ops."""

    READS = (
        "_local_scalar_dense",
        "item",
        "nonzero",
        "is_nonzero",
        "equal",
        "masked_select",
        "unique",
        "_unique2",
        "where",
    )

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        by_mask = name == "index" and any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
        if by_mask or (name in self.READS and not (name == "where" and len(args) == 3)):
            raise HostRead(str(func))
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))

    @classmethod
    @contextmanager
    def guarded(cls, monkeypatch):
        """The context in which the host reads nothing."""

        def refused(*_):
            raise HostRead("a tensor's numbers were read")

        with monkeypatch.context() as patch, cls() as mode:
            for name in ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "numpy", "cpu"):
                patch.setattr(torch.Tensor, name, refused)
            yield mode
