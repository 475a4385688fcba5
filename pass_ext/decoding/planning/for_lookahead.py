"""Plans PaSS for one model on one machine, from the embeddings' hit rates and measured step times."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from pass_ext.decoding.methods import PaSS
from pass_ext.decoding.models.packed import Adapted
from pass_ext.decoding.planning.hit_rates import HitRates
from pass_ext.decoding.planning.lookahead_tree import Plan, assumed_hit_rates, plan, plan_auto
from pass_ext.decoding.planning.measured import measured_times
from pass_ext.decoding.planning.step_times import StepTimes
from pass_ext.modules.lookahead import LookaheadEmbedding
from pass_ext.tree import Tree

_ASSUMED_RANKS = 16


def pass_plan(
    method: PaSS, model: Adapted, requests: int, *, greedy: bool, graphs: bool = False
) -> tuple[Plan, StepTimes | None]:
    """Returns the plan, and the step times behind it if ``rows`` is "auto". greedy: True if all texts have temperature 0.
    graphs: True if calls will be CUDA graphs."""
    slots = method.num_slots
    rates = slot_hit_rates(method.lookahead, slots, _ASSUMED_RANKS, greedy=greedy)
    times = measured_times(model, graphs=graphs, lookahead=method.lookahead) if method.rows == "auto" else None
    known = tuple(map(tuple, rates))
    return _planned(known, times, slots, method.tree, method.rows, method.passes, requests), times


def slot_hit_rates(lookahead: LookaheadEmbedding, slots: int, ranks: int, *, greedy: bool) -> HitRates:
    """The calibrated rates of the first slots, for greedy texts their own where the file has them; without calibration a guess
    with so many ranks."""
    calibrated = (lookahead.greedy_hit_rates if greedy else None) or lookahead.hit_rates
    return calibrated[:slots] if calibrated else assumed_hit_rates(slots, ranks)


@lru_cache(maxsize=64)
def _planned(
    rates: tuple[tuple[float, ...], ...],
    times: StepTimes | None,
    slots: int,
    tree: Tree | None,
    rows: int | str,
    passes: int,
    requests: int,
) -> Plan:
    options: Any = dict(passes=passes, requests=requests)
    if tree is not None:
        most = rows if isinstance(rows, int) else None
        return Plan.from_tree(tree, slots, rates, rows=most, step_time=None if times is None else times.at, **options)
    if times is not None:
        return plan_auto(rates, times, **options)
    assert isinstance(rows, int)
    return plan(rates, rows=rows, **options)
