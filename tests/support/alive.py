"""``Alive``: the bytes of all tensors that are alive at once."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Alive(TorchDispatchMode):
    """Counts the bytes of storages that operations made and that live; ``peak`` is the most."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._known = set()

    def add(self, tensor):
        if tensor.is_meta:
            return
        if hasattr(tensor, "__tensor_flatten__") and type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            for name in tensor.__tensor_flatten__()[0]:
                self.add(getattr(tensor, name))
            return
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key, size):
        self._known.discard(key)
        self.now -= size

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        if any(one not in (torch.Tensor, torch.nn.Parameter) for one in types):
            return NotImplemented  # a quantised weight, which calls operations on its parts
        found = function(*arguments, **(named or {}))
        for part in torch.utils._pytree.tree_leaves(found):
            if isinstance(part, torch.Tensor):
                self.add(part)
        return found
