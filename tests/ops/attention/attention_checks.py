"""Runs a case of attention_tree on a backend and bounds the error of its result.

Sizes follow the backend: the emulator and stand-ins in Python take about 1,000 times as long.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import emulator
import torch
from attention_cases import UNALIGNED, attention_case
from emulator.ops import EMULATED, on_gpu
from support.steps import to
from torch import Tensor

import pass_ext
from pass_ext.reference.attention import AttentionTerms, attention_terms
from pass_ext.testing import Backend, assert_same_bits, cpu_backends

UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}  # half a step at 1
FLOATS = tuple(UNIT)
BFLOAT16, FLOAT16, FLOAT32 = range(3)  # FloatType of csrc/core/attention.h
BEST_CPU = cpu_backends()[-1].name


def is_small(backend: Backend) -> bool:
    return not backend.name.startswith(("cpu", "cuda"))


def sized(backend: Backend, small, large):
    """Small where a number takes long: on the emulator, and at the portable level, whose formulas are those of the others."""
    return small if is_small(backend) or backend.name == "cpu-portable" else large


def is_thorough(backend: Backend) -> bool:
    """True on the one backend that tests everything that does not depend on the CPU's instruction set."""
    return backend.name in (BEST_CPU, "cuda")


def allowed(backend: Backend, layout: str) -> str:
    """This layout of caches, or the nearest that the backend takes."""
    return layout if backend.name.startswith("cpu") else {UNALIGNED: "gaps"}.get(layout, layout)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Sets the number of torch's threads. The many tiny operations of a check are fastest with one."""
    former = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(former)


def solved(prefixes: list[int], sizes: list[int], **options) -> tuple[dict[str, object], AttentionTerms]:
    """A case and its exact result, computed once for all backends: not to be written to."""
    return _solved(tuple(prefixes), tuple(sizes), tuple(sorted(options.items())))


@functools.lru_cache(maxsize=256)
@threads(1)
def _solved(prefixes, sizes, options):
    case = attention_case(list(prefixes), list(sizes), **dict(options))
    return case, attention_terms(**case)


def run(backend: Backend, case: dict[str, object]) -> tuple[Tensor, Tensor]:
    with threads(2):
        out, lse = pass_ext.attention_tree(**to(case, backend.device))
    assert out.dtype == case["q"].dtype and lse.dtype == torch.float32
    return out.cpu(), lse.cpu()


def run_on_gpu(case: dict[str, object], **gpu: int) -> tuple[Tensor, Tensor]:
    """The result on such a ``Gpu`` of the emulator."""
    with on_gpu(**gpu), EMULATED.active():
        return run(EMULATED, case)


def run_and_record(case: dict[str, object], **gpu: int) -> tuple[tuple[Tensor, Tensor], list[tuple[int, int, int]]]:
    """The result, and each copy of 16 bytes to shared memory: (block, groups that its thread had committed before, address)."""
    machine = emulator.load()
    machine.record_copies()
    try:
        result = run_on_gpu(case, **gpu)
    finally:
        copies = machine.taken_copies()
    return result, copies


def runs(backend: Backend, case: dict[str, object]) -> list[Tensor]:
    """Results for bitwise comparison with other runs: the emulator's launches alternate between four sizes of GPU."""
    return [tensor for _ in range(sized(backend, 4, 1)) for tensor in run(backend, case)]


def assert_same_runs(ours: list[Tensor], theirs: list[Tensor], rows: object = ...) -> None:
    for left, right in zip(ours, theirs, strict=True):
        assert_same_bits(left[rows], right[rows])


def error_bound(case: dict[str, object], exact: AttentionTerms) -> Tensor:
    """A hard bound for each element of out: the rounding of out, that of p above and below the fraction, and the logits'
    errors: u |o| + u (A + |o|) + (2 delta + 2^-20) A with delta that of D products added in fp32, of tanh, and of a sink; with
    sinks a GPU rounds out twice.
    """
    unit, dim = UNIT[case["q"].dtype], case["q"].shape[-1]
    scale = dim**-0.5 if case["scale"] is None else case["scale"]
    delta = dim * 2.0**-24 * abs(scale) * exact.reach + case["softcap"] * 2.0**-21
    if case["sinks"] is not None:
        delta = delta + 2.0**-23 * case["sinks"].double().abs().nan_to_num(posinf=0.0)
    magnitude, out = exact.magnitude, exact.out.abs()
    roundings = 1 if case["sinks"] is None else 2
    return roundings * unit * out + unit * (magnitude + out) + (2 * delta[..., None] + 2.0**-20) * magnitude


def lse_bound(case: dict[str, object], lse: Tensor) -> Tensor:
    return 2e-5 + 2.0**-21 * lse.abs() + case["softcap"] * 2.0**-21


def assert_within(what: str, actual: Tensor, exact: Tensor, bound: Tensor) -> None:
    """Compares element by element; infinities must agree. The message names the worst element."""
    same_infinity = (actual.double() == exact) & exact.isinf()
    excess = torch.where(same_infinity, 0.0, (actual.double() - exact).abs() / bound)
    assert not excess.isnan().any(), f"{what} is NaN at {excess.isnan().nonzero()[0].tolist()}"
    if excess.numel() and excess.max() > 1:
        place = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
        raise AssertionError(
            f"{what}: {int((excess > 1).sum())} of {excess.numel()} elements beyond their bound, at most "
            f"{excess.max():.3g} times, at {place}: {actual[place].item()!r}, exact {exact[place].item()!r}"
        )


def assert_right(
    result: tuple[Tensor, Tensor], case: dict[str, object], exact: AttentionTerms, factor: float = 1.0
) -> None:
    smallest = torch.finfo(result[0].dtype).smallest_normal * UNIT[result[0].dtype]
    assert_within("lse", result[1], exact.lse, factor * lse_bound(case, exact.lse))
    assert_within("out", result[0], exact.out, factor * error_bound(case, exact) + smallest)


@threads(1)
def check(backend: Backend, prefixes: list[int], sizes: list[int], **options) -> None:
    """attention_tree is right, within the bound, on a random case."""
    case, exact = solved(prefixes, sizes, **options)
    assert_right(run(backend, case), case, exact)
