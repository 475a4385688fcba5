"""``draft_sample``: candidate tokens from rows of logits, in one pass, without materialising probabilities.

prob(v) = softmax over the support of logits / T, after the allowed mask, top-k, top-p and min-p. Kernels: csrc/core/draft.h on
csrc/cpu/rows.cpp and csrc/cuda/rows.cuh.
"""

import torch
from torch import Tensor

from pass_ext._library import ops
from pass_ext.ops.common.arguments import (
    Parameter,
    check_positions,
    index_of,
    is_greedy,
    parameter_tensor,
    sampling_tensors,
    seeds_for,
    typed,
)
from pass_ext.ops.common.kernels import call, fake_kernel

MODES = ("coupled", "without", "with", "top")

_op = ops.draft_sample.default


@typed("pass_ext::", page="ops/accept")
def draft_sample(
    logits: Tensor,
    k: int,
    *,
    mode: str = "without",
    temperature: Parameter = None,
    top_k: Parameter = None,
    top_p: Parameter = None,
    min_p: Parameter = None,
    allowed: Tensor | None = None,
    seeds: Parameter = None,
    positions: Parameter = None,
    nodes: Parameter = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Draws k candidate tokens from each row of logits ``[R, V]``, with their log probabilities.

    Args:
        logits: ``[R, V]`` bfloat16, float16 or float32; rows may be strided, V contiguous.
        k: candidates per row, 1 to 1,024.
        mode: ``"without"``: k draws without replacement, in the order of drawing. ``"with"``: k independent draws. ``"top"``:
            the k most probable. ``"coupled"``: the k best under the noise that the target uses for that seed and position; the
            first is the token that ``accept_tree(rule="coupled")`` emits there, so ``k=1`` is the plain sampler.
        temperature, top_k, top_p, min_p: one number per row (``[R]``, or a list), one for all, or None for off. A
            temperature of None is 1; in mode "coupled" it is greedy, as in ``accept_tree``. Temperature 0 is the limit: tokens
            in the order of their logits, and the first has all the probability. Ties at a filter's edge keep the lower id.
        allowed: ``[R, ceil(V / 32)]`` int32, bit ``v % 32`` of word ``v // 32`` set = token v may be drawn.
        seeds, positions: ``[R]`` int64; a draw depends on them and on the row alone. Mode "coupled": ``positions`` is the text
            position of the drawn token. Other modes: give the position of the step's first token and ``nodes``; then a
            generation never repeats a draw. Seeds of None are drawn from ``generator``; with seeds, positions are needed
            wherever something is drawn (mode "top" draws nothing, nor does a temperature of 0; a tensor counts as more).
        nodes: ``[R]`` int32 from 0 to 2^24 - 1 (the CPU refuses others), the tree node whose children are drawn: rows with
            equal seed and position draw independently if their nodes differ.

    Returns:
        ``(tokens [R, k] int64, logprobs [R, k] float32)``: log probabilities under the processed distribution. Slots beyond the
        support, and rows with NaN or +inf or without an allowed token, get token -1 and log probability -inf.

    Integer arguments may have any integer dtype. The CPU refuses numbers that do not fit the dtype named here; on CUDA they
    are clamped to its lowest or highest number. The op has no derivative and refuses forward-mode ones.

    Example:

        >>> logits = torch.tensor([[0.0, 5.0, 1.0, 2.0]])
        >>> tokens, logprobs = pass_ext.draft_sample(logits, 2, mode="top")
        >>> tokens, logprobs.exp().round(decimals=2)
        (tensor([[1, 3]]), tensor([[0.9300, 0.0500]]))
    """
    rows, device = logits.shape[0], logits.device
    draws_nothing = mode == "top" or (mode == "coupled" and temperature is None)
    arguments = (
        logits,
        k,
        index_of("draft_sample", "mode", mode, MODES),
        *sampling_tensors("draft_sample", (temperature, top_k, top_p, min_p), rows, device),
        allowed,
        None if draws_nothing and seeds is None else seeds_for("draft_sample", seeds, rows, device, generator),
        parameter_tensor("draft_sample", "positions", positions, rows, torch.int64, device),
        parameter_tensor("draft_sample", "nodes", nodes, rows, torch.int32, device),
    )
    check_positions("pass_ext::draft_sample", seeds, positions, draws=draws(mode, temperature))
    tokens, logprobs = call(_op, *arguments)  # sampling has no gradient
    return tokens, logprobs


def draws(mode: str, temperature: Parameter) -> bool:
    """True if draws may depend on seeds; a tensor's numbers are not read."""
    if temperature is None:
        return mode in ("without", "with")
    return mode != "top" and not is_greedy(temperature)


@fake_kernel("draft_sample")
def _shape(logits: Tensor, k: int, *rest: object) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], k)
    return logits.new_empty(shape, dtype=torch.int64), logits.new_empty(shape, dtype=torch.float32)
