"""What the benches of sampling share: logits like a language model's, a row of logits as a law in plain PyTorch, and the
comparison of ways that draw random numbers of their own. Used by accept.py and draft.py; `require` also by
attention.py.

Logits come in two kinds, because filters cost what the shape of a row lets them:

* peaked, like a trained model's: a normal tail, N(0, 1.5), and 64 tokens above it with weights rank^-1.2, each off by N(0, 1);
  they hold nearly all of the probability, the best about a third, and top-p 0.9 keeps some tens;
* flat: N(0, 3), where top-p 0.9 keeps thousands, as at a high temperature.

A draft's logits are the target's plus N(0, 0.7) on peaked rows and N(0, 1) on flat ones.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

TEMPERATURE = 0.8
FILTERS: dict[str, dict[str, Any]] = {
    "off": {},
    "top-k 50": {"top_k": 50},
    "top-p 0.9": {"top_p": 0.9},
    "top-k 50, top-p 0.9": {"top_k": 50, "top_p": 0.9},
    "min-p 0.05": {"min_p": 0.05},
}
DTYPE_OF = {"temperature": torch.float32, "top_k": torch.int32, "top_p": torch.float32, "min_p": torch.float32}
STRONG = 64
TAIL = 1.5
DRAFT_NOISE = {"peaked": 0.7, "flat": 1.0}
SIGMAS = 5.0  # a comparison fails where chance alone would come once in a million


# ---- inputs ----


def make_logits(kind: str, rows: int, vocabulary: int, generator: torch.Generator) -> Tensor:
    """``[rows, vocabulary]`` float32 of the kind."""
    logits = torch.empty(rows, vocabulary, device=generator.device).normal_(0, 1, generator=generator)
    if kind == "flat":
        return logits.mul_(3.0)
    logits.mul_(TAIL)
    strong = min(STRONG, vocabulary // 2)
    rank = torch.arange(1, strong + 1, device=generator.device)
    above = math.log(vocabulary) + TAIL**2 / 2 + 3.0  # e^3 times the mass of the whole tail, for the first of them
    level = above - 1.2 * rank.log() + torch.randn(rows, strong, device=generator.device, generator=generator)
    ids = torch.randint(vocabulary, (rows, strong), device=generator.device, generator=generator)
    return logits.scatter_(1, ids, level)


def make_draft_logits(kind: str, target: Tensor, generator: torch.Generator) -> Tensor:
    """What a good draft model would say where the target says ``target``."""
    noise = torch.empty_like(target).normal_(0, DRAFT_NOISE[kind], generator=generator)
    return noise.add_(target)


def as_columns(rows: int, device: torch.device, temperature: float, filters: str) -> dict[str, Tensor]:
    """Temperature and filters as our ops take them: one value per row."""
    values = {"temperature": temperature, **FILTERS[filters]}
    return {name: torch.full((rows,), value, dtype=DTYPE_OF[name], device=device) for name, value in values.items()}


# ---- a row as a law, and a draw from it ----


def usual_law(logits: Tensor, temperature: float, filters: str) -> Tensor:
    """Probabilities the usual way: everything in float32, one sort for top-k and top-p. ``logits`` ``[..., V]``."""
    scaled = logits.float() / temperature
    options = FILTERS[filters]
    if "top_k" in options or "top_p" in options:
        values, order = scaled.sort(dim=-1, descending=True)
        if "top_k" in options:
            values[..., options["top_k"] :] = -math.inf
        if "top_p" in options:
            _keep_top_p(values, options["top_p"])
        scaled = scaled.scatter_(-1, order, values)
    if "min_p" in options:
        probs = scaled.softmax(-1)
        scaled.masked_fill_(probs < options["min_p"] * probs.amax(-1, keepdim=True), -math.inf)
    return scaled.softmax(-1)


def lean_law(logits: Tensor, temperature: float, filters: str) -> Tensor:
    """The same with less work: top-k without a sort, top-p among its tokens alone, min-p from the maximum."""
    options = FILTERS[filters]
    if "top_k" in options:
        values, ids = logits.topk(options["top_k"], dim=-1)
        values = values.float() / temperature
        if "top_p" in options:
            _keep_top_p(values, options["top_p"])
        return torch.zeros(logits.shape, device=logits.device).scatter_(-1, ids, values.softmax(-1))
    if "top_p" in options:
        return usual_law(logits, temperature, filters)
    scaled = logits.float().mul_(1 / temperature) if logits.dtype != torch.float32 else logits * (1 / temperature)
    if "min_p" in options:
        scaled.masked_fill_(scaled < scaled.amax(-1, keepdim=True) + math.log(options["min_p"]), -math.inf)
    return scaled.softmax(-1)


def _keep_top_p(values: Tensor, top_p: float) -> None:
    """In place, on sorted logits: -inf behind the shortest prefix that has ``top_p`` of the mass."""
    probs = values.softmax(-1)
    values.masked_fill_(probs.cumsum(-1) - probs >= top_p, -math.inf)


def usual_draw(weights: Tensor) -> Tensor:
    """One token per row of weights ``[B, V]``, by a race: `multinomial` without its checks, which make a GPU wait."""
    return (weights / torch.empty_like(weights).exponential_()).argmax(1)


def lean_draw(weights: Tensor) -> Tensor:
    """The same by inverting the cumulative sum at one uniform number per row."""
    sums = weights.cumsum(-1)
    bound = torch.rand(len(weights), 1, device=weights.device) * sums[:, -1:]
    return torch.searchsorted(sums, bound, right=True)[:, 0].clamp_(max=weights.shape[1] - 1)


# ---- whether two ways draw from the same law ----


def require(condition: bool | Tensor, message: str) -> None:
    """Raises, in the words of a failed agreement."""
    if not bool(condition):
        raise AssertionError(f"{message}: nothing was timed")


def require_same_mean(name: str, one: Tensor, other: Tensor) -> None:
    """Raises where two samples' means differ by more than chance explains."""
    one, other = one.double(), other.double()
    spread = (one.var() / len(one) + other.var() / len(other)).sqrt()
    distance = (one.mean() - other.mean()).abs()
    require(distance <= SIGMAS * spread + 1e-9, f"{name}: means {one.mean():.4f} and {other.mean():.4f}")


def require_law(name: str, tokens: Tensor, law: Tensor) -> None:
    """Raises where a token's share among ``tokens`` is not its probability in ``law`` ``[V]``, but for chance."""
    share = torch.bincount(tokens, minlength=len(law)) / len(tokens)
    spread = (law * (1 - law) / len(tokens)).sqrt()
    wrong = (share - law).abs() > SIGMAS * spread + 2 / len(tokens)
    require(not wrong.any(), f"{name}: tokens {wrong.nonzero().flatten().tolist()} come too often or too seldom")


def require_same_law(name: str, tokens: Sequence[Tensor], vocabulary: int) -> None:
    """Raises where two samples of tokens differ by more than chance explains."""
    one, other = (torch.bincount(sample, minlength=vocabulary) / len(sample) for sample in tokens)
    pooled = (one + other) / 2
    spread = (pooled * (1 - pooled) * (1 / len(tokens[0]) + 1 / len(tokens[1]))).sqrt()
    wrong = (one - other).abs() > SIGMAS * spread + 2 / len(tokens[0])
    require(not wrong.any(), f"{name}: tokens {wrong.nonzero().flatten().tolist()} come too often or too seldom")
