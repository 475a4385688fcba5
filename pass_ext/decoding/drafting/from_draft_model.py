"""``ModelDrafter``: candidates from a draft model, level by level: one call of it per level, for all requests together.

    level s: the draft reads the first s levels of each tree behind its text (``Tree.slice``: masks are cut from the largest
    tree's, nothing is built again); the children of level s are drawn from its logits; the decision says who goes on

Tokens stay on the device until the last level. What the target then accepts stays in the draft's own caches; tokens that it
has not read yet (another drafter's, the target's) are read by its next call, as a chain above the root. An early-exit draft
reads the target's caches instead and keeps nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pass_ext.decoding.drafting.early_stop import EarlyFlag
from pass_ext.decoding.drafting.levels import draw_children, drawing_mode, levels_of
from pass_ext.decoding.models.early_exit_draft import unwrapped
from pass_ext.decoding.models.hidden_rows import kept_hidden
from pass_ext.decoding.models.packed import Adapted
from pass_ext.decoding.models.vocabulary import check_pair, in_vocabulary
from pass_ext.decoding.planning.step_times import StepTimes
from pass_ext.decoding.sampling import BatchSampling
from pass_ext.decoding.session.session import Session
from pass_ext.decoding.session.uploads import uploaded
from pass_ext.modules.decision import DraftLevel
from pass_ext.tree import PackedTrees, Tree, pack_trees

_MOST_ABOVE = 8  # tokens of a text that every level reads above the root; more are read once, in calls of their own
_MOST_READ = 256  # by each of those
_MOST_PACKED = 256
Decision = Callable[[DraftLevel], Tensor]


class Drafted(NamedTuple):
    """One request's candidates."""

    tree: Tree
    tokens: list[int]
    """Of nodes 1, 2, …; -1: none."""
    law_rows: list[int] | None
    """For each node the row of the law that its children were drawn from, or -1; None where no law is kept."""


@dataclass
class _Fed:
    """The draft's last call."""

    trees: list[Tree | None]
    """Without what was read above their roots."""
    lags: list[int]
    packed: PackedTrees
    lengths: list[int]
    """Of the texts then."""
    tokens: list[list[int]]


class ModelDrafter:
    """See the module.

    Args:
        draft: the draft model.
        target: the model that will judge.
        tree: the largest tree, numbered level by level.
        sampling, rule: of the batch.
        texts: the requests' tokens, which the loop extends.
        decision: see ``pass_ext.modules.decision``; None: all levels.
        times, draft_times: of the target's calls and of the draft's, where the tree was planned by them.
    """

    def __init__(
        self,
        draft: Adapted,
        target: Adapted,
        tree: Tree,
        sampling: BatchSampling,
        rule: str,
        texts: Sequence[list[int]],
        decision: Decision | None = None,
        *,
        times: StepTimes | None = None,
        draft_times: StepTimes | None = None,
        graphs: bool = False,
    ) -> None:
        check_pair(target, draft)
        self.times = times
        self._draft_times = draft_times
        self.tree = tree
        self.levels_asked = 0
        """Levels drafted so far, over all requests."""
        self.law: Tensor | None = None
        self._vocabulary, self._device = target.table.shape[0], target.table.device
        self._draft, self._sampling, self._texts = draft, sampling, texts
        self._decision = _on(decision, self._device)
        self._mode = drawing_mode(sampling, rule)
        self._levels = levels_of(tree, self._device)
        self._slices = [tree.slice(levels) for levels in range(tree.max_depth + 1)]
        self._needs_hidden = bool(getattr(decision, "needs_hidden", False))
        self._threshold = float(getattr(decision, "threshold", 0.5))
        self._graphs = graphs and not self._needs_hidden
        self._fed: _Fed | None = None
        self._held = [0] * len(texts)
        self._packed: dict[tuple[Tree | None, ...], PackedTrees] = {}

    def attached(self) -> AbstractContextManager[None]:
        """What must hold while the draft is called."""
        return self._draft.attached()

    def begin(self, target: Session, room: int) -> None:
        """Finds room for the texts beside the target's."""
        self._shares = self._draft.shared_model is unwrapped(target.model.model)
        if self._shares:
            self._graphs = False  # its calls read caches that are another session's
            self._session = target.first_layers(self._draft, self._draft.shares_layers)
        else:
            self._session = Session(self._draft, target.requests, room + self.tree.max_depth, graphs=self._graphs)

    def draft(self, levels: Sequence[int], first: Tensor | None = None) -> list[Drafted | None]:
        """Candidates of each request, ``levels[b]`` levels of them at most; None where that is 0.

        first: ``[B, K]``, the first level's tokens where they are known already.
        """
        self.law = None
        kept: list[Tensor] = []
        self._keep()
        depths = [
            max(0, min(most, self.tree.max_depth, self._draft.most_positions - len(text)))
            for most, text in zip(levels, self._texts, strict=True)
        ]
        nodes = self.tree.num_nodes
        tokens = torch.full((len(depths), nodes + 1), -1, device=self._device)
        law_rows = [[-1] * nodes for _ in depths]
        places = uploaded([len(text) - 1 for text in self._texts], self._device)
        flag = EarlyFlag(len(depths), self.tree.max_depth, self._device)
        begin = 0
        if first is not None:
            children = self._levels[0].children[0]
            tokens[:, children] = first
            begin = 1
        self._read([b for b, depth in enumerate(depths) if depth > begin])
        for depth in range(begin, self.tree.max_depth):
            going = [b for b, most in enumerate(depths) if most > depth and flag.may_go_on(b, depth)]
            if not going:
                break
            self.levels_asked += len(going)
            level = self._levels[depth]
            logits, hidden = self._call(depth, going, tokens, level.numbers)
            at = uploaded(going, self._device)
            law = {name: None if v is None else v[at] for name, v in self._sampling.law().items()}
            width = level.children.shape[1]
            drawn, logprobs = draw_children(logits, width, self._mode, law, places[at], depth + 1, level.parents)
            tokens[at[:, None, None], level.children] = drawn.view(len(going), -1, width)
            if self._mode != "coupled":
                before = sum(len(rows) for rows in kept)
                for place, b in enumerate(going):
                    for i, parent in enumerate(level.numbers):
                        law_rows[b][parent] = before + place * len(level.numbers) + i
                kept.append(logits)
            if self._decision is not None and depth + 1 < self.tree.max_depth:
                requests = at.repeat_interleave(len(level.parents))
                flag.hear(
                    self._scores(DraftLevel(logits, hidden, drawn, logprobs, requests, depth + 1)), requests, depth + 1
                )
        self.law = torch.cat(kept) if kept else None
        drafted, reached = flag.read(tokens[:, :nodes])
        if self._fed is not None:
            self._fed.tokens = drafted
        found: list[Drafted | None] = []
        for b, depth in enumerate(depths):
            tree = self._slices[min(depth, reached[b])]
            rows = [
                row if node_depth < tree.max_depth else -1
                for row, node_depth in zip(law_rows[b], tree.depths, strict=False)
            ]
            found.append(
                Drafted(tree, drafted[b][1 : tree.num_nodes], rows if self.law is not None else None)
                if tree.max_depth
                else None
            )
        return found

    def seconds(self, levels: int) -> float:
        """What drafting so many levels takes, as measured beforehand."""
        if self._draft_times is None:
            return 0.0
        return sum(self._draft_times.at(len(self._texts) * len(tree)) for tree in self._slices[:levels])

    def _scores(self, level: DraftLevel) -> Tensor:
        assert self._decision is not None
        scores = self._decision(level)
        if not isinstance(scores, Tensor) or scores.shape != (len(level.requests),):
            found = list(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise ValueError(
                f"decision must give a tensor of one score for each of the {len(level.requests)} rows, got {found}"
            )
        return (scores if scores.dtype == torch.bool else scores > self._threshold).to(self._device)

    # ---- the draft's calls ----

    def _call(
        self, depth: int, going: Sequence[int], tokens: Tensor, parents: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        """Logits ``[len(going) * P, V]`` of the parents at this depth, and what the draft's head read."""
        self._let_go(going)
        requests = len(self._texts)
        trees: list[Tree | None] = [None] * requests
        lags = [0] * requests
        known: list[int] = []
        for b in going:
            held = self._length_held(b)
            trees[b], lags[b] = self._slices[depth], len(self._texts[b]) - 1 - held
            known += self._texts[b][held:]
        index: list[int] = []
        wanted: list[int] = []
        first, nodes = 0, self._slices[depth].num_nodes
        for b in going:
            wanted += (len(index) + lags[b] + parent for parent in parents)
            index += range(first, first + lags[b] + 1)
            index += (len(known) + b * tokens.shape[1] + node for node in range(1, nodes))
            first += lags[b] + 1
        source = torch.cat([uploaded(known, self._device), tokens.flatten()])
        ids = self._known_to_draft(source[uploaded(index, self._device)].to(self._session.device))
        rows = uploaded(wanted, self._session.device)
        packed = self._pack(
            [None if tree is None else _behind(tree, lag) for tree, lag in zip(trees, lags, strict=True)]
        )
        self._fed = _Fed(trees, lags, packed, list(map(len, self._texts)), [])
        with ExitStack() as stack:
            kept = stack.enter_context(kept_hidden(self._draft)) if self._needs_hidden else None
            if self._graphs:  # recorded calls give all rows, until the next one
                logits = self._session.call(packed, ids).logits[rows]
            else:
                logits = self._session.call(packed, ids, rows).logits
        hidden = None if kept is None else kept.rows.to(self._device)
        return in_vocabulary(logits, self._vocabulary, self._device), hidden

    def _let_go(self, going: Sequence[int]) -> None:
        """Those that draft no further are left out from here on: the text that they have read is kept first."""
        fed = self._fed
        stopped = set() if fed is None else {b for b, tree in enumerate(fed.trees) if tree is not None} - set(going)
        if fed is None or not stopped or self._shares:
            return
        paths: list[list[int]] = [[] for _ in self._texts]
        for b in stopped:
            paths[b] = list(range(fed.lags[b] + 1))
        self._commit(fed.packed, paths)

    def _known_to_draft(self, ids: Tensor) -> Tensor:
        """Nodes without a token (-1), and tokens that only the target's table has, are read as some token: what follows them
        is of no use, and of no harm."""
        return ids.clamp(0, self._draft.table.shape[0] - 1)

    def _length_held(self, b: int) -> int:
        """Tokens of the text in the draft's cache."""
        return len(self._texts[b]) - 1 if self._shares else self._held[b]

    def _keep(self) -> None:
        """Keys and values of the last call's rows that have become text."""
        fed, self._fed = self._fed, None
        if fed is None or self._shares:
            return
        paths = []
        for b, tree in enumerate(fed.trees):
            path: list[int] = []
            if tree is not None:
                path, node = list(range(fed.lags[b] + 1)), 0
                for token in self._texts[b][fed.lengths[b] : -1]:
                    node = next((child for child in tree.children(node) if fed.tokens[b][child] == token), 0)
                    if node == 0:
                        break
                    path.append(fed.lags[b] + node)
            paths.append(path)
        self._commit(fed.packed, paths)

    def _read(self, requests: Sequence[int]) -> None:
        """Long pieces of text that the draft has not seen, all but their ends."""
        while not self._shares:
            missing = {b: len(self._texts[b]) - 1 - self._held[b] for b in requests}
            pieces = {b: min(count, _MOST_READ) for b, count in missing.items() if count > _MOST_ABOVE}
            if not pieces:
                return
            trees = [Tree.chain(pieces[b] - 1) if b in pieces else None for b in range(len(self._texts))]
            ids = [token for b in sorted(pieces) for token in self._texts[b][self._held[b] : self._held[b] + pieces[b]]]
            packed = pack_trees(trees, self._session.device)
            one = torch.zeros(1, dtype=torch.int64, device=self._session.device)
            self._session.call(packed, self._known_to_draft(uploaded(ids, self._session.device)), one)
            self._commit(packed, [list(range(pieces.get(b, 0))) for b in range(len(self._texts))])

    def _commit(self, packed: PackedTrees, paths: Sequence[Sequence[int]]) -> None:
        """Keeps these rows of the last call; of a request with an empty path none."""
        most = max(map(len, paths))
        padded = [[*path, *[-1] * (most - len(path))] for path in paths]
        counts = [max(len(path) - 1, 0) for path in paths]
        device = self._session.device
        self._session.commit(packed, uploaded(padded, device).int(), uploaded(counts, device).int())
        self._held = [held + len(path) for held, path in zip(self._held, paths, strict=True)]
        self._session.prefix_lens.copy_(uploaded(self._held, device))

    def _pack(self, trees: Sequence[Tree | None]) -> PackedTrees:
        key = tuple(trees)
        if key not in self._packed:
            if len(self._packed) >= _MOST_PACKED:
                self._packed.clear()
            self._packed[key] = pack_trees(trees, self._session.device)
        return self._packed[key]


def _on(decision: Decision | None, device: torch.device) -> Decision | None:
    """A module with its parameters on this device; the caller's own stays where it is."""
    if isinstance(decision, nn.Module) and any(weight.device != device for weight in decision.parameters()):
        return copy.deepcopy(decision).to(device)
    return decision


@lru_cache(maxsize=1024)
def _behind(tree: Tree, lag: int) -> Tree:
    """The tree below the end of a chain of so many tokens that are not in the cache yet."""
    return Tree([*range(-1, lag), *(parent + lag for parent in tree.parents[1:])]) if lag else tree
