"""The columns of logits: ``LogitShards``, divided among ranks; and a target's beside its draft's, which may have others.

Under tensor parallelism transformers hands out columns if the plan says ``lm_head: colwise``; with ``colwise_gather_output``
every rank has all of them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from pass_ext.ops.accept import AcceptResult, accept_tree
from pass_ext.ops.draft import draft_sample


class LogitShards:
    """The columns of a vocabulary on the ranks of a group, in equal parts, as torch.chunk divides.

    Args:
        group: the process group.
        vocab_size: the columns of all ranks.
        table_part: this rank's rows of the embedding table, where the same ranks hold it in equal parts too.
    """

    def __init__(self, group: dist.ProcessGroup, vocab_size: int, table_part: Tensor | None = None) -> None:
        self.group, self.vocab_size, self.table_part = group, vocab_size, table_part
        self.start = min(dist.get_rank(group) * -(-vocab_size // dist.get_world_size(group)), vocab_size)

    def hold(self, logits: Tensor) -> bool:
        """True if the logits are columns of this rank, not those of all."""
        return logits.shape[-1] < self.vocab_size

    def accept_tree(
        self,
        logits: Tensor,
        tokens: Tensor,
        parents: Tensor,
        cu_nodes: Tensor,
        max_depth: int,
        *,
        draft_logits: Tensor | None = None,
        **keywords: Any,
    ) -> AcceptResult:
        """``pass_ext.accept_tree`` on this rank's columns of the target's logits, or on those of all ranks; the draft's may be
        either too."""
        from pass_ext import distributed

        if not self.hold(logits):
            return accept_tree(logits, tokens, parents, cu_nodes, max_depth, draft_logits=draft_logits, **keywords)
        if draft_logits is not None and not self.hold(draft_logits):
            draft_logits = draft_logits[:, self.start : self.start + logits.shape[-1]]
        return distributed.accept_tree(
            logits, tokens, parents, cu_nodes, max_depth, draft_logits=draft_logits, **self._where(), **keywords
        )

    def draft_sample(self, logits: Tensor, k: int, **keywords: Any) -> tuple[Tensor, Tensor]:
        """``pass_ext.draft_sample`` on this rank's columns, or on those of all ranks."""
        from pass_ext import distributed

        if not self.hold(logits):
            return draft_sample(logits, k, **keywords)
        return distributed.draft_sample(logits, k, **self._where(), **keywords)

    def whole(self, logits: Tensor) -> Tensor:
        """The columns of all ranks; one exchange, unless they are there already."""
        if not self.hold(logits):
            return logits
        rows, most = logits.flatten(0, -2), -(-self.vocab_size // dist.get_world_size(self.group))
        padded = F.pad(rows, (0, most - rows.shape[1])).contiguous()
        parts = padded.new_empty(dist.get_world_size(self.group), *padded.shape)
        dist.all_gather(
            list(parts.view(len(parts), -1).view(torch.uint8)), padded.view(-1).view(torch.uint8), group=self.group
        )
        columns = parts.transpose(0, 1).flatten(1)[:, : self.vocab_size]
        return columns.reshape(*logits.shape[:-1], self.vocab_size)

    def whole_rows(self, part: Tensor) -> Tensor:
        """The rows of all ranks, from a matrix of this rank's; one exchange."""
        return self.whole(part.t()).t().contiguous()

    def share(self, numbers: Tensor | None) -> None:
        """Overwrites numbers, such as fresh seeds, by those of the group's first rank."""
        if numbers is not None:
            dist.broadcast(numbers, group_src=0, group=self.group)

    def _where(self) -> dict[str, Any]:
        return {"group": self.group, "vocab_size": self.vocab_size}


def logit_shards_of(model: Any) -> LogitShards | None:
    """The shards of a model whose output weights are divided by rows; None for a model on one rank."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    weight = getattr(head, "weight", None)
    placements = getattr(weight, "placements", ())
    dims = [i for i, placement in enumerate(placements) if placement.is_shard(0)]
    if weight is None or len(dims) != 1:
        return None
    group = weight.device_mesh.get_group(dims[0])
    return LogitShards(group, weight.shape[0], _table_part(model.get_input_embeddings().weight, group, weight.shape[0]))


def _table_part(table: Any, group: dist.ProcessGroup, vocab_size: int) -> Tensor | None:
    """This rank's rows of a table that the group holds in equal parts; None for another table."""
    placements: Any = getattr(table, "placements", ())
    if len(placements) != 1 or not placements[0].is_shard(0) or table.shape[0] != vocab_size:
        return None
    if dist.get_process_group_ranks(table.device_mesh.get_group(0)) != dist.get_process_group_ranks(group):
        return None
    part: Tensor = table.to_local()
    return part


# ---- a target and its draft ----

MOST_PADDING = 1024
"""The most rows by which two tables of one tokenizer may differ: tables are padded to round numbers."""


def check_pair(target: Any, draft: Any) -> None:
    """Refuses vocabularies whose sizes differ by more than padding."""
    target_size, draft_size = target.table.shape[0], draft.table.shape[0]
    if abs(target_size - draft_size) > MOST_PADDING:
        raise ValueError(
            f"the draft model's vocabulary has {draft_size} tokens, the target's {target_size}: more than padding, so they do "
            "not share a tokenizer, and the draft's tokens mean nothing to the target"
        )


def check_tokenizers(target: Any, draft: Any) -> None:
    """Refuses tokenizers that disagree about the token of any number; either may have more tokens at its end."""
    of_target, of_draft = ({number: token for token, number in t.get_vocab().items()} for t in (target, draft))
    wrong = sorted(number for number in of_target.keys() & of_draft.keys() if of_target[number] != of_draft[number])
    if wrong:
        number = wrong[0]
        raise ValueError(
            f"the draft model's tokenizer is another one: {number} is token {of_target[number]!r} for the target and "
            f"{of_draft[number]!r} for the draft ({len(wrong)} of {len(of_target)} tokens differ)"
        )
    missing = sorted(of_target.keys() - of_draft.keys())
    if len(missing) > MOST_PADDING:
        raise ValueError(
            f"the draft model's tokenizer is another one: it has no token {missing[0]} ({of_target[missing[0]]!r} for the "
            f"target; {len(missing)} are missing)"
        )


def in_vocabulary(logits: Tensor, vocabulary: int, device: torch.device) -> Tensor:
    """Cuts padding off the logits, or pads them with -inf -> ``[R, V of the target]`` on ``device``."""
    if logits.shape[1] > vocabulary:
        logits = logits[:, :vocabulary]
    elif logits.shape[1] < vocabulary:
        logits = F.pad(logits, (0, vocabulary - logits.shape[1]), value=float("-inf"))
    return logits.to(device)
