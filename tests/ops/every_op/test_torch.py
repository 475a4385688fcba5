"""What torch does around every op: gradients are refused where there are none, calls compile whole, run on the current stream
and replay in a CUDA graph.
"""

import pytest
import torch
from support.calls import (
    DEVICES,
    PUBLIC,
    arguments_of,
    call,
    detached,
    keywords_of,
    places_of,
    replaced,
    results_of,
    samples_of,
)
from support.faces import function_of
from torch.utils._pytree import tree_leaves, tree_map_only

import pass_ext
from pass_ext import _library
from pass_ext.testing import assert_same_bits

ON_CUDA = [op for op in PUBLIC if op not in _library.CPU_ONLY]
# lookahead_embed has gradients; these results are tokens, and so is what parameters of sampling decide about.
WITHOUT_REFUSAL = ("lookahead_embed", "accept_", "draft_sample", "shard_")
SAMPLING = ("temperature", "top_p", "min_p")


def assert_all_same(some, others):
    for one, other in zip(tree_leaves(some), tree_leaves(others), strict=True):
        if isinstance(one, torch.Tensor):
            assert_same_bits(one, other)


def copied(values):
    return tree_map_only(torch.Tensor, torch.Tensor.clone, values)


@pytest.mark.parametrize("op", [op for op in PUBLIC if not op.startswith(WITHOUT_REFUSAL)])
def test_a_wanted_gradient_is_refused(op):
    for sample in map(detached, samples_of(op)):
        for where, tensor in places_of(sample):
            if not tensor.is_floating_point() or arguments_of(op)[where[0]] in SAMPLING:
                continue
            wanting = replaced(copied(sample), where, tensor.clone().requires_grad_())
            with pytest.raises(RuntimeError, match=f"pass_ext::{op}: .*no gradient is implemented"):
                call(op, wanting)
            with torch.no_grad():
                call(op, wanting)
            with torch.inference_mode():
                call(op, copied(wanting))


def test_a_wanted_gradient_is_refused_in_words():
    """Of a packed layer's weight, of a cache that is overwritten, and where Dynamo reports it."""
    keywords = keywords_of("layer_stack", next(map(detached, samples_of("layer_stack"))))
    packed = pass_ext.layers.layer_pack(keywords["layers"], head_dim=64)
    packed.weights[3].requires_grad_()
    with pytest.raises(RuntimeError, match="layer_stack: no gradient is implemented"):
        pass_ext.layers.layer_stack(**keywords | {"layers": packed})
    commit = next(map(detached, samples_of("cache_commit_")))
    with pytest.raises(RuntimeError, match="cache_commit_: it overwrites caches and no gradient is implemented"):
        call("cache_commit_", replaced(commit, (0, 1), commit[0][1].clone().requires_grad_()))
    x, weight = torch.randn(2, 4, requires_grad=True), torch.randn(3, 4)
    with pytest.raises(Exception, match="no gradient is implemented"):
        torch.compile(pass_ext.layers.linear_rows, fullgraph=True, backend="eager")(x, weight)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", [op for op in PUBLIC if op != "layer_pack"])
def test_compiles_whole(op, device):
    if device == "cuda" and op not in ON_CUDA:
        pytest.skip(_library.CPU_ONLY[op])
    torch.compiler.reset()
    function = lambda keywords: tree_leaves(function_of(op)(**keywords))  # noqa: E731
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for sample in list(map(detached, samples_of(op, device)))[:2]:
        ours, theirs = (copied(keywords_of(op, sample)) for _ in range(2))
        assert_all_same(compiled(ours), function(theirs))
        assert_all_same(ours, theirs)


# ---- what only a GPU can show ----


def filled(held, values):
    """Writes the numbers of some tensors over those of others."""
    for one, other in zip(tree_leaves(held), tree_leaves(values), strict=True):
        if isinstance(one, torch.Tensor):
            one.copy_(other)


@pytest.mark.parametrize("op", ON_CUDA)
def test_runs_on_the_current_stream(cuda, op):
    for sample in map(detached, samples_of(op, cuda.device)):
        expected, late = results_of(op, sample), tree_map_only(torch.Tensor, torch.zeros_like, sample)
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10_000_000)  # work on another stream would read the zeros
            filled(late, sample)
            got = results_of(op, late)
        stream.synchronize()
        assert_all_same(got, expected)


@pytest.mark.parametrize("op", ON_CUDA)
def test_replays_in_a_cuda_graph(cuda, op):
    for sample in map(detached, samples_of(op, cuda.device)):
        held, graph = copied(sample), torch.cuda.CUDAGraph()
        results_of(op, held)
        with torch.cuda.graph(graph):
            results = results_of(op, held)
        for factor in (0.5, 1.5):
            filled(
                held, tree_map_only(torch.Tensor, lambda x, by=factor: x * by if x.is_floating_point() else x, sample)
            )
            graph.replay()
            assert_all_same(results, results_of(op, held))
