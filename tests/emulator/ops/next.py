"""``next_tree_`` on the emulator: one launch."""

from emulator import session
from emulator.ops.launching import given, pointers
from emulator.ops.launching import seeds as orders


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
    numbers = dict(rate_count=64 if rates is None else rates.numel(), first=first, vocabulary=2**31 - 1)
    _, requests, row_count = rows.shape
    if requests == 0:
        return
    numbers |= dict(requests=requests, row_count=row_count, width=path.shape[1], report_width=report.shape[1] - 5)
    if text is not None:
        numbers["text_room"] = text.shape[1]
    if offered is not None:
        numbers |= dict(slots=offered.shape[1], count=offered.shape[2])
    if left is not None:
        numbers |= dict(left_stride=left.stride(0), right_stride=right.stride(0))
        numbers |= dict(vocabulary=left.shape[0], rank=left.shape[1])
    buffers = {name: (tensor, "in") for name, tensor in read.items()}
    buffers |= {name: (tensor, "inout") for name, tensor in state.items()}
    with session(buffers, seed=next(orders)) as machine:
        machine.next_tree(numbers | pointers(buffers))


KERNELS = {"next_tree_": next_tree_}
