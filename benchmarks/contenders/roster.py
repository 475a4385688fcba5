"""The contenders: how each is started, in which environment, with which options.

llama.cpp's speculation without a second model has five kinds in its server (`common_speculative_type`): n-grams of three sorts
(simple, map-k, map-k4v), a hashed table (mod) and a cache of n-gram counts (cache). The first three run with n-grams of 3
tokens and drafts of 8: as they come they look up 12 tokens, which texts of this length hardly ever repeat.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.contenders.workers import names

LLAMA, LLAMA_NATIVE = "llama.cpp", "llama.cpp, built here"
PLAIN_LLAMA = (LLAMA, LLAMA_NATIVE)
"""llama.cpp without speculation: the wheel, and a build for this processor."""
SHORT = {"size_n": 3, "size_m": 8}


@dataclass(frozen=True)
class Entry:
    """One contender."""

    name: str
    module: str
    python: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    most_seconds: float = 120.0
    """To start, to compile, and for one text."""
    shows_parts: bool = False
    """True: the parts of its step are measured."""


@dataclass(frozen=True)
class Places:
    """Where the environments and the weights are; None: that contender is not raced."""

    python: Path
    llama_python: Path | None
    vllm_python: Path | None
    source: str
    """The GGUF file of the demo."""
    gguf: Path
    """The same weights in bfloat16."""
    folder: Path
    """The same weights as safetensors."""
    step_times: Path
    threads: int


def entries(places: Places, *, compiled: bool) -> list[Entry]:
    """All contenders; `compiled`: vLLM with torch.compile, too."""
    return [*_ours(places), *_llama(places), *_vllm(places, compiled)]


def stored_entries(places: Places, files: Mapping[str, Path]) -> list[Entry]:
    """The contenders with weights of few bits. files: the model for llama.cpp, by format."""
    ours = [
        _our(places, f"{name}{words}", name, weights=weights)
        for weights, words, raced in (
            ("stored", "", (names.PLAIN, names.PASS, names.ADAPTED)),
            ("dense", ", bfloat16", (names.PLAIN, names.ADAPTED)),
        )
        for name in raced
    ]
    return [
        *ours,
        *(
            replace(entry, name=f"{entry.name}, {kind}")
            for kind, file in files.items()
            for entry in _llama(replace(places, gguf=file))
            if entry.name in PLAIN_LLAMA
        ),
    ]


def _our(
    places: Places, name: str, contender: str, dtype: str = "bfloat16", parts: bool = False, weights: str = "dense"
) -> Entry:
    options = {"model": places.source, "contender": contender, "dtype": dtype, "threads": places.threads}
    options |= {"step_times": str(places.step_times), "weights": weights}
    return Entry(name, "ours", places.python, options, _openmp(places), shows_parts=parts)


def _ours(places: Places) -> list[Entry]:
    entry = partial(_our, places)

    return [
        entry(names.PLAIN, names.PLAIN, parts=True),
        entry(names.NGRAM, names.NGRAM),
        entry(names.PASS, names.PASS, parts=True),
        entry(names.ADAPTED, names.ADAPTED, parts=True),
        entry(names.JOINED, names.JOINED, parts=True),
        entry(names.PLAIN_FLOAT, names.PLAIN, "float32", parts=True),
        entry(names.TRANSFORMERS, names.GENERATE),
    ]


def _llama(places: Places) -> list[Entry]:
    if places.llama_python is None:
        return []
    common = {"gguf": str(places.gguf), "threads": places.threads}
    environment = _openmp(places)

    def server(name: str, kind: str, part: str = "", sizes: Mapping[str, int] | None = None) -> Entry:
        options = {**common, "speculation": kind, "sizes": {part: sizes} if sizes else {}}
        return Entry(name, "llama_server", places.llama_python or Path(), options, environment)

    def native(name: str, lookup: int) -> Entry:
        options = {**common, "lookup": lookup}
        return Entry(name, "llama_native", places.llama_python or Path(), options, environment)

    return [
        server(LLAMA, "NONE"),
        server(f"{LLAMA}, ngram-simple 3→8", "NGRAM_SIMPLE", "ngram_simple", SHORT),
        server(f"{LLAMA}, ngram-map-k 3→8", "NGRAM_MAP_K", "ngram_map_k", SHORT),
        server(f"{LLAMA}, ngram-map-k4v 3→8", "NGRAM_MAP_K4V", "ngram_map_k4v", SHORT),
        server(f"{LLAMA}, ngram-mod", "NGRAM_MOD"),
        server(f"{LLAMA}, ngram-cache", "NGRAM_CACHE"),
        native(LLAMA_NATIVE, 0),
        native(f"{LLAMA_NATIVE}, prompt lookup", 8),
    ]


def _vllm(places: Places, compiled: bool) -> list[Entry]:
    if places.vllm_python is None:
        return []
    environment = dict(vllm_environment(places))

    def entry(name: str, eager: bool, ngram: bool, most_seconds: float) -> Entry:
        options = {"folder": str(places.folder), "eager": eager, "ngram": ngram}
        return Entry(name, "vllm_engine", places.vllm_python or Path(), options, environment, most_seconds)

    eager = [entry("vLLM, eager", True, False, 240.0)]
    return [*eager, entry("vLLM", False, False, 420.0)] if compiled else eager


def _openmp(places: Places) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(places.threads), "OMP_PROC_BIND": "true"}


def vllm_environment(places: Places) -> dict[str, str]:
    """The variables that vLLM's CPU build is documented with: Intel's OpenMP, threads that it does not bind, a small cache."""
    assert places.vllm_python is not None
    openmp = places.vllm_python.parent.parent / "lib" / "libiomp5.so"
    return {
        "OMP_NUM_THREADS": str(places.threads),
        "OMP_PROC_BIND": "false",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "",
        "HF_HUB_OFFLINE": "1",
        **({"LD_PRELOAD": str(openmp)} if openmp.exists() else {}),
    }
