"""``generate``: checks its arguments, runs the decoding loop, and returns the texts with statistics."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from operator import index
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from pass_ext.decoding.arguments import instance, type_of, whole_number
from pass_ext.decoding.drafting.drafter import DraftContext, DraftingMethod
from pass_ext.decoding.drafting.drafting import Drafting
from pass_ext.decoding.loop.choice import device_rows, device_step, open_session
from pass_ext.decoding.loop.host_step import HostStep
from pass_ext.decoding.loop.loop import Loop
from pass_ext.decoding.loop.scores import Scores
from pass_ext.decoding.loop.step import Step
from pass_ext.decoding.loop.synthetic import Rates, Synthetic
from pass_ext.decoding.loop.texts import Texts
from pass_ext.decoding.methods import Method, Plain
from pass_ext.decoding.models.early_exit import packed_model
from pass_ext.decoding.requests.config_processor import config_processor
from pass_ext.decoding.requests.grammar.guides import GrammarArgument, guides_of
from pass_ext.decoding.requests.listener import Listener
from pass_ext.decoding.requests.prompts import read_prompts, warn_of_length
from pass_ext.decoding.requests.stateful_processors import Processor, check_stateless, flat_processors, processor_name
from pass_ext.decoding.rules import DECODING_RULES, LONGEST_BRANCH
from pass_ext.decoding.sampling import SamplingParams
from pass_ext.decoding.session.session import Session
from pass_ext.decoding.stats import GenerationStats
from pass_ext.ops.accept import MAX_TOP_LOGPROBS, TokenLogprobs

MOST_NEW_TOKENS = 1 << 30  # positions are int32, and the prompt has some too


@dataclass(frozen=True)
class Generation:
    """The result of ``generate``."""

    sequences: Tensor
    """``[B, T + new]`` int64: the input unchanged, then the new tokens, then padding. B counts each prompt's texts."""
    lengths: tuple[int, ...]
    """New tokens of each request, its end-of-text token included."""
    stats: GenerationStats
    session: Session | None = None
    """With ``keep_cache``: the keys and values of all tokens but each text's last one, ``session.prefix_lens`` of them."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """With ``logprobs``: those of each text's new tokens, ``[n]`` and for alternatives ``[n, logprobs]``."""
    logits: tuple[tuple[Tensor, Tensor], ...] | None = None
    """With ``keep_logits``: for each text the rows ``[n, V]`` of its new tokens, the model's and those behind the logits
    processors, to which temperature and filters apply."""


def generate(
    model: Any,
    input_ids: Tensor,
    method: Method | DraftingMethod | None = None,
    *,
    max_new_tokens: int,
    num_return_sequences: int = 1,
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
    grammar: GrammarArgument = None,
    generation_config: Any = None,
    generator: torch.Generator | None = None,
    past: tuple[Sequence[tuple[Tensor, Tensor]], int] | None = None,
    keep_cache: bool = False,
    session: Session | None = None,
    cuda_graphs: bool | None = None,
    run_ahead: bool | None = None,
    logprobs: int | None = None,
    keep_logits: bool = False,
    synthetic: Rates | None = None,
) -> Generation:
    """Continues each prompt with up to ``max_new_tokens`` tokens.

    Args:
        model: a transformers decoder-only model, as it is, or any ``pass_ext.PackedModel``.
        input_ids: ``[B, T]`` integers.
        method: ``Plain()`` (the default), ``NGram(...)``, ``PaSS(...)``, ``Speculative(...)``, ``MultiCandidate(...)``, or any
            ``pass_ext.DraftingMethod``.
        num_return_sequences: texts of each prompt, which stand side by side in the result. The k-th has the prompt's seed plus
            k. What they have in common is read once; with a ``corpus`` of ``NGram`` they draft for each other.
        attention_mask: ``[B, T]``, 1 for a prompt's tokens and 0 for padding, on the left or on the right. None: every
            ``pad_token_id`` is padding, as transformers infers it, unless it is an end token too, also one of the model's own.
        temperature: 0 is greedy. This, ``top_k``, ``top_p``, ``min_p`` and ``seeds``: one value for all, or one per request.
        seeds: with rule "coupled" or "coupled_inverse" the text is a function of prompt, seed and these parameters, whatever
            the method and the batch. None: fresh seeds, from ``generator`` or torch's own.
        rule: how drafts are judged, one of ``pass_ext.RULES``, or "longest_branch" (approximate).
        eos_token_id: tokens that end a text; None: the generation_config's, else the model's own; ``[]``: none.
        pad_token_id: fills sequences that ended early; None: the generation_config's, else the model's own, else the smallest
            end token, else 0.
        streamer: gets new tokens as transformers' streamers do (``put``, ``end``); a streamer with
            ``put_step(tokens, accepted)`` gets each step's tokens, the first ``accepted`` of which were drafted. One request
            only.
        stopping: as transformers' stopping criteria, called with ``(ids [1, n], None)`` after every token.
        logits_processor: a processor or a list, as transformers' processors, called with ``(ids [rows, n], logits [rows, V])``
            for every node, after those of the generation_config. They must keep no state between calls.
        grammar: a ``pass_ext.Grammar`` that every new text follows, or one or None for each; ``pass_ext.integrations.grammar``
            has xgrammar's and llguidance's. An end token is allowed only where the text is complete; where the grammar allows
            no further token and there is no end token, the text ends. Processors come first, temperature and filters after.
        generation_config: transformers' ``GenerationConfig``; None: the model's own; ``GenerationConfig()``: no processors. All
            processors that it asks for and that change greedy texts too are applied: penalties, bans, biases, minimal lengths,
            forced tokens. ``guidance_scale`` and ``watermarking_config`` are refused. Sampling (``do_sample``, ``temperature``,
            ``top_k`` …), beams, lengths and stopping criteria are not read from it: they are arguments here.
        past: the keys and values of the first n tokens of every prompt, ``[B, n, heads, D]`` per layer; and n.
        keep_cache: the result has ``session``, with the caches.
        session: the session of an earlier generation with ``keep_cache``, with as many requests, as many slots and enough room.
            Its caches and CUDA graphs are used again, and its texts are overwritten.
        cuda_graphs: True: on CUDA, calls of a repeated shape are CUDA graphs; pays with a ``session`` that is used again.
            False: none are. None: where all steps have one shape (``run_ahead``), each generation makes its step one graph,
            unless the model does what a graph cannot hold: then it warns.
        run_ahead: True: the host begins each step before it has read the one before, so a GPU never waits for it; texts are the
            same. Refused where the host decides between steps: with logits processors, grammars, methods other than ``Plain``
            and ``PaSS``, and sampled rules other than "coupled". None: where it is possible and pays. False: the host makes the
            rows of each step.
        logprobs: the result has ``logprobs`` of every new token, raw and processed. 0: of the tokens alone; n: of the n most
            probable ones beside each too, at most 64. Texts stay the same.
        keep_logits: True: the result has ``logits``, the rows that each new token was drawn from. With this or ``logprobs``
            the host reads every step.
        synthetic: for measurements of speed alone: drafted tokens are accepted by coins of this rate, whatever the model says;
            a list: the share of steps that accept a token at each depth, as vLLM's ``synthetic_acceptance_rates``. The texts
            are worthless, and ``stats.synthetic`` says so.

    Returns:
        Generation: ``sequences``, ``lengths``, ``stats``.
    """
    method = Plain() if method is None else method
    if not isinstance(rule, str) or rule not in DECODING_RULES:
        raise ValueError(f"generate: rule must be one of {', '.join(DECODING_RULES)}, got {rule!r}")
    whole_number("generate: max_new_tokens", max_new_tokens, most=MOST_NEW_TOKENS)
    samples = num_return_sequences
    whole_number("generate: num_return_sequences", samples)
    if logprobs is not None:
        whole_number("generate: logprobs, if not None,", logprobs, 0, MAX_TOP_LOGPROBS)
    for name, switch, words in (
        ("keep_cache", keep_cache, "True or False"),
        ("keep_logits", keep_logits, "True or False"),
        ("cuda_graphs", cuda_graphs, "True, False or None"),
        ("run_ahead", run_ahead, "True, False or None"),
    ):
        instance(f"generate: {name}", switch, (bool, NoneType) if "None" in words else bool, words)
    instance("generate: generator", generator, (torch.Generator, NoneType), "a torch.Generator or None")
    instance("generate: session", session, (Session, NoneType), "the session of an earlier generation or None")
    if past is not None and not (isinstance(past, (list, tuple)) and len(past) == 2):
        raise TypeError(
            f"generate: past must be the keys and values of every layer, and the number of tokens, got {type_of(past)}"
        )
    adapted = packed_model(model)
    model_config = adapted.generation_config
    if generation_config is not None and model_config is None:
        raise TypeError(
            f"generate: generation_config must be None for {type(model).__name__}, no generating model of transformers, "
            f"got {type(generation_config).__name__}; give eos_token_id, pad_token_id and logits_processor instead"
        )
    configs = (generation_config, model_config)
    usual_ends = _token_ids(_first_given("eos_token_id", configs))
    ends = usual_ends if eos_token_id is None else _token_ids(eos_token_id)
    pad = _first_given("pad_token_id", configs) if pad_token_id is None else pad_token_id
    pad = min(ends, default=None) if pad is None else _token_id("pad_token_id", pad)
    prompts = read_prompts(input_ids, attention_mask, adapted.table.shape[0], pad, ends | usual_ends)
    batch = SamplingParams(temperature, top_k, top_p, min_p, seeds).for_batch(
        len(prompts.texts), adapted.table.device, generator, samples=samples
    )
    if samples != 1:
        if batch.is_greedy:
            raise ValueError(
                f"num_return_sequences must be 1 at temperature 0, whose texts are all equal, got {samples}"
            )
        prompts = prompts.repeated(samples)
        if isinstance(grammar, (list, tuple)):
            grammar = [entry for entry in grammar for _ in range(samples)]
        if past is not None:
            layers = [
                (keys.repeat_interleave(samples, 0), values.repeat_interleave(samples, 0)) for keys, values in past[0]
            ]
            past = layers, past[1]
    config = model_config if generation_config is None else generation_config
    from_config = None if config is None else config_processor(adapted, config, prompts, max_new_tokens, ends)
    processors: list[Any] = [*([from_config] if from_config else []), *flat_processors(logits_processor)]
    if rule == LONGEST_BRANCH and processors:
        names = [processor_name(inner) for outer in processors for inner in getattr(outer, "processors", [outer])]
        raise ValueError(
            "generate: rule 'longest_branch' takes no logits_processor, because it draws a first level before processors run; "
            f"{'the generation_config' if from_config else 'logits_processor'} asks for {', '.join(names)}"
        )
    guides = guides_of(grammar, len(prompts.texts), adapted.table.shape[0], ends, adapted.table.device)
    if rule == LONGEST_BRANCH and guides is not None:
        raise ValueError(
            "generate: grammar must be None with rule 'longest_branch', which draws a first level without masks, got "
            f"{type(grammar).__name__}"
        )
    check_stateless(processors, one_text=isinstance(method, Plain) and len(prompts.texts) == 1)
    if guides is not None and (keep_logits or (logprobs is not None and processors)):
        raise ValueError(
            "generate: with a grammar keep_logits must be False, and logprobs None beside logits processors: its masks act "
            f"behind the rows that would be kept, got keep_logits={keep_logits}, logprobs={logprobs}"
        )
    if synthetic is not None and guides is not None:
        raise ValueError(
            f"generate: synthetic must be None with a grammar, whose texts its coins would leave, got {synthetic}"
        )
    if synthetic is not None and rule == LONGEST_BRANCH:
        raise ValueError(
            f"generate: synthetic must be None with rule 'longest_branch', which draws before it judges, got {synthetic}"
        )
    listener = Listener(streamer, stopping)
    # Inference tensors would break a session that is used again outside the caller's inference mode.
    with torch.inference_mode(False), torch.no_grad(), adapted.attached(), ExitStack() as stack:
        may_record = cuda_graphs is None and adapted.table.is_cuda and adapted.logit_shards is None
        context = DraftContext(
            adapted, [list(text) for text in prompts.texts], batch, rule, bool(cuda_graphs), guides, may_record
        )
        drafting = Drafting(method, context)
        stack.enter_context(drafting.attached())
        texts = Texts(context.texts, max_new_tokens, ends, listener, drafting.max_depth, guides)
        coins = None if synthetic is None else Synthetic(synthetic, context.device, drafting.max_depth)
        from_accept = not processors and rule != LONGEST_BRANCH and coins is None
        scores = (
            Scores(logprobs, keeps_rows=keep_logits, sampling=batch, from_accept=from_accept)
            if keep_logits or logprobs is not None
            else None
        )
        rows = device_rows(context, drafting, processors, scores, coins, run_ahead)
        session, known = open_session(context, drafting, texts, session, past)
        # On the CPU work does not overlap, unless the caller wants it, and a pace needs the seconds of each step.
        lag = int(rows is not None and (adapted.table.is_cuda or (bool(run_ahead) and drafting.pace is None)))
        step: Step = (
            HostStep(context, drafting, session, processors, scores, coins)
            if rows is None
            else device_step(context, session, rows, coins, lag)
        )
        loop = Loop(step, texts, None if lag else drafting.pace, lag)
        started = time.perf_counter()
        listener.begin(prompts.texts)
        loop.run(known)
        listener.end()
        seconds = time.perf_counter() - started
        way = adapted.way
    for text, prompt in zip(context.texts, prompts.texts, strict=True):
        warn_of_length(len(text), len(prompt) + max_new_tokens, adapted.most_positions)
    new = [text[len(prompt) :] for text, prompt in zip(context.texts, prompts.texts, strict=True)]
    stats = GenerationStats.of(
        texts.counts.snapshot(),
        model_calls=loop.calls,
        tokens=sum(map(len, new)),
        seconds=seconds,
        ahead_calls=0 if rows is None else loop.calls - loop.prompt_calls,
        surplus_calls=loop.surplus_calls,
        synthetic=synthetic is not None,
        way=way,
    )
    if keep_cache:
        session.keep([len(text) - 1 for text in context.texts])
    return Generation(
        prompts.extended(new, pad or 0),
        tuple(map(len, new)),
        stats,
        session if keep_cache else None,
        scores.logprobs(len(new)) if scores else None,
        scores.rows(len(new)) if scores else None,
    )


def _first_given(name: str, configs: Sequence[Any]) -> Any:
    return next((value for config in configs if (value := getattr(config, name, None)) is not None), None)


def _token_ids(tokens: int | Sequence[int] | Tensor | None) -> frozenset[int]:
    if isinstance(tokens, Tensor) and (tokens.dim() > 1 or tokens.is_floating_point() or tokens.is_complex()):
        raise ValueError(f"generate: eos_token_id must be one id or some, got {tokens.dtype} {list(tokens.shape)}")
    ids = tokens.flatten().tolist() if isinstance(tokens, Tensor) else () if tokens is None else tokens
    ids = ids if isinstance(ids, (list, tuple, set, frozenset)) else [ids]
    return frozenset(_token_id("eos_token_id", token) for token in ids)


def _token_id(name: str, token: Any) -> int:
    try:
        number = index(token)
    except (TypeError, ValueError):
        number = None
    if number is None or isinstance(token, bool) or not -(2**63) <= number < 2**63:
        raise TypeError(f"generate: {name} must be an id, a whole number of 64 bits, got {token!r}")
    return number
