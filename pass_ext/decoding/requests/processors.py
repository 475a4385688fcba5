"""Logits processors: the caller's, and those that a generation_config asks for.

Each node's logits are processed as if its path were text already, so a processor is called for every candidate of a tree,
accepted or not, with rows in any order and number. It must compute its result from its arguments alone: known ones that keep
state between calls are refused, and errors of unknown ones explained.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pass_ext.decoding.models.packed import Adapted
from pass_ext.decoding.requests.prompts import Prompts
from pass_ext.ops.common.uploaded import uploaded
from pass_ext.tree import Tree

Processor = Callable[[Tensor, Tensor], Tensor]

# Processors of these packages follow one text: they advance by one token with every call.
_FOLLOW_A_TEXT = ("formatron", "outlines", "transformers_cfg", "xgrammar")
# Matchers of xgrammar, llguidance and guidance follow one text; a processor that holds some does so too.
_MATCHERS = ("GrammarMatcher", "LLInterpreter", "LLMatcher")
# transformers' processors with these words in their names run the model or count their calls.
_COUNT_CALLS = ("Guidance", "SynthID", "NoSpeech", "Codebooks", "Delay")


def processor_name(processor: Any) -> str:
    """``package.module.Class``, or a function's own name."""
    named = processor if hasattr(processor, "__qualname__") else type(processor)
    return f"{named.__module__}.{named.__qualname__}"


def flat_processors(processor: Any) -> list[Processor]:
    """The processors in a flat list, from a single one, nested lists, transformers' ``LogitsProcessorList``, or None."""
    if isinstance(processor, (list, tuple)):
        return [inner for part in processor for inner in flat_processors(part)]
    return [] if processor is None else [processor]


def check_stateless(processors: Sequence[Any], *, one_text: bool) -> None:
    """Raises ValueError for a processor that is known to keep state between calls.

    one_text: True if a single prompt is decoded without candidates: calls then come as in transformers' own loop.
    """
    for processor in processors:
        check_stateless(getattr(processor, "processors", ()), one_text=one_text)
        counts = any(part in type(processor).__name__ for part in _COUNT_CALLS)
        kinds = type(getattr(processor, "__self__", processor)).__mro__
        follows = any(kind.__module__.split(".")[0] in _FOLLOW_A_TEXT for kind in kinds) or _holds_matcher(processor)
        if not counts and (one_text or not follows):
            continue
        way = "; give its grammar as grammar=, or give it method Plain() and one prompt, where it meets no candidates"
        raise ValueError(
            "generate: logits_processor must compute its result from ids and logits alone, because it is called for every "
            f"candidate of every text, got {processor_name(processor)}, which keeps state between calls or runs the "
            f"model{'' if counts else way}"
        )


def _holds_matcher(processor: Any) -> bool:
    """True if an attribute of the processor is a matcher, or a list of some."""
    values = list(getattr(processor, "__dict__", {}).values())
    values += [item for value in values if isinstance(value, (list, tuple)) for item in value[:1]]
    return any(type(value).__name__ in _MATCHERS for value in values)


@contextmanager
def explained(processor: Any, ids: Tensor) -> Iterator[None]:
    """Adds to an error of the processor its name and how it was called."""
    try:
        yield
    except Exception as error:
        raise RuntimeError(
            f"generate: logits_processor {processor_name(processor)} raised {type(error).__name__}"
            f"{f': {error}' if str(error) else ''}. It was called with ids {list(ids.shape)}, a row for each candidate, and "
            "must compute its result from ids and logits alone: rows come in any number and order, and a processor that keeps "
            "state between calls does not work"
        ) from error


def processed(
    logits: Tensor,
    processors: Sequence[Processor],
    texts: Sequence[Sequence[int] | None],
    trees: Sequence[Tree | None],
    tokens: Sequence[Sequence[int]],
) -> Tensor:
    """Processes the rows of all nodes; look-ahead rows stay as they are.

    A processor with ``process_nodes(requests, texts, logits)`` gets all nodes and their requests in one call; any other gets
    the nodes with equally long texts.

    Args:
        logits: ``[N, V]``, of packed trees.
        texts: each request's tokens, the root last.
        tokens: the tokens of each request's nodes 1, 2, ….

    Returns:
        ``[N, V]`` float32.
    """
    result = logits.to(torch.float32, copy=True)
    rows: list[int] = []
    requests: list[int] = []
    paths: list[list[int]] = []
    first = 0
    for request, (text, tree, node_tokens) in enumerate(zip(texts, trees, tokens, strict=True)):
        if tree is None or text is None:
            continue
        for node in range(tree.num_nodes):
            after = [node_tokens[v - 1] for v in tree.path(node)[1:]]
            if min(after, default=0) >= 0:
                rows.append(first + node)
                requests.append(request)
                paths.append([*text, *after])
        first += len(tree)
    by_length: dict[int, list[int]] = defaultdict(list)
    for place, path in enumerate(paths):
        by_length[len(path)].append(place)
    for processor in processors:
        process_nodes = getattr(processor, "process_nodes", None)
        if process_nodes is not None:
            index = uploaded(rows, logits.device)
            result[index] = process_nodes(requests, paths, result[index])
            continue
        for places in by_length.values():
            index = uploaded([rows[place] for place in places], logits.device)
            ids = uploaded([paths[place] for place in places], logits.device)
            with explained(processor, ids):
                result[index] = processor(ids, result[index])
    return result


# These compute each row alone, so the rows of all nodes with equally long texts go through them in one call.
_ROW_BY_ROW = {
    "EpsilonLogitsWarper", "EtaLogitsWarper", "ExponentialDecayLengthPenalty", "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor", "InfNanRemoveLogitsProcessor", "LogitNormalization", "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor", "MinPLogitsWarper", "NoBadWordsLogitsProcessor",
    "NoRepeatNGramLogitsProcessor", "RepetitionPenaltyLogitsProcessor", "SequenceBiasLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor", "SuppressTokensLogitsProcessor", "TemperatureLogitsWarper",
    "TopHLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "TypicalLogitsWarper",
}  # fmt: skip


class NodeProcessor:
    """Runs processors on nodes as transformers would on whole batches: texts include their padding, and a processor that may
    depend on the request gets ``[B, n]``, one row per request.

    padding: the ids left of each request's prompt.
    """

    def __init__(self, processors: Sequence[Any], padding: Sequence[Sequence[int]]) -> None:
        self.processors, self._padding = list(processors), [list(ids) for ids in padding]
        self._rows_alone = all(
            type(processor).__name__ in _ROW_BY_ROW
            and not isinstance(getattr(processor, "prompt_ignore_length", None), Tensor)
            for processor in processors
        )

    def process_nodes(self, requests: Sequence[int], texts: Sequence[Sequence[int]], logits: Tensor) -> Tensor:
        """Processes each row's logits for its text."""
        result = logits.clone()
        lengths = [len(self._padding[request]) + len(text) for request, text in zip(requests, texts, strict=True)]
        for rows in self._batches(requests, lengths):
            ids = uploaded([[*self._padding[requests[row]], *texts[row]] for row in rows], logits.device)
            index = uploaded(rows, logits.device)
            scores = logits[index].float()
            for processor in self.processors:
                with explained(processor, ids):
                    scores = processor(ids, scores)
            filled = [i for i, row in enumerate(rows) if self._rows_alone or requests[row] == i]
            result[index[filled]] = scores[filled].to(result.dtype)
        return result

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        """Not implemented: ``process_nodes`` takes its place."""
        raise NotImplementedError

    def _batches(self, requests: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
        """Rows that go through the processors in one call. A batch of B rows repeats another row for a request without one."""
        by_length: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for row, (request, length) in enumerate(zip(requests, lengths, strict=True)):
            by_length[length][request].append(row)
        if self._rows_alone:
            return [[row for rows in by_request.values() for row in rows] for by_request in by_length.values()]
        batches = []
        for by_request in by_length.values():
            for turn in range(max(map(len, by_request.values()))):
                there = {b: rows[turn] for b, rows in by_request.items() if turn < len(rows)}
                filler = next(iter(there.values()))
                batches.append([there.get(b, filler) for b in range(len(self._padding))])
        return batches


# Other values of these options change the text in ways that cannot be computed candidate by candidate.
_NEUTRAL = {"guidance_scale": (None, 1), "watermarking_config": (None,)}


def processors_of(
    given: Any,
    adapted: Adapted,
    config: Any,
    prompts: Prompts,
    max_new_tokens: int,
    ends: Collection[int],
    *,
    one_text: bool,
) -> list[Processor]:
    """The processors of a generation: those of the ``GenerationConfig`` (None: the model's own), then the given ones. one_text:
    as for ``check_stateless``."""
    config = adapted.generation_config if config is None else config
    processors = flat_processors(given)
    if config is not None and (own := _config_processor(adapted, config, prompts, max_new_tokens, ends)) is not None:
        processors.insert(0, own)
    check_stateless(processors, one_text=one_text)
    return processors


def processor_names(processors: Sequence[Any]) -> str:
    """The argument that the first of these come from, and the names of all."""
    names = [processor_name(inner) for outer in processors for inner in getattr(outer, "processors", [outer])]
    source = "the generation_config" if isinstance(processors[0], NodeProcessor) else "logits_processor"
    return f"{source} asks for {', '.join(names)}"


def _config_processor(
    adapted: Adapted, config: Any, prompts: Prompts, max_new_tokens: int, ends: Collection[int]
) -> NodeProcessor | None:
    """The processors that the config asks for, as transformers' greedy search runs them; None if it asks for none.

    transformers builds them itself (``_get_logits_processor``), so penalties, bans, minimal lengths and forced tokens are its
    own code. They get each text with its padding on the left. Temperature, top-k and the like are left out: ``generate`` has
    arguments for them.
    """
    for name, neutral in _NEUTRAL.items():
        if getattr(config, name, None) not in neutral:
            raise ValueError(
                f"generate: generation_config: {name} must be {' or '.join(map(str, reversed(neutral)))} (it is not "
                f"implemented), got {getattr(config, name)}; give generate a generation_config without it"
            )
    for name in ("encoder_repetition_penalty", "encoder_no_repeat_ngram_size") if adapted.has_encoder else ():
        if getattr(config, name, None) not in (None, 0, 1.0):
            raise ValueError(
                f"generate: generation_config: {name} reads the encoder's ids, which generate has not, got "
                f"{getattr(config, name)}; use model.generate(custom_generate=…)"
            )
    device = adapted.table.device
    ids = [[*padding, *text] for padding, text in zip(prompts.padding, prompts.texts, strict=True)]
    mask = [[0] * len(padding) + [1] * len(text) for padding, text in zip(prompts.padding, prompts.texts, strict=True)]
    columns = len(ids[0])
    greedy = copy.deepcopy(config)
    greedy.do_sample = False
    greedy.renormalize_logits = None  # changes neither the arg-max nor the softmax
    greedy.max_length = columns + max_new_tokens
    if greedy.min_new_tokens is not None:
        greedy.min_length = columns + greedy.min_new_tokens
    greedy._eos_token_tensor = uploaded(sorted(ends), device) if ends else None
    if not ends:
        greedy.exponential_decay_length_penalty = None  # it raises the logits of the end tokens: there are none
    processors = adapted.model._get_logits_processor(
        generation_config=greedy,
        input_ids_seq_length=columns,
        encoder_input_ids=uploaded(ids, device),
        logits_processor=[],
        device=device,
        model_kwargs={"attention_mask": uploaded(mask, device)},
    )
    return NodeProcessor(processors, prompts.padding) if processors else None
