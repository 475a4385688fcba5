"""``shard_local``, ``shard_combine`` and ``shard_best`` on the emulator."""

import torch

from emulator.ops.accept import DRAFT_SAMPLING
from emulator.ops.launching import given, launch
from emulator.ops.logits import SAMPLING, logits_as
from pass_ext.ops import shard as ops
from pass_ext.ops.common.rules import RULES


def rows_of(target, draft, allowed, draft_allowed):
    """The logits among the numbers of a launch."""
    numbers = logits_as("target", target, allowed) | dict(vocabulary=target.shape[-1], nodes=target.shape[0])
    if draft is not None:
        numbers |= logits_as("draft", draft, draft_allowed) | {"draft_row_count": draft.shape[0], "has_draft": 1}
    return numbers


def shard_local(target, tokens, parents, cu_nodes, rule, draft, draft_rows, allowed, draft_allowed, seeds, *rest):
    vocab_start, slices, this, state = rest
    inputs = given(
        target=target, draft=draft, target_allowed=allowed, draft_allowed=draft_allowed, tokens=tokens, parents=parents,
        cu_nodes=cu_nodes, draft_rows=draft_rows, seeds=seeds, state=state,
    )  # fmt: skip
    shape, dtype = ops.answer_shape(
        ops.ROUNDS[this], nodes=len(target), requests=len(cu_nodes) - 1, slices=slices, rule=list(RULES)[rule],
        has_draft=draft is not None,
    )  # fmt: skip
    answers = torch.empty(shape, dtype=dtype)
    numbers = rows_of(target, draft, allowed, draft_allowed)
    numbers |= dict(requests=len(cu_nodes) - 1, rule=rule, vocab_start=vocab_start, slices=slices, round=this)
    return launch("shard_local", numbers, inputs, {"answers": answers})[0]


def shard_combine(target, tokens, parents, cu_nodes, max_depth, rule, draft, draft_rows, *rest):
    *sampling, seeds, positions, vocab_size, this, following, answers, former = rest
    requests = len(cu_nodes) - 1
    inputs = given(
        answers=answers, tokens=tokens, parents=parents, cu_nodes=cu_nodes, draft_rows=draft_rows, seeds=seeds,
        positions=positions, former=former, **dict(zip(SAMPLING + DRAFT_SAMPLING, sampling, strict=True)),
    )  # fmt: skip
    outputs = {
        "state": torch.empty(ops.state_words(len(target)), dtype=torch.int64),
        "emitted": torch.empty((requests, max_depth + 1), dtype=torch.int64),
        "path": torch.empty((requests, max_depth + 1), dtype=torch.int32),
        "num_accepted": torch.empty(requests, dtype=torch.int32),
        "status": torch.empty(requests, dtype=torch.int32),
    }
    shapes = {name: x for name, x in rows_of(target, draft, None, None).items() if name not in ("target", "draft")}
    numbers = shapes | dict(
        requests=requests, max_depth=max_depth, rule=rule, vocabulary=vocab_size, round=this, next=following,
        ranks=answers.shape[0], width=answers.shape[2],
    )  # fmt: skip
    return launch("shard_combine", numbers, inputs, outputs)


def shard_best(logits, state, k, mode, temperature, allowed, seeds, positions, nodes, vocab_start):
    inputs = given(
        logits=logits, logits_allowed=allowed, state=state, temperature=temperature, seeds=seeds, positions=positions,
        nodes=nodes,
    )  # fmt: skip
    rows, vocabulary = logits.shape
    numbers = logits_as("logits", logits, allowed) | dict(vocabulary=vocabulary, rows=rows, count=k, mode=mode)
    words = torch.empty((rows, k, ops.BEST_WORDS), dtype=torch.int32)
    return launch("shard_best", numbers | {"vocab_start": vocab_start}, inputs, {"words": words})[0]


KERNELS = {"shard_local": shard_local, "shard_combine": shard_combine, "shard_best": shard_best}
