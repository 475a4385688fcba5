"""Every op once per type and rule, on small inputs, against the CPU: the first test to run on a new machine."""

import pytest
import torch
from support.samples import SAMPLES
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from pass_ext import _library
from pass_ext.ops.quantize import MOST_OF_CODES
from tools.op_families import family_of

LOGITS = (torch.bfloat16, torch.float16, torch.float32)
FAMILIES = {op: family_of(op) for op in SAMPLES}
CASES = [(op, dtype) for op in SAMPLES for dtype in (LOGITS if FAMILIES[op] in ("accept", "draft") else (None,))]


def label(case):
    """The id of a case, of_accept-accept_chain-float16: pytest -k of_accept picks a family."""
    op, dtype = case
    return "-".join(filter(None, (f"of_{FAMILIES[op]}", op, str(dtype or "").removeprefix("torch."))))


@pytest.mark.parametrize("case", CASES, ids=label)
def test_same_as_on_the_cpu(backend, case):
    op, dtype = case
    if op in _library.CPU_ONLY and not backend.name.startswith("cpu"):
        pytest.skip(_library.CPU_ONLY[op])
    if op in ("shard_local", "shard_combine") and not backend.name.startswith("cpu"):
        pytest.skip("their integers hold the bits of sums in another order: test_shard_kernels.py compares the numbers")
    torch.manual_seed(0)
    overload = getattr(torch.ops.pass_ext, op).default

    def given(tensor):
        tensor = tensor.detach().clone()
        return tensor.to(dtype) if dtype and tensor.is_floating_point() and tensor.dim() > 1 else tensor

    for arguments in SAMPLES[op]("cpu"):
        if op == "lookahead_embed" and arguments[1].dtype == torch.uint8 and not backend.name.startswith("cpu"):
            continue  # packed tables are for the CPU
        there = tree_map_only(torch.Tensor, given, arguments)
        here = tree_map_only(torch.Tensor, lambda tensor: given(tensor).to(backend.device), arguments)
        with _disable_current_modes():
            expected = overload(*there)
        actual = overload(*here)
        # Arguments too: some are written to.
        for value, want in zip(tree_leaves((actual, here)), tree_leaves((expected, there)), strict=True):
            if isinstance(want, torch.Tensor):
                is_exact = not want.is_floating_point() or want.dtype in MOST_OF_CODES
                eps = 0.0 if is_exact else torch.finfo(want.dtype).eps
                near = dict(rtol=2 * max(eps, 1e-6), atol=max(eps, 1e-5)) if eps else dict(rtol=0, atol=0)
                torch.testing.assert_close(value.cpu(), want, **near, equal_nan=True)
