"""What training reads: documents, their split, windows, and the model's own samples in their file."""

import dataclasses
import random
import re
import sysconfig
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support.training_models import Letters, counting, tiny_llama, windows_of

from pass_ext.training.common import documents, own_texts
from pass_ext.training.common.frozen_model import sample
from pass_ext.training.common.own_texts import Sample
from pass_ext.training.common.ranks import Ranks

transformers = pytest.importorskip("transformers")


def test_the_split_never_changes():
    names = [f"folder/file_{number}.py" for number in range(2000)]
    share = sum(map(documents.is_held_out, names)) / 2000
    assert 0.08 < share < 0.12
    known = {"argparse.py": False, "json/decoder.py": False, "heapq.py": False, "textwrap.py": False}
    assert {name: documents.is_held_out(name) for name in known} == known
    assert [name for name in names[:40] if documents.is_held_out(name)] == ["folder/file_11.py", "folder/file_39.py"]


def test_documents_are_read_with_their_prose_apart(tmp_path):
    body = "A docstring that is long enough to be worth its own place among the prose. " * 3
    (tmp_path / "pkg").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "pkg/a.py").write_text(f'"""{body}\n\n    indented\n    """\nx = 1\n' + "# code\n" * 40)
    (tmp_path / "notes.md").write_text(body)
    (tmp_path / "tests/b.py").write_text("x = 1\n" * 100)
    (tmp_path / "picture.bin").write_text("x" * 1000)
    found = documents.read_documents([tmp_path])
    assert [(one.name, one.kind) for one in found] == [
        ("notes.md", "prose"),
        ("pkg/a.py", "prose"),
        ("pkg/a.py", "python"),
    ]
    assert found[1].text.endswith("place among the prose.\n\nindented") and "x = 1" not in found[1].text
    assert documents.read_documents([tmp_path / "tests/b.py"])[0].name == "b.py"
    assert documents.fingerprint(found) == documents.fingerprint(list(found)) != documents.fingerprint(found[:2])
    for part in ("name", "kind", "text"):
        others = [dataclasses.replace(found[0], **{part: "other"}), *found[1:]]
        assert documents.fingerprint(others) != documents.fingerprint(found), part
    with pytest.raises(FileNotFoundError, match="which does not exist"):
        documents.read_documents([tmp_path / "absent"])


def names_of(*paths):
    return sorted({one.name for one in documents.read_documents(paths)})


def test_documents_of_equal_names_are_all_kept(tmp_path):
    for place in ("one/a.md", "one/pkg/b.md", "two/a.md", "x/three/a.md", "y/three/a.md", "two/alone.md"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(f"What {place} says. " * 40)
    folders = [tmp_path / place for place in ("one", "two", "x/three", "y/three")]
    wanted = ["alone.md", "one/a.md", "pkg/b.md", "two/a.md", "x/three/a.md", "y/three/a.md"]
    assert names_of(*folders) == names_of(*reversed(folders)) == wanted
    for one in documents.read_documents(folders):
        assert one.text.split()[1].endswith(one.name)
    # a file given twice is one document, named from the outermost folder
    assert names_of(tmp_path / "one", tmp_path / "one/pkg", tmp_path / "one/pkg/../a.md") == ["a.md", "pkg/b.md"]
    assert names_of(tmp_path / "one/pkg", tmp_path / "one/a.md", tmp_path / "one") == ["a.md", "pkg/b.md"]


def test_a_file_of_the_standard_library_has_one_name_however_it_is_given(tmp_path, monkeypatch):
    library = Path(sysconfig.get_path("stdlib"))
    decoder = library / "json/decoder.py"
    (tmp_path / "json").mkdir()
    (tmp_path / "json/decoder.py").write_text("x = 1\n" * 100)
    (tmp_path / "link").symlink_to(library)
    monkeypatch.chdir(library / "json")
    for given in (decoder, "decoder.py", "../json/decoder.py", tmp_path / "link/json/decoder.py"):
        assert names_of(given) == ["json/decoder.py"]
    for given in (library / "json", ".", tmp_path / "link/json"):
        assert names_of(given) == sorted(f"json/{file.name}" for file in (library / "json").glob("*.py"))
    # another file of the same name does not replace it
    both = names_of(tmp_path, decoder)
    assert both == sorted(["json/decoder.py", f"{tmp_path.name}/json/decoder.py"])


def test_windows_depend_on_seed_and_step_alone_and_anchors_stay_inside():
    samples = counting(5, 20) + counting(2, 9, name="short")
    windows = windows_of(samples)
    assert torch.equal(windows.at(7).ids, windows_of(samples).at(7).ids)
    assert not torch.equal(windows.at(7).anchors, windows_of(samples, seed=1).at(7).anchors)
    for step in range(20):
        window = windows.at(step)
        for ids, anchors in zip(window.ids.tolist(), window.anchors.tolist(), strict=True):
            length = next(len(one.ids) for one in samples if one.ids == ids[: len(one.ids)])
            assert min(anchors) >= 0 and max(anchors) + 1 + 3 < length
    with pytest.raises(SystemExit, match="nothing to train on"):
        windows_of([])


@pytest.mark.timeout(60)
def test_texts_that_are_too_short_for_the_slots_are_passed_over():
    short, fitting = counting(4, 4, name="short"), counting(1, 5)
    with pytest.raises(SystemExit, match=r"nothing to train on: .* no sample of 4 has --lookahead \+ 2 = 5 tokens"):
        windows_of(short)
    assert all(text == fitting[0].ids for text in windows_of(short + fitting).at(0).ids.tolist())
    few, many = documents.Document("few", "prose", "word"), documents.Document("many", "prose", "word " * 100)
    assert windows_of(short, documents=[few, many]).at(0).ids.shape[1] >= 5
    with pytest.raises(SystemExit, match="nothing to train on: 1000 windows in a row were shorter"):
        windows_of(short, documents=[few]).at(0)


class Begun(Letters):
    """As Gemma's and Llama's: a token before every text."""

    bos_token_id = 1

    def __call__(self, text, add_special_tokens=True, **_):
        return type("Encoded", (), {"input_ids": [1] * add_special_tokens + Letters()(text).input_ids})()


def test_windows_and_prompts_begin_with_the_token_that_the_tokenizer_puts_before_a_text():
    names = [f"part {n}" for n in range(40)]
    texts = [documents.Document(name, "prose", f"{name} says something.\n" * 20) for name in names]
    of_documents = dataclasses.replace(windows_of([], documents=texts), tokenizer=Begun(), share=0.0)
    whole = [1, *range(3, 90)]  # a sample that is longer than a window
    of_sample = dataclasses.replace(windows_of([Sample("long", "prose", 0.0, 4, whole)]), tokenizer=Begun())
    for step in range(20):
        ids = of_documents.at(step).ids
        assert ids[:, 0].eq(1).all() and not ids[:, 1:].eq(1).any() and ids.shape[1] == 32
        assert all(
            row[0] == 1 and row[1:] == list(range(row[1], row[1] + 31)) for row in of_sample.at(step).ids.tolist()
        )
    how = dict(continuations=20, own_chats=0, held_out=4, prefix_tokens=12, seed=0)
    for batches in own_texts.plan_batches(Begun(), texts, [], **how):
        prompts = [prompt for batch in batches for prompt in batch.prompts]
        assert prompts and all(prompt[0] == 1 and prompt.count(1) == 1 for prompt in prompts)
        assert {len(prompt) for prompt in prompts} == {12}


def test_samples_are_the_models_own_text():
    model = tiny_llama()
    prompts = [[5, 6, 7], [9, 10, 11, 12, 13], [40]]
    greedy = sample(model, prompts, 8, 0.0, torch.Generator().manual_seed(0), frozenset())
    for prompt, text in zip(prompts, greedy, strict=True):
        ids = list(prompt)
        for token in text:
            assert token == int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())
            ids.append(token)
    stop = frozenset({greedy[1][3]})
    stopped = sample(model, prompts, 8, 0.0, torch.Generator().manual_seed(0), stop)
    for text, whole in zip(stopped, greedy, strict=True):
        assert text == whole[: next((at + 1 for at, token in enumerate(whole) if token in stop), 8)]
    drawn = sample(model, [[5, 6, 7]] * 4000, 1, 0.7, torch.Generator().manual_seed(0), frozenset())
    wanted = (model(input_ids=torch.tensor([[5, 6, 7]])).logits[0, -1] / 0.7).softmax(-1)
    counted = torch.bincount(torch.tensor(drawn)[:, 0], minlength=100) / 4000
    assert (counted - wanted).abs().sum() / 2 < 0.08


BATCHES = [
    own_texts.Batch("prose", 0.0, ["a", "b"], [[5, 6, 7], [8, 9]]),
    own_texts.Batch("chat", 0.8, ["own"], [[]]),
    own_texts.Batch("prose", 1.0, ["c"], [[11, 12, 13]]),
]


def collected(
    path, batches=BATCHES, *, model=tiny_llama, tokenizer=Letters, name="tiny", new_tokens=6, seed=0, ranks=None
):
    settings = dict(name=name, new_tokens=new_tokens, seed=seed, ranks=ranks)
    return list(own_texts.collect(model(), tokenizer(), batches, path, **settings))


class Thread(Ranks):
    """One of several ranks, each a thread of this process."""

    def __init__(self, rank, values, barrier):
        super().__init__(rank, barrier.parties)
        self._values, self._barrier = values, barrier

    def gather(self, value):
        self._values[self.rank] = value
        self._barrier.wait()
        found = list(self._values)
        self._barrier.wait()
        return found

    def first(self, call):
        return self.gather(call() if self.is_first else None)[0]


def test_samples_are_the_same_with_any_number_of_ranks(tmp_path):
    """Each batch is drawn from, those after the first by another rank."""
    batches = [dataclasses.replace(batch, temperature=1.0) for batch in (*BATCHES, *BATCHES[1:])]
    model = tiny_llama()
    alone = collected(tmp_path / "alone", batches, model=lambda: model)
    assert alone[1] != alone[3] and alone[2] != alone[4]
    for count in (2, 3):
        path, values, barrier = tmp_path / f"by {count}", [None] * count, threading.Barrier(count, timeout=60)

        def of_rank(rank, path=path, values=values, barrier=barrier):
            return collected(path, batches, model=lambda: model, ranks=Thread(rank, values, barrier))

        with ThreadPoolExecutor(count) as pool:
            assert list(pool.map(of_rank, range(count))) == [alone] * count
        assert path.read_text() == (tmp_path / "alone").read_text()


class Murmuring(Letters):
    def apply_chat_template(self, messages, **_):
        return f"({messages[0]['content']})"


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"name": "other"}, {"model"}),
        ({"model": lambda: tiny_llama(seed=3)}, {"weights"}),
        ({"model": lambda: tiny_llama().to(torch.bfloat16)}, {"weights", "dtype"}),
        ({"tokenizer": Murmuring}, {"prompts"}),
        ({"batches": [*BATCHES[:2], dataclasses.replace(BATCHES[2], names=["d"])]}, {"prompts"}),
        ({"batches": [*BATCHES[:2], dataclasses.replace(BATCHES[2], prompts=[[11, 12, 14]])]}, {"prompts"}),
        ({"batches": [*BATCHES[:2], dataclasses.replace(BATCHES[2], temperature=0.5)]}, {"prompts"}),
        ({"batches": BATCHES[:2]}, {"prompts", "batches"}),
        ({"new_tokens": 7}, {"new_tokens"}),
        ({"seed": 1}, {"seed"}),
    ],
    ids=["name", "weights", "dtype", "template", "names", "prompts", "temperature", "batches", "new_tokens", "seed"],
)
def test_samples_that_something_else_decided_are_refused_and_it_is_named(tmp_path, changed, named):
    path = tmp_path / "samples.jsonl"
    first, text = collected(path), path.read_text()
    assert collected(path) == first and path.read_text() == text
    with pytest.raises(SystemExit, match="holds samples of other settings") as caught:
        collected(path, **changed)
    assert set(re.findall(r"\n  (\w+): there ", str(caught.value))) == named
    assert path.read_text() == text


def test_a_file_that_holds_no_samples_is_refused(tmp_path):
    (tmp_path / "samples.jsonl").write_text("a shopping list\n")
    with pytest.raises(SystemExit, match="does not begin with the header"):
        collected(tmp_path / "samples.jsonl")


@pytest.mark.parametrize("lines", [0, 1, 2, 3], ids=["header", "first", "middle", "last"])
def test_a_line_that_was_cut_off_is_written_again(tmp_path, lines):
    path = tmp_path / "samples.jsonl"
    first, text = collected(path), path.read_text()
    whole = text.splitlines(keepends=True)
    path.write_text("".join(whole[:lines]) + whole[lines][: len(whole[lines]) // 2])
    assert collected(path) == first and path.read_text() == text
    path.write_text(text[:-1])  # only the end of the line is missing
    assert collected(path) == first and path.read_text() == text


def test_loops_are_cut():
    rng = random.Random(0)
    plain = [rng.randrange(1000) for _ in range(50)]
    assert own_texts.without_loop([1, 2], plain) == plain
    looping = plain + [7, 8, 9] * 20
    kept = own_texts.without_loop([1, 2], looping)
    assert 50 < len(kept) < 70 and kept == looping[: len(kept)]


@pytest.mark.parametrize("period", [1, 3, 8])
@pytest.mark.parametrize("rounds", [2, 3, 4, 12])
def test_a_loop_that_the_prompt_began_is_cut_where_one_of_the_text_would_be(period, rounds):
    """The text alone decides no less than prompt and text together: whatever part of a loop the prompt holds, none comes after
    an n-gram's third time."""
    loop = [7, 8, 9, 10, 11, 12, 13, 14][:period]
    whole = loop * (rounds + 30)
    third = 8 + 2 * period  # tokens of the loop until its first n-gram has come for the third time
    prompt, written = [1, 2, *loop * rounds], whole[period * rounds :]
    kept = own_texts.without_loop(prompt, written)
    assert kept == written[: max(1, third - period * rounds)]


def test_a_text_that_leaves_the_prompts_loop_is_kept():
    rng = random.Random(0)
    plain = [rng.randrange(100, 1000) for _ in range(50)]
    assert own_texts.without_loop([7] * 12, plain) == plain


@pytest.mark.parametrize("line", [b"{", b"\xff\xff", b"[1]", b'[{"name": "a"}]', b"[]", b"[" * 100_000])
def test_a_damaged_line_of_samples_gets_a_sentence(tmp_path, line):
    path = tmp_path / "samples.jsonl"
    first = collected(path)
    header, *lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(header + lines[0] + line + b"\n" + lines[2])
    with pytest.raises(SystemExit, match=rf"^{path}, line 3 is damaged: delete it and the lines after it"):
        collected(path)
    path.write_bytes(header + lines[0])
    assert collected(path) == first
