"""Where a kernel's instructions lead: blocks, loops, the way through them that does most work, and loads in flight.

    block            instructions that run one after the other: only its first is jumped to, only its last jumps
    loop             all blocks from which a jump back to its head can be reached without passing that head
    work path        among the ways through a loop (or a kernel) the one with most wide loads, then most arithmetic (in a loop
                     with matrix products: these alone), then fewest other instructions: a row of ordinary logits or a tile
                     that needs no mask, not the code for NaN, masks and odd addresses
    loads in flight  wide loads that are issued before the result of any of them is read or overwritten, by their registers

A call counts as one instruction: what it calls is not followed. A jump through a register (a `switch`) ends a way.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field

from benchmarks.kernel_code.instructions import ARITHMETIC, BYTES, CLASSES, Instruction, class_of

_ENDS = frozenset({"EXIT", "RET", "BRX", "BRXU", "JMX", "JMXU", "KILL"})
_JUMPS = frozenset({"BRA", "JMP"})


@dataclass(frozen=True)
class Loop:
    """Blocks of one loop; the first is its head."""

    blocks: tuple[int, ...]


class ControlFlow:
    """A kernel as a graph of blocks, which are numbered in the order of their addresses.

    Attributes:
        blocks: the instructions of each block.
        successors: of each block, the blocks that may run next.
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

    def loops(self) -> list[Loop]:
        """Every loop with one head, in the order of their heads."""
        bodies: dict[int, set[int]] = {}
        for block, after in enumerate(self.successors):
            for head in after:
                body = self._body(head, block) if head <= block else None
                if body is not None:
                    bodies.setdefault(head, set()).update(body)
        return [Loop((head, *sorted(body - {head}))) for head, body in sorted(bodies.items())]

    def _body(self, head: int, last: int) -> set[int] | None:
        """What can reach ``last`` without passing ``head``; None where that is the kernel's entry, for then it is no loop."""
        body, waiting = {head}, [last]
        while waiting:
            block = waiting.pop()
            if block in body:
                continue
            if not self.predecessors[block]:
                return None
            body.add(block)
            waiting += self.predecessors[block]
        return body

    def hottest_loop(self) -> Loop | None:
        """The smallest loop with the most matrix products, else with the most wide loads; None where no loop has any, or the
        kernel's own code has more wide loads outside of loops.
        """

        def work(blocks: Iterable[int]) -> tuple[int, int]:
            inside = self.instructions(tuple(blocks))
            products = sum(i.base in CLASSES["matrix"] for i in inside)
            return products, 0 if products else sum(i.is_wide_load or i.base == "LDGSTS" for i in inside)

        loops = self.loops()
        looped = {block for loop in loops for block in loop.blocks}
        least = work(block for block in self.own_blocks() if block not in looped)
        loops = [loop for loop in loops if work(loop.blocks) > (0, 0) and work(loop.blocks) >= least]
        return max(loops, key=lambda loop: (work(loop.blocks), -len(loop.blocks)), default=None)

    def instructions(self, blocks: tuple[int, ...] | list[int]) -> list[Instruction]:
        """All instructions of these blocks."""
        return [instruction for block in blocks for instruction in self.blocks[block]]

    def work_path(self, loop: Loop | None = None) -> list[Instruction]:
        """The work path once around the loop; without one, from the kernel's entry to an exit."""
        inside = frozenset(loop.blocks if loop else range(len(self.blocks)))
        order, back = self._order(loop.blocks[0] if loop else 0, inside)
        multiplies = any(i.base in CLASSES["matrix"] for i in self.instructions(list(inside)))
        best: dict[int, tuple[tuple[int, int, int], list[int]]] = {}
        for block in reversed(order):
            ways = [best[b] for b in self.successors[block] if (block, b) not in back and b in best]
            if (block, loop.blocks[0]) in back if loop else not ways:
                ways.append(((0, 0, 0), []))  # the way ends here
            if ways:  # else it leaves the loop
                score, onward = max(ways, key=lambda way: way[0])
                best[block] = (_sum(_score(self.blocks[block], multiplies), score), [block, *onward])
        return self.instructions(best[order[0]][1]) if order[0] in best else []

    def _order(self, first: int, inside: Container[int]) -> tuple[list[int], set[tuple[int, int]]]:
        """Blocks reached from ``first``, each before those that it leads to, and the edges that lead back."""
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

    def path_with_loads(self, count: int) -> list[Instruction]:
        """The way from the kernel's entry to an exit with exactly so many wide loads. Of several the one with most powers of
        two, then with fewest instructions; empty where there is none. Calls are not followed, and no jump back is taken.
        """
        order, back = self._own_order()
        best: dict[int, dict[int, tuple[tuple[int, int], list[int]]]] = {}
        for block in reversed(order):
            content = self.blocks[block]
            loads = sum(i.is_wide_load for i in content)
            powers = sum(i.opcode.startswith("MUFU.EX2") for i in content)
            onward = [best[b] for b in self.successors[block] if (block, b) not in back and b in best]
            ways = best[block] = {}
            for behind, (score, path) in [one for ends in onward for one in ends.items()] or [(0, ((0, 0), []))]:
                way = (score[0] + powers, score[1] - len(content)), [block, *path]
                if behind + loads <= count and way > ways.get(behind + loads, ((-1, 0), [])):
                    ways[behind + loads] = way
        return self.instructions(best[order[0]].get(count, ((0, 0), []))[1])

    def loads_in_flight(self, *, called: bool = True) -> tuple[int, int]:
        """Wide loads issued before the first use of any: in the shortest such run and in the longest, (0, 0) without any.
        Without ``called`` those in the functions that the kernel calls are left out.

        What a block finds in flight is for the shortest run that of the way with the fewest, for the longest that of the way
        with the most. A way takes each jump back at most once.
        """
        longest = max(self._runs(max, called), default=0)
        return min(self._runs(min, called), default=longest), longest

    def _runs(self, choose: Callable[..., _InFlight], called: bool) -> list[int]:
        runs: list[int] = []
        order, back = self._whole_order() if called else self._own_order()
        after: dict[int, _InFlight] = {}
        for _ in range(2):  # the second time with what an earlier turn of a loop left in flight
            before = after
            after = {}
            for block in order:
                ways = [(before if (b, block) in back else after).get(b) for b in self.predecessors[block]]
                state = choose((way for way in ways if way), key=_InFlight.count, default=_InFlight()).copy()
                runs += filter(None, map(state.advance, self.blocks[block]))
                after[block] = state
        return runs

    def own_blocks(self) -> tuple[int, ...]:
        """The kernel's blocks, without those of the functions that it calls."""
        return tuple(self._own_order()[0])

    def _own_order(self) -> tuple[list[int], set[tuple[int, int]]]:
        """`_order` of the kernel without the functions that it calls."""
        return self._order(0, range(len(self.blocks)))

    def _whole_order(self) -> tuple[list[int], set[tuple[int, int]]]:
        """`_order` of the kernel, of the functions that it calls, and of what only a register jumps to."""
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
    """Wide loads whose results nothing has used yet.

    Attributes:
        waiting: register -> address of the load that sets it.
        issued: whether a load came after the last use of one.
    """

    waiting: dict[int, int] = field(default_factory=dict)
    issued: bool = False

    def count(self) -> int:
        return len(set(self.waiting.values()))

    def copy(self) -> _InFlight:
        return _InFlight(dict(self.waiting), self.issued)

    def advance(self, instruction: Instruction) -> int:
        """The length of the run of loads that this instruction ends by using one of them; else 0."""
        if not (self.waiting or instruction.is_wide_load):
            return 0
        written = instruction.writes()
        arrived = {self.waiting[r] for r in instruction.reads() | written if r in self.waiting}
        run = self.count() if arrived and self.issued else 0
        self.issued = instruction.is_wide_load or (self.issued and not arrived)
        self.waiting = {r: load for r, load in self.waiting.items() if load not in arrived}
        if instruction.is_wide_load:
            self.waiting |= dict.fromkeys(written, instruction.address)
        return run


def _score(instructions: list[Instruction], multiplies: bool) -> tuple[int, int, int]:
    """multiplies: the loop has matrix products; then these are its arithmetic, and the rest of it is to be short."""
    wide = sum(i.is_wide_load or i.base == "LDGSTS" for i in instructions)
    arithmetic = sum(i.base in (CLASSES["matrix"] if multiplies else ARITHMETIC) for i in instructions)
    others = sum(class_of(i) != "nothing" for i in instructions) - wide - arithmetic
    return wide, arithmetic, -others


def _sum(one: tuple[int, int, int], other: tuple[int, int, int]) -> tuple[int, int, int]:
    return one[0] + other[0], one[1] + other[1], one[2] + other[2]


def _target(instruction: Instruction) -> int | None:
    if instruction.base not in _JUMPS or not instruction.operands or not instruction.operands[-1].startswith("0x"):
        return None
    target = int(instruction.operands[-1], 16)
    return None if target == instruction.address else target  # a jump to itself fills the end of a kernel


def _never_falls_through(instruction: Instruction) -> bool:
    if instruction.predicate or instruction.base not in _JUMPS | _ENDS:
        return False
    return instruction.base in _ENDS or len(instruction.operands) == 1  # a second operand is a condition
