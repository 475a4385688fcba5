"""Early-exit drafts: the packed model against the target and a truncated model, the adapter's file, and its training."""

import argparse
import json
import re
import shlex

import pytest
import torch
import torch.nn.functional as F
from support.generation import adapter_for
from support.packed_models import packed_copy
from support.paths import ROOT
from support.small_models import VOCABULARY, small_model
from support.training_models import Letters, counting, tiny_llama

from pass_ext.decoding.models.any_model import packed_model
from pass_ext.decoding.models.early_exit import EarlyExitDraft, EarlyExitModel, exit_parts, first_layers, rows_of_head
from pass_ext.decoding.session.session import Session
from pass_ext.modules.exit_adapter import ExitAdapter
from pass_ext.tree import Tree, pack_trees

pytest.importorskip("transformers")
FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "gemma", "phi3"]
TREE = Tree.from_branching([2, 2])


def chain_and_tree(adapted, *, text=11):
    """Logits of a text's rows, and of a tree's rows after it."""
    generator = torch.Generator().manual_seed(5)
    session = Session(adapted, 1, 64)
    with torch.no_grad(), adapted.attached():
        chain = pack_trees([Tree.chain(text - 1)])
        first = session.call(chain, torch.randint(3, VOCABULARY, (text,), generator=generator))
        session.commit(chain, torch.arange(text, dtype=torch.int32)[None], torch.tensor([text - 1], dtype=torch.int32))
        tree = pack_trees([TREE])
        second = session.call(tree, torch.randint(3, VOCABULARY, (len(TREE.parents),), generator=generator))
    return first, second, session


def by_hand(model, layers, adapter=None):
    """A separate transformers model with copies of the first layers and of everything else."""
    cut = small_model(model.config.model_type, num_hidden_layers=layers)
    cut.load_state_dict({name: model.state_dict()[name] for name in cut.state_dict()})
    return cut


# ---- the packed model ----


@pytest.mark.parametrize("family", FAMILIES)
def test_all_layers_and_no_adapter_are_the_target(family):
    model = small_model(family)
    wanted, found = chain_and_tree(packed_model(model)), chain_and_tree(packed_model(EarlyExitDraft(model, 2)))
    assert torch.equal(wanted[0], found[0])
    assert torch.equal(wanted[1], found[1])


@pytest.mark.parametrize("family", FAMILIES)
def test_fewer_layers_are_a_model_that_has_no_more(family):
    model = small_model(family, num_hidden_layers=3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    draft = packed_model(EarlyExitDraft(model, 2))
    assert isinstance(draft, EarlyExitModel) and draft.shares_layers == 2
    wanted, found = chain_and_tree(packed_model(by_hand(model, 2))), chain_and_tree(draft)
    assert torch.equal(wanted[0], found[0])
    assert torch.equal(wanted[1], found[1])
    assert len(found[2].caches) == 2 and model.config.num_hidden_layers == len(model.get_decoder().layers) == 3
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    target = chain_and_tree(packed_model(model))[2]
    for own, theirs in zip(found[2].caches, target.caches, strict=False):
        for mine, other in zip(own, theirs, strict=True):
            assert torch.equal(mine[:, :11], other[:, :11]), "its keys and values are the target's"


def test_the_adapter_stands_before_norm_and_head_and_the_vocabulary_after():
    model = small_model("llama")
    chosen = torch.tensor([90, 3, 17, 41])
    whole = packed_model(EarlyExitDraft(model, adapter=adapter_for(model)))
    few = packed_model(EarlyExitDraft(model, adapter=adapter_for(model, vocabulary=chosen)))
    adapter, kept = adapter_for(model), []
    hook = by_hand(model, 1).get_decoder()
    ids = torch.randint(3, VOCABULARY, (11,), generator=torch.Generator().manual_seed(5))
    hook.norm.register_forward_pre_hook(lambda _, x: kept.append(x[0]))
    with torch.no_grad():
        hook(input_ids=ids[None])
        h = kept[0][0]
        size = h.square().mean(-1, keepdim=True).sqrt()
        changed = h + F.silu((h / size) @ adapter.down.weight.T) @ adapter.up.weight.T * size
        wanted = model.get_output_embeddings()(model.get_decoder().norm(changed))
    for ours, subset in zip(chain_and_tree(whole)[:2], chain_and_tree(few)[:2], strict=True):
        assert subset.shape == ours.shape
        torch.testing.assert_close(subset[:, chosen], ours[:, chosen], rtol=1e-5, atol=1e-5)
        others = [token for token in range(VOCABULARY) if token not in chosen.tolist()]
        assert (subset[:, others] == -torch.inf).all()
    torch.testing.assert_close(chain_and_tree(whole)[0], wanted, rtol=1e-4, atol=1e-4)
    bare = packed_model(EarlyExitDraft(model, 1))
    assert not torch.allclose(chain_and_tree(bare)[0], wanted, atol=0.1), "the adapter is seen"


def test_a_packed_head_for_some_tokens_gives_the_numbers_of_the_whole_one():
    model, chosen = packed_copy(small_model("llama")), torch.tensor([90, 3, 17, 41])
    head = model.get_output_embeddings()
    fewer = rows_of_head(head, chosen)
    assert type(fewer) is type(head) and fewer.out_features == len(chosen)
    x = torch.randn(3, head.in_features)
    assert torch.equal(fewer(x), head(x)[:, chosen])


def test_draft_and_target_may_be_attached_together_and_hooks_stay_with_the_target():
    model = small_model("llama")
    target, draft = packed_model(model), packed_model(EarlyExitDraft(model, 1))
    wanted = chain_and_tree(target)[1], chain_and_tree(draft)[1]
    hook = (
        model.get_decoder().layers[0].register_forward_pre_hook(lambda *_: pytest.fail("the target's hook was called"))
    )
    with target.attached(), draft.attached():
        assert torch.equal(chain_and_tree(draft)[1], wanted[1])
        hook.remove()
        assert torch.equal(chain_and_tree(target)[1], wanted[0])
    assert model.config._attn_implementation == "eager"
    assert model.get_decoder().layers[0].self_attn.config._attn_implementation == "eager"


def test_only_the_wanted_rows_have_logits():
    model = small_model("llama")
    draft = packed_model(EarlyExitDraft(model, adapter=adapter_for(model, vocabulary=torch.tensor([4, 9]))))
    session, trees = Session(draft, 1, 32), pack_trees([Tree.chain(4)])
    with torch.no_grad(), draft.attached():
        whole = session.call(trees, torch.arange(5, 10))
        some = session.call(trees, torch.arange(5, 10), torch.tensor([1, 4]))
    torch.testing.assert_close(some, whole[[1, 4]])


def test_hidden_size_and_vocabulary_of_the_head_are_as_the_first_layers_say():
    model = small_model("qwen2")
    cut = first_layers(model, 1)
    assert cut.get_output_embeddings().weight is model.get_output_embeddings().weight
    assert cut.get_input_embeddings().weight is model.get_input_embeddings().weight
    draft = EarlyExitModel(EarlyExitDraft(model, adapter=adapter_for(model, vocabulary=torch.tensor([4, 9]))))
    head = draft.model.get_output_embeddings()
    assert torch.equal(head.weight, model.get_output_embeddings().weight[[4, 9]])
    assert model.get_output_embeddings().out_features == VOCABULARY


# ---- what is refused ----


@pytest.mark.parametrize("family", ["phi", "gpt_neox", "opt"])
def test_other_forms_are_refused(family):
    with pytest.raises(ValueError, match=r"has not: .*decoder\.norm"):
        EarlyExitDraft(small_model(family), 1)


def test_misfits_are_refused():
    model = small_model("llama")
    with pytest.raises(ValueError, match="changes its logits after its head"):
        EarlyExitDraft(small_model("gemma2"), 1)
    with pytest.raises(TypeError, match="transformers model for causal language modelling, got Linear"):
        EarlyExitDraft(torch.nn.Linear(2, 2), 1)
    with pytest.raises(ValueError, match="give layers"):
        EarlyExitDraft(model)
    for layers in (0, 3):
        with pytest.raises(ValueError, match=f"EarlyExitDraft: layers must be a whole number, 1 to 2, got {layers}"):
            EarlyExitDraft(model, layers)
    with pytest.raises(ValueError, match="layers is 2, but the adapter was trained after layer 1"):
        EarlyExitDraft(model, 2, adapter_for(model))
    with pytest.raises(ValueError, match="hidden size: it has 32, this model has 64; layers: it stands after 5"):
        EarlyExitDraft(model, adapter=ExitAdapter(5, 32, 2))
    with pytest.raises(ValueError, match="hidden size: it has 576"):
        EarlyExitDraft(model, adapter="smollm2-135m-instruct")
    with pytest.raises(ValueError, match="at least 1"):
        ExitAdapter(1, 8, 0)
    with pytest.raises(ValueError, match="different token ids"):
        ExitAdapter(1, 8, 2, vocabulary=torch.tensor([3, 3]))
    with pytest.raises(ValueError, match="ids from 0 to 9, got 3 to 10"):
        ExitAdapter(1, 8, 2, vocabulary=torch.tensor([3, 10]), base_vocabulary=10)


# ---- the file ----


@pytest.mark.parametrize("vocabulary", [None, torch.tensor([8, 2, 5])], ids=["all", "few"])
def test_a_file_keeps_everything(tmp_path, vocabulary):
    adapter = ExitAdapter(2, 16, 4, vocabulary=vocabulary, base_model="tiny", base_vocabulary=9)
    adapter.up.weight.data.normal_()
    adapter.hit_rates, adapter.training_record = ((0.5, 0.25), (0.4, 0.2)), {"command": "made by hand"}
    adapter.to(torch.bfloat16).save(tmp_path / "a.safetensors")
    read = ExitAdapter.from_pretrained(tmp_path / "a.safetensors")
    assert repr(read) == repr(adapter) and read.layers == 2 and read.rank == 4 and read.base_vocabulary == 9
    assert read.hit_rates == adapter.hit_rates and read.training_record == adapter.training_record
    for name, value in adapter.state_dict().items():
        assert torch.equal(read.state_dict()[name], value) and read.state_dict()[name].dtype == value.dtype
    assert (read.vocabulary is None) == (vocabulary is None)


def test_the_shipped_adapter_loads_by_name_and_is_small():
    adapter = ExitAdapter.from_pretrained("smollm2-135m-instruct")
    assert adapter.dim == 576 and adapter.base_vocabulary == 49152 and "SmolLM2-135M-Instruct" in adapter.base_model
    assert all(torch.isfinite(parameter).all() for parameter in adapter.parameters())
    assert adapter.hit_rates is not None and len(adapter.hit_rates) == 6
    for line in adapter.hit_rates:
        assert len(line) == 8 and all(0 <= rate <= 1 for rate in line) and sum(line) <= 1.0001
    assert adapter.training_record["command"].startswith("python -m pass_ext train-draft")
    from pass_ext.modules.files import PRETRAINED

    assert (PRETRAINED / "smollm2-135m-instruct-exit.safetensors").stat().st_size <= 400_000
    with pytest.raises(
        ValueError, match="'gpt-9' is neither a file nor one of the shipped names: smollm2-135m-instruct"
    ):
        ExitAdapter.from_pretrained("gpt-9")


# ---- training ----


def settings_of(**changes):
    from pass_ext.training.draft.loop import DraftSettings

    return DraftSettings(
        **{
            **dict(steps=30, batch=32, learning_rate=0.02, weight_decay=0.01, warm_up=3, clip=1.0, seed=0),
            **changes,
        }
    )


def test_hidden_states_are_those_of_each_text_alone(tmp_path):
    from pass_ext.training.draft.loop import collect_hidden, load_hidden, save_hidden

    model = tiny_llama()
    texts = [sample.ids[:length] for sample, length in zip(counting(3, 20), (20, 7, 13), strict=True)]
    progress = []
    found = collect_hidden(model, texts, [1], progress.append)
    assert sum(progress) == 40 and found.tokens.tolist() == [token for text in texts for token in text]
    outputs = []
    hook = model.model.layers[0].register_forward_hook(lambda _, x, out: outputs.append(out))
    start = 0
    for text in texts:
        with torch.no_grad():
            last = model.model(input_ids=torch.tensor([text])).last_hidden_state[0]
        layer = outputs[-1][0] if outputs[-1].__class__ is tuple else outputs[-1]
        rows = slice(start, start + len(text))
        for ours, theirs in ((found.final[rows], last), (found.after[1][rows], layer.reshape(len(text), -1))):
            torch.testing.assert_close(ours.float(), theirs, rtol=0.02, atol=0.02)
        start += len(text)
    hook.remove()
    save_hidden(found, tmp_path / "h.safetensors", "this run")
    again = load_hidden(tmp_path / "h.safetensors", "this run", [1])
    assert torch.equal(again.after[1], found.after[1]) and torch.equal(again.final, found.final)
    assert load_hidden(tmp_path / "h.safetensors", "another run", [1]) is None
    assert load_hidden(tmp_path / "h.safetensors", "this run", [1, 2]) is None


def test_the_loss_is_the_divergence_within_the_vocabulary():
    from pass_ext.training.draft.loop import DraftTrainer, collect_hidden, rows_of_step

    model = tiny_llama()
    hidden = collect_hidden(model, [sample.ids for sample in counting(4, 20)], [1])
    vocabulary = torch.tensor([2, 40, 7, 81, 55])
    adapter = adapter_for(model, vocabulary=vocabulary)
    picked = rows_of_step(80, 32, 1, 0)
    with torch.no_grad():
        head, norm = model.lm_head.weight[vocabulary], model.model.norm
        student = (norm(adapter(hidden.after[1][picked].float())) @ head.T).log_softmax(-1)
        teacher = (hidden.final[picked].float() @ head.T).log_softmax(-1)
        expected = F.kl_div(student, teacher, log_target=True, reduction="batchmean")
    loss = DraftTrainer(model, adapter, hidden, settings_of()).loss(1)
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-5, atol=1e-6)


def test_every_row_is_read_before_any_comes_again():
    from pass_ext.training.draft.loop import frequent_tokens, rows_of_step

    steps = [rows_of_step(12, 4, step, 0).tolist() for step in range(6)]
    first, second = ({row for step in epoch for row in step} for epoch in (steps[:3], steps[3:]))
    assert first == second == set(range(12)) and all(len(step) == 4 for step in steps)
    assert steps[:3] != steps[3:]
    assert len(rows_of_step(3, 4, 5, 0)) == 3
    assert frequent_tokens(torch.tensor([5, 5, 2, 9, 9, 9]), 2, 12).tolist() == [5, 9]
    assert frequent_tokens(torch.tensor([5, 5]), 3, 12).tolist() == [0, 1, 5]


def test_ranks_count_better_tokens_and_tokens_outside_are_never_hit():
    from pass_ext.training.common.rates import hit_rates
    from pass_ext.training.draft.evaluation import evaluate_draft, ranks_of_tokens, weights_read
    from pass_ext.training.draft.loop import collect_hidden

    model = tiny_llama()
    samples = counting(2, 30)
    hidden = collect_hidden(model, [sample.ids for sample in samples], [1])
    vocabulary = torch.arange(0, 80)
    adapter = adapter_for(model, vocabulary=vocabulary)
    following = hidden.tokens.roll(-1).long()
    ranks = ranks_of_tokens(model, adapter, hidden.after[1], following)
    with torch.no_grad():
        logits = model.lm_head(model.model.norm(adapter(hidden.after[1].float())))[:, :80]
    for row, token in enumerate(following.tolist()):
        better = int((logits[row] > logits[row, token]).sum()) if token < 80 else 100
        assert ranks[row] == better
    found = evaluate_draft(model, adapter, samples, hidden)
    assert found["places"] == 2 * (26 - 5) and len(found["hit_rates"]) == 6 and len(found["hit_rates"][0]) == 8
    # a text of 30: the first token after the prompt comes first, the text's last token last
    read = torch.cat([ranks[first : first + 26].unfold(0, 6, 1) for first in (3, 33)])
    assert found["hit_rates"] == hit_rates(read, 8)
    assert found["tops"]["top 1"] == round(float((read[:, 0] == 0).float().mean()), 4)
    layer = sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    assert weights_read(model, adapter) == (layer + 80 * 32 + 2 * 5 * 32) / (2 * layer + 100 * 32)


def options_for(tmp_path, **changes):
    from pass_ext.training.draft import command

    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"say {letter}\n" for letter in "abcdefghijklmnopqrstuvwxyz"))
    line = f"--model tiny --out {tmp_path / 'out'} --self-distill {prompts} --layers 1 2 --rank 8 --vocabulary 60 --steps 25"
    line += " --batch 64 --sample-tokens 24 --learning-rate 0.02 --warm-up 2"
    options = parser.parse_args(shlex.split(line))
    for name, value in changes.items():
        setattr(options, name, value)
    return options


def run_tiny(tmp_path, **changes):
    from rich.console import Console

    from pass_ext.training.common.run import Run
    from pass_ext.training.draft.pipeline import train

    tmp_path.mkdir(exist_ok=True)
    options = options_for(tmp_path, **changes)
    lines = (tmp_path / "prompts.txt").read_text().splitlines()
    with open(tmp_path / "said.txt", "a") as said:
        return train(Run(options, "the command", tiny_llama(), Letters(), [], lines, Console(file=said)))


def test_a_tiny_run_lowers_the_loss_repeats_itself_and_leaves_its_files(tmp_path):
    path = run_tiny(tmp_path / "a")
    adapter = ExitAdapter.load(path)
    facts = json.loads(path.with_suffix(".json").read_text())
    assert sum(facts["losses"][-5:]) < 0.8 * sum(facts["losses"][:5])
    assert (
        str(adapter.layers) in facts["exits"]
        and facts["layers"] == adapter.layers
        and set(facts["exits"]) == {"1", "2"}
    )
    assert facts["exits"]["2"]["speedup"] <= facts["evaluation"]["speedup"] >= facts["exits"]["1"]["speedup"]
    assert adapter.down.weight.dtype == torch.bfloat16 and len(adapter.vocabulary) == 60
    card = path.with_suffix(".md").read_text()
    assert "the command" in card and "| depth | rank 0 |" in card and path.with_suffix(".svg").exists()
    assert adapter.training_record["command"] == "the command"
    second = ExitAdapter.load(run_tiny(tmp_path / "b"))
    assert all(torch.equal(value, second.state_dict()[name]) for name, value in adapter.state_dict().items())
    run_tiny(tmp_path / "a")
    assert "hidden states of" in (tmp_path / "a" / "said.txt").read_text(), "the second run found them"
    assert any(parameter.any() for parameter in adapter.up.parameters())
    EarlyExitDraft(tiny_llama(), adapter=adapter)


@pytest.mark.parametrize("kept", [0, 0.5, 0.99], ids=["empty", "half", "nearly all"])
def test_hidden_states_that_were_cut_off_are_computed_again_and_said(tmp_path, kept):
    whole = ExitAdapter.load(run_tiny(tmp_path, steps=3, layers=[1]))
    path = tmp_path / "out/hidden.safetensors"
    good = path.read_bytes()
    path.write_bytes(good[: int(kept * len(good))])
    again = ExitAdapter.load(run_tiny(tmp_path, steps=3, layers=[1]))
    said = (tmp_path / "said.txt").read_text().replace("\n", "")
    assert f"{path} is damaged or was cut off".replace(" ", "") in said.replace(" ", "") and path.read_bytes() == good
    for mine, theirs in zip(again.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_layers_that_attend_twice_are_the_reason_given():
    """Each layer of longcat_flash attends twice: the first k layers are 2 k of its caches."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "LongcatFlashConfig"):
        pytest.skip("this transformers has no longcat_flash")
    config = transformers.LongcatFlashConfig(
        vocab_size=VOCABULARY, hidden_size=64, num_layers=2, num_attention_heads=4, ffn_hidden_size=96, q_lora_rank=16,
        kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16, moe_topk=2, n_routed_experts=4,
        zero_expert_num=2, expert_ffn_hidden_size=32,
    )  # fmt: skip
    model = transformers.LongcatFlashForCausalLM(config)
    with pytest.raises(ValueError, match=r"LongcatFlashForCausalLM attends 4 times in its 2 layers, .* attend once"):
        EarlyExitDraft(model, layers=1)


def test_the_command_refuses_impossible_options(tmp_path):
    from pass_ext.training.draft import command

    with pytest.raises(SystemExit, match="--rank must be at least 1, got 0"):
        command.check_arguments(options_for(tmp_path, rank=0))
    for option in ("continuations", "own_chats", "held_out", "warm_up", "learning_rate"):
        with pytest.raises(SystemExit, match=f"--{option.replace('_', '-')} must be at least 0, got -1"):
            command.check_arguments(options_for(tmp_path, **{option: -1}))
    with pytest.raises(SystemExit, match="--vocabulary must be at least 0, got -1"):
        command.check_arguments(options_for(tmp_path, vocabulary=-1))
    with pytest.raises(SystemExit, match="nothing to train on"):
        command.check_arguments(options_for(tmp_path, self_distill=None))
    with pytest.raises(SystemExit, match="--layers must be from 1 to 2"):
        run_tiny(tmp_path, layers=[1, 5])


def test_the_guides_command_and_the_shipped_one_have_options_that_exist():
    from pass_ext.training.common.options import INSTRUCTIONS
    from pass_ext.training.draft import command

    root = ROOT
    _, _, guide = (
        (root / "docs/guide/training.md").read_text().replace("\\\n", " ").partition("## Train an early-exit draft")
    )
    guide = guide.partition("\n## ")[0]
    lines = [line for line in guide.splitlines() if line.startswith("python -m pass_ext train-draft")]
    shipped = ExitAdapter.from_pretrained("smollm2-135m-instruct").training_record["command"]
    assert len(lines) == 1
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    for line in [*lines, shipped]:
        options = parser.parse_args(shlex.split(line)[4:])
        assert options.vocabulary == 8192
        assert (INSTRUCTIONS if options.self_distill == "shipped" else root / options.self_distill) == INSTRUCTIONS
    for option in re.findall(r"`(--[a-z-]+)", guide):
        assert option in parser.format_help(), option


def test_parts_are_found_in_every_family():
    for family in FAMILIES:
        model = small_model(family)
        parts = exit_parts(model)
        assert parts.head is model.get_output_embeddings() and len(parts.layers) == 2
