"""``DraftCalls``: calls a draft model, and keeps its caches in step with the texts.

    a level's call     the first levels of each request's tree, after the text that the draft has read
    after a step       commits the rows that have become text to the draft's caches

The next call reads tokens that are new to the draft (another drafter's, the target's) as a chain above the root. Long pieces,
such as a prompt, have their own calls. An early-exit draft reads the target's caches and has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from pass_ext.decoding.drafting.candidates import filled
from pass_ext.decoding.models.packed import Adapted
from pass_ext.decoding.models.parts import unwrapped
from pass_ext.decoding.models.vocabulary import in_vocabulary
from pass_ext.decoding.session.session import FirstLayers, Session
from pass_ext.ops.common.uploaded import uploaded
from pass_ext.tree import PackedTrees, Tree, pack_trees

_MAX_LAG = 8  # unread tokens that every level's call reads above the root; more are read once, in separate calls
_MAX_PIECE = 256  # tokens of a text in each separate call


@dataclass
class _LastCall:
    trees: list[Tree | None]
    """The trees without the chains above their roots."""
    lags: list[int]
    packed: PackedTrees
    lengths: list[int]
    """The texts' lengths at the time of the call."""
    tokens: list[list[int]]


class DraftCalls:
    """Calls a draft model on the trees of a batch, whose texts grow with every step.

    Args:
        session: the target's.
        graphs: calls of a repeated shape are CUDA graphs.
        keep_hidden: ``level`` also returns the rows that go into the draft's output layer.
    """

    def __init__(
        self,
        draft: Adapted,
        session: Session,
        max_depth: int,
        texts: Sequence[list[int]],
        *,
        graphs: bool,
        keep_hidden: bool,
    ) -> None:
        self._draft, self._texts = draft, texts
        self._vocabulary, self._device = session.model.table.shape[0], session.device
        self._keep_hidden = keep_hidden
        self._shares = draft.shared_model is unwrapped(session.model.model)
        self._graphs = (
            graphs and not keep_hidden and not self._shares
        )  # an early exit's calls read another session's caches
        self._session: Session
        if self._shares:
            self._session = FirstLayers(session, draft, draft.shares_layers)
        else:
            self._session = Session(draft, session.requests, session.capacity + max_depth, cuda_graphs=self._graphs)
            if draft.has_encoder and session.encoder_inputs is not None:
                encoded = session.encoder_inputs.of_draft(draft)
                self._session.encoded = encoded.repeated(session.requests // len(encoded.lengths))
        self._first = list(session.begins)
        """The first token of each text that the draft reads."""
        self._held = [0] * len(texts)
        """Tokens of each text from there on in the draft's caches."""
        self._last: _LastCall | None = None

    def level(
        self, tree: Tree, requests: Sequence[int], tokens: Tensor, parents: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        """Calls the draft on the tree of each of these requests.

        Args:
            tree: the levels drafted so far.
            requests: those that draft on; the others in the last call are finished.
            tokens: ``[B, n]``, each node's token.
            parents: the nodes of the deepest level that have children.

        Returns:
            Logits ``[len(requests) * P, V]`` of the parents; and the hidden rows after them, or None.
        """
        self._release(requests)
        trees: list[Tree | None] = [None] * len(self._texts)
        lags = [0] * len(self._texts)
        known: list[int] = []
        index: list[int] = []  # into the tokens of all nodes, then the unread ones
        parent_rows: list[int] = []
        for b in requests:
            lag = self._lag(b)
            trees[b], lags[b] = tree, lag
            parent_rows += (len(index) + lag + parent for parent in parents)
            index += range(tokens.numel() + len(known), tokens.numel() + len(known) + lag + 1)
            index += (b * tokens.shape[1] + node for node in range(1, tree.num_nodes))
            known += self._texts[b][-1 - lag :]
        source = torch.cat([tokens.flatten(), uploaded(known, self._device)])
        ids = self._known_to_draft(source.index_select(0, uploaded(index, self._device)).to(self._session.device))
        rows = uploaded(parent_rows, self._session.device)
        packed = self._session.packed([part and _after(part, lag) for part, lag in zip(trees, lags, strict=True)])
        self._last = _LastCall(trees, lags, packed, list(map(len, self._texts)), [])
        self._prepare({b: lags[b] + 1 for b in requests}, tree)
        with ExitStack() as stack:
            hidden_rows = stack.enter_context(self._draft.keeping_hidden()) if self._keep_hidden else None
            # Recorded calls compute the logits of all rows; the next call overwrites them.
            call = self._session.call
            logits = call(packed, ids)[rows] if self._graphs else call(packed, ids, rows)
        hidden = None if hidden_rows is None else hidden_rows.rows.to(self._device)
        return in_vocabulary(logits, self._vocabulary, self._device), hidden

    def set_tokens(self, tokens: list[list[int]]) -> None:
        """Stores the tokens of the last call's nodes, the root's first, once the host has read them."""
        if self._last is not None:
            self._last.tokens = tokens

    def keep_text(self) -> None:
        """Commits the keys and values of the last call's rows that have become text."""
        last, self._last = self._last, None
        if last is None or self._shares:
            return
        paths = []
        for b, tree in enumerate(last.trees):
            path: list[int] = []
            if tree is not None:
                path, node = list(range(last.lags[b] + 1)), 0
                for token in self._texts[b][last.lengths[b] : -1]:
                    node = next((child for child in tree.children(node) if last.tokens[b][child] == token), 0)
                    if node == 0:
                        break
                    path.append(last.lags[b] + node)
            paths.append(path)
        self._commit(last.packed, paths)

    def read_text(self, requests: Sequence[int]) -> None:
        """Reads long pieces of unread text, all but the last tokens of each."""
        while not self._shares:
            missing = {b: self._lag(b) for b in sorted(requests)}
            pieces = {b: min(count, _MAX_PIECE) for b, count in missing.items() if count > _MAX_LAG}
            if not pieces:
                return
            trees = [Tree.chain(pieces[b] - 1) if b in pieces else None for b in range(len(self._texts))]
            begins = {b: self._first[b] + self._held[b] for b in pieces}
            ids = [token for b, count in pieces.items() for token in self._texts[b][begins[b] : begins[b] + count]]
            self._prepare(pieces, Tree.chain(0))
            packed = pack_trees(trees, self._session.device)
            first = torch.zeros(1, dtype=torch.int64, device=self._session.device)  # any row: the logits are not used
            self._session.call(packed, self._known_to_draft(uploaded(ids, self._session.device)), first)
            self._commit(packed, [list(range(pieces.get(b, 0))) for b in range(len(self._texts))])

    def _lag(self, request: int) -> int:
        """Tokens above the text's last one that are not in the draft's caches."""
        return 0 if self._shares else len(self._texts[request]) - self._first[request] - self._held[request] - 1

    def _prepare(self, unread: Mapping[int, int], below: Tree) -> None:
        """Prepares the draft for a call: of so many unread tokens of these requests, and of what hangs below the last of
        them."""
        return

    def _release(self, going_on: Sequence[int]) -> None:
        """Commits the text that finished requests have read, because later calls leave them out."""
        last = self._last
        if last is None or self._shares:
            return
        stopped = {b for b, tree in enumerate(last.trees) if tree is not None} - set(going_on)
        if stopped:
            paths = [list(range(lag + 1)) if b in stopped else [] for b, lag in enumerate(last.lags)]
            self._commit(last.packed, paths)

    def _known_to_draft(self, ids: Tensor) -> Tensor:
        """Replaces ids outside the draft's table: -1 (no token), and tokens that only the target has. No candidate below such a
        node can be accepted."""
        return ids.clamp(0, self._draft.table.shape[0] - 1)

    def _commit(self, packed: PackedTrees, paths: Sequence[Sequence[int]]) -> None:
        """Commits these rows of the last call; an empty path commits no row of that request."""
        counts, device = [max(len(path) - 1, 0) for path in paths], self._session.device
        self._session.commit(packed, uploaded(filled(paths), device).int(), uploaded(counts, device).int())
        self._held = [held + len(path) for held, path in zip(self._held, paths, strict=True)]
        self._session.prefix_lens.copy_(uploaded(self._held, device))


@lru_cache(maxsize=1024)
def _after(tree: Tree, lag: int) -> Tree:
    """Hangs the tree below a chain of ``lag`` tokens that are not in the cache yet."""
    return Tree([*range(-1, lag), *(parent + lag for parent in tree.parents[1:])]) if lag else tree
