"""EarlyFlag: each request of a batch stops by its own rows alone."""

import torch

from pass_ext.decoding.drafting.early_stop import EarlyFlag


def test_each_request_ends_by_itself():
    flag = EarlyFlag(3, 4, torch.device("cpu"))
    flag.update(
        torch.tensor([False, True, False, True]), torch.tensor([0, 1, 1, 2]), 1
    )  # any row of a request is enough
    assert [flag.may_go_on(b, 1) for b in range(3)] == [False, True, True]
    flag.update(torch.tensor([True, False, True]), torch.tensor([0, 1, 2]), 2)
    assert [flag.may_go_on(b, 2) for b in range(3)] == [False, False, True]
    assert [flag.may_go_on(b, 1) for b in range(3)] == [False, True, True]
    flag.update(torch.tensor([True, True]), torch.tensor([0, 1]), 3)  # a request without rows does not go on
    assert not any(flag.may_go_on(b, 3) for b in range(3))
    tokens = torch.arange(6).view(3, 2)
    assert flag.read(tokens) == ([[0, 1], [2, 3], [4, 5]], [1, 2, 3])
