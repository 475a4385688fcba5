"""``load_drafter``: what it reads, and what it refuses with which sentence."""

import json
import logging
import shutil
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")

import tokenizers
from safetensors.torch import load_file, save_file
from support.heads import MASKED, PlainEagle3, eagle3_checkpoint
from support.small_models import small_model
from transformers import PreTrainedTokenizerFast

import pass_ext
from pass_ext import generate, load_drafter
from pass_ext.__main__ import main
from pass_ext.decoding.drafting.heads.eagle3 import save_eagle3
from pass_ext.drafting import Eagle3

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def target():
    return small_model("llama", num_hidden_layers=4)


@pytest.fixture
def folder(tmp_path, target):
    eagle3_checkpoint(tmp_path / "head", target)
    return tmp_path / "head"


def changed(folder, **settings):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))


def edited(folder, edit):
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_a_folder_and_its_file_are_the_same_head(folder, target):
    of_folder, of_file = load_drafter(folder, target), load_drafter(folder / "model.safetensors", target)
    for one, other in zip(of_folder.head.state_dict().items(), of_file.head.state_dict().items(), strict=True):
        assert one[0] == other[0] and torch.equal(one[1], other[1])
    assert of_folder.length == 3 and isinstance(of_folder, Eagle3)
    assert set(of_folder.head.state_dict()) == set(load_file(folder / "model.safetensors"))


def test_weights_may_lie_in_several_files(folder, target):
    whole = load_drafter(folder, target).head.state_dict()
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    for i in range(2):
        save_file({name: tensors[name] for name in names[i::2]}, folder / f"model-0000{i + 1}-of-00002.safetensors")
    parted = load_drafter(folder, target).head.state_dict()
    assert all(torch.equal(whole[name], parted[name]) for name in whole)


def test_the_head_has_the_models_dtype(folder, target):
    method = load_drafter(folder, small_model("llama", num_hidden_layers=4).bfloat16())
    assert {weight.dtype for weight in method.head.parameters()} == {torch.bfloat16}


def test_taps_without_a_word_are_near_both_ends_and_the_middle(folder):
    changed(folder, eagle_aux_hidden_state_layer_ids=None)
    assert load_drafter(folder, small_model("llama", num_hidden_layers=8)).head.taps == (2, 4, 5)


def test_tensors_without_a_use_are_named(folder, target, caplog):
    edited(folder, lambda tensors: tensors.update({"layers.7.odd.weight": torch.ones(1)}))
    with caplog.at_level(logging.WARNING, "pass_ext"):
        load_drafter(folder, target)
    assert "layers.7.odd.weight" in caplog.text and "fc.weight" not in caplog.text


@pytest.mark.parametrize("masked", [{}, MASKED], ids=["EAGLE-3", "P-EAGLE"])
def test_settings_that_nothing_reads_are_named(masked, target, tmp_path, caplog):
    eagle3_checkpoint(tmp_path, target, **masked)
    with caplog.at_level(logging.WARNING, "pass_ext"):
        load_drafter(tmp_path, target)
        assert caplog.text == ""
        changed(tmp_path, residual_factor=0.5)
        load_drafter(tmp_path, target)
    assert "does not know: residual_factor" in caplog.text


@pytest.mark.parametrize("place", ["of the layers", "original", "eagle_config"])
def test_settings_of_the_layers_that_nothing_reads_are_named(place, target, tmp_path, caplog):
    eagle3_checkpoint(tmp_path, target, form="speculators" if place == "of the layers" else "original")
    config = json.loads((tmp_path / "config.json").read_text())
    layers = config["transformer_layer_config"] if place == "of the layers" else config
    layers |= dict(rope_theta=10_000.0, attention_bias=False, mlp_bias=False, sliding_window=None, pretraining_tp=1)
    with caplog.at_level(logging.WARNING, "pass_ext"):
        changed(tmp_path, **config)
        load_drafter(tmp_path, target)
        assert caplog.text == ""
        (layers.setdefault("eagle_config", {}) if place == "eagle_config" else layers)["residual_factor"] = 0.5
        changed(tmp_path, **config)
        load_drafter(tmp_path, target)
    assert "does not know: residual_factor" in caplog.text


def words(*tokens):
    """A tokenizer of these words."""
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({token: i for i, token in enumerate(tokens)}, tokens[0])
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_a_head_with_another_tokenizer_is_refused(folder, target):
    """One that has no tokenizer may be of any."""
    ours = words("a", "b", "c")
    assert isinstance(load_drafter(folder, target, ours), Eagle3)
    words("a", "b", "c").save_pretrained(folder)
    assert isinstance(load_drafter(folder, target, ours), Eagle3)
    words("a", "c", "b").save_pretrained(folder)
    with pytest.raises(ValueError, match=r"another one: 1 is token 'b' for the target and 'c' for the draft") as error:
        load_drafter(folder, target, ours)
    assert str(folder) in str(error.value)
    assert isinstance(load_drafter(folder, target), Eagle3), "nothing is compared"
    with pytest.raises(TypeError, match=r"tokenizer must have get_vocab\(\), got int"):
        load_drafter(folder, target, 5)


def test_a_name_on_the_hub(folder, target, tmp_path, monkeypatch):
    """In the Hub's cache, without a network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    cached, revision = tmp_path / "hub/models--some--head", "0" * 40
    (cached / "refs").mkdir(parents=True)
    (cached / "refs/main").write_text(revision)
    shutil.copytree(folder, cached / "snapshots" / revision)
    named, own = load_drafter("some/head", target), load_drafter(folder, target)
    for one, other in zip(named.head.state_dict().items(), own.head.state_dict().items(), strict=True):
        assert one[0] == other[0] and torch.equal(one[1], other[1])
    with pytest.raises(FileNotFoundError, match="some/other is no file, no folder, and nothing that the Hub gives"):
        load_drafter("some/other", target)


REFUSED = {
    "cut off": (
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:5000]),
        "was cut off",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), "there is no .*config.json"),
    "damaged config": (lambda f: (f / "config.json").write_text("{"), "cannot be read"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "there are no tensors"),
    "unknown type": (
        lambda f: changed(f, speculators_model_type="medusa", architectures=["Odd"]),
        r"names the type medusa or Odd.*Speculative\(model\)",
    ),
    "width": (lambda f: changed(f, target_hidden_size=128), "hidden size: it has 128, this model has 64"),
    "vocabulary": (
        lambda f: changed(f, transformer_layer_config=dict(layer(f), vocab_size=5000)),
        "vocabulary: it has 5000, this model has 97",
    ),
    "layers": (
        lambda f: changed(f, eagle_aux_hidden_state_layer_ids=[1, 2, 9]),
        r"inputs of layers \[1, 2, 9\], this model has 4",
    ),
    "width of embeddings": (
        lambda f: changed(f, target_hidden_size=64, transformer_layer_config=dict(layer(f), hidden_size=32)),
        "width of the embedding table: it has 32, this model has 64",
    ),
    "verifier": (lambda f: changed(f, speculators_config=verified_by("Qwen3ForCausalLM")), "for a Qwen3ForCausalLM"),
    "form of its layers": (
        lambda f: changed(f, transformer_layer_config=dict(layer(f), model_type="gpt2")),
        "must be of the form of llama",
    ),
    "quantised": (lambda f: changed(f, quantization_config={"bits": 4}), "quantised"),
    "missing tensor": (lambda f: edited(f, lambda t: t.pop("fc.weight")), "has no tensor 'fc.weight'"),
    "missing norm": (lambda f: changed(f, norm_before_fc=True), "has no tensor 'input_norm.weight'"),
    "shape": (
        lambda f: edited(f, lambda t: t.update({"fc.weight": torch.ones(64, 64)})),
        r"'fc.weight' must be \[64, 192\].*got \[64, 64\]",
    ),
    "no mapping": (lambda f: edited(f, lambda t: t.pop("d2t")), "no tensor 'd2t' tells which"),
    "ids in place of offsets": (
        lambda f: edited(f, lambda t: t.update({"d2t": t["d2t"] + torch.arange(len(t["d2t"]))})),
        "as offsets",
    ),
    "another t2d": (lambda f: edited(f, lambda t: t.update({"t2d": t["t2d"].flip(0)})), "'d2t' and 't2d'"),
}


def layer(folder):
    return json.loads((folder / "config.json").read_text())["transformer_layer_config"]


def verified_by(architecture):
    return dict(algorithm="eagle3", verifier=dict(name_or_path="a/b", architectures=[architecture]))


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case, folder, target):
    spoil, words = REFUSED[case]
    spoil(folder)
    with pytest.raises(ValueError, match=words) as error:
        load_drafter(folder, target)
    assert str(folder) in str(error.value)


def test_a_truncated_bin_file(tmp_path, target):
    eagle3_checkpoint(tmp_path, target, form="original")
    file = tmp_path / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:4000])
    with pytest.raises(ValueError, match="was cut off"):
        load_drafter(tmp_path, target)


def test_paths_that_are_nothing(tmp_path, target):
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        load_drafter(tmp_path / "missing", target)
    (tmp_path / "head.onnx").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="must end in"):
        load_drafter(tmp_path / "head.onnx", target)


def test_what_is_no_path_is_named(folder, target):
    with pytest.raises(TypeError, match="path must be a folder, a file of weights or a name on the Hub, got Llama"):
        load_drafter(target, folder)
    with pytest.raises(FileNotFoundError, match="path is empty"):
        load_drafter("", target)


def test_a_damaged_tokenizer(folder, target):
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is damaged") as error:
        load_drafter(folder, target, words("a", "b"))
    assert str(folder) in str(error.value)


def test_a_head_is_used_with_its_model_alone(folder, target):
    method = load_drafter(folder, target)
    ids = torch.tensor([[3, 4, 5]])
    with pytest.raises(
        ValueError, match=r"EAGLE-3 head belongs to another model.*hidden size: it has 64, this model has 96"
    ):
        generate(small_model("llama", num_hidden_layers=4, hidden_size=96), ids, method, max_new_tokens=3)
    with pytest.raises(ValueError, match="inputs of layers"):
        generate(small_model("llama"), ids, method, max_new_tokens=3)
    with pytest.raises(TypeError, match="head must be one that load_drafter"):
        generate(target, ids, Eagle3(target), max_new_tokens=3)
    with pytest.raises(TypeError, match=r"draft_model: model must be .*got Eagle3Head"):
        generate(target, ids, pass_ext.Speculative(method.head), max_new_tokens=3)


@pytest.mark.parametrize(
    "settings,words",
    [
        (dict(length=0), 'length, if not "auto", must be a whole number, 1 to 32, got 0'),
        (dict(length="four"), "length"),
        (dict(branching="wide"), "branching"),
        (dict(branching=()), "1 to 32 levels"),
        (dict(ngram=3), "ngram must be NGram"),
        (dict(hit_rates=[0.5]), "hit_rates must be a row of rates"),
    ],
)
def test_settings_are_checked(settings, words, folder, target):
    head = load_drafter(folder, target).head
    with pytest.raises((ValueError, TypeError), match=f"Eagle3: .*{words}"):
        Eagle3(head, **settings)


def test_rules_that_it_cannot_serve_are_refused(folder, target):
    method = load_drafter(folder, target)
    options = dict(max_new_tokens=3, temperature=1.0, seeds=1)
    with pytest.raises(ValueError, match="longest_branch"):
        generate(target, torch.tensor([[3, 4, 5]]), method, rule="longest_branch", **options)
    tree = pass_ext.drafting.Eagle3(method.head, branching=(2, 1))
    with pytest.raises(ValueError, match="takes chains"):
        generate(target, torch.tensor([[3, 4, 5]]), tree, rule="block", **options)


def test_info_says_what_a_checkpoint_is(folder, target, tmp_path, capsys):
    assert main(["info", "--drafter", str(folder)]) == 0
    lines = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    said = {name.strip(): words.strip() for name, words in lines.items()}
    assert said == {
        "type": "eagle3, Eagle3Speculator",
        "method": "Eagle3",
        "trained for": "somebody/some-model (LlamaForCausalLM)",
        "drafts": "3, as the checkpoint proposes",
        "tensors": "15",
    }
    target.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()  # the model's shapes are enough
    assert main(["info", str(tmp_path / "model"), "--drafter", str(folder)]) == 0
    assert "yes; it reads the model's states at 1, 2, 3" in capsys.readouterr().out
    (folder / "config.json").unlink()
    with pytest.raises(SystemExit, match=r"pass_ext info: load_drafter: .*there is no"):
        main(["info", "--drafter", str(folder)])


@pytest.mark.parametrize("form", ["speculators", "original"])
def test_a_head_is_saved_in_the_speculators_form(form, target, tmp_path):
    _, tensors = eagle3_checkpoint(tmp_path / "head", target, form=form, norm_before_residual=True, fc_norm=True)
    method = load_drafter(tmp_path / "head", target)
    save_eagle3(method.head, tmp_path / "saved")
    saved = load_file(tmp_path / "saved/model.safetensors")
    assert saved.keys() == tensors.keys() and all(torch.equal(saved[name], tensors[name]) for name in tensors)
    config = json.loads((tmp_path / "saved/config.json").read_text())
    assert config["speculators_model_type"] == "eagle3" and config["transformer_layer_config"]["hidden_size"] == 64
    again = load_drafter(tmp_path / "saved", target)
    ids, options = torch.tensor([[3, 4, 5]]), dict(max_new_tokens=12, eos_token_id=[])
    one, other = (generate(target, ids, replace(each, length=3), **options) for each in (method, again))
    assert torch.equal(one.sequences, other.sequences) and one.stats.model_calls == other.stats.model_calls


def test_gradients_reach_every_weight(target, tmp_path):
    """A head may be trained: its forward is differentiable, also after it has drafted."""
    config, tensors = eagle3_checkpoint(tmp_path, target, layers=2, norm_before_residual=True, fc_norm=True)
    method, plain = load_drafter(tmp_path, target), PlainEagle3(config, tensors, target)
    text = [3, 4, 5, 6, 7, 8]
    generate(target, torch.tensor([text]), method, max_new_tokens=4, eos_token_id=[])
    head = method.head.requires_grad_(True)

    def attend(layer, q, k, v, *, window):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(
            0, 1
        )

    embedded, hidden = target.get_input_embeddings().weight[text[1:]], plain.hidden(text)
    rows, given = head(embedded, head.take(hidden), torch.arange(len(text) - 1), attend)
    want, states = plain.rows(torch.tensor(text[1:]), plain.taken(hidden))
    torch.testing.assert_close(head.logits(rows), want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(given, states, rtol=1e-4, atol=1e-4)
    head.logits(rows).logsumexp(-1).sum().backward()
    assert all(bool(weight.grad.abs().sum() > 0) for weight in head.parameters())
