"""Contenders that verify drafts: pass_ext, plain PyTorch, transformers, vLLM and FlashInfer; and ``Step``, their input.

accept.py says what each stands for.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import pass_ext
from benchmarks.ops.contenders.inputs.distributions import (
    FILTERS,
    TEMPERATURE,
    lean_draw,
    lean_probs,
    usual_draw,
    usual_probs,
)
from pass_ext import Tree
from pass_ext.ops.common.rules import ACCEPT_RULES

BRANCHING = {
    3: (1, 2),
    7: (1, 2, 2),
    15: (3, 2, 1),
    63: (3, 2, 3, 2),
}  # drafts -> children of every node, level by level
NEEDS_DRAFT = tuple(name for name, rule in ACCEPT_RULES.items() if rule.needs_draft_logits)

Accepted = tuple[Tensor, Tensor]  # emitted [B, depth + 1], -1 after the end; accepted drafts [B]


# ---- the input ----


@dataclass(frozen=True)
class Spec:
    """One line of the table."""

    shape: str
    rule: str
    batch: int
    drafts: int
    vocabulary: int
    logits: str = "peaked"
    filters: str = "off"
    fixed: bool = False
    heat: float = TEMPERATURE
    logprobs: bool = False

    @property
    def temperature(self) -> float:
        """0 for greedy steps."""
        return 0.0 if self.rule == "greedy" else self.heat


class Topology:
    """The tree of a step, the same for every request, as lists; node 0 is the root. A chain is a tree too."""

    def __init__(self, shape: str, drafts: int) -> None:
        branching = BRANCHING[drafts] if shape == "tree" else (1,) * drafts
        tree = Tree.from_branching(branching)
        self.parents, self.depths = list(tree.parents), list(tree.depths)
        self.nodes, self.depth, self.branching = len(tree), len(branching), branching
        self.children = [list(tree.children(node)) for node in range(self.nodes)]
        self.inner = [node for node in range(self.nodes) if self.children[node]]
        self.first_path = list(tree.path(tree.leaves[0]))

    def tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The children of each node, -1 after the last; each node's row of draft logits, 0 for a leaf."""
        width = max(self.branching)
        children = [[*below, *[-1] * (width - len(below))] for below in self.children]
        rows = [self.inner.index(node) if node in self.inner else 0 for node in range(self.nodes)]
        return torch.tensor(children, device=device), torch.tensor(rows, device=device)


@dataclass
class Step:
    """One set of inputs: logits and drafts of B requests with n nodes each, I of them with children."""

    spec: Spec
    topology: Topology
    target: Tensor  # [B, n, V]
    draft: Tensor  # [B, I, V]
    tokens: Tensor  # [B, n]; the root's is not used
    sampling: dict[str, Tensor]  # temperature and filters as pass_ext takes them
    seeds: Tensor
    positions: Tensor
    children: Tensor
    draft_row: Tensor
    tree: tuple[Any, ...] = ()  # as pass_ext takes it: tokens, parents, cu_nodes, max_depth
    draft_rows: Tensor | None = None
    transformers: tuple[Any, ...] = ()

    @property
    def chain(self) -> Tensor:
        """The drafts without the root, [B, K]."""
        return self.tokens[:, 1:]


# ---- ours ----


def ours(step: Step, logprobs: int | None = None) -> pass_ext.AcceptResult:
    """pass_ext; a greedy step is rule "coupled" without a temperature. logprobs: the alternatives of each token; None: off."""
    scores: dict[str, Any] = {} if logprobs is None else {"return_logprobs": True, "top_logprobs": logprobs}
    rule = "coupled" if step.spec.rule == "greedy" else step.spec.rule
    needs_draft = rule in NEEDS_DRAFT
    if step.spec.shape == "chain":
        draft = step.draft if needs_draft else None
        return pass_ext.accept_chain(
            step.target,
            step.tree[0],
            rule=rule,
            draft_logits=draft,
            seeds=step.seeds,
            positions=step.positions,
            **step.sampling,
            **scores,
        )
    return pass_ext.accept_tree(
        step.target.flatten(0, 1),
        *step.tree,
        rule=rule,
        draft_logits=step.draft.flatten(0, 1) if needs_draft else None,
        draft_rows=step.draft_rows if needs_draft else None,
        seeds=step.seeds,
        positions=step.positions,
        **step.sampling,
        **scores,
    )


# ---- torch: chains, all rows at once ----


def emit(step: Step, accepted: Tensor, last: Tensor) -> Accepted:
    """A chain's accepted drafts, the token after them, then -1."""
    drafts = step.chain
    place = torch.arange(drafts.shape[1] + 1, device=drafts.device)
    padded = torch.cat([drafts, drafts[:, :1]], dim=1)
    emitted = padded.where(place < accepted[:, None], last[:, None])
    return emitted.masked_fill_(place > accepted[:, None], -1), accepted


def chain_rejection(step: Step) -> Accepted:
    """Rejection: both distributions, all coins, and the residual of the row of the first refusal."""
    p = usual_probs(step.target, TEMPERATURE, step.spec.filters)
    q = usual_probs(step.draft, TEMPERATURE, step.spec.filters)
    drafts, requests = step.chain.clamp(min=0), torch.arange(len(p), device=p.device)
    p_token, q_token = (probs[:, : drafts.shape[1]].gather(2, drafts[..., None])[..., 0] for probs in (p, q))
    accept = (torch.rand_like(p_token) * q_token < p_token) & (step.chain >= 0)
    accepted = accept.cumprod(1).sum(1)
    stop = p[requests, accepted]
    residual = (stop - q[requests, accepted.clamp(max=drafts.shape[1] - 1)]).clamp_(min=0)
    rest = residual.sum(1, keepdim=True)
    drawn_from = residual.where((accepted < drafts.shape[1])[:, None] & (rest > 0), stop)
    return emit(step, accepted, usual_draw(drawn_from))


def chain_block(step: Step) -> Accepted:
    """Block verification: accepts the longest prefix whose coin is below its chance."""
    p = usual_probs(step.target, TEMPERATURE, step.spec.filters)
    q = usual_probs(step.draft, TEMPERATURE, step.spec.filters)
    drafts, requests, count = step.chain.clamp(min=0), torch.arange(len(p), device=p.device), step.chain.shape[1]
    p_token, q_token = (probs[:, :count].gather(2, drafts[..., None])[..., 0] for probs in (p, q))
    ratio = (p_token / q_token).where(step.chain >= 0, 0)
    weights = [torch.ones_like(ratio[:, 0])]
    for i in range(count):
        weights.append((weights[-1] * ratio[:, i]).clamp_(max=1))
    weight = torch.stack(weights, dim=1)
    mass = (weight[:, :count, None] * p[:, :count] - q).clamp_(min=0).sum(2)
    chance = torch.cat([mass / (mass + 1 - weight[:, :count]).clamp_(min=1e-30), weight[:, count:]], dim=1)
    hit = torch.rand_like(chance) < chance
    hit[:, 0] = True
    accepted = (hit * torch.arange(count + 1, device=p.device)).amax(1)
    stop = p[requests, accepted]
    residual = weight[requests, accepted][:, None] * stop - q[requests, accepted.clamp(max=count - 1)]
    residual.clamp_(min=0)
    rest = residual.sum(1, keepdim=True)
    return emit(step, accepted, usual_draw(residual.where((accepted < count)[:, None] & (rest > 0), stop)))


def chain_typical(step: Step) -> Accepted:
    """Typical acceptance: accepts drafts that are probable enough for the entropy of their row."""
    p = usual_probs(step.target, TEMPERATURE, step.spec.filters)
    count = step.chain.shape[1]
    entropy = torch.special.entr(p[:, :count]).sum(2)
    bound = (0.3 * (-entropy).exp()).clamp_(max=0.09)
    p_token = p[:, :count].gather(2, step.chain.clamp(min=0)[..., None])[..., 0]
    accepted = ((p_token > bound) & (step.chain >= 0)).cumprod(1).sum(1)
    return emit(step, accepted, usual_draw(p[torch.arange(len(p), device=p.device), accepted]))


def chain_coupled(step: Step) -> Accepted:
    """Draws the target's token of every row and accepts the drafts equal to it."""
    p = usual_probs(step.target, TEMPERATURE, step.spec.filters)
    return match_chain(step, usual_draw(p.flatten(0, 1)).view(p.shape[:2]))


def chain_greedy(step: Step) -> Accepted:
    """Accepts the drafts equal to the arg-max of their row."""
    return match_chain(step, step.target.argmax(2))


def match_chain(step: Step, tokens: Tensor) -> Accepted:
    """Accepts drafts up to the first that differs from the token of its row."""
    accepted = (tokens[:, :-1] == step.chain).cumprod(1).sum(1)
    return emit(step, accepted, tokens.gather(1, accepted[:, None])[:, 0])


# ---- torch: trees, level by level ----


def walk_rejection(
    step: Step, make_probs: Callable[..., Tensor], draw: Callable[[Tensor], Tensor], replaced: bool = False
) -> Accepted:
    """Rejection on a tree: judges children in turn, takes rejected ones out of p and q, and draws from the rest.

    All requests walk at once.
    """
    device, filters, on_cpu = step.target.device, step.spec.filters, step.target.device.type == "cpu"
    requests = torch.arange(len(step.target), device=device)
    emitted = torch.full((len(requests), step.topology.depth + 1), -1, device=device)
    accepted_count = torch.zeros_like(requests)
    left = step.target.new_empty(len(requests), step.target.shape[2], dtype=torch.float32)
    node, walking = torch.zeros_like(requests), torch.ones_like(requests, dtype=torch.bool)
    rows = requests  # that still walk; on a GPU all, because counting them would wait for it
    for width in (*step.topology.branching, 0):
        p = make_probs(step.target[rows, node], TEMPERATURE, filters)
        chosen = torch.full_like(node, -1)
        if width:
            q = make_probs(step.draft[rows, step.draft_row[node]], TEMPERATURE, filters)
            q_mass = torch.ones_like(p[:, :1])
        for place in range(width):
            child = step.children[node, place]
            token = step.tokens[rows, child.clamp(min=0)]
            at = token.clamp(min=0)[:, None]
            judged = walking & (child >= 0) & (token >= 0) & (chosen < 0)
            q_token = q.gather(1, at)
            accept = judged & (torch.rand_like(q_token) * q_token < p.gather(1, at) * q_mass)[:, 0]
            chosen = child.where(accept, chosen)
            refused = judged & ~accept
            if on_cpu:  # the rows of refused drafts alone
                some = refused.nonzero()[:, 0]
                if not len(some):
                    continue
                p_some, q_some, refused_all = p[some], q[some], len(some) == len(rows)
                residual = (p_some - q_some / q_mass[some]).clamp_(min=0)
                mass = residual.sum(1, keepdim=True)
                residual = torch.where(mass > 0, residual / mass, p_some)
                if refused_all:
                    p = residual
                else:
                    p[some] = residual
                if not replaced:
                    q[some, at[some, 0]] = 0
                    q_mass[some] = (q_mass[some] - q_token[some]).clamp_(min=1e-20)
            else:
                residual = (p - q / q_mass).clamp_(min=0)
                mass = residual.sum(1, keepdim=True)
                p = torch.where(refused[:, None] & (mass > 0), residual / mass, p)
                if not replaced:
                    q.scatter_(1, at, 0.0)
                    q_mass = (q_mass - q_token).where(refused[:, None], q_mass).clamp_(min=1e-20)
        went_on = chosen >= 0
        token = step.tokens[rows, chosen.clamp(min=0)]
        if on_cpu:
            left[rows[~went_on]] = p[~went_on]
            rows, node, token = rows[went_on], chosen[went_on], token[went_on]
            walking = walking[: len(rows)]
            if not len(rows):
                break
            emitted[rows, accepted_count[rows]] = token
            accepted_count[rows] += 1
        else:
            left = torch.where((walking & ~went_on)[:, None], p, left)
            walking, node = walking & went_on, chosen.where(went_on, node)
            here = accepted_count[:, None]
            emitted.scatter_(1, here, token[:, None].where(walking[:, None], emitted.gather(1, here)))
            accepted_count = accepted_count + walking
    emitted.scatter_(1, accepted_count[:, None], draw(left)[:, None])
    return emitted, accepted_count


def walk_match(step: Step, pick: Callable[[Tensor], Tensor]) -> Accepted:
    """Picks the target's token at each node and goes on to the child equal to it."""
    device, on_cpu = step.target.device, step.target.device.type == "cpu"
    requests = torch.arange(len(step.target), device=device)
    emitted = torch.full((len(requests), step.topology.depth + 1), -1, device=device)
    accepted_count, node, rows = torch.zeros_like(requests), torch.zeros_like(requests), requests
    walking = torch.ones_like(requests, dtype=torch.bool)
    for depth in range(step.topology.depth + 1):
        token = pick(step.target[rows, node])
        emitted[rows, depth] = token if on_cpu else token.where(walking, -1)
        children = step.children[node]
        fits = (step.tokens[rows[:, None], children.clamp(min=0)] == token[:, None]) & (children >= 0)
        matches, place = fits.max(1)
        matches = matches & walking[: len(rows)]
        accepted_count[rows] += matches
        node = children.gather(1, place[:, None])[:, 0]
        if on_cpu:
            rows, node = rows[matches], node[matches]
            if not len(rows):
                break
        else:
            walking, node = matches, node.clamp(min=0)
    return emitted, accepted_count


def walk_coupled(step: Step, make_probs: Callable[..., Tensor], draw: Callable[[Tensor], Tensor]) -> Accepted:
    """Walks by tokens drawn from the target's distribution."""
    return walk_match(step, lambda rows: draw(make_probs(rows, TEMPERATURE, step.spec.filters)))


def walk_greedy(step: Step) -> Accepted:
    """Walks by the arg-max."""
    return walk_match(step, lambda rows: rows.argmax(1))


def usual_walk(step: Step) -> Accepted:
    """Rejection without replacement."""
    return walk_rejection(step, usual_probs, usual_draw)


def usual_walk_with_replacement(step: Step) -> Accepted:
    """Rejection of independent draws."""
    return walk_rejection(step, usual_probs, usual_draw, replaced=True)


def lean_walk(step: Step) -> Accepted:
    """Rejection without replacement, with less work."""
    return walk_rejection(step, lean_probs, lean_draw)


def lean_walk_with_replacement(step: Step) -> Accepted:
    """Rejection of independent draws, with less work."""
    return walk_rejection(step, lean_probs, lean_draw, replaced=True)


def usual_coupled_walk(step: Step) -> Accepted:
    """Walks by the target's own draws."""
    return walk_coupled(step, usual_probs, usual_draw)


def lean_coupled_walk(step: Step) -> Accepted:
    """Walks by the target's own draws, with less work."""
    return walk_coupled(step, lean_probs, lean_draw)


# ---- other libraries ----


def prepare_transformers(step: Step) -> tuple[Any, ...]:
    """transformers' function, its processors in its order, and the draft's logits as its assistant leaves them."""
    from transformers.generation import logits_process as process
    from transformers.generation.utils import _speculative_sampling

    options = FILTERS[step.spec.filters]
    processors = process.LogitsProcessorList([process.TemperatureLogitsWarper(TEMPERATURE)])
    if "top_k" in options:
        processors.append(process.TopKLogitsWarper(options["top_k"]))
    if "top_p" in options:
        processors.append(process.TopPLogitsWarper(options["top_p"]))
    if "min_p" in options:
        processors.append(process.MinPLogitsWarper(options["min_p"]))
    scores = torch.stack([processors(step.tokens, row) for row in step.draft.float().unbind(1)], dim=1)
    return _speculative_sampling, processors, scores


def with_transformers(step: Step) -> Any:
    """transformers: the steps of `_assisted_decoding` after the call of the target."""
    verify, processors, scores = step.transformers
    logits = step.target.to(torch.float32, copy=True)
    for i in range(logits.shape[1]):
        logits[:, i] = processors(step.tokens[:, : i + 1], logits[:, i])
    return verify(step.tokens, scores, step.tokens.shape[1] - 1, logits)


def with_vllm(step: Step) -> Any:
    """vLLM: its sampler's preprocessing, the bonus draw, its Triton kernels. Names of v1, 0.9 and later."""
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p, random_sample

    batch, nodes, vocabulary = step.target.shape

    def probs_of(logits: Tensor) -> Tensor:
        rows, options = logits.numel() // vocabulary, FILTERS[step.spec.filters]
        filters = [
            torch.full((rows,), options[name], device=logits.device) if name in options else None
            for name in ("top_k", "top_p")
        ]
        scaled = logits.reshape(rows, vocabulary).to(torch.float32, copy=True).div_(TEMPERATURE)
        return apply_top_k_top_p(scaled, *filters).softmax(-1, dtype=torch.float32)

    bonus = random_sample(probs_of(step.target[:, -1]), {})[:, None]
    counts = [nodes - 1] * batch
    ends = torch.arange(1, batch + 1, device=bonus.device, dtype=torch.int32) * (nodes - 1)
    metadata = SimpleNamespace(
        all_greedy=False,
        all_random=True,
        temperature=step.sampling["temperature"],
        generators={},
        top_k=None,
        top_p=None,
    )
    drafts = step.chain.to(torch.int32).flatten()
    return rejection_sampler.rejection_sample(
        drafts, counts, nodes - 1, ends, probs_of(step.draft), probs_of(step.target[:, :-1]), bonus, metadata
    )


def with_flashinfer(step: Step) -> Any:
    """FlashInfer: softmax and renormalisation of both, then its kernel for chains."""
    from flashinfer import sampling

    def probs_of(logits: Tensor) -> Tensor:
        options = FILTERS[step.spec.filters]
        probs = sampling.softmax(logits.flatten(0, 1).float(), temperature=TEMPERATURE)
        if "top_k" in options:
            probs = sampling.top_k_renorm_probs(probs, options["top_k"])
        if "top_p" in options:
            probs = sampling.top_p_renorm_probs(probs, options["top_p"])
        return probs.view(logits.shape)

    return sampling.chain_speculative_sampling(probs_of(step.draft), step.chain.to(torch.int32), probs_of(step.target))


# ---- the rules that each has ----

CHAIN: dict[str, Callable[[Step], Accepted]] = {
    "greedy": chain_greedy,
    "coupled": chain_coupled,
    "rejection": chain_rejection,
    "block": chain_block,
    "typical": chain_typical,
}
WALK: dict[str, Callable[[Step], Accepted]] = {
    "greedy": walk_greedy,
    "coupled": usual_coupled_walk,
    "rejection": usual_walk,
    "rejection_with_replacement": usual_walk_with_replacement,
}
LEAN_WALK: dict[str, Callable[[Step], Accepted]] = {
    "greedy": walk_greedy,
    "coupled": lean_coupled_walk,
    "rejection": lean_walk,
    "rejection_with_replacement": lean_walk_with_replacement,
}
LIBRARIES: dict[str, Callable[[Step], Any]] = {
    "transformers": with_transformers,
    "vLLM": with_vllm,
    "FlashInfer": with_flashinfer,
}
