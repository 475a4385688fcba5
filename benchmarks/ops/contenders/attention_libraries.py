"""Contenders that attend to a prefix and a tree: FlashInfer, vLLM and SGLang, where they are installed.

All four kernels read pages. The copies into pages, the plans and the masks are made untimed. A library at an unknown version
may crash a process or leave the GPU unusable, so `why_absent` tries each in another process: `python -m
benchmarks.ops.contenders.attention_libraries NAME`.
"""

import functools
import importlib.util
import inspect
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks import ROOT
from benchmarks.ops.contenders.attention import GPU, AttentionContender
from benchmarks.ops.contenders.inputs.attention_steps import PAGE, Spec, Step, excess, make_step, make_trees, reference

FLASHINFER, XQA, VLLM, SGLANG = "FlashInfer", "FlashInfer XQA", "vLLM", "SGLang"
SMALL = Spec(heads=8, kv_heads=2, head_dim=128, batch=1, prefix=500, nodes=20)
SECONDS = 150  # for one try, which may compile
WORKSPACE_BYTES = 256 * 2**20


@functools.cache
def why_absent(contender: str, package: str) -> str | None:
    """The reason why a library is not measured here; None if it is right on a small step."""
    if importlib.util.find_spec(package) is None:
        return "not installed"
    command = [sys.executable, "-m", "benchmarks.ops.contenders.attention_libraries", contender]
    try:
        tried = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return f"a small step took more than {SECONDS} s"
    printed = (tried.stdout + tried.stderr).strip().splitlines()
    return None if tried.returncode == 0 else (printed[-1][:100] if printed else f"exit status {tried.returncode}")


def main() -> None:
    """Tries one library on a small step: fails unless it agrees with the reference."""
    contender = next(library for library in LIBRARIES if library.name == sys.argv[1])
    generator = torch.Generator("cuda").manual_seed(0)
    with torch.inference_mode():
        step = make_step(make_trees(SMALL, torch.bfloat16, "cuda"), torch.bfloat16, "cuda", generator)
        assert contender.prepare is not None
        contender.prepare([step])
        worst = excess(step, contender(step), reference(step))
    torch.cuda.synchronize()
    if worst > 1:
        raise SystemExit(f"differs from the reference by {worst:.3g} × the bound for rounding")


# ---- pages ----


def page(steps: Sequence[Step]) -> Tensor:
    """Copies the cache of every step into pages, in order; returns the block table [B, pages of a request]."""
    spec = steps[0].spec
    for step in steps:
        if step.pages is None:
            split = (cache.unflatten(2, (-1, PAGE)) for cache in (step.k, step.v))
            k, v = (cache.permute(0, 2, 3, 1, 4).flatten(0, 1).contiguous() for cache in split)
            step.pages = k, v
    pages = spec.slots // PAGE
    return torch.arange(spec.batch * pages, dtype=torch.int32, device=steps[0].q.device).view(spec.batch, pages)


# ---- FlashInfer ----


def prepare_flashinfer(steps: Sequence[Step]) -> None:
    """Plans FlashInfer's prefill with a custom mask, which it packs into bits."""
    import flashinfer

    table, trees, spec = page(steps), steps[0].trees, steps[0].spec
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=table.device), "NHD"
    )
    prefix = torch.ones(spec.batch, spec.nodes, spec.prefix, dtype=torch.bool, device=table.device)
    wrapper.plan(
        trees.cu_nodes,
        torch.arange(spec.batch + 1, dtype=torch.int32, device=table.device) * table.shape[1],
        table.flatten(),
        torch.full_like(trees.prefix_lens, (spec.keys - 1) % PAGE + 1),
        spec.heads,
        spec.kv_heads,
        spec.head_dim,
        PAGE,
        custom_mask=torch.cat([prefix, trees.seen], dim=2).flatten(),
        q_data_type=steps[0].q.dtype,
        kv_data_type=steps[0].q.dtype,
    )
    trees.prepared[FLASHINFER] = wrapper


def with_flashinfer(step: Step) -> Any:
    """FlashInfer's prefill kernel on tensor cores."""
    return step.trees.prepared[FLASHINFER].run(step.q, step.pages)


def prepare_xqa(steps: Sequence[Step]) -> None:
    """Makes XQA's mask, rows of 32-bit words, and its workspace of zeros."""
    from flashinfer import decode

    table, trees, spec = page(steps), steps[0].trees, steps[0].spec
    halves = trees.visible.view(torch.uint16)[:, : -(-spec.nodes // 32) * 2]
    trees.prepared[XQA] = (
        decode.xqa_batch_decode_with_kv_cache,
        torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=table.device),
        table,
        torch.full_like(trees.prefix_lens, spec.keys),
        halves.contiguous().view(spec.batch, spec.nodes, -1),
    )


def with_xqa(step: Step) -> Any:
    """FlashInfer's XQA kernel for decoding with drafts."""
    decode, workspace, table, lengths, mask = step.trees.prepared[XQA]
    spec = step.spec
    out = decode(
        step.q,
        step.pages,
        workspace,
        table,
        lengths,
        spec.keys,
        bmm1_scale=spec.head_dim**-0.5,
        bmm2_scale=1.0,
        kv_layout="NHD",
        q_len_per_req=spec.nodes,
        mask=mask,
    )
    return out.view(step.q.shape)


# ---- vLLM ----


def prepare_vllm(steps: Sequence[Step]) -> None:
    """Makes vLLM's bias between queries from the tree, one for all requests."""
    from vllm.v1.attention.ops import triton_unified_attention

    table, trees, spec = page(steps), steps[0].trees, steps[0].spec
    bias = torch.zeros(spec.nodes, spec.nodes, device=table.device).masked_fill_(~trees.seen[0], float("-inf"))
    trees.prepared[VLLM] = (
        triton_unified_attention.unified_attention,
        table,
        torch.full_like(trees.prefix_lens, spec.keys),
        bias,
    )


def with_vllm(step: Step) -> Tensor:
    """vLLM's Triton kernel. Causal, as trees are whose nodes stand after their parents."""
    attend, table, lengths, bias = step.trees.prepared[VLLM]
    assert step.pages is not None
    k, v = step.pages
    out = torch.empty_like(step.q)
    attend(
        q=step.q,
        k=k,
        v=v,
        out=out,
        cu_seqlens_q=step.trees.cu_nodes,
        max_seqlen_q=step.spec.nodes,
        seqused_k=lengths,
        max_seqlen_k=step.spec.keys,
        softmax_scale=step.spec.head_dim**-0.5,
        causal=True,
        window_size=(-1, -1),
        block_table=table,
        softcap=0.0,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        qq_bias=bias,
    )
    return out


# ---- SGLang ----


def prepare_sglang(steps: Sequence[Step]) -> None:
    """Makes SGLang's slots of the prefixes, keys and values of the nodes apart from them, and the mask."""
    from sglang.srt.layers.attention.triton_ops.extend_attention import extend_attention_fwd

    table, trees, spec = page(steps), steps[0].trees, steps[0].spec
    device = table.device
    first = torch.arange(spec.batch, device=device)[:, None] * spec.slots
    prefix = torch.ones(spec.batch, spec.nodes, spec.prefix, dtype=torch.bool, device=device)
    nodes = [
        tuple(
            cache[:, :, spec.prefix : spec.keys].transpose(1, 2).flatten(0, 1).contiguous()
            for cache in (step.k, step.v)
        )
        for step in steps
    ]
    scales = {"k_scale": 1.0, "v_scale": 1.0}
    takes_scales = "k_scale" in inspect.signature(extend_attention_fwd).parameters
    trees.prepared[SGLANG] = (
        extend_attention_fwd,
        {id(step): k_and_v for step, k_and_v in zip(steps, nodes, strict=True)},
        {
            "qo_indptr": trees.cu_nodes,
            "kv_indptr": torch.arange(spec.batch + 1, dtype=torch.int32, device=device) * spec.prefix,
            "kv_indices": (first + torch.arange(spec.prefix, device=device)).flatten(),
            "custom_mask": torch.cat([prefix, trees.seen], dim=2).flatten(),
            "is_causal": True,
            "mask_indptr": torch.arange(spec.batch + 1, device=device) * (spec.nodes * spec.keys),
            "max_len_extend": spec.nodes,
            **(scales if takes_scales else {}),
        },
    )


def with_sglang(step: Step) -> Tensor:
    """SGLang's Triton kernel for verification."""
    attend, nodes, options = step.trees.prepared[SGLANG]
    k_new, v_new = nodes[id(step)]
    assert step.pages is not None
    k, v = (pages.flatten(0, 1) for pages in step.pages)
    out = torch.empty_like(step.q)
    attend(step.q, k_new, v_new, out, k, v, **options)
    return out


LIBRARIES = [
    AttentionContender(FLASHINFER, with_flashinfer, devices=GPU, prepare=prepare_flashinfer, package="flashinfer"),
    AttentionContender(XQA, with_xqa, devices=GPU, prepare=prepare_xqa, package="flashinfer"),
    AttentionContender(VLLM, with_vllm, devices=GPU, prepare=prepare_vllm, package="vllm", one_request=True),
    AttentionContender(SGLANG, with_sglang, devices=GPU, prepare=prepare_sglang, package="sglang"),
]

if __name__ == "__main__":
    main()
