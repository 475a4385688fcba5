"""PaSS inside a real vLLM engine on the CPU: SmolLM2-135M-Instruct in fp32, held-out prompts.

The texts are vLLM's own without speculation, token for token; the guesses are those of ``pass_ext.generate``.
"""

import pytest
import torch
from vllm_job import run_engine

import pass_ext
from benchmarks.decoding.prompts import read_prompts
from pass_ext.checkpoint import load_checkpoint
from pass_ext.modules.lookahead import LookaheadEmbedding

NEW = 48
SLOTS = "smollm2-135m-instruct-slots"
GREEDY = {"temperature": 0.0, "max_tokens": NEW}


def with_pass(drafts, slots=SLOTS, **settings):
    model = "pass_ext.integrations.vllm.PaSS"
    return {
        "speculative_config": {"method": "custom_class", "model": model, "num_speculative_tokens": drafts},
        "additional_config": {"pass_ext": {"slots": str(slots), "pause": False, **settings}},
    }


@pytest.fixture(scope="session")
def loaded(gguf):
    """The transformers model and its tokenizer."""
    return load_checkpoint(gguf, torch.float32, weights="dense")


@pytest.fixture(scope="session")
def prompts(loaded):
    """Twenty: nine of chat, six of code, five of prose."""
    counts = {"chat": 9, "code": 6, "prose": 5}
    return [list(p.ids) for domain, count in counts.items() for p in read_prompts(domain, loaded[1], count)]


@pytest.fixture(scope="session")
def run(model_folder, tmp_path_factory):
    return lambda calls, **options: run_engine(
        tmp_path_factory.mktemp("engine"),
        model_folder,
        calls,
        dtype="float32",
        **{"environment": {"PASS_EXT_VLLM": "on"} if "speculative_config" in options else {}, **options},
    )


@pytest.fixture(scope="session")
def plain(run, prompts):
    """vLLM's own texts, one prompt at a time and eight at a time."""
    calls = [{"prompts": prompts, "sampling": GREEDY, "batch": batch} for batch in (1, 8)]
    return run(calls)["texts"]


@pytest.fixture(scope="session")
def two_calls(run, prompts):
    """The published cycle: four slots, then four guesses."""
    calls = [{"prompts": prompts, "sampling": GREEDY, "batch": batch} for batch in (1, 8)]
    return run(calls, **with_pass(4))


def test_greedy_texts_are_vllms_own(plain, two_calls):
    assert two_calls["texts"] == plain
    assert any("PaSS drafts with 4 slots" in line for line in two_calls["log"])


def test_slots_after_the_guesses_change_no_text(run, prompts, plain):
    calls = [{"prompts": prompts, "sampling": GREEDY, "batch": 8}]
    for drafts in (2, 7):
        assert run(calls, **with_pass(drafts))["texts"] == plain[1:]


class Steps:
    """A streamer that counts the drafted tokens that each step accepts, also after the end of the text."""

    def __init__(self):
        self.accepted = []

    def put(self, prompt):
        pass

    def put_step(self, tokens, accepted):
        self.accepted.append(accepted)

    def end(self):
        pass


def forced(text):
    """A logits processor under which the text begins so, whatever the model prefers; slots are not asked."""

    def force(ids, logits):
        if ids.shape[1] >= len(text):
            return logits
        alone = torch.full_like(logits, -torch.inf)
        alone[:, text[ids.shape[1]]] = 0.0
        return alone

    return force


def test_acceptance_is_that_of_generate(loaded, prompts, plain, two_calls):
    """The same slots and cycle on vLLM's own texts, for near ties may fall otherwise in another engine. Rows are a number: no
    measured time pauses drafting. vLLM's prompts have no slots, so the first token belongs to the prompt here."""
    method = pass_ext.PaSS(LookaheadEmbedding.from_pretrained(SLOTS), passes=2, rows=5, tree=pass_ext.Tree.chain(4))
    drafts, accepted = 0, []
    for ids, text in zip(prompts, plain[0], strict=True):
        steps, options = Steps(), {"logits_processor": [forced(ids + text)], "max_new_tokens": NEW + 8}
        pass_ext.generate(loaded[0], torch.tensor([ids + text[:1]]), method, streamer=steps, **options)
        left, is_draft = NEW - 1, False  # the prompt's call predicts, the next one judges, by turns
        for count in steps.accepted:
            if left > 0:
                drafts += is_draft
                accepted.append(count)
            left, is_draft = left - 1 - count, not is_draft
    counters, calls = two_calls["counters"], len(two_calls["texts"])
    assert counters["spec_decode_num_drafts"] == pytest.approx(calls * drafts, rel=0.01)
    expected = [calls * sum(count > place for count in accepted) for place in range(4)]
    assert counters["spec_decode_num_accepted_tokens"] == pytest.approx(sum(expected), rel=0.02)
    assert counters["spec_decode_num_accepted_tokens_per_pos"] == pytest.approx(expected, rel=0.02, abs=6)
    assert sum(expected) > 0.3 * calls * drafts


def test_the_counters_add_up(prompts, plain, two_calls):
    counters = two_calls["counters"]
    drafts, accepted = counters["spec_decode_num_drafts"], counters["spec_decode_num_accepted_tokens"]
    tokens = sum(len(text) for call in plain for text in call)
    requests = 2 * len(prompts)
    # Every request: one token from its prompt; then a step of slots and a step of guesses by turns, a token each.
    assert 0 <= requests + 2 * drafts + accepted - tokens <= 5 * requests
    assert 3.8 * drafts < counters["spec_decode_num_draft_tokens"] <= 4 * drafts
    per_position = counters["spec_decode_num_accepted_tokens_per_pos"]
    assert sum(per_position) == accepted and per_position == sorted(per_position, reverse=True)


def test_slots_of_any_numbers_change_no_text(run, prompts, plain, loaded, tmp_path):
    torch.manual_seed(0)
    slots = LookaheadEmbedding.from_pretrained(SLOTS)
    for parameter in slots.parameters():
        torch.nn.init.normal_(parameter, std=3.0)
    slots.save(tmp_path / "wild.safetensors")
    calls = [{"prompts": prompts[:8], "sampling": GREEDY}]
    assert run(calls, **with_pass(8, tmp_path / "wild.safetensors"))["texts"][0] == plain[1][:8]


def test_short_chunks_of_prompts_a_full_cache_and_shared_prefixes_change_no_text(run, prompts, plain):
    """Prompts in chunks of 32 tokens, room for few requests at a time, and every prompt twice."""
    calls = [{"prompts": prompts + prompts, "sampling": GREEDY}]
    texts = run(calls, max_num_batched_tokens=64, max_num_seqs=6, num_gpu_blocks_override=40, **with_pass(8))["texts"][
        0
    ]
    assert texts[:20] == texts[20:] == plain[1]


def test_texts_end_at_the_end_token_inside_a_block_and_at_the_longest_length(run, prompts, plain):
    ends = [text[9] for text in plain[1]]
    sampling = [{**GREEDY, "stop_token_ids": [end]} for end in ends]
    expected = [text[: text.index(end) + 1] for text, end in zip(plain[1], ends, strict=True)]
    assert run([{"prompts": prompts, "sampling": sampling}], **with_pass(8))["texts"][0] == expected
    longest = max(map(len, prompts)) + 20
    texts = run([{"prompts": prompts, "sampling": GREEDY}], **{**with_pass(8), "max_model_len": longest})["texts"][0]
    assert texts == [text[: longest - len(ids)] for text, ids in zip(plain[1], prompts, strict=True)]


def test_a_seed_gives_one_text_with_and_without_drafts_alone_and_in_a_batch(run, prompts):
    sampling = [{"temperature": 0.9, "top_p": 0.95, "top_k": 60, "seed": 100 + i, "max_tokens": 32} for i in range(8)]
    calls = [{"prompts": prompts[:8], "sampling": sampling, "batch": batch} for batch in (1, 8)]
    alone, together = run(calls, environment={"PASS_EXT_VLLM": "on"})["texts"]
    assert alone == together
    drafted = run(calls, **with_pass(8))
    assert drafted["texts"] == [alone, alone]
    assert drafted["counters"]["spec_decode_num_accepted_tokens"] > 40


def test_texts_under_a_grammar_are_vllms_own_beside_others_with_drafts(loaded, run, prompts):
    place = {"type": "object", "required": ["name", "size"], "additionalProperties": False}
    place["properties"] = {"name": {"type": "string", "maxLength": 12}, "size": {"type": "integer"}}
    sampling = [GREEDY, {**GREEDY, "schema": place, "detokenize": True}] * 3
    calls = [{"prompts": prompts[:6], "sampling": sampling}]
    expected = run(calls, skip_tokenizer_init=False)["texts"]
    result = run(calls, skip_tokenizer_init=False, **with_pass(4))
    assert result["texts"] == expected
    assert all(loaded[1].decode(text).startswith("{") for text in expected[0][1::2])
    assert result["counters"]["spec_decode_num_accepted_tokens"] > 5


def test_without_the_switch_pass_says_how_to_turn_it(run):
    with pytest.raises(RuntimeError, match="PaSS: needs PASS_EXT_VLLM=on"):
        run([], environment={}, **with_pass(4))


def test_a_wrong_option_ends_the_start_with_its_name_before_a_model_is_loaded(run):
    """In the first process: the sentence is the log's last line, and no other process has written one."""
    for options, message in (
        (with_pass(9), "ValueError: PaSS: num_speculative_tokens must be at most 8, "),
        (with_pass(4, slot="x"), "ValueError: additional_config['pass_ext']: 'slot' is not one of "),
    ):
        with pytest.raises(RuntimeError) as error:
            run([], **options)
        log = str(error.value)
        assert log.rstrip().splitlines()[-1].startswith(message)
        assert "EngineCore" not in log and "Loading" not in log
