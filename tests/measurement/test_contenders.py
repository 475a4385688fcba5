"""The contenders' benchmark: rounds, sums, aims, parts of a step, its page; the weights for llama.cpp; a worker's pipe."""

import json
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from support.paths import ROOT

if not (ROOT / "benchmarks").exists():
    pytest.skip("an sdist has no benchmarks", allow_module_level=True)

from benchmarks.contenders import page, process, roster, rounds, summary
from benchmarks.contenders.process import Worker, WorkerFailed
from benchmarks.contenders.rounds import Race, raced_text
from benchmarks.contenders.workers import names
from benchmarks.contenders.workers.step_parts import loop_and_once, sum_of_layers
from benchmarks.decoding.prompts import Prompt

LOOKUP = f"{roster.LLAMA}, ngram-mod"


def row(contender, turn, seconds, calls=10, others=0.0, differs_at=None):
    """Ten tokens of one turn."""
    texts = {"differs_at": differs_at, "differs_from_float32_at": 3}
    return {
        "contender": contender,
        "round": turn,
        "tokens": 10,
        "seconds": seconds,
        "calls": calls,
        "others": others,
    } | texts


def result():
    """Three rounds, the last one disturbed in the turn of one contender."""
    rows = [
        *(row(roster.LLAMA, turn, seconds) for turn, seconds in enumerate((1.0, 2.0, 1.0))),
        *(row(LOOKUP, turn, seconds, 5) for turn, seconds in enumerate((0.8, 1.6, 1.0))),
        row(names.PLAIN, 0, 0.5),
        row(names.PLAIN, 1, 2.0),
        row(names.PLAIN, 2, 0.01, others=0.4),
        row(names.PASS, 0, 0.4, 5, differs_at=7),
        row(names.PASS, 1, 1.0, 6),
        row(names.PASS, 2, 0.01),
    ]
    step = {
        "rows": 4.0,
        "ms": {"layers": 20.0, "small": 1.5, "loop": 0.75},
        "once_ms": 6.5,
        "bytes": {"layers": 200e6},
        "flops": {"layers": 1e9},
        "others": 0.0,
    }
    limits = {"read_gb_per_s": 20.0, "gflop_per_s": 200.0, "others": 0.0}
    measured = {
        "date": "2026-01-01T00:00:00Z",
        "commit": "abc",
        "machine": {"cpu": {"model": "a processor", "cores": 2}},
        "load_average": {"before": 0.2, "after": 2.0},
        "settings": {"model": "m", "length": 10, "threads": 2},
        "sittings": 1,
        "skipped": [{"prompt": "code a.py", "reason": "the text loops"}],
        "reasons": {"vLLM": "no answer in 9 s: killed"},
        "facts": {
            names.PLAIN: {"versions": {"torch": "2"}, "isa": "avx2"},
            names.PASS: {"versions": {"torch": "2"}, "isa": "avx2"},
            roster.LLAMA: {"versions": {"xllamacpp": "1"}},
        },
        "parts": {"limits": limits, names.PLAIN: step},
        "rows": rows,
    }
    return measured | {"aims": [vars(aim) for aim in summary.judge(measured)]}


# ---- sums and aims ----


def test_a_round_with_a_disturbed_turn_does_not_count():
    kept = summary.counted(result())
    assert {row["round"] for row in kept} == {0, 1} and len(kept) == 8
    beside = result()
    beside["settings"]["most_others"] = 0.6
    assert len(summary.counted(beside)) == 12, "where processes were to run beside"


def test_contenders_are_compared_with_the_baseline_of_the_same_round():
    lines = {line["contender"]: line for line in summary.lines(summary.undisturbed(result()["rows"]))}
    assert list(lines) == [names.PASS, names.PLAIN, LOOKUP, roster.LLAMA], "the fastest first"
    assert lines[names.PLAIN]["tokens_per_second"] == [12.5, 5.0, 20.0]
    assert lines[names.PLAIN]["against"] == [1.5, 1.0, 2.0]
    assert lines[names.PASS]["tokens_per_call"] == 20 / 11
    assert (lines[names.PASS]["same_text"], lines[names.PASS]["same_as_float32"]) == (1, 0)


def test_the_faster_build_of_llama_cpp_is_the_baseline():
    rows = result()["rows"]
    assert summary.baseline_of(rows) == roster.LLAMA
    assert summary.baseline_of([*rows, row(roster.LLAMA_NATIVE, 0, 0.9)]) == roster.LLAMA_NATIVE
    assert summary.baseline_of([*rows, row(roster.LLAMA_NATIVE, 0, 3.0)]) == roster.LLAMA
    assert summary.baseline_of([row for row in rows if row["contender"] != roster.LLAMA]) == names.PLAIN
    assert summary.baseline_of([row for row in rows if row["contender"] == names.PASS]) is None


def test_aims_are_judged_from_undisturbed_rounds():
    verdicts = [(aim["met"], aim["measured"]) for aim in result()["aims"]]
    assert verdicts == [
        (True, "1.50 × (Plain against llama.cpp)"),
        (True, f"2.25 × (PaSS against {roster.LLAMA})"),
        (True, f"1.80 × (PaSS against {LOOKUP})"),
        (True, "1.50 ms"),
        (False, "0.75 ms"),
    ]
    nothing = summary.judge({"rows": [row(names.PLAIN, 0, 1.0)], "parts": {}})
    assert [aim.met for aim in nothing] == [None] * 5


def test_the_limit_of_layers_is_bytes_or_flops_whichever_takes_longer():
    measured = result()
    (line,) = summary.parts(measured)
    assert line["limit_ms"] == {"layers": 10.0} and line["share"] == {"layers": 0.5}
    measured["parts"][names.PLAIN]["flops"]["layers"] = 3e9
    assert summary.parts(measured)[0]["limit_ms"]["layers"] == 15.0
    del measured["parts"]["limits"]
    assert summary.parts(measured) == []


# ---- the page ----


def test_the_page_shows_speeds_shares_and_what_was_left_out():
    text = page.render(result())
    assert "| Plain | 12.5 (5.0–20.0) | 1.00 | 1.50 (1.00–2.00) | 2 of 2 | 0 of 2 |" in text
    assert "| Plain | 4.0 | 20.00 (50%) | 1.50 | 0.75 | 22.25 |" in text
    assert "2 rounds, 1 disturbed ones left out; 1 prompts not raced" in text
    assert "Not raced: vLLM: no answer in 9 s: killed" in text
    assert "| torch 2 | avx2 | Plain; PaSS |" in text and "| xllamacpp 1 | – | llama.cpp |" in text


def test_the_page_shows_the_share_of_drafting_by_heads(tmp_path):
    pytest.importorskip("matplotlib")
    parts = dict(draft=3.0, verify=6.0, accept=0.75, commit=0.25)
    rows = [
        dict(method="Plain", drafts=0, ms=dict(parts, draft=0.04)),
        dict(method="EAGLE-3", drafts=22, ms=parts),
        dict(method='EAGLE-3, "auto"', drafts=9, ms=dict(parts, draft=0.1)),
        dict(method="MTP", drafts=22, ms=dict(parts, draft=7.0)),
    ]
    folder = tmp_path / "benchmarks" / "results" / "cpu"
    folder.mkdir(parents=True)
    (folder / "contenders.json").write_text(json.dumps(result()))
    assert page.write(tmp_path, check=False) == []
    assert "Drafting by a head" not in (folder / "contenders.md").read_text()
    (folder / "heads.json").write_text(json.dumps(dict(date="2026-11-28 18:00", commit="abc", rows=rows)))
    assert page.write(tmp_path, check=True) == ["benchmarks/results/cpu/contenders.md does not show contenders.json"]
    page.write(tmp_path, check=False)
    assert "([heads](heads.md)): EAGLE-3 30%, MTP 50%.\n" in (folder / "contenders.md").read_text()


def test_pages_show_their_results(tmp_path):
    pytest.importorskip("matplotlib")
    assert page.write(ROOT, check=True) == []
    folder = tmp_path / "benchmarks" / "results" / "cpu"
    folder.mkdir(parents=True)
    (folder / "contenders.json").write_text(json.dumps(result()))
    assert len(page.write(tmp_path, check=True)) == 2
    assert page.write(tmp_path, check=False) == [] == page.write(tmp_path, check=True)
    (folder / "contenders.md").write_text("another page")
    assert page.write(tmp_path, check=True) == ["benchmarks/results/cpu/contenders.md does not show contenders.json"]
    (folder / "contenders.json").write_text(json.dumps(result() | {"parts": {}}))
    assert len(page.write(tmp_path, check=True)) == 2


# ---- rounds ----

STRAIGHT = list(range(100, 196))


class Fake:
    """A worker that writes one text; `fails` and `cpu` are by turn."""

    def __init__(self, clock, text=None, seconds=1.0, fails=()):
        self.clock, self.text, self.seconds, self.fails = clock, text, seconds, fails
        self.asked, self.stopped = [], False

    def ask(self, request, most_seconds):
        self.asked.append(request)
        if len(self.asked) in self.fails:
            raise WorkerFailed("ended: killed")
        self.clock["now"] += self.seconds
        text = self.text(request["prompt"]) if callable(self.text) else self.text
        return {"tokens": list(text), "seconds": self.seconds, "calls": len(text), "drafted": 0, "accepted": 0}

    def cpu_seconds(self):
        return 2 * self.clock["now"]

    def stop(self):
        self.stopped = True


@pytest.fixture
def clock(monkeypatch):
    """Time, and the shares of two cores that the next turns see in use by all programs but this process."""
    now = {"now": 0.0, "uses": []}

    class Watch:
        cores = 2

        def __init__(self, cores):
            assert cores == rounds.ALL_CORES, "this process may be bound to one core"

        def stop(self):
            return SimpleNamespace(others=now["uses"].pop(0) if now["uses"] else 1.0)

    monkeypatch.setattr(rounds, "CpuWatch", Watch)
    monkeypatch.setattr(rounds.time, "perf_counter", lambda: now["now"])
    monkeypatch.setattr(rounds.time, "monotonic", lambda: now["now"])
    return now


def race_of(workers, saves):
    state = {"rows": [], "skipped": [], "reasons": {}, "parts": {}}
    return Race(workers, state, lambda: saves.append(len(state["rows"])), lambda words: None, 96, frozenset({2}))


def prompts(count):
    return [Prompt("code", f"{number}.py", (number,)) for number in range(count)]


def test_every_contender_has_a_turn_and_every_round_is_saved(clock):
    saves = []
    workers = {names.PLAIN: Fake(clock, STRAIGHT), "other": Fake(clock, [*STRAIGHT[:9], 7, *STRAIGHT[10:]])}
    race = race_of(workers, saves)
    race.run(prompts(5), 2, 1e9)
    assert race.undisturbed == 2 and saves == [2, 4]
    assert [row["differs_at"] for row in race.state["rows"] if row["contender"] == "other"] == [9, 9]
    assert len(workers[names.PLAIN].asked) == 4, "a text that is not timed, and one that is"
    race.run(prompts(5), 3, 1e9)
    assert [row["prompt"] for row in race.state["rows"][::2]] == ["code 0.py", "code 1.py", "code 2.py"]


def test_a_disturbed_round_is_replaced(clock):
    clock["uses"] = [1.0, 1.3, 1.0, 1.05]
    race = race_of({names.PLAIN: Fake(clock, STRAIGHT), "other": Fake(clock, STRAIGHT)}, [])
    race.run(prompts(5), 1, 1e9)
    assert len(race.state["rows"]) == 4 and race.undisturbed == 1
    assert [row["others"] for row in race.state["rows"]] == pytest.approx([0.0, 0.3, 0.0, 0.05])


def test_what_a_text_costs_once_is_not_counted_in_its_steps():
    """8 ms for each text and 0.5 ms for each call, divided over the parts of the loop."""
    rows = [
        {
            "calls": calls,
            "draft_ms": 0.1,
            "accept_ms": 0.2,
            "commit_ms": 0.0,
            "rest_ms": 0.2 + 8.0 / calls,
            "verify_ms": 9.0,
        }
        for calls in (20, 80)
    ]
    assert loop_and_once(*rows) == pytest.approx((0.5, 8.0))
    with pytest.raises(ValueError, match="the long text took 20 calls, the short one 80"):
        loop_and_once(*reversed(rows))


def test_texts_that_loop_or_end_are_not_raced(clock):
    texts = {0: [5] * 96, 1: [*STRAIGHT[:50], 2, *STRAIGHT[51:]], 2: STRAIGHT[:80], 3: STRAIGHT}
    race = race_of({names.PLAIN: Fake(clock, lambda prompt: texts[prompt[0]])}, [])
    race.run(prompts(4), 4, 1e9)
    assert [entry["reason"] for entry in race.state["skipped"]] == [
        "the text loops",
        "the model would end the text",
        "Plain stopped after 80 tokens",
    ]
    assert {row["prompt"] for row in race.state["rows"]} == {"code 3.py"}
    assert raced_text(STRAIGHT, 96, frozenset()) == ""


def test_a_contender_that_ends_is_left_out_with_its_reason(clock):
    broken = Fake(clock, STRAIGHT, fails=(2,))
    race = race_of({names.PLAIN: Fake(clock, STRAIGHT), "other": broken}, [])
    race.run(prompts(3), 3, 1e9)
    assert race.undisturbed == 3 and broken.stopped and race.state["reasons"] == {"other": "ended: killed"}
    assert sum(row["contender"] == "other" for row in race.state["rows"]) == 1


def test_no_round_begins_after_the_deadline(clock):
    race = race_of({names.PLAIN: Fake(clock, STRAIGHT)}, [])
    race.run(prompts(9), 9, 3.0)
    assert race.undisturbed == 2, "each takes two seconds"


# ---- parts of a step ----


def event(name, start, length, parent=None):
    span = SimpleNamespace(start=start, end=start + length, elapsed_us=lambda: length)
    return SimpleNamespace(name=name, time_range=span, cpu_parent=parent)


def test_ops_count_once_and_only_inside_calls_after_the_prompts():
    prompt, call = event("pass_ext::verify", 0, 10), event("pass_ext::verify", 20, 30)
    outer = event("aten::linear", 22, 6, call)
    attention = event("pass_ext::attention_tree", 30, 5, call)
    events = [
        *(prompt, call, outer, attention),
        event("aten::linear", 2, 5, prompt),
        event("aten::addmm", 23, 4, outer),
        event("aten::bmm", 31, 2, attention),
        event("pass_ext::linear_rows", 40, 3, call),
        event("pass_ext::layer_before_attention", 45, 2, call),
        event("pass_ext::layer_stack", 48, 9, call),
        event("aten::add", 44, 1, call),
        event("aten::mm", 60, 7),
    ]
    assert sum_of_layers(events, "pass_ext::verify") == 25.0


# ---- weights and workers ----


def test_weights_for_llama_cpp_are_those_of_the_file(tmp_path):
    gguf, torch, np = (pytest.importorskip(name) for name in ("gguf", "torch", "numpy"))
    from benchmarks.contenders.gguf_file import write_gguf

    values = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).numpy()
    quantised = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    fours = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q4_1)
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_file_type(7)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_float32("llama.rope.freq_base", 100000.0)
    writer.add_tensor("w.weight", quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("norm.weight", values[0])
    writer.add_tensor("v.weight", fours, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    write_gguf(tmp_path / "a.gguf", tmp_path / "b.gguf")
    written = gguf.GGUFReader(tmp_path / "b.gguf")
    matrix, vector, _ = written.tensors
    exact = gguf.quants.dequantize(quantised, gguf.GGMLQuantizationType.Q8_0)
    bits = torch.tensor(exact).to(torch.bfloat16).view(torch.int16).numpy()
    assert np.array_equal(matrix.data.view(np.int16), bits) and np.array_equal(vector.data, values[0])
    assert written.fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_BF16
    assert written.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    assert written.fields["llama.rope.freq_base"].contents() == 100000.0
    write_gguf(tmp_path / "a.gguf", tmp_path / "c.gguf", "Q4_0")
    stays, _, again = gguf.GGUFReader(tmp_path / "c.gguf").tensors
    rounded = gguf.quants.dequantize(fours, gguf.GGMLQuantizationType.Q4_1)
    assert stays.tensor_type.name == "Q8_0" and np.array_equal(stays.data, quantised)
    assert again.tensor_type.name == "Q4_0"
    assert np.array_equal(again.data, gguf.quants.quantize(rounded, gguf.GGMLQuantizationType.Q4_0))


SCRIPT = """
from benchmarks.contenders.workers.channel import answer
def start(options):
    print("a library speaks")
    return (lambda request: {"twice": 2 * request["number"]} if request["number"] else 1 / 0), {"facts": options}
answer(start)
"""


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """A worker that runs SCRIPT."""
    started = subprocess.Popen

    def of_script(command, **how):
        return started([command[0], "-c", SCRIPT, command[-1]], **how)

    monkeypatch.setattr(process.subprocess, "Popen", of_script)
    worker = Worker(sys.executable, "none", {"a": 1}, {"PYTHONPATH": str(ROOT)}, tmp_path / "log")
    yield worker
    worker.stop()


def test_a_worker_answers_and_what_its_libraries_print_goes_to_the_log(worker, tmp_path):
    assert worker.answer(60) == {"facts": {"a": 1}}
    assert worker.ask({"number": 4}, 60) == {"twice": 8} == worker.ask({"number": 4}, 60)
    assert worker.cpu_seconds() >= 0 and "a library speaks" in (tmp_path / "log").read_text()
    with pytest.raises(WorkerFailed, match="ZeroDivisionError"):
        worker.ask({"number": 0}, 60)


def test_a_worker_that_does_not_answer_in_time_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(
        process.subprocess, "Popen", lambda command, p=subprocess.Popen, **how: p(["sleep", "60"], **how)
    )
    began = time.monotonic()
    with pytest.raises(WorkerFailed, match="no answer"):
        Worker(sys.executable, "none", {}, {}, tmp_path / "log").answer(0.2)
    assert time.monotonic() - began < 30
