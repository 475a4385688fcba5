"""Texts of training: rows of .jsonl, .parquet and data sets, chats by the model's template, what is held out, and texts that a
server writes which drops and stalls.
"""

import http.server
import json
import re
import shlex
import sys
import threading
import types

import pytest
from support.small_models import byte_tokenizer, save_byte_model

from pass_ext import LookaheadEmbedding
from pass_ext.__main__ import main
from pass_ext.training.common import server as server_module
from pass_ext.training.common.documents import is_held_out, read_documents
from pass_ext.training.common.options import PACKAGES, read_texts

pytest.importorskip("transformers")
for package in PACKAGES:
    pytest.importorskip(package)

SHORT = "--sample-tokens 12 --length 24 --anchors 4 --lookahead 3 --batch 2 --steps 2"
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_byte_model(path)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return path


def chat(number):
    return [{"role": "user", "content": f"question {number}"}, {"role": "assistant", "content": f"answer {number}"}]


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def samples_of(out, name="samples"):
    lines = (out / f"{name}.jsonl").read_text().splitlines()[1:]
    return [sample for line in lines for sample in json.loads(line)]


def text_of(ids):
    return byte_tokenizer().decode(ids)


# ---- rows ----


def test_rows_of_a_file_are_texts_once_each(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"text": f"text {n % 3}", "id": n} for n in range(9)] + [{"text": ""}])
    (tmp_path / "folder").mkdir()
    jsonl(tmp_path / "folder/b.jsonl", [{"text": "text 2"}, {"text": "text 3"}])
    found = read_documents([path, tmp_path / "folder"])
    assert sorted(document.text for document in found) == [f"text {n}" for n in range(4)]
    assert {document.kind for document in found} == {"prose"}
    other = jsonl(tmp_path / "c.jsonl", [{"body": "text 3", "text": "no"}])
    (same,) = read_documents([other], column="body")
    assert same == next(document for document in found if document.text == "text 3"), "named by what it says"
    assert len(read_documents([path], most=2)) == 2


def test_chats_are_held_out_with_the_prompts_that_they_begin_with(tmp_path):
    """Whatever stands around the prompt, and whatever the system was told: a file of prompts has neither."""
    asked = [f"question {number}" for number in range(40)]
    rows = [[{"role": "system", "content": f"rule {number}"}, *chat(number)] for number in range(40)]
    spaced = [[{**one, "content": f" {one['content']} \n"} for one in row[1:]] for row in rows]
    data = jsonl(tmp_path / "chats.jsonl", [{"messages": row} for row in rows + spaced])
    (tmp_path / "prompts").write_text("".join(f"{line}  \n" for line in asked))
    options = types.SimpleNamespace(data=[data], data_column=None, data_rows=100)
    for source in (str(tmp_path / "prompts"), "data"):
        options.self_distill = source
        documents, instructions = read_texts(options)
        assert sorted(instructions) == sorted(asked)
        assert sorted(document.name for document in documents) == sorted(2 * asked)
    assert {document.messages[0][0] for document in documents} == {"system", "user"}


def test_data_sets_are_streamed_and_parquet_is_read(tmp_path, monkeypatch):
    """By stand-ins for datasets and pyarrow, by their public calls."""
    asked, taken = [], []

    def load_dataset(name, split, streaming):
        asked.append((name, split, streaming))

        def stream():
            for number in range(1_000_000):
                taken.append(number)
                yield {"messages": chat(number)}

        return stream()

    class ParquetFile:
        def __init__(self, path):
            asked.append(path.name)

        def iter_batches(self):
            for start in (0, 2):
                rows = [{"text": f"row {start + at}"} for at in range(2)]
                yield types.SimpleNamespace(to_pylist=lambda rows=rows: rows)

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setitem(
        sys.modules, "pyarrow", types.SimpleNamespace(parquet=types.SimpleNamespace(ParquetFile=ParquetFile))
    )
    monkeypatch.chdir(tmp_path)
    found = read_documents(["somebody/chats:train[:50%]", "plain"], most=5)
    assert asked == [("somebody/chats", "train[:50%]", True), ("plain", "train", True)] and len(taken) <= 12
    assert [document.name for document in found] == [f"question {n}" for n in range(5)]
    assert found[0].messages == (("user", "question 0"), ("assistant", "answer 0")) and found[0].kind == "chat"
    (tmp_path / "rows.parquet").write_bytes(b"")
    assert [
        document.text for document in sorted(read_documents([tmp_path / "rows.parquet"]), key=lambda d: d.text)
    ] == [f"row {n}" for n in range(4)]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ('{"body": "a", "id": 3}', "row 1 has no column text or messages, but body, id: name one by --data-column"),
        ('{"text": 3}', "row 1: text must be a text or messages with role and content, got 3"),
        ('{"messages": [{"from": "human"}]}', "row 1: messages must be a text or messages with role and content"),
        ('{"text": "a"}\n{"text": ', "line 2 is no JSON: "),
        ("[3]", "row 1 must have columns, got list"),
        ('{"text": ""}', "--data holds no"),
    ],
    ids=range(6),
)
def test_rows_that_cannot_be_get_a_sentence(tmp_path, model, rows, message):
    (tmp_path / "a.jsonl").write_text(rows)
    with pytest.raises(SystemExit, match=re.escape(message)):
        main(["train", "--model", str(model), "--out", str(tmp_path / "out"), "--data", str(tmp_path / "a.jsonl")])


def test_a_package_that_is_missing_is_named(tmp_path, model, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=r"somebody/texts needs the package datasets: pip install 'pass_ext\[data\]'"):
        main(["train", "--model", str(model), "--out", str(tmp_path / "out"), "--data", "somebody/texts"])


def test_chats_train_by_the_models_template_and_their_prompts_are_held_out_by_what_they_say(tmp_path, model, capsys):
    rows = [{"messages": chat(number % 60)} for number in range(90)]
    data, out = jsonl(tmp_path / "chats.jsonl", rows), tmp_path / "out"
    line = ["train", "--model", str(model), "--out", str(out), "--data", data, "--self-distill", "data"]
    main([*line, *shlex.split(SHORT)])
    held, trained = samples_of(out, "held-out"), samples_of(out)
    assert {sample["name"] for sample in held + trained} == {f"question {n}" for n in range(60)}
    assert all(is_held_out(sample["name"]) for sample in held) and not any(is_held_out(s["name"]) for s in trained)
    assert len(held) + len(trained) == 60 and len(held) > 2
    first = trained[0]
    assert text_of(first["ids"][: first["prompt_tokens"]]) == f"<user>{first['name']}\n<assistant>"
    facts = LookaheadEmbedding.load(out / "lookahead.safetensors").training_record
    whole = [f"<user>question {n}\n<assistant>answer {n}\n" for n in range(60) if not is_held_out(f"question {n}")]
    assert facts["data"]["documents"].startswith(f"{len(whole)} ({sum(map(len, whole)):,} characters)")


def test_a_template_that_fails_and_a_foreign_tokenizer_get_a_sentence(tmp_path, model):
    data = jsonl(tmp_path / "chats.jsonl", [{"messages": chat(0)}])
    for name, change in {
        "fails": lambda tokenizer: setattr(tokenizer, "chat_template", "{{ raise_exception('no such role') }}"),
        "none": lambda tokenizer: setattr(tokenizer, "chat_template", None),
        "foreign": lambda tokenizer: tokenizer.add_tokens([f"<{n}>" for n in range(40)]),
    }.items():
        folder, tokenizer = tmp_path / name, byte_tokenizer()
        save_byte_model(folder)
        change(tokenizer)
        tokenizer.save_pretrained(folder)
        message = {
            "fails": "the model's chat template fails on the messages that begin with 'question 0': no such role",
            "none": "--data has messages, and the model's tokenizer has no chat template",
            "foreign": r"the tokenizer has \d+ tokens, but the model has embeddings of \d+: it is another model's",
        }[name]
        with pytest.raises(SystemExit, match=message):
            main(["train", "--model", str(folder), "--out", str(tmp_path / "out"), "--data", data])


# ---- a server ----


class Server(http.server.BaseHTTPRequestHandler):
    """Answers a prompt by its own last token; ``ways`` says how the next requests are served: well, cut, stalled, busy, ..."""

    ways, done, asked, lock = [], 0, [], threading.Lock()
    fails_after = None

    def log_message(self, *_):
        pass

    def reply(self, code, text, cut=False):
        self.send_response(code)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text[: len(text) // 2] if cut else text)

    def do_GET(self):
        self.reply(200, json.dumps({"data": [{"id": "its model"}]}).encode())

    def do_POST(self):
        wish = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.lock:
            type(self).asked.append(wish)
            way = self.ways.pop(0) if self.ways else "well"
            if self.fails_after is not None and self.done >= self.fails_after:
                way = "cut"
            type(self).done += way == "well"
        text = chr(wish["prompt"][-1] % 26 + 97) * 5 + " and so on"
        answer = json.dumps({"choices": [{"text": text, "finish_reason": "stop"}]}).encode()
        if way == "stalled":
            self.rfile.read(1)  # until the client gives up
        elif way == "closed":
            self.close_connection = True
        elif way == "busy":
            self.reply(503, b"try again")
        elif way == "refused":
            self.reply(400, b"the prompt is too long")
        elif way == "no text":
            self.reply(200, b'{"choices": []}')
        elif way == "no JSON":
            self.reply(200, b"<html>hello</html>")
        else:
            self.reply(200, answer, cut=way == "cut")


@pytest.fixture
def server(monkeypatch):
    """The handler's class, and its URL."""
    handler = type("Handler", (Server,), {"ways": [], "done": 0, "asked": [], "lock": threading.Lock()})
    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    monkeypatch.setattr(server_module, "_FIRST_PAUSE", 0.01)
    yield handler, f"http://127.0.0.1:{running.server_port}/v1"
    running.shutdown()
    thread.join()
    running.server_close()


def line_from(server, model, tmp_path, out, count=110):
    prompts = tmp_path / "prompts"
    prompts.write_text("".join(f"question {n}\n" for n in range(count)))
    line = ["train", "--model", str(model), "--out", str(tmp_path / out), "--self-distill", str(prompts)]
    # No request may time out but those that stall: a busy machine is no failure.
    return [*line, "--texts-from", server[1], "--request-timeout", "60", *shlex.split(SHORT)]


def test_a_server_that_drops_and_stalls_loses_nothing(tmp_path, model, server):
    handler, _ = server
    handler.ways = ["stalled"] * 4 + ["cut", "closed", "busy", "well"] * 5  # those that stall do so at the same time
    main([*line_from(server, model, tmp_path, "out"), "--concurrency", "8", "--request-timeout", "4"])
    held, trained = samples_of(tmp_path / "out", "held-out"), samples_of(tmp_path / "out")
    assert len(held) + len(trained) == 110 and len({sample["name"] for sample in held + trained}) == 110
    assert len(handler.asked) == 110 + 4 + 15, "each of the failed ones once more"
    for sample in held + trained:
        written = sample["ids"][sample["prompt_tokens"] :]
        letter = chr(sample["ids"][sample["prompt_tokens"] - 1] % 26 + 97)
        assert text_of(written) == (letter * 5 + " and so on")[:12]
        assert sample["temperature"] == 0 or sample in trained
    assert {wish["model"] for wish in handler.asked} == {"its model"}
    sampled = {(*wish["prompt"], wish["seed"]) for wish in handler.asked if wish["temperature"]}
    assert len(sampled) == len({seed for *_, seed in sampled}) == len(trained), "a seed of its own, again too"
    assert {wish["temperature"] for wish in handler.asked} >= {0.0, 0.8, 0.5}
    assert json.loads((tmp_path / "out/samples.jsonl").read_text().splitlines()[0])["texts from"] == "its model"


def test_a_server_that_stays_away_leaves_what_was_written(tmp_path, model, server, monkeypatch):
    handler, _ = server
    monkeypatch.setattr(server_module, "TRIES", 2)
    handler.fails_after = 60  # in the second batch of 48
    with pytest.raises(SystemExit, match=r"/completions failed 2 times; texts that were written stay"):
        main([*line_from(server, model, tmp_path, "out"), "--concurrency", "4"])
    before = (tmp_path / "out/samples.jsonl").read_text()
    assert len(samples_of(tmp_path / "out")) == 48
    handler.fails_after, handler.asked = None, []
    main(line_from(server, model, tmp_path, "out"))
    assert (tmp_path / "out/samples.jsonl").read_text().startswith(before) and len(handler.asked) == 110 - 48


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("refused", "/completions refuses: HTTP 400: the prompt is too long"),
        ("no text", "/completions must answer with a text, got {'choices': []}"),
        ("no JSON", "/completions gives no JSON: "),
    ],
)
def test_answers_that_are_nonsense_get_a_sentence(tmp_path, model, server, way, message):
    server[0].ways = [way] * 200
    with pytest.raises(SystemExit, match=re.escape(message)):
        main(line_from(server, model, tmp_path, "out", 20))


def test_a_url_without_a_server_gets_a_sentence(tmp_path, model, server, monkeypatch):
    monkeypatch.setattr(server_module, "TRIES", 2)
    for url, message in {
        "http://127.0.0.1:9": "/models failed 2 times",
        "no url": "gives no JSON: unknown url type",
    }.items():
        with pytest.raises(SystemExit, match=message):
            main(line_from((None, url), model, tmp_path, "out", 20))
