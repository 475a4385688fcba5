"""The frozen model beside which modules are trained: loading, its digest, its rows, the form that it must have, and texts that
it writes: token ~ softmax(logits / T), or the arg-max at T = 0.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pass_ext.checkpoint import load_checkpoint
from pass_ext.decoding.generation import generate
from pass_ext.decoding.models.parts import cache_name
from pass_ext.training.common.documents import Document

_DIGESTED = 64  # elements of a parameter, evenly spread


def load_frozen(path: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """A causal model without gradients, and its tokenizer; an error ends the program with a sentence."""
    try:
        return load_checkpoint(path, dtype)
    except ImportError as error:
        raise SystemExit(f"training needs transformers and gguf: pip install 'pass_ext[hf,train]' ({error})") from error
    except (OSError, ValueError) as error:
        raise SystemExit(f"--model {path!r} cannot be loaded: {error}") from error


def check_tokenizer(model: Any, tokenizer: Any) -> None:
    """Refuses a tokenizer whose ids the model's table does not have."""
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise SystemExit(
            f"the tokenizer has {len(tokenizer):,} tokens, but the model has embeddings of {rows:,}: it is another model's"
        )


def with_template(tokenizer: Any, document: Document) -> Document:
    """The document, the text of a chat made from its messages."""
    if not document.messages:
        return document
    if tokenizer.chat_template is None:
        raise SystemExit(
            "--data has messages, and the model's tokenizer has no chat template: give --data-column a text"
        )
    messages = [{"role": role, "content": content} for role, content in document.messages]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception as error:  # a template raises what it likes
        raise SystemExit(
            f"--data: the model's chat template fails on the messages that begin with {document.name[:80]!r}: {error}"
        ) from error
    return dataclasses.replace(document, text=text)


def weights_digest(model: Any) -> str:
    """SHA-256 over the parameters' names and shapes and a few elements of each: cheap, and another model's differs."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        flat = parameter.detach().reshape(-1)
        some = flat[:: max(1, len(flat) // _DIGESTED)][:_DIGESTED].float().tolist()
        digest.update(f"{name} {tuple(parameter.shape)} {some}\0".encode())
    return digest.hexdigest()


def check_head(model: Any, ids: Tensor) -> None:
    """Refuses a model whose logits are more than its output layer on the last hidden states."""
    with torch.no_grad():
        hidden, _ = text_rows(model, ids)
        ours, theirs = model.get_output_embeddings()(hidden), model(input_ids=ids).logits
    if not torch.allclose(ours.float(), theirs.float(), rtol=1e-2, atol=1e-2):
        raise SystemExit(
            f"{type(model).__name__} changes its logits after its output layer (scaling or soft-capping); training cannot "
            f"reproduce that"
        )


def text_rows(model: Any, ids: Tensor) -> tuple[Tensor, Any]:
    """Last hidden states ``[B, T, d]`` of texts, without gradients, and the cache with their K/V."""
    with torch.no_grad():
        result = model.get_decoder()(input_ids=ids, use_cache=True)
    return result.last_hidden_state, result[cache_name(type(result))]


def sample(
    model: Any,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    temperature: float,
    generator: torch.Generator,
    stop: frozenset[int],
) -> list[list[int]]:
    """The model's continuation of each prompt: at most ``new_tokens``, up to and including the first token of ``stop``."""
    from transformers import GenerationConfig

    longest = max(map(len, prompts))
    device = model.get_input_embeddings().weight.device
    ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
    texts = generate(
        model,
        ids,
        max_new_tokens=new_tokens,
        attention_mask=mask,
        temperature=temperature,
        seeds=generator,
        eos_token_id=sorted(stop),
        generation_config=GenerationConfig(),  # the model's own law, whatever penalties its folder asks for
    )
    rows = zip(texts.sequences.tolist(), texts.lengths, strict=True)
    return [row[longest : longest + length] for row, length in rows]
