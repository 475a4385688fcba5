"""``Drafting``: the trees of each step. Which look-ahead groups it carries, which candidates, and when to go without.

A step of PaSS is full (the plan's tree and groups) where the last accepted node had a group, else a probe (the root and one
group). A draft model's candidates and n-grams join either. While planned drafts gain less than they cost, steps are plain for a
while.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from pass_ext.decoding.drafting.from_draft_model import Drafted, ModelDrafter
from pass_ext.decoding.drafting.from_lookahead import PassDrafter
from pass_ext.decoding.drafting.from_ngrams import NGramIndex, join
from pass_ext.decoding.drafting.longest_branch import first_level
from pass_ext.decoding.drafting.of_method import model_drafter
from pass_ext.decoding.drafting.pace import Pace
from pass_ext.decoding.drafting.step import Step
from pass_ext.decoding.methods import Method, MultiCandidate, NGram, PaSS, Plain, Speculative
from pass_ext.decoding.models.packed import Adapted
from pass_ext.decoding.planning.for_lookahead import pass_plan
from pass_ext.decoding.planning.lookahead_tree import Plan
from pass_ext.decoding.planning.step_times import StepTimes
from pass_ext.decoding.rules import DECODING_RULES, LONGEST_BRANCH
from pass_ext.decoding.sampling import BatchSampling
from pass_ext.decoding.session.session import Session
from pass_ext.tree import Tree

_ROOT = Tree.chain(0)


class Drafting:
    """See the module. ``texts`` are the requests' tokens, which the loop extends."""

    def __init__(
        self,
        method: Method,
        model: Adapted,
        sampling: BatchSampling,
        rule: str,
        texts: Sequence[list[int]],
        *,
        graphs: bool,
    ) -> None:
        self._texts = texts
        self.slots: Tensor | None = None
        self.deep: Tensor | None = None
        self.law: Tensor | None = None
        """``[R, V]``: what ``Step.law_rows`` of the last ``next`` speak of."""
        if not isinstance(method, (Plain, NGram, PaSS, Speculative, MultiCandidate)):
            raise TypeError(
                "method must be Plain(), NGram(...), PaSS(...), Speculative(...) or MultiCandidate(...), got "
                f"{type(method).__name__}"
            )
        self._sampling, self._rule = sampling, rule
        ngram = method if isinstance(method, NGram) else getattr(method, "ngram", None)
        self._ngram: NGram | None = ngram
        self._indices = [NGramIndex(ngram.longest, ngram.shortest) for _ in texts] if ngram else []
        self._indexed = [0] * len(texts)
        self._plan: Plan | None = None
        self._pass: PassDrafter | None = None
        self._times: StepTimes | None = None
        self._models: ModelDrafter | None = None
        lookahead = method if isinstance(method, PaSS) else getattr(method, "lookahead", None)
        self._check_origins(method, lookahead)
        if isinstance(method, (Speculative, MultiCandidate)):
            self._models = model_drafter(method, model, sampling, rule, texts, graphs=graphs)
        if lookahead is not None:
            self._use(lookahead, model, graphs)
        if self._models is not None:
            self._times = self._models.times
        requests = len(texts)
        self._paces = [Pace(self._times.at(requests)) for _ in texts] if self._times is not None else None
        self._written: list[Drafted | None] = [None] * requests
        trees = [self._plan.tree] if self._plan else []
        trees += [self._models.tree] if self._models else []
        self.max_depth = max([ngram.tokens if ngram else 0, *(tree.max_depth for tree in trees)])
        self.deepest_row = (
            max(self.max_depth, *self._plan.tree.depths, self._plan.slots) if self._plan else self.max_depth
        )

    def _check_origins(self, method: Method, lookahead: PaSS | None) -> None:
        """Rules that judge drafts by the law that they were drawn from need one law for all of them."""
        origins: dict[str, object] = {"n-gram": self._ngram, "look-ahead": lookahead}
        origins["draft model"] = method if isinstance(method, (Speculative, MultiCandidate)) else None
        several = [name for name, given in origins.items() if given is not None]
        if self._rule == LONGEST_BRANCH and several != ["draft model"]:
            raise ValueError("rule 'longest_branch' judges the candidates of a draft model alone: MultiCandidate(...)")
        if (
            self._sampling.temperature is not None
            and DECODING_RULES[self._rule].needs_draft_logits
            and len(several) > 1
        ):
            raise ValueError(
                f"rule {self._rule!r} judges drafts by the law that they were drawn from, and {' and '.join(several)} "
                "candidates have none in common: use rule 'coupled', or one of them"
            )

    def _use(self, method: PaSS, model: Adapted, graphs: bool) -> None:
        method.lookahead.check_fits(model.table)
        if method.lookahead.rank and not model.has_table:
            raise ValueError(
                f"PaSS: look-ahead slots with transitions (rank {method.lookahead.rank}) compute with the model's embedding "
                f"table, and that of {model.name} is quantised or offloaded: use slots of rank 0"
            )
        plan, times = pass_plan(method, model, len(self._texts), graphs=graphs)
        if plan.is_plain:
            return
        if (
            DECODING_RULES[self._rule].chains_only
            and self._sampling.temperature is not None
            and len(plan.tree.leaves) != 1
        ):
            raise ValueError(f"rule {self._rule!r} takes chains: give PaSS(tree=Tree.chain(n))")
        self._plan = plan
        self._nodes = Tree(plan.tree.parents[: plan.tree.num_nodes])
        self._groups = tuple(plan.groups.items())
        self.slots = method.lookahead.weight[: plan.slots].detach().to(model.table.device, model.table.dtype)
        if method.lookahead.deep is not None:
            self.deep = method.lookahead.deep[:, : plan.slots].detach().to(model.table.device, model.table.dtype)
        self._pass = PassDrafter(method.lookahead, self._nodes, model.table, self._sampling, self._rule)
        if times is not None and self._models is None:
            self._times = times

    def attached(self) -> AbstractContextManager[None]:
        """What must hold while the draft model is called."""
        return nullcontext() if self._models is None else self._models.attached()

    def begin(self, session: Session, room: int) -> None:
        """The target's session, and the most tokens of a text."""
        if self._models is not None:
            self._models.begin(session, room)

    # ---- the trees ----

    def first(self, request: int) -> Step:
        """The first step, whose root is the prompt's last token."""
        return Step(self._texts[request][-1], _ROOT, self._probe(), [])

    def _probe(self) -> tuple[tuple[int, int], ...]:
        return ((0, self._plan.slots),) if self._plan else ()

    def next(
        self, steps: Sequence[Step | None], logits: Tensor, last_nodes: Sequence[int], remaining: Sequence[int]
    ) -> list[Step | None]:
        """The next step of each request that still needs tokens; ``steps`` and ``logits`` are those of the call just made.

        last_nodes: the last accepted node of each request.
        """
        drafted = self._look_ahead(steps, logits, last_nodes, remaining)
        written: list[Drafted | None] = [None] * len(remaining)
        if self._models is not None:
            first = self._first_level(steps, logits, last_nodes, remaining)
            spared = 0 if self._rule == LONGEST_BRANCH else 1  # the token that the target adds
            levels = [0 if self._rests(b) else max(left - spared, 0) for b, left in enumerate(remaining)]
            written = self._models.draft(levels, first)
            self.law = self._models.law
        self._written = written
        return [
            self._step(b, left, drafted.get(b), written[b]) if left > 0 else None for b, left in enumerate(remaining)
        ]

    def _first_level(
        self, steps: Sequence[Step | None], logits: Tensor, last_nodes: Sequence[int], remaining: Sequence[int]
    ) -> Tensor | None:
        """Rule "longest_branch": the first level's tokens, from the target's law behind each last accepted node."""
        if self._rule != LONGEST_BRANCH or self._models is None:
            return None
        rows, first = [], 0
        for step, node in zip(steps, last_nodes, strict=True):
            rows.append(first + node if step is not None else 0)
            first += len(step.tree) if step is not None else 0
        return first_level(
            logits[torch.tensor(rows, device=logits.device)],
            len(self._models.tree.children(0)),
            self._sampling,
            [len(text) for text in self._texts],
        )

    def _look_ahead(
        self, steps: Sequence[Step | None], logits: Tensor, last_nodes: Sequence[int], remaining: Sequence[int]
    ) -> dict[int, tuple[list[int], list[int] | None]]:
        """For each request whose last accepted node had a group: tokens of the plan's nodes, and the rows of their laws."""
        self.law = None
        if self._pass is None:
            return {}
        requests, rows, first = [], [], 0
        for b, step in enumerate(steps):
            if step is None:
                continue
            group = step.tree.group_rows(last_nodes[b])
            if remaining[b] > 1 and len(group):
                requests.append(b)
                rows += [first + row for row in group]
            first += len(step.tree)
        if not requests:
            return {}
        slots = logits[torch.tensor(rows, device=logits.device)].view(len(requests), -1, logits.shape[-1])
        texts = [self._texts[b] for b in requests]
        candidates = self._pass.draft(slots, requests, [text[-1] for text in texts], [len(text) - 1 for text in texts])
        self.law = candidates.logits
        law_rows = candidates.rows
        return {b: (candidates.tokens[i], law_rows[i] if law_rows else None) for i, b in enumerate(requests)}

    def _step(
        self, b: int, remaining: int, drafted: tuple[list[int], list[int] | None] | None, written: Drafted | None
    ) -> Step:
        root, ngrams = self._texts[b][-1], self._ngrams(b, remaining - 1)
        if remaining == 1 and written is None:
            return Step(root, _ROOT, (), [])
        nodes, groups = _ROOT, self._probe()
        tokens: list[int] = []
        law: list[int] | None = None
        if self._rests(b):
            groups = ()
        elif self._plan is not None and drafted is not None:
            nodes, groups = self._nodes, self._groups
            tokens, law = drafted
        if written is not None and not tokens:
            nodes, tokens, law = written.tree, written.tokens, written.law_rows
        elif written is not None:
            ngrams = [*_chains(written), *ngrams]
        if ngrams:
            parents, joined = join(nodes.parents, [root, *tokens], ngrams)
            nodes, tokens = Tree(parents), joined[1:]
        return Step(root, nodes, groups, tokens, law)

    def _ngrams(self, b: int, most: int) -> list[list[int]]:
        if self._ngram is None:
            return []
        self._indices[b].extend(self._texts[b][self._indexed[b] :])
        self._indexed[b] = len(self._texts[b])
        return self._indices[b].proposals(min(self._ngram.tokens, most), self._ngram.branches)

    def learn(self, steps: Sequence[Step | None], gained: Sequence[int]) -> None:
        """Takes in how many tokens each request's step gave."""
        if self._paces is None or self._times is None:
            return
        for pace, step, written, tokens in zip(self._paces, steps, self._written, gained, strict=True):
            if step is not None:
                seconds = self._times.at(len(steps) * len(step.tree))
                if written is not None and self._models is not None:
                    seconds += self._models.seconds(written.tree.max_depth)
                pace.add(seconds, tokens)

    def _rests(self, b: int) -> bool:
        return self._paces is not None and self._rule != LONGEST_BRANCH and self._paces[b].rests


def _chains(drafted: Drafted) -> list[list[int]]:
    """The paths of a tree of candidates, as far as they have tokens."""
    chains = []
    for leaf in drafted.tree.leaves:
        chain = [drafted.tokens[node - 1] for node in drafted.tree.path(leaf)[1:]]
        chains.append(chain[: chain.index(-1)] if -1 in chain else chain)
    return chains
