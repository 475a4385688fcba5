"""The tests that must notice a fault in a file, quick ones of the same op family, and the objects that are built from it.

A C++ fault is built for one instruction set, so code of the others gets none: test_core.py compares them all.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_ACCEPT = [
    "tests/core/test_accept_core.py",
    "tests/ops/accept/test_accept.py",
    "-k",
    "not largest and not 1024 and not many_groups and not thread_count and not odd_voc and not gpu_decides",
]
_ROWS = [*_ACCEPT[1:2], "tests/ops/test_draft.py", "tests/ops/every_op/test_mask_padding.py", *_ACCEPT[2:]]
_SUPPORT = ["tests/ops/accept/test_support.py", "-k", "not thread_count"]
_LOGPROBS = ["tests/ops/accept/test_logprobs.py", "-k", "not thread_count"]
_CORE = ["tests/core/test_core.py"]
_SHARD = [f"tests/ops/shard/test_shard{name}.py" for name in ("_borders", "_kernels", "")]
_ATTENTION = [
    "tests/ops/attention/test_attention.py",
    "tests/ops/attention/test_attention_masks.py",
    "tests/ops/attention/test_attention_one_row.py",
    "tests/ops/attention/test_attention_lists.py",
]
_CODES = [
    "tests/ops/attention/test_attention_codes.py",
    "tests/ops/test_quantize.py",
    "tests/ops/layer/test_layer_stack.py",
]
_GENERATE = [
    "tests/decoding/drafting/test_pass_drafter.py",
    "tests/decoding/test_generate.py",
    "-k",
    "on_any_side or end_inside or one_new or processors_see or stopping or streamers or no_longer or used_again or goes_on "
    "or longer_than_a_call or noise or always_right",
]
_SPECULATIVE = [
    "tests/decoding/drafting/test_speculative.py",
    "-k",
    "per_level or no_more_levels or a_decision_says or scores or hidden_rows or not_read_again or fewer_positions or same_text "
    "or longer_than_what or may_differ or at_temperature_0 or other_tokenizers",
]

_GRAMMAR = ["tests/decoding/loop/test_grammar.py", "tests/decoding/loop/test_grammar_laws.py", "-k", "not planted"]
_STATES = ["tests/ops/test_recurrent.py", "tests/ops/test_state.py", "tests/ops/test_convolution.py"]
_CHOSEN = ["tests/decoding/loop/test_chosen_step.py"]
_ROWS_OF_HOST = ["tests/decoding/drafting/test_chosen_rows.py"]
_PACE = ["tests/decoding/planning/test_pace.py"]
_LOOK_AHEAD = [
    *_ROWS_OF_HOST,
    *_CHOSEN,
    "tests/decoding/drafting/test_pass_drafter.py",
    *_GENERATE[:-1],
    f"{_GENERATE[-1]} or test_chosen_rows or test_pass_drafter or ragged",
]
_AHEAD = ["tests/decoding/loop/test_ahead.py"]
_BOTH = [*_GENERATE[:2], _SPECULATIVE[0], "-k", f"{_GENERATE[-1]} or {_SPECULATIVE[-1]} or always_wrong"]


def _files_of_families() -> dict[str, tuple[list[str], list[str]]]:
    """The files of every op family whose tests are one file."""
    found = {}
    for source in sorted(ROOT.glob("csrc/cpu/*.cpp")):
        family, tests = source.stem, f"tests/ops/test_{source.stem}.py"
        if (ROOT / tests).exists():
            patterns = (f"core/{family}.h", f"cpu/{family}.*", f"cpu/{family}_kernels-inl.h")
            files = [file for pattern in patterns for file in sorted((ROOT / "csrc").glob(pattern))]
            found |= {str(file.relative_to(ROOT / "csrc")): ([family], [tests]) for file in files}
    return found


# Path below csrc/ -> the sources in cpu/ that are built again, the tests. A new op family needs no line here.
_CPP = _files_of_families() | {
    "core/accept.h": (["accept"], _ACCEPT),
    "core/accept_walk.h": (["accept"], _ACCEPT),
    "core/inverse.h": (["rows", "accept"], [*_CORE, *_ACCEPT]),
    "core/weights-inl.h": (["rows", "accept"], _ACCEPT),
    "core/distribution.h": (["rows", "accept", "draft"], _ROWS),
    "core/noise.h": (["rows", "accept", "draft"], _ROWS),
    "core/attention.h": (
        ["attention"],
        [*_ATTENTION, *(f"tests/ops/attention/test_{x}.py" for x in ("attention_merge", "pages"))],
    ),
    "core/elementary-inl.h": ([], _CORE),
    "core/half.h": ([], _CORE),
    "core/philox.h": ([], _CORE),
    "core/scalar.h": ([], _CORE),
    "cpu/simd-inl.h": (["linear"], [*_CORE, "tests/ops/test_linear.py", "-k", "not thread"]),
    "core/logprobs.h": (["accept"], _LOGPROBS),
    "cpu/logprobs.h": (["accept"], _LOGPROBS),
    "cpu/support.h": (["accept"], _SUPPORT),
    "cpu/accept.cpp": (["accept"], _ACCEPT[1:]),
    "cpu/rows.h": (["rows", "accept", "draft"], _ROWS),
    "cpu/rows.cpp": (["rows"], [_SUPPORT[0], *_ROWS]),
    "cpu/rows_kernels-inl.h": (["rows"], [*_ROWS, *_SHARD]),
    "cpu/workers.h": (["accept", "draft", "linear"], ["tests/core/test_workers.py"]),
    "cpu/workers.cpp": (["workers"], ["tests/core/test_workers.py"]),
    "cpu/quota.h": ([], ["tests/core/test_quota.py"]),
    "cpu/attention.h": (["attention"], _ATTENTION),
    "cpu/attention.cpp": (["attention"], [*_ATTENTION, "tests/ops/attention/test_attention_merge.py"]),
    "cpu/attention_codes-inl.h": (["attention"], _CODES),
    "cpu/attention_by_tiles-inl.h": (["attention"], ["tests/ops/attention", "-k", "amx"]),
    "cpu/attention_few-inl.h": (["attention"], _ATTENTION),
    "cpu/attention_forms-inl.h": (["attention"], [*_ATTENTION, *_CODES]),
    "cpu/attention_kernels-inl.h": (["attention"], [*_ATTENTION, *_CODES]),
    "cpu/attention_tiles.h": (["attention"], _ATTENTION),
    "cpu/linear_kernels-inl.h": (["linear"], ["tests/ops/test_linear.py", "tests/ops/layer"]),
    "cpu/linear_tiles.h": (["linear", "linear_tiles"], ["tests/ops/test_linear.py", "-k", "amx"]),
    "cpu/linear_tiles.cpp": (["linear_tiles"], ["tests/ops/test_linear.py", "-k", "amx"]),
    "cpu/tiles.h": (["linear", "linear_tiles"], ["tests/ops/test_linear.py", "-k", "amx"]),
    "cpu/turn-inl.h": (["linear_tiles"], ["tests/ops/test_linear.py", "-k", "amx"]),
    "cpu/linear_packed-inl.h": (["linear_packed"], ["tests/ops/test_linear.py", "tests/ops/layer"]),
    "cpu/linear_packed.h": (["linear", "linear_packed"], ["tests/ops/test_linear.py"]),
    "cpu/linear_packed.cpp": (["linear_packed"], ["tests/ops/test_linear.py"]),
    "cpu/linear_pairs-inl.h": (["linear_packed"], ["tests/ops/test_linear.py"]),
    "cpu/row_blocks-inl.h": (["linear", "linear_packed"], ["tests/ops/test_linear.py", "tests/ops/layer"]),
    "cpu/layer.cpp": (["layer"], ["tests/ops/layer"]),
    "core/layer.h": (["layer"], ["tests/ops/layer/test_layer.py"]),
    "core/linear.h": (
        ["linear", "linear_packed", "layer", "layer_pack", "layer_stack"],
        ["tests/ops/test_linear.py", "tests/ops/layer"],
    ),
    "cpu/layer.h": (["layer", "layer_pack", "layer_stack"], ["tests/ops/layer"]),
    "cpu/layer_pack.cpp": (["layer_pack"], ["tests/ops/layer"]),
    "cpu/layer_pack.h": (["layer_pack", "layer_stack"], ["tests/ops/layer"]),
    "cpu/layer_stack.cpp": (["layer_stack"], ["tests/ops/layer"]),
    "core/next.h": (["next"], ["tests/ops/next"]),
    "core/next_tree.h": (["next"], ["tests/ops/next"]),
    "cpu/next.cpp": (["next"], ["tests/ops/next"]),
    "cpu/next_kernels-inl.h": (["next"], ["tests/ops/next"]),
    "core/recall.h": (["recall", "next"], ["tests/ops/test_recall.py", "tests/ops/next"]),
    "cpu/recall.cpp": (["recall"], ["tests/ops/test_recall.py"]),
    "cpu/recall-inl.h": (["recall", "next"], ["tests/ops/test_recall.py", "tests/ops/next"]),
    "cpu/recall_kernels-inl.h": (["recall"], ["tests/ops/test_recall.py"]),
    "core/step-inl.h": (["step"], ["tests/ops/test_step.py"]),
    "core/recurrent.h": (["recurrent", "state", "convolution"], _STATES),
    "core/recurrent-inl.h": (["recurrent", "state"], _STATES),
    "core/state.h": (["state"], _STATES),
    "core/attention_lists.h": (["attention"], ["tests/ops/attention/test_attention_lists.py"]),
    "core/quantize.h": (["attention", "quantize"], _CODES),
    "cpu/slice-inl.h": (["recurrent", "state", "convolution"], _STATES),
    "cpu/state.cpp": (["state"], _STATES),
    "cpu/state_kernels-inl.h": (["state"], _STATES),
    "core/shard.h": (["shard"], [*_SHARD, "tests/core/test_shard_core.py"]),
    "core/shard_combine.h": (["shard"], [*_SHARD, "tests/core/test_shard_core.py"]),
    "cpu/shard.cpp": (["shard"], _SHARD),
    "cpu/accept_checks.h": (["accept", "shard"], _ACCEPT),
    "cpu/product-inl.h": (["attention"], _ATTENTION),
    "cpu/transpose-inl.h": (["attention"], _ATTENTION),
}

_FUSED_FORWARD = ["tests/decoding/models/test_fused_forward.py", "tests/decoding/models/test_layers_one_by_one.py"]

_HEADS = [
    f"tests/decoding/drafting/test_{name}.py"
    for name in (
        "heads",
        "dflash",
        "dflash_laws",
        "dflash_rows",
        "eagle3",
        "eagle3_laws",
        "load_drafter",
        "mtp",
        "quantised_heads",
        "slots_below",
        "assistant",
    )
]
_WEIGHTS = [
    *(
        f"tests/weights/test_{name}.py"
        for name in ("formats", "stored_weights", "gguf_oss", "gguf_rotation", "quantised_folders", "packed_contract")
    ),
    "tests/ops/layer/test_packed_weights.py",
    "tests/decoding/drafting/test_gguf_heads.py",
    "tests/decoding/drafting/test_block_scaled_heads.py",
]


def _laws(kinds: str, *files: str) -> list[str]:
    """The laws of these models, and whole files of tests/decoding/models/."""
    paths = [f"tests/decoding/models/test_{name}.py" for name in ("contract", *files)]
    return [*paths, "-k", " or ".join([*kinds.split(), *(f"test_{name}" for name in files)])]


def _there(*features: str) -> list[str]:
    """Those of these features' tests that are there: deleting a feature changes no row of other files."""
    return [name for name in features if (ROOT / f"tests/decoding/models/test_{name}.py").exists()]


# Path below pass_ext/decoding/ -> the tests. A new file of heads/ needs no line, nor does one of pass_ext/weights/.
_PYTHON: dict[str, list[str]] = {
    "models/shadow": ["tests/decoding/models/test_model_meanwhile.py", "tests/decoding/models/test_layer_adapters.py"],
    **{
        f"drafting/heads/{file.stem}": _HEADS for file in sorted(ROOT.glob("pass_ext/decoding/drafting/heads/[!_]*.py"))
    },
    "models/cache": ["tests/integrations/transformers/test_transformers_cache.py"],
    "models/whole_prompts": ["tests/decoding/models/test_whole_prompts.py"],
    "models/taps": ["tests/decoding/drafting/test_taps.py", _HEADS[0]],
    "session/text_states": ["tests/decoding/drafting/test_taps.py", _HEADS[0]],
    "models/limits": ["tests/decoding/models/test_decoded_models.py", "tests/decoding/models/test_adapted_models.py"],
    "planning/calibration": ["tests/decoding/planning/test_calibration.py"],
    "models/vocabulary": [
        "tests/decoding/test_tensor_parallel.py",
        *_SPECULATIVE[:-1],
        f"{_SPECULATIVE[-1]} or tensor_parallel",
    ],
    "drafting/drafting": [
        "tests/decoding/planning/test_pace.py",
        "tests/decoding/drafting/test_drafting_method.py",
        *_BOTH[:-1],
        f"{_BOTH[-1]} or test_pace or drafting_method",
    ],
    "models/any_model": ["tests/decoding/models/test_adapted_models.py", "tests/decoding/test_wrong_types.py"],
    "models/early_exit": ["tests/decoding/models/test_early_exit.py", "-k", "not train and not guides_command"],
    **{f"models/{name}": _FUSED_FORWARD for name in ("fused_forward", "parts", "backend", "rotation_table")},
    **{
        f"models/{name}": ["tests/decoding/models/test_hybrid_models.py"]
        for name in ("features/states", "step_states", "features/lightning", "layer_kinds")
    },
    "models/features/latents": _laws("deepseek_v3", "latents"),
    "models/rebound": ["tests/decoding/models/test_known_parts.py"],
    **{
        f"models/features/{name}": _laws("inkling_text", "distance_bias")
        for name in ("distances", "distance_bias", "scaled_queries")
    },
    **{
        f"models/features/{name}": _laws("deepseek_v32 deepseek_v4 qwen4", *_there("latents"))
        for name in ("feature", "table")
    },
    **{
        f"models/features/{name}": _laws("gpt_neo bloom [mpt", "own_attention")
        for name in ("own_attention", "key_biases")
    },
    "models/encoders": ["tests/decoding/models/test_encoders.py"],
    "models/features/repeated_attention": _laws("diffllama dory", "repeated_layers"),
    "models/layer_attention": [
        "tests/decoding/test_cache_dtype.py",
        *_laws("deepseek_v32 deepseek_v4 minimax_m3 inkling test_cache_dtype", *_there("latents")),
    ],
    "models/cached_rows": [
        "tests/decoding/test_cache_dtype.py",
        *(f"tests/decoding/models/test_{name}.py" for name in _there("indexed")),
    ],
    "session/step_attention": [
        "tests/decoding/test_session.py",
        "tests/decoding/test_cache_dtype.py",
        *(
            f"tests/decoding/models/test_{name}.py"
            for name in ("fused_forward", *_there("latents", "compressed", "indexed"), "row_attention")
        ),
    ],
    "models/product_times": ["tests/ops/test_linear.py", "-k", "measure or faster or light"],
    "models/modules": ["tests/decoding/models/test_known_parts.py"],
    "models/module_ops": [
        "tests/decoding/models/test_known_parts.py",
        "tests/ops/test_linear.py",
        "-k",
        "not thread",
    ],
    "loop/loop": [*_AHEAD, *_PACE],
    "loop/device_step": [*_AHEAD, *_CHOSEN],
    "loop/pausing_step": [*_PACE, "tests/decoding/drafting/test_taps.py"],
    "loop/scores": ["tests/decoding/loop/test_scores.py"],
    "loop/texts": [*_AHEAD, *_GENERATE[:-1], f"{_GENERATE[-1]} or test_ahead"],
    "loop/host_step": [
        *_BOTH[:3],
        "tests/decoding/models/test_decoded_models.py",
        "-k",
        f"{_BOTH[-1]} or longest_text or longest_branch",
    ],
    "arguments": ["tests/decoding/test_wrong_types.py"],
    "models/slots": ["tests/decoding/models/test_layer_adapters.py", "tests/decoding/test_session.py"],
    "accept": [
        "tests/decoding/drafting/test_speculative_laws.py",
        *_SPECULATIVE[:-1],
        f"{_SPECULATIVE[-1]} or laws or judged_in_a_batch",
    ],
    "synthetic": ["tests/decoding/loop/test_synthetic.py"],
    "requests/corpus": ["tests/decoding/drafting/test_corpus.py"],
    "generation": [*_PACE, *_BOTH[:-1], f"{_BOTH[-1]} or test_pace"],
    "methods": [*_BOTH[:3], "tests/decoding/drafting/test_dflash.py", "-k", f"{_BOTH[-1]} or settings_that_do_not_fit"],
    "drafting/drafter": ["tests/decoding/drafting/test_drafting_method.py"],
    "drafting/draft_calls": _SPECULATIVE,
    "drafting/candidates": _BOTH,
    "models/packed": _GENERATE,
    "drafting/from_draft_model": _SPECULATIVE,
    "drafting/from_ngrams": ["tests/decoding/drafting/test_ngram.py", "tests/decoding/drafting/test_corpus.py"],
    "planning/pace": _PACE,
    "planning/constants": _PACE,
    "drafting/from_slots": [*_AHEAD, *_LOOK_AHEAD[:-1], f"{_LOOK_AHEAD[-1]} or test_ahead"],
    "drafting/slot_tokens": _LOOK_AHEAD,
    "drafting/device_rows": [*_AHEAD, *_LOOK_AHEAD[:-1], f"{_LOOK_AHEAD[-1]} or test_ahead"],
    "requests/processors": [
        "tests/decoding/test_stateful_processors.py",
        "tests/decoding/test_generation_config.py",
        *_GENERATE[:-1],
        f"{_GENERATE[-1]} or test_stateful or test_generation_config",
    ],
    "requests/grammar": _GRAMMAR,
    "requests/guides": _GRAMMAR,
    "requests/prompts": _GENERATE,
    **{
        f"models/{name}": _laws("deepseek_v32 minimax_m3", "indexed", "indexed_blocks", "indexed_heads")
        for name in ("features/indexed", "features/indexers")
    },
    **{
        f"models/{name}": _laws("qwen4", *_there("indexed_blocks")) for name in ("equivalence", "features/ngram_layers")
    },
    **{
        f"models/features/{name}": _laws("deepseek_v4", "compressed")
        for name in ("compressed", "compressors", "hash_routers")
    },
    "models/features/per_layer_inputs": [
        "tests/decoding/models/test_decoded_models.py",
        *_laws("gemma3n stand_for_pictures", "per_layer_inputs"),
    ],
    "models/one_order": ["tests/decoding/models/test_one_order.py"],
    "models/row_attention": [
        f"tests/decoding/models/test_{name}.py"
        for name in ("row_attention", "decoded_models", *_there("repeated_layers"), "falcon")
    ],
    "sampling": ["tests/decoding/loop/test_several_texts.py", *_GENERATE[:-1], f"{_GENERATE[-1]} or several_texts"],
    "session/past": [
        "tests/decoding/test_session.py",
        "tests/decoding/models/test_whole_prompts.py",
        "tests/decoding/models/test_encoders.py",
        "tests/decoding/models/test_hybrid_models.py",
    ],
    "session/reading": [
        "tests/decoding/loop/test_several_texts.py",
        "tests/decoding/loop/test_bf16_texts.py",
        *_GENERATE[:-1],
        f"{_GENERATE[-1]} or several_texts or beginning or read or texts_of_a_batch",
    ],
    "session/session": [
        "tests/decoding/test_session.py",
        "tests/decoding/loop/test_several_texts.py",
        "tests/decoding/models/test_decoded_models.py",
        *_GENERATE[:-1],
        "tests/decoding/models/test_hybrid_models.py",
        f"{_GENERATE[-1]} or test_session or longest_text or past or hybrid_models",
    ],
    "stats": ["tests/decoding/test_stats.py"],
    "models/transformers": [
        f"tests/decoding/models/test_{name}.py"
        for name in ("decoded_models", "model_meanwhile", "fused_forward", "hybrid_models")
    ],
    "planning/plan": [
        "tests/decoding/planning/test_plan.py",
        "tests/decoding/planning/test_pass_plan.py",
        "tests/decoding/planning/test_model_plan.py",
    ],
    "planning/step_times": [
        "tests/decoding/planning/test_step_times.py",
        "tests/decoding/planning/test_pass_plan.py",
        *_PACE,
    ],
}

TARGETS = {f"csrc/{name}": sources_and_tests for name, sources_and_tests in _CPP.items()}
TARGETS |= {f"pass_ext/decoding/{name}.py": ([], tests) for name, tests in _PYTHON.items()}
TARGETS |= {f"pass_ext/weights/{file.name}": ([], _WEIGHTS) for file in sorted(ROOT.glob("pass_ext/weights/[!_]*.py"))}
# Files without tests here: they choose among instruction sets or units, are for ARM, need a GPU or hold no code.
LEFT_OUT = ["csrc/core/platform.h", "csrc/core/grid.h"]
LEFT_OUT += [f"csrc/cpu/{name}" for name in ("isa.h", "isa.cpp", "each_isa.h", "buffer.h", "old_linux.cpp")]
LEFT_OUT += [f"csrc/cpu/{name}" for name in ("unit.h", "unit.cpp", "unit_kernels-inl.h")]
LEFT_OUT += ["csrc/cpu/simd_neon-inl.h", "csrc/cpu/linear_bytes-inl.h"]  # tests/core/test_neon.py
LEFT_OUT += [f"pass_ext/decoding/{name}.py" for name in ("session/recording",)]
