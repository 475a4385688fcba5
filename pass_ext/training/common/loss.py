"""KL(teacher || slot), their total variation, or cross-entropy over a large vocabulary, a chunk of the logits at a time.

    p: the teacher's distribution, q: the slot's
    kl                sum of p log(p / q),     its slope in q's logits: q - p
    total-variation   1 - sum of min(p, q),    its slope in q's logits: q (g - sum of q g), g = -1 where q < p, else 0
    cross-entropy     -log q[label]

1 minus the total variation is the chance that a token drawn from q is accepted. Both are softmax(logits / temperature), where
logits = sum over k of rows_k @ table_k^T with frozen tables. Rows are sorted so that those with the same teacher share its
softmax. The forward pass computes each chunk's gradient too, and then drops its logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_CPU_ROWS = 128  # of a chunk: fewer read the table too often, more leave the processor's cache
_GPU_BYTES = 1 << 30  # of a chunk's logits, of which a step has several copies


def chunk_rows(table: Tensor) -> int:
    """How many rows of logits exist at a time, for an output table ``[V, d]``."""
    return _CPU_ROWS if table.device.type == "cpu" else max(_CPU_ROWS, _GPU_BYTES // (4 * len(table)))


def chunk_bytes(table: Tensor, rows: int, loss: str) -> int:
    """Memory of a chunk of a loss of so many rows, "cross-entropy" or a divergence: logits, of teachers too, and copies in
    float32."""
    size = table.element_size()
    converted = 4 if size == 4 else 8  # a CPU has a copy on the way
    each = size + converted if loss == "cross-entropy" else 2 * size + 12
    return min(rows, chunk_rows(table)) * len(table) * each


def distillation_loss(
    rows: list[Tensor],
    tables: list[Tensor],
    weights: Tensor,
    *,
    teacher_rows: Tensor | None = None,
    teacher: Tensor | None = None,
    labels: Tensor | None = None,
    bias: Tensor | None = None,
    chunk: int | None = None,
    divergence: str = "kl",
    temperature: float = 1.0,
) -> Tensor:
    """``sum_r weights[r] * loss_r``, differentiable in every ``rows[k]`` [R, d_k].

    With ``labels`` [R] the loss is cross-entropy. Else it is the divergence from the distribution of ``teacher[r]``, an index
    [R] into ``teacher_rows`` [U, d], whose logits are ``teacher_rows @ tables[0]^T + bias``: "kl" or "total-variation".
    chunk: rows of logits at a time; None: as the device has room.
    """
    chunk = chunk or chunk_rows(tables[0])
    if divergence not in _DIVERGENCES:
        raise ValueError(f"divergence must be one of {', '.join(_DIVERGENCES)}, got {divergence!r}")
    if temperature != 1:  # here, where a row is d numbers, not V
        rows = [part / temperature for part in rows]
        bias = None if bias is None else bias / temperature
        teacher_rows = None if teacher_rows is None else teacher_rows / temperature
    loss: Tensor = _Chunked.apply(tables, weights, teacher_rows, teacher, labels, bias, chunk, divergence, *rows)
    return loss


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tables, weights, teacher_rows, teacher, labels, bias, chunk, divergence, *rows):  # type: ignore[no-untyped-def]
        total = torch.zeros((), dtype=torch.float32, device=weights.device)
        gradients = [torch.empty_like(part) for part in rows]
        order = torch.arange(len(weights), device=weights.device) if teacher is None else teacher.argsort(stable=True)
        for picked in order.split(chunk):
            parts = [part[picked] for part in rows]
            if labels is not None:
                losses, slope = _cross_entropy(_logits(parts, tables, bias), labels[picked, None])
            else:
                used, inverse = teacher[picked].unique(return_inverse=True)
                pair = _logits(parts, tables, bias), _logits([teacher_rows[used]], tables[:1], bias)
                losses, slope = _DIVERGENCES[divergence](*pair, inverse)
                del pair
            total += (weights[picked] * losses).sum()
            slope = slope.to(tables[0].dtype)
            for gradient, table in zip(gradients, tables, strict=True):
                # Weighted here, where a row is d numbers, not V.
                gradient[picked] = (weights[picked, None] * (slope @ table)).to(gradient.dtype)
            del slope  # before the next chunk's logits
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return (*(None,) * 8, *(grad * gradient for gradient in ctx.saved_tensors))


def _cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of each row, and its slope in the logits; ``labels [R, 1]``."""
    log_probabilities = logits.log_softmax(-1, dtype=torch.float32)
    losses = -log_probabilities.gather(1, labels)[:, 0]
    slope = log_probabilities.exp_()
    return losses, slope.scatter_add_(1, labels, slope.new_full(labels.shape, -1.0))


def _kl(logits: Tensor, teacher_logits: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """As ``_cross_entropy``; row r has the teacher ``teacher[r]``."""
    log_probabilities = logits.log_softmax(-1, dtype=torch.float32)
    teacher_logs = teacher_logits.log_softmax(-1, dtype=torch.float32)
    probability = teacher_logs.exp()
    entropy = torch.linalg.vecdot(probability, teacher_logs)[teacher]
    del teacher_logs
    target = probability[teacher]
    losses = entropy - torch.linalg.vecdot(target, log_probabilities)
    return losses, log_probabilities.exp_().sub_(target)


def _total_variation(logits: Tensor, teacher_logits: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """As ``_kl``."""
    slope = logits.softmax(-1, dtype=torch.float32)
    target = teacher_logits.softmax(-1, dtype=torch.float32)[teacher]
    falling = slope * (slope < target)  # - q g
    losses = 1 - torch.minimum(slope, target, out=target).sum(-1)
    return losses, slope.mul_(falling.sum(-1, keepdim=True)).sub_(falling)


_DIVERGENCES = {"kl": _kl, "total-variation": _total_variation}


def _logits(rows: list[Tensor], tables: list[Tensor], bias: Tensor | None) -> Tensor:
    logits = rows[0] @ tables[0].T
    for part, table in zip(rows[1:], tables[1:], strict=True):
        logits = logits + part @ table.T
    return logits if bias is None else logits + bias
