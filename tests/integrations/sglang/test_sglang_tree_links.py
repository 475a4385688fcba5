"""SGLang's links as parents: against a plain loop, padded nodes, links that make no tree."""

import pytest
import torch
from integrations.sglang.batches import links_of, random_parents

from pass_ext.integrations.sglang.verification import tree_of_links


def converted(trees, tokens):
    links = [links_of(parents) for parents in trees]
    first_child, next_sibling = (torch.tensor([pair[i] for pair in links]).view(tokens.shape) for i in (0, 1))
    return tree_of_links(tokens, first_child, next_sibling)


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5, 8, 9, 17, 64, 129])
@pytest.mark.parametrize("batch", [1, 6])
def test_parents_are_those_that_the_links_were_made_from(nodes, batch):
    generator = torch.Generator().manual_seed(nodes)
    trees = [random_parents(generator, nodes) for _ in range(batch)]
    tokens = torch.randint(1, 9, (batch, nodes), generator=generator)
    same_tokens, parents = converted(trees, tokens)
    assert parents.dtype == torch.int32
    assert parents.tolist() == trees
    assert torch.equal(same_tokens, tokens)


def test_stars_and_chains():
    """A chain of siblings and a chain of children are the longest ways to a parent."""
    for nodes in (2, 3, 33, 64, 65):
        star, chain = [-1] + [0] * (nodes - 1), list(range(-1, nodes - 1))
        assert converted([star, chain], torch.ones(2, nodes, dtype=torch.int64))[1].tolist() == [star, chain]


def test_an_empty_batch():
    empty = torch.zeros(0, 5, dtype=torch.int64)
    tokens, parents = tree_of_links(empty, empty, empty)
    assert tokens.shape == parents.shape == (0, 5)


@pytest.mark.parametrize("nodes", [2, 7, 20])
def test_padded_nodes_are_never_accepted(nodes):
    """A node without a link to it gets the token -1 under the root, and its own children stay below it."""
    generator = torch.Generator().manual_seed(nodes)
    trees = [random_parents(generator, nodes, strays=True) for _ in range(4)] + [[-1] + [-2] * (nodes - 1)]
    tokens = torch.randint(1, 9, (5, nodes), generator=generator)
    new_tokens, parents = converted(trees, tokens)
    for b, tree in enumerate(trees):
        for node, parent in enumerate(tree):
            assert int(parents[b, node]) == max(parent, 0 if node else -1)
            assert int(new_tokens[b, node]) == (-1 if parent == -2 else int(tokens[b, node]))


def test_links_backwards_in_circles_or_out_of_range_are_ignored():
    """The parents make a tree whatever the links say, so that the accept step never refuses."""
    first_child = torch.tensor([[1, 0, 2, 9], [-7, 2, 3, -1]])
    next_sibling = torch.tensor([[0, 2, 1, 4], [1, 1, -1, 3]])
    tokens = torch.arange(8).view(2, 4)
    new_tokens, parents = tree_of_links(tokens, first_child, next_sibling)
    assert parents.tolist() == [[-1, 0, 0, 0], [-1, 0, 1, 2]]
    assert new_tokens.tolist() == [[0, 1, 2, -1], [4, -1, 6, 7]]  # a sibling of the root has no parent


def test_every_set_of_links_makes_a_tree():
    generator = torch.Generator().manual_seed(0)
    for nodes in (1, 2, 5, 16):
        links = torch.randint(-3, nodes + 3, (2, 50, nodes), generator=generator)
        _, parents = tree_of_links(torch.ones(50, nodes, dtype=torch.int64), *links)
        assert bool((parents[:, 0] == -1).all())
        assert bool(((parents[:, 1:] >= 0) & (parents[:, 1:] < torch.arange(1, nodes))).all())
