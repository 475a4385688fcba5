"""``Tree``: the shape of one request's candidates, decided on the host; packed for the kernels, printed and drawn."""

from pass_ext.tree.tree import MOST_ROWS, PackedTrees, Tree, pack_trees

__all__ = ["MOST_ROWS", "PackedTrees", "Tree", "pack_trees"]
