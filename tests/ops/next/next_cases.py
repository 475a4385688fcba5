"""What the tests of ``next_tree_`` share: transition scores, sampling parameters, and the comparison."""

import hashlib
import pickle

import torch

import pass_ext
from pass_ext import reference
from pass_ext.testing import assert_same_bits

VOCABULARY = 300


def tables(rank):
    """Transition scores of this rank; None: none."""
    return {} if rank is None else dict(zip(("left", "right"), torch.randn(2, VOCABULARY, rank).unbind(), strict=True))


def law_of(requests, *, sampled, filters):
    """Sampling parameters of the requests, the first of which is greedy."""
    law = {}
    if sampled:
        law |= dict(temperature=torch.linspace(0.0, 1.3, requests), seeds=torch.arange(requests) + 11)
    if filters:
        law["top_k"] = torch.tensor([0, 1, 5, 40] * requests, dtype=torch.int32)[:requests]
        law["top_p"] = torch.tensor([0.3, 1.0, 0.9, 0.7, 1e-9] * requests)[:requests]
        law["min_p"] = torch.tensor([0.0, 0.02, 0.3] * requests)[:requests]
    return law


def on(backend, arguments):
    """The arguments on the backend's device."""
    return {name: value.to(backend.device) if torch.is_tensor(value) else value for name, value in arguments.items()}


def a_text(arguments):
    """The texts of the requests, of few tokens, so that they recall some; their last tokens are the roots."""
    lengths = arguments["lengths"].tolist()
    width = arguments["emitted"].shape[1]
    text = torch.randint(0, 5, (len(lengths), max([0, *lengths]) + width))
    for b, length in enumerate(lengths):
        if length:
            text[b, length - 1] = arguments["rows"][0, b, 0]
    return text.to(arguments["rows"].device)


def of_few_tokens(arguments):
    """The same step, whose tokens mostly are those of ``a_text``."""
    arguments["emitted"].remainder_(5)
    for row in arguments["offered"].flatten(0, 1):
        row.copy_(torch.cat([torch.arange(5), 5 + torch.randperm(VOCABULARY - 5)])[: len(row)])
    return arguments | dict(text=a_text(arguments))


def copied(arguments):
    return {name: value.clone() if torch.is_tensor(value) else value for name, value in arguments.items()}


STATE = ("rows", "parents", "lengths", "prefix_lens", "report")
ANSWERS = {}


def answer(state, arguments):
    """The state after the reference, which is slow: computed once for all backends."""
    arguments = {name: value.cpu() if torch.is_tensor(value) else value for name, value in copied(arguments).items()}
    numbers = [value.numpy() if torch.is_tensor(value) else value for value in arguments.values()]
    key = hashlib.sha256(pickle.dumps([*arguments, *numbers])).digest()
    if key not in ANSWERS:
        reference.next_tree_(**arguments)
        ANSWERS[key] = {name: arguments[name] for name in state}
    return ANSWERS[key]


def check(arguments):
    """The state after the op is that of the reference, to the bit -> the state, and the text if there is one."""
    state = (*STATE, *(["text"] if arguments.get("text") is not None else []))
    wanted = answer(state, arguments)
    pass_ext.next_tree_(**arguments)
    for name in state:
        assert_same_bits(arguments[name].cpu(), wanted[name])
    return {name: arguments[name].cpu() for name in state}
