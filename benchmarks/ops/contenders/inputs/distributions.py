"""Logits like a language model's, their distributions in plain PyTorch, and tests that two contenders draw from the same one.

The cost of filters depends on the shape of a row, so logits come in two kinds:

* peaked, as of a trained model: a normal tail, N(0, 1.5), and 64 tokens above it with weights rank^-1.2, each off by N(0, 1).
  These 64 hold nearly all of the probability, the best about a third, and top-p 0.9 keeps some tens of tokens;
* flat: N(0, 3), where top-p 0.9 keeps thousands of tokens, as at a high temperature.

A draft's logits are the target's plus N(0, 0.7) on peaked rows and N(0, 1) on flat ones.
"""

import math
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
SIGMAS = 5.0  # chance alone exceeds this about once in a million comparisons
SETS = {"cpu": 16, "cuda": 64}  # of inputs, at most
QUICK_SETS, FEWEST_SETS = 4, 3
INPUT_BYTES = {"cpu": 2**28, "cuda": 2**30}  # of the (target's) logits in all sets


# ---- inputs ----


def make_logits(kind: str, rows: int, vocabulary: int, generator: torch.Generator) -> Tensor:
    """Logits ``[rows, vocabulary]`` of a kind, float32."""
    logits = torch.empty(rows, vocabulary, device=generator.device).normal_(0, 1, generator=generator)
    if kind == "flat":
        return logits.mul_(3.0)
    logits.mul_(TAIL)
    strong = min(STRONG, vocabulary // 2)
    rank = torch.arange(1, strong + 1, device=generator.device)
    above = math.log(vocabulary) + TAIL**2 / 2 + 3.0  # the first has e^3 times the mass of the whole tail
    level = above - 1.2 * rank.log() + torch.randn(rows, strong, device=generator.device, generator=generator)
    ids = torch.randint(vocabulary, (rows, strong), device=generator.device, generator=generator)
    return logits.scatter_(1, ids, level)


def make_draft_logits(kind: str, target: Tensor, generator: torch.Generator) -> Tensor:
    """Logits of a good draft model where the target's are ``target``."""
    noise = torch.empty_like(target).normal_(0, DRAFT_NOISE[kind], generator=generator)
    return noise.add_(target)


def per_row(rows: int, device: torch.device, temperature: float, filters: str) -> dict[str, Tensor]:
    """Temperature and filters as tensors of one value per row, as the ops take them."""
    values = {"temperature": temperature, **FILTERS[filters]}
    return {name: torch.full((rows,), value, dtype=DTYPE_OF[name], device=device) for name, value in values.items()}


def sets_of_inputs(set_bytes: int, device: str, quick: bool) -> int:
    """The number of sets of inputs, each with logits of that many bytes."""
    return max(FEWEST_SETS, min(QUICK_SETS if quick else SETS[device], INPUT_BYTES[device] // set_bytes))


# ---- probabilities of a row, and a draw ----


def usual_probs(logits: Tensor, temperature: float, filters: str) -> Tensor:
    """Probabilities of ``logits [..., V]`` the usual way: all in float32, one sort for top-k and top-p."""
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


def lean_probs(logits: Tensor, temperature: float, filters: str) -> Tensor:
    """Probabilities with less work: top-k without a sort, top-p among its tokens alone, min-p from the maximum."""
    options = FILTERS[filters]
    if "top_k" in options:
        values, ids = logits.topk(options["top_k"], dim=-1)
        values = values.float() / temperature
        if "top_p" in options:
            _keep_top_p(values, options["top_p"])
        return torch.zeros(logits.shape, device=logits.device).scatter_(-1, ids, values.softmax(-1))
    if "top_p" in options:
        return usual_probs(logits, temperature, filters)
    scaled = logits.float().mul_(1 / temperature) if logits.dtype != torch.float32 else logits * (1 / temperature)
    if "min_p" in options:
        scaled.masked_fill_(scaled < scaled.amax(-1, keepdim=True) + math.log(options["min_p"]), -math.inf)
    return scaled.softmax(-1)


def _keep_top_p(values: Tensor, top_p: float) -> None:
    """Sets sorted logits to -inf, in place, after the shortest prefix with ``top_p`` of the mass."""
    probs = values.softmax(-1)
    values.masked_fill_(probs.cumsum(-1) - probs >= top_p, -math.inf)


def usual_draw(weights: Tensor) -> Tensor:
    """One token per row of weights ``[B, V]``, by a race: `multinomial` without its checks, which make a GPU wait."""
    return (weights / torch.empty_like(weights).exponential_()).argmax(1)


def lean_draw(weights: Tensor) -> Tensor:
    """One token per row by inverting the cumulative sum at one uniform number."""
    sums = weights.cumsum(-1)
    bound = torch.rand(len(weights), 1, device=weights.device) * sums[:, -1:]
    return torch.searchsorted(sums, bound, right=True)[:, 0].clamp_(max=weights.shape[1] - 1)


# ---- tests of equal distributions ----


def require(condition: bool | Tensor, message: str) -> None:
    """Raises ``AssertionError`` unless the condition holds."""
    if not bool(condition):
        raise AssertionError(f"{message}: nothing was timed")


def require_same_mean(name: str, first: Tensor, second: Tensor) -> None:
    """Raises where the means of two samples differ by more than chance explains."""
    first, second = first.double(), second.double()
    spread = (first.var() / len(first) + second.var() / len(second)).sqrt()
    distance = (first.mean() - second.mean()).abs()
    require(distance <= SIGMAS * spread + 1e-9, f"{name}: means {first.mean():.4f} and {second.mean():.4f}")


def require_drawn_from(name: str, tokens: Tensor, probs: Tensor) -> None:
    """Raises where a token's share of ``tokens`` differs from ``probs [V]`` by more than chance explains."""
    share = torch.bincount(tokens, minlength=len(probs)) / len(tokens)
    spread = (probs * (1 - probs) / len(tokens)).sqrt()
    wrong = (share - probs).abs() > SIGMAS * spread + 2 / len(tokens)
    require(not wrong.any(), f"{name}: tokens {wrong.nonzero().flatten().tolist()} come too often or too seldom")
