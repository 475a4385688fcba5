"""Small random models, a letter tokenizer and samples of a learnable pattern, for the tests of training; slots and windows for
them, and the loss of a step computed by one ordinary forward a group.
"""

import torch
import torch.nn.functional as F

from pass_ext import LookaheadEmbedding
from pass_ext.modules.slot_adapters import SlotAdapters
from pass_ext.training.common.own_texts import Sample
from pass_ext.training.common.run import Windows
from pass_ext.training.lookahead.adapters import adapter_sizes
from pass_ext.training.lookahead.loop import Settings


class Letters:
    """A tokenizer of one token a letter, with the parts of transformers' interface that training calls."""

    chat_template = "yes"

    def __len__(self):
        return 100

    def __call__(self, text, **_):
        return type("Encoded", (), {"input_ids": [3 + ord(letter) % 97 for letter in text]})()

    def apply_chat_template(self, messages, **_):
        return f"<{messages[0]['content']}>"


def tiny_llama(*, tied=True, vocabulary=100, seed=0):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def counting(count, length, *, kind="chat", name="sample"):
    """Texts that count: token t + 1 follows t, modulo 90, from a random start."""
    return [
        Sample(f"{name} {number}", kind, 0.0, 4, [(7 * number + place) % 90 for place in range(length)])
        for number in range(count)
    ]


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


def slots_for(model, count=3, *, rank=4, deep=True, seed=1, adapters=0, ranks=3):
    """Look-ahead parameters, all of them away from zero."""
    torch.manual_seed(seed)
    layers = model.config.num_hidden_layers if deep else 0
    table = model.get_input_embeddings().weight
    embedding = LookaheadEmbedding.from_table(count, table, rank=rank, deep_layers=layers)
    if adapters:
        embedding.adapters = SlotAdapters(adapter_sizes(model, ranks), adapters, scale=0.5)
    with torch.no_grad():
        for parameter in embedding.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return embedding


def windows_of(samples, *, lookahead=3, documents=(), seed=0):
    return Windows(Letters(), documents, samples, 1.0, 32, 2, 6, lookahead, seed)


def sequential_logits(model, embedding, text, anchor):
    """The logits of an ordinary causal forward over [text up to the anchor, the slots] at the slots; differentiable."""
    embed = model.get_input_embeddings()
    table, rows = embed.weight, torch.cat([embed(text[: anchor + 1]), embedding.weight])[None]
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
