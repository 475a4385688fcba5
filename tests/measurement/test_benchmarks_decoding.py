"""benchmarks.decoding: loops are found, prompts are held out, every contender has its turn."""

import re
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


def test_a_round_has_every_contender_once_in_an_order_that_changes():
    import random

    from benchmarks.decoding.contenders import Outcome
    from benchmarks.decoding.prompts import Prompt
    from benchmarks.decoding.race import in_turn, one_round
    from benchmarks.harness.cases import Contender

    prompts = in_turn([[Prompt("code", f"code{i}", (i,)) for i in range(6)], [Prompt("prose", "prose0", (9,))]])
    assert [prompt.name for prompt in prompts[:3]] == ["code0", "prose0", "code1"]
    calls = []

    def recorder(name):
        def write(ids, most):
            calls.append((name, ids))
            return Outcome(noise(128, seed=ids[0])[:most], calls=10, seconds=1.0)

        return Contender(name, write)

    names, order = ["Plain", "A", "B", "C"], random.Random(0)
    for prompt in prompts:
        text = noise(128, seed=prompt.ids[0] + (prompt.name == "code5"))
        rows = one_round(prompt, [recorder(name) for name in names], 128, order, text)
        assert all(row["tokens"] == 128 and (row["differs_at"] is None) == (prompt.name != "code5") for row in rows)
    rounds = [calls[i : i + 4] for i in range(0, len(calls), 4)]
    for calls_of_round, prompt in zip(rounds, prompts, strict=True):
        assert sorted(calls_of_round) == sorted((name, prompt.ids) for name in names)
    assert len({tuple(name for name, _ in calls_of_round) for calls_of_round in rounds}) > 1
