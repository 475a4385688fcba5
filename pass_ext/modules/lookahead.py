"""``LookaheadEmbedding``: the parameters that PaSS adds to a frozen model, with save and load.

Slot i's input embedding is ``weight[i]``. Optional beside it: a low-rank transition score between a candidate and the token
before it, ``(E[previous] @ left) · (E[candidate] @ right)``, a vector per layer and slot that is added to the layer's input,
and adapters of the model's linear layers for the rows of slots (slot_adapters.py). The file is safetensors, its metadata say
which model it belongs to.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pass_ext.modules.files import (
    HitRates,
    TrainedFile,
    check_model,
    fingerprint_of,
    pretrained_path,
    save_trained,
    shipped_files,
    table_difference,
    trained_file,
)
from pass_ext.modules.slot_adapters import AdapterSize, SlotAdapters, read_peft_folder
from pass_ext.ops.linear import linear_packed, shape_of
from pass_ext.ops.lookahead import lookahead_embed

_FORMAT = "pass_ext.lookahead.1"
_SIDES = ("down", "up")  # adapter.3.self_attn.q_proj.down
# Tensor in the file -> parameter of the module.
_TENSORS = {
    "lookahead": "weight",
    "transition_left": "transition_left",
    "transition_right": "transition_right",
    "deep": "deep",
}


class LookaheadEmbedding(nn.Module):
    """L trained input embeddings, one per look-ahead slot, beside a model's own table.

    Args:
        num_lookahead: L, the number of slots.
        dim: d, the model's hidden size.
        rank: r, the width of the transition score; 0: none.
        deep_layers: the model's number of layers if each slot has a vector for every layer's input; 0: none.
        base_model: name of the model they are trained for; kept in the file.
        vocabulary: V, rows of that model's table; kept in the file. 0: not known yet.
        adapters: adapters for the rows of slots; None: none.

    Attributes:
        fingerprint: of the model's embedding table, by which other models are refused; kept in the file. "": any model of the
            same sizes is taken.
        weight: ``[L, d]``, the slots' input embeddings.
        transition_left, transition_right: ``[d, r]`` or None.
        deep: ``[layers, L, d]`` or None.
        adapters: ``SlotAdapters`` or None.
        hit_rates: calibration, or None. Row i belongs to slot i; its entry k is the share of held-out places where the
            candidate of rank k was right, among those where the path before it was.
        greedy_hit_rates: the same in texts of the most probable tokens alone, where slots are right more often; or None.
        training_record: what made the parameters (command, data, versions, evaluation), as JSON can hold it; empty if unknown.
    """

    transition_left: nn.Parameter | None
    transition_right: nn.Parameter | None
    deep: nn.Parameter | None
    adapters: SlotAdapters | None

    def __init__(
        self,
        num_lookahead: int,
        dim: int,
        *,
        rank: int = 0,
        deep_layers: int = 0,
        base_model: str = "",
        vocabulary: int = 0,
        adapters: SlotAdapters | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("num_lookahead", num_lookahead, 1), ("dim", dim, 1), ("rank", rank, 0), ("deep_layers", deep_layers, 0)
        ):  # fmt: skip
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"LookaheadEmbedding: {name} must be a whole number, {least} or more, got {value!r}")
        if adapters is not None and not isinstance(adapters, SlotAdapters):
            raise TypeError(f"LookaheadEmbedding: adapters must be SlotAdapters or None, got {type(adapters).__name__}")
        if adapters is not None and adapters.count not in (1, num_lookahead):
            raise ValueError(f"adapters must be 1 or one for each of {num_lookahead} slots, got {adapters.count}")
        self.base_model = base_model
        self.vocabulary = vocabulary
        self.fingerprint = ""
        self.hit_rates: HitRates | None = None
        self.greedy_hit_rates: HitRates | None = None
        self.training_record: dict[str, Any] = {}
        self.weight = nn.Parameter(torch.empty(num_lookahead, dim, device=device, dtype=dtype))
        nn.init.normal_(self.weight, std=0.02)
        extras = {
            "transition_left": (dim, rank) if rank else None,
            "transition_right": (dim, rank) if rank else None,
            "deep": (deep_layers, num_lookahead, dim) if deep_layers else None,
        }
        for name, shape in extras.items():
            parameter = None if shape is None else nn.Parameter(torch.zeros(*shape, device=device, dtype=dtype))
            self.register_parameter(name, parameter)
        if self.transition_left is not None:  # the right side stays zero: no score before training, and yet a gradient
            nn.init.normal_(self.transition_left, std=dim**-0.5)
        self.adapters = adapters

    @property
    def num_lookahead(self) -> int:
        """L, the number of slots."""
        return self.weight.shape[0]

    @property
    def dim(self) -> int:
        """d, the hidden size."""
        return self.weight.shape[1]

    @property
    def rank(self) -> int:
        """r, the width of the transition score; 0: none."""
        return 0 if self.transition_left is None else self.transition_left.shape[1]

    @property
    def deep_layers(self) -> int:
        """The number of layers whose input the slots shift; 0: none."""
        return 0 if self.deep is None else self.deep.shape[0]

    @classmethod
    def from_table(
        cls,
        num_lookahead: int,
        table: Tensor,
        *,
        rank: int = 0,
        deep_layers: int = 0,
        base_model: str = "",
        ids: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> LookaheadEmbedding:
        """Starts each slot at the mean of a model's own embeddings (of the tokens ``ids``, or of all), plus a little noise.

        The noise, 1 % of the table's per-coordinate deviation, lets the slots part; it comes from torch's default generator.
        The transition's left side starts at random, so scaled that ``E[previous] @ left`` is about 1 in size.
        """
        _check_table(table)
        rows = (table if ids is None else table[ids]).detach().to(torch.float32)
        embedding = cls(
            num_lookahead,
            table.shape[1],
            rank=rank,
            deep_layers=deep_layers,
            base_model=base_model,
            vocabulary=table.shape[0],
            device=table.device,
            dtype=dtype or table.dtype,
        )
        embedding.fingerprint = fingerprint_of(table)
        noise = torch.randn(num_lookahead, table.shape[1]).to(table.device)
        deviation = rows.std(dim=0, correction=0)
        with torch.no_grad():
            embedding.weight.copy_(rows.mean(dim=0) + 0.01 * deviation * noise)
            if embedding.transition_left is not None:
                embedding.transition_left.div_(rows.square().mean().sqrt())
        return embedding

    @classmethod
    def from_pretrained(
        cls, name: str | os.PathLike[str], *, table: Tensor | None = None, base_model: str = ""
    ) -> LookaheadEmbedding:
        """Parameters that come with the package, by name ("smollm2-135m-instruct"), or those of a file, by path."""
        path = pretrained_path(name, cls.shipped())
        return cls.load(path, table=table, base_model=base_model)

    @classmethod
    def from_peft(
        cls, path: str | os.PathLike[str], table: Tensor, *, num_lookahead: int = 4, seed: int = 0
    ) -> LookaheadEmbedding:
        """LoRA adapters of a folder in PEFT's format, as those of UNO, for slots whose inputs are the embeddings of random
        tokens.

        Args:
            path: a folder with adapter_config.json and adapter_model.safetensors.
            table: ``[V, d]``, the model's input embeddings.
            num_lookahead: L, the number of slots.
            seed: of the random tokens.

        UNO's rows are noise: tokens drawn uniformly from the vocabulary, anew for each call, and read with its adapter; the row
        in front of them is a token, read without. Slot i stands where its noise row i stands and predicts the same token. Here
        the noise is drawn once. Hit rates are unknown: ``calibrate`` measures them.
        """
        _check_table(table)
        adapters, base_model = read_peft_folder(path)
        ids = torch.randint(len(table), (num_lookahead,), generator=torch.Generator().manual_seed(seed))
        rows = table.detach()[ids.to(table.device)]
        embedding = cls._with({"weight": rows}, base_model, len(table), adapters.to(table.device, table.dtype))
        embedding.fingerprint = fingerprint_of(table)
        return embedding

    @staticmethod
    def shipped() -> dict[str, Path]:
        """Name -> file of those that come with the package; drafts and decisions lie beside them."""
        return {name: file for name, file in shipped_files("*").items() if not re.search(r"-exit$|-decision-", name)}

    @classmethod
    def _with(
        cls, tensors: dict[str, Tensor], base_model: str, vocabulary: int, adapters: SlotAdapters | None = None
    ) -> LookaheadEmbedding:
        """A module that holds these parameters."""
        weight, left, deep = tensors["weight"], tensors.get("transition_left"), tensors.get("deep")
        embedding = cls(
            *weight.shape,
            rank=0 if left is None else left.shape[1],
            deep_layers=0 if deep is None else deep.shape[0],
            base_model=base_model,
            vocabulary=vocabulary,
            adapters=adapters,
            device=weight.device,
            dtype=weight.dtype,
        )
        with torch.no_grad():
            for name, tensor in tensors.items():
                embedding.get_parameter(name).copy_(tensor)
        return embedding

    def transition_tables(self, table: Tensor) -> tuple[Tensor, Tensor]:
        """``table @ left`` and ``table @ right``, fp32 ``[V, r]`` each: the score of c after p is ``left[p] · right[c]``.

        table: ``[V, d]``, or packed (``pack_weight``), then with rows up to a multiple of 16.
        """
        is_packed = table.dtype is torch.uint8
        if not is_packed:
            _check_table(table)
        if self.transition_left is None or self.transition_right is None:
            raise ValueError("these look-ahead embeddings have no transition score (their rank is 0)")
        if is_packed:
            sides = (side.t().float().contiguous() for side in (self.transition_left, self.transition_right))
            left, right = (linear_packed(side, table, outputs=shape_of(table)[0]).t().contiguous() for side in sides)
            return left, right
        wide = table.to(torch.float32)
        return wide @ self.transition_left.to(wide), wide @ self.transition_right.to(wide)

    def forward(self, ids: Tensor, table: Tensor) -> Tensor:
        """``lookahead_embed(ids, table, self.weight)``: ``[..., d]`` in the table's dtype."""
        return lookahead_embed(ids, table, self.weight)

    def check_fits(
        self, table: Tensor, base_model: str = "", *, embed: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """Raises ValueError, naming every difference, if these embeddings belong to another model.

        embed: gives the rows ``[n, d]`` of ids ``[n]`` where the table's numbers cannot be read.
        """
        _check_table(table)
        check_model(
            "look-ahead embedding",
            {
                "hidden size": (self.dim, table.shape[1]),
                "vocabulary": (self.vocabulary, table.shape[0]),
                "base model": (self.base_model, base_model),
            },
            lambda: table_difference(self.fingerprint, self.base_model, table, embed),
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the parameters and what they belong to as one safetensors file."""
        parameters = dict(self.named_parameters())
        tensors: dict[str, Tensor] = {
            tensor: parameters[name] for tensor, name in _TENSORS.items() if name in parameters
        }
        described: dict[str, object] = {}
        if self.adapters is not None:
            described = {"adapter_count": self.adapters.count, "adapter_scale": self.adapters.scale}
            for place, *sides in self.adapters.pairs():
                tensors |= {f"adapter.{place}.{side}": x for side, x in zip(_SIDES, sides, strict=True)}
        save_trained(
            path,
            _FORMAT,
            {
                "base_model": self.base_model,
                "vocabulary": self.vocabulary,
                "hidden_size": self.dim,
                "num_lookahead": self.num_lookahead,
                **described,
            },
            tensors,
            fingerprint=self.fingerprint,
            hit_rates=self.hit_rates,
            greedy_hit_rates=self.greedy_hit_rates,
            training_record=self.training_record,
        )

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, table: Tensor | None = None, base_model: str = ""
    ) -> LookaheadEmbedding:
        """Reads a file that ``save`` wrote; with ``table`` (and ``base_model``), refuses one made for another model.

        The parameters keep the file's dtype; with ``table`` they go to its device.
        """
        with trained_file(path, "look-ahead embedding", _FORMAT) as file:
            slots, dim = file.count("num_lookahead", 1), file.count("hidden_size", 1)
            shapes: dict[str, tuple[int, ...]] = {"lookahead": (slots, dim)}
            sides = ("transition_left", "transition_right")
            if any(side in file for side in sides):
                shapes |= dict.fromkeys(sides, (dim, file.size(sides[0], 1)))
            if "deep" in file:
                shapes["deep"] = (file.size("deep", 0), slots, dim)
            trained_for, vocabulary = file.text("base_model"), file.count("vocabulary")
            adapters = _read_adapters(file, slots)
            file.check_names([*_TENSORS, *file.names("adapter.")])
            tensors = {_TENSORS[name]: tensor for name, tensor in file.weights(shapes).items()}
            rates, greedy_rates = file.hit_rates(slots), file.hit_rates(slots, "greedy_hit_rates")
            record, fingerprint = file.training_record(), file.fingerprint()
        embedding = cls._with(tensors, trained_for, vocabulary, adapters)
        embedding.fingerprint = fingerprint
        embedding.hit_rates, embedding.greedy_hit_rates, embedding.training_record = rates, greedy_rates, record
        if table is not None:
            embedding.check_fits(table, base_model)
            embedding = embedding.to(table.device)
        return embedding

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        model = f", base_model={self.base_model!r}" if self.base_model else ""
        extras = (f", rank={self.rank}" if self.rank else "") + (
            f", deep_layers={self.deep_layers}" if self.deep_layers else ""
        )
        if self.adapters is not None:
            extras += f", adapters: {self.adapters.extra_repr()}"
        return f"num_lookahead={self.num_lookahead}, dim={self.dim}{extras}{model}"


def _read_adapters(file: TrainedFile, slots: int) -> SlotAdapters | None:
    """The adapters of a file; None if it has none."""
    names = file.names("adapter.")
    if not names:
        return None
    count, scale = file.count("adapter_count", 1), file.number("adapter_scale")
    if count not in (1, slots):
        raise file.refuse("metadata 'adapter_count'", f"1 or {slots}, the slots", count)
    places = dict.fromkeys(name.removeprefix("adapter.").rpartition(".")[0] for name in names)
    shapes: dict[str, tuple[int, ...]] = {}
    sizes: dict[str, AdapterSize] = {}
    for place in places:
        down, up = (f"adapter.{place}.{side}" for side in _SIDES)
        rank = file.size(down, 1)
        sizes[place] = AdapterSize(file.size(down, 2), file.size(up, 2), rank)
        shapes |= {down: (count, rank, sizes[place].inputs), up: (count, rank, sizes[place].outputs)}
    if odd := sorted(set(names).difference(shapes)):
        raise file.refuse("every adapter's tensor", "down or up of a place", f"tensor {', '.join(map(repr, odd))}")
    tensors = file.weights(shapes)
    try:
        adapters = SlotAdapters(sizes, count, scale=scale, dtype=next(iter(tensors.values())).dtype)
    except ValueError as error:
        raise file.refuse("the adapters", "of places and ranks that there can be", str(error)) from error
    with torch.no_grad():
        for place, *sides in adapters.pairs():
            for side, parameter in zip(_SIDES, sides, strict=True):
                parameter.copy_(tensors[f"adapter.{place}.{side}"])
    return adapters


def _check_table(table: Tensor) -> None:
    if table.dim() != 2:
        raise ValueError(f"table must be [V, d], a model's input embedding weight, got shape {list(table.shape)}")
