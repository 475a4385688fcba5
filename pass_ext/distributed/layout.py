"""``Layout``: the columns of the vocabulary that each rank of a group holds.

Sums over the vocabulary have the same bits on any number of ranks if they are made of the same slices. So before anything is
summed, columns move to the rank that holds the greater part of their slice, unless every rank's columns begin with a slice.
"""

from dataclasses import dataclass

from pass_ext.ops.shard import SLICE_COLUMNS


@dataclass(frozen=True)
class Layout:
    """Rank r holds the columns ``starts[r] : ends[r]``, in ascending order; all together are ``vocab_size``."""

    starts: tuple[int, ...]
    ends: tuple[int, ...]

    @property
    def vocab_size(self) -> int:
        """The columns of all ranks."""
        return self.ends[-1]

    @property
    def is_aligned(self) -> bool:
        """True if every rank that has columns begins with a slice."""
        pairs = zip(self.starts, self.ends, strict=True)
        return all(start % SLICE_COLUMNS == 0 or start == end for start, end in pairs)

    @property
    def slices(self) -> int:
        """The most slices that a rank holds, at least 1."""
        widths = (end - start for start, end in zip(self.starts, self.ends, strict=True))
        return max(1, -(-max(widths) // SLICE_COLUMNS))

    def aligned(self) -> "Layout":
        """The layout with each border at the nearest begin of a slice."""
        borders = [round(start / SLICE_COLUMNS) * SLICE_COLUMNS for start in self.starts]
        borders = [min(border, self.vocab_size) for border in [0, *borders[1:], self.vocab_size]]
        borders[-1] = self.vocab_size
        return Layout(tuple(borders[:-1]), tuple(borders[1:]))


def equal_parts(vocab_size: int, ranks: int) -> Layout:
    """The layout of torch.chunk, and of DTensors: equal parts, the last ones fewer or none."""
    width = -(-vocab_size // ranks)
    borders = [min(rank * width, vocab_size) for rank in range(ranks + 1)]
    return Layout(tuple(borders[:-1]), tuple(borders[1:]))


def checked_layout(shards: list[tuple[int, int, int]]) -> Layout:
    """The layout of all ranks' (first column, columns, vocabulary). Raises ValueError, which names the rank and the
    argument, if they do not divide one vocabulary. Columns behind the vocabulary are padding and left out."""
    vocabulary, expected = shards[0][2], 0
    starts, ends = [], []
    for rank, (start, columns, said) in enumerate(shards):
        if said != vocabulary:
            raise ValueError(
                f"pass_ext.distributed: vocab_size must be the same on all ranks, rank 0 has {vocabulary}, got {said} on "
                f"rank {rank}"
            )
        if min(start, vocabulary) != expected:
            raise ValueError(
                f"pass_ext.distributed: vocab_start must be {expected} on rank {rank}, where the columns of the ranks before "
                f"it end, got {start}"
            )
        end = min(start + columns, vocabulary)
        starts.append(expected)
        ends.append(max(expected, end))
        expected = ends[-1]
    if expected != vocabulary:
        raise ValueError(
            f"pass_ext.distributed: target_logits must have {vocabulary} columns on all ranks together (vocab_size), got "
            f"{expected}"
        )
    return Layout(tuple(starts), tuple(ends))
