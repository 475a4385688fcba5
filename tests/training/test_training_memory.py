"""The memory of a training step: the plan of a dry run against the bytes of all tensors that are alive at once."""

import dataclasses

import pytest
import torch
from support.alive import Alive
from support.training_models import SETTINGS, Letters, counting, slots_for

from pass_ext.training.common.run import Windows
from pass_ext.training.lookahead.dry_run import memory_of
from pass_ext.training.lookahead.loop import LookaheadTrainer

transformers = pytest.importorskip("transformers")


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
