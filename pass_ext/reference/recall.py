"""``recall_scores`` in plain PyTorch: n tokens of the path after n tokens of the path are looked up in the text."""

from collections.abc import Sequence

import torch
from torch import Tensor

_MOST, _WINDOW, _WEIGHT = 3, 4096, 2.0  # tokens that are compared, tokens of the text that are looked at


def recall_scores(tokens: Tensor, contexts: Tensor, requests: Tensor, text: Tensor, lengths: Tensor) -> Tensor:
    """What each token's score rises by."""
    scores = torch.zeros(tokens.shape)
    for row, b in enumerate(requests.tolist()):
        known = text[b, : int(lengths[b])].tolist()
        scores[row] = recall(known, contexts[row].tolist(), tokens[row].tolist())
    return scores


def recall(text: Sequence[int], path: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """``[K]``: what the scores of tokens rise by after a path, of which the last three tokens count."""
    known = list(text[-_WINDOW:])
    shares = torch.zeros(len(tokens))
    for n in range(_MOST, 0, -1):
        last = list(path[-n:])
        if len(last) < n or min(last) < 0:
            continue
        after = [known[i + n] for i in range(len(known) - n) if known[i : i + n] == last]
        if after:
            shares += torch.tensor([after.count(token) for token in tokens]) / torch.tensor(float(len(after)))
    return _WEIGHT * shares
