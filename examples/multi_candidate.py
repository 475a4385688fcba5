"""Trees from a draft model under pass_ext.generate: python examples/multi_candidate.py [--model NAME --draft NAME].

The draft writes a tree level by level, one call per level: four candidates, two below each, two below those. Drafting stops
early if no drafted token is likely. The target judges the tree in one call. The text is the target's own. Models: as in
speculative.py.
"""

import copy

import torch

import pass_ext

if __package__:
    from examples.plain_decoder import VOCABULARY, Decoder
    from examples.speculative import main
else:
    from plain_decoder import VOCABULARY, Decoder
    from speculative import main


def likely(level):
    """A decision: a text's drafting goes on if a candidate's probability is above 0.5. train-decision trains better ones."""
    return level.logprobs[:, 0].exp()


def with_a_decoder_of_your_own(device, new_tokens):
    """Two prompts, greedy and sampled."""
    torch.manual_seed(0)
    target = Decoder().requires_grad_(False).to(device)
    draft = copy.deepcopy(target)
    draft.layers = draft.layers[:1]
    prompts = torch.randint(VOCABULARY, (2, 16), device=device)
    options = dict(max_new_tokens=new_tokens, temperature=[0.0, 0.8], seeds=[1, 2])
    method = pass_ext.MultiCandidate(draft, branching=(4, 2, 2), decision=likely)
    result = pass_ext.generate(target, prompts, method, **options)
    plain = pass_ext.generate(target, prompts, pass_ext.Plain(), **options)
    assert torch.equal(result.sequences, plain.sequences), "the texts differ"
    return result.stats


def with_transformers(model, draft_model, inputs, new_tokens):
    """`inputs`: input_ids and attention_mask, as a tokenizer gives them."""
    method = pass_ext.MultiCandidate(draft_model, branching=(4, 2, 2), decision=likely)
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


if __name__ == "__main__":
    main(with_a_decoder_of_your_own, with_transformers)
