"""``Run``: the decoding loop of one batch. A step of all requests that are not finished:

    draft     candidates for each request's tree
    verify    one call of the model on all rows
    accept    how far each tree is right, and the token that the target adds
    commit    keys and values of the accepted rows go into the caches

The host reads the accepted tokens once per step: it ends texts and shapes the next trees by them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pass_ext.decoding.drafting.drafting import Drafting
from pass_ext.decoding.drafting.longest_branch import longest_branch
from pass_ext.decoding.drafting.step import Step
from pass_ext.decoding.methods import Method
from pass_ext.decoding.models.packed import Adapted
from pass_ext.decoding.profiling import profiled
from pass_ext.decoding.requests.listener import Listener
from pass_ext.decoding.requests.processors import processed
from pass_ext.decoding.requests.prompts import Prompts
from pass_ext.decoding.requests.stateful_processors import Processor
from pass_ext.decoding.rules import DECODING_RULES, LONGEST_BRANCH
from pass_ext.decoding.sampling import BatchSampling
from pass_ext.decoding.session.session import Session
from pass_ext.decoding.stats import AcceptanceCounters
from pass_ext.ops.accept import STATUS, AcceptResult, accept_tree
from pass_ext.tree import MAX_TREE_NODES, PackedTrees, Tree, pack_trees

_MOST_PACKED = 256  # combinations of trees whose packed form is kept


class Run:
    """One generation on its way."""

    def __init__(
        self,
        model: Adapted,
        prompts: Prompts,
        method: Method,
        sampling: BatchSampling,
        rule: str,
        max_new_tokens: int,
        ends: frozenset[int],
        listener: Listener,
        processors: Sequence[Processor],
        graphs: bool,
    ) -> None:
        self.texts = [list(text) for text in prompts.texts]
        self.calls = 0
        self._limits = [len(text) + max_new_tokens for text in self.texts]
        self._ends, self._listener, self._processors = ends, listener, processors
        self._sampling, self._rule = sampling, rule
        self._adds_nothing = rule == LONGEST_BRANCH  # behind what it accepts
        self.drafting = Drafting(method, model, sampling, rule, self.texts, graphs=graphs)
        self._model, self._graphs = model, graphs
        self._filled = 0
        self.counters = AcceptanceCounters(max(1, self.drafting.max_depth), model.table.device)
        self._packed: dict[tuple[Tree | None, ...], PackedTrees] = {}

    def begin(self, session: Session | None, past: tuple[Sequence[tuple[Tensor, Tensor]], int] | None) -> None:
        """Finds room for the texts, and takes in what is known of them."""
        slots, deep, requests = self.drafting.slots, self.drafting.deep, len(self.texts)
        room = max(self._limits) + self.drafting.max_depth  # a last step may accept more than is wanted
        longest, limit = max(self._limits) + self.drafting.deepest_row, self._model.rope_limit
        if limit is not None and longest > limit:
            raise ValueError(
                f"{self._model.name} changes its rotary frequencies behind {limit} tokens, and earlier keys would not "
                f"fit: prompt, max_new_tokens and the deepest draft must stay within them, got {longest}"
            )
        positions, asked = self._model.known_positions, max(self._limits)
        if positions is not None and asked > positions + 1:  # nothing is read behind the last new token
            raise ValueError(
                f"{self._model.name} has a table of {positions} positions and knows none behind them: prompt and "
                f"max_new_tokens must stay within {positions + 1} tokens, got {asked}"
            )
        if session is None:
            session = Session(self._model, requests, room, slots, deep, graphs=self._graphs)
        elif session.requests != requests or session.room < room or session.model.model is not self._model.model:
            raise ValueError(
                f"session must be of this model, {requests} requests and room for {room} tokens; it is of "
                f"{session.requests} requests and {session.room} tokens"
            )
        else:
            session.begin(self._model, slots, deep)
        self.session = session
        self.drafting.begin(session, room)
        if past is None:
            return
        caches, length = past
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise ValueError(f"past must be of 1 token or more, got {length!r}")
        if min(map(len, self.texts)) <= length:
            raise ValueError(f"past holds {length} tokens, so prompts must be longer, got {min(map(len, self.texts))}")
        self.session.fill(caches, length)
        self._filled = length

    def all(self) -> None:
        """Every step."""
        steps: list[Step | None] = [self.drafting.first(b) for b in range(len(self.texts))]
        logits = self._read_prompts(steps)
        committed = True  # the prompts' own rows
        if self._adds_nothing:
            self.session.prefix_lens.sub_(
                1
            )  # each prompt's last token is a row once more: the first level hangs below it
            left = [limit - len(text) for limit, text in zip(self._limits, self.texts, strict=True)]
            steps, logits = self._next(steps, logits, [0] * len(left), left)
            committed = False
        while True:
            result = self._accept(steps, logits)
            if not committed:
                with profiled("commit"):
                    self.session.commit(
                        self._pack([step.tree if step else None for step in steps]), result.path, result.num_accepted
                    )
            remaining, last_nodes = self._take(steps, result)
            if not any(remaining):
                return
            steps, logits = self._next(steps, logits, last_nodes, remaining)
            committed = False

    def _next(
        self, steps: Sequence[Step | None], logits: Tensor, last_nodes: Sequence[int], remaining: Sequence[int]
    ) -> tuple[list[Step | None], Tensor]:
        with profiled("draft"):
            drafted = self.drafting.next(steps, logits, last_nodes, remaining)
        return drafted, self._verify(drafted)

    def _read_prompts(self, steps: Sequence[Step | None]) -> Tensor:
        """Calls the model on the prompts, at most MAX_TREE_NODES rows of each at a time -> logits of the steps' rows.

        Pieces are counted from the end, so that all prompts end in the same call.
        """
        slots = [len(step.tree) - 1 if step else 0 for step in steps]
        most = MAX_TREE_NODES - max(slots)
        missing = [text[self._filled :] for text in self.texts]
        for left in reversed(range(-(-max(map(len, missing)) // most))):
            pieces = [text[max(0, len(text) - (left + 1) * most) : max(0, len(text) - left * most)] for text in missing]
            trees: list[Tree | None] = [Tree.chain(len(piece) - 1) if piece else None for piece in pieces]
            ids: list[int] = []
            wanted: list[int] = []
            for b, piece in enumerate(pieces):
                ids += piece
                if left == 0:
                    trees[b] = Tree.chain(len(piece) - 1).with_lookahead({len(piece) - 1: slots[b]})
                    ids += (-1 - slot for slot in range(slots[b]))
                    wanted += range(len(ids) - slots[b] - 1, len(ids))
            packed = pack_trees(trees, self.session.device)
            with profiled("verify"):
                logits = self.session.call(packed, self._on_device(ids), self._on_device(wanted or [0])).logits
            self.calls += 1
            path = torch.arange(max(map(len, pieces)), dtype=torch.int32, device=self.session.device)
            counts = self._on_device([max(len(piece) - 1, 0) for piece in pieces]).int()
            with profiled("commit"):
                self.session.commit(packed, path.repeat(len(pieces), 1), counts)
        return logits

    def _verify(self, steps: Sequence[Step | None]) -> Tensor:
        ids = [token for step in steps if step is not None for token in step.ids]
        with profiled("verify"):
            trees = self._pack([step.tree if step else None for step in steps])
            logits = self.session.call(trees, self._on_device(ids)).logits
        self.calls += 1
        return logits

    def _accept(self, steps: Sequence[Step | None], logits: Tensor) -> AcceptResult:
        trees = [step.tree if step else None for step in steps]
        tokens = [token for step in steps if step for token in step.accept_tokens]
        law_rows = [row for step in steps if step for row in step.accept_law_rows]
        if self._processors:
            texts = [text if step else None for text, step in zip(self.texts, steps, strict=True)]
            logits = processed(logits, self._processors, texts, trees, [step.tokens if step else [] for step in steps])
        with profiled("accept"):
            if self._adds_nothing:
                return longest_branch(
                    logits,
                    trees,
                    [[step.root, *step.tokens] if step else [] for step in steps],
                    self.drafting.law,
                    [step.accept_law_rows if step else [] for step in steps],
                    self._sampling,
                    [len(text) for text in self.texts],
                )
            # A rule that divides by the drafts' distribution would judge look-ahead rows by none.
            if self._sampling.temperature is not None and DECODING_RULES[self._rule].needs_draft_logits:
                nodes = [row for row, is_node in enumerate(_are_nodes(steps)) if is_node]
                trees = [step.candidates if step else None for step in steps]
                tokens, law_rows = [tokens[row] for row in nodes], [law_rows[row] for row in nodes]
                logits = logits[: len(nodes)] if nodes[-1] == len(nodes) - 1 else logits[self._on_device(nodes)]
            law = self.drafting.law
            packed = self._pack(trees)
            result = accept_tree(
                logits,
                self._on_device(tokens),
                packed.parents,
                packed.cu_nodes,
                max(step.candidates.max_depth for step in steps if step),
                rule=self._rule_for(law),
                draft_logits=law,
                draft_rows=None if law is None else self._on_device(law_rows),
                positions=self._on_device([len(text) for text in self.texts]),
                **self._sampling.law(),
            )
        return result

    def _rule_for(self, law: Tensor | None) -> str:
        if self._sampling.temperature is None:  # all are greedy then, and this one takes any tree
            return "coupled"
        # Independent draws must have been drawn: a step without any has fixed proposals at most, which "rejection" judges.
        return "rejection" if law is None and DECODING_RULES[self._rule].drafts == "with" else self._rule

    def _take(self, steps: Sequence[Step | None], result: AcceptResult) -> tuple[list[int], list[int]]:
        """Reads the result, extends the texts, ends those that end -> tokens still wanted, and each last accepted node."""
        emitted, path, status = result.emitted.tolist(), result.path.tolist(), result.status.tolist()
        accepted = result.num_accepted.tolist()
        remaining, gained, counted, drafted = ([0] * len(steps) for _ in range(4))
        for b, step in enumerate(steps):
            if step is None:
                continue
            new = emitted[b][: accepted[b] + 1]
            if status[b] or -1 in new:
                reasons = " and ".join(text for bit, text in STATUS.items() if status[b] & bit)
                raise RuntimeError(f"request {b}: {reasons or 'no token'} behind {len(self.texts[b])} tokens of text")
            new = new[: self._limits[b] - len(self.texts[b])]
            ended = next((i for i, token in enumerate(new) if token in self._ends), None)
            new = new if ended is None else new[: ended + 1]
            kept, stopped = self._listener.heard(b, self.texts[b], new, accepted[b])
            self.texts[b] += new[:kept]
            gained[b] = kept
            counted[b], drafted[b] = min(accepted[b], kept), len(step.tokens) - step.tokens.count(-1)
            if ended is None and not stopped:
                remaining[b] = self._limits[b] - len(self.texts[b])
        self.drafting.learn(steps, gained)
        if any(drafted):
            self.counters.update(self._on_device(counted), self._on_device(drafted))
        last = [count + self._adds_nothing for count in accepted]
        return remaining, [nodes[place] if step else 0 for nodes, place, step in zip(path, last, steps, strict=True)]

    def _pack(self, trees: Sequence[Tree | None]) -> PackedTrees:
        key = tuple(trees)
        if key not in self._packed:
            if len(self._packed) >= _MOST_PACKED:
                self._packed.clear()
            self._packed[key] = pack_trees(trees, self.session.device)
        return self._packed[key]

    def _on_device(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, device=self.session.device)


def _are_nodes(steps: Sequence[Step | None]) -> list[bool]:
    return [slot < 0 for step in steps if step is not None for slot in step.tree.slots]
