"""Calls ops of an installed pass_ext beside their specification, and prints what it found: `python smoke.py [thorough]`."""

import json
import sys

import torch

import pass_ext.distributed
import pass_ext.drafting
from pass_ext import layers, reference

random = torch.Generator().manual_seed(0)
table, lookahead = (torch.randn(rows, 40, generator=random, requires_grad=True) for rows in (11, 3))
ids = torch.randint(-3, 11, (4, 5), generator=random)
weight = torch.randn(4, 5, 40, generator=random)
calls = [reference.lookahead_embed, pass_ext.lookahead_embed]
if "thorough" in sys.argv:
    torch.library.opcheck(torch.ops.pass_ext.lookahead_embed.default, (ids, table, lookahead))
    calls.append(torch.compile(pass_ext.lookahead_embed, fullgraph=True, backend="aot_eager"))
results = []
for call in calls:
    out = call(ids, table, lookahead)
    results.append((out, *torch.autograd.grad((out * weight).sum(), (table, lookahead))))
for ours in results[1:]:
    assert torch.equal(ours[0], results[0][0]), "forward"
    for gradient, expected in zip(ours[1:], results[0][1:], strict=True):
        torch.testing.assert_close(gradient, expected)
target, noise = torch.randn(4, 5, 100, generator=random) * 2, torch.randn(4, 4, 100, generator=random)
keys = {"seeds": torch.arange(4), "positions": torch.arange(4) + 7, "temperature": torch.full((4,), 0.9)}
draft = target[:, :4] + noise * 0.3
drafted = [
    module.draft_sample(draft[:, 0], 3, top_k=torch.full((4,), 9).int(), **keys)[0] for module in (reference, pass_ext)
]
assert torch.equal(*drafted), "draft_sample"
tokens = draft.argmax(-1)
for rule in pass_ext.RULES:
    arguments = (target, tokens), {"rule": rule, "draft_logits": draft, **keys}
    expected, ours = (module.accept_chain(*arguments[0], **arguments[1]) for module in (reference, pass_ext))
    assert torch.equal(expected.emitted, ours.emitted), rule
trees = pass_ext.pack_trees([pass_ext.Tree.from_branching((2, 2)), None, pass_ext.Tree.chain(3)])
visible, depths = reference.tree_prepare(trees.parents, trees.cu_nodes, trees.max_nodes)
assert torch.equal(visible, trees.visible) and torch.equal(depths, trees.depths), "tree_prepare"
caches, prefix_lens = torch.randn(2, 3, 30, 2, 64, generator=random), torch.tensor([20, 0, 5]).int()
q, new = torch.randn(11, 6, 64, generator=random), list(torch.randn(2, 11, 2, 64, generator=random))
step = (prefix_lens, trees.cu_nodes, trees.visible, trees.max_nodes)
ours, exact = (module.attention_tree(q, *caches, *step, k_new=new[0], v_new=new[1]) for module in (pass_ext, reference))
torch.testing.assert_close(ours, tuple(part.float() for part in exact))
merged, exact = (module.attention_merge(*ours, *ours) for module in (pass_ext, reference))
torch.testing.assert_close(merged, tuple(part.float() for part in exact))
path, accepted = torch.tensor([[0, 2, 6], [-1, -1, -1], [0, 1, -1]]).int(), torch.tensor([2, 0, 1]).int()
kept = [list(caches.clone()) for _ in range(2)]
for module, own in zip((pass_ext, reference), kept, strict=True):
    module.cache_commit_(own, prefix_lens, trees.cu_nodes, path, accepted, new=new)
assert all(map(torch.equal, *kept)) and not torch.equal(kept[0][0], caches[0]), "cache_commit_"
few = (torch.randn(3, 40, generator=random).bfloat16(), table.detach().bfloat16(), torch.ones(11).bfloat16())
torch.testing.assert_close(layers.linear_rows(*few), reference.linear_rows(*few))
has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
status = pass_ext.status()
without_kernel = [
    [op, key]
    for op in pass_ext._library.op_names()
    for key in ("CPU", "CUDA", "Meta")
    if not has_kernel(f"pass_ext::{op}", key)
]
print(
    json.dumps(
        {
            "python": ".".join(map(str, sys.version_info[:2])),
            "torch": torch.__version__,
            "torch_cuda": torch.version.cuda,
            "file": pass_ext.__file__,
            "isa": status.cpu_isa,
            "cuda_loaded": status.cuda_loaded,
            "reason": status.cuda_reason,
            "without_kernel": without_kernel,
            "context": torch.cuda.is_initialized(),
        }
    )
)
assert without_kernel == []
