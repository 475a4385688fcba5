"""Gemma 4's assistant: a few layers without keys of their own, which attend to the model's keys and values of the text.

    x_1 = pre_projection(cat(embedding of the last token, h))    h: the model's state in front of it, after its final norm
    y_i = the assistant's layers on x_i: queries at the last token's position, for every draft; keys and values are those of
          the model's last layer of the same type, of all tokens but the last one
    logits of draft i = head(y_i)
    x_{i+1} = pre_projection(cat(embedding of draft i, post_projection(y_i)))

It has no cache: the session's keys serve it, so rejected drafts leave no trace. The assistant is transformers' own module, and
its shadow computes a row of each request by our ops: it has the bits that it has alone. Each draft is drawn from its logits at
the text's temperature, and the rules that divide by q divide by these.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from pass_ext.decoding.arguments import type_of
from pass_ext.decoding.drafting.candidates import Batch, Candidates, Proposal
from pass_ext.decoding.drafting.drafter import N_GRAM, DraftContext, Drafter
from pass_ext.decoding.drafting.from_ngrams import ngram_drafters
from pass_ext.decoding.drafting.heads.checkpoint import HeadCheckpoint
from pass_ext.decoding.drafting.heads.head import TargetFacts
from pass_ext.decoding.drafting.heads.layers import rotated
from pass_ext.decoding.methods import Assistant
from pass_ext.decoding.models.cached_rows import padded
from pass_ext.decoding.models.module_ops import computes_by_ops
from pass_ext.decoding.models.parts import unwrapped
from pass_ext.decoding.models.shadow import OurCall, current_call, our_call, shadow_of, takes_rows_of_our_call
from pass_ext.decoding.session.session import Session
from pass_ext.ops.attention import attention_tree, padded_widths
from pass_ext.ops.common.uploaded import uploaded
from pass_ext.ops.quantize import CODE_HEADER
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
        self.module, self._layers = module, _layers_read(target, set(text.layer_types))
        self._shadow: Any = shadow_of(module)
        computes_by_ops(self._shadow, takes_rows_of_our_call)

        for part in self._shadow.modules():
            if hasattr(part, "is_kv_shared_layer") and hasattr(part, "q_proj"):
                part.forward = partial(_attention, part)

    def __call__(
        self, embedded: Tensor, states: Tensor, session: Session, requests: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Embeddings and states ``[n, d]`` of a row of each of these requests -> logits ``[n, V]``, and the states that they
        give. session: the model's."""
        shadow, keys = self._shadow, _TextKeys(session, self._layers, requests)
        with our_call(OurCall(keys, self.kind)):
            out = shadow.model(
                inputs_embeds=shadow.pre_projection(torch.cat((embedded, states), 1))[:, None],
                attention_mask=dict.fromkeys(self._layers),
                position_ids=keys.positions[:, None],
                shared_kv_states={},
                use_cache=False,
            )
            rows = out.last_hidden_state[:, 0]
            logits = shadow.lm_head(rows) if shadow.masked_embedding is None else self._of_centroids(rows)
            return logits, shadow.post_projection(rows)

    def _of_centroids(self, rows: Tensor) -> Tensor:
        """Logits by the tokens of the best centroids; what all others get depends on the rows of a call."""
        shadow = self._shadow
        return torch.cat([shadow.masked_embedding(row[None, None], shadow.lm_head.weight)[0] for row in rows])


class _TextKeys:
    """The model's keys and values of some requests' texts, which a row of each attends to.

    Args:
        layers: the model's, by the type of those that attend.
    """

    def __init__(self, session: Session, layers: dict[str, int], requests: Sequence[int]) -> None:
        self._session, self._layers = session, layers
        device, going = session.device, set(requests)
        bounds = [0, *accumulate(int(b in going) for b in range(session.requests))]
        self._bounds = uploaded(bounds, device).int()
        self._nothing = torch.zeros(len(requests), 1, dtype=torch.int64, device=device)
        self.positions = session.prefix_lens[uploaded(requests, device)].long()

    def __call__(self, kind: str, q: Tensor, scale: float, window: int | None) -> Tensor:
        """Attention of queries ``[n, heads, D]`` -> ``[n, heads, D]``. window: keys before the last one."""
        session, layer = self._session, self._layers[kind]
        keys, values = session.caches[layer]
        header = 0 if session.cache_dtype is None else CODE_HEADER
        width = padded_widths(*session.head_dims[layer], q.device, in_codes=header > 0)[0]
        out, _ = attention_tree(
            padded(q, width), keys[..., : header + width], values, session.prefix_lens, self._bounds, self._nothing, 1,
            depths=None if window is None else self._nothing[:, 0], scale=scale, window=-1 if window is None else window + 2,
            batch_invariant=session.batch_invariant,
        )  # fmt: skip
        return out[..., : session.head_dims[layer][1]]


def _attention(
    part: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any
) -> tuple[Tensor, None]:
    """The forward of a layer's attention ``[n, 1, d]``, whose keys are the texts'."""
    call = current_call.get()
    assert call is not None
    cos, sin = position_embeddings
    q = part.q_norm(part.q_proj(hidden_states[:, 0]).unflatten(1, (-1, part.head_dim)))
    out = call.attend(part.layer_type, rotated(q, cos[:, 0], sin[:, 0]), part.scaling, part.sliding_window)
    return part.o_proj(out.flatten(1))[:, None], None


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
        states = list(self._states)
        tokens: list[list[int]] = [[] for _ in batch.texts]
        rows: list[list[int]] = [[] for _ in batch.texts]
        drawn_from: list[Tensor] = []
        for level in range(min(most, self.max_depth)):
            going = [b for b, levels in enumerate(batch.levels) if levels > level]
            ends = uploaded([(tokens[b] or batch.texts[b])[-1] for b in going], self._context.device)
            fed = torch.stack([state for b in going if (state := states[b]) is not None])
            logits, given = self._head(self._context.target.embed_tokens(ends), fed, self._session, going)
            drawn, _ = self._context.draw(logits, 1, going, level + 1, (level,))
            for b, token, state, row in zip(going, drawn[:, 0].tolist(), given, logits, strict=True):
                rows[b].append(len(drawn_from))
                tokens[b].append(token)
                drawn_from.append(row)
                states[b] = state
        candidates = [
            Candidates(Tree.chain(len(chain)), chain, [*rows[b], -1] if self._context.needs_draft_logits else None)
            if chain
            else None
            for b, chain in enumerate(tokens)
        ]
        return Proposal(candidates, torch.stack(drawn_from) if drawn_from else None)


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
    drafter.pace = context.pace(drafts=method.head) if method.length == "auto" else None
    return [drafter, *ngram_drafters(method.ngram, context)]
