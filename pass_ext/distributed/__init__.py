"""Verification and drafting when several ranks hold the columns of the logits: tensor parallelism. docs/distributed.md.

The functions use ``torch.distributed`` as the caller has set it up. They create no process group and choose no device.
``shard_local``, ``shard_combine`` and ``shard_best`` are the ops of one rank, for an exchange of one's own.
"""

from pass_ext.distributed.accept import accept_chain, accept_tree
from pass_ext.distributed.draft import draft_sample
from pass_ext.ops.shard import shard_best, shard_combine, shard_local

__all__ = ["accept_chain", "accept_tree", "draft_sample", "shard_best", "shard_combine", "shard_local"]
