"""What pass_ext replaces or calls in vLLM, read from vLLM's source files: signatures and digests of bodies.

    python tests/integrations/vllm/signatures.py FOLDER_OF_VLLM > tests/integrations/vllm/signatures-VERSION.json

A body has a digest where pass_ext does what it does, or relies on what it does; comments and docstrings do not count.
"""

import ast
import hashlib
import json
import sys
from pathlib import Path

WITH_BODY = {
    "v1/worker/gpu_model_runner.py": ["GPUModelRunner._sample", "GPUModelRunner._bookkeeping_sync"],
    "v1/worker/gpu_input_batch.py": ["InputBatch.refresh_metadata", "InputBatch._make_sampling_metadata"],
    "v1/sample/metadata.py": ["SamplingMetadata"],
    "v1/spec_decode/metadata.py": ["SpecDecodeMetadata"],
    "v1/sample/sampler.py": [
        "Sampler.sample",
        "Sampler.apply_logits_processors",
        "Sampler.apply_temperature",
        "Sampler.compute_logprobs",
        "Sampler.gather_logprobs",
        "Sampler.gather_specific_token_logprobs",
    ],
    "v1/sample/rejection_sampler.py": [
        "RejectionSampler.apply_logits_processors",
        "RejectionSampler._combine_outputs_with_spec_tokens",
        "RejectionSampler.apply_penalties",
        "RejectionSampler.parse_output",
    ],
    "v1/sample/logits_processor/__init__.py": ["build_logitsprocs"],
    "v1/sample/logits_processor/builtin.py": [
        "MinPLogitsProcessor",
        "LogitBiasLogitsProcessor",
        "MinTokensLogitsProcessor",
    ],
    "v1/worker/gpu/spec_decode/rejection_sampler.py": [
        "gather_draft_sampled",
        "RejectionSampler._verify_in_chunks",
    ],
    "v1/worker/gpu/sample/sampler.py": ["Sampler.apply_sampling_params", "Sampler._sample_random"],
    "v1/metrics/stats.py": ["RequestSpecDecodeMetrics.observe"],
    "v1/worker/gpu/sample/states.py": ["SamplingStates.add_request", "SamplingStates.apply_temperature"],
}
SIGNATURES = {
    "engine/arg_utils.py": ["EngineArgs.create_engine_config"],
    "config/model.py": ["ModelConfig.get_hidden_size", "ModelConfig.get_vocab_size"],
    "v1/worker/worker_base.py": ["WorkerWrapperBase.init_device"],
    "v1/worker/gpu_model_runner.py": [
        "GPUModelRunner._get_spec_decode_draft_probs",
        "GPUModelRunner._get_draft_token_ids_cpu",
    ],
    "v1/worker/gpu_input_batch.py": [
        "InputBatch.update_async_output_token_ids",
        "InputBatch.update_async_spec_token_ids",
    ],
    "v1/core/sched/scheduler.py": ["Scheduler.update_from_output", "Scheduler.make_spec_decoding_stats"],
    "v1/core/sched/output.py": ["SchedulerOutput"],
    "v1/spec_decode/custom_class_proposer.py": ["create_custom_proposer"],
    "v1/outputs.py": ["SamplerOutput"],
    "v1/sample/ops/topk_topp_sampler.py": ["apply_top_k_top_p"],
    "v1/sample/thinking_budget_state.py": [
        "ThinkingBudgetStateHolder.has_tracked_requests",
        "ThinkingBudgetStateHolder.update_state",
        "ThinkingBudgetStateHolder.apply_to_logits",
    ],
    "v1/worker/gpu/spec_decode/rejection_sampler_utils.py": ["rejection_sample"],
    "v1/worker/gpu/sample/gumbel.py": ["gumbel_sample"],
    "config/vllm.py": ["VllmConfig.use_v2_model_runner"],
}


def named(tree, name):
    """The definition of "function", "Class" or "Class.function"."""
    node = tree
    for part in name.split("."):
        (node,) = [n for n in node.body if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and n.name == part]
    return node


def signature(node):
    """The arguments of a function, or the fields of a class."""
    if isinstance(node, ast.FunctionDef):
        return ast.unparse(node.args)
    return "; ".join(ast.unparse(n) for n in node.body if isinstance(n, ast.AnnAssign))


def digest(node):
    for part in ast.walk(node):
        if isinstance(part, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(part, clean=False) is not None:
            part.body = part.body[1:] or [ast.Pass()]
    return hashlib.sha256("\n".join(map(ast.unparse, node.body)).encode()).hexdigest()[:16]


def read(folder):
    """{file: {name: [signature, digest]}}; names without a digest have the signature only."""
    record = {}
    for table, has_digest in ((WITH_BODY, True), (SIGNATURES, False)):
        for file, names in table.items():
            tree = ast.parse((Path(folder) / file).read_text())
            for name in names:
                node = named(tree, name)
                text = [signature(node)]
                record.setdefault(file, {})[name] = [*text, digest(node)] if has_digest else text
    return record


if __name__ == "__main__":
    print(json.dumps(read(sys.argv[1]), indent=1))
