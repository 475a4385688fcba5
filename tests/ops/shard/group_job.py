"""One rank of a group: ``group_job.py RANK RANKS FOLDER JOB`` runs a job below with gloo and writes ``RANK.json``: what it
saw."""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from shard_cases import FILTERS, any_layout, equal_layout, mask_columns, random_drafts, random_step
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import pass_ext
from pass_ext import distributed

STEPS = 40


def is_same(result, expected):
    return all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))


def keywords_of(step, begin, end):
    drafts = {f"draft_{name}": value for name, value in step.draft_sampling.items()}
    masks = {name: mask_columns(step.keywords[name], begin, end) for name in ("allowed", "draft_allowed")}
    return step.keywords | masks | step.sampling | drafts


def split(step, layout, rank, **gathering):
    """accept_tree on this rank's columns."""
    begin, end = layout.starts[rank], layout.ends[rank]
    return distributed.accept_tree(
        step.target[:, begin:end], *step.tree, vocab_start=begin, vocab_size=layout.vocab_size,
        draft_logits=None if step.draft is None else step.draft[:, begin:end], **gathering, **keywords_of(step, begin, end),
    )  # fmt: skip


def equality(rank, ranks):
    """Steps, chains and drafts on real groups."""
    wrong = []
    for seed in range(STEPS):
        step = random_step(seed)
        layout = any_layout(step.target.shape[1], ranks, step.chance)
        expected = step.whole()
        if not is_same(split(step, layout, rank), expected):
            wrong.append(["tree", seed])
        if seed % 5 == 0 and not is_same(split(step, layout, rank, gather_below=100), expected):
            wrong.append(["gathered", seed])
        chance, logits, k, mode, sampling, rest = random_drafts(seed)
        layout = any_layout(logits.shape[1], ranks, chance)
        begin, end = layout.starts[rank], layout.ends[rank]
        masked = rest | {"allowed": mask_columns(rest["allowed"], begin, end)}
        where = dict(vocab_start=begin, vocab_size=layout.vocab_size)
        drafts = distributed.draft_sample(logits[:, begin:end], k, mode=mode, **where, **sampling, **masked)
        if not is_same(drafts, pass_ext.draft_sample(logits, k, mode=mode, **sampling, **rest)):
            wrong.append(["drafts", seed])
    return {"wrong": wrong}


def chains(rank, ranks):
    """accept_chain from equal parts that say nothing, from padded ones, and from DTensors."""
    generator, wrong = torch.Generator().manual_seed(0), []
    mesh = init_device_mesh("cpu", (ranks,))
    for vocabulary in (300, 9001):
        target, draft = (
            torch.randn(2, 4, vocabulary, generator=generator),
            torch.randn(2, 3, vocabulary, generator=generator),
        )
        tokens, _ = pass_ext.draft_sample(draft.flatten(0, 1), 1, mode="with", seeds=3, positions=0)
        layout = equal_layout(vocabulary, ranks)
        part = slice(layout.starts[rank], layout.ends[rank])
        for rule in ("coupled", "rejection", "block"):
            law = dict(rule=rule, temperature=0.8, seeds=[1, 2], positions=[5, 6])
            tree = tokens.view(2, 3)
            expected = pass_ext.accept_chain(target, tree, draft_logits=draft, **law)
            plain = distributed.accept_chain(target[..., part], tree, draft_logits=draft[..., part], **law)
            columns = -(-vocabulary // ranks) + 7
            padded = [
                torch.nn.functional.pad(x[..., part], (0, columns - (part.stop - part.start)), value=torch.nan)
                if rank == ranks - 1
                else x[..., part]
                for x in (target, draft)
            ]
            where = dict(vocab_start=part.start, vocab_size=vocabulary)
            with_padding = distributed.accept_chain(padded[0], tree, draft_logits=padded[1], **where, **law)
            sharded = [DTensor.from_local(x[..., part], mesh, [Shard(2)], run_check=False, shape=x.shape, stride=x.stride())
                       for x in (target, draft)]  # fmt: skip
            from_dtensors = distributed.accept_chain(sharded[0], tree, draft_logits=sharded[1], **law)
            if rule == "rejection" and ranks == 2:
                starts = [0, layout.starts[1]]
                listed = distributed.accept_chain(
                    target[..., part],
                    tree,
                    draft_logits=draft[..., part],
                    vocab_start=starts,
                    vocab_size=vocabulary,
                    **law,
                )
                wrong += [] if is_same(listed, expected) else [["list of first columns", vocabulary, rule]]
            flat = torch.cat([torch.zeros(2, 1).long(), tree], 1).flatten()[[0, 4, 5, 6, 7]]  # 0 drafts, and 3
            rows = dict(draft_rows=torch.tensor([-1, 3, 4, 5, -1]), cu_nodes=torch.tensor([0, 1, 5]), max_depth=3)
            logits, drafts = target.flatten(0, 1)[[0, 4, 5, 6, 7]], draft.flatten(0, 1)
            packed = distributed.accept_chain(logits[:, part], flat, draft_logits=drafts[:, part], **rows, **law)
            whole = pass_ext.accept_chain(logits, flat, draft_logits=drafts, **rows, **law)
            wrong += [] if is_same(packed, whole) else [["packed", vocabulary, rule]]
            results = {"plain": plain, "padded": with_padding, "DTensor": from_dtensors}
            wrong += [[name, vocabulary, rule] for name, result in results.items() if not is_same(result, expected)]
    empty = target[:0, :, part]
    nothing = distributed.accept_chain(
        empty, tree[:0], draft_logits=draft[:0, :, part], rule="block", temperature=1.0, seeds=1, positions=0
    )
    wrong += [] if nothing.emitted.shape == (0, 4) else [["empty batch"]]
    tokens, _ = distributed.draft_sample(empty.flatten(0, 1), 2, mode="top")
    wrong += [] if tokens.shape == (0, 2) else [["empty rows"]]
    return {"wrong": wrong}


def disagreements(rank, ranks):
    """The messages where the last rank's arguments differ, in debug mode; and where its columns lie one to the side."""
    pass_ext.set_debug(True)
    is_last = rank == ranks - 1
    layout, messages = equal_layout(300, ranks), {}
    step = random_step(11, rule="rejection", vocabulary=300)
    for name, change in {
        "rule": lambda keywords: keywords.update(rule="traversal"),
        "seeds": lambda keywords: keywords.update(seeds=keywords["seeds"] + 1),
        "temperature": lambda keywords: keywords.update(temperature=0.25),
        "positions": lambda keywords: keywords.update(positions=keywords["positions"] + 1),
        "gather_below": lambda keywords: keywords.update(gather_below=1000),
        "the shape or dtype of target_logits": lambda keywords: None,
    }.items():
        part = slice(layout.starts[rank], layout.ends[rank])
        keywords = keywords_of(step, part.start, part.stop)
        if is_last:
            change(keywords)
        try:
            draft = None if step.draft is None else step.draft[:, part]
            other = is_last and name == "the shape or dtype of target_logits"
            target = step.target.double() if other else step.target
            distributed.accept_tree(target[:, part], *step.tree, draft_logits=draft, **keywords)
        except ValueError as error:
            messages[name] = str(error)
    try:
        start = layout.starts[rank] + is_last
        distributed.accept_tree(step.target[:, part], *step.tree, vocab_start=start, vocab_size=300)
    except ValueError as error:
        messages["vocab_start"] = str(error)
    mesh = init_device_mesh("cpu", (ranks,))
    divided = DTensor.from_local(
        step.target[:, part], mesh, [Shard(1)], run_check=False, shape=step.target.shape, stride=(300, 1)
    )
    replicated = DTensor.from_local(step.target, mesh, [Replicate()], run_check=False)
    for name, arguments in {
        "placements": dict(draft_logits=replicated, rule="rejection"),
        "too few first columns": dict(vocab_start=[0], vocab_size=300),
        "narrow drafts": dict(draft_logits=step.target[:, :3], rule="rejection"),
    }.items():
        logits = divided if name == "placements" else step.target[:, part]
        pass_ext.set_debug(False)
        try:
            distributed.accept_tree(logits, *step.tree, temperature=1.0, seeds=1, positions=0, **arguments)
        except ValueError as error:
            messages[name] = str(error)
        pass_ext.set_debug(True)
    try:
        distributed.accept_tree(
            step.target[:, part], *step.tree, vocab_start=[0, 150 if rank else 149], vocab_size=300 if rank else 299
        )
    except ValueError as error:
        messages["layout"] = str(error)
    try:
        distributed.draft_sample(step.target[:, part], 2 + is_last, mode="top")
    except ValueError as error:
        messages["k"] = str(error)
    try:
        distributed.accept_tree(step.target[:, part], *step.tree, temperature=1.0)
    except ValueError as error:
        messages["no seeds"] = str(error)
    pass_ext.set_debug(False)
    return {"messages": messages}


def death(rank, ranks):
    """The last rank ends between two calls."""
    step, layout = random_step(11, rule="rejection", vocabulary=300), equal_layout(300, ranks)
    split(step, layout, rank)
    if rank == ranks - 1:
        os._exit(3)
    try:
        split(step, layout, rank)
    except RuntimeError as error:
        return {"message": str(error)}
    return {"message": "none"}


JOBS = {job.__name__: job for job in (equality, chains, disagreements, death)}
assert set(FILTERS) >= {"temperature"}

if __name__ == "__main__":
    rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=timedelta(seconds=20)
    )
    seen = {job: JOBS[job](rank, ranks) for job in sys.argv[4].split(",")}
    (folder / f"{rank}.json").write_text(json.dumps(seen))
    if "death" not in seen:  # the group cannot be torn down without its last rank
        dist.destroy_process_group()
    # Not by way of Python's own end: a thread of gloo may still hold the last collective's tensor, and where it drops that
    # while the interpreter ends, the process aborts ("terminate called without an active exception", torch 2.13).
    os._exit(0)
