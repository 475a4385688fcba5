"""benchmarks.decoding: loops are found, prompts are held out, the race is fair, sums are right, page and picture show them.

The cases are constructed, the model is tiny and random. Speed itself is not tested.
"""

import copy
import json
import os
import re
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from support.paths import ROOT

# ---- texts ----


def noise(count, seed=0, vocabulary=500):
    return torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_loops_are_found():
    from benchmarks.decoding.texts import loops

    counting = [token for i in range(21) for token in (7, 8, 9, 3, 100 + i, 4)]  # a template with a number in it
    late = noise(86) + [5] * 42
    period = noise(40) + noise(11, seed=1) * 8
    broken = noise(60) + [token for i in range(5) for token in [*noise(12, seed=1), 300 + i]]
    once = noise(30) + noise(40, seed=1) + noise(10, seed=2) + noise(40, seed=1)
    for text in (counting, late, period, broken, once):
        assert loops(text), text


def test_repeated_words_alone_are_no_loop():
    from benchmarks.decoding.texts import loops

    straight = noise(128)
    few_words = noise(128, vocabulary=12)
    quoted = noise(60) + noise(14, seed=1) + noise(40, seed=2) + noise(14, seed=1)
    early = [5] * 20 + noise(108)
    for text in (straight, few_words, quoted, early, [], [3], noise(20)):
        assert not loops(text), text


def test_repeated_share_counts_tokens_after_a_gram_seen_before():
    from benchmarks.decoding.texts import period_share, repeated_share

    part = noise(20)
    assert repeated_share(part) == 0
    assert repeated_share(part + part) == (20 - 8) / 40
    assert repeated_share([*part, *part[:10], 999]) == 2 / 31, "two follow as before, the third does not"
    assert repeated_share(part + part, gram=4) == 16 / 40
    assert period_share(part * 3) == 1 and period_share(noise(60)) < 0.2


def test_first_difference():
    from benchmarks.decoding.texts import first_difference

    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2, 3], [1, 2]) == first_difference([1, 2], [1, 2, 3]) == 2


# ---- prompts ----


class Words:
    """A tokenizer with a token per word or line end, and a chat template."""

    def __call__(self, text, add_special_tokens=True):
        return SimpleNamespace(input_ids=[hash_of(word) for word in re.findall(r"\S+|\n", text)])

    def apply_chat_template(self, messages, add_generation_prompt, tokenize):
        assert add_generation_prompt and not tokenize
        return f"<user> {messages[0]['content']} <assistant>"


def hash_of(word):
    return sum(ord(c) * 31**i for i, c in enumerate(word)) % 1009


@pytest.mark.parametrize("name", ["prose", "chat"])
def test_written_prompts(name):
    from benchmarks.decoding.prompts import read_lines, read_prompts

    entries = read_lines(name)
    assert len(entries) >= 24
    for key in ("id", "text"):
        assert len({entry[key] for entry in entries}) == len(entries)
    prompts = read_prompts(name, Words(), 99)
    assert [prompt.name for prompt in prompts] == [entry["id"] for entry in entries]
    assert len(read_prompts(name, Words(), 5)) == 5
    if name == "prose":
        for entry in entries:
            assert 2 <= len(re.findall(r"[.!?](?= |$)", entry["text"])) <= 4, entry
    else:
        assert all(
            prompt.ids[0] == hash_of("<user>") and prompt.ids[-1] == hash_of("<assistant>") for prompt in prompts
        )


def test_chat_prompts_are_no_training_instructions_in_other_words():
    from benchmarks.decoding.prompts import read_lines

    def words(text):
        return set(re.findall(r"\w+", text.lower()))

    trained = [words(line) for line in (ROOT / "pass_ext/training/instructions.txt").read_text().splitlines() if line]
    for entry in read_lines("chat"):
        prompt = words(entry["text"])
        assert max(len(prompt & other) / len(prompt | other) for other in trained) < 0.5, entry


def test_code_prompts_are_cut_by_rule_from_held_out_files_only(tmp_path):
    from benchmarks.decoding import prompts

    line = "    a = b + c"  # five tokens, six with the end of the line
    body = "\n".join(["import os", "x = 1", "", "def f(a):", *[line] * 60])
    names = [f"package/module_{i}.py" for i in range(40)] + ["test/support.py"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(body if name != "package/module_0.py" else "x = 1\n")
    code = list(prompts.code_prompts(Words(), tmp_path))
    assert code == []  # the only definition is in the first third
    for name in names:
        (tmp_path / name).write_text("\n".join([*["x = 1"] * 30, "class A:", *[line] * 60]))
    code = list(prompts.code_prompts(Words(), tmp_path))
    held_out = {name for name in names if prompts.is_held_out(name)}
    assert {prompt.name for prompt in code} == held_out - {"test/support.py"} and 0 < len(code) < 20
    assert [prompt.name for prompt in code] == [prompt.name for prompt in prompts.code_prompts(Words(), tmp_path)]
    for prompt in code:
        assert prompt.ids[:2] == (hash_of("class"), hash_of("A:"))
        assert prompts.FEWEST <= len(prompt.ids) <= prompts.MOST < len(prompt.ids) + 6
        assert prompt.ids[-1] == hash_of("c"), "a whole line, without its end"
    assert prompts.cut("def f():\n    return 1\n", Words()) is None


# ---- the race ----


def make_prompts(count, domains=("code", "prose")):
    from benchmarks.decoding.prompts import Prompt

    return [Prompt(domain, f"{domain}{i}", (i,)) for i in range(count) for domain in domains]


def recorder(name, calls, text_of):
    from benchmarks.decoding.contenders import Outcome
    from benchmarks.harness.cases import Contender

    def write(ids, setting, seed, most):
        calls.append((name, ids, seed))
        return Outcome(text_of(ids)[:most], calls=10, seconds=1.0)

    return Contender(name, write)


def run_race(text_of, straight=2, looping=1, out_of_time=lambda: False):
    from benchmarks.decoding.contenders import GREEDY
    from benchmarks.decoding.race import Limits, race

    calls = []
    contenders = [recorder(name, calls, text_of) for name in ("Plain", "A", "B", "C")]
    limits = Limits(128, straight, looping, out_of_time)
    return (*race(make_prompts(6), contenders, GREEDY, limits), calls)


def test_the_race_takes_so_many_prompts_of_each_kind():
    def text_of(ids):
        number = ids[0]
        return noise(128, seed=number) if number in (1, 4, 5) else [4] * 128 if number else noise(40)

    seen, runs, calls = run_race(text_of)
    raced = [(entry["prompt"], entry["looping"]) for entry in seen if entry["raced"]]
    assert raced == [(f"{d}{n}", n == 2) for n in (1, 2, 4) for d in ("code", "prose")]
    assert len(runs) == 4 * len(raced) and [entry["tokens"] for entry in seen[:2]] == [40, 40]
    assert not seen[0]["raced"], "too short"
    assert {run["looping"] for run in runs if run["prompt"].endswith("2")} == {True}
    screened = len(seen)
    assert screened == 10, "number 3 loops too, which only its text shows; number 5 is not needed"
    assert len(calls) == screened + len(runs)


def test_rounds_are_complete_shuffled_and_alike_every_time():
    _, _, calls = run_race(lambda ids: noise(128, seed=ids[0]), straight=6)
    rounds = [calls[i : i + 5] for i in range(0, len(calls), 5)]
    for first, *others in rounds:
        assert first[0] == "Plain" and sorted(call[0] for call in others) == ["A", "B", "C", "Plain"]
        assert len({call[1:] for call in (first, *others)}) == 1, "one prompt and one seed"
    assert len({tuple(call[0] for call in calls_of_round[1:]) for calls_of_round in rounds}) > 1
    assert run_race(lambda ids: noise(128, seed=ids[0]), straight=6)[2] == calls


def test_a_race_out_of_time_has_had_some_of_each_domain():
    left = iter([False, True])
    _, runs, _ = run_race(lambda ids: noise(128, seed=ids[0]), out_of_time=lambda: next(left))
    assert [run["domain"] for run in runs] == ["code"] * 4 + ["prose"] * 4


# ---- sums ----


def example_run(contender, prompt, seconds, tokens=100, domain="code", looping=False, setting="greedy", **others):
    fields = {"calls": tokens, "differs_at": None, "drafted": 0, "histogram": []}
    labels = dict(setting=setting, domain=domain, prompt=prompt, looping=looping, contender=contender)
    return {**labels, "tokens": tokens, "seconds": seconds, **fields, **others}


def example_runs(two=1.4, one=1.6, joined=2.0, hf=0.9):
    """Runs with these speed-ups; Plain takes 2 and 4 seconds."""
    speeds = {"PaSS, two passes": two, "PaSS, one pass": one, "PaSS, one pass + NGram": joined, "transformers": hf}
    runs = []
    for domain in ("code", "prose"):
        for prompt, seconds in (("a", 2.0), ("b", 4.0)):
            runs.append(example_run("Plain", prompt, seconds, domain=domain))
            runs += [example_run(name, prompt, seconds / speed, domain=domain) for name, speed in speeds.items()]
    return runs


def test_a_speed_up_is_time_per_token_on_the_same_prompts():
    from benchmarks.decoding.summary import summarise

    runs = [example_run("Plain", "a", 2.0), example_run("Plain", "b", 6.0), example_run("X", "a", 1.0, tokens=50)]
    runs.append(example_run("X", "b", 3.0, calls=25, drafted=80, histogram=[10, 5, 10], differs_at=7))
    plain, other = summarise(runs)
    assert plain["speed_up"] == plain["speed_up_p10"] == 1
    assert other["speed_up"] == pytest.approx((8 / 200) / (4 / 150)) and other["slowest_prompt"] == 1
    assert other["tokens_per_call"] == 150 / 75 and other["mean_acceptance_length"] == 2
    assert other["draft_acceptance_rate"] == 25 / 80 and plain["mean_acceptance_length"] is None
    assert other["equal_texts"] == 1 and other["first_difference"] == 7
    assert other["speed_up_p10"] == pytest.approx(1) and other["speed_up_p90"] == pytest.approx(2)


def test_sets_are_kept_apart_and_pooled():
    from benchmarks.decoding.summary import summarise

    runs = [
        *example_runs(),
        example_run("Plain", "loop", 1.0, looping=True),
        example_run("NGram", "loop", 0.1, looping=True),
    ]
    rows = summarise(runs)
    sets = [(row["looping"], row["domain"]) for row in rows if row["contender"] == "Plain"]
    assert sets == [(False, "code"), (False, "prose"), (False, "all"), (True, "code")]
    pooled = next(row for row in rows if row["domain"] == "all" and row["contender"] == "PaSS, two passes")
    assert pooled["prompts"] == 4, "prompts of one name in two domains are two"
    assert [row["speed_up"] for row in rows if row["contender"] == "NGram"] == [pytest.approx(10)]


@pytest.mark.parametrize(
    ("speeds", "device", "met"),
    [
        ({}, "cpu", [True, True, True, True, True]),
        ({}, "cuda", [True, False, True, True, True]),
        ({"two": 1.29, "one": 1.49, "joined": 0.9, "hf": 1.1}, "cpu", [False, False, False, False, True]),
    ],
)
def test_aims(speeds, device, met):
    from benchmarks.decoding.summary import judge, summarise, summarise_agreement

    agreement = summarise_agreement([{"contender": "Plain", "tokens": 9, "differs_at": None}])
    aims = judge(summarise(example_runs(**speeds)), agreement, device)
    assert [aim.met for aim in aims] == met
    assert "no text of chat" in aims[0].measured and "no text of code" not in aims[0].measured


def test_a_different_text_or_no_text_is_not_equality():
    from benchmarks.decoding.summary import judge, summarise_agreement

    runs = [{"contender": "Plain", "tokens": 9, "differs_at": at} for at in (None, 3)]
    aim = judge([], summarise_agreement(runs), "cpu")[-1]
    assert aim.met is False and "1 of 2" in aim.measured
    assert [aim.met for aim in judge([], [], "cpu")] == [None] * 5


# ---- sums with a draft model ----


def test_acceptance_rate_and_tokens_per_step():
    from benchmarks.decoding.drafts import acceptance_rate, tokens_per_step

    histogram = [4, 2, 0, 2]  # 8 steps, 8 accepted, 3 levels
    runs = [example_run("A", "a", 1.0, tokens=17, calls=9, histogram=histogram)]
    assert acceptance_rate(runs, False) == 8 / 24 and tokens_per_step(runs, False) == 2
    assert acceptance_rate(runs, True) == 16 / 24 and tokens_per_step(runs, True) == 17 / 8
    assert acceptance_rate([example_run("A", "a", 1.0, histogram=[0, 0])], False) is None


def planned_row(name, measured, spread=0.01, planned=2.0, levels=(2, 2)):
    ends = {"tokens_per_step_p10": measured - spread, "tokens_per_step_p90": measured + spread}
    plan = {"planned_tokens_per_step": planned, "planned_levels": list(levels)}
    return {"setting": "greedy", "contender": name, "prompts": 3, "tokens_per_step": measured, **ends, **plan}


def test_planned_against_measured():
    from benchmarks.decoding.drafts import judge_drafts

    cases = [
        ([planned_row("A", 1.85), planned_row("B", 2.15)], True),
        ([planned_row("A", 1.85), planned_row("B", 2.25)], False),
        ([planned_row("A", 1.75)], False),
        ([planned_row("A", 1.75, spread=0.1)], True),
        ([planned_row("A", 1.0, planned=1.0, levels=())], None),
        ([planned_row("A", 9.0) | {"setting": "temperature 0.8, top-k 10"}], None),
        ([], None),
    ]
    for rows, met in cases:
        (aim,) = judge_drafts(rows)
        assert aim.met is met, (rows, aim)
    assert "A: 1.85 (1.84–1.86), planned 2.00" in judge_drafts(cases[0][0])[0].measured


def draft_row(kind, rule="greedy", setting="greedy", rate=0.3, speed=1.5, **others):
    name = kind if rule == "greedy" else f"{kind} ({rule})"
    ends = {"speed_up": speed, "speed_up_p10": speed, "speed_up_p90": speed}
    counts = {"prompts": 2, "equal_texts": 2, "comparable_texts": True, "tokens_per_second": 40.0}
    per_step = {"tokens_per_step": 2.0, "draft_calls_per_step": 3.0, "mean_acceptance_length": 2.0}
    rule_of = {"exactness": "approximate" if rule == "longest_branch" else "exact", "acceptance_rate": rate}
    return dict(setting=setting, contender=name, kind=kind, rule=rule, **ends, **counts, **per_step, **rule_of) | others


def test_published_gains():
    from benchmarks.decoding import page as decoding_page

    first = "MCSD + target-initialised"
    rows = [
        draft_row("Plain", rate=None, speed=1.0, draft_calls_per_step=0.0, mean_acceptance_length=None),
        draft_row("Speculative, chain of 4", speed=1.25),
        draft_row("Speculative, auto", speed=9.0),
        draft_row("MCSD", rate=0.4, speed=1.2),
        draft_row("MCSD + slice", rate=0.3, speed=1.5),
        draft_row("MCSD + PaSS", rate=0.9, speed=9.0),
        draft_row(first, "longest_branch", rate=0.8, speed=1.1),
        draft_row(f"{first} + slice", "longest_branch", rate=0.6, speed=1.8),
    ]
    draft = {"names": {"draft model": "exit:small"}, "missing": {"decision model": "nowhere"}, "hit_rates": "its own"}
    result = example_result() | {"drafts": rows, "draft": draft}
    shown = {section.title: section for section in decoding_page.sections(result)}
    beside = {row[0]: row[1:] for row in shown["Beside published gains"].rows}
    assert beside["speculative sampling over Plain: speed"][1] == "1.25 × (Speculative, chain of 4)"
    assert beside["improved over plain MCSD: acceptance rate"][1] == f"+100 % ({first} (longest_branch))"
    assert beside["improved over plain MCSD: speed"][1] == f"+50 % ({first} + slice (longest_branch))"
    assert beside["the same steps with exact rules: acceptance rate"][1] == "-25 % (MCSD + slice)"
    assert beside["the same steps with exact rules: speed"][1] == "+25 % (MCSD + slice)"
    assert "Without decision model: nowhere." in shown["With a draft model: greedy"].words
    older = example_result()
    assert not any("draft" in section.title for section in decoding_page.sections(older)), "results without the part"


# ---- the whole, on a tiny model ----


@pytest.fixture(scope="module")
def model():
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=512, eos_token_id=63, pad_token_id=63, bos_token_id=62,
        initializer_range=0.5,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def draft(model):
    """The model with a little noise, so that many of its drafts are right."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    for parameter in other.parameters():
        parameter.add_(0.03 * parameter.std() * torch.randn(parameter.shape, generator=generator))
    return other


@pytest.fixture
def quick_times(monkeypatch, draft):
    from pass_ext.decoding.planning import plan
    from pass_ext.decoding.planning.step_times import StepTimes

    def times(adapted, graphs, lookahead=None):
        share = 0.1 if adapted.model is draft else 1.0
        return StepTimes((1, 64), (share, 1.2 * share))

    monkeypatch.setattr(plan, "measured_times", times)


class Letters(Words):
    def __call__(self, text, add_special_tokens=True):
        return SimpleNamespace(input_ids=[ord(letter) % 60 for letter in text[:24]])


def test_the_whole_run_on_a_tiny_model(model, draft, quick_times, tmp_path):
    import pass_ext
    from benchmarks.decoding import __main__ as command
    from benchmarks.decoding import page as decoding_page
    from benchmarks.decoding.drafts import Drafts, judge_drafts
    from benchmarks.decoding.summary import judge
    from benchmarks.harness.results import save
    from pass_ext.modules.decision import DecisionModel

    arguments = ["--quick", "--dtype", "float32", "--prompts", "1", "--tokens", "16", "--assistant-layers", "1"]
    options = command.parse("", arguments, command.add_options)
    options.seconds = 600.0
    lookahead = pass_ext.LookaheadEmbedding(2, 32, vocabulary=64)
    drafts = Drafts(lambda target: draft, DecisionModel("entropy"), {"draft model": "disturbed"})
    run = command.Run(options, model, Letters(), lookahead, drafts, lambda words: None)
    run.prompts = run.prompts[:6]
    measured = command.measure(run)
    greedy = [row for row in measured["runs"] if row["setting"] == "greedy"]
    contenders = {row["contender"] for row in greedy}
    assert len(contenders) == 7 and {"Plain", "transformers", "PaSS, one pass + NGram"} <= contenders
    assisted = [row for row in measured["runs"] if row["setting"] == "greedy, half as long"]
    assert [row["tokens"] for row in assisted] == [8] * 3
    for row in greedy + assisted:
        assert row["differs_at"] is None, "float32: all contenders write the same text"
    for row in measured["runs"]:
        assert row["seconds"] > 0 and 1 <= row["calls"] <= row["tokens"] <= 16, row
        if row["contender"] in ("Plain", "transformers"):
            assert row["calls"] == row["tokens"]
    assert {row["contender"] for row in measured["sweep"]} >= {"Plain"} and len(measured["sweep"]) >= 3
    assert all(row["planned_tokens_per_call"] >= 1 for row in measured["sweep"] if row["contender"] != "Plain")
    assert [row["rows"] for row in measured["steps"]] == [1, 2, 4, 8, 16, 24, 32, 48, 64]
    for row in measured["profile"]:
        assert row["verify_ms"] > 0 and row["accept_ms"] > 0 and row["rest_ms"] > 0, row
    assert {row["contender"] for row in measured["agreement"]} >= {"Speculative, chain of 4", "MCSD"}
    drafted = measured["drafts"]
    check_drafts(drafted, measured["draft_runs"])
    aims = [*judge(measured["rows"], measured["agreement"], "cpu"), *judge_drafts(drafted)]
    assert aims[4].met is True and all(aim.met is not None for aim in aims)
    result = example_result() | measured | {"aims": [vars(aim) for aim in aims]}
    save(result, tmp_path / "result.json")
    again = json.loads((tmp_path / "result.json").read_text())
    assert again == json.loads(json.dumps(result))
    page = decoding_page.render_page([(tmp_path / "result.json", again)])
    assert "PaSS, one pass" in page and "### With a draft model: greedy" in page
    assert "draft model disturbed; hit rates for auto: of 5 texts of other prompts" in page
    assert "### Beside published gains" in page and page.count("| MCSD + PaSS") == 2


def check_drafts(rows, runs):
    """Checks what holds for every run with a draft model."""
    greedy, sampled = (
        {row["contender"]: row for row in rows if (row["setting"] == "greedy") is kind} for kind in (True, False)
    )
    assert len(greedy) == 13 and len(sampled) == 18 and len(greedy) + len(sampled) == len(rows)
    for row in rows:
        if row["comparable_texts"] and row["exactness"] == "exact":
            assert row["equal_texts"] == row["prompts"], row
        drafts = row["kind"].startswith(("Speculative", "MCSD")) and row.get("planned_levels") != []
        assert (row["draft_calls_per_step"] > 0) == drafts and (not drafts or row["draft_ms_per_step"] > 0), row
        assert row["acceptance_rate"] is None or 0 <= row["acceptance_rate"] <= 1, row
        if row["rule"] == "longest_branch":
            assert row["exactness"] == "approximate"
            assert row["tokens_per_step"] == pytest.approx(row["mean_acceptance_length"], abs=0.2)
    chain = greedy["Speculative, chain of 4"]
    assert chain["acceptance_rate"] > 0.1 and 2.5 < chain["draft_calls_per_step"] <= 4
    assert greedy["MCSD"]["draft_calls_per_step"] <= 3
    assert greedy["MCSD + target-initialised (longest_branch)"]["draft_calls_per_step"] <= 2
    assert 1 <= greedy["MCSD + slice"]["draft_calls_per_step"] < 5
    assert greedy["MCSD, auto"]["planned_tokens_per_step"] > 1 and greedy["MCSD, auto"]["planned_levels"]
    rules = {row["rule"] for row in sampled.values() if row["kind"].startswith("MCSD")}
    every = {"rejection", "traversal", "kseq", "rejection_with_replacement", "longest_branch", "coupled"}
    assert rules == every and all(row["rule"] == "greedy" or row["exactness"] != "exact" for row in greedy.values())
    assert {run["contender"] for run in runs} == {*greedy, *sampled}


def test_without_drafts_the_rest_runs(model):
    import pass_ext
    from benchmarks.decoding.contenders import GREEDY, SAMPLED
    from benchmarks.decoding.drafts import entrants

    lookahead = pass_ext.LookaheadEmbedding(4, 32, vocabulary=64)
    names = [entrant.name for entrant in entrants(GREEDY, lookahead, None, None)]
    assert names == ["Plain", "PaSS", "PaSS + multi-candidate"]
    with_draft = [entrant.name for entrant in entrants(SAMPLED, lookahead, model, None)]
    assert len(with_draft) == len(set(with_draft)) == 16 and not any("decision" in name for name in with_draft)


def test_drafts_by_name(model, tmp_path):
    from benchmarks.decoding import __main__ as command
    from benchmarks.decoding.drafts import load_drafts
    from pass_ext.modules.decision import DecisionModel

    DecisionModel("entropy", threshold=0.3).save(tmp_path / "a-decision-entropy.safetensors")
    exits = pytest.importorskip("pass_ext.decoding.models.early_exit")
    arguments = [
        "--dtype",
        "float32",
        "--draft",
        "exit:1",
        "--decision",
        str(tmp_path / "a-decision-entropy.safetensors"),
    ]

    def options(*words):
        return command.parse("", words, command.add_options)

    loaded = load_drafts(options(*arguments), model, None)
    drafting = loaded.of(model)
    assert isinstance(drafting, exits.EarlyExitDraft) and drafting.layers == 1 and loaded.decision.threshold == 0.3
    assert loaded.names == {"draft model": "exit:1", "decision model": "a-decision-entropy.safetensors"}
    usual = load_drafts(options(), model, None)
    assert usual.of is None and "draft model" in usual.missing, "the shipped adapter is for another model"
    with pytest.raises(SystemExit, match="--draft exit:9"):
        load_drafts(options("--draft", "exit:9"), model, None)


def test_sampled_texts_are_those_of_plain(model, quick_times):
    import pass_ext
    from benchmarks.decoding.contenders import SAMPLED, contenders

    everyone = contenders(model, pass_ext.LookaheadEmbedding(2, 32, vocabulary=64))
    ours = [contender for contender in everyone if not contender.name.startswith("transformers")]
    texts = [contender((1, 2, 3), SAMPLED, 7, 12).tokens for contender in ours]
    assert len(texts) == 5 and all(text == texts[0] for text in texts)
    assert ours[0]((1, 2, 3), SAMPLED, 8, 12).tokens != texts[0]
    theirs = next(contender for contender in everyone if contender.name == "transformers")
    assert theirs((1, 2, 3), SAMPLED, 7, 12).tokens == theirs((1, 2, 3), SAMPLED, 7, 12).tokens


SCRIPT = """
import json, os, pathlib, sys
job = json.loads(pathlib.Path(sys.argv[1]).read_text())
assert (pathlib.Path(job["model"]) / "model.safetensors").exists() and job["eos"] == [63]
runs = [{"seconds": 0.5, "tokens": [len(ids), 2]} for ids in job["prompts"]]
result = {"versions": {"vllm": "0"}, "cores": len(os.sched_getaffinity(0)), "runs": runs}
pathlib.Path(sys.argv[2]).write_text(json.dumps(result))
"""


def test_another_process_beside_the_race(model, tmp_path, monkeypatch):
    from benchmarks.decoding import vllm_process

    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    monkeypatch.setattr(vllm_process, "SCRIPT", script)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, [min(cores)])  # as OMP_PROC_BIND does to the main thread
    try:
        row = vllm_process.run_vllm(sys.executable, model, "float32", [(1, 2), (3,)], [[2, 2], [9, 9]], 4)
    finally:
        os.sched_setaffinity(0, cores)
    assert row["cores"] == len(cores), "it must have as many cores as the race has"
    assert row["ms_per_token"] == 250 and row["equal_texts"] == 1 and "reason" not in row
    script.write_text("raise SystemExit('no such thing')")
    row = vllm_process.run_vllm(sys.executable, model, "float32", [(1, 2)], [[2, 2]], 4)
    assert "no such thing" in row["reason"] and "ms_per_token" not in row


# ---- page and picture ----


def example_result():
    from benchmarks.decoding.summary import summarise

    cpu = {"model": "A Processor", "cores": 2, "torch_threads": 2}
    return {
        "bench": "decoding",
        "date": "2026-01-02T03:04:05Z",
        "commit": "abc",
        "quick": False,
        "device": "cpu",
        "machine": {"cpu": cpu, "gpu": None, "kernels": {"cpu_isa": "avx2"}},
        "versions": {"torch": "2", "python": "3", "transformers": "5", "cuda": "none"},
        "load_average": {"before": 0.1, "after": 0.2},
        "model": {"name": "A model", "slots": 4},
        "settings": {"dtype": "bfloat16", "threads": 2, "tokens": 128, "looping": "so"},
        "left_out": [],
        "rows": summarise(example_runs()),
        **{key: [] for key in ("prompts", "sweep", "steps", "profile", "agreement", "runs", "aims")},
    }


def test_page_and_picture_change_with_the_result(tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks.decoding import page as decoding_page
    from benchmarks.harness.results import save

    path = tmp_path / "benchmarks/results/cpu-a/decoding.json"
    result = example_result()
    save(result, path)
    decoding_page.write(tmp_path)
    assert decoding_page.check(tmp_path) == []
    page, picture = path.with_suffix(".md"), path.with_suffix(".svg")
    text = page.read_text()
    assert "**1.40** (1.40–1.40)" in text and picture.name in text and "A Processor" in text
    page.write_text(text.replace("1.40", "1.41", 1))
    assert len(decoding_page.check(tmp_path)) == 1
    page.write_text(text)
    svg = picture.read_text()
    picture.write_text(svg.replace("0.9", "0.8", 1))
    assert len(decoding_page.check(tmp_path)) == 1
    picture.write_text(svg)
    result["rows"][1]["speed_up"] = 1.77
    save(result, path)
    assert len(decoding_page.check(tmp_path)) == 2
    save(result | {"quick": True}, path)
    assert len(decoding_page.check(tmp_path)) == 1, "a quick run is no result"
    decoding_page.write(tmp_path)
    assert not picture.exists() and "Nothing has been measured" in page.read_text()


def test_the_committed_page_shows_the_committed_results(tmp_path):
    from benchmarks.decoding import page as decoding_page

    assert decoding_page.check(ROOT) == [], "run: python -m benchmarks.pages"
    for path, result in decoding_page.committed(ROOT):
        assert str(ROOT) not in json.dumps(result) and shutil.which("python3") not in json.dumps(result), path
