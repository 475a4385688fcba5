"""``rate_at``: the learning rate of a step: it rises at first, then falls as a cosine."""

from __future__ import annotations

import math


def rate_at(step: int, steps: int, warm_up: int) -> float:
    """The learning rate's factor: up in a straight line for ``warm_up`` steps, then down along a cosine."""
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(steps - warm_up, 1)))
