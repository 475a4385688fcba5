"""A draft model under pass_ext.generate: python examples/speculative.py [--model NAME --draft NAME].

The draft writes a chain of four tokens, one call each; the target judges all of them in one call. The text is the target's own.
The decoder comes from plain_decoder.py; its draft is the same decoder's first layer. The transformers part uses two models of
random weights unless you name a pair that shares a tokenizer, for example HuggingFaceTB/SmolLM2-360M-Instruct and
HuggingFaceTB/SmolLM2-135M-Instruct.
"""

import argparse
import copy

import torch

import pass_ext

if __package__:
    from examples.plain_decoder import VOCABULARY, Decoder
else:
    from plain_decoder import VOCABULARY, Decoder


def with_a_decoder_of_your_own(device, new_tokens):
    """Two prompts, greedy and sampled."""
    torch.manual_seed(0)
    target = Decoder().requires_grad_(False).to(device)
    draft = copy.deepcopy(target)
    draft.layers = draft.layers[:1]
    prompts = torch.randint(VOCABULARY, (2, 16), device=device)
    options = dict(max_new_tokens=new_tokens, temperature=[0.0, 0.8], seeds=[1, 2])
    result = pass_ext.generate(target, prompts, pass_ext.Speculative(draft, length=4), **options)
    plain = pass_ext.generate(target, prompts, pass_ext.Plain(), **options)
    assert torch.equal(result.sequences, plain.sequences), "the texts differ"
    return result.stats


def with_transformers(model, draft_model, inputs, new_tokens):
    """`inputs`: input_ids and attention_mask, as a tokenizer gives them."""
    method = pass_ext.Speculative(draft_model, length=4)
    result = pass_ext.generate(
        model, inputs["input_ids"], method, attention_mask=inputs["attention_mask"], max_new_tokens=new_tokens
    )
    # The same inside model.generate, with its usual arguments:
    same = model.generate(
        **inputs, max_new_tokens=new_tokens, do_sample=False, custom_generate=pass_ext.custom_generate(method)
    )
    plain = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
    assert torch.equal(result.sequences, plain) and torch.equal(same, plain), "the texts differ"
    return result.stats


def models_and_inputs(names, device):
    """A target, a draft and two prompts; `names`: of both models, or None for random weights."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    if all(names):
        tokenizer = AutoTokenizer.from_pretrained(names[0], padding_side="left")
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        models = [AutoModelForCausalLM.from_pretrained(name, dtype="auto").to(device).eval() for name in names]
        return *models, tokenizer(["The capital of France is", "Water boils"], return_tensors="pt", padding=True).to(
            device
        )
    shape = dict(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_attention_heads=4)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=2, initializer_range=0.3, pad_token_id=0))
    draft = LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=1, initializer_range=0.3, pad_token_id=0))
    draft.load_state_dict(model.state_dict(), strict=False)  # its first layer, embedding and head
    input_ids = torch.randint(3, VOCABULARY, (2, 12), device=device)
    inputs = dict(input_ids=input_ids, attention_mask=torch.ones_like(input_ids))
    return model.to(device).eval(), draft.to(device).eval(), inputs


def main(decode_own, transformers) -> None:
    """Decodes with a decoder of your own and with transformers; each compares its text with plain decoding."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--model", help="the target: a name or a folder")
    parser.add_argument("--draft", help="the draft model")
    options = parser.parse_args()
    stats = decode_own(options.device, options.new_tokens)
    print(f"a decoder of your own: {stats.mean_acceptance_length:.2f} tokens per call that judged drafts")
    models = models_and_inputs((options.model, options.draft), options.device)
    stats = transformers(*models, options.new_tokens)
    print(f"transformers: {stats.mean_acceptance_length:.2f} tokens per call that judged drafts")


if __name__ == "__main__":
    main(with_a_decoder_of_your_own, with_transformers)
