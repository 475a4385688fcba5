"""``next_rows_`` on the emulator: one launch."""

from emulator import session
from emulator.ops.launching import given, pointers
from emulator.ops.launching import seeds as orders


def next_rows_(
    rows, lengths, prefix_lens, report, limits, parents, nodes, emitted, path, num_accepted, status, groups, offered,
    scores, left, right, temperature, top_k, top_p, min_p, seeds,
) -> None:  # fmt: skip
    _, requests, row_count = rows.shape
    if requests == 0:
        return
    numbers = dict(requests=requests, row_count=row_count, nodes=nodes, width=path.shape[1])
    numbers["report_width"] = report.shape[1] - 3
    if offered is not None:
        numbers |= dict(slots=offered.shape[1], count=offered.shape[2], judged_nodes=groups.numel())
    if left is not None:
        numbers |= dict(left_stride=left.stride(0), right_stride=right.stride(0))
        numbers |= dict(vocabulary=left.shape[0], rank=left.shape[1])
    read = given(
        limits=limits, parents=parents, emitted=emitted, path=path, num_accepted=num_accepted, status=status,
        groups=groups, offered=offered, scores=scores, left=left, right=right, temperature=temperature, top_k=top_k,
        top_p=top_p, min_p=min_p, seeds=seeds,
    )  # fmt: skip
    buffers = {name: (tensor, "in") for name, tensor in read.items()}
    state = dict(rows=rows, lengths=lengths, prefix_lens=prefix_lens, report=report)
    buffers |= {name: (tensor, "inout") for name, tensor in state.items()}
    with session(buffers, seed=next(orders)) as machine:
        machine.next_rows(numbers | pointers(buffers))


KERNELS = {"next_rows_": next_rows_}
