"""SASS, the machine code of NVIDIA GPUs: the class of an instruction, the registers that it reads, those that it writes.

    @!P1 LDG.E.128 R4,desc[UR10][R8.64+0x10]     class "global load", reads R8 and R9, writes R4 to R7

NVIDIA does not document SASS. These tables follow nvdisasm's output for sm_80 to sm_100.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

BYTES = 16
"""Bytes of an instruction, since sm_70."""

CLASSES: dict[str, tuple[str, ...]] = {
    "float": ("FADD", "FMUL", "FFMA", "FMNMX", "FMNMX3", "FSEL", "FSET", "FSETP", "FCHK", "FSWZADD", "HADD2", "HMUL2",
              "HFMA2", "HMNMX2", "HSET2", "HSETP2", "FADD2", "FMUL2", "FFMA2", "FADD32I", "FMUL32I", "FFMA32I"),
    "double": ("DADD", "DMUL", "DFMA", "DSETP", "DMNMX"),
    "special function": ("MUFU",),
    "matrix": ("HMMA", "IMMA", "BMMA", "DMMA", "HGMMA", "IGMMA", "QGMMA", "WARPGROUP"),
    "conversion": ("F2F", "F2FP", "F2I", "F2IP", "I2F", "I2FP", "I2I", "I2IP", "FRND"),
    "integer": ("IMAD", "IADD", "IADD3", "ISETP", "IMNMX", "IABS", "IDP", "LEA", "LOP3", "SHF", "SHL", "SHR", "VIADD",
                "VIMNMX", "VIMNMX3", "VIADDMNMX", "BFE", "BFI", "BREV", "BMSK", "FLO", "POPC", "SGXT", "VABSDIFF",
                "VABSDIFF4", "IADD64", "IMAD32I", "VHMNMX", "PSETP"),
    "move": ("MOV", "MOVM", "MOV32I", "SEL", "PRMT", "S2R", "CS2R", "R2P", "P2R", "R2UR", "PLOP3", "R2B", "B2R", "BMOV"),
    "uniform": ("S2UR", "REDUX", "CREDUX"),
    "constant load": ("LDC", "LDCU"),
    "global load": ("LDG", "LD"),
    "global store": ("STG", "ST"),
    "copy to shared": ("LDGSTS", "UBLKCP", "LDGDEPBAR", "DEPBAR", "UTMALDG", "UTMACCTL", "ARRIVES"),
    "shared": ("LDS", "LDSM", "STS", "STSM", "SYNCS"),
    "local load": ("LDL",),
    "local store": ("STL",),
    "atomic": ("ATOM", "ATOMG", "ATOMS", "RED", "REDG", "REDS", "QSPC"),
    "warp": ("SHFL", "VOTE", "MATCH", "WARPSYNC", "ENDCOLLECTIVE", "ELECT", "PLOP"),
    "barrier": ("BAR", "MEMBAR", "FENCE", "ERRBAR", "CGAERRBAR", "CCTL", "UCGABAR_ARV", "UCGABAR_WAIT", "ACQBULK"),
    "branch": ("BRA", "BRX", "BRXU", "JMP", "JMX", "JMXU", "CALL", "RET", "EXIT", "BSSY", "BSYNC", "BREAK", "YIELD",
               "NANOSLEEP", "KILL", "RPCMOV", "BPT", "WARPEXIT", "LEPC", "PREEXIT"),
    "nothing": ("NOP",),
}  # fmt: skip
"""Class -> its opcodes, up to their first dot."""

_CLASS_OF = {opcode: name for name, opcodes in CLASSES.items() for opcode in opcodes}

_NO_RESULT = frozenset(
    {*CLASSES["global store"], *CLASSES["branch"], *CLASSES["barrier"], *CLASSES["copy to shared"], "STS", "STSM", "STL",
     "RED", "REDG", "REDS", "WARPSYNC", "FCHK", "R2P", "PLOP3", "R2B"}
)  # fmt: skip
_REGISTER = re.compile(r"\bR(\d+)((?:\.\w+)*)")
_PREDICATE = re.compile(r"!?U?P[\dT]")


@dataclass(frozen=True)
class Instruction:
    """One instruction; ``predicate`` is "" or such as "@!P1"."""

    address: int
    opcode: str
    operands: tuple[str, ...] = ()
    predicate: str = ""

    @property
    def base(self) -> str:
        """The opcode up to its first dot."""
        return self.opcode.partition(".")[0]

    @property
    def modifiers(self) -> frozenset[str]:
        """The opcode's parts after its first dot."""
        return frozenset(self.opcode.split(".")[1:])

    @property
    def width(self) -> int:
        """Bytes that a load, store or copy moves for each lane."""
        sizes = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}
        return next((size for name, size in sizes.items() if name in self.modifiers), 4)

    @property
    def is_wide_load(self) -> bool:
        """True if the instruction loads 16 bytes or more per lane from global memory into registers."""
        return self.base == "LDG" and self.width >= 16

    def reads(self) -> set[int]:
        """Numbers of the registers that the instruction reads."""
        sources = [o for i, o in enumerate(self.operands) if i != self._result_operand()]
        return {n for operand in sources for n in self._registers(operand, self._source_width(operand))}

    def writes(self) -> set[int]:
        """Numbers of the registers that the instruction writes."""
        result = self._result_operand()
        return set() if result is None else set(self._registers(self.operands[result], self._result_width()))

    def _result_operand(self) -> int | None:
        if self.base in _NO_RESULT or self.base.endswith("SETP"):
            return None
        for i, operand in enumerate(self.operands):
            if not _PREDICATE.fullmatch(operand):  # predicates that the instruction sets come before the register
                return i if re.fullmatch(r"R\d+(\.\w+)*", operand) else None
        return None

    def _registers(self, operand: str, width: int) -> Iterable[int]:
        for number, suffix in _REGISTER.findall(operand):
            yield from range(int(number), int(number) + (2 if ".64" in suffix else width))

    def _source_width(self, operand: str) -> int:
        if "[" in operand:
            return 1  # an address; a 64-bit address has .64
        if self.base in ("STG", "ST", "STS", "STL"):
            return max(self.width // 4, 1)
        return self._arithmetic_width()

    def _result_width(self) -> int:
        if self.base in ("LDG", "LD", "LDS", "LDL", "LDC"):
            return max(self.width // 4, 1)
        if self.base == "LDSM":
            return next((int(m) for m in ("4", "2") if m in self.modifiers), 1)
        if self.base == "CS2R":
            return 1 if "32" in self.modifiers else 2
        return self._arithmetic_width()

    def _arithmetic_width(self) -> int:
        """Registers of an operand, never too few: a missed use would make loads look more independent."""
        if self.base in CLASSES["matrix"]:
            return 4
        return 2 if self.base in CLASSES["double"] or self.modifiers & {"WIDE", "F64", "64"} else 1


def class_of(instruction: Instruction) -> str:
    """The instruction's class in `CLASSES`; "uniform" for uniform arithmetic, "other" for an unknown opcode."""
    base = instruction.base
    return _CLASS_OF.get(base) or ("uniform" if base.startswith("U") or base.endswith("U") else "other")


def count_classes(instructions: Iterable[Instruction]) -> dict[str, int]:
    """Class -> number of instructions, in the order of `CLASSES`, without empty classes."""
    counts = Counter(map(class_of, instructions))
    return {name: counts[name] for name in (*CLASSES, "other") if counts[name]}


OPCODES = {
    "FADD": r"FADD", "FMUL": r"FMUL", "FFMA": r"FFMA", "MUFU": r"MUFU", "MUFU.EX2": r"MUFU\.EX2", "HMMA": r"HMMA",
    "LDG.128": r"LDG\..*\b(128|256)\b", "LDGSTS": r"LDGSTS", "LDSM": r"LDSM", "LDL": r"LDL", "STL": r"STL",
    "generic LD": r"LD(\.|$)", "BAR": r"BAR", "SHFL": r"SHFL", "ATOMS": r"ATOMS", "ATOMS, CAS loop": r"ATOMS\.CAS",
    "ATOMG": r"(ATOMG|ATOM|RED|REDG)(\.|$)", "CALL": r"CALL",
}  # fmt: skip
"""Opcodes that are counted alone: name -> pattern of the opcode's beginning."""


def count_opcodes(instructions: Iterable[Instruction]) -> dict[str, int]:
    """Name in `OPCODES` -> number of instructions, without zeros."""
    seen = Counter(instruction.opcode for instruction in instructions)
    counts = {name: sum(n for o, n in seen.items() if re.match(pattern, o)) for name, pattern in OPCODES.items()}
    return {name: count for name, count in counts.items() if count}
