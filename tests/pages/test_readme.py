"""docs/ops/README.md: each call of an op runs and agrees with pass_ext.reference, and the lines after "Equivalent to" stand in
the reference word for word. README.md, docs/ and examples/ use public names only. README.md is short, names every op, and its
picture shows its call."""

import re
import sys
import textwrap

import pytest
import torch
from support.code_blocks import blocks_of, run_blocks
from support.faces import face_of
from support.paths import ROOT

import pass_ext
from pass_ext import _library, reference
from pass_ext.modules.slot_adapters import AdapterSize, SlotAdapters

README, OPS = ROOT / "README.md", ROOT / "docs/ops/README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
INTEGRATION = "pass_ext.integrations.transformers"

pytestmark = pytest.mark.skipif(not (ROOT / "docs").exists(), reason="an sdist has no docs")

# ---- the ops ----

QUOTED = re.compile(
    r"^```python\n(?P<call>[^`]*)^```\n\n"
    r"Equivalent to \(\[\w+\.py\]\(\.\./\.\./(?P<file>pass_ext/reference/\w+\.py)\)\)[^\n]*:\n"
    r"```python\n(?P<quote>[^`]*)^```\n",
    re.MULTILINE,
)
PER_REQUEST = ("temperature", "top_k", "top_p", "min_p", "seeds", "positions", "nodes")
FLOATS = {"temperature": torch.float32, "top_p": torch.float32, "min_p": torch.float32}


def quotes():
    """(call, reference file, quoted lines) of each op of the page."""
    return [(found["call"], found["file"], found["quote"]) for found in QUOTED.finditer(OPS.read_text())]


def stands_in(quote, source):
    """True if the quoted lines follow each other in the source, wherever they are indented to."""
    lines, count = source.splitlines(), len(quote.splitlines())
    pieces = ("\n".join(lines[i : i + count]) for i in range(len(lines) - count + 1))
    return any(textwrap.dedent(piece).strip("\n") == quote.strip("\n") for piece in pieces)


def inputs():
    """Two requests, a tree of three nodes and a chain of two. The target is sure of node 2 of the first tree."""
    torch.manual_seed(0)
    caches = list(torch.randn(4, 2, 12, 2, 64))
    k, v = torch.randn(2, 5, 2, 64)
    names = dict(
        torch=torch, pass_ext=pass_ext, ids=torch.tensor([[3, 1, -1, -2]]), table=torch.randn(8, 16),
        lookahead=torch.randn(2, 16), parents=torch.tensor([-1, 0, 0, -1, 0], dtype=torch.int32),
        cu_nodes=torch.tensor([0, 3, 5], dtype=torch.int32), max_nodes=3, max_depth=1, q=torch.randn(5, 8, 64), k=k, v=v,
        k_cache=caches[0], v_cache=caches[1], prefix_lens=torch.tensor([4, 6], dtype=torch.int32), caches=caches,
        new=[k, v, k, v], tokens=torch.tensor([0, 1, 2, 0, 3]), logits=torch.zeros(5, 10), seeds=torch.tensor([1, 2]),
        first=torch.tensor([5, 7]), nodes=torch.arange(5), draft_logits=torch.randn(5, 10), x=torch.randn(3, 16),
        weight=torch.randn(4, 16), bias=torch.randn(4), norm=torch.randn(16), residual=torch.randn(3, 16),
        cos=torch.randn(5, 64), sin=torch.randn(5, 64), gate_up=torch.randn(3, 32),
        packed=torch.randn(5, 16), attended=torch.randn(5, 128), o_weight=torch.randn(16, 128), q_weight=torch.randn(128, 16),
        k_weight=torch.randn(64, 16), v_weight=torch.randn(64, 16), gate_weight=torch.randn(20, 16),
        up_weight=torch.randn(20, 16), down_weight=torch.randn(16, 20),
        state=torch.zeros(3, 2, 4, dtype=torch.int64), lengths=torch.tensor([5, 7]), limits=torch.tensor([9, 9]),
        committed=torch.zeros(2, dtype=torch.int32), report=torch.zeros(2, 7, dtype=torch.int64),
        candidates=torch.tensor([[4, 5], [3, 4]]), paths=torch.tensor([[2, 3, 4], [-1, 2, 3]]),
        requests=torch.tensor([1, 0], dtype=torch.int32), text=torch.tensor([[3, 4, 3, 5, 3], [2, 3, 4, 5, 4]]),
        text_lengths=torch.tensor([5, 5]),
        shape=torch.tensor([[-1, 0, 0, 1]] * 2, dtype=torch.int32), row_ids=torch.tensor([5, -1, -2]),
        down=torch.randn(1, 8, 16), up=torch.randn(1, 8, 4), layer_caches=[(caches[0][:, :, :1], caches[1][:, :, 1:])],
        keys=torch.randn(5, 1, 8) / 4, values=torch.randn(5, 2, 32), log_decay=-torch.rand(5, 2), beta=torch.rand(5, 2),
        recurrent_states=torch.randn(2, 2, 8, 32), taps=torch.randn(64, 4), windows=torch.randn(2, 64, 3),
    )  # fmt: skip
    names["logits"][[0, 3], [2, 9]] = 1e4
    return names


def in_reference(op, arguments, options):
    """The op's result as the reference gives it: one number for all becomes one for each row or request."""
    if op in ("draft_sample", "accept_tree"):
        count = len(arguments[0]) if op == "draft_sample" else len(arguments[3]) - 1
        for name in set(PER_REQUEST) & set(options):
            value = torch.as_tensor(options[name], dtype=FLOATS.get(name))
            options = options | {name: value.expand(count)}
    return getattr(reference, op)(*arguments, **options)


def check_calls(monkeypatch, names):
    """From here on, every op compares its result, or what it wrote in place, with the reference's. Returns the ops called."""
    called = []

    def compared(op, original):
        def call(*arguments, **options):
            if op in ("cache_commit_", "state_commit_"):
                want = [cache.clone() for cache in arguments[0]]
                in_reference(op, (want, *arguments[1:]), options)
                original(*arguments, **options)
                result = arguments[0]
            elif op == "adapter_rows_":
                want = in_reference(op, (arguments[0].clone(), *arguments[1:]), options)
                result = original(*arguments, **options)
            elif op == "next_tree_":
                want = [tensor.clone() for tensor in arguments]
                in_reference(op, want, options)
                original(*arguments, **options)
                result = arguments
            else:
                want, result = in_reference(op, arguments, options), original(*arguments, **options)
            if op == "recurrent_tree":
                result = out, update = result
                pairs = [(out, want[0]), (update.u, want[1])]
            else:
                pairs = [(result, want)] if isinstance(result, torch.Tensor) else list(zip(result, want, strict=False))
            for value, expected in pairs:  # the reference adds the margin of its decisions
                torch.testing.assert_close(value, expected, check_dtype=False, rtol=1e-4, atol=1e-5)
            called.append(op)
            return result

        return call

    for op in reference.__all__:
        if (face := face_of(op)) is not None:
            monkeypatch.setattr(face, op, compared(op, getattr(face, op)))
    return called


def test_every_call_of_the_page_agrees_with_the_reference(monkeypatch):
    names = inputs()
    before = [cache.clone() for cache in names["caches"]]
    called = check_calls(monkeypatch, names)
    for call, *_ in quotes():
        exec(call, names)
    shown = "lookahead_embed tree_prepare attention_tree draft_sample accept_tree cache_commit_ quantize_rows"
    shown += (
        " next_tree_ recall_scores linear_rows adapter_rows_ layer_before_attention layer_after_attention layer_stack"
    )
    shown += " step_rms_norm step_rotary step_gate recurrent_tree convolution_tree state_commit_"
    assert called == shown.split()
    assert names["rows"].shape == (1, 4, 16) and names["drafts"].shape == (5, 2) and names["y"].shape == (3, 4)
    torch.testing.assert_close(names["risen"], torch.tensor([[0.0, 6.0], [0.0, 1.0]]))
    assert names["step"].path.tolist() == [[0, 2], [0, -1]]
    assert names["lengths"].tolist() == [7, 8] and names["state"][2].tolist() == [[6, 7, 7, 8], [7, 8, 8, 9]]
    for cache, old, new in zip(names["caches"], before, names["new"], strict=True):
        old[0, 4:6], old[1, 6] = new[[0, 2]], new[3]
        assert torch.equal(cache, old)


def test_a_call_that_disagrees_is_found(monkeypatch):
    """The reference is given a scale that the op is not."""
    original = reference.attention_tree
    monkeypatch.setattr(reference, "attention_tree", lambda *inputs, **named: original(*inputs, scale=1.0, **named))
    names = inputs()
    check_calls(monkeypatch, names)
    with pytest.raises(AssertionError, match="not close"):
        for call, *_ in quotes():
            exec(call, names)


def test_every_op_family_is_quoted():
    text = OPS.read_text()
    assert text.count("Equivalent to (") == len(quotes())
    families = {path.stem for path in (ROOT / "pass_ext/reference").glob("*.py")}
    # pass_ext.distributed calls the shard ops; accept_logprobs is a part of accept.
    families -= {"__init__", "shard", "accept_logprobs"}
    assert sorted(file for _, file, _ in quotes()) == sorted(f"pass_ext/reference/{name}.py" for name in families)


@pytest.mark.parametrize("file,quote", [each[1:] for each in quotes()], ids=[each[1] for each in quotes()])
def test_what_is_quoted_stands_in_the_reference(file, quote):
    source = (ROOT / file).read_text()
    assert stands_in(quote, source), f"docs/ops/README.md quotes lines that {file} does not have"
    assert not stands_in(quote.replace("=", "= 2 *", 1), source), "another line would be found"


def test_the_look_ahead_quote_computes_what_the_op_does():
    """Quoted lines that need no helper run as they stand."""
    names = inputs()
    quote = next(quote for _, file, quote in quotes() if file.endswith("/lookahead.py"))
    exec("def quoted():\n" + textwrap.indent(quote, "    "), names)
    expected = pass_ext.lookahead_embed(names["ids"], names["table"], names["lookahead"])
    assert torch.equal(names["quoted"](), expected)


def test_the_block_of_the_lookahead_page_runs():
    """docs/ops/lookahead.md: the module and the op give the same rows."""
    page = ROOT / "docs/ops/lookahead.md"
    names = run_blocks(page, [block for block in blocks_of(page) if block[0] == "python"], {})
    assert names["rows"].shape == (1, 7, 64)


def test_the_block_of_the_step_page_runs():
    """docs/ops/step.md: its results are those of transformers' formulas."""
    page = ROOT / "docs/ops/step.md"
    names = run_blocks(page, [block for block in blocks_of(page) if block[0] == "python"], {})
    gate, up = (names["x"].float() @ names["w_gate_up"].float().T).chunk(2, dim=-1)
    torch.testing.assert_close(names["gated"].float(), torch.nn.functional.silu(gate) * up, rtol=0.02, atol=0.02)
    assert names["q"].shape == (5, 4, 16) and names["k"].shape == names["v"].shape == (5, 2, 16)


def test_the_blocks_of_the_recurrent_page_run():
    """docs/ops/recurrent.md: a step's nodes and states are those of steps of one token."""
    page = ROOT / "docs/ops/recurrent.md"
    names = run_blocks(page, [block for block in blocks_of(page) if block[0] == "python"], {})
    assert names["state"].abs().amax(dim=(1, 2, 3)).min() > 0 and names["window"][1, :, -1].equal(names["x"][3])


def test_the_blocks_of_the_adapter_page_run():
    """docs/ops/adapter.md: the rows of slots change by the formula, and its callable model decodes with adapters."""
    page = ROOT / "docs/ops/adapter.md"
    names = run_blocks(page, [block for block in blocks_of(page) if block[0] == "python"], {})
    x, down, up = (names[name].float() for name in ("x", "down", "up"))
    expected = names["alone"].float() + 0.5 * (x @ down[0].T) @ up[0]
    torch.testing.assert_close(names["out"][2:].float(), expected[2:], rtol=0.02, atol=0.02)
    adapters = SlotAdapters({"0.q_proj": AdapterSize(64, 64, 4)})
    torch.nn.init.normal_(adapters.pair("0.q_proj")[1])
    slots = pass_ext.LookaheadEmbedding(2, 64, adapters=adapters)
    method = pass_ext.PaSS(slots, tree=pass_ext.Tree.chain(2), rows=9)
    texts = [
        pass_ext.generate(
            names["Decoder"](), torch.tensor([[3, 4]]), chosen, max_new_tokens=6, eos_token_id=[]
        ).sequences
        for chosen in (method, pass_ext.Plain())
    ]
    assert torch.equal(*texts)


# ---- names ----


def private_names(code):
    """Names below pass_ext that the code uses and that docs/api.md does not list."""
    from tools import api

    public = {f"{module.__name__}.{name}" for module in api.MODULES for name in module.__all__} | {*api.RESULTS}
    public |= {"pass_ext.integrations.vllm.PaSS"}  # as a configuration of vLLM names it
    modules = {module.__name__ for module in api.MODULES} | {"pass_ext.integrations"}
    imports = re.compile(r"^\s*(?:from (pass_ext[\w.]*) import ([\w, ]+)|import (pass_ext[\w.]*))", re.MULTILINE)
    used = {module for _, _, module in imports.findall(code) if module}
    used |= {
        f"{module}.{name.strip()}" for module, names, _ in imports.findall(code) if names for name in names.split(",")
    }
    used |= {*re.findall(r"(?<![\w.])pass_ext(?:\.\w+)+", imports.sub("", code))}

    def is_public(path):
        parts = path.split(".")
        return path in modules or any(".".join(parts[: n + 1]) in public for n in range(len(parts)))

    return sorted(path for path in used if not is_public(path))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_use_public_names_only(page):
    """In their code, and in words between backticks: there the reference may be named too."""
    pytest.importorskip("transformers")
    code = "\n".join(code for language, code, _ in blocks_of(page) if language in ("python", "pycon"))
    words = re.findall(r"`([^`\n]+)`", page.read_text())
    assert private_names(code) == []
    assert private_names("\n".join(word for word in words if word != "pass_ext.reference")) == []


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda script: script.name)
def test_examples_use_public_names_only(script):
    pytest.importorskip("transformers")
    assert private_names(script.read_text()) == []


def test_a_private_name_is_found():
    pytest.importorskip("transformers")
    code = "from pass_ext.decoding.loop import Run\nimport pass_ext.tree\npass_ext.decoding\nfrom pass_ext import Tree"
    code += f"\nfrom {INTEGRATION} import use, masks\n"
    assert private_names(code) == [
        "pass_ext.decoding", "pass_ext.decoding.loop.Run", f"{INTEGRATION}.masks", "pass_ext.tree",
    ]  # fmt: skip


# ---- the picture ----


def test_the_picture_shows_its_call_and_another_is_found(tmp_path, monkeypatch):
    from tools.pictures import one_call

    monkeypatch.setattr(sys, "argv", ["one_call", "--check"])
    assert one_call.main() == 0
    (tmp_path / "docs").mkdir()
    svg = (ROOT / one_call.PATH).read_text()
    for wrong in ("", svg.replace("lazy", "idle")):
        (tmp_path / one_call.PATH).write_text(wrong)
        assert "does not show this call" in one_call.check(tmp_path)


def test_the_picture_is_what_the_readme_says():
    """A row's output is accepted while the rows up to it hold what the model wrote; the readme counts the same."""
    from tools.pictures import one_call

    tokens = [(source, output, fate) for source, output, fate in one_call.ROWS if isinstance(source, str)]
    right = True
    for place, (source, _, fate) in enumerate(tokens):
        right = right and (place == 0 or source == tokens[place - 1][1])
        assert (fate == "accepted") == right
    counts = len(one_call.written()), len(tokens) - 1, len(one_call.ROWS) - len(tokens)
    caption = re.search(r"!\[(.*?)\]\(docs/one-call.svg\)", README.read_text())[1]
    numbers = {"three": 3, "four": 4}
    drafts, slots, written, _ = [numbers[word] for word in re.findall(r"\b(?:three|four)\b", caption)]
    assert counts == (written, drafts, slots)


# ---- the README ----


def test_the_readme_is_short_and_begins_with_the_words_of_the_field():
    text = README.read_text()
    assert len(text.encode()) <= 9000 and len(pass_ext.__all__) <= 33
    first = " ".join(text.split("\n\n")[1].split()).lower()
    for word in (
        "speculative decoding", "draft tokens", "verifies", "acceptance length", "kv cache", "tree attention", "prompt lookup",
        "self-speculation", "continuous batching",
    ):  # fmt: skip
        assert word in first, word


def test_the_first_paragraph_says_where_the_text_is_the_models():
    """With the number that the page of trust has from the last run on a GPU."""
    first = " ".join(README.read_text().split("\n\n")[1].split())
    (differing,) = re.findall(r"^\| PaSS \| 1 \| (\d+ of \d+) \|$", (ROOT / "docs/trust.md").read_text(), re.MULTILINE)
    promise, _, limits = first.partition("the model alone would write, ")
    assert promise and limits.startswith("token for token on the CPU")
    assert f"PaSS wrote {differing} texts otherwise ([figures of trust](docs/trust.md#on-a-gpu))" in limits


def test_every_op_has_a_line_in_the_readme():
    """By its name, or by that of its family with a star."""
    text = README.read_text()
    for op in _library.op_names():
        family = op.split("_")[0]
        if face_of(op) is not None:
            assert re.search(rf"`(\w+\.)?{op}`|`{family}_\*`", text) or op.removesuffix("_") in text, op
