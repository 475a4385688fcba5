"""``generate``: the decoding loop. A step of all requests that are not finished:

    draft     candidates for each request's tree, from look-ahead slots and from the text so far
    verify    one call of the model on all rows
    accept    how far each tree is right, and the token that the target adds
    commit    keys and values of the accepted rows go into the caches

The host reads the accepted tokens once per step: it ends texts and shapes the next trees by them. Called by users, as
``pass_ext.generate``, and by the integrations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pass_ext.decoding.config_processor import config_processor
from pass_ext.decoding.drafting import Drafting, Step
from pass_ext.decoding.listener import Listener
from pass_ext.decoding.longest_branch import DECODING_RULES, LONGEST_BRANCH, longest_branch
from pass_ext.decoding.methods import Method, Plain
from pass_ext.decoding.model import Adapted, packed_model
from pass_ext.decoding.processors import processed
from pass_ext.decoding.prompts import Prompts, read_prompts
from pass_ext.decoding.ranges import profiled
from pass_ext.decoding.sampling import SamplingParams
from pass_ext.decoding.session import Session
from pass_ext.decoding.stateful_processors import Processor, check_stateless, flat_processors, processor_name
from pass_ext.decoding.stats import AcceptanceCounters, GenerationStats
from pass_ext.ops.accept import STATUS, AcceptResult, accept_tree
from pass_ext.tree import MOST_ROWS, PackedTrees, Tree, pack_trees

_MOST_PACKED = 256  # combinations of trees whose packed form is kept
_TAKE_ANY_NODES = ("coupled", "typical")  # rules for which look-ahead rows may stand among the nodes
_NEED_A_LAW = ("kseq", "rejection_with_replacement")  # steps without drawn drafts are judged by "rejection"


@dataclass(frozen=True)
class Generation:
    """What ``generate`` returns."""

    sequences: Tensor
    """``[B, T + new]`` int64: the input as it was given, then the new tokens, then padding."""
    lengths: tuple[int, ...]
    """New tokens of each request, its end-of-text token included."""
    stats: GenerationStats
    session: Session | None = None
    """With ``keep_cache``: keys and values of the texts, but of their last tokens: ``session.prefix_lens`` of them."""


def generate(
    model: Any,
    input_ids: Tensor,
    method: Method | None = None,
    *,
    max_new_tokens: int,
    attention_mask: Tensor | None = None,
    temperature: float | Sequence[float] | Tensor = 0.0,
    top_k: int | Sequence[int] | Tensor | None = None,
    top_p: float | Sequence[float] | Tensor | None = None,
    min_p: float | Sequence[float] | Tensor | None = None,
    seeds: int | Sequence[int] | Tensor | None = None,
    rule: str = "coupled",
    eos_token_id: int | Sequence[int] | Tensor | None = None,
    pad_token_id: int | None = None,
    streamer: Any = None,
    stopping: Callable[[Tensor, Any], Any] | None = None,
    logits_processor: Processor | Sequence[Processor] | None = None,
    generation_config: Any = None,
    generator: torch.Generator | None = None,
    past: tuple[Sequence[tuple[Tensor, Tensor]], int] | None = None,
    keep_cache: bool = False,
    session: Session | None = None,
    cuda_graphs: bool = False,
) -> Generation:
    """Continues each prompt with up to ``max_new_tokens`` tokens.

    Args:
        model: a transformers decoder-only model, as it is, or any ``pass_ext.decoding.model.PackedModel``.
        input_ids: ``[B, T]`` integers.
        method: ``Plain()`` (the default), ``NGram(...)``, ``PaSS(...)``, ``Speculative(...)`` or ``MultiCandidate(...)``.
        attention_mask: ``[B, T]``, 1 for a prompt's tokens and 0 for padding, on the left or on the right.
        temperature: 0 is greedy. This, ``top_k``, ``top_p``, ``min_p`` and ``seeds``: one for all, or one per request.
        seeds: with rule "coupled" the text is a function of prompt, seed and these parameters, whatever the method and the
            batch. None: fresh ones, from ``generator`` or torch's own.
        rule: how drafts are judged, one of ``pass_ext.RULES``, or "longest_branch" (approximate).
        eos_token_id: tokens that end a text; None: the generation_config's, else the model's own; ``[]``: none.
        pad_token_id: fills sequences that ended early; None: as ``eos_token_id``, else the first end of text, else 0.
        streamer: told of new tokens as transformers' streamers are (``put``, ``end``); one with ``put_step(tokens, accepted)``
            gets each step's tokens, the first ``accepted`` of which were drafted. One request only.
        stopping: as transformers' stopping criteria, called with ``(ids [1, n], None)`` after every token.
        logits_processor: one or a list, as transformers' processors, called with ``(ids [rows, n], logits [rows, V])`` for
            every node, behind those of the generation_config. They must keep no state between calls.
        generation_config: transformers' ``GenerationConfig``; None: the model's own; ``GenerationConfig()``: no processors. All
            processors that it asks for and that act on greedy texts too are applied: penalties, bans, biases, minimal lengths,
            forced tokens. ``guidance_scale`` and ``watermarking_config`` are refused. Sampling (``do_sample``, ``temperature``,
            ``top_k`` …), beams, lengths and stopping criteria belong to the arguments here, and are not read from it.
        past: keys and values, ``[B, n, heads, D]`` per layer, of the first n tokens of every prompt; and n.
        keep_cache: the result has ``session``, with the caches.
        session: of an earlier generation with ``keep_cache``, as many requests, as many slots and room enough; its caches and
            CUDA graphs are used again, and its texts are overwritten.
        cuda_graphs: on CUDA, steps whose shape comes again are replayed; pays with a ``session`` that is used again.

    Returns:
        Generation: ``sequences``, ``lengths``, ``stats``.
    """
    method = Plain() if method is None else method
    if rule not in DECODING_RULES:
        raise ValueError(f"rule must be one of {', '.join(DECODING_RULES)}, got {rule!r}")
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be 1 or more, got {max_new_tokens!r}")
    adapted = packed_model(model)
    prompts = read_prompts(input_ids, attention_mask, adapted.table.shape[0])
    own = adapted.generation_config
    if generation_config is not None and own is None:
        raise TypeError(
            f"generate: generation_config must be None for {type(model).__name__}, no generating model of transformers, "
            f"got {type(generation_config).__name__}; give eos_token_id, pad_token_id and logits_processor instead"
        )
    configs = (generation_config, own)
    ends = _token_ids(_first_given("eos_token_id", configs) if eos_token_id is None else eos_token_id)
    if pad_token_id is None:
        pad_token_id = _first_given("pad_token_id", configs)
    pad = pad_token_id if pad_token_id is not None else min(ends, default=0)
    sampling = SamplingParams.of(
        len(prompts.texts),
        adapted.table.device,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seeds=seeds,
        generator=generator,
    )
    config = own if generation_config is None else generation_config
    asked = None if config is None else config_processor(adapted, config, prompts, max_new_tokens, ends)
    processors: list[Any] = [*([asked] if asked else []), *flat_processors(logits_processor)]
    if rule == LONGEST_BRANCH and processors:
        names = [processor_name(inner) for one in processors for inner in getattr(one, "processors", [one])]
        raise ValueError(
            "generate: rule 'longest_branch' takes no logits_processor, because its first level is drawn before that is asked; "
            f"{'the generation_config' if asked else 'logits_processor'} asks for {', '.join(names)}"
        )
    check_stateless(processors, one_text=isinstance(method, Plain) and len(prompts.texts) == 1)
    listener = Listener(streamer, stopping)
    # Ordinary tensors also in a caller's inference mode: a session may be used outside of it.
    with torch.inference_mode(False), torch.no_grad(), adapted.attached(), ExitStack() as drafting:
        run = _Run(adapted, prompts, method, sampling, rule, max_new_tokens, ends, listener, processors, cuda_graphs)
        drafting.enter_context(run.drafting.attached())
        run.begin(session, past)
        started = time.perf_counter()
        listener.begin(prompts.texts)
        run.all()
        listener.end()
        seconds = time.perf_counter() - started
    acceptance = run.counters.snapshot()
    new = [text[len(prompt) :] for text, prompt in zip(run.texts, prompts.texts, strict=True)]
    stats = GenerationStats.of(acceptance, model_calls=run.calls, tokens=sum(map(len, new)), seconds=seconds)
    if keep_cache:
        run.session.keep([len(text) - 1 for text in run.texts])
    return Generation(prompts.extended(new, pad), tuple(map(len, new)), stats, run.session if keep_cache else None)


class _Run:
    """One generation on its way."""

    def __init__(
        self,
        model: Adapted,
        prompts: Prompts,
        method: Method,
        sampling: SamplingParams,
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
        """Calls the model on the prompts, at most MOST_ROWS rows of each at a time -> logits of the steps' rows.

        Pieces are counted from the end, so that all prompts end in the same call.
        """
        slots = [len(step.tree) - 1 if step else 0 for step in steps]
        most = MOST_ROWS - max(slots)
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
            if self._sampling.temperature is not None and self._rule not in _TAKE_ANY_NODES:
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
        return "rejection" if law is None and self._rule in _NEED_A_LAW else self._rule

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


def _first_given(name: str, configs: Sequence[Any]) -> Any:
    return next((value for config in configs if (value := getattr(config, name, None)) is not None), None)


def _token_ids(tokens: int | Sequence[int] | Tensor | None) -> frozenset[int]:
    if isinstance(tokens, Tensor) and (tokens.dim() > 1 or tokens.is_floating_point() or tokens.is_complex()):
        raise ValueError(f"eos_token_id must be one id or some, got {tokens.dtype} {list(tokens.shape)}")
    given = tokens.flatten().tolist() if isinstance(tokens, Tensor) else tokens
    return frozenset(() if given is None else (given,) if isinstance(given, int) else map(int, given))
