"""Bits that must not depend on what is computed beside them, compared one by one on this machine.

rows      a row of linear_rows or attention_tree alone, and the same row among others, in each type
threads   the same calls by one thread and by three
kinds     accept_tree's tokens, and the bits of step_rms_norm, by each instruction set of this processor
texts     64 tokens of SmolLM2-135M-Instruct after held-out prompts: Plain alone; by every method, in a batch, by two threads
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import pass_ext
from benchmarks.decoding.prompts import read_prompts
from pass_ext.checkpoint import demo_model, load_checkpoint
from pass_ext.testing import cpu_backends

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PROMPTS, TOKENS = 3, 64


def measure() -> dict[str, Any]:
    """What was compared -> how many, and how many differ."""
    found = {"rows alone and among others": _rows(), "calls by 1 and by 3 threads": _threads(), **_kinds(), **_texts()}
    return {"isas": [backend.name for backend in cpu_backends()], "compared": found}


def _count(pairs: Iterator[tuple[Tensor, Tensor]]) -> dict[str, int]:
    same = [torch.equal(a, b) for a, b in pairs]
    return {"compared": len(same), "differ": same.count(False)}


def _calls() -> Iterator[tuple[int, Callable[[slice], Tensor]]]:
    """Numbers of rows, and calls with some of these rows."""
    for number, dtype in enumerate(DTYPES):
        random = torch.Generator().manual_seed(number)
        for rows, width, outputs in ((2, 64, 48), (9, 576, 192), (16, 1536, 576), (64, 576, 1536), (200, 96, 49)):
            x, weight = (torch.randn(n, width, generator=random).to(dtype) for n in (rows, outputs))
            yield rows, lambda some, x=x, weight=weight: pass_ext.layers.linear_rows(x[some], weight)  # type: ignore[misc]
        for nodes, prefix, dim in ((2, 5, 64), (16, 700, 128), (40, 3000, 64), (63, 64, 256)):
            q, k = (torch.randn(n, h, dim, generator=random).to(dtype) for n, h in ((nodes, 4), (prefix + nodes, 2)))
            visible = torch.zeros(
                nodes, 1, dtype=torch.int64
            )  # rows that see the prefix alone: the same keys beside any rows

            def attend(
                some: slice, q: Tensor = q, k: Tensor = k, visible: Tensor = visible, prefix: int = prefix
            ) -> Tensor:
                count = len(q[some])
                owned, lens = torch.tensor([0, count]), torch.tensor([prefix])
                return pass_ext.attention_tree(q[some], k[None], k[None], lens, owned, visible[some], count)[0]

            yield nodes, attend


def _rows() -> dict[str, int]:
    return _count(
        (call(slice(row, row + 1)), together[row : row + 1])
        for rows, call in _calls()
        for together in [call(slice(0, rows))]
        for row in range(rows)
    )


def _threads() -> dict[str, int]:
    def by(threads: int) -> list[Tensor]:
        torch.set_num_threads(threads)
        return [call(slice(0, rows)) for rows, call in _calls()]

    former = torch.get_num_threads()
    try:
        return _count(zip(by(1), by(3), strict=True))
    finally:
        torch.set_num_threads(former)


def _kinds() -> dict[str, dict[str, int]]:
    random = torch.Generator().manual_seed(0)
    trees = pass_ext.pack_trees([pass_ext.Tree.from_branching([3, 2, 1])] * 8)
    nodes = trees.visible.shape[0]
    p, q = (torch.randn(nodes, 5000, generator=random) * 3 for _ in range(2))
    tokens = torch.randint(5000, (nodes,), generator=random)
    x, weight = torch.randn(50, 2048, generator=random).bfloat16(), torch.ones(2048).bfloat16()
    accepted, norms = {}, {}
    for backend in cpu_backends():
        with backend.active():
            accepted[backend.name] = [
                pass_ext.accept_tree(
                    p,
                    tokens,
                    trees.parents,
                    trees.cu_nodes,
                    3,
                    rule=rule,
                    seeds=torch.arange(8),
                    positions=torch.arange(8),
                    draft_logits=q,
                    temperature=0.8,
                ).emitted
                for rule in ("coupled", "rejection", "traversal")
            ]
            norms[backend.name] = [pass_ext.layers.step_rms_norm(x, weight)[0]]

    def others(found: dict[str, list[Tensor]]) -> dict[str, int]:
        first, *rest = found.values()
        return _count((a, b) for other in rest for a, b in zip(first, other, strict=True))

    return {
        "tokens of accept_tree by each instruction set": others(accepted),
        "rms norms by each instruction set": others(norms),
    }


def _texts() -> dict[str, dict[str, int]]:
    path = demo_model()
    model, tokenizer = load_checkpoint(path, torch.bfloat16, weights="dense")
    prompts = [prompt for domain in ("prose", "chat") for prompt in read_prompts(domain, tokenizer, PROMPTS)]
    file = "smollm2-135m-instruct"
    methods: dict[str, Any] = {
        "NGram": pass_ext.NGram(),
        "PaSS": pass_ext.PaSS(file, rows=8),
        "Speculative": pass_ext.Speculative(pass_ext.EarlyExitDraft(model, adapter=file), length=4),
    }
    found: dict[str, dict[str, int]] = {}
    torch.set_num_threads(2)

    def write(chosen: list[Any], method: Any, seeded: bool) -> list[list[int]]:
        longest = max(len(prompt.ids) for prompt in chosen)
        ids = torch.tensor([[0] * (longest - len(prompt.ids)) + list(prompt.ids) for prompt in chosen])
        mask = torch.tensor([[0] * (longest - len(prompt.ids)) + [1] * len(prompt.ids) for prompt in chosen])
        options: dict[str, Any] = dict(temperature=0.8, seeds=[prompts.index(one) for one in chosen]) if seeded else {}
        done = pass_ext.generate(
            model, ids, method, attention_mask=mask, eos_token_id=[], max_new_tokens=TOKENS, **options
        )
        return done.sequences[:, longest:].tolist()

    for seeded in (False, True):
        words = "T 0.8" if seeded else "greedy"
        alone = [text for prompt in prompts for text in write([prompt], pass_ext.Plain(), seeded)]

        def differ(name: str, texts: list[list[int]], alone: list[list[int]] = alone, words: str = words) -> None:
            wrong = sum(a != b for a, b in zip(alone, texts, strict=True))
            found[f"texts, Plain alone and {name}; {words}"] = {"compared": len(alone), "differ": wrong}

        for name, method in methods.items():
            for size in (1, PROMPTS, len(prompts)):
                batches = [prompts[first : first + size] for first in range(0, len(prompts), size)]
                rows = max(sum(len(prompt.ids) for prompt in batch) for batch in batches)
                beside = f" in batches of {size}, up to {rows} prompt rows" if size > 1 else ""
                differ(f"{name}{beside}", [text for batch in batches for text in write(batch, method, seeded)])
        torch.set_num_threads(1)
        differ("Plain with other threads", [text for one in prompts for text in write([one], pass_ext.Plain(), seeded)])
        torch.set_num_threads(2)
    return found
