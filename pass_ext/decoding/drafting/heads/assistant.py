"""Gemma 4's assistant: a few layers without keys of their own, which attend to the model's keys and values of the text.

    x_1 = pre_projection(cat(embedding of the last token, h))    h: the model's state in front of it, after its final norm
    y_i = the assistant's layers on x_i: queries at the last token's position, for every draft; keys and values are those of
          the model's last layer of the same type, of all tokens but the last one
    logits of draft i = head(y_i)
    x_{i+1} = pre_projection(cat(embedding of draft i, post_projection(y_i)))

It has no cache: the session's keys serve it, so rejected drafts leave no trace. The assistant is transformers' own module; each
draft is drawn from its logits at the text's temperature, and the rules that divide by q divide by these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pass_ext.decoding.arguments import type_of
from pass_ext.decoding.drafting.candidates import Batch, Candidates, Proposal
from pass_ext.decoding.drafting.drafter import N_GRAM, DraftContext, Drafter
from pass_ext.decoding.drafting.from_ngrams import ngram_drafters
from pass_ext.decoding.drafting.heads.checkpoint import HeadCheckpoint
from pass_ext.decoding.drafting.heads.head import TargetFacts
from pass_ext.decoding.methods import Assistant
from pass_ext.decoding.models.parts import unwrapped
from pass_ext.decoding.session.session import Session
from pass_ext.ops.quantize import MOST_OF_CODES, dequantize_rows
from pass_ext.tree import Tree

_AUTO_LENGTH = 4


class AssistantHead:
    """The assistant of a model. Attributes: ``module``, transformers'; ``kind``, for messages."""

    kind = "assistant"

    def __init__(self, module: Any, target: TargetFacts) -> None:
        text = module.config.get_text_config(decoder=True)
        if module.config.backbone_hidden_size != target.width:
            raise ValueError(
                f"it was trained for a model whose hidden size is {module.config.backbone_hidden_size}, and that of this "
                f"{target.name} is {target.width}: load the assistant of this model"
            )
        if text.vocab_size != target.vocabulary:
            raise ValueError(f"it has {text.vocab_size} tokens, and this {target.name} has {target.vocabulary}")
        self.module, self.layers = module, _layers_read(target, set(text.layer_types))

    def __call__(
        self, embedded: Tensor, state: Tensor, keys: dict[str, tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Embedding and state ``[d]`` of a row -> its logits ``[V]``, and the state that it gives.

        keys: by the layers' type, keys and values ``[n, heads, D]`` of a text's n tokens in the model's cache.
        """
        length = next(iter(keys.values()))[0].shape[0]
        shared = {kind: tuple(x.transpose(0, 1)[None] for x in pair) for kind, pair in keys.items()}
        out = self.module(
            inputs_embeds=torch.cat((embedded, state))[None, None],
            position_ids=torch.tensor([[length]], device=embedded.device),
            shared_kv_states=shared,
        )
        return out.logits[0, 0], out.last_hidden_state[0, 0]


def _layers_read(target: TargetFacts, kinds: set[str]) -> dict[str, int]:
    """The model's last layer with keys of its own of each type."""
    config = unwrapped(target.model).config.get_text_config(decoder=True)
    types = list(getattr(config, "layer_types", None) or ())
    own = len(types) - (getattr(config, "num_kv_shared_layers", None) or 0)
    found = {kind: layer for layer, kind in enumerate(types[:own]) if kind in kinds}
    if set(found) != kinds:
        raise ValueError(
            f"its layers attend to the keys of a model's layers of the types {', '.join(sorted(kinds))}, and this "
            f"{target.name} has {', '.join(sorted(set(types[:own]))) or 'none that it names'}"
        )
    return found


class AssistantDrafter(Drafter):
    """Drafts chains of so many tokens."""

    name, taps = AssistantHead.kind, ("last",)

    def __init__(self, head: AssistantHead, context: DraftContext, length: int) -> None:
        self.max_depth = length
        self._head, self._context = head, context
        self._states: list[Tensor | None] = [None] * len(context.texts)

    def begin(self, session: Session) -> None:
        """Takes the session, whose keys and values it reads."""
        self._session = session

    def propose(self, batch: Batch) -> Proposal:
        for b, new in enumerate(batch.hidden):
            if len(new):
                self._states[b] = new[-1, 0]
        most = max(batch.levels)
        requests = [b for b, levels in enumerate(batch.levels) if levels]
        keys = {b: self._keys(b, len(batch.texts[b]) - 1) for b in requests}
        states = {b: self._states[b] for b in requests}
        tokens: list[list[int]] = [[] for _ in batch.texts]
        rows: list[list[int]] = [[] for _ in batch.texts]
        drawn_from: list[Tensor] = []
        for level in range(min(most, self.max_depth)):
            going = [b for b in requests if batch.levels[b] > level]
            ends = torch.tensor([(tokens[b] or batch.texts[b])[-1] for b in going], device=self._context.device)
            embedded = self._context.target.embed_tokens(ends)
            logits = []
            for row, b in zip(embedded, going, strict=True):
                state = states[b]
                assert state is not None
                found, states[b] = self._head(row, state, keys[b])
                logits.append(found)
            stacked = torch.stack(logits)
            drawn, _ = self._context.draw(stacked, 1, going, level + 1, (level,))
            for b, token in zip(going, drawn[:, 0].tolist(), strict=True):
                rows[b].append(len(drawn_from))
                tokens[b].append(token)
                drawn_from.append(stacked[going.index(b)])
        candidates = [
            Candidates(Tree.chain(len(chain)), chain, [*rows[b], -1] if self._context.needs_draft_logits else None)
            if chain
            else None
            for b, chain in enumerate(tokens)
        ]
        return Proposal(candidates, torch.stack(drawn_from) if drawn_from else None)

    def _keys(self, request: int, length: int) -> dict[str, tuple[Tensor, Tensor]]:
        """Keys and values of a text's first tokens, by the layers' type."""
        return {
            kind: tuple(  # type: ignore[misc]
                _numbers(cache[request, :length], width, self._context.target.table.dtype)
                for cache, width in zip(self._session.caches[layer], self._session.head_dims[layer], strict=True)
            )
            for kind, layer in self._head.layers.items()
        }


def _numbers(rows: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """The numbers of rows of a cache, without padding."""
    if rows.dtype in MOST_OF_CODES:
        rows = dequantize_rows(rows).to(dtype)
    return rows[..., :width]


def read_assistant(checkpoint: HeadCheckpoint, target: TargetFacts) -> AssistantHead:
    """The assistant of a checkpoint, loaded by transformers."""
    import transformers

    name = next(iter(checkpoint.config.get("architectures") or ()), "Gemma4AssistantForCausalLM")
    kind: Any = getattr(transformers, name, None)
    if kind is None:
        raise checkpoint.refusal(f"transformers {transformers.__version__} has no {name}: install a newer one")
    try:
        module, report = kind.from_pretrained(checkpoint.folder, dtype=target.dtype, output_loading_info=True)
        if report["missing_keys"]:
            raise ValueError(f"it lacks the tensors {', '.join(sorted(report['missing_keys']))}")
        checkpoint.leave(checkpoint.names - set(report["unexpected_keys"]))
        return AssistantHead(module.to(target.device).eval().requires_grad_(False), target)
    except (OSError, RuntimeError, ValueError) as error:
        raise checkpoint.refusal(str(error)) from error


def assistant_drafters(method: Assistant, context: DraftContext) -> Sequence[Drafter]:
    """The drafters of ``Assistant``: the head's, and n-grams."""
    if not isinstance(method.head, AssistantHead):
        raise TypeError(
            f"Assistant: head must be one that load_drafter(path, model) has read for Assistant, got {type_of(method.head)}"
        )
    context.check_origins(*([N_GRAM] if method.ngram else []), AssistantDrafter.name)
    length = method.length if isinstance(method.length, int) else _AUTO_LENGTH
    drafter = AssistantDrafter(method.head, context, length)
    drafter.pace = context.pace() if method.length == "auto" else None
    return [drafter, *ngram_drafters(method.ngram, context)]
