"""The kernels' machine code: the built library is within kernel_limits.py, planted faults are not, and instructions are
read correctly.

Disassembly needs NVIDIA's cuobjdump and nvdisasm, of pass_ext[dev] or a CUDA toolkit; no GPU.
"""

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import kernel_limits
import pytest
from kernel_limits import LOADS, Limit
from support.paths import ROOT

import pass_ext
from benchmarks.kernel_code import __main__ as command
from benchmarks.kernel_code import disassembler, measure, page
from benchmarks.kernel_code.control_flow import ControlFlow
from benchmarks.kernel_code.instructions import class_of, count_classes

LIBRARY = Path(pass_ext.__file__).parent / "_C_cuda.so"
DEBUG = importlib.import_module("pass_ext._build_info").debug

no_tools = pytest.mark.skipif(
    bool(disassembler.missing_tools()),
    reason=f"no {', '.join(disassembler.missing_tools())}: pip install pass_ext[dev]",
)
no_cuda_library = pytest.mark.skipif(not LIBRARY.exists(), reason="this build has no _C_cuda.so (nvcc was not found)")
no_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc here")


# ---- the gate ----


@no_tools
@no_cuda_library
@pytest.mark.skipif(DEBUG, reason="a DEBUG=1 build is not optimised")
def test_no_kernel_of_the_built_library_costs_more_than_its_limits(tmp_path):
    kernels = disassembler.list_kernels(LIBRARY, tmp_path)
    built = {architecture.partition("+")[0].replace(".", "") for architecture in pass_ext.status().cuda_architectures}
    assert {kernel.architecture for kernel in kernels} == {f"sm_{number}" for number in built}
    code = disassembler.disassemble(kernel_limits.needs_code(kernels))
    strange = {i.opcode for listing in code.values() for i in listing.instructions if class_of(i) == "other"}
    assert strange == set(), "benchmarks/kernel_code/instructions.py does not know these"
    assert kernel_limits.breaches(kernels, code) == []


def kernel(name="scan", architecture="sm_90", registers=32, stack=0, code=1_000):
    return disassembler.Kernel(name, architecture, registers, stack, 0, code, name, 1, Path("a.cubin"))


def test_a_breach_names_kernel_architecture_number_and_limit():
    limits = (Limit("scan<*", "sm_90", "stack", 8, "one register"), Limit("*", "sm_80 sm_90", "stack", 0, "none"))
    kernels = [
        kernel("scan<int>", stack=16),
        kernel("walk", "sm_80", stack=1_104),
        kernel("walk"),
        kernel("scan<int>", stack=8),
    ]
    assert kernel_limits.breaches(kernels, {}, limits) == [
        "scan<int>, sm_90: stack 16, allowed at most 8 (one register)",
        "walk, sm_80: stack 1,104, allowed at most 0 (none)",
    ]


def test_too_few_loads_in_flight_are_a_breach():
    scan = kernel()
    code = {scan: disassembler.Code(listing("LDG.E.128 R4,[R2.64]", "FADD R0,R4,R5"), "")}
    assert kernel_limits.breaches([scan], code, (Limit("*", "sm_90", LOADS, 1, ""),)) == []
    (sentence,) = kernel_limits.breaches([scan], code, (Limit("*", "sm_90", LOADS, 4, "latency"),))
    assert sentence == "scan, sm_90: loads in flight 1, allowed at least 4 (latency)"


def test_a_line_about_no_kernel_is_a_breach_if_its_architectures_were_built():
    limits = (Limit("gone*", "sm_90", "stack", 0, ""), Limit("gone*", "sm_90 sm_120", "stack", 0, ""))
    assert kernel_limits.breaches([kernel()], {}, limits) == ["gone*, sm_90: the line for stack is about no kernel"]


def compile_kernels(source, folder, include):
    """The kernels of a source file, compiled for sm_90."""
    options = ["-std=c++17", "-O3", "-DNDEBUG", "-fmad=false", f"-I{include}", "-arch=sm_90", "-cubin", "-x", "cu"]
    subprocess.run(["nvcc", *options, source, "-o", folder / "kernels.cubin"], check=True)
    (folder / "extracted").mkdir()
    return disassembler.list_kernels(folder / "kernels.cubin", folder / "extracted")


ATTENTION = "attention_kernel<pass_ext::gpu::AttentionShape<pass_ext::float16, 64, 4>>"
SCAN = "scan_rows_kernel<pass_ext::gpu::DraftSource>"


@pytest.mark.slow
@no_tools
@no_nvcc
@pytest.mark.parametrize(
    ("kernel", "file", "old", "new", "number"),
    [
        (ATTENTION, "attention.cuh", "Shape::kResidentBlocks)", "4)", "stack"),
        (ATTENTION, "attention_warp.cuh", "#pragma unroll\n", "#pragma unroll 1\n", "stack"),
        (SCAN, "rows.cuh", "(32 * kScanWarps, kScansPerMultiprocessor)", "(32 * kScanWarps)", "registers"),
        (SCAN, "row_scan.cuh", "#pragma unroll\n", "#pragma unroll 1\n", "stack"),
        (SCAN, "row_pieces.cuh", "#pragma unroll\n", "#pragma unroll 1\n", LOADS),
        (SCAN, "row_scan.cuh", "kLoads = 4;", "kLoads = 8;", "local accesses"),
    ],
    ids=[
        "attention, launch bounds",
        "attention, unroll",
        "scan, launch bounds",
        "scan, unroll",
        "loads, unroll",
        "spills",
    ],
)
def test_planted_faults_in_the_real_kernels_are_breaches(tmp_path, kernel, file, old, new, number):
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    changed = tmp_path / "csrc" / "cuda" / file
    assert old in changed.read_text(), "the text that the fault replaces is gone: name another"
    changed.write_text(changed.read_text().replace(old, new))
    includes = '#include "cuda/attention.cuh"\n#include "cuda/draft.cuh"\n'
    (tmp_path / "kernels.cu").write_text(
        f"{includes}const void* kernel = reinterpret_cast<const void*>(&pass_ext::gpu::{kernel});\n"
    )
    kernels = compile_kernels(tmp_path / "kernels.cu", tmp_path, tmp_path / "csrc")
    limits = tuple(limit for limit in kernel_limits.LIMITS if limit.number == number)
    sentences = kernel_limits.breaches(
        kernels, disassembler.disassemble(kernel_limits.needs_code(kernels, limits)), limits
    )
    short = kernel.replace("pass_ext::gpu::", "").replace("pass_ext::", "")
    assert any(line.startswith(f"{short}, sm_90: {number} ") for line in sentences), sentences


# ---- names ----


@pytest.mark.parametrize(
    ("demangled", "short"),
    [
        ("pass_ext::gpu::draft_kernel(pass_ext::DraftProblem, pass_ext::gpu::RowsWorkspace)", "draft_kernel"),
        (
            "void pass_ext::gpu::attention_kernel<pass_ext::gpu::AttentionShape<pass_ext::bfloat16, 64, 4> >(int)",
            "attention_kernel<AttentionShape<bfloat16, 64, 4>>",
        ),
        (
            "void pass_ext::gpu::walk<(pass_ext::Rule)1, (pass_ext::LogitType)2, (bool)1>(pass_ext::P)",
            "walk<rejection, float32, 1>",
        ),
        ("void pass_ext::gpu::embed<double, long, true>(pass_ext::Embed<double, long>)", "embed<double, long, true>"),
    ],
)
def test_a_kernels_short_name(demangled, short):
    assert disassembler.shorten(demangled) == short


def test_a_missing_tool_is_named_with_its_package(monkeypatch):
    monkeypatch.setattr(disassembler, "find_tool", lambda name: None)
    with pytest.raises(FileNotFoundError, match="nvdisasm was not found: pip install nvidia-cuda-nvdisasm"):
        disassembler.disassemble([kernel()])


# ---- instructions ----


def listing(*lines):
    """Instructions from lines such as "@P0 LDG.E R4,[R2.64]", 16 bytes each, in the form of nvdisasm's JSON."""
    listed = []
    for line in lines:
        words = line.split()
        predicate = {"predicate": words.pop(0)} if words[0].startswith("@") else {}
        listed.append({**predicate, "opcode": words[0], **({"operands": words[1]} if words[1:] else {})})
    return disassembler.read_instructions(listed)


@pytest.mark.parametrize(
    ("line", "reads", "writes"),
    [
        ("LDG.E.NA.128.CONSTANT R12,desc[UR10][R8.64]", {8, 9}, {12, 13, 14, 15}),
        ("@!P2 LDG.E R7,desc[UR10][R8.64+0x4]", {8, 9}, {7}),
        ("STG.E.128 desc[UR4][R2.64],R8", {2, 3, 8, 9, 10, 11}, set()),
        ("FFMA R2,R3.reuse,R0,-R7", {0, 3, 7}, {2}),
        ("IADD3 R0,P2,-R4,UR13,RZ", {4}, {0}),
        ("IMAD.WIDE R38,R26,R39,UR4", {26, 27, 39, 40}, {38, 39}),
        ("ISETP.GE.AND P0,PT,R5,UR4,PT", {5}, set()),
        ("SHFL.BFLY PT,R5,R4,0x4,0x1f", {4}, {5}),
        ("R2UR UR7,R2", {2}, set()),
        ("DADD R4,R6,R8", {6, 7, 8, 9}, {4, 5}),
        ("HMMA.16816.F32.BF16 R96,R24.reuse,R140,RZ", {24, 25, 26, 27, 140, 141, 142, 143}, {96, 97, 98, 99}),
        ("LDSM.16.M88.4 R108,[R60]", {60}, {108, 109, 110, 111}),
        ("ATOM.E.ADD.64.STRONG.GPU P1,RZ,desc[UR20][R24.64+0x280],R26", {24, 25, 26, 27}, set()),
        ("STL.64 [R1+0x28],R10", {1, 10, 11}, set()),
        ("RET.REL.NODEC R8,kernel", {8}, set()),
        ("LDGSTS.E.BYPASS.128 [R63],desc[UR10][R58.64],P0", {58, 59, 63}, set()),
    ],
)
def test_registers_that_an_instruction_reads_and_writes(line, reads, writes):
    (instruction,) = listing(line)
    assert (instruction.reads(), instruction.writes()) == (reads, writes)


def test_classes_of_instructions():
    code = listing(
        "FADD R0,R1,R2",
        "MUFU.EX2 R0,R1",
        "UIMAD UR4,UR5,UR6,URZ",
        "VOTEU.ANY UR4,UPT,PT",
        "LDL R4,[R1]",
        "NOP",
        "NEW R1",
    )
    expected = {"float": 1, "special function": 1, "uniform": 2, "local load": 1, "nothing": 1, "other": 1}
    assert count_classes(code) == expected


# ---- loads in flight ----

LOAD = ["LDG.E.128 R4,[R20.64]", "LDG.E.128 R8,[R20.64+0x10]", "LDG.E.128 R12,[R20.64+0x20]"]


@pytest.mark.parametrize(
    ("lines", "runs"),
    [
        (["FADD R0,R1,R2"], (0, 0)),
        ([*LOAD, "FADD R0,R4,R8"], (3, 3)),
        ([LOAD[0], "IMAD R30,R31,R32,RZ", LOAD[1], "MOV R33,R30", LOAD[2], "FADD R0,R12,R30"], (3, 3)),
        ([LOAD[0], "FADD R0,R4,R4", LOAD[1], "FADD R0,R8,R8"], (1, 1)),
        ([LOAD[0], "FADD R0,R7,R7", LOAD[1], LOAD[2], "FADD R0,R8,R12"], (1, 2)),
        ([*LOAD[:2], "MOV R9,RZ", LOAD[2], "FADD R0,R4,R12"], (2, 2)),  # overwriting waits too
        (["LDG.E R4,[R20.64]", *LOAD, "STG.E.128 [R2.64],R12"], (3, 3)),  # narrow loads do not count
        ([*LOAD[:2], "STS.128 [R40],R5"], (2, 2)),  # the second register of the first load
    ],
)
def test_loads_in_flight_of_a_straight_line(lines, runs):
    assert ControlFlow(listing(*lines)).loads_in_flight() == runs


def test_narrow_loads_in_flight_count_if_asked_for():
    code = listing("LDG.E R16,[R20.64]", *LOAD, "STG.E.128 [R2.64],R12", "FADD R0,R16,R16")
    assert ControlFlow(code).loads_in_flight(wide=False) == (4, 4)
    assert ControlFlow(code).loads_in_flight() == (3, 3)


def test_loads_in_flight_on_two_paths_are_those_of_each():
    """bfloat16 has one load before its use, float32 two; jumps are to multiples of 16."""
    code = listing(
        LOAD[0],  # 0x00
        "@P0 BRA 0x40",  # 0x10
        "FADD R0,R4,R4",  # 0x20
        "BRA 0x60",  # 0x30
        LOAD[1],  # 0x40
        "FADD R0,R4,R8",  # 0x50
        "EXIT",  # 0x60
    )
    assert ControlFlow(code).loads_in_flight() == (1, 2)


def test_a_load_of_the_previous_turn_of_a_loop_is_in_flight():
    code = listing(
        LOAD[0],  # 0x00
        LOAD[1],  # 0x10: the head of the loop
        "FADD R0,R0,R4",  # 0x20
        LOAD[0],  # 0x30
        "FADD R0,R0,R8",  # 0x40
        "@P0 BRA 0x10",  # 0x50
        "FADD R0,R0,R4",  # 0x60
        "EXIT",  # 0x70
    )
    assert ControlFlow(code).loads_in_flight() == (2, 2)


# ---- the page ----


def result(commit, date, stack, kinds=("walk",)):
    resources = {"sm_90": dict(registers=64, stack=stack, shared=0, code=1_600)}
    detail = measure.describe(disassembler.Code(listing("STL [R1],R0", "EXIT"), "13.0"))
    return {
        "date": date, "commit": commit, "compiler": "nvcc 13.0", "code": {"sm_90": 1_600},
        "kernels": {name: {"kinds": 1, "resources": resources, **detail} for name in kinds},
    }  # fmt: skip


def run_command(root, *options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["kernel_code", "--root", str(root), *options])
        return command.main()


def test_the_page_shows_the_committed_results():
    assert run_command(ROOT, "--check") == 0, "run: python -m benchmarks.kernel_code --render"


def test_the_page_changes_with_the_results(tmp_path, capsys):
    page.save(result("aaaa", "2031-01-01", 1_104), tmp_path)
    assert run_command(tmp_path, "--render") == 0 == run_command(tmp_path, "--check")
    assert "| `walk` | 64 | 1,104 | 0 | 1,600 |" in (tmp_path / page.PAGE).read_text()
    page.save(result("bbbb", "2031-01-02", 16, ["walk<rejection>", "scan"]), tmp_path)
    assert run_command(tmp_path, "--check") == 1
    assert "run python -m benchmarks.kernel_code --render" in capsys.readouterr().err
    assert run_command(tmp_path, "--render") == 0
    text = (tmp_path / page.PAGE).read_text()
    assert "commit bbbb" in text and "aaaa" not in text, "a result takes the place of the one before it"
    assert "| `walk<rejection>` | 64 | 16 | 0 | 1,600 |" in text and "| `scan` |" in text and "`walk`" not in text


def test_a_result_is_read_as_it_was_saved(tmp_path):
    saved = result("aaaa", "2031-01-01", 8)
    path = page.save(saved, tmp_path)
    assert json.loads(path.read_text()) == saved
    assert page.read(tmp_path) == saved


def test_a_missing_library_is_named(tmp_path, capsys):
    assert run_command(tmp_path, "--library", str(tmp_path / "none.so")) == 1
    assert "none.so does not exist" in capsys.readouterr().err
