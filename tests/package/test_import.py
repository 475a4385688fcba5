"""The effects of `import pass_ext` in a fresh interpreter, and its messages when something is missing or broken.

The import must be quick, import nothing optional, leave the GPU alone, and name the reason if a library does not load. Damaged
installations are copies of the package in a temporary folder.
"""

import compileall
import functools
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import types
from importlib import metadata
from pathlib import Path

import pytest
import torch

import pass_ext
from pass_ext import _library

PACKAGE = Path(pass_ext.__file__).parent
CUDA_LIBRARY = PACKAGE / "_C_cuda.so"

IMPORT_AND_TELL = """
import json, sys, time
import torch
before = set(sys.modules)
started = time.perf_counter()
import pass_ext
seconds = time.perf_counter() - started
new = {name.split(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
print(json.dumps({"seconds": seconds, "new": sorted(new), "cuda_context": torch.cuda.is_initialized()}))
"""

CALL_ON_CUDA_KEY = """
import json, torch
PRETEND
import pass_ext
ids, rows = torch.zeros(2, dtype=torch.long), torch.zeros(3, 4)
cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
try:
    torch.ops.pass_ext.lookahead_embed.default.redispatch(cuda, ids, rows, rows)
    said = ""
except RuntimeError as error:
    said = str(error)
status = pass_ext.status()
without = [name for name in pass_ext._library.op_names()
           if not torch._C._dispatch_has_kernel_for_dispatch_key(f"pass_ext::{name}", "CUDA")]
cpu_result = pass_ext.lookahead_embed(ids, rows + 1, rows).sum().item()
print(json.dumps({"loaded": status.cuda_loaded, "reason": status.cuda_reason, "said": said, "without": without,
                  "cpu_result": cpu_result}))
"""


def run(*arguments, folder=PACKAGE.parent, **environment):
    """Runs this Python on `arguments`, in the folder from which it imports pass_ext."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PASS_EXT_")}
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env=inherited | environment,
        timeout=120,
    )


def output_of(*arguments, **options):
    done = run(*arguments, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def copy_package(folder, *, without):
    """A copy of the installed package without the libraries in `without`; the others are linked rather than copied."""
    copy = folder / "pass_ext"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for library in PACKAGE.glob("*.so"):
        if library.name not in without:
            (copy / library.name).symlink_to(library)
    return copy


MOST_SECONDS = 0.050


@functools.cache
def imports():
    """Reports of imports: the first, and on a busy machine up to two more, until one is quick."""
    compileall.compile_dir(
        PACKAGE, quiet=2
    )  # as pip does when it installs: compiling sources would take half of the time
    told = []
    while len(told) < 3 and (not told or told[-1]["seconds"] >= MOST_SECONDS):
        told.append(json.loads(output_of("-c", IMPORT_AND_TELL)))
    return told


@functools.cache
def info():
    return output_of("-m", "pass_ext", "info")


def test_import_takes_less_than_50_ms_beyond_torch():
    best = min(run["seconds"] for run in imports())
    assert best < MOST_SECONDS, f"best of three: {best * 1e3:.0f} ms"


def test_import_pulls_in_no_package_beyond_torch():
    assert imports()[0]["new"] == ["pass_ext"]


def test_import_creates_no_cuda_context():
    assert not any(run["cuda_context"] for run in imports())


def test_info_prints_every_line_and_why_cuda_is_absent():
    lines = dict(line.split("  ", 1) for line in info().splitlines())
    lines = {name.strip(): text.strip() for name, text in lines.items()}
    names = ("pass_ext", "torch", "python", "CPU kernels", "CUDA kernels", "built with CUDA", "GPUs")
    hosts = ("transformers", "vllm", "sglang")
    assert tuple(lines) == (*names, *hosts, "ops")
    installed = {found.metadata["Name"].lower(): found.version for found in metadata.distributions()}
    for host in hosts:
        assert lines[host] == installed.get(host, "not installed")
    status = pass_ext.status()
    assert lines["pass_ext"] == pass_ext.__version__
    assert lines["torch"].startswith(torch.__version__)
    assert lines["CPU kernels"].startswith(f"{status.cpu_isa}, bfloat16 by {status.cpu_products}, ")
    assert lines["CUDA kernels"] == ("loaded" if status.cuda_loaded else f"not loaded: {status.cuda_reason}")
    assert status.cuda_loaded or len(status.cuda_reason) > 20
    assert "lookahead_embed" in lines["ops"].split()


def test_the_command_and_the_module_are_the_same():
    command = Path(sys.executable).with_name("pass_ext")
    if not command.exists():
        pytest.skip("pass_ext is imported from a source tree, not installed")
    said = subprocess.run([command, "info"], capture_output=True, text=True, check=True).stdout
    assert said == info()


def test_cpu_isa_can_be_lowered_and_debug_set_from_the_environment():
    code = "import pass_ext; s = pass_ext.status(); print(s.cpu_isa, s.cpu_products, pass_ext.set_debug(False))"
    assert output_of("-c", code, PASS_EXT_CPU_ISA="portable", PASS_EXT_DEBUG="1").split() == [
        "portable",
        "fp32",
        "True",
    ]


def test_a_wrong_cpu_isa_is_refused_with_the_names_that_exist():
    done = run("-c", "import pass_ext", PASS_EXT_CPU_ISA="AVX2")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ImportError: PASS_EXT_CPU_ISA must be portable, avx2, avx512, avx512_bf16, amx or amx_emulated, got 'AVX2'"
    )


def test_a_level_of_another_kind_of_processor_is_refused():
    other = "avx2" if platform.machine() == "aarch64" else "neon_dot"
    with pytest.raises(ValueError, match=f"CPU instruction set must be portable, .*got '{other}'"):
        _library.limit_cpu_isa(other)


def test_debug_reaches_the_cuda_library(monkeypatch):
    """It then reports a failure before an op as such, not as the op's failure."""
    calls = []
    library = types.SimpleNamespace(pass_ext_check_earlier_cuda_errors=calls.append)
    monkeypatch.setattr(_library, "_cuda_native", library)
    former = _library.set_debug(True)
    _library.set_debug(former)
    assert calls == [1, int(former)]


def test_an_earlier_failure_on_the_gpu_is_not_told_as_the_ops(cuda):
    code = """
import torch, pass_ext
out = torch.randn(2, 4, 64, device="cuda")
lse = torch.zeros(2, 4, device="cuda")
pass_ext.set_debug(True)
pass_ext.attention_merge(out, lse, out, lse)
torch.zeros(1, device="cuda")[torch.tensor([7], device="cuda")]  # a device-side assertion
pass_ext.attention_merge(out, lse, out, lse)
"""
    done = run("-c", code)
    assert done.returncode != 0 and "had already failed before this op" in done.stderr


def test_a_missing_cpu_library_is_an_import_error_that_says_how_to_build(tmp_path):
    copy = copy_package(tmp_path, without=["_C.so"])
    done = run("-c", "import pass_ext", folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: pass_ext is not built: {copy / '_C.so'} is missing. Run: pip install --no-build-isolation -e ."
    )


def patched(whole, offset, value):
    return whole[:offset] + bytes([value]) + whole[offset + 1 :]


# The contents of a damaged library, made from the bytes of the sound one, and the message about it.
OTHER_MACHINE = {"x86_64": (183, "aarch64"), "aarch64": (62, "x86_64")}.get(platform.machine(), (243, "riscv64"))
FOREIGN = Path(torch.__file__).parent / "lib" / "libtorch_global_deps.so"
REBUILD = ". Build it again: pip install --no-build-isolation -e ."


def compiled(text):
    """The bytes of a library of this C++."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "library.so")
        command = [os.environ.get("CXX", "g++"), "-shared", "-fPIC", "-x", "c++", "-", "-o", str(library)]
        subprocess.run(command, input=text.encode(), check=True)
        return library.read_bytes()


DAMAGED = {
    "of other code": (
        lambda whole: compiled('extern "C" const char* pass_ext_namespace() { return "pass_ext"; }'),
        f"is of other code than this Python: it has no pass_ext_cpu_isa{REBUILD}",
    ),
    "empty": (lambda whole: b"", f"is empty{REBUILD}"),
    "text": (lambda whole: b"This is not an ELF file. " * 20, f"is not a shared library{REBUILD}"),
    "head": (lambda whole: whole[:40], f"is cut short: it has 40 bytes{REBUILD}"),
    "half": (lambda whole: whole[: len(whole) // 2], f"is cut short: it has HALF of WHOLE bytes{REBUILD}"),
    "end": (lambda whole: whole[:-1], f"is cut short: it has LESS of WHOLE bytes{REBUILD}"),
    "other machine": (
        lambda whole: patched(whole, 18, OTHER_MACHINE[0]),
        f"is for {OTHER_MACHINE[1]}, and this machine is {platform.machine()}{REBUILD}",
    ),
    "other project": (
        lambda whole: FOREIGN.read_bytes(),
        f"is another library: it has no pass_ext kernels{REBUILD}",
    ),
    "refused by the loader": (
        lambda whole: patched(whole, 6, 9),
        f"does not load with torch {torch.__version__}: LIBRARY: ELF file version ident does not match current one",
    ),
    "of another torch": (
        lambda whole: whole.replace(b"\0torch_library_impl\0", b"\0torch_library_IMPL\0"),
        f"does not fit torch {torch.__version__}, which lacks torch_library_IMPL. "
        "Build it for this torch: pip install --no-build-isolation -e .",
    ),
    "of a newer Linux": (
        lambda whole: whole.replace(b"\0GLIBC_2.14\0", b"\0GLIBC_2.99\0").replace(b"\0GLIBC_2.17\0", b"\0GLIBC_2.99\0"),
        f"needs glibc 2.99, and this Linux has {platform.libc_ver()[1]}. "
        "Build it here: pip install --no-build-isolation -e .",
    ),
}


def damage(library, kind, whole):
    """Writes such a file; returns the message about it."""
    change, words = DAMAGED[kind]
    library.write_bytes(change(whole))
    numbers = {"HALF": len(whole) // 2, "LESS": len(whole) - 1, "WHOLE": len(whole), "LIBRARY": library}
    for name, number in numbers.items():
        words = words.replace(name, str(number))
    return f"{library} {words}"


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_cpu_library_is_an_import_error_that_says_what_it_is(kind, tmp_path, monkeypatch):
    sentence = damage(tmp_path / "_C.so", kind, (PACKAGE / "_C.so").read_bytes())
    monkeypatch.setattr(_library, "_HERE", tmp_path)
    with pytest.raises(ImportError) as told:
        _library._load_cpu()
    assert str(told.value) == sentence


HERE = PACKAGE / "_C.so"
LOADERS_WORDS = {
    "2.9.1+cu128": (
        f"{HERE}: undefined symbol: torch_call_dispatcher",
        "pass_ext needs torch 2.10 or newer, and this is torch 2.9.1+cu128. Run: pip install -U 'torch>=2.10'",
    ),
    "2.10.0": (
        f"/lib/libstdc++.so.6: version `GLIBCXX_3.4.22' not found (required by {HERE})",
        f"{HERE} needs a newer libstdc++ (with GLIBCXX_3.4.22) than this Linux has. "
        "Build it here: pip install --no-build-isolation -e .",
    ),
    "2.13.0": (  # musl's
        f"Error relocating {HERE}: __register_atfork: symbol not found",
        f"{HERE} does not fit torch 2.13.0, which lacks __register_atfork. "
        "Build it for this torch: pip install --no-build-isolation -e .",
    ),
    "2.13.0a0+git": (
        "libtorch_cpu.so: cannot open shared object file: No such file or directory",
        f"{HERE} does not fit torch 2.13.0a0+git, which comes without libtorch_cpu.so. "
        "Build it for this torch: pip install --no-build-isolation -e .",
    ),
}


@pytest.mark.parametrize("version", LOADERS_WORDS)
def test_a_library_that_does_not_fit_is_an_import_error_of_one_sentence(version, monkeypatch):
    words, sentence = LOADERS_WORDS[version]

    def refuse(path):
        raise OSError(f"Could not load this library: {path}") from OSError(words)

    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.ops, "load_library", refuse)
    with pytest.raises(ImportError) as told:
        _library._load_cpu()
    assert str(told.value) == sentence
    assert told.value.__cause__ is None and told.value.__suppress_context__


def test_another_system_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(_library, "_HERE", tmp_path)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    with pytest.raises(ImportError, match=r"^pass_ext is for Linux, and this is Darwin$"):
        _library._load_cpu()


# In a separate process, because a signal would end it. The functions that load libraries are tested above on the others.
@pytest.mark.parametrize("kind", ["half", pytest.param("other project", marks=pytest.mark.slow)])
def test_info_says_in_a_sentence_what_a_damaged_cpu_library_is(kind, tmp_path):
    copy = copy_package(tmp_path, without=["_C.so"])
    sentence = damage(copy / "_C.so", kind, (PACKAGE / "_C.so").read_bytes())
    done = run("-m", "pass_ext", "info", folder=tmp_path)
    assert done.returncode == 1, "a signal ended it"
    assert done.stderr.splitlines()[-1] == f"ImportError: {sentence}"
    told = done.stderr.split("Traceback")
    assert len(told) == 2 and "ctypes" not in told[1] and "torch/" not in told[1], "our own message replaces these"


def check_refusal(told, reason):
    assert not told["loaded"]
    assert reason in told["reason"]
    assert told["said"] == f"pass_ext::lookahead_embed: got a CUDA tensor, but {told['reason']}"
    assert told["without"] == [], "ops that meet a CUDA tensor without our message"
    assert told["cpu_result"] == 8


def test_a_build_without_cuda_says_so_and_how_to_rebuild(tmp_path):
    copy_package(tmp_path, without=["_C_cuda.so"])
    told = json.loads(output_of("-c", CALL_ON_CUDA_KEY.replace("PRETEND", ""), folder=tmp_path))
    check_refusal(told, "this build of pass_ext has no CUDA kernels")
    command = told["reason"].rpartition(": ")[2]
    assert command == "PASS_EXT_CUDA=1 pip install --no-build-isolation -e .", (
        "a name would be looked up in an index, which has no pass_ext"
    )


def test_info_names_no_architectures_of_a_cuda_library_that_was_deleted(tmp_path):
    copy = copy_package(tmp_path, without=["_C_cuda.so"])
    (copy / "_build_info.py").write_text('cuda = "12.8"\narchitectures = ["9.0"]\nsanitize = ""\n')
    lines = output_of("-m", "pass_ext", "info", folder=tmp_path).splitlines()
    assert [line.split()[-1] for line in lines if line.startswith("built with CUDA")] == ["no"]


@pytest.mark.parametrize("kind", [kind for kind in DAMAGED if kind not in ("other project", "of other code")])
def test_a_damaged_cuda_library_is_named(kind, tmp_path, monkeypatch):
    sentence = damage(tmp_path / "_C_cuda.so", kind, (PACKAGE / "_C.so").read_bytes())
    monkeypatch.setattr(_library, "_HERE", tmp_path)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert _library._load_cuda() == sentence


# In a separate process, because a signal would end it. The functions that load libraries are tested above on the others.
@pytest.mark.parametrize("kind", ["half", pytest.param("other project", marks=pytest.mark.slow)])
def test_a_damaged_cuda_library_is_ignored_and_status_says_what_it_is(kind, tmp_path):
    copy = copy_package(tmp_path, without=["_C_cuda.so"])
    sentence = damage(copy / "_C_cuda.so", kind, (PACKAGE / "_C.so").read_bytes())
    code = CALL_ON_CUDA_KEY.replace("PRETEND", "torch.version.cuda = torch.version.cuda or '13.0'")
    told = json.loads(output_of("-c", code, folder=tmp_path))
    check_refusal(told, sentence)
    assert told["reason"] == sentence


@pytest.mark.skipif(not CUDA_LIBRARY.exists(), reason="this build has no _C_cuda.so (nvcc was not found)")
@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA, so the library loads")
def test_the_cuda_library_beside_a_torch_without_cuda_is_not_tried():
    told = json.loads(output_of("-c", CALL_ON_CUDA_KEY.replace("PRETEND", "")))
    check_refusal(told, f"this torch ({torch.__version__}) has no CUDA")


@pytest.mark.skipif(not CUDA_LIBRARY.exists(), reason="this build has no _C_cuda.so (nvcc was not found)")
@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA, so the library loads")
def test_a_cuda_library_that_misses_a_symbol_is_ignored_and_the_symbol_named():
    told = json.loads(output_of("-c", CALL_ON_CUDA_KEY.replace("PRETEND", "torch.version.cuda = '13.0'")))
    check_refusal(told, f"does not fit torch {torch.__version__}, which lacks aoti_torch_")
