"""``recall_scores``: what the scores of candidate tokens rise by because they came after the same tokens earlier in the text.

recall(v) = 2 * sum over n = 1, 2, 3 of (how often v followed the last n tokens) / (how often these came). Kernels:
csrc/cpu/recall-inl.h, csrc/cuda/recall.cuh.
"""

import torch
from torch import Tensor

from pass_ext._library import ops
from pass_ext.ops.common.arguments import integers, typed
from pass_ext.ops.common.kernels import call, fake_kernel

RECALL_TOKENS = 3  # kRecallTokens of csrc/core/recall.h
MAX_RECALL_ROW = 1024  # kMostRecallRow there

_op = ops.recall_scores.default


@typed("pass_ext::", page="ops/recall")
def recall_scores(tokens: Tensor, contexts: Tensor, requests: Tensor, text: Tensor, lengths: Tensor) -> Tensor:
    """What the scores of candidate tokens ``[N, K]`` rise by because of the text in front of them, ``[N, K]`` float32, for any
    scores that are logarithms of probabilities.

    For n = 1, 2 and 3, the last n tokens of a row's path are looked up in its text; a token that came after a share of these
    places gets twice that share. So it gets 6 at most, and 0 where the path ends with a token that is new.

    Args:
        tokens: ``[N, K]`` int64, the candidates, K at most 1,024.
        contexts: ``[N, 3]`` int64, the last three tokens of each row's path (the text, and perhaps candidates after it), in
            the order of the text; -1 for those that are not there.
        requests: ``[N]`` int32, the row of text that each row looks in.
        text: ``[B, T]`` int64, the tokens of each text.
        lengths: ``[B]`` int64, how many there are; the last 4,096 are looked at.

    The CPU refuses requests and lengths that are out of range. On CUDA values are not checked, to avoid a synchronisation: a
    request that does not exist recalls nothing, and lengths are cut to T. Integers may have any integer dtype. One launch on
    CUDA, which can be part of a graph. The op has no derivative and refuses forward-mode ones.

    Example:

        >>> text = torch.tensor([[1, 2, 3, 1, 2]])  # 3 came after "1 2"
        >>> contexts = torch.tensor([[3, 1, 2]])
        >>> pass_ext.drafting.recall_scores(torch.tensor([[3, 4]]), contexts, torch.tensor([0]), text, torch.tensor([5])) > 0
        tensor([[ True, False]])
    """
    scores: Tensor = call(
        _op,
        integers("recall_scores", "tokens", tokens, torch.int64),
        integers("recall_scores", "contexts", contexts, torch.int64),
        integers("recall_scores", "requests", requests),
        integers("recall_scores", "text", text, torch.int64),
        integers("recall_scores", "lengths", lengths, torch.int64),
    )
    return scores


@fake_kernel("recall_scores")
def _shape(tokens: Tensor, contexts: Tensor, requests: Tensor, text: Tensor, lengths: Tensor) -> Tensor:
    return tokens.new_empty(tokens.shape, dtype=torch.float32)
