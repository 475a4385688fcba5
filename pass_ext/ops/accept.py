"""``accept_tree`` and ``accept_chain``: from logits to accepted tokens. Exact rules keep the target model's distribution.

The formulas: csrc/core/accept_walk.h. How to choose a rule: docs/ops/accept.md. Kernels: csrc/cpu/accept.cpp,
csrc/cuda/accept.cuh.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pass_ext import _library
from pass_ext.ops.common.arguments import (
    Parameter,
    check_positions,
    index_of,
    integers,
    is_greedy,
    parameter_tensor,
    seeds_for,
    target_and_draft,
    typed,
)
from pass_ext.ops.common.kernels import call, fake_kernel
from pass_ext.ops.common.rules import ACCEPT_RULES, RULES

STATUS = {1: "NaN or +inf among the logits", 2: "no token is allowed", 4: "the tree is malformed"}
"""The bits of ``AcceptResult.status``."""

_RULE_NAMES = tuple(RULES)
_tree_op = _library.ops.accept_tree.default
_chain_op = _library.ops.accept_chain.default


MAX_TOP_LOGPROBS = 64
"""The most alternatives that ``top_logprobs`` asks for."""


class TokenLogprobs(NamedTuple):
    """Log probabilities of emitted tokens, and of the n most probable tokens beside each. Raw: the log-softmax of the logits as
    they are. Processed: under the distribution that the rule draws from, after mask, temperature and filters."""

    raw: Tensor
    """``[B, max_depth + 1]`` float32; -inf where no token was emitted. NaN if a forbidden logit is NaN or +inf."""
    processed: Tensor
    """``[B, max_depth + 1]`` float32; 0 for a greedy request's tokens."""
    top_tokens: Tensor
    """``[B, max_depth + 1, n]`` int64: the largest logits, the largest first, the lower id first among equals; then -1."""
    top_raw: Tensor
    """``[B, max_depth + 1, n]`` float32, of ``top_tokens``; -inf for -1."""
    top_processed: Tensor
    """``[B, max_depth + 1, n]`` float32; -inf for tokens that the mask or a filter removed."""


class TokenSupport(NamedTuple):
    """The tokens that each emitted token was drawn from: those with a probability above 0, after mask, temperature and
    filters."""

    counts: Tensor
    """``[B, max_depth + 1]`` int32: how many; 0 where no token was emitted. More than n: ``ids`` has none of them."""
    ids: Tensor
    """``[B, max_depth + 1, n]`` int32: their ids in ascending order; then -1."""


class _AcceptTensors(NamedTuple):
    emitted: Tensor
    """``[B, max_depth + 1]`` int64: the accepted draft tokens, then one token from the target, then -1."""
    path: Tensor
    """``[B, max_depth + 1]`` int32: 0 (the root), the accepted nodes, then -1. All -1 for a padded request."""
    num_accepted: Tensor
    """``[B]`` int32: the number of accepted draft tokens."""
    status: Tensor
    """``[B]`` int32: 0, or bits of ``pass_ext.ops.accept.STATUS``."""


class AcceptResult(_AcceptTensors):
    """The result of one accept step for B requests, a tuple of four tensors: the emitted tokens, the accepted path, its length,
    and a status."""

    logprobs: TokenLogprobs | None = None
    """With ``return_logprobs=True``: the log probabilities of ``emitted``. Not an item of the tuple."""
    support: TokenSupport | None = None
    """With ``support``: the tokens that each of ``emitted`` was drawn from. Not an item of the tuple."""


@typed("pass_ext::", page="ops/accept")
def accept_tree(
    target_logits: Tensor,
    tokens: Tensor,
    parents: Tensor | None,
    cu_nodes: Tensor,
    max_depth: int,
    *,
    rule: str = "coupled",
    draft_logits: Tensor | None = None,
    draft_rows: Tensor | None = None,
    temperature: Parameter = None,
    top_k: Parameter = None,
    top_p: Parameter = None,
    min_p: Parameter = None,
    draft_temperature: Parameter = None,
    draft_top_k: Parameter = None,
    draft_top_p: Parameter = None,
    draft_min_p: Parameter = None,
    allowed: Tensor | None = None,
    draft_allowed: Tensor | None = None,
    seeds: Parameter = None,
    positions: Parameter = None,
    threshold: float | None = None,
    alpha: float | None = None,
    generator: torch.Generator | None = None,
    return_logprobs: bool = False,
    top_logprobs: int = 0,
    support: int = 0,
) -> AcceptResult:
    """Verifies the drafted tokens of B trees against the target's logits ``[N, V]``: each request gets its accepted tokens and
    one more token from the target.

    Args:
        target_logits: ``[N, V]`` bfloat16, float16 or float32, rows may be strided: row i is the target's distribution after
            node i. Only the rows that a decision needs are read.
        tokens: ``[N]`` int64, the token of node i; a root's token is ignored. A token outside [0, V), such as -1, is never
            accepted.
        parents: ``[N]`` int32, each node's parent as an index in its request, -1 for the root, which is node 0;
            ``parents[i] < i``. None: chains, each node below the one before it. At most 1,024 nodes per request. Of siblings
            with equal tokens the first is followed ("typical" and "joint": the one with the longer path; "kseq" tries both)
        cu_nodes: ``[B + 1]`` int32: request b owns rows ``cu_nodes[b]:cu_nodes[b + 1]``. Equal bounds: a padded request.
        max_depth: the depth of the deepest tree. It sets the width of the result; deeper nodes are ignored.
        rule: one of ``pass_ext.RULES``; docs/ops/accept.md helps to choose. "kseq" and
            "rejection_with_replacement" need ``draft_logits``, the distributions that the children were drawn from; without
            them the other rules take every draft as a fixed proposal.
        draft_logits: ``[R, V]``, any of the dtypes above: the logits that the drafts were sampled from, unchanged.
        draft_rows: ``[N]`` int32, the row of ``draft_logits`` that node i's children were drawn from; -1: its children are
            fixed proposals (n-grams, top-k candidates). None: ``draft_logits`` has one row per node.
        temperature, top_k, top_p, min_p: one number per request (``[B]``, or a list), one for all, or None for off.
            Temperature 0 or None is greedy under every rule: the arg-max, the lowest id if several are equal.
        draft_temperature, draft_top_k, draft_top_p, draft_min_p: the parameters that the drafts were sampled with; None: the
            target's.
        allowed: ``[N, ceil(V / 32)]`` int32 words, grammar masks of the target's rows; a set bit allows its token.
        draft_allowed: ``[R, ceil(V / 32)]``: the masks that the drafts were sampled under, if any.
        seeds: ``[B]`` int64, a list, or one for all. None: fresh seeds from ``generator``, or from torch's default generator.
        positions: ``[B]`` int64, a list, or one for all: the text position of the first token that this step can emit; at
            most 2^63 - 1 - max_depth. That is the number of tokens that the text has so far, the root included. Needed with
            ``seeds`` unless the temperature is 0 (a tensor counts as more): without, each step would repeat the same noise.
        threshold, alpha: numbers of the approximate rules; None: the rule's own. "typical" accepts a token if
            p > min(threshold, alpha exp(-entropy)), 0.09 and 0.3; "adaptive_rejection" if u < p / q + alpha (1 - max p), 0.3;
            "joint" a path if the product of its p / q > threshold, 0.5.
        return_logprobs: True: the result has ``logprobs``, the log probabilities of the emitted tokens. Decisions stay the same
            to the bit. Only rows on the accepted path are read again, and only for sums that no decision needed.
        top_logprobs: with ``return_logprobs``: also the most probable tokens beside each emitted one, so many; at most 64.
        support: n > 0: the result has ``support``, the ids that each emitted token was drawn from, with room for n of each; at
            most V. Decisions stay the same to the bit.

    Returns:
        AcceptResult. If a row that a decision needs holds NaN or +inf, or allows no token, the request ends before that row:
        the token before it is the last one emitted (at the root: -1), and ``status`` has a bit for the reason. The drafts of
        a malformed tree are ignored: the root's row gives one token. Other requests are not affected. If ``cu_nodes`` is
        invalid, all requests get -1.

    Integer arguments may have any integer dtype. The CPU refuses numbers that do not fit the dtype named here. On CUDA they
    are clamped to its lowest or highest number, which is out of range too, and positions beyond the last wrap around to
    -2^63. The op has no derivative and refuses forward-mode ones.

    Example:

        >>> logits = torch.zeros(3, 5).scatter(1, torch.tensor([[3], [4], [0]]), 9.0)  # the target wants 3 first
        >>> tokens, parents, cu_nodes = torch.tensor([0, 2, 3]), torch.tensor([-1, 0, 0]), torch.tensor([0, 3])
        >>> logits[2] = torch.tensor([0.0, 9.0, 0.0, 0.0, 0.0])  # after token 3 it wants 1
        >>> result = pass_ext.accept_tree(logits, tokens, parents, cu_nodes, 1)
        >>> result.emitted, result.path, result.num_accepted
        (tensor([[3, 1]]), tensor([[0, 2]], dtype=torch.int32), tensor([1], dtype=torch.int32))
    """
    op, batch = (
        "accept_tree",
        (max(cu_nodes.shape[0] - 1, 0), target_logits.device),
    )  # the op refuses bounds without a row
    return _call(
        _tree_op, target_logits, _dense(op, "tokens", tokens, torch.int64), _dense(op, "parents", parents),
        _dense(op, "cu_nodes", cu_nodes), max_depth, index_of(op, "rule", rule, _RULE_NAMES), draft_logits,
        _dense(op, "draft_rows", draft_rows),
        *_sampling(op, batch, (temperature, top_k, top_p, min_p),
                   (draft_temperature, draft_top_k, draft_top_p, draft_min_p)),
        allowed, draft_allowed, *_noise(op, batch, temperature, seeds, positions, generator),
        *bounds_of(rule, threshold, alpha), _alternatives(op, return_logprobs, top_logprobs),
        check_room(f"::{op}", support, target_logits.shape[-1]),
    )  # fmt: skip


@typed("pass_ext::", page="ops/accept")
def accept_chain(
    target_logits: Tensor,
    draft_tokens: Tensor,
    *,
    cu_nodes: Tensor | None = None,
    max_depth: int | None = None,
    rule: str = "coupled",
    draft_logits: Tensor | None = None,
    draft_rows: Tensor | None = None,
    temperature: Parameter = None,
    top_k: Parameter = None,
    top_p: Parameter = None,
    min_p: Parameter = None,
    draft_temperature: Parameter = None,
    draft_top_k: Parameter = None,
    draft_top_p: Parameter = None,
    draft_min_p: Parameter = None,
    allowed: Tensor | None = None,
    draft_allowed: Tensor | None = None,
    seeds: Parameter = None,
    positions: Parameter = None,
    threshold: float | None = None,
    alpha: float | None = None,
    generator: torch.Generator | None = None,
    return_logprobs: bool = False,
    top_logprobs: int = 0,
    support: int = 0,
) -> AcceptResult:
    """Verifies one chain of K drafted tokens for each of B requests against the target's logits ``[B, K + 1, V]``, with the
    rules of ``accept_tree``; or chains of different lengths, packed.

    Args:
        target_logits: ``[B, K + 1, V]``: row i is the target's distribution after i drafts. The first two dimensions may
            have any strides.
        draft_tokens: ``[B, K]`` int64. Pad requests that have fewer drafts with -1.
        draft_logits: ``[B, K, V]``: draft i was sampled from row i.
        allowed, draft_allowed: ``[B, K + 1, ceil(V / 32)]`` and ``[B, K, ceil(V / 32)]`` int32 words.
        cu_nodes: ``[B + 1]`` int32: the chains are packed, and request b owns rows ``cu_nodes[b]:cu_nodes[b + 1]``, one more
            than it has drafts. ``target_logits`` is ``[N, V]``, and ``draft_tokens`` ``[N]`` the tokens that the model read in
            these rows; a request's first one is not verified. ``draft_logits`` and the masks are those of ``accept_tree``.
        max_depth: with ``cu_nodes``: the most drafts of a request. It sets the width of the result; later ones are ignored.
        draft_rows: with ``cu_nodes``: as in ``accept_tree``.

    The other arguments and the result are those of ``accept_tree``; ``path`` counts 0, 1, 2, …

    Example:

        >>> logits = torch.zeros(1, 3, 5).scatter(2, torch.tensor([[[3], [4], [0]]]), 9.0)  # the target wants 3, then 4, then 0
        >>> pass_ext.accept_chain(logits, torch.tensor([[3, 2]])).emitted  # 3 is accepted, 2 is not
        tensor([[ 3,  4, -1]])
        >>> packed, cu_nodes = logits[0, [0, 0, 1, 2]], torch.tensor([0, 1, 4])  # without drafts; with 3 and 4
        >>> pass_ext.accept_chain(packed, torch.tensor([9, 9, 3, 4]), cu_nodes=cu_nodes, max_depth=2).emitted
        tensor([[ 3, -1, -1],
                [ 3,  4,  0]])
    """
    op, batch = "accept_chain", (target_logits.shape[0], target_logits.device)
    check_packed("pass_ext::", cu_nodes, max_depth, draft_rows, target_logits, draft_tokens)
    if cu_nodes is not None:
        assert max_depth is not None
        return accept_tree(
            target_logits, draft_tokens, None, cu_nodes, max_depth, rule=rule, draft_logits=draft_logits,
            draft_rows=draft_rows, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
            draft_temperature=draft_temperature, draft_top_k=draft_top_k, draft_top_p=draft_top_p,
            draft_min_p=draft_min_p, allowed=allowed, draft_allowed=draft_allowed, seeds=seeds, positions=positions,
            threshold=threshold, alpha=alpha, generator=generator, return_logprobs=return_logprobs,
            top_logprobs=top_logprobs, support=support,
        )  # fmt: skip
    return _call(
        _chain_op, target_logits, _dense(op, "draft_tokens", draft_tokens, torch.int64),
        index_of(op, "rule", rule, _RULE_NAMES), draft_logits,
        *_sampling(op, batch, (temperature, top_k, top_p, min_p),
                   (draft_temperature, draft_top_k, draft_top_p, draft_min_p)),
        allowed, draft_allowed, *_noise(op, batch, temperature, seeds, positions, generator),
        *bounds_of(rule, threshold, alpha), _alternatives(op, return_logprobs, top_logprobs),
        check_room(f"::{op}", support, target_logits.shape[-1]),
    )  # fmt: skip


def check_packed(
    prefix: str,
    cu_nodes: Tensor | None,
    max_depth: int | None,
    draft_rows: Tensor | None,
    target_logits: Tensor,
    tokens: Tensor,
) -> None:
    """The arguments of ``accept_chain`` that belong to packed chains."""
    if cu_nodes is None:
        for name, value in (("max_depth", max_depth), ("draft_rows", draft_rows)):
            if value is not None:
                raise ValueError(
                    f"{prefix}accept_chain: {name} must be None without cu_nodes, got {type(value).__name__}"
                )
        return
    if isinstance(max_depth, bool) or not isinstance(max_depth, int):
        raise ValueError(
            f"{prefix}accept_chain: max_depth must be the most drafts of a request with cu_nodes, got {max_depth!r}"
        )
    shapes = list(target_logits.shape), list(tokens.shape)
    if cu_nodes.dim() != 1 or len(shapes[0]) != 2 or shapes[1] != shapes[0][:1]:
        raise ValueError(
            f"{prefix}accept_chain: with cu_nodes [B + 1], target_logits must have shape [N, V] and draft_tokens [N], got "
            f"{shapes[0]} and {shapes[1]}"
        )


def bounds_of(rule: str, threshold: float | None, alpha: float | None) -> tuple[float, float]:
    """``threshold`` and ``alpha``; for None the rule's own."""
    defaults = ACCEPT_RULES[rule]
    return (defaults.threshold if threshold is None else threshold, defaults.alpha if alpha is None else alpha)


def _alternatives(op: str, return_logprobs: bool, top_logprobs: int) -> int:
    """The op's argument: -1 without log probabilities, else the number of alternatives."""
    if isinstance(top_logprobs, bool) or not 0 <= top_logprobs <= MAX_TOP_LOGPROBS:
        raise ValueError(f"pass_ext::{op}: top_logprobs must be in [0, {MAX_TOP_LOGPROBS}], got {top_logprobs}")
    if top_logprobs and not return_logprobs:
        raise ValueError(f"pass_ext::{op}: return_logprobs must be True with top_logprobs {top_logprobs}, got False")
    return top_logprobs if return_logprobs else -1


def check_room(op: str, support: int, vocabulary: int) -> int:
    """``support``, the ids that each emitted token has room for."""
    if isinstance(support, bool) or not 0 <= support <= vocabulary:
        raise ValueError(
            f"pass_ext{op}: support must be the ids that each token has room for, 0 (none) to the vocabulary, {vocabulary}, "
            f"got {support}"
        )
    return support


def _dense(op: str, argument: str, tensor: Tensor | None, dtype: torch.dtype = torch.int32) -> Tensor | None:
    tensor = integers(op, argument, tensor, dtype)
    return tensor if tensor is None or tensor.is_contiguous() else tensor.contiguous()


def _sampling(
    op: str, batch: tuple[int, torch.device], target: tuple[Parameter, ...], draft: tuple[Parameter, ...]
) -> list[Tensor | None]:
    if all(value is None for value in (*target, *draft)):  # most steps: greedy
        return [None] * 8
    of_target, of_draft = target_and_draft(op, target, draft, *batch)
    return of_target + of_draft


def _noise(
    op: str,
    batch: tuple[int, torch.device],
    temperature: Parameter,
    seeds: Parameter,
    positions: Parameter,
    generator: torch.Generator | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Seeds and positions as tensors. Greedy steps draw nothing and need no seeds."""
    check_positions(f"pass_ext::{op}", seeds, positions, draws=not is_greedy(temperature))
    return (
        None if temperature is None and seeds is None else seeds_for(op, seeds, *batch, generator),
        parameter_tensor(op, "positions", positions, batch[0], torch.int64, batch[1]),
    )


def _call(op: Any, *arguments: Any) -> AcceptResult:
    *tensors, logprobs, support = call(op, *arguments)  # accepting has no gradient
    result = AcceptResult(*tensors)
    if logprobs:
        result.logprobs = TokenLogprobs(*logprobs)
    if support:
        result.support = TokenSupport(*support)
    if not torch.compiler.is_compiling() and _library.debug_enabled():  # dynamo does not trace the name
        raise_on_status(op._schema.name.split("::")[1], result.status)
    return result


def raise_on_status(op: str, status: Tensor) -> None:
    """Raises RuntimeError if a request has a status. Synchronises with the device, so it does so in debug mode only."""
    if not _library.debug_enabled() or torch.compiler.is_compiling():
        return
    bad = status.nonzero().flatten().tolist()
    if bad:
        code = int(status[bad[0]])
        reasons = " and ".join(text for bit, text in STATUS.items() if code & bit)
        raise RuntimeError(f"pass_ext::{op}: request {bad[0]}: {reasons} (of {len(bad)} in all)")


def _fake(
    requests: Any, width: Any, like: Tensor, logprobs: int, support: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor], list[Tensor]]:
    def empty(dtype: torch.dtype, *shape: Any) -> Tensor:
        return like.new_empty(shape, dtype=dtype)

    floats = [empty(torch.float32, requests, width) for _ in range(2)]
    top_tokens = empty(torch.int64, requests, width, max(logprobs, 0))
    ids = empty(torch.int32, requests, width, support)
    return (
        empty(torch.int64, requests, width),
        empty(torch.int32, requests, width),
        empty(torch.int32, requests),
        empty(torch.int32, requests),
        [] if logprobs < 0 else [*floats, top_tokens, *(empty(torch.float32, *top_tokens.shape) for _ in range(2))],
        [empty(torch.int32, requests, width), ids] if support > 0 else [],
    )


@fake_kernel("accept_tree")
def _tree_shape(target_logits, tokens, parents, cu_nodes, max_depth, *rest):  # type: ignore[no-untyped-def]
    return _fake(cu_nodes.shape[0] - 1, max_depth + 1, target_logits, *rest[-2:])


@fake_kernel("accept_chain")
def _chain_shape(target_logits, draft_tokens, *rest):  # type: ignore[no-untyped-def]
    return _fake(target_logits.shape[0], target_logits.shape[1], target_logits, *rest[-2:])
