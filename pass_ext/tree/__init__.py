"""``Tree``: the shape of one request's candidates, computed on the host; packs it for the kernels, prints and draws it."""

from pass_ext.tree.tree import MAX_TREE_NODES, PackedTrees, Tree, pack_trees

__all__ = ["MAX_TREE_NODES", "PackedTrees", "Tree", "pack_trees"]
