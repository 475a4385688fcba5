"""Which tests must notice a fault in a file, and which objects are made of it: the quick ones, of the same column.

A C++ fault is built for one instruction set, so code of the others is not looked at here: test_core.py compares them all.
"""

_ACCEPT = [
    "tests/test_accept_core.py",
    "tests/test_accept.py",
    "-k",
    "not largest and not 1024 and not many_groups and not compiles and not thread_count and not odd_voc",
]
_ROWS = [*_ACCEPT[1:2], "tests/test_draft.py", *_ACCEPT[2:]]
_CORE = ["tests/test_core.py"]
_ATTENTION = ["tests/test_attention.py", "tests/test_attention_masks.py", "-k", "not compiles"]
_GENERATE = [
    "tests/test_pass_drafter.py",
    "tests/test_generate.py",
    "-k",
    "on_any_side or end_inside or one_new or processors_see or stopping or streamers or no_longer or used_again or goes_on "
    "or longer_than_a_call or noise or always_right",
]
_SPECULATIVE = [
    "tests/test_speculative.py",
    "-k",
    "per_level or no_more_levels or a_decision_says or scores or hidden_rows or not_read_again or fewer_positions or same_text "
    "or longer_than_what or may_differ or at_temperature_0 or other_tokenizers",
]

_BOTH = [*_GENERATE[:2], _SPECULATIVE[0], "-k", f"{_GENERATE[-1]} or {_SPECULATIVE[-1]} or always_wrong"]

# path below csrc/: the sources in cpu/ that are built again, the tests
_CPP: dict[str, tuple[list[str], list[str]]] = {
    "core/accept.h": (["accept"], _ACCEPT),
    "core/weights.h": (["rows", "accept"], _ACCEPT),
    "core/law.h": (["rows", "accept", "draft"], _ROWS),
    "core/noise.h": (["rows", "accept", "draft"], _ROWS),
    "core/draft.h": (["draft"], ["tests/test_draft.py"]),
    "core/attention.h": (["attention"], _ATTENTION),
    "core/cache.h": (["cache"], ["tests/test_cache.py"]),
    "core/lookahead.h": (["lookahead"], ["tests/test_lookahead.py"]),
    "core/tree.h": (["tree"], ["tests/test_tree.py"]),
    "core/elementary.h": ([], _CORE),
    "core/half.h": ([], _CORE),
    "core/philox.h": ([], _CORE),
    "core/scalar.h": ([], _CORE),
    "cpu/simd.h": ([], _CORE),
    "cpu/accept.cpp": (["accept"], _ACCEPT[1:]),
    "cpu/draft.cpp": (["draft"], ["tests/test_draft.py"]),
    "cpu/rows.h": (["rows", "accept", "draft"], _ROWS),
    "cpu/rows.cpp": (["rows"], _ROWS),
    "cpu/rows_kernels.h": (["rows"], _ROWS),
    "cpu/threads.h": (["accept", "draft"], _ROWS),
    "cpu/attention.h": (["attention"], _ATTENTION),
    "cpu/attention.cpp": (["attention"], _ATTENTION),
    "cpu/attention_kernels.h": (["attention"], _ATTENTION),
    "cpu/product.h": (["linear"], ["tests/test_linear.py"]),
    "cpu/linear.h": (["linear"], ["tests/test_linear.py"]),
    "cpu/linear.cpp": (["linear"], ["tests/test_linear.py"]),
    "cpu/linear_kernels.h": (["linear"], ["tests/test_linear.py"]),
    "cpu/lookahead.cpp": (["lookahead"], ["tests/test_lookahead.py"]),
    "cpu/lookahead_kernels.h": (["lookahead"], ["tests/test_lookahead.py"]),
    "cpu/cache.cpp": (["cache"], ["tests/test_cache.py"]),
    "cpu/tree.cpp": (["tree"], ["tests/test_tree.py"]),
    "cpu/tree_kernels.h": (["tree"], ["tests/test_tree.py"]),
}

# of pass_ext/decoding/
_PYTHON: dict[str, list[str]] = {
    "models/patching/attachment": ["tests/test_attachment.py", "-k", "not thread"],
    "models/patching/attention_arguments": ["tests/test_decoded_models.py"],
    "planning/calibration": ["tests/test_calibration.py"],
    "requests/config_processor": ["tests/test_generation_config.py"],
    "planning/cpu_watch": ["tests/test_step_times.py"],
    "models/vocabulary": _SPECULATIVE,
    "planning/draft_tree": ["tests/test_draft_plan.py"],
    "drafting/drafting": [
        "tests/test_pace.py",
        "tests/test_drafting_method.py",
        *_BOTH[:-1],
        f"{_BOTH[-1]} or drafting_method",
    ],
    "models/early_exit": ["tests/test_early_exit.py", "-k", "not train and not guides_command"],
    "drafting/early_stop": ["tests/test_early_flag.py"],
    "models/patching/few_rows": ["tests/test_linear.py", "-k", "not thread"],
    "loop": [*_BOTH[:3], "tests/test_decoded_models.py", "-k", f"{_BOTH[-1]} or longest_text or longest_branch"],
    "planning/hit_rates": ["tests/test_planner.py", "tests/test_pass_plan.py", "tests/test_calibration.py"],
    "models/hidden_rows": _SPECULATIVE,
    "planning/kept_step_times": ["tests/test_step_times.py"],
    "models/patching/layer_offsets": ["tests/test_lookahead_embedding.py"],
    "drafting/levels": _SPECULATIVE,
    "requests/listener": _GENERATE,
    "drafting/longest_branch": ["tests/test_speculative_laws.py"],
    "models/patching/mask_patterns": ["tests/test_row_attention.py"],
    "generation": _BOTH,
    "methods": _BOTH,
    "models/adapt": ["tests/test_generate.py", "-k", "refusals"],
    "models/early_exit_draft": ["tests/test_early_exit.py", "-k", "not train and not guides_command"],
    "drafting/of_method": ["tests/test_model_plan.py", "tests/test_drafting_method.py"],
    "drafting/drafter": ["tests/test_drafting_method.py"],
    "drafting/draft_calls": _SPECULATIVE,
    "drafting/step": _BOTH,
    "planning/measured": ["tests/test_pass_plan.py"],
    "planning/plan": ["tests/test_model_plan.py", "-k", "face"],
    "models/packed": _GENERATE,
    "drafting/from_draft_model": _SPECULATIVE,
    "planning/for_draft_model": ["tests/test_model_plan.py", "tests/test_pace.py", "-k", "model_plan or always_wrong"],
    "drafting/from_ngrams": ["tests/test_ngram.py"],
    "requests/node_processor": ["tests/test_generation_config.py"],
    "drafting/pace": ["tests/test_pace.py", "-k", "not always_wrong"],
    "drafting/from_lookahead": _GENERATE,
    "planning/for_lookahead": ["tests/test_pass_plan.py"],
    "models/peft_adapters": ["tests/test_adapted_models.py"],
    "models/plain_tensors": ["tests/test_adapted_models.py", "tests/test_linear.py", "-k", "not thread"],
    "planning/lookahead_tree": ["tests/test_planner.py", "tests/test_pass_plan.py"],
    "requests/processors": _GENERATE,
    "requests/prompts": _GENERATE,
    "rules": _SPECULATIVE,
    "profiling": _GENERATE,
    "models/patching/row_attention": ["tests/test_row_attention.py"],
    "sampling": _GENERATE,
    "session/opening": ["tests/test_session.py", "tests/test_decoded_models.py", "-k", "test_session or longest_text"],
    "session/packs": _GENERATE,
    "session/reading": _GENERATE,
    "session/session": ["tests/test_session.py", *_GENERATE[:-1], f"{_GENERATE[-1]} or test_session"],
    "requests/stateful_processors": ["tests/test_stateful_processors.py"],
    "stats": ["tests/test_stats.py"],
    "planning/step_times": ["tests/test_step_times.py"],
    "models/transformers": ["tests/test_decoded_models.py"],
}

TARGETS = {f"csrc/{name}": both for name, both in _CPP.items()}
TARGETS |= {f"pass_ext/decoding/{name}.py": ([], tests) for name, tests in _PYTHON.items()}
# Without tests here: the choice among instruction sets; what needs a GPU; what holds no code.
LEFT_OUT = ["csrc/core/platform.h", "csrc/core/grid.h"]
LEFT_OUT += [f"csrc/cpu/{name}" for name in ("isa.h", "isa.cpp", "each_isa.h", "buffer.h")]
LEFT_OUT += [f"pass_ext/decoding/{name}.py" for name in ("session/graphs", "session/uploads")]
