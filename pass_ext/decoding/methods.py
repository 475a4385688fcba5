"""The methods of ``generate``: ``Plain``, ``NGram``, ``PaSS``, ``Speculative``, ``MultiCandidate``, and those of heads, which
``load_drafter`` makes. They hold settings only; drafting/drafting.py makes the drafters of each.

Every method gives the same text (rules "coupled" and "coupled_inverse" and greedy: token for token; other exact rules: in
distribution). They differ in the tokens per call of the model. docs/guide/pass.md, speculative.md and drafters.md explain
them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, ClassVar, Literal

from torch import Tensor

from pass_ext.decoding.arguments import instance, type_of, whole_number
from pass_ext.decoding.models.vocabulary import check_tokenizers
from pass_ext.decoding.requests.corpus import Corpus
from pass_ext.modules.decision import DraftLevel
from pass_ext.modules.lookahead import LookaheadEmbedding
from pass_ext.tree import Tree

MAX_PLANNED_ROWS = 256  # rows of one request in one step, as a number; "auto" takes fewer
MAX_DRAFT_LEVELS = 32  # calls of a draft model per step


@dataclass(frozen=True)
class Plain:
    """One token per call: the baseline, with the same loop and kernels as the other methods."""

    drafts: ClassVar[bool] = False
    """False: no candidates, not even the tokens that a grammar forces, which all other methods draft."""


@dataclass(frozen=True)
class NGram:
    """Candidates are the tokens that followed earlier occurrences of the last tokens, in prompt and text; no training.

    Args:
        longest, shortest: how many of the text's last tokens are looked up, longest first.
        tokens: tokens per candidate.
        branches: different candidates per step, latest first.
        corpus: further texts to look in; the texts of this generation join them as they grow. Candidates after matches longer
            than ``longest`` come first, then those of the text itself, then the corpus's others.
    """

    longest: int = 4
    shortest: int = 2
    tokens: int = 8
    branches: int = 1
    corpus: Corpus | None = None

    def __post_init__(self) -> None:
        for name in ("longest", "shortest", "tokens", "branches"):
            whole_number(f"NGram: {name}", getattr(self, name))
        if self.shortest > self.longest:
            raise ValueError(
                f"NGram: shortest must be at most longest, got shortest={self.shortest} and longest={self.longest}; give "
                "both if one is beyond the other's default"
            )
        instance("NGram: corpus", self.corpus, (Corpus, NoneType), "a Corpus or None")
        if self.tokens * self.branches > MAX_PLANNED_ROWS:
            raise ValueError(
                f"NGram: tokens x branches must be at most {MAX_PLANNED_ROWS}, got {self.tokens * self.branches}"
            )


@dataclass(frozen=True)
class PaSS:
    """Candidates come from look-ahead slots in the model's own call.

    Args:
        lookahead: the trained embeddings, a ``LookaheadEmbedding``; or the name or path that its ``from_pretrained`` loads.
        passes: 1: one call verifies this step's candidates and computes the next ones. 2: as published, one call for the
            candidates, then one that verifies them.
        rows: the most rows of one call per request. From 5 to 64, each step takes the candidates and slots that suit the place.
            "auto": the fastest number for this model on this machine, on the CPU at each place; its calls are measured once and
            the times kept on disk. Drafting pauses while it does not pay.
        tree: instead of planning: a tree of candidates, in which child k of a node is the candidate of rank k. Look-ahead
            groups are planned unless the tree has some.
        ngram: n-gram candidates join the tree.
        slots: how many look-ahead slots are used, the first ones; None: all.
        recall: a candidate that earlier in prompt and text came after the same one, two or three tokens scores higher
            (``recall_scores``), so that slots follow what repeats. False: by the slots alone.
    """

    lookahead: Any
    passes: Literal[1, 2] = 1
    rows: int | Literal["auto"] = "auto"
    tree: Tree | None = None
    ngram: NGram | None = None
    slots: int | None = None
    recall: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.lookahead, (str, os.PathLike)):
            object.__setattr__(self, "lookahead", LookaheadEmbedding.from_pretrained(self.lookahead))
        instance(
            "PaSS: lookahead", self.lookahead, LookaheadEmbedding, "a LookaheadEmbedding, or the name or path of one"
        )
        whole_number("PaSS: passes", self.passes, 1, 2)
        if not (isinstance(self.rows, str) and self.rows == "auto"):
            whole_number('PaSS: rows, if not "auto",', self.rows, 2, MAX_PLANNED_ROWS)
        if self.slots is not None:
            whole_number("PaSS: slots", self.slots, 1, self.lookahead.num_lookahead)
        instance("PaSS: tree", self.tree, (Tree, NoneType), "a Tree or None")
        instance("PaSS: ngram", self.ngram, (NGram, NoneType), "NGram(...) or None")
        instance("PaSS: recall", self.recall, bool, "True or False")
        if self.tree is not None and self.tree.max_depth > self.num_slots:
            raise ValueError(
                f"PaSS: the tree is {self.tree.max_depth} levels deep, but there are {self.num_slots} look-ahead slots"
            )

    @property
    def num_slots(self) -> int:
        """Look-ahead slots in use."""
        return self.slots or int(self.lookahead.num_lookahead)


@dataclass(frozen=True)
class Speculative:
    """A draft model writes a chain of tokens, which the model verifies in one call.

    Args:
        draft_model: a model as ``generate`` takes it, or an ``EarlyExitDraft``; of any dtype, on any device.
        length: tokens of the chain; "auto": planned from the draft's hit rates and the measured times of both models' calls.
        hit_rates: for "auto": ``pass_ext.drafting.calibrate(...)``; default: the early-exit adapter's own, else a guess.
        ngram: n-gram candidates join the chain.
        tokenizers: the target's and the draft's; refused if they disagree.
    """

    draft_model: Any
    length: int | Literal["auto"] = 4
    hit_rates: Sequence[Sequence[float]] | None = None
    ngram: NGram | None = None
    tokenizers: tuple[Any, Any] | None = None

    max_branches: ClassVar[int | None] = 1
    """The most candidates below one node of a planned tree; None: any number."""

    def __post_init__(self) -> None:
        _check_length("Speculative", self.length)
        _check_draft("Speculative", self)

    @property
    def tree(self) -> Tree | None:
        """The chain; None: to be planned."""
        return None if self.length == "auto" else Tree.chain(self.length)


@dataclass(frozen=True)
class MultiCandidate:
    """A draft model writes a tree of candidates, level by level, which the model verifies in one call.

    Args:
        draft_model: as for ``Speculative``.
        branching: children of each node, level by level; or a ``Tree`` numbered level by level, in which child k of a node is
            its candidate of rank k; or "auto": planned from the draft's hit rates and the measured times of both models' calls.
        replacement: True: candidates of one parent are drawn independently (rules "rejection_with_replacement" and "kseq").
            False: without replacement (all other rules).
        decision: selects after each level the requests that draft further: a ``DecisionModel``, or any callable that takes a
            ``DraftLevel``. None: all levels.
        hit_rates: for "auto", as for ``Speculative``, with several ranks.
        lookahead: candidates of this ``PaSS`` join the tree, at every level that has them.
        ngram: n-gram candidates join the tree.
        tokenizers: the target's and the draft's; refused if they disagree.
    """

    draft_model: Any
    branching: Sequence[int] | Tree | Literal["auto"] = (4, 2, 2)
    replacement: bool = False
    decision: Callable[[DraftLevel], Tensor] | None = None
    hit_rates: Sequence[Sequence[float]] | None = None
    lookahead: PaSS | None = None
    ngram: NGram | None = None
    tokenizers: tuple[Any, Any] | None = None

    max_branches: ClassVar[int | None] = None
    """The most candidates below one node of a planned tree; None: any number."""

    def __post_init__(self) -> None:
        _check_branching("MultiCandidate", self.branching)
        instance("MultiCandidate: replacement", self.replacement, bool, "True or False")
        if self.decision is not None and (isinstance(self.decision, type) or not callable(self.decision)):
            raise TypeError(f"MultiCandidate: decision must be callable, got {type_of(self.decision)}")
        instance("MultiCandidate: lookahead", self.lookahead, (PaSS, NoneType), "a PaSS or None")
        if self.lookahead is not None and self.lookahead.ngram is not None:
            raise ValueError("MultiCandidate: give ngram to MultiCandidate, not to its lookahead")
        _check_draft("MultiCandidate", self)

    @property
    def tree(self) -> Tree | None:
        """The tree of candidates; None: to be planned."""
        return _tree_of(self.branching)


@dataclass(frozen=True)
class HeadMethod:
    """A head, a small network that was trained for the model, writes a chain or a tree of tokens from the states that the model
    has computed for its text.

    Args:
        head: as ``pass_ext.load_drafter`` reads it.
        length: tokens of the chain; "auto": planned from the head's hit rates and the measured times of the model's calls and
            the head's.
        branching: instead of a chain, as for ``MultiCandidate``.
        hit_rates: for "auto", as for ``Speculative``.
        lookahead: the slots of this ``PaSS`` draft below the head's chain: of m slots those after ``length`` have a level each.
            Its ``rows`` limit those of a call.
        ngram: n-gram candidates join the tree.
    """

    head: Any
    length: int | Literal["auto"] = 4
    branching: Sequence[int] | Tree | Literal["auto"] | None = None
    hit_rates: Sequence[Sequence[float]] | None = None
    lookahead: PaSS | None = None
    ngram: NGram | None = None

    def __post_init__(self) -> None:
        name = type(self).__name__
        _check_length(name, self.length)
        if self.branching is not None:
            _check_branching(name, self.branching)
        _check_parts(name, self)
        instance(f"{name}: lookahead", self.lookahead, (PaSS, NoneType), "a PaSS or None")
        if self.lookahead is not None:
            _check_below(name, self, self.lookahead)

    @property
    def max_branches(self) -> int | None:
        """The most candidates below one node of a planned tree; None: any number."""
        return 1 if self.branching is None else None

    @property
    def tree(self) -> Tree | None:
        """The chain or tree of candidates; None: to be planned."""
        if self.branching is not None:
            return _tree_of(self.branching)
        return None if self.length == "auto" else Tree.chain(self.length)


class Eagle3(HeadMethod):
    """EAGLE-3: the head is a decoder layer, or a few, above states of three of the model's layers. See ``HeadMethod`` for the
    settings."""


@dataclass(frozen=True)
class DFlash:
    """A head of the DFlash family, which was trained for the model, drafts a block of tokens in one call of its own, from
    states that the model has computed for its text.

    Args:
        head: DFlash, DSpark or DFlash-2, as ``pass_ext.load_drafter`` reads it.
        length: tokens that are drafted; None: as many as the head's blocks have. "auto": so many, and drafting pauses while it
            does not pay, by the measured times of the model's calls and of the steps.
        rows: the most rows of one call per request: candidates are a tree, the best paths through the head's lattice of tokens.
            For greedy texts and rules that need no draft logits. "auto": in each step as many as pay, by the measured times of
            the model's calls and of the steps, and drafting pauses while it does not. None: a chain.
        ngram: n-gram candidates join the tree.
    """

    head: Any
    length: int | Literal["auto"] | None = None
    rows: int | Literal["auto"] | None = None
    ngram: NGram | None = None

    def __post_init__(self) -> None:
        if self.length is not None:
            _check_length("DFlash", self.length)
        if self.rows is not None and not (isinstance(self.rows, str) and self.rows == "auto"):
            whole_number('DFlash: rows, if not None or "auto",', self.rows, 2, MAX_PLANNED_ROWS)
        instance("DFlash: ngram", self.ngram, (NGram, NoneType), "NGram(...) or None")


@dataclass(frozen=True)
class Assistant:
    """Gemma 4's assistant, a few layers that attend to the model's own keys and values, drafts a chain.

    Args:
        head: as ``pass_ext.load_drafter`` reads it.
        length: tokens of the chain; "auto": 4, and drafting pauses while it does not pay, by the measured times of the steps.
        ngram: n-gram candidates join the chain.
    """

    head: Any
    length: int | Literal["auto"] = 4
    ngram: NGram | None = None

    def __post_init__(self) -> None:
        _check_length("Assistant", self.length)
        instance("Assistant: ngram", self.ngram, (NGram, NoneType), "NGram(...) or None")


class Mtp(HeadMethod):
    """Multi-token prediction: the head is the layer after the model's own in its checkpoint, which drafts every token of the
    chain. See ``HeadMethod`` for the settings."""


def _check_length(name: str, length: Any) -> None:
    if not (isinstance(length, str) and length == "auto"):
        whole_number(f'{name}: length, if not "auto",', length, 1, MAX_DRAFT_LEVELS)


def _check_branching(name: str, branching: Any) -> None:
    if isinstance(branching, str) and branching != "auto":
        raise ValueError(f'{name}: branching must be numbers, a Tree or "auto", got {branching!r}')
    if not isinstance(branching, (str, Sequence, Tree)):
        raise TypeError(f'{name}: branching must be numbers, a Tree or "auto", got {branching!r}')
    tree = _tree_of(branching)
    if tree is None:
        return
    if not 1 <= tree.max_depth <= MAX_DRAFT_LEVELS:
        raise ValueError(f"{name}: branching must have 1 to {MAX_DRAFT_LEVELS} levels, got {tree.max_depth}")
    if len(tree) > MAX_PLANNED_ROWS:
        raise ValueError(f"{name}: the tree must have at most {MAX_PLANNED_ROWS} rows, got {len(tree)}")
    tree.slice(tree.max_depth - 1)  # raises for look-ahead slots and for nodes not numbered level by level


def _tree_of(branching: Any) -> Tree | None:
    """None: to be planned."""
    if isinstance(branching, Tree):
        return branching
    return None if branching == "auto" else Tree.from_branching(tuple(branching))


def _check_parts(name: str, method: ByModel) -> None:
    """Refuses what all methods that draft with a model refuse."""
    instance(f"{name}: ngram", method.ngram, (NGram, NoneType), "NGram(...) or None")
    if method.hit_rates is not None:
        rows = method.hit_rates
        if not isinstance(rows, (list, tuple)) or not all(isinstance(row, (list, tuple)) for row in rows):
            raise TypeError(f"{name}: hit_rates must be a row of rates for each level, got {type_of(rows)}")


def _check_below(name: str, method: HeadMethod, lookahead: PaSS) -> None:
    """Refuses what slots below a chain cannot do."""
    if method.branching is not None:
        raise ValueError(f"{name}: lookahead drafts below a chain: branching must be None, got {method.branching}")
    if lookahead.tree is not None or lookahead.passes != 1:
        raise ValueError(
            f"{name}: lookahead must have passes=1 and no tree: its slots draft one token at each level below the chain"
        )
    if lookahead.ngram is not None:
        raise ValueError(f"{name}: give ngram to {name}, not to its lookahead")
    if isinstance(method.length, int) and lookahead.num_slots <= method.length:
        raise ValueError(
            f"{name}: lookahead must have more slots than the chain has levels, {method.length}, got {lookahead.num_slots}"
        )


def _check_draft(name: str, method: Speculative | MultiCandidate) -> None:
    """Refuses what both methods with a draft model refuse."""
    _check_parts(name, method)
    if method.tokenizers is not None:
        if not isinstance(method.tokenizers, (list, tuple)) or len(method.tokenizers) != 2:
            raise TypeError(
                f"{name}: tokenizers must be the target's and the draft's, got {type_of(method.tokenizers)}"
            )
        for tokenizer in method.tokenizers:
            if not callable(getattr(tokenizer, "get_vocab", None)):
                raise TypeError(f"{name}: tokenizers must have get_vocab(), got {type_of(tokenizer)}")
        check_tokenizers(*method.tokenizers)


ByModel = Speculative | MultiCandidate | HeadMethod
"""The methods whose candidates a draft model or a head writes."""
Method = Plain | NGram | PaSS | ByModel | DFlash | Assistant
