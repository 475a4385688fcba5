"""``generate``: reads its arguments, runs the decoding loop, and returns the texts with statistics.

The device makes the rows of a step if the host decides nothing between two steps: no logits processors, grammars, log
probabilities, supports or tensor parallelism, draft tokens from look-ahead slots alone or none, and the rule "coupled" (or
greedy texts, on which all rules of the ops agree). On the CPU a batch with fixed rows stays with the host. Streamers and
stopping criteria are called later, with the same tokens in order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from pass_ext.decoding.accept import AcceptFunction, accept_function
from pass_ext.decoding.arguments import instance, whole_number
from pass_ext.decoding.drafting.device_rows import DeviceRows, HostDecides
from pass_ext.decoding.drafting.drafter import DraftContext, DraftingMethod
from pass_ext.decoding.drafting.drafting import Drafting
from pass_ext.decoding.loop.device_step import DeviceStep, Records
from pass_ext.decoding.loop.host_step import HostStep
from pass_ext.decoding.loop.loop import Loop, Step
from pass_ext.decoding.loop.pausing_step import PausingStep
from pass_ext.decoding.loop.scores import Scores
from pass_ext.decoding.loop.texts import Listener, Texts
from pass_ext.decoding.methods import Method, Plain
from pass_ext.decoding.models.any_model import packed_model
from pass_ext.decoding.models.encoders import EncoderInputs
from pass_ext.decoding.models.parts import unwrapped
from pass_ext.decoding.models.taps import Tap
from pass_ext.decoding.models.whole_prompts import WholePrompts, parts_of
from pass_ext.decoding.requests.guides import GrammarArgument, guides_of
from pass_ext.decoding.requests.processors import Processor, processors_of
from pass_ext.decoding.requests.prompts import Prompts, prompts_of, special_tokens, warn_of_length
from pass_ext.decoding.sampling import SamplingParams
from pass_ext.decoding.session.past import take_encoded, take_past, take_read
from pass_ext.decoding.session.reading import read_again
from pass_ext.decoding.session.session import Session
from pass_ext.decoding.stats import GenerationStats
from pass_ext.ops.accept import TokenLogprobs, TokenSupport

MOST_NEW_TOKENS = 1 << 30  # positions are int32, and the prompt has some too


@dataclass(frozen=True)
class Generation:
    """The result of ``generate``."""

    sequences: Tensor
    """``[B, T + new]`` int64: the input unchanged, then the new tokens, then padding. B counts each prompt's texts."""
    lengths: tuple[int, ...]
    """New tokens of each request, its end-of-text token included."""
    stats: GenerationStats
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """With ``logprobs``: those of each text's new tokens, ``[n]`` and for alternatives ``[n, logprobs]``."""
    support: tuple[TokenSupport, ...] | None = None
    """With ``support``: for each text the ids that each new token was drawn from, ``counts [n]`` and ``ids [sum of counts]``,
    one token's after the other's."""


def generate(
    model: Any,
    input_ids: Tensor,
    method: Method | DraftingMethod | None = None,
    *,
    max_new_tokens: int,
    num_return_sequences: int = 1,
    attention_mask: Tensor | None = None,
    prompt: Mapping[str, Any] | WholePrompts | EncoderInputs | None = None,
    temperature: float | Sequence[float] | Tensor = 0.0,
    top_k: int | Sequence[int] | Tensor | None = None,
    top_p: float | Sequence[float] | Tensor | None = None,
    min_p: float | Sequence[float] | Tensor | None = None,
    seeds: int | Sequence[int] | Tensor | torch.Generator | None = None,
    rule: str | AcceptFunction = "coupled",
    eos_token_id: int | Sequence[int] | Tensor | None = None,
    streamer: Any = None,
    stopping: Callable[[Tensor, Any], Any] | None = None,
    logits_processor: Processor | Sequence[Processor] | None = None,
    grammar: GrammarArgument = None,
    generation_config: Any = None,
    session: Session | None = None,
    logprobs: int | None = None,
    support: bool = False,
) -> Generation:
    """Continues each prompt with up to ``max_new_tokens`` tokens.

    Args:
        model: a transformers model that writes text, as it is, or any ``pass_ext.PackedModel``.
        input_ids: ``[B, T]`` integers; of a model with an encoder the beginnings of its decoder's texts.
        max_new_tokens: of each text, 1 or more.
        method: ``Plain()`` (the default: nothing is drafted), ``NGram(...)``, ``PaSS(...)``, ``Speculative(...)``,
            ``MultiCandidate(...)``, what ``load_drafter(...)`` gives, or any ``pass_ext.drafting.DraftingMethod``.
        num_return_sequences: texts of each prompt, side by side in the result. Text k, from 0, has the prompt's seed plus k.
        attention_mask: ``[B, T]``, 1 for a prompt's tokens and 0 for padding, left or right. None: every pad token (of the
            generation_config) is padding, as transformers infers it; none, if that token is an end token too.
        prompt: what the processor of a transformers model gives for pictures, sound or video beside ``input_ids``, such as
            ``pixel_values`` and ``image_grid_thw``, or the whole of what it gives; what an encoder reads beside its decoder;
            docs/guide/pictures.md.
        temperature: 0 is greedy.
        top_k, top_p, min_p: filters; None: off. These, temperature and seeds are one value for all, or one per request.
        seeds: with rule "coupled" or "coupled_inverse" the text is a function of prompt, seed and these parameters, whatever
            the method and the batch. None: fresh seeds of torch's own generator; or give another ``torch.Generator``.
        rule: how drafts are verified: one of ``pass_ext.RULES``, "longest_branch" (approximate), or
            ``pass_ext.drafting.SyntheticAcceptance(...)``.
        eos_token_id: tokens that end a text; None: the generation_config's, else the model's own; ``[]``: none.
        streamer: gets new tokens as transformers' streamers do (``put``, ``end``). If it has ``put_step(tokens, accepted)``, it
            gets each step's tokens together; the first ``accepted`` of them were drafted. One request only.
        stopping: as transformers' stopping criteria, called with ``(ids [1, n], None)`` after every token.
        logits_processor: a processor or a list, as transformers' processors, called with ``(ids [rows, n], logits [rows, V])``
            for the text and for each draft token of a step; those of the generation_config run first. They must keep no state.
        grammar: a ``pass_ext.Grammar`` that every new text follows, or one or None for each; docs/guide/grammar.md.
        generation_config: transformers' ``GenerationConfig``; None: the model's own; ``GenerationConfig()``: no processors.
            Its pad token, its end tokens and the processors that change greedy texts are used: penalties, bans, forced tokens.
        session: a ``pass_ext.Session``. It may hold keys and values to begin with; it has the KV cache after the call.
        logprobs: the result has ``logprobs`` of every new token, raw and processed. 0: of the tokens alone; n: of the n most
            probable ones beside each too, at most 64. Texts stay the same.
        support: the result has ``support``, the ids that every new token was drawn from, after masks and filters: what a
            trainer needs to compute the same law under new weights. Texts stay the same.

    Returns:
        Generation: ``sequences``, ``lengths``, ``stats``, ``logprobs``, ``support``.
    """
    method, accept = Plain() if method is None else method, accept_function(rule)
    whole_number("generate: max_new_tokens", max_new_tokens, most=MOST_NEW_TOKENS)
    whole_number("generate: num_return_sequences", num_return_sequences)
    instance("generate: session", session, (Session, NoneType), "a pass_ext.Session or None")
    instance(
        "generate: prompt", prompt, (Mapping, WholePrompts, EncoderInputs, NoneType), "what a processor gives, or None"
    )
    adapted, samples = packed_model(model), num_return_sequences
    device, vocabulary = adapted.table.device, adapted.table.shape[0]
    config = generation_config
    ends, all_ends, pad = special_tokens(eos_token_id, config, adapted.generation_config, type(adapted.model).__name__)
    if adapted.has_encoder and not isinstance(prompt, EncoderInputs):
        if not isinstance(prompt, Mapping) or not prompt:
            raise ValueError(
                f"generate: prompt must be what a processor gives for the encoder of {adapted.name}, such as "
                f"{unwrapped(adapted.model).main_input_name}, got {prompt!r}"
            )
        prompt = EncoderInputs.of_processor(prompt, adapted)
    elif isinstance(prompt, Mapping):
        attention_mask, prompt = parts_of(prompt, input_ids, attention_mask, adapted)
    prompts = prompts_of(input_ids, attention_mask, vocabulary, pad, all_ends)
    params = SamplingParams(temperature, top_k, top_p, min_p, seeds)
    sampling = params.for_batch(len(prompts.texts), device, samples=samples)
    guides = guides_of(grammar, len(prompts.texts), vocabulary, ends, device, samples)
    prompts, asked = prompts.repeated(samples), prompts
    is_alone = isinstance(method, Plain) and len(prompts.texts) == 1
    processors = processors_of(logits_processor, adapted, config, prompts, max_new_tokens, ends, one_text=is_alone)
    accept.check(processors, None if guides is None else grammar)
    wanted = logprobs, support, vocabulary
    scores = Scores.of(*wanted, sampling, accept, has_processors=bool(processors), has_grammar=guides is not None)
    listener = Listener(streamer, stopping)
    # Inference tensors would break a session that is used again outside the caller's inference mode.
    with torch.inference_mode(False), torch.no_grad(), adapted.attached(), ExitStack() as stack:
        is_given, session = session is not None, Session(adapted) if session is None else session
        stack.enter_context(session.in_use())
        if not is_given:  # it and its steps hold each other: a GPU's memory would wait for the garbage collector
            stack.callback(session.fixed_steps.clear)
        tokens = [list(text) for text in prompts.texts]
        context = DraftContext(adapted, tokens, sampling, accept.name, bool(session.cuda_graphs), guides)
        drafting = Drafting(method, context)
        for drafter in drafting.drafters:
            stack.enter_context(drafter.attached())
        texts = Texts(tokens, max_new_tokens, ends, listener, drafting.max_depth, guides)
        rows = _device_rows(context, drafting, accept, processors, scores, session.run_ahead)
        # On the CPU work does not overlap, unless the caller wants it, and a pace needs the seconds of each step.
        lag = int(rows is not None and (device.type != "cpu" or (bool(session.run_ahead) and drafting.pace is None)))
        session.begin(adapted, len(tokens), texts.longest, drafting.max_depth, drafting.deepest_row)
        session.tap(drafting.taps)
        started = time.perf_counter()
        known = _held_already(session, tokens, samples, prompt, asked, drafting.taps)
        drafting.begin(session)
        step: Step
        if rows is None:
            step = HostStep(context, drafting, session, accept, processors, scores)
            if drafting.pace is not None:
                without = _device_rows(
                    context, Drafting(Plain(), context), accept, processors, scores, session.run_ahead
                )
                if without is not None:
                    step = PausingStep(step, _device_step(context, session, without, accept, lag=0))
        else:
            step = _device_step(context, session, rows, accept, lag)
        loop = Loop(step, texts, None if lag else drafting.pace, lag)
        listener.begin(prompts.texts)
        loop.run(known)
        session.text_states = None  # nobody reads what comes of texts that are read again
        listener.end()
        seconds = time.perf_counter() - started
        session.keep([len(text) - 1 for text in tokens])
        if is_given and session.wants_states:
            read_again(session, tokens, [len(text) for text in prompts.texts])
        backend = adapted.backend
    new = [text[len(begun) :] for text, begun in zip(tokens, prompts.texts, strict=True)]
    for text, begun in zip(tokens, prompts.texts, strict=True):
        warn_of_length(len(text), len(begun) + max_new_tokens, adapted.most_positions)
    counts = texts.counts.snapshot()
    stats = GenerationStats(
        counts.acceptance_histogram,
        counts.num_draft_tokens,
        model_calls=loop.calls + bool(prompt or adapted.reads_whole),
        tokens=sum(map(len, new)),
        seconds=seconds,
        ahead_calls=0 if rows is None else loop.calls - loop.prompt_calls,
        surplus_calls=loop.surplus_calls,
        synthetic=accept.is_synthetic,
        backend=backend,
    )
    reports = (None, None) if scores is None else (scores.logprobs(len(new)), scores.support(len(new)))
    return Generation(prompts.extended(new, pad or 0), tuple(map(len, new)), stats, *reports)


def _held_already(
    session: Session,
    texts: Sequence[Sequence[int]],
    samples: int,
    prompt: Mapping[str, Any] | WholePrompts | EncoderInputs | None,
    asked: Prompts,
    taps: Sequence[Tap],
) -> list[int]:
    """Fills the session with what there is before the prompts are read -> how many tokens of each text that is of. prompt: what
    the model's own forward, or its encoder, reads. asked: the prompts, each once."""
    if not prompt and not session.model.reads_whole:
        return take_past(session, texts, samples)
    if isinstance(prompt, EncoderInputs):
        _one_at_a_time(session, asked)
        take_encoded(session, prompt, len(texts) // len(asked.texts))
        return take_past(session, texts, samples)
    if session.past is not None:
        raise ValueError(
            f"generate: session.past must be None {'with prompt' if prompt else f'for {session.model.name}'}, which the model "
            "reads whole; or give a cache of transformers to "
            "model.generate(past_key_values=…, custom_generate=pass_ext.custom_generate(…))"
        )
    _one_at_a_time(session, asked)
    if not isinstance(prompt, WholePrompts):
        prompt = WholePrompts.prepared(session.model.model, asked.input_ids, asked.mask, prompt or {})
    return take_read(session, prompt.read(session.model, taps), samples * prompt.copies)


def _one_at_a_time(session: Session, asked: Prompts) -> None:
    if session.batch_invariant and len(asked.texts) > 1:
        raise ValueError(
            "Session(batch_invariant=True) takes one prompt with pictures, sound or an encoder's input at a time, for the "
            f"model reads those of a batch together, got {len(asked.texts)}"
        )


def _device_rows(
    context: DraftContext,
    drafting: Drafting,
    accept: AcceptFunction,
    processors: Sequence[Processor],
    scores: Scores | None,
    run_ahead: bool | None,
) -> DeviceRows | None:
    """The rows of the device's steps; None: the host makes them."""
    if run_ahead is False:
        return None
    try:
        for decides, reason in (
            (scores is not None, "log probabilities or supports are kept"),
            (processors, "logits processors run on the host"),
            (context.guides is not None, "a grammar's masks are made on the host"),
            (context.target.logit_shards is not None, "the columns of the logits are divided among ranks"),
            (context.is_verified_by_rule and context.rule != "coupled", f"rule {context.rule!r} is not 'coupled'"),
        ):
            if decides:
                raise HostDecides(reason)
        rows = drafting.device_rows(is_synthetic=accept.is_synthetic)
    except HostDecides as because:
        if run_ahead:
            raise ValueError(f"Session: run_ahead must be False or None, because {because}, got True") from None
        return None
    # On the CPU nothing overlaps, but a step costs the host less. In a batch some texts need fewer rows than a fixed tree has.
    pays = context.device.type != "cpu" or len(context.texts) == 1 or rows.choice is not None
    return rows if pays or run_ahead else None


def _device_step(
    context: DraftContext, session: Session, rows: DeviceRows, accept: AcceptFunction, lag: int
) -> DeviceStep:
    """The step of these rows. A session on CUDA has it for the next generation too. lag: steps that the host may be late."""
    sampling = context.sampling
    records: Records = "always" if session.cuda_graphs else "if possible"
    if session.cuda_graphs is False or context.device.type != "cuda" or context.target.logit_shards is not None:
        records = "never"
    absent = tuple(value is None for value in sampling.keywords().values())
    key = rows.key, absent, accept
    step = session.fixed_steps.get(key)
    if not isinstance(step, DeviceStep):
        step = DeviceStep(session, rows, sampling, accept, records)
        if records != "never":
            session.fixed_steps[key] = step
    step.renew(sampling, lag)
    return step
