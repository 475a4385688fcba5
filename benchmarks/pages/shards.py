"""Counts the exchanges and bytes of one accept step on shards against gathering all logits, and writes the tables and the
picture of docs/distributed.md. `python -m benchmarks.pages.shards` counts; `--measure` also times both on two gloo processes
here.

A chain of K = 3 drafts with rule rejection, temperature alone, bf16 logits of target and draft; a request has 4 rows. Bytes are
those that one rank receives: gathering (ranks - 1) times what a rank sends, adding by a ring 2 (ranks - 1) / ranks of it. The
columns that move count at the rank that receives most. Seconds by the model

    t = exchanges * latency + bytes / bandwidth

with the latency and bandwidth of the links below: assumed numbers, not measured ones. Computing is left out on both sides.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.harness import picture
from benchmarks.harness.markdown import replace_part, table
from pass_ext.distributed.layout import Layout, equal_parts
from pass_ext.distributed.steps import rounds_of
from pass_ext.ops.shard import answer_shape, is_summed

ROOT = Path(__file__).parents[2]
PAGE, PICTURE = ROOT / "docs" / "distributed.md", ROOT / "docs" / "distributed.svg"
RANKS, ROWS, VOCABULARIES = (2, 4, 8, 16, 32, 64), (1, 4, 16, 64, 256, 1024), (32000, 128256, 262144)
LINKS = {"inside a node": (15e-6, 300e9), "between nodes": (40e-6, 25e9)}
"""Name -> seconds of an exchange, bytes in a second."""
BF16 = 2


@dataclass(frozen=True)
class Count:
    """The exchanges of a step and the bytes that a rank receives."""

    exchanges: int
    bytes: float

    def seconds(self, link: tuple[float, float]) -> float:
        """By the model above."""
        return self.exchanges * link[0] + self.bytes / link[1]


def answer_bytes(round: str, rows: int, slices: int, drafts: bool = True) -> int:
    """The bytes of a rank's answer to a round, about requests of 4 rows."""
    shape, dtype = answer_shape(
        round, nodes=rows, requests=-(-rows // 4), slices=slices, rule="rejection", has_draft=drafts
    )
    return math.prod(shape) * dtype.itemsize


def count_shards(layout: Layout, rows: int, rounds: list[str], element_size: int = BF16, drafts: bool = True) -> Count:
    """A step on shards: every round's answers, and the columns that move."""
    ranks, exchanges, received = len(layout.starts), len(rounds), 0.0
    aligned = layout
    if not layout.is_aligned:
        aligned = layout.aligned()
        exchanges += 1
        pairs = zip(layout.starts, layout.ends, aligned.starts, aligned.ends, strict=True)
        most = max(
            max(0, last - first) - max(0, min(end, last) - max(start, first)) for start, end, first, last in pairs
        )
        received += most * rows * element_size * (2 if drafts else 1)
    for name in rounds:
        sent = answer_bytes(name, rows, aligned.slices, drafts)
        received += sent * (2 * (ranks - 1) / ranks if is_summed(name) else ranks - 1)
    return Count(exchanges, received)


def sent_bytes(layout: Layout, rows: int, rounds: list[str]) -> float:
    """The bytes that a rank sends for a row, a row of the target with the draft's beside it, without the columns that move."""
    return sum(answer_bytes(name, rows, layout.aligned().slices) for name in rounds) / rows


def count_gather(layout: Layout, rows: int, element_size: int = BF16, drafts: bool = True) -> Count:
    """One gather of all logits, padded to the widest part."""
    widest = max(end - start for start, end in zip(layout.starts, layout.ends, strict=True))
    return Count(1, (len(layout.starts) - 1) * widest * rows * element_size * (2 if drafts else 1))


def crossing(vocabulary: int, ranks: int, link: tuple[float, float], rounds: list[str]) -> int | None:
    """The fewest rows, a power of 2, from which shards are faster by the model; None up to 4,096."""
    layout = equal_parts(vocabulary, ranks)
    for rows in (2**i for i in range(13)):
        if count_shards(layout, rows, rounds).seconds(link) < count_gather(layout, rows).seconds(link):
            return rows
    return None


REJECTION = rounds_of("rejection", greedy=False, top_k=False, top_p=False, residuals=0)
FILTERED = rounds_of("rejection", greedy=False, top_k=True, top_p=True, residuals=0)


def human(count: float) -> str:
    """Bytes in B, kB or MB."""
    for unit, size in (("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def tables() -> str:
    """The counted tables."""
    lines = []
    for vocabulary in VOCABULARIES:
        lines += ["", f"V = {vocabulary:,}: bytes that a rank receives, on shards / gathered", ""]
        body = []
        for ranks in RANKS:
            layout = equal_parts(vocabulary, ranks)
            cells = [
                f"{human(count_shards(layout, rows, REJECTION).bytes)} / {human(count_gather(layout, rows).bytes)}"
                for rows in ROWS
            ]
            body.append([str(ranks), str(count_shards(layout, 1, REJECTION).exchanges), *cells])
        lines += table(["ranks", "exchanges", *(f"{rows:,} rows" for rows in ROWS)], body)
    lines += ["", "Bytes that a rank sends for a row of 4 in a request, without the columns that move:", ""]
    body = [
        [f"{vocabulary:,}", *(f"{sent_bytes(equal_parts(vocabulary, ranks), 4, REJECTION):.0f}" for ranks in RANKS)]
        for vocabulary in VOCABULARIES
    ]
    lines += table(["V", *(f"{ranks} ranks" for ranks in RANKS)], body)
    lines += [
        "",
        "Rows from which shards are faster by the model, a value for `gather_below` (–: not up to 4,096):",
        "",
    ]
    body = []
    for name, link in LINKS.items():
        for vocabulary in VOCABULARIES:
            for label, rounds in (("temperature", REJECTION), ("top-k and top-p", FILTERED)):
                found = [crossing(vocabulary, ranks, link, rounds) for ranks in RANKS]
                body.append([name, f"{vocabulary:,}", label, *("–" if rows is None else f"{rows:,}" for rows in found)])
    lines += table(["link", "V", "filters", *(f"{ranks} ranks" for ranks in RANKS)], body, left=3)
    return "\n".join(lines).strip()


def draw(path: Path) -> None:
    """Bytes by rows, for 8 ranks."""
    story = {
        str(vocabulary): {
            kind: [count(equal_parts(vocabulary, 8), rows) for rows in ROWS]
            for kind, count in (
                ("shards", lambda layout, rows: count_shards(layout, rows, REJECTION).bytes),
                ("gathered", lambda layout, rows: count_gather(layout, rows).bytes),
            )
        }
        for vocabulary in VOCABULARIES
    }

    def make():  # type: ignore[no-untyped-def]
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")
        for color, (vocabulary, kinds) in zip(("C0", "C1", "C2"), story.items(), strict=True):
            axes.plot(ROWS, kinds["gathered"], color=color, linestyle="--", label=f"gathered, V = {int(vocabulary):,}")
            axes.plot(ROWS, kinds["shards"], color=color, label=f"shards, V = {int(vocabulary):,}")
        axes.set(
            xscale="log",
            yscale="log",
            xlabel="rows",
            ylabel="bytes that a rank receives",
            title="8 ranks, rejection, bf16",
        )
        axes.legend(fontsize=8)
        return figure

    picture.save(path, make, title="Bytes of an accept step on shards", story=story)


# ---- times on gloo ----


def measure_rank(rank: int, folder: Path) -> dict[str, float]:
    """The median ratio of gathered to sharded seconds on this rank, by rows and vocabulary. Both take turns."""
    import torch.distributed as dist

    from pass_ext import distributed

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    ratios = {}
    for vocabulary in VOCABULARIES[:2]:
        part = slice(*((0, vocabulary // 2), (vocabulary // 2, vocabulary))[rank])
        for requests in (1, 4, 16):
            generator = torch.Generator().manual_seed(0)
            target, draft = (torch.randn(requests, n, vocabulary, generator=generator).bfloat16() for n in (4, 3))
            tokens = torch.randint(0, vocabulary, (requests, 3), generator=generator)
            columns = [x[..., part].contiguous() for x in (target, draft)]
            seconds: dict[int, list[float]] = {0: [], 1 << 20: []}
            for turn in range(15):
                for below, times in seconds.items():
                    dist.barrier()
                    started = time.perf_counter()
                    distributed.accept_chain(
                        columns[0], tokens, draft_logits=columns[1], rule="rejection", temperature=1.0, seeds=turn, positions=0,
                        vocab_size=vocabulary, gather_below=below,
                    )  # fmt: skip
                    times.append(time.perf_counter() - started)
            ours, gathered = (statistics.median(times[3:]) for times in seconds.values())
            ratios[f"{vocabulary} {4 * requests}"] = gathered / ours
    dist.destroy_process_group()
    return ratios


def measured_table() -> str:
    """The measured ratios, as rank 0 saw them."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.pages.shards", "--folder", folder, "--rank"]
        ranks = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, env=os.environ) for rank in range(2)]
        outputs = [process.communicate(timeout=300)[0] for process in ranks]
    ratios = json.loads(outputs[0].decode().splitlines()[-1])
    rows = sorted({int(key.split()[1]) for key in ratios})
    body = [
        [f"{vocabulary:,}", *(f"{ratios[f'{vocabulary} {count}']:.2f} ×" for count in rows)]
        for vocabulary in VOCABULARIES[:2]
    ]
    return "\n".join(table(["V", *(f"{count} rows" for count in rows)], body))


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="also time both on two gloo processes of this machine")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        print(json.dumps(measure_rank(options.rank, options.folder)))
        return
    print(tables())
    page = replace_part(PAGE.read_text(), "benchmarks.pages.shards", tables())
    if options.measure:
        measured = measured_table()
        print(measured)
        page = replace_part(page, "benchmarks.pages.shards --measure", measured)
    PAGE.write_text(page)
    draw(PICTURE)


if __name__ == "__main__":
    main()
