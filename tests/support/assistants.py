"""Tiny assistants of Gemma 4 with random weights, and their formula around transformers' module."""

import torch
from support.small_models import WIDE

OF_KEYS = ("head_dim", "global_head_dim", "num_global_key_value_heads", "sliding_window")  # the model's own


def write_assistant(folder, target, seed=0, **changes):
    """A tiny assistant with random weights -> transformers' module."""
    import transformers

    torch.manual_seed(seed)
    text = target.config.get_text_config(decoder=True)
    settings = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=2,
        layer_types=["sliding_attention", "full_attention", "full_attention"], hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0, vocab_size=text.vocab_size,
    )  # fmt: skip
    settings |= {name: WIDE["gemma4_text"][name] for name in OF_KEYS}
    config = transformers.Gemma4AssistantConfig(
        text_config=transformers.Gemma4TextConfig(**settings), backbone_hidden_size=text.hidden_size, **changes
    )
    module = transformers.Gemma4AssistantForCausalLM(config).eval().requires_grad_(False)
    for parameter in module.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, 2.0 / parameter.shape[-1] ** 0.5)
    if module.masked_embedding is not None:
        module.masked_embedding.token_ordering.copy_(torch.randperm(text.vocab_size))
    module.save_pretrained(folder)
    return module


class PlainAssistant:
    """The assistant from the formula, for one text."""

    def __init__(self, target, module):
        self.target, self.module = target, module

    def chain(self, text, length):
        """Greedy drafts."""
        model, ids = self.target.model, torch.tensor([text[:-1]])
        out = model(ids, return_shared_kv_states=True)
        state, token, drafts = out.last_hidden_state[:, -1:], text[-1], []
        for _ in range(length):
            embedded = model.get_input_embeddings()(torch.tensor([[token]]))
            found = self.module(
                inputs_embeds=torch.cat((embedded, state), -1), position_ids=torch.tensor([[len(text) - 1]]),
                shared_kv_states=dict(out.shared_kv_states),
            )  # fmt: skip
            token, state = int(found.logits[0, 0].argmax()), found.last_hidden_state
            drafts.append(token)
        return drafts
