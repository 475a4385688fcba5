"""docs/ops/attention.md: its blocks run, its table and pictures agree with the ops, and its decoding step decodes."""

import importlib.util
import re
import shutil
from itertools import pairwise

import pytest
import torch
from support.code_blocks import blocks_of, run_blocks
from support.paths import ROOT

import pass_ext

PAGE = ROOT / "docs/ops/attention.md"

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="an sdist has no docs")


@pytest.fixture
def page():
    torch.manual_seed(0)
    with torch.no_grad():
        return run_blocks(PAGE, blocks_of(PAGE), {})


def load(name, path):
    if not path.exists():
        pytest.skip(f"no {path.name} here")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- the page ----


def test_every_block_of_the_page_runs(page):
    assert {language for language, _, _ in blocks_of(PAGE)} == {"python", "pycon"}
    assert page["merged"].shape == (7, 8, 64)


def test_a_wrong_output_on_the_page_is_found():
    (language, code, line), *_ = [block for block in blocks_of(PAGE) if block[0] == "pycon"]
    wrong = code.replace("'1011'", "'1111'")
    assert wrong != code
    with pytest.raises(AssertionError, match="1111"):
        run_blocks(PAGE, [(language, wrong, line)], {})


def test_the_table_of_the_batch(page):
    trees, prefix_lens = page["trees"], page["prefix_lens"].tolist()
    bounds, expected = trees.cu_nodes.tolist(), []
    for request, (first, last) in enumerate(pairwise(bounds)):
        for row in range(first, last):
            sees = [j for j in range(last - first) if trees.visible[row, 0] >> j & 1]
            depth, node = int(trees.depths[row]), row - first
            numbers = [row, request, node, int(trees.parents[row]), " ".join(map(str, sees)), depth]
            expected.append([*map(str, numbers), str(prefix_lens[request] + depth), str(prefix_lens[request] + node)])
    lines = re.findall(r"^\| (\d+ \| .*?) \|$", PAGE.read_text(), flags=re.MULTILINE)
    assert [line.split(" | ") for line in lines] == expected


def test_the_limits_on_the_page_are_those_of_the_op():
    from pass_ext.ops import attention
    from pass_ext.tree import MAX_TREE_NODES

    page = PAGE.read_text()
    of_keys, of_values = attention.MOST_KEY_DIM, attention.MOST_VALUE_DIM
    assert f"of keys any multiple of {attention.WIDTH_STEP} up to {of_keys}, of values up to {of_values}" in page
    assert f"the same; fast are {', '.join(map(str, attention.HEAD_DIMS))}, alike" in page
    assert "alike, and {}/{}, in bf16 and fp16".format(*attention.TWO_WIDTHS) in page
    assert f"up to {MAX_TREE_NODES:,}, any bits" in page


# ---- the step ----


def test_the_step_of_the_page_decodes(page):
    """Drafts with one path of the model's tokens: it is accepted, and the next step finds its keys in the cache."""
    decoder = load("tree_decoding", ROOT / "examples" / "tree_decoding.py")
    torch.manual_seed(1)
    model, prompts, temperature = decoder.Model().requires_grad_(False), [[3, 1, 4, 1, 5], [], [9, 2, 6]], 0.7
    seeds = torch.tensor([5, 6, 7])
    texts = [
        decoder.decode_plainly(model, p, 9, temperature, s) if p else []
        for p, s in zip(prompts, (5, 6, 7), strict=True)
    ]
    caches = list(torch.full((2 * decoder.LAYERS, 3, 16, decoder.KV_HEADS, decoder.HEAD_DIM), torch.nan))
    prefix_lens = page["read_prompts"](model, caches, prompts)
    assert prefix_lens.tolist() == [4, 0, 2]
    parents = torch.tensor([-1, 0, 0, 2, 3, -1, 0, 0, 1, 1], dtype=torch.int32)
    cu_nodes = torch.tensor([0, 5, 5, 10], dtype=torch.int32)
    for _ in range(2):
        first, _, last = [text[length:][:4] for text, length in zip(texts, (prefix_lens).tolist(), strict=True)]
        # The true tokens hang at nodes 2, 3, 4 of the first tree; the second tree goes wrong after one token.
        wrong = (last[2] + 1) % decoder.VOCABULARY
        tokens = torch.tensor(
            [first[0], 63 - first[1], *first[1:4], last[0], last[1], (last[1] + 1) % 64, wrong, wrong - 2]
        )
        emitted, prefix_lens = page["verify"](
            model, caches, prefix_lens, tokens, parents, cu_nodes, 5, 3, temperature=temperature, seeds=seeds
        )
        assert emitted[0].tolist() == texts[0][int(prefix_lens[0]) - 3 :][:4]
        assert emitted[1].tolist() == [-1] * 4
        assert emitted[2].tolist()[:2] == texts[2][int(prefix_lens[2]) - 1 :][:2]
    assert prefix_lens.tolist() == [12, 0, 6]


@pytest.mark.parametrize("most", [1024, 3, 1])
def test_the_page_reads_prompts_whole_and_in_pieces(page, most):
    decoder = load("tree_decoding", ROOT / "examples" / "tree_decoding.py")
    torch.manual_seed(2)
    model, prompts = decoder.Model().requires_grad_(False), [[3, 1, 4, 1, 5, 9, 2], [], [6, 5], [3]]
    shape = 2 * decoder.LAYERS, len(prompts), 16, decoder.KV_HEADS, decoder.HEAD_DIM
    caches, wanted = list(torch.full(shape, torch.nan)), list(torch.full(shape, torch.nan))
    for b, prompt in enumerate(prompts):
        fill_cache(model, wanted, b, prompt[:-1])
    assert page["read_prompts"](model, caches, prompts, most).tolist() == [6, 0, 1, 0]
    for cache, want in zip(caches, wanted, strict=True):
        torch.testing.assert_close(cache, want, equal_nan=True)


def fill_cache(model, caches, request, tokens):
    """The keys and values of a text, computed without pass_ext."""

    def attend(layer, q, k, v):
        caches[2 * layer][request, : len(k)], caches[2 * layer + 1][request, : len(v)] = k, v
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        attention = torch.nn.functional.scaled_dot_product_attention
        return attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)

    if tokens:
        model(torch.tensor(tokens), torch.arange(len(tokens)), attend)


# ---- pictures ----


@pytest.fixture
def pictures():
    from tools.pictures import attention

    return attention


def test_the_page_shows_every_picture_and_says_how_it_is_made(pictures):
    page = PAGE.read_text()
    assert sorted(re.findall(r"!\[.*?\]\((.*?)\)", page)) == sorted(
        pictures.path_of(name).name for name in pictures.PICTURES
    )
    for _, tree in pictures.PICTURES.values():
        assert f"`{tree!r}`" in page


def test_a_changed_picture_is_found(pictures, tmp_path, monkeypatch):
    (tmp_path / "docs/ops").mkdir(parents=True)
    for name in pictures.PICTURES:
        shutil.copy(ROOT / pictures.path_of(name), tmp_path / "docs/ops")
    assert pictures.check(tmp_path) == []
    monkeypatch.setitem(pictures.PICTURES, "chain", ("A chain of four drafts", pass_ext.Tree.chain(5)))
    assert len(pictures.check(tmp_path)) == 1
    (tmp_path / pictures.path_of("tree")).unlink()
    assert len(pictures.check(tmp_path)) == 2
