"""Counts the instructions of each basic block of a kernel in the emulator's machine code.

-fsanitize-coverage=trace-pc puts a call at the head of every basic block. The weight of a block is the number of instructions
from that call to the next or to a jump, without those of the access checks and without moves between registers and stack.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

_LINE = re.compile(r"\s+([0-9a-f]+):\s+(\S+)\s*(.*)")
_NOTHING = ("nop", "push", "pop", "ret", "endbr", "cs", "data16", "leave")


def weights_of(library: Path) -> dict[int, int]:
    """Address after the call at a block's head -> number of instructions of the block."""
    listing = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", str(library)], capture_output=True, text=True, check=True
    ).stdout
    return weights_in(listing.splitlines())


def weights_in(listing: list[str]) -> dict[int, int]:
    """`weights_of` for the lines of objdump."""
    weights: dict[int, int] = {}
    block: int | None = None
    begins, last = False, 0
    for line in listing:
        if not (match := _LINE.match(line)):
            block = None if line.endswith(">:") else block
            continue
        address, opcode, operands = int(match[1], 16), match[2], match[3]
        if begins:
            block, begins, last = address, False, 0
            weights[block] = 0
        if opcode == "call" and "__sanitizer_cov_trace_pc" in operands:
            begins = True
        elif block is not None and opcode == "call" and "__tsan_" in operands:
            weights[block] -= last  # the instruction that sets its argument
            last = 0
        elif block is not None:
            last = int(_counts(opcode, operands))
            weights[block] += last
            if opcode in ("jmp", "ret"):
                block = None
    return weights


def _counts(opcode: str, operands: str) -> bool:
    if opcode.startswith(_NOTHING) or (opcode == "call" and "emulator" in operands):
        return False
    return not (opcode.startswith("mov") and ("(%rsp)" in operands or "(" not in operands))
