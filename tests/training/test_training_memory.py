"""The memory of a training step: the plan of a dry run against the bytes of all tensors that are alive at once."""

import dataclasses
import weakref

import pytest
import torch
from support.training_models import SETTINGS, Letters, counting, slots_for
from torch.utils._python_dispatch import TorchDispatchMode

from pass_ext.training.common.run import Windows
from pass_ext.training.lookahead.dry_run import memory_of
from pass_ext.training.lookahead.loop import LookaheadTrainer

transformers = pytest.importorskip("transformers")


class Alive(TorchDispatchMode):
    """Counts the bytes of storages that operations made and that live; ``peak`` is the most."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._known = set()

    def add(self, tensor):
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
        found = function(*arguments, **(named or {}))
        for part in torch.utils._pytree.tree_leaves(found):
            if isinstance(part, torch.Tensor):
                self.add(part)
        return found


@pytest.mark.parametrize("loss", ["kl", "total-variation", "cross-entropy"])
@pytest.mark.parametrize(
    ("what", "sizes", "batch", "rank", "dtype"),
    [
        ("loss", dict(vocab_size=16384, hidden_size=64, num_hidden_layers=2), 1, 4, torch.float32),
        ("loss", dict(vocab_size=8192, hidden_size=32, num_hidden_layers=2), 6, 2, torch.bfloat16),
        ("kept for the gradient", dict(vocab_size=256, hidden_size=128, num_hidden_layers=4), 4, 4, torch.float32),
        ("kept for the gradient", dict(vocab_size=256, hidden_size=128, num_hidden_layers=3), 4, 4, torch.bfloat16),
        ("trained", dict(vocab_size=256, hidden_size=256, num_hidden_layers=3), 1, 100, torch.float32),
        ("model", dict(vocab_size=256, hidden_size=512, num_hidden_layers=4), 1, 2, torch.float32),
    ],
    ids=["loss", "loss of many rows", "activations", "bfloat16", "adapters", "model"],
)
def test_a_step_takes_the_memory_that_the_plan_says(what, sizes, batch, rank, dtype, loss):
    torch.manual_seed(0)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, intermediate_size=2 * sizes["hidden_size"])
    config = transformers.LlamaConfig(**sizes, **heads, tie_word_embeddings=True)
    model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False).to(dtype)
    embedding = slots_for(model, 4, adapters=1, ranks=rank).float()
    windows = Windows(Letters(), (), counting(9, 96), 1.0, 96, batch, 24, 4, 0)
    trainer = LookaheadTrainer(model, embedding, windows, dataclasses.replace(SETTINGS, loss=loss))
    plan = memory_of(trainer, model, rows=batch * 24 * 4, loss=loss)
    assert plan[what] == max(plan.values())
    with Alive() as alive:
        for parameter in (*model.parameters(), *embedding.parameters()):
            alive.add(parameter)
        trainer.run(2)
    assert alive.peak == pytest.approx(sum(plan.values()), rel=0.15)
