"""A short run of fuzz_ops.py, and that it sees what is wrong. The long one, with sanitizers: ``make sanitize``."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import pass_ext
from sanitize import fuzz_ops
from tools.op_families import family_of

PROGRAM = Path(fuzz_ops.__file__)


def run(*arguments):
    command = [sys.executable, "-W", "ignore", PROGRAM, *map(str, arguments)]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_random_calls_end_in_our_words_or_in_a_right_result():
    done = run("--seed", 3, "--calls", 625, "--seconds", 300)
    assert done.returncode == 0, done.stdout
    counts = re.findall(r"^(\w+): (\d+) results, (\d+) refusals$", done.stdout, re.MULTILINE)
    assert {op for op, *_ in counts} == set(pass_ext._library.op_names())
    assert all(int(results) > 0 and int(refusals) > 0 for _, results, refusals in counts), done.stdout


def wrong_values(ids, table, lookahead):
    return pass_ext.ops.lookahead.lookahead_embed(ids, table, lookahead) + 1


def foreign_words(ids, table, lookahead):
    raise IndexError("index 7 is out of bounds")


def writes_to_its_input(ids, table, lookahead):
    out = pass_ext.ops.lookahead.lookahead_embed(ids, table, lookahead)
    ids.add_(1)
    return out


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (wrong_values, "result 0 is not the reference's"),
        (foreign_words, "IndexError without our words"),
        (writes_to_its_input, "an input was written to"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_wrong_op_is_seen(fault, words, monkeypatch):
    monkeypatch.setattr(pass_ext, "lookahead_embed", fault)
    with pytest.raises(fuzz_ops.WrongResultError, match=words):
        for number in range(0, 11 * 20, 11):
            fuzz_ops.make_call(0, number, "lookahead_embed", verbose=False)


@pytest.mark.slow
def test_a_call_is_the_same_when_repeated_alone():
    verbose = ("--seed", 3, "--verbose")
    many, alone = run(*verbose, "--calls", 40), run(*verbose, "--first", 37, "--calls", 1)
    call = next(line for line in many.stdout.splitlines() if line.startswith("call 37,"))
    assert call in alone.stdout.splitlines()


def test_make_sanitize_runs_files_that_are_there(monkeypatch):
    from sanitize import __main__ as command

    named = []
    monkeypatch.setattr(command, "build", lambda sanitizer: None)
    monkeypatch.setattr(command, "run", lambda sanitizer, *words, **options: named.extend(words))
    assert command.check("thread", 1, "not compile")
    files = [word for word in named if isinstance(word, Path)]
    assert PROGRAM in files and all(file.exists() for file in files)
    names = {file.name for file in files}
    for op in fuzz_ops.CASES:  # a file of its family, or of its own
        assert names & {f"test_{family_of(op)}.py", f"test_{op.removesuffix('_')}.py"}, op
