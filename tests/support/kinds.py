"""A table of tiny models, one of each kind that decoding serves, for the laws of tests/decoding/models/test_contract.py. A new
kind is a row, and gets every law."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from support.generation import greedy_of_transformers, methods_for, slots_for
from support.small_models import ragged_prompts, small_model
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from benchmarks.architectures.models import tiny_config, tiny_model
from pass_ext import EarlyExitDraft, MultiCandidate, NGram, PaSS, Plain, Speculative, Tree, generate

NEW = 8
END = 2  # the token that ends texts
GREEDY = dict(eos_token_id=None, pad_token_id=0)


class Kind(NamedTuple):
    """A tiny model, and what the laws have to know of it."""

    name: str
    """Of the architecture."""
    built: Callable[..., Any] = tiny_model
    """(name, seed, **changes) -> the model."""
    alone: bool = False
    """transformers' text of each prompt alone is the right one: padding on the left would move what the model counts."""
    keeps_states: bool = False
    exits: bool = True
    """Its first layer is a model."""
    is_deep: bool = True
    """Slots may shift the inputs of its layers."""
    sessions: tuple[bool, ...] = (False, True)
    """In sessions that are batch-invariant, or not, a row has the bits that it has alone."""
    for_bits: Callable[[Any], Any] = lambda model: model
    """Takes out what is torch's own and gives a row other bits in other company."""
    of_bits: Mapping[str, Any] = {}
    """Changes of the config for that."""
    long: tuple[Mapping[str, Any], ...] = ({},)
    """Changes of the config for prompts of 400 tokens."""
    coded: str = ""
    """Why caches in 8 bits are refused; "": they are not."""
    exchange: str = ""
    """Why transformers' caches are neither written nor read; "": they are written."""
    pieces: Mapping[str, int] = {}
    """Numbers of the package, by their places, that have a long prompt cut in more pieces."""
    is_read: bool = True
    """Nor are they only written: those that transformers wrote are read."""
    untrained: str = ""
    """Why slots are not trained for it; "": they are."""
    graphless: str = ""
    """Why a call cannot be a CUDA graph; "": it can."""
    emulated: Mapping[str, Any] | None = None
    """Changes of the config with which it is quick on the emulator; None: it is not."""

    def model(self, seed: int = 0, **changes: Any) -> Any:
        """A new model."""
        return self.built(self.name, seed=seed, **changes)


def falcon(name: str, seed: int = 0, **changes: Any) -> Any:
    """As the 40b and the 180B are: two norms beside each other, and fewer heads of keys."""
    from transformers import AutoModelForCausalLM

    form = dict(new_decoder_architecture=True, num_ln_in_parallel_attn=2, num_kv_heads=2)
    return drawn(
        AutoModelForCausalLM, type(tiny_config(name)).from_dict(tiny_config(name).to_dict() | form | changes), seed
    )


def sparse(name: str, seed: int = 0, **changes: Any) -> Any:
    """MiniMax-M3 without experts, all of whose layers choose blocks: 2 of 2 tokens for a row."""
    from transformers import AutoModelForCausalLM

    kinds = changes.get("layer_types", ["minimax_m3_sparse"] * 2)
    shape = tiny_config(name).to_dict() | dict(layer_types=kinds, num_hidden_layers=len(kinds)) | changes
    return drawn(
        AutoModelForCausalLM, type(tiny_config(name))(**shape | dict(mlp_layer_types=["dense"] * len(kinds))), seed
    )


def drawn(kind: Any, config: Any, seed: int) -> Any:
    """A model of the config with numbers that keep its distributions from being flat."""
    torch.manual_seed(seed)
    model = kind.from_config(config, attn_implementation="eager").float().eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=1.5 / (parameter.shape[-1] ** 0.5 if "embed" not in name else 1.5))
    return model


def compressing(name: str, seed: int = 0, sparse: int = 2, heavy: int = 3, **changes: Any) -> Any:
    """DeepSeek-V4 with these rates and with sinks that are not 0."""
    rates = {"compressed_sparse_attention": sparse, "heavily_compressed_attention": heavy}
    model = tiny_model(name, seed=seed, compress_rates=rates, **changes)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    return model


def by_latents(name: str, seed: int = 0, **changes: Any) -> Any:
    """DeepSeek-V3 with latents of 32 numbers and rotated keys of 8; heads of 16 + 8 numbers, and values of 24."""
    return small_model(name, seed, **dict(qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24) | changes)


def of_two_layers(name: str, seed: int = 0, **changes: Any) -> Any:
    """Qwen4 with one layer that keeps a state and one that chooses blocks and looks n-grams up."""
    kinds = ["linear_attention", "indexed_attention"]
    short = dict(num_hidden_layers=2, layer_types=kinds, ple_layer_ids=[1], hc_lowrank=32)
    return tiny_model(name, seed=seed, **short | changes)


def without_experts(model: Any) -> Any:
    """Qwen4 without experts."""
    from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextMLP

    for layer in model.model.layers:
        layer.mlp = Qwen4ExpTextMLP(model.config, 64).requires_grad_(False)
    return model


DENSE = dict(mlp_layer_types=["dense"] * 2)
FEW_SCORES = {"pass_ext.decoding.models.features.indexed._MOST_PRODUCTS": 20_000}  # of some rows at once
BIASED_KEYS = r"Session\(cache_dtype=None\) alone decodes this model: the biases of its keys"
_TABLE = (
    Kind("falcon", falcon, exits=False),
    Kind("gpt_neo", exits=False),
    Kind("bloom", exits=False, coded=BIASED_KEYS),
    Kind("mpt", exits=False, coded=BIASED_KEYS, long=(dict(max_seq_len=1024),)),
    Kind("deepseek_v3", by_latents),
    Kind(
        "deepseek_v32",
        of_bits=DENSE,
        long=({"index_topk": 100},),
        pieces=FEW_SCORES,
        graphless="choice of keys",
        emulated=dict(num_hidden_layers=1, layer_types=["indexed_attention"], mlp_layer_types=["dense"]),
    ),
    Kind(
        "qwen4_exp_text",
        of_two_layers,
        keeps_states=True,
        exits=False,
        for_bits=without_experts,
        of_bits=dict(hc_count=32, linear_num_value_heads=32),
        long=tuple(dict(indexer_budget=most, indexer_compress_ratio=4) for most in (100, 500)),
        pieces=FEW_SCORES,
        untrained="its indexers choose blocks of columns",
        emulated={},
    ),
    Kind(
        "minimax_m3_vl_text",
        sparse,
        alone=True,
        long=tuple(dict(index_block_size=4, index_topk_blocks=most) for most in (20, 100)),
        pieces=FEW_SCORES,
        untrained="its indexers choose blocks of columns",
        emulated={},
    ),
    Kind(
        "deepseek_v4",
        compressing,
        alone=True,
        sessions=(True,),
        long=(dict(sparse=4, heavy=16, index_topk=8),),
        pieces=FEW_SCORES,
        coded=r"deepseek_v4: Session\(cache_dtype=None\) alone decodes this model",
        exchange="windows, and entries that its compressors have made",
        untrained="its layers attend to entries",
        graphless="the windows that its compressors close",
        emulated={},
    ),
    Kind(
        "inkling_text",
        alone=True,
        keeps_states=True,
        of_bits=DENSE,
        long=(dict(DENSE, rel_extent=70, sliding_window_size=90),),
        is_read=False,
        untrained="its attention takes distances from the numbers of rows",
        emulated=DENSE,
    ),
    *(
        Kind(name, exits=False, is_read=False, untrained="its layers look tokens up once more")
        for name in ("gemma3n_text", "gemma4")
    ),
    Kind("diffllama", exits=False, exchange="the values of a layer once for both attentions of its heads"),
    Kind("hrm_text", exits=False, is_deep=False),
    Kind("dory", exits=False, exchange="keys and values of further loops after those of all layers"),
    Kind("qwen3_next", keeps_states=True, exits=False),
    Kind(
        "minimax",
        keeps_states=True,
        exits=False,
        is_read=False,
        untrained="its lightning attention",
    ),
)
KINDS = {kind.name: kind for kind in _TABLE if kind.name in CONFIG_MAPPING_NAMES}


@cache
def model_of(name: str) -> Any:
    """The kind's model, made once; a test that changes it takes a new one."""
    return KINDS[name].model()


def ragged(count: int = 5) -> tuple[Tensor, Tensor]:
    """Prompts with an end of a text inside."""
    ids, mask = ragged_prompts(count)
    ids[:, -3] = END
    return ids, mask


def text_of(kind: Kind, model: Any, ids: Tensor, mask: Tensor, new: int = NEW) -> Tensor:
    """transformers' greedy text of each prompt."""
    if not kind.alone:
        return greedy_of_transformers(model, ids, mask, new, **GREEDY)
    alone = [row[own][None] for row, own in zip(ids, mask.bool(), strict=True)]
    return torch.cat(
        (ids, torch.cat([greedy_of_transformers(model, x, None, new, **GREEDY)[:, -new:] for x in alone])), 1
    )


def check_texts(kind: Kind, model: Any, ids: Tensor, mask: Tensor, methods: Mapping[str, Any], new: int = NEW) -> None:
    """The methods write the model's text."""
    want = text_of(kind, model, ids, mask, new)
    for name, method in methods.items():
        got = generate(model, ids, method, max_new_tokens=new, attention_mask=mask, eos_token_id=[]).sequences
        assert torch.equal(got, want), name


@cache
def text(name: str) -> Tensor:
    """Of the kind's model and ``ragged()``."""
    return text_of(KINDS[name], model_of(name), *ragged())


def earliest_of_equals(scores: Tensor, count: int, dim: int = -1) -> Any:
    """``topk``, of equal scores the earlier ones."""
    values, places = scores.sort(dim=dim, descending=True, stable=True)
    return torch.return_types.topk((values.narrow(dim, 0, count), places.narrow(dim, 0, count)))


def some_methods(model: Any) -> dict[str, Any]:
    """One of each way to make rows."""
    slots = slots_for(model)
    return {
        "plain": Plain(),
        "ngram": NGram(shortest=1),
        "one pass": PaSS(slots, tree=Tree([-1, 0, 0, 1, 1, 2]), rows=24),
        "two passes": PaSS(slots, passes=2, tree=Tree.from_branching((2, 2)), rows=24),
        "right trees": MultiCandidate(model, (2, 2, 1)),
    }


def few_methods(model: Any) -> dict[str, Any]:
    """A chain, and a tree with slots, for models that differ from their kind's in numbers alone: the laws try every method."""
    return {name: method for name, method in some_methods(model).items() if name in ("ngram", "one pass")}


def all_methods(kind: Kind, model: Any) -> dict[str, Any]:
    """Every method, with drafts that are right, often wrong, and the model's own first layer's."""
    drafted = {
        "right chain": Speculative(model, 4),
        "right trees": MultiCandidate(model, (2, 2, 1)),
        "another's chain": Speculative(kind.model(seed=1), 3),
    }
    if kind.exits:
        draft = EarlyExitDraft(model, 1)
        drafted |= {"early exit": Speculative(draft, 3), "tree of an early exit": MultiCandidate(draft, (2, 2))}
    return methods_for(model) | drafted
