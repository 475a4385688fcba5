"""A decoder in plain PyTorch under pass_ext.generate: python examples/plain_decoder.py.

A model of your own (pass_ext.PackedModel) has two parts, and calls attend once per layer:
    embedding                                  the table of input embeddings, [V, d]
    model(rows, positions, attend, wanted)     rows [N, d] of all prompts' steps, back to back -> logits [N or len(wanted), V]
    attend(layer, q, k, v)                     q [N, heads, D], k and v [N, KV heads, D] -> [N, heads, D]
generate handles caches, trees, masks and padding. The script writes the same text with each method, and prints the tokens
per model call.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pass_ext

VOCABULARY, WIDTH, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 192, 2, 6, 2, 64


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """x [N, heads, HEAD_DIM] with rotary position embedding."""
    frequencies = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2, device=x.device) / HEAD_DIM)
    angles = (positions[:, None] * frequencies)[:, None]
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], dim=-1)


class Layer(nn.Module):
    """Attention with grouped heads, then SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        self.gate_up, self.down = nn.Linear(WIDTH, 6 * WIDTH, bias=False), nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, positions: Tensor, layer: int, attend) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (-1, HEAD_DIM)).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        x = x + self.out(attend(layer, rotated(q, positions), rotated(k, positions), v).flatten(1))
        gate, up = self.gate_up(self.norms[1](x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Decoder(nn.Module):
    """A PackedModel: ``embedding`` and ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.3)  # small: the layers' share of a row outweighs the token's own
        nn.init.normal_(self.head.weight, std=8 * WIDTH**-0.5)  # large logits: confident, like trained models

    def forward(self, rows: Tensor, positions: Tensor, attend, wanted: Tensor | None) -> Tensor:
        for i, layer in enumerate(self.layers):
            rows = layer(rows, positions, i, attend)
        return self.head(self.norm(rows if wanted is None else rows[wanted]))


def main() -> None:
    """Decodes three prompts greedily and with sampling, by three methods."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--new-tokens", type=int, default=96)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = Decoder().requires_grad_(False).to(options.device)
    prompts = torch.randint(VOCABULARY, (3, 16), device=options.device)
    mask = torch.ones_like(prompts)
    mask[0, :11] = mask[1, :4] = 0  # padding: the prompts have 5, 12 and 16 tokens
    slots = pass_ext.LookaheadEmbedding.from_table(
        3, model.embedding.weight
    )  # untrained: bad guesses cost rows, not the text
    methods = {
        "plain": pass_ext.Plain(),
        "n-grams": pass_ext.NGram(longest=3, shortest=1, branches=2),
        "look-ahead and n-grams": pass_ext.PaSS(slots, rows=12, ngram=pass_ext.NGram(longest=3, shortest=1)),
    }
    for temperature in (0.0, 0.8):
        sampling = dict(temperature=temperature, seeds=[10, 11, 12])
        texts = []
        for name, method in methods.items():
            result = pass_ext.generate(
                model, prompts, method, max_new_tokens=options.new_tokens, attention_mask=mask, **sampling
            )
            texts.append(result.sequences)
            assert torch.equal(texts[0], texts[-1]), "the texts differ"
            per_call = result.stats.tokens / result.stats.model_calls / len(prompts)
            print(f"temperature {temperature}, {name}: {per_call:.2f} tokens per model call and text")


if __name__ == "__main__":
    main()
