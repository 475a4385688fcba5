"""The control flow of a kernel: basic blocks, and loads in flight.

    block            instructions in sequence: jumps lead to the first only, and only the last jumps
    loads in flight  wide loads issued before the result of any of them is read or overwritten, judged by registers

A call counts as one instruction; the called function is not followed. A jump through a register (a `switch`) ends a path.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field

from benchmarks.kernel_code.instructions import BYTES, Instruction

_ENDS = frozenset({"EXIT", "RET", "BRX", "BRXU", "JMX", "JMXU", "KILL"})
_JUMPS = frozenset({"BRA", "JMP"})


class ControlFlow:
    """A kernel as a graph of blocks, numbered in the order of their addresses.

    Attributes:
        blocks: the instructions of each block.
        successors: the blocks that may run after each block.
    """

    def __init__(self, instructions: list[Instruction]) -> None:
        starts = {0}
        for i, instruction in enumerate(instructions):
            if instruction.base in _JUMPS | _ENDS and i + 1 < len(instructions):
                starts.add(i + 1)
            if (target := _target(instruction)) is not None and target // BYTES < len(instructions):
                starts.add(target // BYTES)
        bounds = sorted(starts)
        self.blocks = [instructions[a:b] for a, b in zip(bounds, [*bounds[1:], len(instructions)], strict=True)]
        number = {start: block for block, start in enumerate(bounds)}
        self.successors: list[list[int]] = []
        for block, content in enumerate(self.blocks):
            last = content[-1] if content else None
            target = _target(last) if last else None
            next_blocks = [] if last and _never_falls_through(last) else [block + 1]
            if target is not None:
                next_blocks.append(number.get(target // BYTES, len(self.blocks)))
            self.successors.append([b for b in dict.fromkeys(next_blocks) if b < len(self.blocks)])
        self.predecessors: list[list[int]] = [[] for _ in self.blocks]
        for block, after in enumerate(self.successors):
            for other in after:
                self.predecessors[other].append(block)

    def _order(self, first: int, inside: Container[int]) -> tuple[list[int], set[tuple[int, int]]]:
        """Blocks reached from ``first``, each before its successors, and the edges that lead back."""
        finished: list[int] = []
        back: set[tuple[int, int]] = set()
        seen, open_blocks = {first}, {first}
        stack = [(first, iter(self.successors[first]))]
        while stack:
            block, remaining = stack[-1]
            for other in remaining:
                if other not in inside:
                    continue
                if other in open_blocks:
                    back.add((block, other))
                elif other not in seen:
                    seen.add(other)
                    open_blocks.add(other)
                    stack.append((other, iter(self.successors[other])))
                    break
            else:
                stack.pop()
                open_blocks.discard(block)
                finished.append(block)
        return finished[::-1], back

    def loads_in_flight(self, *, called: bool = True, wide: bool = True) -> tuple[int, int]:
        """Wide loads issued before the first use of any: the shortest such run and the longest; (0, 0) without wide loads.
        ``called=False`` leaves out the functions that the kernel calls; ``wide=False`` takes loads of any width.

        Where paths meet, the shortest run goes on from the path with the fewest loads in flight, the longest from the path
        with the most. A path takes each jump back at most once.
        """
        longest = max(self._runs(max, called, wide), default=0)
        return min(self._runs(min, called, wide), default=longest), longest

    def _runs(self, choose: Callable[..., _InFlight], called: bool, wide: bool) -> list[int]:
        runs: list[int] = []
        order, back = self._whole_order() if called else self._own_order()
        after: dict[int, _InFlight] = {}
        for _ in range(2):  # the second time with the loads that an earlier turn of a loop left in flight
            before = after
            after = {}
            for block in order:
                ways = [(before if (b, block) in back else after).get(b) for b in self.predecessors[block]]
                state = choose((way for way in ways if way), key=_InFlight.count, default=_InFlight(wide)).copy()
                runs += filter(None, map(state.advance, self.blocks[block]))
                after[block] = state
        return runs

    def _own_order(self) -> tuple[list[int], set[tuple[int, int]]]:
        """`_order` of the kernel without the functions that it calls."""
        return self._order(0, range(len(self.blocks)))

    def _whole_order(self) -> tuple[list[int], set[tuple[int, int]]]:
        """`_order` of the kernel, of the functions that it calls, and of code that only a register jumps to."""
        order: list[int] = []
        back: set[tuple[int, int]] = set()
        left = dict.fromkeys(range(len(self.blocks)))
        while left:
            more, more_back = self._order(next(iter(left)), left)
            order, back = order + more, back | more_back
            for block in more:
                del left[block]
        return order, back


@dataclass
class _InFlight:
    """Wide loads whose results no instruction has used yet.

    Attributes:
        wide: False if loads of any width count.
        waiting: register -> address of the load that sets it.
        issued: True if a load followed the last use of a load's result.
    """

    wide: bool
    waiting: dict[int, int] = field(default_factory=dict)
    issued: bool = False

    def count(self) -> int:
        return len(set(self.waiting.values()))

    def copy(self) -> _InFlight:
        return _InFlight(self.wide, dict(self.waiting), self.issued)

    def advance(self, instruction: Instruction) -> int:
        """The length of the run of loads that this instruction ends by using one of them; 0 if it ends none."""
        counts = instruction.is_wide_load if self.wide else instruction.base == "LDG"
        if not (self.waiting or counts):
            return 0
        written = instruction.writes()
        arrived = {self.waiting[r] for r in instruction.reads() | written if r in self.waiting}
        run = self.count() if arrived and self.issued else 0
        self.issued = counts or (self.issued and not arrived)
        self.waiting = {r: load for r, load in self.waiting.items() if load not in arrived}
        if counts:
            self.waiting |= dict.fromkeys(written, instruction.address)
        return run


def _target(instruction: Instruction) -> int | None:
    if instruction.base not in _JUMPS or not instruction.operands or not instruction.operands[-1].startswith("0x"):
        return None
    target = int(instruction.operands[-1], 16)
    return None if target == instruction.address else target  # a jump to itself fills the end of a kernel


def _never_falls_through(instruction: Instruction) -> bool:
    if instruction.predicate or instruction.base not in _JUMPS | _ENDS:
        return False
    return instruction.base in _ENDS or len(instruction.operands) == 1  # a second operand is a condition
