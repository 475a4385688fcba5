"""Steps that the device runs without the host: a small model for them, and a guard against host reads."""

from contextlib import contextmanager

import torch
from support.small_models import VOCABULARY
from torch.utils._python_dispatch import TorchDispatchMode


class Mixer:
    """A model of one layer; the emulator has all ops that it needs."""

    def __init__(self, device):
        generator = torch.Generator().manual_seed(2)
        self.embedding, *self.weights = (
            torch.randn(rows, 64, generator=generator).to(device) for rows in (VOCABULARY, 64, 64, 64)
        )

    def __call__(self, rows, positions, attend, wanted):
        x = rows + (positions[:, None] * torch.arange(1, 65, device=rows.device)).float().cos()
        x = rows + attend(0, *((x @ weight / 8)[:, None] for weight in self.weights))[:, 0] * 4
        return (x if wanted is None else x[wanted]) @ self.embedding.T


class HostRead(AssertionError):
    pass


class NoHostReads(TorchDispatchMode):
    """Fails at every op whose result or shape the host has to wait for, and counts the ops."""

    READS = (
        "_local_scalar_dense",
        "item",
        "nonzero",
        "is_nonzero",
        "equal",
        "masked_select",
        "unique",
        "_unique2",
        "where",
    )

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        by_mask = name == "index" and any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
        if by_mask or (name in self.READS and not (name == "where" and len(args) == 3)):
            raise HostRead(str(func))
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))

    @classmethod
    @contextmanager
    def guarded(cls, monkeypatch):
        """The context in which the host reads nothing."""

        def refused(*_):
            raise HostRead("a tensor's numbers were read")

        with monkeypatch.context() as patch, cls() as mode:
            for name in ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "numpy", "cpu"):
                patch.setattr(torch.Tensor, name, refused)
            yield mode
