"""Small random models, a letter tokenizer and samples of a learnable pattern, for the tests of training."""

import torch

from pass_ext.training.common.own_texts import Sample


class Letters:
    """A tokenizer of one token a letter, with the parts of transformers' interface that training calls."""

    chat_template = "yes"

    def __call__(self, text, **_):
        return type("Encoded", (), {"input_ids": [3 + ord(letter) % 97 for letter in text]})()

    def apply_chat_template(self, messages, **_):
        return f"<{messages[0]['content']}>"


def tiny_llama(*, tied=True, vocabulary=100, seed=0):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def counting(count, length, *, kind="chat", name="sample"):
    """Texts that count: token t + 1 follows t, modulo 90, from a random start."""
    return [
        Sample(f"{name} {number}", kind, 0.0, 4, [(7 * number + place) % 90 for place in range(length)])
        for number in range(count)
    ]
