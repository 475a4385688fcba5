"""Our functions against the recorded signatures of vLLM's that they replace or call."""

import ast
import inspect
import json
from pathlib import Path

import pytest
from integrations.vllm import signatures

from pass_ext.integrations.vllm import replacements
from pass_ext.integrations.vllm.sampling import logits, runner_v1, runner_v2
from pass_ext.integrations.vllm.settings import TESTED

HERE = Path(__file__).parent
RECORDS = {version: json.loads((HERE / f"signatures-{version}.json").read_text()) for version in TESTED}


def arguments(record, file, name):
    """(names in order, names that have a default)"""
    node = ast.parse(f"def f({record[file][name][0]}): ...").body[0].args
    names = [a.arg for a in node.args if a.arg != "self"]
    return names, names[len(names) - len(node.defaults) :] if node.defaults else []


def fields(record, file, name):
    return {line.split(":")[0].strip() for line in record[file][name][0].split(";")}


@pytest.fixture(params=TESTED)
def record(request):
    return RECORDS[request.param]


def test_sample_of_runner_v1(record):
    names, _ = arguments(record, "v1/worker/gpu_model_runner.py", "GPUModelRunner._sample")
    assert ["runner", *names] == list(inspect.signature(runner_v1.sample).parameters)


def test_rejection_sample_of_runner_v2(record):
    names, optional = arguments(record, "v1/worker/gpu/spec_decode/rejection_sampler_utils.py", "rejection_sample")
    ours = list(inspect.signature(runner_v2.PackedAccept.__call__).parameters)
    assert ["self", *names[: len(names) - len(optional)], "others", "options"] == ours
    assert tuple(optional) == runner_v2.OPTIONS[: len(optional)]


def test_gumbel_sample_of_runner_v2(record):
    names, optional = arguments(record, "v1/worker/gpu/sample/gumbel.py", "gumbel_sample")
    ours = list(inspect.signature(runner_v2.SeededDraw.__call__).parameters)
    assert ["self", *names[: len(names) - len(optional)], "others", "options"] == ours


SAMPLER = "v1/sample/sampler.py"


@pytest.mark.parametrize(
    ("file", "name", "ours"),
    [
        (SAMPLER, "Sampler.apply_logits_processors", ["logits", "sampling_metadata", "predict_bonus_token"]),
        (SAMPLER, "Sampler.apply_temperature", ["logits", "temp", "all_random"]),
        (SAMPLER, "Sampler.compute_logprobs", ["logits"]),
        (SAMPLER, "Sampler.gather_logprobs", ["logprobs", "num_logprobs", "token_ids"]),
        (SAMPLER, "Sampler.gather_specific_token_logprobs", ["logprobs", "logprob_token_ids", "sampled"]),
        (
            "v1/sample/rejection_sampler.py",
            "RejectionSampler.apply_logits_processors",
            ["logits", "sampling_metadata", "metadata"],
        ),
        ("v1/sample/ops/topk_topp_sampler.py", "apply_top_k_top_p", ["logits", "k", "p"]),
        (
            "v1/sample/thinking_budget_state.py",
            "ThinkingBudgetStateHolder.update_state",
            ["output_token_ids", "spec_token_ids", "repeat_indices"],
        ),
        (
            "v1/sample/thinking_budget_state.py",
            "ThinkingBudgetStateHolder.apply_to_logits",
            ["logits", "predict_bonus_token", "spec_token_ids"],
        ),
        ("v1/worker/gpu_model_runner.py", "GPUModelRunner._get_spec_decode_draft_probs", ["spec_decode_metadata"]),
        ("v1/worker/gpu_model_runner.py", "GPUModelRunner._get_draft_token_ids_cpu", []),
        ("v1/worker/gpu_input_batch.py", "InputBatch.update_async_output_token_ids", []),
        ("v1/worker/gpu_input_batch.py", "InputBatch.update_async_spec_token_ids", ["draft_token_ids"]),
        ("v1/worker/worker_base.py", "WorkerWrapperBase.init_device", []),
    ],
)
def test_calls_that_pass_ext_makes(record, file, name, ours):
    """Arguments are passed in this order; vLLM may have optional ones after them."""
    names, optional = arguments(record, file, name)
    assert names[: len(ours)] == ours and set(names[len(ours) :]) <= set(optional)


def test_fields_that_pass_ext_reads(record):
    """Each attribute of vLLM's metadata in our source is a field there."""
    metadata = fields(record, "v1/sample/metadata.py", "SamplingMetadata")
    drafts = fields(record, "v1/spec_decode/metadata.py", "SpecDecodeMetadata")
    seen = set()
    for module in (runner_v1, logits):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                if node.value.id == "metadata":
                    assert node.attr in metadata
                    seen.add(node.attr)
                if node.value.id == "spec_decode_metadata":
                    assert node.attr in drafts
                    seen.add(node.attr)
    assert len(seen) > 12
    assert logits.RowCounts._fields == ("num_draft_tokens",)
    assert {"sampled_token_ids", "logprobs_tensors"} <= fields(record, "v1/outputs.py", "SamplerOutput")


def test_a_changed_body_shows():
    one, other = (
        ast.parse(f'class C:\n  def f(self):\n    """{text}"""\n    return {n}').body[0] for text, n in ("a1", "b2")
    )
    same = ast.parse('class C:\n  def f(self):\n    """c"""\n    return 1  # a comment').body[0]
    assert signatures.digest(one) == signatures.digest(same) != signatures.digest(other)


def test_the_scheduler_functions_that_count_drafts(record):
    scheduler = "v1/core/sched/scheduler.py"
    for name, ours, wrapped in (
        ("Scheduler.update_from_output", replacements._without_slots, scheduler),
        ("Scheduler.make_spec_decoding_stats", replacements._without_empty_drafts, scheduler),
        ("RequestSpecDecodeMetrics.observe", replacements._without_empty_steps, "v1/metrics/stats.py"),
    ):
        names, _ = arguments(record, wrapped, name)
        assert ["self", *names] == list(inspect.signature(ours(None)).parameters), name
    assert {"scheduled_spec_decode_tokens", "num_invalid_spec_tokens"} <= fields(
        record, "v1/core/sched/output.py", "SchedulerOutput"
    )
