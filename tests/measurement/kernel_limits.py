"""Limits of each kernel's machine code: one limit a line, with its reason.

The first line that matches a kernel, an architecture and a number counts, so "*" comes last. A change that makes a number
smaller lowers its limit here too. Kernels have the names that `python -m benchmarks.kernel_code` prints; * and ? stand for any
text and any character.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from benchmarks.kernel_code.control_flow import ControlFlow
from benchmarks.kernel_code.disassembler import Code, Kernel
from benchmarks.kernel_code.instructions import Instruction, count_opcodes


@dataclass(frozen=True)
class Limit:
    """One line of the table. ``number``, of `RESOURCES` or `COUNTS`, is at most ``bound``; "loads in flight" at least."""

    kernel: str
    architectures: str
    number: str
    bound: int
    reason: str


RESOURCES: dict[str, Callable[[Kernel], int]] = {
    "registers": lambda kernel: kernel.registers,
    "stack": lambda kernel: kernel.stack,
    "code": lambda kernel: kernel.code,
}
"""Numbers that cuobjdump prints for every kernel."""

LOADS = "loads in flight"
COUNTS: dict[str, Callable[[list[Instruction]], int]] = {
    "local accesses": lambda code: sum(instruction.base in ("LDL", "STL") for instruction in code),
    "atomics that are CAS loops": lambda code: count_opcodes(code).get("ATOMS, CAS loop", 0),
    LOADS: lambda code: ControlFlow(code).loads_in_flight(called=False)[1],
}
"""Numbers read from the instructions, so only for the kernels and architectures that a line names."""

ALL = "sm_80 sm_90 sm_100"

# fmt: off
LIMITS = (
    # Stack: 0 is right for every kernel. The other limits are today's numbers, so that they can only shrink.
    Limit("accept_kernel<coupled, beforehand>", ALL, "stack", 0, "the default rule: one warp, on the scan's results"),
    Limit("accept_kernel<kseq, beforehand>", ALL, "stack", 528, "the same as below, and the search for rho"),
    Limit("accept_kernel*beforehand>", ALL, "stack", 448, "arguments by address, and saved registers: walk and race"),
    Limit("accept_step_kernel<coupled>", ALL, "stack", 288, "the block that finishes a row; the walk has none"),
    Limit("accept_step_kernel*", ALL, "stack", 464, "the same, and registers that walk and race save"),
    Limit("accept_kernel*", ALL, "stack", 848, "the same, and the description of a row with its shortlist; once a step"),
    Limit("draft_kernel*", ALL, "stack", 536, "arguments by address, and saved registers: a row, a race with several winners"),
    Limit("scan_rows_kernel<DraftSource>", ALL, "stack", 632, "the same, and a race from champions, where a row is finished"),
    Limit("scan_rows_kernel*", ALL, "stack", 512, "the same, in the block that finishes a row; the scan itself has none"),
    Limit("commit_kernel*", "sm_90", "stack", 8, "one spilled address in the kind for units of one byte"),
    Limit("sum_slots_kernel*", ALL, "stack", 8, "two spilled registers in the wide kinds for float16"),
    Limit("next_tree_kernel*", "sm_90", "stack", 16, "four spilled registers where it recalls, once a candidate"),
    Limit("next_tree_kernel*", "sm_80", "stack", 16, "sampling parameters by address, once a candidate"),
    Limit("shard_races_kernel", ALL, "stack", 328, "arguments by address: a race's row, distributions and noise"),
    Limit("shard_best_kernel", "sm_90", "stack", 184, "the same"),
    Limit("shard_best_kernel", ALL, "stack", 168, "the same"),
    Limit("shard_combine_kernel", ALL, "stack", 112, "spilled registers of the walk, by one thread of a block"),
    Limit("shard_bins_kernel", "sm_80 sm_90", "stack", 8, "two spilled registers after the sweep"),
    Limit("shard_masses_kernel", "sm_100", "stack", 8, "the same"),
    Limit("heads_kernel<*16, true>", "sm_100", "stack", 8, "two spilled registers, once a head"),
    Limit("linear_kernel*2, false, true>", "sm_90", "stack", 8, "two spilled registers of 16 rows"),
    Limit("walk_kernel<32, true, element>", "sm_80", "stack", 8, "one spilled register beside 32 rows and their rates"),
    Limit("walk_kernel<32, true, head>", "sm_100", "stack", 16, "a few spilled registers beside 32 rows"),
    Limit("walk_kernel<64, true, element>", "sm_100", "stack", 16, "the same beside 64 rows and their rates"),
    Limit("replay_kernel<false, 4, channel>", "sm_80", "stack", 8, "one spilled register"),
    Limit("attention_kernel<CodesShape*256, 4>> >", "sm_90", "stack", 8, "one spilled register beside 128 sums of a thread"),
    Limit("attention_kernel<CodesShape*256, 4>> >", "sm_100", "stack", 16, "three of them"),
    Limit("attention_kernel<AttentionShape*bfloat16, 64, 4>>", "sm_100", "stack", 8, "one spilled register"),
    Limit("group_attention_kernel*512, 512, 2, *", ALL, "stack", 16, "four spilled registers beside 128 sums of a thread"),
    Limit("group_attention_kernel*512, 2, unsigned char>*", "sm_100", "stack", 8, "two of them, with codes of 8 bits besides"),
    Limit("*", ALL, "stack", 0, "local memory is device memory: one access costs as much as a miss"),

    # Registers: 65,536 of a multiprocessor over the threads that should be resident at once.
    Limit("accept_kernel<coupled, beforehand>", "sm_80", "registers", 56, "today's number"),
    Limit("accept_kernel<coupled, beforehand>", ALL, "registers", 50, "today's number; two of them since trees may be chains"),
    Limit("accept_kernel*", ALL, "registers", 128, "two blocks of 256 threads"),
    Limit("accept_step_kernel*", ALL, "registers", 204, "two blocks of 128 threads: few rows, whose last block walks"),
    Limit("draft_kernel*", ALL, "registers", 128, "two blocks of 256 threads"),
    Limit("scan_rows_kernel*", ALL, "registers", 80, "six blocks of 128 threads, each with 16 KB of bfloat16 in flight"),
    Limit("attention_kernel*16, 64, ?>>*", ALL, "registers", 168, "three blocks of 128 threads"),
    Limit("attention_kernel*", ALL, "registers", 255, "two blocks of 128 threads; shared memory holds no third"),
    Limit("plain_attention_kernel*8, 4>", "sm_100", "registers", 238, "wide rows of eight heads: two blocks of 128 threads"),
    Limit("plain_attention_kernel*8, 4>", ALL, "registers", 232, "the same"),
    Limit("plain_attention_kernel*4, ?>", ALL, "registers", 168, "three blocks of 128 threads, with 16 loads each"),
    Limit("plain_attention_kernel*", ALL, "registers", 128, "four of them"),
    Limit("group_attention_kernel*512, ?, *", ALL, "registers", 255, "two blocks of 128 threads; shared memory holds no third"),
    Limit("group_attention_kernel*256, ?, *", ALL, "registers", 168, "three blocks of 128 threads"),
    Limit("group_attention_kernel*", ALL, "registers", 128, "four blocks of 128 threads"),
    Limit("add_parts_kernel*", ALL, "registers", 96, "five blocks of 128 threads, 80 KB of loads in flight"),
    Limit("attention_combine_kernel*", ALL, "registers", 128, "four blocks of 128 threads, 144 KB of loads in flight"),
    Limit("commit_kernel*", ALL, "registers", 96, "five blocks of 128 threads: 80 KB of loads in flight"),
    Limit("adapter_kernel*", ALL, "registers", 80, "three blocks of 256 threads; the loads of 16 ranks in flight"),
    Limit("linear_kernel<float, *", ALL, "registers", 255, "one block of 256 threads, with the sums of all rows"),
    Limit("linear_kernel*", ALL, "registers", 128, "two blocks of 256 threads, 64 KB of weights in flight"),
    Limit("heads_kernel*", ALL, "registers", 80, "six blocks of 128 threads"),
    Limit("embed_kernel*", ALL, "registers", 40, "1,536 threads: it only waits for memory"),
    Limit("norm_kernel*", ALL, "registers", 108, "four blocks of 128 threads, each with four loads of 16 bytes on their way"),
    Limit("rotary_kernel*", ALL, "registers", 50, "1,280 threads: ten blocks of 128"),
    Limit("gate_kernel*", ALL, "registers", 40, "1,536 threads: twelve blocks of 128"),
    Limit("shard_races_kernel", ALL, "registers", 80, "three blocks of 256 threads"),
    Limit("shard_best_kernel", ALL, "registers", 80, "three blocks of 256 threads"),
    Limit("shard_combine_kernel", ALL, "registers", 96, "five blocks of 128 threads: a walk, by one of them"),
    Limit("walk_kernel<64*", ALL, "registers", 255, "two blocks of 128 threads, each lane with 64 rows of a state"),
    Limit("walk_kernel<32*element>", ALL, "registers", 168, "three blocks of 128 threads: 32 rows and their rates"),
    Limit("walk_kernel<32*", ALL, "registers", 128, "four blocks of 128 threads: 32 rows"),
    Limit("walk_kernel<4, false, element>", "sm_100", "registers", 96, "five blocks of 128 threads"),
    Limit("walk_kernel<4, false*", ALL, "registers", 84, "six blocks of 128 threads"),
    Limit("replay_kernel*4, element>", ALL, "registers", 128, "four blocks of 128 threads: eight rows and their rates"),
    Limit("replay_kernel*", ALL, "registers", 96, "five blocks of 128 threads: 80 KB of loads in flight"),
    Limit("*", ALL, "registers", 64, "1,024 threads, half of a multiprocessor's"),

    # Code: an instruction that no cache holds is fetched from device memory. Limits leave a tenth of room: compilers differ.
    Limit("accept_kernel<coupled, beforehand>", ALL, "code", 18_600, "a walk without jobs"),
    Limit("accept_kernel<kseq, beforehand>", ALL, "code", 252_000, "a walk, the search for rho, and the jobs of both"),
    Limit("accept_kernel*beforehand>", ALL, "code", 212_000, "a walk, sums, draws with champions and without"),
    Limit("accept_kernel<any, on_the_way>", ALL, "code", 504_000, "the walks of five routes in one; a step runs one of them"),
    Limit("accept_kernel*", ALL, "code", 231_000, "a walk, a scan, and a function for each job; a step runs a part of them"),
    Limit("accept_step_kernel<coupled>", ALL, "code", 327_000, "the scan, a row's end, and a walk without jobs"),
    Limit("accept_step_kernel*", ALL, "code", 473_000, "the same, and a walk with sums and draws; a step runs a part of them"),
    Limit("draft_kernel*", ALL, "code", 225_000, "a function for each pass over a row; a draw runs a part of them"),
    Limit("attention_kernel*", ALL, "code", 160_000, "a main loop unrolled over a tile, and codes that become numbers"),
    Limit("plain_attention_kernel*", ALL, "code", 82_700, "16 loads at a time, three kinds of codes, and rows of any width"),
    Limit("group_attention_kernel*", ALL, "code", 100_300, "products unrolled over a tile, latents and values of their own"),
    Limit("scan_rows_kernel*", ALL, "code", 321_000, "the scan for three types, and a row's end: filters, races of two kinds"),
    Limit("next_tree_kernel*", ALL, "code", 122_000, "offers with and without tables, the race, chances, shapes; once a step"),
    Limit("shard_combine_kernel", ALL, "code", 184_000, "the walks of three routes, by one thread of a block"),
    Limit("shard_races_kernel", ALL, "code", 73_500, "a race over p and one over the residual; once a step"),
    Limit("shard_best_kernel", ALL, "code", 48_500, "a race"),
    Limit("shard_residuals_kernel", ALL, "code", 61_500, "p, q and the deleted children, for eight tokens at once"),
    Limit("linear_kernel*true>", ALL, "code", 60_000, "15,000 of them for adapters of slots, which calls without them skip"),
    Limit("linear_kernel*", ALL, "code", 67_000, "the same, and unaligned rows are read number by number"),
    Limit("walk_kernel<64*element>", ALL, "code", 86_000, "an exponential for each of 64 rows"),
    Limit("walk_kernel<64*", ALL, "code", 57_500, "both forms, and keeping and restoring states, for 64 rows"),
    Limit("walk_kernel<32*element>", ALL, "code", 49_500, "an exponential for each of 32 rows"),
    Limit("*", ALL, "code", 44_000, "mask_kernel's, the largest of the others"),

    # Instructions.
    Limit("accept_kernel<coupled, beforehand>", "sm_90", "local accesses", 0, "it calls nothing"),
    Limit("accept_kernel<kseq, beforehand>", "sm_90", "local accesses", 506, "around calls, and the search for rho"),
    Limit("accept_kernel*beforehand>", "sm_90", "local accesses", 318, "LDL and STL around calls, today"),
    Limit("accept_kernel<any, on_the_way>", "sm_90", "local accesses", 1_890, "five walks in one, with 3,900 bytes of spills"),
    Limit("accept_kernel*", "sm_90", "local accesses", 377, "LDL and STL around calls, today"),
    Limit("accept_step_kernel<coupled>", "sm_90", "local accesses", 222, "LDL and STL of finishing a row, today"),
    Limit("accept_step_kernel*", "sm_90", "local accesses", 410, "the same, and around the walk's calls"),
    Limit("draft_kernel*", "sm_90", "local accesses", 508, "around calls, today; none for pieces of a row on their way"),
    Limit("scan_rows_kernel<DraftSource>", "sm_90", "local accesses", 730, "the same, and a race from champions"),
    Limit("scan_rows_kernel*", "sm_90", "local accesses", 474, "LDL and STL of finishing a row, today"),
    Limit("attention_combine_kernel*", "sm_90", LOADS, 18, "a thread loads columns and totals of nine parts before it waits"),
    Limit("linear_kernel<*16, ?, *, true>", "sm_90", LOADS, 8, "a lane loads 128 bytes of weights before it waits"),
    Limit("scan_rows_kernel*", "sm_90", LOADS, 8, "a lane loads all of its 32 logits (float32: 8 loads) before it waits"),
    Limit("accept_step_kernel*", "sm_90", LOADS, 8, "the same scan"),
    Limit("accept_step_kernel*", "sm_90", "atomics that are CAS loops", 0, "64-bit sums take two atomics of 32 bits"),
    Limit("accept_kernel*", "sm_90", "atomics that are CAS loops", 0, "64-bit sums take two atomics of 32 bits"),
    Limit("scan_rows_kernel*", "sm_90", "atomics that are CAS loops", 0, "64-bit sums take two atomics of 32 bits"),
)
# fmt: on


def limits_of(kernel: Kernel, limits: Iterable[Limit] = LIMITS) -> dict[str, Limit]:
    """Number -> the limit that applies to this kernel."""
    applying: dict[str, Limit] = {}
    for limit in limits:
        if kernel.architecture in limit.architectures.split() and fnmatchcase(kernel.name, limit.kernel):
            applying.setdefault(limit.number, limit)
    return applying


def needs_code(kernels: Iterable[Kernel], limits: Iterable[Limit] = LIMITS) -> list[Kernel]:
    """The kernels with a limit on numbers read from instructions."""
    return [kernel for kernel in kernels if limits_of(kernel, limits).keys() & COUNTS.keys()]


def breaches(kernels: list[Kernel], code: Mapping[Kernel, Code], limits: tuple[Limit, ...] = LIMITS) -> list[str]:
    """A sentence for each number beyond its limit, and for each line about no kernel of its architectures."""
    sentences, used = [], set()
    for kernel in kernels:
        for number, limit in limits_of(kernel, limits).items():
            used.add(limit)
            value = RESOURCES[number](kernel) if number in RESOURCES else COUNTS[number](code[kernel].instructions)
            if value < limit.bound if number == LOADS else value > limit.bound:
                allowed = f"at {'least' if number == LOADS else 'most'} {limit.bound:,}"
                sentences.append(
                    f"{kernel.name}, {kernel.architecture}: {number} {value:,}, allowed {allowed} ({limit.reason})"
                )
    present = {kernel.architecture for kernel in kernels}
    for limit in limits:
        if limit not in used and present >= set(limit.architectures.split()):
            sentences.append(f"{limit.kernel}, {limit.architectures}: the line for {limit.number} is about no kernel")
    return sentences
