"""Decoding with a tree per model call, around a Llama-like model in plain PyTorch: python examples/tree_decoding.py.

One step serves several prompts, each of which advances at its own pace:
    candidates       finds the tokens that followed earlier occurrences of the last tokens: one tree per prompt
    pack_trees       packs the trees into one batch, with visibility bits and depths
    model            reads all nodes in one call, with attention_tree; their keys and values stay outside the cache
    accept_tree      decides how far each tree agrees with the model, and adds the next token
    cache_commit_    moves keys and values of accepted nodes into the cache, in all layers
The script also decodes one token per call, without any of these, and checks that the texts are the same.

They are the same because with rule "coupled" a token is a function of its logits, the seed and its place in the text. Drafts
decide only how many tokens a call gives. The two ways add up attention in different orders, so their fp32 logits differ in
the last digits; that can change a token only where two tokens are nearly tied.
"""

import argparse
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pass_ext

VOCABULARY, WIDTH, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 192, 2, 6, 2, 64
BRANCHES, DEPTH = 4, 6  # of each tree of candidates: continuations, and tokens per continuation
linear = partial(nn.Linear, bias=False)

# ---- the model: it gets positions, and a function that attends ----


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """x [rows, heads, HEAD_DIM] with rotary position embedding."""
    frequencies = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2, device=x.device) / HEAD_DIM)
    angles = (positions[:, None] * frequencies)[:, None]
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], dim=-1)


class Layer(nn.Module):
    """Attention with grouped heads, then SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.feed_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v = (linear(WIDTH, heads * HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
        self.o = linear(HEADS * HEAD_DIM, WIDTH)
        self.gate, self.up, self.down = linear(WIDTH, 3 * WIDTH), linear(WIDTH, 3 * WIDTH), linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor, positions: Tensor, attend) -> Tensor:
        normal = self.attention_norm(x)
        q, k, v = (project(normal).unflatten(-1, (-1, HEAD_DIM)) for project in (self.q, self.k, self.v))
        x = x + self.o(attend(rotated(q, positions), rotated(k, positions), v).flatten(1))
        normal = self.feed_norm(x)
        return x + self.down(F.silu(self.gate(normal)) * self.up(normal))


class Model(nn.Module):
    """tokens, positions [rows] -> logits [rows, VOCABULARY], with attend(layer, q, k, v) -> [rows, HEADS, HEAD_DIM]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), linear(WIDTH, VOCABULARY)
        nn.init.normal_(self.embedding.weight, std=0.3)  # small: the layers' share of a row outweighs the token's own
        nn.init.normal_(self.head.weight, std=8 * WIDTH**-0.5)  # large logits: confident, like trained models

    def forward(self, tokens: Tensor, positions: Tensor, attend) -> Tensor:
        x = self.embedding(tokens)
        for i, layer in enumerate(self.layers):
            x = layer(x, positions, partial(attend, i))
        return self.head(self.norm(x))


# ---- decoding ----


def decode_plainly(model: Model, prompt: list[int], new_tokens: int, temperature: float, seed: int) -> list[int]:
    """Decodes one token per call; uses only the sampler of pass_ext."""
    device, text = model.head.weight.device, list(prompt)
    past = list(torch.empty(LAYERS, 2, 0, KV_HEADS, HEAD_DIM, device=device))

    def attend(layer, q, k, v):
        past[layer] = k, v = [torch.cat(rows) for rows in zip(past[layer], (k, v), strict=True)]
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, enable_gqa=True)[0].transpose(0, 1)

    fresh = text
    for place in range(len(prompt), len(prompt) + new_tokens):
        positions = torch.arange(place - len(fresh), place, device=device)
        logits = model(torch.tensor(fresh, device=device), positions, attend)[-1:]
        noise = dict(temperature=temperature, seeds=seed, positions=place)
        fresh = pass_ext.draft_sample(logits, 1, mode="coupled", **noise)[0][0].tolist()
        text += fresh
    return text


def candidates(text: list[int]) -> tuple[list[int], list[int]]:
    """Parents and tokens of a tree: continuations of earlier copies of the last three, two and one tokens, latest first."""
    parents, tokens, children, branches = [-1], [text[-1]], {}, 0
    for length in (3, 2, 1):
        for end in range(len(text) - 1, length - 1, -1):
            if branches == BRANCHES or text[end - length : end] != text[-length:]:
                continue
            node, before = 0, len(parents)
            for token in text[end : end + DEPTH]:
                if (node, token) not in children:
                    children[node, token] = len(parents)
                    parents.append(node)
                    tokens.append(token)
                node = children[node, token]
            branches += len(parents) > before
    return parents, tokens


def decode_by_trees(model: Model, prompts: list[list[int]], new_tokens: int, temperature: float, seeds: list[int]):
    """Returns the texts, and the mean number of tokens that a call gave to a text."""
    device, texts, ends = model.head.weight.device, list(map(list, prompts)), [len(p) + new_tokens for p in prompts]
    caches = torch.zeros(2 * LAYERS, len(prompts), max(ends) + DEPTH, KV_HEADS, HEAD_DIM, device=device)
    prefix_lens = torch.zeros(len(prompts), dtype=torch.int32, device=device)

    def call(trees, tokens):  # -> logits of all nodes, and their keys and values in the order of caches
        new = []

        def attend(layer, q, k, v):
            new.extend([k, v])
            step = prefix_lens, trees.cu_nodes, trees.visible, trees.max_nodes
            return pass_ext.attention_tree(q, caches[2 * layer], caches[2 * layer + 1], *step, k_new=k, v_new=v)[0]

        starts = prefix_lens.repeat_interleave(trees.cu_nodes.diff(), output_size=len(tokens))
        return model(tokens, starts + trees.depths, attend), new

    def commit(trees, path, num_accepted, new):
        pass_ext.cache_commit_(list(caches), prefix_lens, trees.cu_nodes, path, num_accepted, new=new)
        prefix_lens.add_(torch.where(trees.cu_nodes.diff() > 0, num_accepted + 1, 0))

    # A prompt without its last token is a chain whose nodes are all accepted; the last token is the first tree's root.
    trees = pass_ext.pack_trees([pass_ext.Tree.chain(len(prompt) - 2) for prompt in prompts], device)
    _, new = call(trees, torch.tensor([token for prompt in prompts for token in prompt[:-1]], device=device))
    path = torch.arange(trees.max_nodes, dtype=torch.int32, device=device).expand(len(prompts), -1)
    commit(trees, path, trees.cu_nodes.diff() - 1, new)

    steps = gained = 0
    while any(len(text) < end for text, end in zip(texts, ends, strict=True)):
        # A text that is finished is a padded request: a tree without nodes.
        drafts = [candidates(text) if len(text) < end else ([], []) for text, end in zip(texts, ends, strict=True)]
        trees = pass_ext.pack_trees([parents for parents, _ in drafts], device)
        tokens = torch.tensor([token for _, nodes in drafts for token in nodes], device=device)
        logits, new = call(trees, tokens)
        noise = dict(
            temperature=temperature, seeds=torch.tensor(seeds, device=device), positions=prefix_lens.long() + 1
        )
        step = pass_ext.accept_tree(logits, tokens, trees.parents, trees.cu_nodes, DEPTH, rule="coupled", **noise)
        commit(trees, step.path, step.num_accepted, new)
        for text, emitted in zip(texts, step.emitted.tolist(), strict=True):
            gain = [token for token in emitted if token >= 0]
            text += gain
            steps, gained = steps + bool(gain), gained + len(gain)
    return [text[:end] for text, end in zip(texts, ends, strict=True)], gained / steps


def main() -> None:
    """Decodes three prompts both ways, greedily and with sampling, and compares the texts."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--new-tokens", type=int, default=96)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = Model().requires_grad_(False).to(options.device)
    prompts = [torch.randint(VOCABULARY, (length,)).tolist() for length in (5, 12, 31)]
    for temperature in (0.0, 0.8):
        texts, per_call = decode_by_trees(model, prompts, options.new_tokens, temperature, seeds=[10, 11, 12])
        for prompt, text, seed in zip(prompts, texts, (10, 11, 12), strict=True):
            assert text == decode_plainly(model, prompt, options.new_tokens, temperature, seed), "the texts differ"
        print(f"temperature {temperature}: {per_call:.2f} tokens per model call, the texts of one-token decoding")


if __name__ == "__main__":
    main()
