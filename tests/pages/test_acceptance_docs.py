"""docs/ops/accept.md: its table and picture show the committed result, the kernels reproduce the result, and its example runs
and emits the target's distribution.
"""

import json
import re
import shutil
from itertools import product
from pathlib import Path

import pytest
import torch
from support.code_blocks import blocks_of, run_blocks
from support.enumeration import CHAINS, World, emitted_distribution, make
from support.paths import ROOT

import pass_ext

PAGE, PICTURE = "docs/ops/accept.md", "docs/ops/accept-tree.svg"


@pytest.fixture
def acceptance():
    from benchmarks.pages import acceptance

    return acceptance


@pytest.fixture
def result(acceptance):
    return acceptance.committed_result(ROOT)


@pytest.fixture
def means(result):
    return {(row["shape"], row["rule"], row["drafts"]): row["mean_accepted"] for row in result["rows"]}


# ---- the page ----


def test_a_changed_page_picture_or_result_is_found(acceptance, tmp_path):
    results = Path("benchmarks/results")
    for path in [Path(PAGE), Path(PICTURE), *(p.relative_to(ROOT) for p in ROOT.glob(f"{results}/*/acceptance.json"))]:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    assert acceptance.check(tmp_path) == []
    page, picture = tmp_path / PAGE, tmp_path / PICTURE
    changes = [
        (page, lambda text: re.sub(r"\| \d\.\d\d\d \|$", "| 9.999 |", text, count=1, flags=re.MULTILINE)),
        (picture, lambda text: text.replace("rejected", "accepted", 1)),
    ]
    for path, change in changes:
        before = path.read_text()
        assert change(before) != before
        path.write_text(change(before))
        assert len(acceptance.check(tmp_path)) == 1
        path.write_text(before)
    files = list(tmp_path.glob(f"{results}/*/acceptance.json"))
    path = max(files, key=lambda file: json.loads(file.read_text())["date"])
    result = json.loads(path.read_text())
    result["rows"][0]["mean_accepted"] += 0.1
    result["story"]["nodes"][1]["coin"] = 0.5
    path.write_text(json.dumps(result))
    assert len(acceptance.check(tmp_path)) == 2
    for file in files:
        file.unlink()
    assert len(acceptance.check(tmp_path)) == 1


def test_the_result_names_no_host_and_no_path(result):
    assert not result["quick"] and result["settings"]["requests"] >= 20_000
    assert str(ROOT) not in json.dumps(result)


# ---- the result ----


def test_every_rule_is_there(means):
    assert {rule for _, rule, _ in means} == set(pass_ext.RULES)


def test_orderings(means):
    """The orderings of theory, which the page states in words."""
    rejection = {shape: means[shape, "rejection", "without"] for shape in ("chain", "tree")}
    assert means["chain", "block", "without"] >= rejection["chain"]
    assert means["tree", "traversal", "without"] >= rejection["tree"]
    with_replacement = means["tree", "rejection_with_replacement", "with"]
    assert rejection["tree"] >= with_replacement
    assert means["tree", "kseq", "with"] >= with_replacement
    for rule in ("rejection_with_replacement", "kseq"):  # one child: the same drafts, the same coins
        assert means["chain", rule, "with"] == rejection["chain"]
    exact = {key: mean for key, mean in means.items() if pass_ext.RULES[key[1]] == "exact"}
    assert max((k for k in exact if k[0] == "tree"), key=exact.__getitem__) == ("tree", "coupled", "coupled")
    for shape in ("chain", "tree"):
        assert means[shape, "coupled", "coupled"] > 3 * means[shape, "coupled", "without"]


def test_the_result_is_what_the_kernels_do(acceptance, result):
    """The first of its requests again: their means are as near as so few allow."""
    some = 500
    for row, again in zip(result["rows"], acceptance.measure(some), strict=True):
        scale = (result["settings"]["requests"] / some) ** 0.5
        assert abs(row["mean_accepted"] - again["mean_accepted"]) < 5 * scale * row["standard_error"], (row, again)


def test_the_errors_are_those_of_the_enumerated_rules(acceptance):
    """The closed form against an enumeration of every draft and coin, on distributions with zeros and without."""
    from benchmarks.pages import acceptance_means

    for rule, zeros, seed in product((r for r in pass_ext.RULES if pass_ext.RULES[r] != "exact"), (0.0, 0.3), range(6)):
        world = World(seed, 4, zeros=zeros)
        texts, _ = emitted_distribution(make(world, rule, CHAINS["chain1"]), rule)
        law = torch.zeros(4, dtype=torch.float64)
        for text, mass in texts.items():
            law[text[0]] += mass
        p, q = (distribution.probs for distribution in world.at(()))
        torch.testing.assert_close(acceptance_means.law_of_one_draft(rule, p, q), law, atol=1e-12, rtol=0.0)


def test_the_errors_are_the_committed_ones(acceptance, result):
    again = acceptance.errors(500)
    assert again.keys() == result["errors"].keys()
    for rule, error in again.items():
        assert error == pytest.approx(result["errors"][rule], rel=0.1), rule


def test_the_picture_is_what_the_kernel_does(acceptance, result):
    assert acceptance.acceptance_picture.verify_story() == result["story"]


def test_the_picture_is_what_the_page_tells(result):
    told = {node["word"]: node["state"] for node in result["story"]["nodes"] if "coin" in node}
    assert told == {"cat": "rejected", "dog": "accepted", "runs": "rejected", "sings": "accepted"}
    assert result["story"]["added"]["word"] == "now"


# ---- the examples ----


def test_the_example_of_a_trainer_prints_what_the_page_says():
    path = ROOT / PAGE
    blocks = [block for block in blocks_of(path) if block[0] == "pycon"]
    assert len(blocks) == 1
    names = run_blocks(path, blocks, {"torch": torch, "pass_ext": pass_ext})
    z = names["new"].double()[0, 0, :3] / 0.5
    ratio = z.log_softmax(0)[names["token"].item()] - names["step"].logprobs.processed.item()
    assert names["log_ratio"].item() == pytest.approx(ratio.item(), abs=1e-6)


VOCABULARY, HORIZON = 3, 3


def example(*replacements):
    """`generate` of the page, with these replacements."""
    code = re.findall(r"```python\n(.*?)```", (ROOT / PAGE).read_text(), flags=re.DOTALL)
    assert len(code) == 1
    for before, after in replacements:
        assert code[0].count(before) == 1, before
        code[0] = code[0].replace(before, after)
    names = {}
    exec(compile(code[0], PAGE, "exec"), names)
    return names["generate"]


def toy_model(seed):
    """ids [1, T] -> logits [1, T, V], by the last two tokens."""
    table = 1.5 * torch.randn(VOCABULARY, VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed))

    def model(ids):
        return table[torch.cat([ids[:, :1], ids[:, :-1]], 1), ids]

    return model


TARGET, DRAFT, PROMPT = toy_model(1), toy_model(2), torch.tensor([[0, 1]])


def tail(generate, texts=1500, temperature=0.8):
    """P(a chi-square as large) of the next HORIZON tokens against the target's distribution."""
    distribution = {}
    for text in product(range(VOCABULARY), repeat=HORIZON):
        ids = torch.cat([PROMPT, torch.tensor([text])], 1)
        probs = (TARGET(ids)[0, 1:-1].double() / temperature).softmax(-1)
        distribution[text] = float(probs[range(HORIZON), text].prod())
    assert sum(distribution.values()) == pytest.approx(1.0)
    counts = dict.fromkeys(distribution, 0)
    for seed in range(texts):
        out = generate(TARGET, DRAFT, PROMPT, HORIZON, K=2, temperature=temperature, seed=seed)
        assert out.shape == (1, 2 + HORIZON) and torch.equal(out[:, :2], PROMPT)
        counts[tuple(out[0, 2:].tolist())] += 1
    statistic = sum(
        (counts[text] - texts * distribution[text]) ** 2 / (texts * distribution[text]) for text in distribution
    )
    return float(torch.special.gammaincc(torch.tensor((len(distribution) - 1) / 2), torch.tensor(statistic / 2)))


def test_the_example_emits_the_targets_distribution():
    assert tail(example()) > 1e-3


def test_a_wrong_draft_distribution_in_the_example_shows():
    assert tail(example(("torch.stack(rows, 1)", "0 * torch.stack(rows, 1)"))) < 1e-9


COUPLED = [
    ('mode="without", nodes=k, **noise', 'mode="coupled", **noise | dict(positions=start + k)'),
    ('rule="block", draft_logits=torch.stack(rows, 1), ', 'rule="coupled", '),
]


def plain(ids, new_tokens, temperature, seed):
    """The target alone, sampled with the coupled noise of seed and position."""
    for _ in range(new_tokens):
        token, _ = pass_ext.draft_sample(
            TARGET(ids)[:, -1], 1, mode="coupled", temperature=temperature, seeds=seed, positions=ids.shape[1]
        )
        ids = torch.cat([ids, token], 1)
    return ids


def test_the_coupled_form_of_the_example_changes_no_answer():
    generate = example(*COUPLED)
    for seed in range(20):
        expected = plain(PROMPT, 12, 0.8, seed)
        for drafts in (1, 4):
            assert torch.equal(generate(TARGET, DRAFT, PROMPT, 12, K=drafts, temperature=0.8, seed=seed), expected)


def test_the_example_at_temperature_zero_is_greedy():
    ids = PROMPT
    for _ in range(9):
        ids = torch.cat([ids, TARGET(ids)[:, -1].argmax(-1, keepdim=True)], 1)
    assert torch.equal(example()(TARGET, DRAFT, PROMPT, 9, temperature=0.0), ids)
