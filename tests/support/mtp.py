"""Tiny models with an MTP layer in their checkpoints, and the layer's formula around transformers' own decoder layer."""

import torch
from safetensors.torch import load_file, save_file
from support.heads import PlainHead

from benchmarks.architectures.models import tiny_model

_NAMES = {
    "qwen": dict(fc="mtp.fc", embedding="mtp.pre_fc_norm_embedding", state="mtp.pre_fc_norm_hidden", norm="mtp.norm"),
    "deepseek": dict(fc="eh_proj", embedding="enorm", state="hnorm", norm="shared_head.norm"),
}


def model_with_mtp(folder, family, seed=0, texts=None, **changes):
    """Writes a model and its MTP layer as its makers do -> the model, and the layer in plain PyTorch. texts: makes some for a
    model, on which the layer is trained; None: it is random."""
    target = tiny_model(family, **changes)
    text = target.config.get_text_config(decoder=True)
    count, width = text.num_hidden_layers, text.hidden_size
    more = dict(changes, num_hidden_layers=count + 1)
    if getattr(text, "layer_types", None):
        more["layer_types"] = [*text.layer_types, "full_attention"]
    if getattr(text, "mlp_layer_types", None):
        more["mlp_layer_types"] = [*text.mlp_layer_types, text.mlp_layer_types[-1]]
    longer = tiny_model(family, **more)
    generator = torch.Generator().manual_seed(seed)
    plain = PlainMtp(target, longer, generator)
    if texts is not None:
        plain.train(texts(target))
    target.save_pretrained(folder)
    longer.save_pretrained(folder / "longer")
    tensors, of_layer = load_file(folder / "model.safetensors"), f"model.layers.{count}."
    is_qwen = family.startswith("qwen")
    names, prefix = _NAMES["qwen" if is_qwen else "deepseek"], "" if is_qwen else of_layer
    block = "mtp.layers.0." if is_qwen else of_layer
    for name, tensor in load_file(folder / "longer/model.safetensors").items():
        if name.startswith(of_layer):
            tensors[block + name.removeprefix(of_layer)] = tensor
    for part, name in names.items():
        tensors[f"{prefix}{name}.weight"] = getattr(plain, part).weight.detach().clone()
    if not is_qwen:
        tensors[f"{prefix}embed_tokens.weight"] = torch.zeros(97, width)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "longer/model.safetensors").unlink()
    return target, plain


class PlainMtp(PlainHead):
    """The head from the formulas, for one text: all rows anew for each token."""

    def __init__(self, target, longer, generator):
        self.target, decoder = target, longer.model
        self.layer, self.rotary, self.config = decoder.layers[-1], decoder.rotary_emb, longer.config
        width = target.config.get_text_config(decoder=True).hidden_size
        self.fc = torch.nn.Linear(2 * width, width, bias=False).requires_grad_(False)
        self.fc.weight.copy_(torch.randn(width, 2 * width, generator=generator) / width**0.5)

        def norm():
            made = type(decoder.norm)(width, eps=1e-6).requires_grad_(False)
            made.weight.add_(0.3 * torch.randn(width, generator=generator))
            return made

        self.embedding, self.state, self.norm = norm(), norm(), norm()

    def train(self, texts, steps=25):
        """Learns these texts, as drafts of the first level."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        parameters = [
            x for part in (self.fc, self.embedding, self.state, self.norm, self.layer) for x in part.parameters()
        ]
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

    def hidden(self, text):
        """The target's states after its final norm, of all tokens but the last."""
        return self.target.model(torch.tensor([text[:-1]])).last_hidden_state[0]

    def rows(self, tokens, states):
        """Logits, and the states that the rows give."""
        embedded = self.target.get_input_embeddings()(tokens)
        x = self.fc(torch.cat((self.embedding(embedded), self.state(states)), 1))[None]
        places = torch.arange(len(tokens))[None]
        mask = torch.zeros(len(tokens), len(tokens)).masked_fill(
            torch.ones(len(tokens), len(tokens)).triu(1).bool(), -1e30
        )
        out = self.layer(
            x, position_embeddings=self.rotary(x, places), attention_mask=mask[None, None], position_ids=places
        )
        out = self.norm((out if isinstance(out, torch.Tensor) else out[0])[0])
        return self.target.lm_head(out), out
