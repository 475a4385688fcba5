"""``step_of``: the step of a generation, and how many of its steps the host may be behind.

The device makes the rows of a step if the host decides nothing between two steps: no logits processors, candidates from
look-ahead slots alone or none, and the rule "coupled" (or greedy texts, which all rules agree on). Streamers and stopping
criteria are called later, in the same order and with the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from pass_ext.decoding.drafting.drafter import DraftContext
from pass_ext.decoding.drafting.drafting import Drafting
from pass_ext.decoding.drafting.lookahead.device_rows import ChosenRows, FixedRows, HostDecides
from pass_ext.decoding.loop.chosen_step import ChosenStep
from pass_ext.decoding.loop.device_step import DeviceStep, Records
from pass_ext.decoding.loop.fixed_step import FixedStep
from pass_ext.decoding.loop.scores import Scores
from pass_ext.decoding.loop.synthetic import Synthetic
from pass_ext.decoding.loop.texts import Texts
from pass_ext.decoding.requests.stateful_processors import Processor
from pass_ext.decoding.rules import LONGEST_BRANCH
from pass_ext.decoding.session.opening import Past, check_positions, fill, opened
from pass_ext.decoding.session.session import Session

DeviceRows = FixedRows | ChosenRows


def device_rows(
    context: DraftContext,
    drafting: Drafting,
    processors: Sequence[Processor],
    scores: Scores | None,
    synthetic: Synthetic | None,
    run_ahead: bool | None,
) -> DeviceRows | None:
    """What the rows of the device's steps are; None: the host makes them.

    Args:
        run_ahead: True refuses a generation that cannot; None: where it pays.
    """
    if run_ahead is False:
        return None
    try:
        rows = _device_rows(context, drafting, processors, scores, is_synthetic=synthetic is not None)
    except HostDecides as reason:
        if run_ahead:
            raise ValueError(f"generate: run_ahead must be False or None, because {reason}, got True") from None
        return None
    # On the CPU nothing overlaps, but a step costs the host less. In a batch some texts need fewer rows than a fixed tree has.
    pays = context.device.type != "cpu" or len(context.texts) == 1 or isinstance(rows, ChosenRows)
    return rows if pays or run_ahead else None


def _device_rows(
    context: DraftContext,
    drafting: Drafting,
    processors: Sequence[Processor],
    scores: Scores | None,
    *,
    is_synthetic: bool,
) -> DeviceRows:
    if scores is not None:
        raise HostDecides("log probabilities or logits are kept")
    if processors:
        raise HostDecides("logits processors run on the host")
    if context.guides is not None:
        raise HostDecides("a grammar's masks are made on the host")
    if context.target.logit_shards is not None:
        raise HostDecides("the columns of the logits are divided among ranks")
    if context.rule == LONGEST_BRANCH or (context.is_sampled and context.rule != "coupled"):
        raise HostDecides(f"rule {context.rule!r} is not 'coupled'")
    return drafting.device_rows(is_synthetic=is_synthetic)


def open_session(
    context: DraftContext, drafting: Drafting, texts: Texts, session: Session | None, past: Past | None
) -> tuple[Session, int]:
    """A session with room for the texts, filled with the keys and values of ``past``; and how many tokens of each these are."""
    check_positions(context.target, texts.longest, drafting.deepest_row)
    room = texts.longest + drafting.max_depth
    session = opened(session, context.target, len(texts), room, graphs=context.graphs)
    drafting.begin(session)
    return session, fill(session, past, texts.tokens)


def device_step(
    context: DraftContext, session: Session, rows: DeviceRows, synthetic: Synthetic | None, lag: int
) -> DeviceStep:
    """The step of these rows. A session that records calls has it for the next generation too.

    Args:
        lag: steps that the host may be behind.
    """
    sampling = context.sampling

    def made(records: Records) -> DeviceStep:
        if isinstance(rows, ChosenRows):
            return ChosenStep(session, rows, sampling, records=records, synthetic=synthetic)
        return FixedStep(session, rows, sampling, records=records, synthetic=synthetic)

    if session.records:
        absent = tuple(value is None for value in sampling.keywords().values())
        key = rows.key, absent, synthetic and synthetic.chances
        if key not in session.fixed_steps:
            session.fixed_steps[key] = made("always")
        step: DeviceStep = session.fixed_steps[key]
    else:
        step = made("if possible" if context.may_record else "never")
    step.renew(sampling, lag)
    return step
