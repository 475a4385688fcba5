"""Ops beside the PyTorch that does their job, for `kernels benchmark`; a verify_ method gives what PyTorch computes."""

import torch
from kernels.benchmark import Benchmark

NODES, PREFIX, HEADS, KV_HEADS, DIM, VOCABULARY = 32, 2048, 32, 8, 128, 32_000


class PassExt(Benchmark):
    """One request's step: a binary tree of 32 rows after 2,048 tokens."""

    seed = 0

    def setup(self) -> None:
        """The inputs of both workloads."""
        parents = [-1, *((node - 1) // 2 for node in range(1, NODES))]
        self.tree = self.kernel.pack_trees([parents], self.device)
        self.prefix_lens = torch.tensor([PREFIX], dtype=torch.int32, device=self.device)
        self.q = torch.randn(NODES, HEADS, DIM, device=self.device, dtype=torch.bfloat16)
        self.cache = torch.randn(2, 1, PREFIX + NODES, KV_HEADS, DIM, device=self.device, dtype=torch.bfloat16)
        self.logits = torch.randn(NODES, VOCABULARY, device=self.device)
        self.tokens = torch.randint(VOCABULARY, (NODES,), device=self.device)
        self.tokens[[2, 6]] = self.logits[[0, 2]].argmax(-1)

    def benchmark_attention(self) -> None:
        """Tree attention over the KV cache."""
        tree = self.tree
        self.out, _ = self.kernel.attention_tree(
            self.q, *self.cache, self.prefix_lens, tree.cu_nodes, tree.visible, tree.max_nodes
        )

    def verify_attention(self) -> torch.Tensor:
        """PyTorch's attention with a dense mask."""
        tree, length = self.tree, PREFIX + NODES
        mask = self.kernel.tree_mask(
            tree.visible, tree.cu_nodes, tree.max_nodes, self.prefix_lens, length, torch.bfloat16
        )
        q, k, v = (rows.transpose(-3, -2) for rows in (self.q[None], *self.cache))
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(q, k, v, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)

    def benchmark_accept(self) -> None:
        """The greedy accept step."""
        tree = self.tree
        self.out = self.kernel.accept_tree(self.logits, self.tokens, tree.parents, tree.cu_nodes, max_depth=5).emitted

    def verify_accept(self) -> torch.Tensor:
        """The arg-max of each row, and a walk on the host."""
        best, tokens, node = self.logits.argmax(-1).tolist(), self.tokens.tolist(), 0
        emitted = [best[0]]
        while children := [i for i in (2 * node + 1, 2 * node + 2) if i < NODES and tokens[i] == best[node]]:
            node = children[0]
            emitted.append(best[node])
        return torch.tensor([emitted + [-1] * (6 - len(emitted))], device=self.device)
