"""Small random heads of the DFlash family, as their files have them, and what they draft by a plain loop from the formulas."""

import json
import math

import torch
from torch.nn.functional import pad, silu, softmax

BLOCK, MASK = 5, 6


def written(folder, config, tensors):
    """Writes a checkpoint -> its folder."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def settings(kind, own=True, width=64, vocabulary=11, drafted=None, block=BLOCK, **changes):
    """The config of two layers: of a kind, in its own form or in that of speculators. The second layer has a window."""
    layers = dict(
        hidden_size=width, intermediate_size=96, vocab_size=vocabulary,
        model_type="qwen3", hidden_act="silu", num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        layer_types=["full_attention", "sliding_attention"], sliding_window=9,
    )  # fmt: skip
    more = {
        "dflash": {},
        "dspark": dict(markov_rank=3, markov_head_type="vanilla", confidence_head_with_markov=True),
        "dflash2": dict(conv_kernel_size=2, conv_group_size=16, selector_rank=3, selector_top_k=4),
    }[kind]
    if not own:
        taps = dict(aux_hidden_state_layer_ids=[1, 2])
        mine = dict(speculators_model_type=kind, block_size=block, mask_token_id=MASK, **taps, **more)
        mine["draft_vocab_size"] = vocabulary if drafted is None else len(drafted)
        return {**mine, "transformer_layer_config": layers, **changes}
    mine = dict(mask_token_id=MASK, target_layer_ids=[0, 1], **more)
    name = {"dflash": "DFlashDraftModel", "dspark": "Qwen3DSparkModel", "dflash2": "DFlash2DraftModel"}[kind]
    return {**layers, "architectures": [name], "block_size": block, "dflash_config": mine, **changes}


def tensors(kind, width, vocabulary, drafted=None, seed=0, taps=2, head_dim=16, sharpness=2.0):
    """Its tensors by name. drafted: the target's numbers of the tokens that it drafts; None: all."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape, size=None):
        scale = sharpness / math.sqrt(shape[-1]) if size is None else size
        return torch.randn(*shape, generator=generator) * scale

    def norm(size):
        return 1 + 0.3 * random(size, size=1.0)

    found = {"fc.weight": random(width, taps * width), "hidden_norm.weight": norm(width), "norm.weight": norm(width)}
    for i in range(2):
        at = f"layers.{i}."
        for part, rows in (("q", 4), ("k", 2), ("v", 2)):
            found[f"{at}self_attn.{part}_proj.weight"] = random(rows * head_dim, width)
        found[f"{at}self_attn.o_proj.weight"] = random(width, 4 * head_dim)
        for name in ("q_norm", "k_norm"):
            found[f"{at}self_attn.{name}.weight"] = norm(head_dim)
        for part, shape in (("gate", (96, width)), ("up", (96, width)), ("down", (width, 96))):
            found[f"{at}mlp.{part}_proj.weight"] = random(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{at}{name}.weight"] = norm(width)
        for name in ("attention_conv", "mlp_conv") if kind == "dflash2" else ():
            found[f"{at}{name}.base_kernel"] = random(2, 2, width, size=0.7)
            found[f"{at}{name}.kernel_projection.weight"] = random(2 * 2 * width // 16, width, size=0.1)
    size = vocabulary if drafted is None else len(drafted)
    if drafted is not None:
        found["lm_head.weight"] = random(size, width)
        found["d2t"] = torch.tensor(drafted) - torch.arange(size)
        found["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill(0, torch.tensor(drafted), True)
    if kind == "dspark":
        found["markov_head.markov_w1.weight"] = random(vocabulary, 3, size=1.5)
        found["markov_head.markov_w2.weight"] = random(size, 3, size=1.5)
        found["confidence_head.proj.weight"] = random(1, width + 3, size=0.3)
        found["confidence_head.proj.bias"] = torch.tensor([0.5])
    if kind == "dflash2":
        found["candidate_selector.hidden_projection.weight"] = random(3, width)
        found["candidate_selector.predecessor_codebook"] = random(vocabulary, 3, size=1.5)
        found["candidate_selector.successor_codebook"] = random(vocabulary, 3, size=1.5)
    return found


# ---- the formulas ----


def _norm(x, weight, eps=1e-5):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def _turned(x, positions):
    """``[heads, n, D]``"""
    half = x.shape[-1] // 2
    angles = positions[:, None] * 10000.0 ** (-torch.arange(half) / half)
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _convolved(x, base, deltas):
    """``[rows, d]``; base ``[2, d]``, deltas ``[rows, 2, groups]``"""
    deltas = deltas.repeat_interleave(16, -1)
    return (base[0] + deltas[:, 0]) * x + (base[1] + deltas[:, 1]) * pad(x, (0, 0, 1, 0))[:-1]


def block_rows(found, kind, states, root, table, *, block=BLOCK, first=1, causal=(False, True), window=9, mask=MASK):
    """The block's rows after the final norm that draft ``[drafts, d]``. states: ``[n, taps * d]`` of the text but its last
    token ``root``."""
    features, at = _norm(states @ found["fc.weight"].T, found["hidden_norm.weight"]), len(states)
    x = torch.stack([table[root], *[table[mask]] * (block - 1)])
    positions = torch.arange(at + block)
    for i in range(2):
        own = {name.removeprefix(f"layers.{i}."): x for name, x in found.items() if name.startswith(f"layers.{i}.")}
        y = _norm(x, own["input_layernorm.weight"])
        if kind == "dflash2":
            deltas = (y @ own["attention_conv.kernel_projection.weight"].T).view(block, 2, 2, -1)
            y = _convolved(y, own["attention_conv.base_kernel"][0], deltas[:, 0])
        both = torch.cat((features, y))

        def heads(rows, name, own=own):
            out = rows @ own[f"self_attn.{name}_proj.weight"].T + own.get(f"self_attn.{name}_proj.bias", 0.0)
            return out.view(len(rows), -1, 16).transpose(0, 1)

        q = _turned(_norm(heads(y, "q"), own["self_attn.q_norm.weight"]), positions[at:])
        k = _turned(_norm(heads(both, "k"), own["self_attn.k_norm.weight"]), positions).repeat_interleave(2, 0)
        v = heads(both, "v").repeat_interleave(2, 0)
        distance = positions[at:, None] - positions
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if i == 1 and window is not None:
            hidden |= distance >= window
        if causal[i]:
            hidden |= distance < 0
        seen = (q @ k.transpose(1, 2) / 4).masked_fill(hidden, -math.inf)
        sinks = own.get("self_attn.attention_sink_bias", torch.full((4,), -math.inf))
        weights = softmax(torch.cat((seen, sinks[:, None, None].expand(-1, block, 1)), -1), -1)[..., :-1]
        y = (weights @ v).transpose(0, 1).flatten(1) @ own["self_attn.o_proj.weight"].T
        y = y + own.get("self_attn.o_proj.bias", 0.0)
        if kind == "dflash2":
            y = _convolved(y, own["attention_conv.base_kernel"][1], deltas[:, 1])
        x = x + y
        y = _norm(x, own["post_attention_layernorm.weight"])
        if kind == "dflash2":
            deltas = (y @ own["mlp_conv.kernel_projection.weight"].T).view(block, 2, 2, -1)
            y = _convolved(y, own["mlp_conv.base_kernel"][0], deltas[:, 0])
        y = silu(y @ own["mlp.gate_proj.weight"].T) * (y @ own["mlp.up_proj.weight"].T) @ own["mlp.down_proj.weight"].T
        if kind == "dflash2":
            y = _convolved(y, own["mlp_conv.base_kernel"][1], deltas[:, 1])
        x = x + y
    return _norm(x, found["norm.weight"])[first:]


def place_scores(found, kind, row, before, logits, vocabulary):
    """The scores ``[V]`` of one place, whose row ``[d]`` has these logits ``[Vd]``, below a token."""
    if kind == "dspark":
        logits = logits + found["markov_head.markov_w2.weight"] @ found["markov_head.markov_w1.weight"][before]
    if kind == "dflash2":
        best = logits.topk(4).indices
        left = found["candidate_selector.predecessor_codebook"][before]
        left = left * (found["candidate_selector.hidden_projection.weight"] @ row)
        more = found["candidate_selector.successor_codebook"][best] @ left
        logits = torch.full_like(logits, -math.inf).scatter(0, best, logits[best] + more)
    if "d2t" not in found:
        return logits
    targets = torch.arange(len(logits)) + found["d2t"]
    return torch.full((vocabulary,), -math.inf).scatter(0, targets, logits)


def drafted(found, kind, states, root, table, head, levels, *, factor=1.0, cap=math.inf, **options):
    """The greedy chain of at most so many levels. factor, cap: of the logits."""
    chain, reach, before = [], 1.0, root
    for row in block_rows(found, kind, states, root, table, **options)[:levels]:
        if kind == "dspark":
            known = torch.cat((row, found["markov_head.markov_w1.weight"][before]))
            weight, bias = found["confidence_head.proj.weight"], found["confidence_head.proj.bias"]
            reach *= float(torch.sigmoid(weight @ known + bias))
            if chain and reach < 0.1:
                break
        logits = factor * (found.get("lm_head.weight", head) @ row)
        logits = logits if cap == math.inf else cap * torch.tanh(logits / cap)
        before = int(place_scores(found, kind, row, before, logits, len(table)).argmax())
        chain.append(before)
    return chain


def states_of(model, text, taps=(1, 2)):
    """``[len(text), taps * d]`` by transformers; taps count hidden states."""
    with torch.no_grad():
        hidden = model(torch.tensor([text]), output_hidden_states=True).hidden_states
    return torch.cat([hidden[tap][0] for tap in taps], -1)


def counted(model, text, prompt, draft, taps=(1, 2)):
    """The model's calls for a text that it has written greedily, and all drafts: those of ``draft(states, root, levels)`` are
    accepted as far as they agree with it."""
    length, calls, drafts = prompt + 1, 1, []
    while length < len(text):
        chain = draft(states_of(model, text[: length - 1], taps), text[length - 1], len(text) - length - 1)
        drafts.append(chain)
        right = 0
        while right < len(chain) and chain[right] == text[length + right]:
            right += 1
        length, calls = length + right + 1, calls + 1
    return calls, drafts
