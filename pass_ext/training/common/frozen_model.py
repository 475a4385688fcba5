"""The frozen model beside which modules are trained: loading, its digest, its rows, the form that it must have, and texts that
it writes: token ~ softmax(logits / T), or the arg-max at T = 0.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pass_ext.checkpoint import load_checkpoint
from pass_ext.decoding.generation import generate
from pass_ext.decoding.models.layer_kinds import keeps_states
from pass_ext.decoding.models.module_ops import is_plain
from pass_ext.decoding.models.parts import cache_name, decoder_layers, decoder_of
from pass_ext.training.common.documents import Document
from pass_ext.training.common.ranks import Ranks

_DIGESTED = 64  # elements of a parameter, evenly spread


def load_frozen(path: str, dtype: torch.dtype, model_args: Mapping[str, Any]) -> tuple[Any, Any]:
    """A causal model without gradients, and its tokenizer; an error ends the program with a sentence."""
    try:
        model, tokenizer = load_checkpoint(path, dtype, weights="dense", **model_args)
    except Exception as error:
        if model_args and not isinstance(
            error, FileNotFoundError
        ):  # libraries of quantised weights raise what they like
            reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            raise SystemExit(f"--model {path!r} cannot be loaded with --model-args {model_args}: {reason}") from error
        if isinstance(error, ImportError):
            raise SystemExit(
                f"training needs transformers and gguf: pip install 'pass_ext[hf,train]' ({error})"
            ) from error
        if not isinstance(error, (OSError, ValueError)):
            raise
        raise SystemExit(f"--model {path!r} cannot be loaded: {error}") from error
    for name, part in (
        ("input embeddings", model.get_input_embeddings()),
        ("output layer", model.get_output_embeddings()),
    ):
        if not is_plain(part.weight) or not part.weight.is_floating_point():
            raise SystemExit(
                f"--model-args: the {name} must stay in memory as plain numbers, because slots are made of the ones and the "
                f"loss of the other; got {_form(part.weight)}. Leave them out of the quantisation, or name a device for them"
            )
    return model, tokenizer


def is_one_piece(model: Any) -> bool:
    """True if all parameters are plain tensors on one device: none is quantised, offloaded or a shard."""
    weights = list(model.parameters())
    return len({weight.device for weight in weights}) == 1 and all(
        is_plain(weight) and weight.is_floating_point() for weight in weights
    )


def shard_layers(model: Any, ranks: Ranks) -> None:
    """Divides each decoder layer's parameters among the ranks, who gather a layer when they call it (FSDP2)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if ranks.count == 1:
        raise SystemExit("--fsdp divides the model among the ranks of torchrun, and there is one: leave it out")
    if keeps_states(model.config.get_text_config(decoder=True)) or not is_one_piece(model):
        raise SystemExit("--fsdp takes models whose layers attend, in full precision and in one piece: leave it out")
    mesh = init_device_mesh(model.get_input_embeddings().weight.device.type, (ranks.count,))
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)


def bytes_of(weight: Tensor) -> int:
    """The memory that a parameter takes: of a quantised one that of its parts, of an offloaded one none."""
    if weight.is_meta:
        return 0
    if hasattr(weight, "to_local"):  # a DTensor
        return bytes_of(weight.to_local())
    if type(weight) not in (Tensor, nn.Parameter) and hasattr(weight, "__tensor_flatten__"):
        return sum(bytes_of(getattr(weight, name)) for name in weight.__tensor_flatten__()[0])
    state = getattr(weight, "quant_state", None)  # bitsandbytes' scales of blocks
    return weight.numel() * weight.element_size() + (0 if state is None else bytes_of(state.absmax))


def _form(weight: Tensor) -> str:
    return "an offloaded tensor" if weight.is_meta else f"{type(weight).__name__} of {str(weight.dtype)[6:]}"


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


def opening_ids(tokenizer: Any) -> list[int]:
    """The token that the tokenizer puts before every text (Gemma, Llama); empty where it puts none (SmolLM2, Qwen)."""
    begin = getattr(tokenizer, "bos_token_id", None)
    return [begin] if begin is not None and list(tokenizer("").input_ids)[:1] == [begin] else []


def opened_ids(tokenizer: Any, text: str, most: int) -> list[int]:
    """At most ``most`` tokens of a text or of a piece of one, after ``opening_ids``: some models write nonsense without."""
    opening = opening_ids(tokenizer)
    ids = list(tokenizer(text, add_special_tokens=False).input_ids)
    return ids[:most] if ids[: len(opening)] == opening else [*opening, *ids][:most]


def weights_digest(model: Any) -> str:
    """SHA-256 over the parameters' names and shapes and a few elements of each: cheap, and another model's differs. Offloaded
    ones have no elements here."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        flat = _whole(parameter.detach()).reshape(-1)
        some = [] if flat.is_meta else flat[:: max(1, len(flat) // _DIGESTED)][:_DIGESTED].float().tolist()
        digest.update(f"{name} {tuple(parameter.shape)} {some}\0".encode())
    return digest.hexdigest()


def _whole(weight: Tensor) -> Tensor:
    """A plain tensor of a shard's or a quantised weight's numbers."""
    if hasattr(weight, "full_tensor"):
        weight = weight.full_tensor()
    is_packed = type(weight) not in (Tensor, nn.Parameter) and hasattr(weight, "__tensor_flatten__")
    whole: Tensor = weight.dequantize() if is_packed else weight
    return whole


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
    """Last hidden states ``[B, T, d]`` of texts, without gradients, and the cache with their K/V, all of them: slots early in a
    text see what has left a sliding window at its end."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    decoder = decoder_of(model)
    cache = DynamicCache(config=model.config)
    cache.layers = [DynamicLayer() if getattr(layer, "is_sliding", False) else layer for layer in cache.layers]
    with torch.no_grad():
        result = decoder(input_ids=ids, use_cache=True, **{cache_name(decoder.forward): cache})
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
