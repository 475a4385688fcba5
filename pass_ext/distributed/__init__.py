"""Verification and drafting when several ranks hold the columns of the logits: tensor parallelism. docs/distributed.md.

The functions use ``torch.distributed`` as the caller has set it up. They create no process group and choose no device.
"""

from pass_ext.distributed.accept import accept_chain, accept_tree
from pass_ext.distributed.draft import draft_sample

__all__ = ["accept_chain", "accept_tree", "draft_sample"]
