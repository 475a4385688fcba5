"""Runs one call of one op between the profiler's start and stop, for ``ncu --profile-from-start off``.

The shapes are those of the project's aims: V 128,256, heads 32/8 of 128, bfloat16.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

import pass_ext
from benchmarks.kernel_time.inputs import FILTERED, accept_calls, draft_calls, layer_calls

_VOCABULARY, _HEADS, _KV_HEADS, _HEAD_DIM = 128_256, 32, 8, 128


def step(kind: str, name: str) -> Callable[[], object]:
    """A step of benchmarks.kernel_time.inputs on the GPU, whose logits are peaked."""
    calls = {"accept": accept_calls, "draft_sample": draft_calls, "layer": layer_calls}[kind]()
    return next(call for call in calls if call.name == name).to("cuda").run


def flat_accept(requests: int, **options: object) -> Callable[[], object]:
    """An accept step of four drafts that were drawn from their distributions; these are flat, so many tokens may win."""
    drafts = 4
    generator = torch.Generator("cuda").manual_seed(0)
    target = torch.randn(requests, drafts + 1, _VOCABULARY, device="cuda", generator=generator).mul_(2.5)
    noise = torch.randn(requests, drafts, _VOCABULARY, device="cuda", generator=generator)
    draft = target[:, :-1].add(noise, alpha=0.8).bfloat16()
    tokens = torch.stack(
        [
            pass_ext.draft_sample(draft[:, k], 1, mode="without", temperature=0.8, seeds=1, positions=7, nodes=k)[0][
                :, 0
            ]
            for k in range(drafts)
        ],
        dim=1,
    )
    logits = target.bfloat16()
    return lambda: pass_ext.accept_chain(
        logits,
        tokens,
        draft_logits=draft,
        temperature=0.8,
        seeds=1,
        positions=7,
        **options,  # type: ignore[arg-type]
    )


def flat_draft(rows: int) -> Callable[[], object]:
    """Four tokens drawn from each row."""
    logits = torch.randn(rows, _VOCABULARY, device="cuda").mul_(2.5).bfloat16()
    return lambda: pass_ext.draft_sample(logits, 4, mode="coupled", temperature=0.8, seeds=1, positions=7)


def _attention(requests: int, prefix: int, nodes: int) -> Callable[[], object]:
    trees = pass_ext.pack_trees([pass_ext.Tree.chain(nodes - 1)] * requests, "cuda")
    options = dict(device="cuda", dtype=torch.bfloat16)
    k_cache, v_cache = torch.randn(2, requests, prefix + nodes, _KV_HEADS, _HEAD_DIM, **options)
    q = torch.randn(requests * nodes, _HEADS, _HEAD_DIM, **options)
    lengths = torch.full((requests,), prefix, dtype=torch.int32, device="cuda")
    step = lengths, trees.cu_nodes, trees.visible, trees.max_nodes
    return lambda: pass_ext.attention_tree(q, k_cache, v_cache, *step)


ACCEPT = {
    "coupled": "chain of 4, coupled, 2 accepted",
    "rejection": "chain of 4, rejection, 2 accepted",
    "rejection, filters": f"chain of 4, rejection, 2 accepted, {FILTERED}",
}
"""Accept steps of one request by a short name."""
CASES: dict[str, Callable[[], Callable[[], object]]] = {
    "accept-coupled-b1": lambda: step("accept", ACCEPT["coupled"]),
    "accept-rejection-b1": lambda: step("accept", ACCEPT["rejection"]),
    "accept-filters-b1": lambda: step("accept", ACCEPT["rejection, filters"]),
    "draft-1-row": lambda: step("draft_sample", "1 row, coupled"),
    "accept-rejection-b64-flat": lambda: flat_accept(64, rule="rejection"),
    "draft-256-rows-flat": lambda: flat_draft(256),
    "layer-after-8-rows": lambda: step("layer", "after attention, 8 rows"),
    "attention-b1-256-q1": lambda: _attention(1, 256, 1),
    "attention-b1-1k-q4": lambda: _attention(1, 1024, 4),
    "attention-b1-32k-q16": lambda: _attention(1, 32768, 16),
    "attention-b64-8k-q4": lambda: _attention(64, 8192, 4),
}


def main() -> None:
    """Entry point of `python -m benchmarks.gpu.profiled`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=tuple(CASES))
    call = CASES[parser.parse_args().case]()
    with torch.inference_mode():
        for _ in range(3):  # the first calls load kernels and take workspaces
            call()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


if __name__ == "__main__":
    main()
