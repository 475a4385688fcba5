"""``Tree``: the shape of one request's candidates, decided on the host; packed for the kernels, printed and drawn."""

from pass_ext.tree.tree import MAX_TREE_NODES, PackedTrees, Tree, pack_trees

__all__ = ["MAX_TREE_NODES", "PackedTrees", "Tree", "pack_trees"]
