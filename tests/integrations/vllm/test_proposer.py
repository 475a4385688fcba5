"""PaSS as a proposer of vLLM, on made-up steps: which rows guess, for whom, and when slots come back alone."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pass_ext import LookaheadEmbedding, draft_sample
from pass_ext.decoding.sampling import BatchSampling
from pass_ext.integrations.vllm import proposer, settings
from pass_ext.integrations.vllm.proposer import PaSS
from pass_ext.integrations.vllm.sampling.chains import SampledStep
from pass_ext.modules.slot_adapters import AdapterSize, SlotAdapters

VOCABULARY, WIDTH, SLOTS = 40, 8, 4
GREEDY = BatchSampling(None, None, None, None, None)


@pytest.fixture
def slots(tmp_path):
    def save(rank=0):
        torch.manual_seed(3)
        lookahead = LookaheadEmbedding(SLOTS, WIDTH, rank=rank, vocabulary=VOCABULARY)
        if rank:
            torch.nn.init.normal_(lookahead.transition_right)
        lookahead.save(tmp_path / "slots.safetensors")
        return str(tmp_path / "slots.safetensors")

    return save


def config(slots, drafts=8, rule="coupled", pause=False, **changes):
    model = SimpleNamespace(
        get_vocab_size=lambda: VOCABULARY,
        get_hidden_size=lambda: WIDTH,
        use_fp64_gumbel=False,
        hf_text_config=SimpleNamespace(num_hidden_layers=1),
        enable_prompt_embeds=False,
        is_encoder_decoder=False,
        is_hybrid=False,
        is_attention_free=False,
    )
    parts = SimpleNamespace(
        additional_config={"pass_ext": {"slots": slots, "rule": rule, "pause": pause}},
        model_config=model,
        parallel_config=SimpleNamespace(pipeline_parallel_size=1, use_ubatching=False),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
        speculative_config=SimpleNamespace(
            method="custom_class",
            model="pass_ext.integrations.vllm.PaSS",
            rejection_sample_method="standard",
            num_speculative_tokens=drafts,
            num_speculative_tokens_per_batch_size=None,
        ),
        lora_config=None,
    )
    for name, value in changes.items():
        owner = next(part for part in (parts, *vars(parts).values()) if hasattr(part, name))
        setattr(owner, name, value)
    return parts


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = torch.nn.Embedding(VOCABULARY, WIDTH)


@pytest.fixture
def make(monkeypatch, slots):
    monkeypatch.setattr(proposer, "is_replaced", lambda: True)

    def pass_proposer(rank=0, **options):
        proposer = PaSS(config(slots(rank), **options))
        proposer.load_model(Model())
        return proposer

    return pass_proposer


def slot_ids(count):
    return list(range(VOCABULARY, VOCABULARY + count))


def a_step(drafts, emitted, sampling=GREEDY, positions=None, seed=0):
    """A step of requests with these drafts; its logits are random."""
    width = max(map(len, drafts)) + 1
    return SampledStep(
        request_ids=[f"r{b}" for b in range(len(drafts))],
        logits=torch.randn(
            sum(len(line) + 1 for line in drafts), VOCABULARY, generator=torch.Generator().manual_seed(seed)
        ),
        tokens=torch.tensor([token for line in drafts for token in (-1, *line)]),
        drafts=[len(line) for line in drafts],
        emitted=torch.tensor([[*line, *[-1] * (width - len(line))] for line in emitted]),
        positions=torch.tensor(positions or [5] * len(drafts)),
        sampling=sampling,
    )


def propose(pass_proposer, step, emitted, texts=None):
    """texts: in front of what the step emitted; None: they recall nothing."""
    pass_proposer.observe(step)
    known = np.full((len(emitted) + 2, 64), -1, dtype=np.int32) if texts is None else texts
    return pass_proposer.propose(emitted, None, known, slot_mappings=None)


def best(step, rows):
    return step.logits[rows].argmax(dim=1).tolist()


def test_a_request_that_read_its_prompt_gets_slots_and_one_that_still_reads_gets_nothing(make):
    step = a_step([[], []], [[4], []])
    assert propose(make(), step, [[4], []]) == [slot_ids(4), []]


@pytest.mark.parametrize("drafts,guesses,after", [(8, 4, 4), (6, 4, 2), (5, 4, 1), (4, 4, 0), (3, 3, 0), (1, 1, 0)])
def test_slots_that_stood_after_the_whole_text_guess_and_new_ones_follow(make, drafts, guesses, after):
    before = slot_ids(min(4, drafts))
    step = a_step([before], [[9]])
    rows = list(range(1, 1 + guesses))
    assert propose(make(drafts=drafts), step, [[9]]) == [[*best(step, rows), *slot_ids(after)]]


def test_guesses_follow_what_the_text_repeats(make):
    """1 2 9 3 stands in the text, and the step emits 1 2 9 again; columns after the text are not read."""
    step = a_step([[1, 2, *slot_ids(3)], slot_ids(2)], [[1, 2, 9], [9]], positions=[4, 5])
    texts = np.full((2, 64), 9, dtype=np.int32)
    texts[0, :4] = 1, 2, 9, 3
    texts[1, :5] = 4, 5, 6, 7, 8
    first, second = propose(make(), step, [[1, 2, 9], [9]], texts)
    assert first[0] == 3 != best(step, [3])[0] and second[:2] == best(step, [7, 8])


def test_slots_after_accepted_guesses_guess_in_the_same_call(make):
    step = a_step([[1, 2, *slot_ids(3)]], [[1, 2, 7]])
    assert propose(make(), step, [[1, 2, 7]]) == [[*best(step, [3, 4, 5]), *slot_ids(4)]]


def test_a_rejected_guess_brings_the_slots_back_alone(make):
    step = a_step([[1, 2, *slot_ids(4)]], [[1, 7]])
    assert propose(make(), step, [[1, 7]]) == [slot_ids(4)]


def test_guesses_without_slots_after_them_bring_the_slots_back_even_if_all_were_accepted(make):
    step = a_step([[1, 2]], [[1, 2, 7]])
    assert propose(make(drafts=4), step, [[1, 2, 7]]) == [slot_ids(4)]


def test_a_batch_of_all_kinds(make):
    drafts = [slot_ids(4), [1, *slot_ids(2)], [], [3, 4, *slot_ids(4)], slot_ids(2)]
    emitted = [[9], [1, 8], [6], [5], []]
    step = a_step(drafts, emitted)
    assert propose(make(), step, emitted) == [
        [*best(step, [1, 2, 3, 4]), *slot_ids(4)],
        [*best(step, [7, 8]), *slot_ids(4)],
        slot_ids(4),
        slot_ids(4),
        [],
    ]


def sampling_of(requests):
    return BatchSampling(
        torch.full((requests,), 1.3),
        torch.full((requests,), 12, dtype=torch.int32),
        torch.full((requests,), 0.9),
        None,
        torch.arange(requests) + 77,
    )


def test_with_rule_coupled_guesses_are_drawn_under_the_noise_that_will_judge_them(make):
    sampling = sampling_of(2)
    emitted = [[9], [1, 8]]
    step = a_step([slot_ids(2), [1, *slot_ids(2)]], emitted, sampling, positions=[20, 30])
    proposed = propose(make(drafts=2), step, emitted)
    # Request 0 emitted position 20, so its guesses are for 21 and 22; request 1 emitted 30 and 31.
    expected = []
    for b, (rows, first) in enumerate((([1, 2], 21), ([5, 6], 32))):
        parameters = sampling.of_requests(torch.tensor([b])).repeated(2).keywords()
        drawn, _ = draft_sample(
            step.logits[rows], 1, mode="coupled", positions=torch.arange(first, first + 2), **parameters
        )
        expected.append(drawn.flatten().tolist())
    assert proposed == expected
    assert proposed != [best(step, [1, 2]), best(step, [5, 6])]


@pytest.mark.parametrize("rule", ["rejection", "block", "typical"])
def test_other_rules_judge_guesses_that_know_nothing_of_their_noise(make, rule):
    step = a_step([slot_ids(4)], [[9]], sampling_of(1))
    assert propose(make(drafts=4, rule=rule), step, [[9]]) == [best(step, [1, 2, 3, 4])]


def test_transition_scores_reorder_the_guesses_after_the_last_token(make):
    pass_proposer = make(rank=3, drafts=4)
    step = a_step([[1, *slot_ids(3)]], [[1, 9]])
    left, right = pass_proposer._lookahead.transition_tables(pass_proposer._table)
    expected, last = [], 9
    for row in range(2, 5):
        last = int((step.logits[row] + right @ left[last]).argmax())
        expected.append(last)
    assert propose(pass_proposer, step, [[1, 9]]) == [[*expected, *slot_ids(1)]]
    assert expected != best(step, [2, 3, 4])


def test_the_pause_follows_measured_time(make, monkeypatch):
    """A machine on which drafting costs more than it gives: after the trials nothing is proposed, mostly."""
    clock = [0.0]
    monkeypatch.setattr(proposer.time, "perf_counter", lambda: clock[0])
    pass_proposer, lengths, drafts = make(pause=True), [], []
    for _ in range(400):
        step = a_step([drafts], [[9]])
        drafts = propose(pass_proposer, step, [[9]])[0]
        clock[0] += 1.0 + 0.5 * len(drafts)
        lengths.append(len(drafts))
    assert lengths[0] == 4 and {0, 2, 4, 8} == set(lengths)
    assert sum(length == 0 for length in lengths[100:]) > 0.7 * len(lengths[100:])


def test_times_between_different_batches_do_not_count(make, monkeypatch):
    counted = []
    pass_proposer = make(pause=True)
    monkeypatch.setattr(pass_proposer._length, "add", lambda *step: counted.append(step[0]))
    for requests in (1, 1, 2, 2, 2, 1):
        propose(pass_proposer, a_step([[]] * requests, [[9]] * requests), [[9]] * requests)
    assert counted == [1, 2, 2]
    propose(pass_proposer, a_step([[]], [[]]), [[]])  # a prompt is still being read
    assert counted == [1, 2, 2]


def test_a_step_that_pass_ext_did_not_sample_is_an_error(make):
    pass_proposer = make()
    with pytest.raises(RuntimeError, match="without a step that pass_ext sampled"):
        pass_proposer.propose([[1]], None, None)


def test_without_the_accept_step_pass_says_how_to_switch_it_on(make, slots, monkeypatch):
    monkeypatch.setattr(proposer, "is_replaced", lambda: False)
    with pytest.raises(ValueError, match="PaSS: needs PASS_EXT_VLLM=on"):
        PaSS(config(slots()))


@pytest.fixture(params=[settings.check, PaSS], ids=["in the first process", "in a worker"])
def start(request, monkeypatch):
    """What checks the options of an engine."""
    monkeypatch.setattr(proposer, "is_replaced", lambda: True)
    return request.param


@pytest.mark.parametrize(
    "changes,message",
    [
        (dict(pipeline_parallel_size=2), "not with pipeline_parallel_size: slots enter on the first stage"),
        (dict(use_ubatching=True), "not with enable_dbo: "),
        (dict(num_speculative_tokens_per_batch_size=[(1, 8, 4)]), "not with num_speculative_tokens_per_batch_size: "),
        (dict(lora_config=object()), "not with lora_config: "),
        (dict(enable_prompt_embeds=True), "not with enable_prompt_embeds: "),
        (dict(is_encoder_decoder=True), "not with encoder-decoder models: "),
        (dict(is_hybrid=True), "not with models with recurrent layers: "),
        (dict(drafts=9), r"num_speculative_tokens must be at most 8, .* got 9"),
        (dict(rule="best"), "rule must be one of coupled, rejection"),
    ],
)
def test_options_that_cannot_be_honoured_are_refused_by_name(start, slots, changes, message):
    with pytest.raises(ValueError, match=message):
        start(config(slots(), **changes))


def test_settings_are_checked(start, slots):
    wrong = config(slots())
    for values, message in (
        ({"slot": "x"}, "'slot' is not one of rule, slots, pause"),
        ({"slots": "smollm"}, "'smollm' is neither a file nor one of the shipped names: "),
        ({"pause": "no"}, "pause must be a bool, got 'no'"),
        ("x", r"additional_config\['pass_ext'\] must be an object, got 'x'"),
        ({}, r"not with an empty additional_config\['pass_ext'\]\['slots'\]"),
    ):
        wrong.additional_config = {"pass_ext": values}
        with pytest.raises(ValueError, match=message):
            start(wrong)


def test_slots_of_other_models_and_parts_that_vllms_models_lack_are_refused_by_name(start, tmp_path):
    adapters = SlotAdapters({"0.q_proj": AdapterSize(WIDTH, WIDTH, 2)})
    for lookahead, message in (
        (LookaheadEmbedding(SLOTS, WIDTH, adapters=adapters), "have adapters, which .* to vLLM's layers"),
        (LookaheadEmbedding(SLOTS, WIDTH + 1), "hidden size: it has 9, this model has 8"),
        (LookaheadEmbedding(SLOTS, WIDTH, vocabulary=99), "vocabulary: it has 99, this model has 40"),
        (LookaheadEmbedding(SLOTS, WIDTH, deep_layers=3), "layers: it has 3, this model has 1"),
    ):
        lookahead.save(tmp_path / "slots.safetensors")
        with pytest.raises(ValueError, match=message):
            start(config(str(tmp_path / "slots.safetensors")))


def test_another_proposer_of_that_name_is_refused_and_one_from_elsewhere_is_not_looked_at(slots):
    for model, is_refused in (("pass_ext.integrations.vllm.Pass", True), ("mine.Proposer", False)):
        other = config(slots(), drafts=99, model=model)
        if is_refused:
            with pytest.raises(ValueError, match=r"proposer is pass_ext\.integrations\.vllm\.PaSS, got '.*\.Pass'"):
                settings.check(other)
        else:
            settings.check(other)


def test_other_slots_give_other_compiled_code(make, slots, tmp_path):
    first, same = config(slots()), config(slots())
    PaSS(first), PaSS(same)
    other = config(slots(rank=2))
    PaSS(other)
    digests = [c.additional_config["pass_ext_slots"] for c in (first, same, other)]
    assert digests[0] == digests[1] != digests[2]
