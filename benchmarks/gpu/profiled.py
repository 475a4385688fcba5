"""Runs one call of an op after the other, each between the profiler's start and stop, for ``ncu --profile-from-start off``.

The shapes are those of the project's aims: V 128,256, heads 32/8 of 128, bfloat16; latents of 128 heads; and two widths.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable

import torch

import pass_ext
from benchmarks.kernel_time.inputs import (
    FILTERED,
    Call,
    accept_calls,
    codes_calls,
    draft_calls,
    latent_call,
    layer_calls,
    one_order_calls,
)

_VOCABULARY, _HEADS, _KV_HEADS, _LONG = 128_256, 32, 8, 32_768


def step(kind: str, name: str) -> Callable[[], object]:
    """A step of benchmarks.kernel_time.inputs on the GPU, whose logits are peaked."""
    return _named({"accept": accept_calls, "draft_sample": draft_calls, "layer": layer_calls}[kind](), name)


def _named(calls: Iterable[Call], name: str) -> Callable[[], object]:
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


def _attention(
    requests: int,
    prefix: int,
    nodes: int,
    heads: tuple[int, int] = (_HEADS, _KV_HEADS),
    widths: tuple[int, int] = (128, 128),
) -> Callable[[], object]:
    trees = pass_ext.pack_trees([pass_ext.Tree.chain(nodes - 1)] * requests, "cuda")
    options = dict(device="cuda", dtype=torch.bfloat16)
    k_cache, v_cache = (torch.randn(requests, prefix + nodes, heads[1], width, **options) for width in widths)
    q = torch.randn(requests * nodes, heads[0], widths[0], **options)
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
    "attention-latents-q4": lambda: latent_call(1, 4).to("cuda").run,
    "attention-codes-q16": lambda: _named(codes_calls(_LONG), f"{_LONG:,} keys in int8, 16 rows"),
    "attention-lists-q4": lambda: _named(one_order_calls(_LONG), f"lists of {_LONG // 2:,} of {_LONG:,} keys, 4 rows"),
    "attention-plain-q4": lambda: _named(one_order_calls(_LONG), f"{_LONG:,} keys, 4 rows"),
    "attention-192-128-q8": lambda: _attention(1, 8192, 8, (16, 16), (192, 128)),
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
    parser.add_argument("cases", nargs="+", choices=tuple(CASES))
    with torch.inference_mode():
        for case in parser.parse_args().cases:
            print(f"case {case}", flush=True)
            call = CASES[case]()
            for _ in range(3):  # the first calls load kernels and take workspaces
                call()
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            call()
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()


if __name__ == "__main__":
    main()
