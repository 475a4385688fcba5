"""train-head: the passes of training are the drafts of decoding, row by row; the command's head loads, drafts and is exact."""

import json
import shlex

import pytest
import torch
from safetensors.torch import load_file
from support.small_models import BYTES, byte_tokenizer, small_model

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from support.heads import PlainEagle3, eagle3_checkpoint

from pass_ext import Plain, generate, load_drafter
from pass_ext.__main__ import main
from pass_ext.training.common.ranks import Ranks
from pass_ext.training.draft.loop import collect_hidden
from pass_ext.training.head.loop import HeadSettings, HeadTrainer, PassAttention, passes
from pass_ext.training.head.start import begin_linear

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of four small layers with a token per byte, and texts."""
    path = tmp_path_factory.mktemp("tiny")
    ids = dict.fromkeys(("eos_token_id", "pad_token_id", "bos_token_id"), BYTES)
    small_model("llama", vocab_size=BYTES + 1, num_hidden_layers=4, **ids).save_pretrained(path / "model")
    byte_tokenizer().save_pretrained(path / "model")
    (path / "texts").mkdir()
    for number in range(30):
        (path / f"texts/part {number}.txt").write_text(f"line {number} of a text\n" * 40)
    return path


def run(folder, out, *more):
    line = (
        f"train-head --model {folder}/model --data {folder}/texts --out {out} --taps 1 2 3 --vocabulary 60 --inner 80"
    )
    line += " --document-tokens 500 --continuations 10 --sample-tokens 16 --length 24 --batch 2 --warm-up 1"
    main([*shlex.split(line), *more])
    return out / "model.safetensors"


@pytest.mark.parametrize("settings", [{}, dict(norm_before_residual=True, fc_norm=True, norm_output=True)], ids=str)
def test_the_passes_of_training_are_the_drafts_of_decoding(tmp_path, settings):
    """Row j of pass k of a window has the logits that the head has after text[:j + 2] and the k - 1 next tokens as drafts."""
    target = small_model("llama", num_hidden_layers=4)
    config, tensors = eagle3_checkpoint(tmp_path, target, **settings)
    plain, head = PlainEagle3(config, tensors, target), load_drafter(tmp_path, target).head
    windows = torch.randint(3, 97, (21,), generator=torch.Generator().manual_seed(0)).split([12, 9])
    texts = [window.tolist() for window in windows]
    with torch.no_grad():
        taps = torch.cat([plain.hidden([*text, 0]) for text in texts])
        found = passes(head, target.get_input_embeddings()(torch.cat(windows)), taps, [12, 9], 3)
        for k, every in enumerate(found, 1):
            for text, rows in zip(texts, every.split([12 - k, 9 - k]), strict=True):
                for j in (0, 3, len(rows) - 1):
                    expected = plain.logits(text[: j + 2], text[j + 2 : j + 1 + k])[plain.tokens]
                    torch.testing.assert_close(head.logits(rows[j]), expected, rtol=1e-4, atol=1e-4)


def trainer_of(tmp_path, texts, ranks=None, **settings):
    """A trainer of a random head on texts, of which the rank has its share, and what it trains on."""
    target = small_model("llama", num_hidden_layers=4)
    eagle3_checkpoint(tmp_path, target)
    head = load_drafter(tmp_path, target).head
    head.lm_head.weight.copy_(target.get_output_embeddings().weight[head.tokens])
    mine = (ranks or Ranks()).share_of(texts)
    known = dict(
        steps=4, batch=3, length=8, unroll=2, decay=0.5, learning_rate=0.01, weight_decay=0.0, warm_up=1, clip=1.0
    )
    known |= dict(seed=0, step_dtype="float32", time_budget=0.0) | settings
    hidden = collect_hidden(target, mine, [1, 2, 3])
    return target, HeadTrainer(target, head, hidden, HeadSettings(**known), ranks, [len(text) for text in texts])


TEXTS = [[5, 9, 33, 60, 7, 81, 12, 44, 13, 70, 21, 8], [90, 3, 17, 17, 52, 66, 29, 41, 9], [31, 8, 77, 25, 50, 14]]


def test_the_loss_of_a_step_is_the_divergence_of_every_draft(tmp_path):
    target, trainer = trainer_of(tmp_path, TEXTS)
    head, table, output = (trainer.head, target.get_input_embeddings().weight, target.get_output_embeddings().weight)
    expected = 0.0
    for text, first, end in trainer.windows(0):
        ids = torch.tensor([TEXTS[text]])
        with torch.no_grad():
            states = target(ids, output_hidden_states=True).hidden_states
            final = states[-1][0, first:end].bfloat16().float()  # as states are kept
            law = (final @ output[head.tokens].T).log_softmax(-1)
            taps = torch.stack([states[k][0, first:end] for k in (1, 2, 3)], 1).bfloat16().float()
            for k, rows in enumerate(passes(head, table[ids[0, first:end]], taps, [end - first], 2), 1):
                divergence = (law[k:].exp() * (law[k:] - head.logits(rows).log_softmax(-1))).sum(-1)
                expected += float(0.5 ** (k - 1) / 1.5 * divergence.mean() / 3)
    assert trainer.loss(0).item() == pytest.approx(expected, rel=1e-4)


def test_products_in_bfloat16_change_the_loss_by_their_rounding(tmp_path):
    wide, narrow = (
        trainer_of(tmp_path / name, TEXTS, step_dtype=name)[1].loss(0).item() for name in ("float32", "bfloat16")
    )
    assert wide != narrow and narrow == pytest.approx(wide, rel=0.03)


def test_a_rank_without_a_window_takes_the_step_of_the_others(tmp_path):
    _, trainer = trainer_of(tmp_path, TEXTS, Ranks(1, 2), batch=1)
    step = next(step for step in range(20) if trainer.windows(step)[0][0] != 1)
    loss = trainer.loss(step)
    loss.backward()
    assert loss.item() == 0 and not any(
        weight.grad.any() for weight in trainer.head.parameters() if weight.grad is not None
    )


def test_a_head_begins_as_the_best_linear_one(tmp_path):
    """Without its MLP the head puts out the least-squares solution of its inputs; with it, it comes nearer to the states."""
    target = small_model("llama", num_hidden_layers=4)
    target.model.norm.weight.copy_(torch.rand(target.config.hidden_size) + 0.5)
    eagle3_checkpoint(tmp_path, target, fc_norm=True, dim=32, key_heads=4)
    head = load_drafter(tmp_path, target).head
    for norm in (*head.fc_norm, head.layers[0].input_layernorm, head.layers[0].hidden_norm):
        norm.weight.fill_(1.0)
    head.layers[0].post_attention_layernorm.weight.fill_(1.0)
    chooser = torch.Generator().manual_seed(0)
    texts = [torch.randperm(97, generator=chooser)[:40].tolist() for _ in range(30)]
    hidden = collect_hidden(target, texts, [1, 2, 3])
    begin_linear(head, target, hidden, [40] * len(texts), Ranks())

    def over_rms(x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)

    embedded = target.get_input_embeddings()(hidden.tokens.long())
    taps = torch.stack([hidden.after[k].float() for k in (1, 2, 3)], 1)
    before = torch.arange(len(texts) * 40).view(-1, 40)[:, :-1].flatten()
    x = torch.cat([over_rms(taps[before]).flatten(1), over_rms(embedded[before + 1])], 1)
    y = hidden.final[before + 1].float() / target.model.norm.weight

    def error():
        rows = []
        for begin in range(0, len(hidden.tokens), 40):
            part = slice(begin, begin + 39)
            states = head.take(taps[part])
            rows.append(head(embedded[begin + 1 : begin + 40], states, torch.arange(39), PassAttention([39]))[1])
        return float((torch.cat(rows) - y).square().mean())

    whole = error()
    head.layers[0].mlp.down_proj.weight.zero_()
    best = float((x @ torch.linalg.lstsq(x, y).solution - y).square().mean())
    assert error() < 1.1 * best < 0.5 * float(y.square().mean()) and whole < 0.95 * error()
    torch.testing.assert_close(head.norm.weight, target.model.norm.weight)


def test_the_output_layer_is_the_model_s_and_stays_so(folder, tmp_path):
    from transformers import AutoModelForCausalLM

    trained = load_file(run(folder, tmp_path / "out", "--steps", "3", "--learning-rate", "0.01"))
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    tokens = trained["d2t"] + torch.arange(len(trained["d2t"]))
    assert torch.equal(trained["lm_head.weight"], model.get_output_embeddings().weight[tokens])


def test_the_steps_end_with_the_minutes(folder, tmp_path):
    run(folder, tmp_path / "out", "--steps", "100000", "--time-budget", "0.02")
    record = json.loads((tmp_path / "out/model.json").read_text())
    assert 0 < record["steps"] == len(record["losses"]) < 100000


def test_a_head_is_trained_loaded_and_exact(folder, tmp_path, capsys):
    from transformers import AutoModelForCausalLM

    file = run(folder, tmp_path / "out", "--steps", "40")
    said = capsys.readouterr().out
    assert "tokens a call" in said
    # Where a config has no such setting, vLLM takes True.
    assert json.loads((tmp_path / "out/config.json").read_text())["norm_before_residual"] is False
    record = json.loads((tmp_path / "out/model.json").read_text())
    losses = record["losses"]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert record["evaluation"]["tokens_per_call"] > 1.0
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    for place in (tmp_path / "out", file):
        method = load_drafter(place, model)
        assert method.length == 4 and method.head.taps == (1, 2, 3)
    ids = torch.tensor([list(b"line 3 of a text\nline 3"), list(b"a text\nline 7 of a text")])
    options = dict(max_new_tokens=24, eos_token_id=[])
    got, want = (generate(model, ids, each, **options) for each in (method, Plain()))
    assert torch.equal(got.sequences, want.sequences)


def test_a_run_that_stopped_goes_on(folder, tmp_path, capsys):
    whole = run(folder, tmp_path / "whole", "--steps", "6")
    run(folder, tmp_path / "part", "--steps", "6")
    capsys.readouterr()
    again = run(folder, tmp_path / "part", "--steps", "6")
    assert "going on from step 6 of 6" in capsys.readouterr().out
    mine, theirs = load_file(again), load_file(whole)
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--taps", "1", "2", "2"), "three different numbers from 1 to 4"),
        (("--taps", "1", "2", "5"), "three different numbers from 1 to 4"),
        (("--unroll", "30"), "--length must be more than --unroll"),
        (("--decay", "-1"), "--decay must be at least 0"),
    ],
    ids=str,
)
def test_what_cannot_be_trained_is_refused(folder, tmp_path, more, message):
    with pytest.raises(SystemExit, match=message):
        run(folder, tmp_path / "out", *more)
