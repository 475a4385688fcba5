"""Tiny models with an MTP layer in their checkpoints, and the layer's formulas around transformers' own decoder layer."""

import torch
from safetensors.torch import load_file, save_file
from support.heads import PlainHead

from benchmarks.architectures.models import tiny_model

_NAMES = {
    "qwen": dict(fc="mtp.fc", embedding="mtp.pre_fc_norm_embedding", state="mtp.pre_fc_norm_hidden", norm="mtp.norm"),
    "deepseek": dict(fc="eh_proj", embedding="enorm", state="hnorm", norm="shared_head.norm"),
    "streams": dict(e_proj="e_proj", h_proj="h_proj", embedding="enorm", state="hnorm", norm="norm"),
}
_OF_STREAMS = dict(layer_types="sliding_attention", mlp_layer_types="moe")
"""The kinds of the layer after DeepSeek-V4's."""


def model_with_mtp(folder, family, seed=0, texts=None, blank=None, **changes):
    """Writes a model and its MTP layer as its makers do -> the model, and the layer in plain PyTorch. texts: makes some for a
    model, on which the layer is trained; None: it is random. blank: a token whose embedding is zeros."""
    target = tiny_model(family, **changes)
    if blank is not None:
        target.get_input_embeddings().weight[blank] = 0
    text = target.config.get_text_config(decoder=True)
    count, width = text.num_hidden_layers, text.hidden_size
    more = dict(changes, num_hidden_layers=count + 1)
    has_streams = family == "deepseek_v4"
    if getattr(text, "layer_types", None):
        more["layer_types"] = [*text.layer_types, _OF_STREAMS["layer_types"] if has_streams else "full_attention"]
    if getattr(text, "mlp_layer_types", None):
        kind = _OF_STREAMS["mlp_layer_types"] if has_streams else text.mlp_layer_types[-1]
        more["mlp_layer_types"] = [*text.mlp_layer_types, kind]
    longer = tiny_model(family, **more)
    generator = torch.Generator().manual_seed(seed)
    plain = (PlainStreamsMtp if has_streams else PlainMtp)(target, longer, generator)
    if texts is not None:
        plain.train(texts(target))
    target.save_pretrained(folder)
    longer.save_pretrained(folder / "longer")
    tensors, of_layer = load_file(folder / "model.safetensors"), f"model.layers.{count}."
    form = "streams" if has_streams else "qwen" if family.startswith("qwen") else "deepseek"
    prefix = {"streams": "mtp.0.", "qwen": "", "deepseek": of_layer}[form]
    block = {"streams": "mtp.0.", "qwen": "mtp.layers.0.", "deepseek": of_layer}[form]
    for name, tensor in load_file(folder / "longer/model.safetensors").items():
        if name.startswith(of_layer):
            tensors[block + name.removeprefix(of_layer)] = tensor
    for part, name in _NAMES[form].items():
        tensors[f"{prefix}{name}.weight"] = getattr(plain, part).weight.detach().clone()
    if has_streams:
        for name in ("fn", "base", "scale"):
            tensors[f"mtp.0.hc_head_{name}"] = getattr(plain.hc_head, f"hc_{name}").detach().clone()
    if form == "deepseek":
        tensors[f"{prefix}embed_tokens.weight"] = torch.zeros(97, width)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "longer/model.safetensors").unlink()
    return target, plain


def write_layer(plain, prefix):
    """The tensors of a layer in DeepSeek's form, by their names in a checkpoint."""
    tensors = {f"{prefix}{name}": tensor.detach().clone() for name, tensor in plain.layer.state_dict().items()}
    for part, name in _NAMES["deepseek"].items():
        tensors[f"{prefix}{name}.weight"] = getattr(plain, part).weight.detach().clone()
    return tensors


class _Trained(PlainHead):
    """A head for one text, all of whose modules but the target can learn."""

    def train(self, texts, steps=25):
        """Learns these texts, as drafts of the first level."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        parts = [part for part in vars(self).values() if isinstance(part, torch.nn.Module) and part is not self.target]
        parameters = [x for part in parts for x in part.parameters()]
        for parameter in parameters:
            parameter.requires_grad_(True)
        optimizer = torch.optim.Adam(parameters, 0.02)
        for _ in range(steps):
            loss = 0
            for text in texts:
                logits, _ = self.rows(torch.tensor(text[1:]), self.hidden(text).detach())
                loss = loss + torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(text[2:]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        for parameter in parameters:
            parameter.requires_grad_(False)
        torch.set_num_threads(threads)

    def taken(self, hidden):
        return hidden


class PlainMtp(_Trained):
    """The head from the formulas, for one text: all rows anew for each token."""

    def __init__(self, target, longer, generator):
        self.target, decoder = target, longer.model
        self.layer, self.rotary, self.config = decoder.layers[-1], decoder.rotary_emb, longer.config
        width = target.config.get_text_config(decoder=True).hidden_size
        self.fc = _linear(2 * width, width, generator)
        self.embedding, self.state, self.norm = (_norm_like(decoder.norm, generator) for _ in range(3))

    def hidden(self, text):
        """The target's states after its final norm, of all tokens but the last."""
        return self.target.model(torch.tensor([text[:-1]])).last_hidden_state[0]

    def rows(self, tokens, states):
        """Logits, and the states that the rows give."""
        embedded = self.target.get_input_embeddings()(tokens)
        x = self.fc(torch.cat((self.embedding(embedded), self.state(states)), 1))[None]
        places = torch.arange(len(tokens))[None]
        out = self.layer(
            x, position_embeddings=self.rotary(x, places), attention_mask=_causal(len(tokens)), position_ids=places
        )
        out = self.norm((out if isinstance(out, torch.Tensor) else out[0])[0])
        return self.target.lm_head(out), out


class PlainStreamsMtp(_Trained):
    """The head after a model with streams, from the formulas."""

    def __init__(self, target, longer, generator):
        self.target, decoder = target, longer.model
        self.layer, self.rotary, self.config = decoder.layers[-1], decoder.rotary_emb, longer.config
        self.hc_head = decoder.hc_head
        for parameter in (*self.hc_head.parameters(), self.layer.self_attn.sinks):
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        width = target.config.hidden_size
        self.e_proj, self.h_proj = (_linear(width, width, generator) for _ in range(2))
        self.embedding, self.state, self.norm = (_norm_like(decoder.norm, generator) for _ in range(3))

    def hidden(self, text):
        """The streams after the target's last layer, of all tokens but the last."""
        found = []
        handle = self.target.model.layers[-1].register_forward_hook(lambda layer, given, out: found.append(out[0]))
        self.target.model(torch.tensor([text[:-1]]))
        handle.remove()
        return found[0]

    def rows(self, tokens, states):
        """Logits, and the states that the rows give."""
        embedded = self.target.get_input_embeddings()(tokens)
        x = self.e_proj(self.embedding(embedded))[:, None] + self.h_proj(self.state(states))
        places = torch.arange(len(tokens))[None]
        turns = {
            kind: self.rotary(embedded[None], position_ids=places, layer_type=kind) for kind in ("main", "compress")
        }
        mask = _causal(len(tokens), self.config.sliding_window)
        out = self.layer(x[None], position_embeddings=turns, attention_mask=mask, position_ids=places)[0]
        flat = out.flatten(1)
        flat = flat / (flat.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).sqrt()
        head = self.hc_head
        weights = torch.sigmoid(flat @ head.hc_fn.T * head.hc_scale + head.hc_base) + self.config.hc_eps
        return self.target.lm_head(self.norm((weights[..., None] * out).sum(1))), out


def _linear(inputs, outputs, generator):
    made = torch.nn.Linear(inputs, outputs, bias=False).requires_grad_(False)
    made.weight.copy_(torch.randn(outputs, inputs, generator=generator) / outputs**0.5)
    return made


def _norm_like(norm, generator):
    made = type(norm)(len(norm.weight), eps=1e-6).requires_grad_(False)
    made.weight.add_(0.3 * torch.randn(len(norm.weight), generator=generator))
    return made


def _causal(count, window=None):
    """What is added to the scores ``[1, 1, count, count]`` of the rows of a text."""
    back = torch.arange(count)[:, None] - torch.arange(count)
    hidden = (back < 0) | (back >= (window or count))
    return torch.zeros(count, count).masked_fill(hidden, -1e30)[None, None]
