"""``next_rows_`` and ``next_tree_`` on the emulator: one launch each."""

from emulator import session
from emulator.ops.launching import given, pointers
from emulator.ops.launching import seeds as orders


def next_rows_(
    rows, lengths, prefix_lens, report, limits, parents, nodes, emitted, path, num_accepted, status, groups, offered,
    scores, left, right, text, temperature, top_k, top_p, min_p, seeds,
) -> None:  # fmt: skip
    state = given(rows=rows, lengths=lengths, prefix_lens=prefix_lens, report=report, text=text)
    read = given(
        limits=limits, fixed_parents=parents, emitted=emitted, path=path, num_accepted=num_accepted, status=status,
        groups=groups, offered=offered, scores=scores, left=left, right=right, temperature=temperature, top_k=top_k,
        top_p=top_p, min_p=min_p, seeds=seeds,
    )  # fmt: skip
    numbers = dict(vocabulary=2**31 - 1, nodes=nodes, judged_nodes=0 if groups is None else groups.numel())
    _run("next_rows", state, read, numbers, report_numbers=3)


def next_tree_(
    rows, parents, lengths, prefix_lens, report, limits, emitted, path, num_accepted, status, rates, price, offered,
    scores, first, left, right, text, temperature, top_k, top_p, min_p, seeds,
) -> None:  # fmt: skip
    state = given(rows=rows, parents=parents, lengths=lengths, prefix_lens=prefix_lens, report=report, text=text)
    read = given(
        limits=limits, emitted=emitted, path=path, num_accepted=num_accepted, status=status, rates=rates, price=price,
        offered=offered, scores=scores, left=left, right=right, temperature=temperature, top_k=top_k, top_p=top_p,
        min_p=min_p, seeds=seeds,
    )  # fmt: skip
    numbers = dict(rate_count=rates.numel(), first=first, vocabulary=2**31 - 1)
    _run("next_tree", state, read, numbers, report_numbers=5)


def _run(name, state, read, numbers, *, report_numbers) -> None:
    """state: written in place."""
    _, requests, row_count = state["rows"].shape
    if requests == 0:
        return
    numbers |= dict(requests=requests, row_count=row_count, width=read["path"].shape[1])
    numbers["report_width"] = state["report"].shape[1] - report_numbers
    if "text" in state:
        numbers["text_room"] = state["text"].shape[1]
    if "offered" in read:
        numbers |= dict(slots=read["offered"].shape[1], count=read["offered"].shape[2])
    if "left" in read:
        left, right = read["left"], read["right"]
        numbers |= dict(left_stride=left.stride(0), right_stride=right.stride(0))
        numbers |= dict(vocabulary=left.shape[0], rank=left.shape[1])
    buffers = {name: (tensor, "in") for name, tensor in read.items()}
    buffers |= {name: (tensor, "inout") for name, tensor in state.items()}
    with session(buffers, seed=next(orders)) as machine:
        getattr(machine, name)(numbers | pointers(buffers))


KERNELS = {"next_rows_": next_rows_, "next_tree_": next_tree_}
