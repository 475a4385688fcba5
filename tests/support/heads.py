"""Tiny EAGLE-3 heads with random weights as checkpoints of every form, and their formula in plain PyTorch, without caches."""

import copy
import json

import torch

DRAFT_VOCABULARY = 40
TAPS = (1, 2, 3)

VARIANTS = {
    "as published": {},
    "norm before the residual": dict(norm_before_residual=True),
    "norm before fc": dict(norm_before_fc=True),
    "3.1": dict(norm_before_residual=True, fc_norm=True, norm_output=True),
    "two layers, norms of heads": dict(norm_before_fc=True, fc_norm=True, layers=2, model_type="qwen3"),
    "biases, own embeddings": dict(biases=True, embeds=True),
}
MASKED = dict(speculators_model_type="peagle", architectures=["PEagleSpeculator"], mask_token_id=5)
"""Settings of a head that drafts all tokens in one call."""


def eagle3_checkpoint(
    folder, target, form="speculators", *, drafted=DRAFT_VOCABULARY, taps=TAPS, layers=1, model_type="llama", biases=False,
    embeds=False, dim=64, key_heads=2, inner=80, seed=0, sharpness=3.0, **settings,
):  # fmt: skip
    """Writes a head for a target -> ``(config, tensors)`` in the speculators form. drafted: tokens; None: all, without d2t."""
    generator = torch.Generator().manual_seed(seed)
    text = target.config.get_text_config(decoder=True)
    d, vocabulary, heads = text.hidden_size, text.vocab_size, 4

    def random(*shape):
        return torch.randn(*shape, generator=generator) * sharpness / shape[-1] ** 0.5

    def norm(width):
        return 1 + 0.5 * torch.randn(width, generator=generator)

    tensors = {
        "fc.weight": random(d, len(taps) * d),
        "norm.weight": norm(d),
        "lm_head.weight": random(drafted or vocabulary, d),
    }
    for i in range(layers):
        width = d if i else 2 * d
        sizes = {
            "self_attn.q_proj": (heads * dim, width), "self_attn.k_proj": (key_heads * dim, width),
            "self_attn.v_proj": (key_heads * dim, width), "self_attn.o_proj": (d, heads * dim),
            "mlp.gate_proj": (inner, d), "mlp.up_proj": (inner, d), "mlp.down_proj": (d, inner),
        }  # fmt: skip
        tensors |= {f"layers.{i}.{name}.weight": random(*size) for name, size in sizes.items()}
        if biases:
            tensors |= {f"layers.{i}.{name}.bias": random(size[0]) for name, size in sizes.items()}
        norms = ("input_layernorm", "post_attention_layernorm", *(() if i else ("hidden_norm",)))
        tensors |= {f"layers.{i}.{name}.weight": norm(d) for name in norms}
        if model_type == "qwen3":
            tensors |= {f"layers.{i}.self_attn.{name}.weight": norm(dim) for name in ("q_norm", "k_norm")}
    if settings.get("norm_before_fc"):
        tensors["input_norm.weight"] = norm(len(taps) * d)
    if settings.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": norm(d) for i in range(len(taps))}
    if settings.get("mask_token_id") is not None:
        tensors["mask_hidden"] = torch.randn(1, 1, len(taps) * d, generator=generator)
    if embeds:
        tensors["embed_tokens.weight"] = random(vocabulary, d)
    if drafted is not None:
        tokens = torch.randperm(vocabulary, generator=generator)[:drafted].sort().values
        tensors["d2t"] = tokens - torch.arange(drafted)
        tensors["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill_(0, tokens, True)
    layer = dict(
        model_type=model_type, hidden_size=d, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=key_heads, head_dim=dim, vocab_size=vocabulary, rms_norm_eps=1e-5, rope_theta=10000.0,
        hidden_act="silu", max_position_embeddings=64,
    )  # fmt: skip
    named = dict(settings, draft_vocab_size=drafted, eagle_aux_hidden_state_layer_ids=list(taps))
    verifier = dict(name_or_path="somebody/some-model", architectures=[type(target).__name__])
    proposals = [dict(proposal_type="greedy", speculative_tokens=3)]
    config = dict(
        dict(architectures=["Eagle3Speculator"], speculators_model_type="eagle3") | named,
        transformer_layer_config=layer,
        speculators_config=dict(
            algorithm="eagle3", default_proposal_method="greedy", proposal_methods=proposals, verifier=verifier
        ),
    )
    written, saved = config, tensors
    if form == "original":
        written = dict(layer, **named, architectures=["LlamaForCausalLMEagle3"])
        saved = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    write_checkpoint(folder, written, saved, "pytorch_model.bin" if form == "original" else "model.safetensors")
    return config, tensors


def write_checkpoint(folder, config, tensors, file):
    """Writes a config and tensors, in a file of safetensors or of torch.save by its name."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (torch.save if file.endswith(".bin") else save_file)(tensors, folder / file)


class PlainHead:
    """A head without caches, for one text: all rows anew for each token. Its formulas: ``hidden``, ``taken``, ``rows``."""

    tokens = None
    """The target's ids of the draft vocabulary; None: all."""
    mask = None
    """Token and state ``[1, d]`` that stand in place of the drafts; None: each row has the draft above it."""

    def logits(self, text, drafts=(), skipped=0):
        """Those after the text and these drafts, of the target's vocabulary. skipped: tokens of the text without states."""
        states, tokens = self.taken(self.hidden(text)[skipped:]), [*text[skipped + 1 :]]
        if self.mask is not None:
            token, state = self.mask
            states, tokens = torch.cat((states, state.expand(len(drafts), -1))), tokens + [token] * len(drafts)
            drafts = ()
        for token in (*drafts, None):
            logits, given = self.rows(torch.tensor(tokens), states)
            states = torch.cat((states, given[-1:]))
            tokens.append(token)
        logits = logits[-1]
        if self.tokens is None:
            return logits
        mapped = torch.full((len(self.target.get_input_embeddings().weight),), -torch.inf)
        mapped[self.tokens] = logits
        return mapped

    def chain(self, text, length):
        """Greedy drafts."""
        drafts = []
        for _ in range(length):
            drafts.append(int(self.logits(text, drafts).argmax()))
        return drafts


class PlainEagle3(PlainHead):
    """The head from the formulas."""

    def __init__(self, config, tensors, target):
        # A copy: transformers leaves hooks on a model that it has asked for hidden states.
        self.config, self.tensors, self.target = config, tensors, copy.deepcopy(target)
        self.layer = config["transformer_layer_config"]
        self.embeddings = tensors.get("embed_tokens.weight", target.get_input_embeddings().weight)

    def norm(self, x, name):
        return (
            x / (x.square().mean(-1, keepdim=True) + self.layer["rms_norm_eps"]).sqrt() * self.tensors[f"{name}.weight"]
        )

    def product(self, x, name):
        out = x @ self.tensors[f"{name}.weight"].T
        return out + self.tensors[f"{name}.bias"] if f"{name}.bias" in self.tensors else out

    def attention(self, x, name):
        """Causal, on all rows of one text."""
        count, dim = len(x), self.layer["head_dim"]
        q, k, v = (self.product(x, f"{name}.{part}_proj").view(count, -1, dim) for part in "qkv")
        if f"{name}.q_norm.weight" in self.tensors:
            q, k = self.norm(q, f"{name}.q_norm"), self.norm(k, f"{name}.k_norm")
        angles = torch.arange(count)[:, None] / self.layer["rope_theta"] ** (torch.arange(0, dim, 2) / dim)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]

        def turned(y):
            a, b = y.chunk(2, -1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

        k, v = (y.repeat_interleave(q.shape[1] // y.shape[1], 1) for y in (k, v))
        scores = torch.einsum("ihd,jhd->hij", turned(q), turned(k)) / dim**0.5
        scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), -torch.inf)
        return self.product(torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).reshape(count, -1), f"{name}.o_proj")

    def mlp(self, x, name):
        return self.product(
            torch.nn.functional.silu(self.product(x, f"{name}.gate_proj")) * self.product(x, f"{name}.up_proj"),
            f"{name}.down_proj",
        )

    def taken(self, hidden):
        """The states of rows, from the target's ``[n, taps, d]``."""
        x, config = hidden.flatten(1), self.config
        if config.get("norm_before_fc"):
            x = self.norm(x, "input_norm")
        if config.get("fc_norm"):
            x = torch.cat([self.norm(part, f"fc_norm.{i}") for i, part in enumerate(x.chunk(hidden.shape[1], 1))], 1)
        return self.product(x, "fc")

    def rows(self, tokens, states):
        """Logits of the draft vocabulary, and the states that the rows give."""
        normed = self.norm(states, "layers.0.hidden_norm")
        x = torch.cat((self.norm(self.embeddings[tokens], "layers.0.input_layernorm"), normed), 1)
        y = normed if self.config.get("norm_before_residual") else states
        for i in range(self.layer["num_hidden_layers"]):
            name = f"layers.{i}"
            y = y + self.attention(x if i == 0 else self.norm(y, f"{name}.input_layernorm"), f"{name}.self_attn")
            y = y + self.mlp(self.norm(y, f"{name}.post_attention_layernorm"), f"{name}.mlp")
        normed = self.norm(y, "norm")
        return self.product(normed, "lm_head"), normed if self.config.get("norm_output") else y

    def hidden(self, text):
        """The target's states of all tokens but the last, ``[n - 1, taps, d]``."""
        states = self.target(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
        return torch.stack([states[tap][0] for tap in self.config["eagle_aux_hidden_state_layer_ids"]], 1)

    @property
    def tokens(self):
        """The target's ids of the draft vocabulary."""
        offsets = self.tensors.get("d2t")
        return None if offsets is None else torch.arange(len(offsets)) + offsets

    @property
    def mask(self):
        if "mask_hidden" not in self.tensors:
            return None
        return self.config["mask_token_id"], self.taken(self.tensors["mask_hidden"].view(1, len(TAPS), -1))


def plain_loop(head, target, prompt, new_tokens, length):
    """Greedy speculative decoding of one text -> the text, the target's calls, and the drafts of each step that has some."""

    def best(tokens):
        return target(torch.tensor([tokens])).logits[0].argmax(-1).tolist()

    text, calls, drafted = [*prompt, best(prompt)[-1]], 1, []
    while (left := len(prompt) + new_tokens - len(text)) > 0:
        drafts = head.chain(text, min(length, left - 1))
        right = best(text + drafts)[len(text) - 1 :]
        accepted = next((i for i, token in enumerate(drafts) if token != right[i]), len(drafts))
        text += [*drafts[:accepted], right[accepted]]
        calls, drafted = calls + 1, [*drafted, drafts] if drafts else drafted
    return text, calls, drafted


def learn(plain, texts):
    """Some steps on the texts, of drafts of the first level among the tokens that the head knows."""
    with torch.no_grad():
        hidden = [plain.hidden(text) for text in texts]
    weights = [tensor.requires_grad_() for tensor in plain.tensors.values() if tensor.is_floating_point()]
    optimizer, numbers = torch.optim.Adam(weights, 0.02), torch.full((len(plain.embeddings),), -100)
    numbers[plain.tokens] = torch.arange(len(plain.tokens))
    for _ in range(25):
        loss = 0
        for text, states in zip(texts, hidden, strict=True):
            logits, _ = plain.rows(torch.tensor(text[1:]), plain.taken(states))
            loss = loss + torch.nn.functional.cross_entropy(logits[:-1], numbers[text[2:]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for weight in weights:
        weight.requires_grad_(False)
