"""Made-up batches as SGLang hands them to ``eagle_sample``: trees by links, logits, parameters of requests; and what a plain
loop over parents and tokens makes of an accepted path.
"""

from types import SimpleNamespace

import torch

TOP_K_ALL = 1 << 30  # SGLang's number for "no top-k"
SIGNATURE = (  # of eagle_sample in SGLang 0.5.23, without the types
    "(verify_input, batch, logits_output, grammar_mask=None, uno_target_max_top_k=None, "
    "*, watermark_state=None, watermark_full_mask=True)"
)


def without_types(signature):
    """The signature as text, names and defaults alone."""
    empty = signature.empty
    parameters = [p.replace(annotation=empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=empty))


def links_of(parents):
    """(first child, next sibling) of each node, -1 for none; a parent of -2 leaves the node without a link to it."""
    child, sibling = [-1] * len(parents), [-1] * len(parents)
    for node in reversed(range(1, len(parents))):
        if parents[node] >= 0:
            sibling[node] = child[parents[node]]
            child[parents[node]] = node
    return child, sibling


def depth_of(parents):
    """The depth of the deepest node."""
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return max(depths)


def random_parents(generator, nodes, strays=False):
    """A tree of ``nodes`` nodes; with ``strays`` about a fifth of them is padding, which nothing links to."""
    parents = [-1]
    for node in range(1, nodes):
        linked = [i for i in range(node) if parents[i] > -2]
        parent = linked[int(torch.randint(len(linked), (), generator=generator))]
        parents.append(-2 if strays and torch.rand((), generator=generator) < 0.2 else parent)
    return parents


def chain_parents(nodes):
    return list(range(-1, nodes - 1))


def sampling_info(batch, device="cpu", temperature=None, top_k=None, top_p=None, min_p=None, seeds=None):
    """The fields of a ``SamplingBatchInfo`` that verification reads. A temperature of 0 becomes top_k 1 at temperature 1."""
    temperature, top_k = list(temperature or [0.0] * batch), list(top_k or [TOP_K_ALL] * batch)
    top_p, min_p = list(top_p or [1.0] * batch), list(min_p or [0.0] * batch)
    for i, warm in enumerate(temperature):
        if warm == 0.0:
            temperature[i], top_k[i] = 1.0, 1
    return SimpleNamespace(
        temperatures=torch.tensor(temperature, dtype=torch.float32, device=device).view(-1, 1),
        top_ks=torch.tensor(top_k, dtype=torch.int32, device=device),
        top_ps=torch.tensor(top_p, dtype=torch.float32, device=device),
        min_ps=torch.tensor(min_p, dtype=torch.float32, device=device),
        is_all_greedy=all(k <= 1 for k in top_k),
        is_any_greedy=any(k <= 1 for k in top_k),
        need_top_k_sampling=any(k != TOP_K_ALL for k in top_k),
        need_top_p_sampling=any(p != 1.0 for p in top_p),
        need_min_p_sampling=any(p > 0.0 for p in min_p),
        sampling_seed=None if seeds is None else torch.tensor(seeds, dtype=torch.int64, device=device),
        acc_additive_penalties=None,
        acc_scaling_penalties=None,
        logit_bias=None,
        has_watermark_candidates=False,
    )


def verify_input(trees, tokens, max_tree_depth, topk=-1, draft_probs=None):
    """The fields of an ``EagleVerifyInput`` that verification reads; ``trees``: parents of each request."""
    batch, nodes = tokens.shape
    links = [links_of(parents) for parents in trees]
    device = tokens.device
    return SimpleNamespace(
        draft_token=tokens.flatten(),
        draft_token_num=nodes,
        retrieve_index=torch.arange(batch * nodes, device=device).view(batch, nodes),
        retrieve_next_token=torch.tensor([child for child, _ in links], device=device),
        retrieve_next_sibling=torch.tensor([sibling for _, sibling in links], device=device),
        max_tree_depth=max_tree_depth,
        tree_topk=topk,
        draft_probs=draft_probs,
    )


def schedule_batch(info, seq_lens, device="cpu"):
    """The fields of a ``ScheduleBatch`` that verification reads."""
    return SimpleNamespace(
        device=device,
        forward_mode=SimpleNamespace(is_idle=lambda: False),
        seq_lens=torch.as_tensor(seq_lens, dtype=torch.int64, device=device),
        sampling_info=info,
        return_logprob=False,
    )


def greedy_steps(logits, tokens, trees, max_tree_depth):
    """(predict, tokens per request, accept_index) of greedy verification, by a plain loop."""
    batch, nodes = tokens.shape
    best = logits.view(batch, nodes, -1).argmax(-1)
    predict = torch.zeros(batch * nodes, dtype=torch.int32)
    accept_index = torch.full((batch, max_tree_depth), -1, dtype=torch.int32)
    counts = torch.ones(batch, dtype=torch.int32)
    for b, parents in enumerate(trees):
        node, depth = 0, 0
        while True:
            accept_index[b, depth], predict[b * nodes + node] = b * nodes + node, best[b, node]
            matches = [i for i in range(1, nodes) if parents[i] == node and tokens[b, i] == best[b, node]]
            if not matches or depth + 1 == max_tree_depth:
                break
            node, depth = matches[0], depth + 1
        counts[b] = depth + 1
    return predict, counts, accept_index
