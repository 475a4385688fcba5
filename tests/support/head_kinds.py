"""A small target and a head of each kind, often right, and what it drafts by its formulas in plain PyTorch."""

from dataclasses import replace
from typing import Any, NamedTuple

from support import dflash_files
from support.assistants import PlainAssistant, write_assistant
from support.generation import unpadded
from support.heads import MASKED, PlainEagle3, eagle3_checkpoint, learn
from support.mtp import model_with_mtp
from support.small_models import ragged_prompts, small_model

from pass_ext import generate, load_drafter

_FEW = 11  # tokens of a vocabulary, of which a head without training is right often enough
_MTP = {
    "MTP": "deepseek_v3",
    "MTP of a hybrid": "qwen3_next",
    "MTP of streams": "deepseek_v4",
}
_DFLASH = {"DFlash": "dflash", "DSpark": "dspark", "DFlash-2": "dflash2"}
KINDS = ("EAGLE-3", "P-EAGLE", *_MTP, *_DFLASH, "assistant")


class HeadKind(NamedTuple):
    """A target and the method that drafts for it."""

    target: Any
    method: Any
    chain: Any
    """``chain(text, length)``: greedy drafts by the formulas."""
    vocabulary: int

    def prompts(self, count, longest=12, seed=5):
        """Ragged ones and their mask."""
        return ragged_prompts(count, longest=longest, seed=seed, vocabulary=self.vocabulary)


def head_of_kind(kind, folder, length=3):
    """Writes the head's checkpoint and loads it."""
    if kind in _MTP:
        target, plain = model_with_mtp(folder, _MTP[kind], texts=_texts)
        return HeadKind(target, replace(load_drafter(folder, target), length=length), plain.chain, 97)
    if kind in _DFLASH:
        return _dflash(_DFLASH[kind], folder, length)
    if kind == "assistant":
        target = small_model("gemma4_text", vocab_size=_FEW)
        plain = PlainAssistant(target, write_assistant(folder, target))
        return HeadKind(target, replace(load_drafter(folder, target), length=length), plain.chain, _FEW)
    target = small_model("llama", num_hidden_layers=4)
    settings = MASKED if kind == "P-EAGLE" else {}
    config, tensors = eagle3_checkpoint(
        folder, target, drafted=90, sharpness=1.0, norm_before_residual=True, **settings
    )
    plain, method = PlainEagle3(config, tensors, target), load_drafter(folder, target)
    learn(plain, _texts(target))
    method.head.load_state_dict(plain.tensors)
    return HeadKind(target, replace(method, length=length), plain.chain, 97)


def _texts(target):
    """Those that a head learns."""
    ids, mask = ragged_prompts(3, longest=12, seed=5)
    return unpadded(generate(target, ids, attention_mask=mask, max_new_tokens=20, eos_token_id=[]).sequences, mask)


def _dflash(kind, folder, length):
    target = small_model("llama", vocab_size=_FEW, num_hidden_layers=3)
    found = dflash_files.tensors(kind, 64, _FEW, seed=1)
    dflash_files.written(folder, dflash_files.settings(kind, vocabulary=_FEW), found)
    first = 0 if kind == "dspark" else 1
    options = dict(first=first, causal=(False, True), block=length + first)
    table, head = target.get_input_embeddings().weight, target.lm_head.weight

    def chain(text, levels):
        states = dflash_files.states_of(target, text[:-1])
        return dflash_files.drafted(found, kind, states, text[-1], table, head, levels, **options)

    return HeadKind(target, replace(load_drafter(folder, target), length=length), chain, _FEW)
