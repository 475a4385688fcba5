"""What the experiments of a run mean, in sentences: where the time of a step goes and which build is faster."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.harness.evidence import Fact

COLD, WARM = 0.6, 0.85
"""Shares of the first finish that the second takes: below, code had to be fetched; above, it had not."""
NOISE = 0.02
"""A smaller difference of two times says nothing."""


def sentences(facts: Iterable[Fact]) -> list[str]:
    """The sentences of a run's evidence; those of its first facts come first."""
    said: list[str] = []
    times: dict[str, dict[str, float]] = {}
    for fact in facts:
        if fact["kind"] == "stamps":
            said.append(of_phases(fact["case"], fact["phases"]))
        elif fact["kind"] == "kernels":
            said.append(of_kernels(fact["contender"], fact["kernels"]))
        elif fact["kind"] == "timed":
            times.setdefault(fact["build"], {})[fact["step"]] = fact["us"]
    ordinary = times.pop("ordinary", {})
    return said + [of_build(name, steps, ordinary) for name, steps in times.items() if ordinary]


def of_phases(case: str, phases: Mapping[str, float]) -> str:
    """Where the time of an accept step goes; of a build that finishes twice, why the first time takes as long."""
    again = sum(time for name, time in phases.items() if name.endswith("again"))
    if again:
        first = sum(phases.get(name, 0.0) for name in ("described", "finished"))
        share = again / first
        reason = (
            "code had to be fetched: make it smaller"
            if share < COLD
            else "latency of instructions: more lanes side by side, or clusters"
            if share > WARM
            else "both code that had to be fetched and latency"
        )
        return f"accept, {case}: a row is finished in {first:.1f} us, a second time in {again:.1f} ({share:.0%}): {reason}."
    longest = sorted(phases.items(), key=lambda phase: -phase[1])[:3]
    named = ", ".join(f"{name} {time:.1f}" for name, time in longest)
    return f"accept, {case}: {sum(phases.values()):.1f} us in the block that walks; the longest until: {named}."


def of_kernels(contender: str, kernels: list[dict[str, Any]]) -> str:
    """The share of our kernels, and the three that take most."""
    total = sum(kernel["us"] for kernel in kernels)
    ours = sum(kernel["us"] for kernel in kernels if "pass_ext" in kernel["kernel"])
    first = ", ".join(f"{_short(kernel['kernel'])} {kernel['us'] / total:.0%}" for kernel in kernels[:3])
    return f"{contender}: {total:.0f} us of kernels for a token, {ours / total:.0%} in pass_ext's; most in {first}."


def _short(kernel: str) -> str:
    return kernel.partition("(")[0].partition("<")[0].split("::")[-1].split(" ")[-1][:40]


def of_build(name: str, steps: Mapping[str, float], ordinary: Mapping[str, float]) -> str:
    """Which steps a build makes faster and slower."""
    ratios = {step: us / ordinary[step] for step, us in steps.items() if step in ordinary}
    faster = {step: ratio for step, ratio in ratios.items() if ratio < 1 - NOISE}
    slower = {step: ratio for step, ratio in ratios.items() if ratio > 1 + NOISE}
    if not faster and not slower:
        return f"{name}: no step differs by more than {NOISE:.0%}: leave the switch as it is."
    parts = [
        f"{word}: " + ", ".join(f"{step} {ratio:.2f} ×" for step, ratio in steps.items())
        for word, steps in (("faster", faster), ("slower", slower))
        if steps
    ]
    advice = (
        "take it" if not slower else "leave the switch as it is" if not faster else "decide by the steps that matter"
    )
    return f"{name}: {'; '.join(parts)}: {advice}."
