"""A question about a picture: python examples/pictures.py [--model NAME --picture FILE --question TEXT].

The model reads the prompt with the picture itself; what follows is drafted by n-grams, and is the model's own text. Without
a model, one of random weights reads a random picture: it says nothing, and shows the calls.
"""

import argparse

import torch

import pass_ext


def random_model_and_inputs(device):
    """A tiny model that reads pictures, and what a processor gives for one picture between some tokens."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    vision = CLIPVisionConfig(**sizes, image_size=32, patch_size=8)
    text = LlamaConfig(**sizes, vocab_size=32, pad_token_id=0, eos_token_id=None, initializer_range=0.1)
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text, image_token_index=31))
    ids = torch.tensor([[5, 6, *[31] * 16, 7, 8, 9]])  # a placeholder for each of its 4 times 4 patches
    inputs = dict(input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=torch.randn(1, 3, 32, 32))
    return model.to(device).eval(), {name: tensor.to(device) for name, tensor in inputs.items()}


def model_and_inputs(name, picture, question, device):
    """A model and its inputs, by its own processor."""
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(name)
    model = AutoModelForImageTextToText.from_pretrained(name, dtype="auto").to(device).eval()
    said = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}]
    text = processor.apply_chat_template(said, add_generation_prompt=True)
    inputs = processor(images=Image.open(picture), text=text, return_tensors="pt").to(device, model.dtype)
    return model, inputs, processor


def main() -> None:
    """Writes the answer by pass_ext and by transformers, and compares them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--model", help="a name or a folder")
    parser.add_argument("--picture", help="a file")
    parser.add_argument("--question", default="What is in this picture?")
    options = parser.parse_args()
    decode = None
    if options.model:
        model, inputs, processor = model_and_inputs(options.model, options.picture, options.question, options.device)
        decode = processor.batch_decode
    else:
        model, inputs = random_model_and_inputs(options.device)
    method = pass_ext.NGram(longest=3, shortest=1)
    result = pass_ext.generate(model, inputs["input_ids"], method, prompt=inputs, max_new_tokens=options.new_tokens)
    # The same inside model.generate, with its usual arguments:
    limits = dict(max_new_tokens=options.new_tokens, do_sample=False)
    same = model.generate(**inputs, **limits, custom_generate=pass_ext.custom_generate(method))
    plain = model.generate(**inputs, **limits)
    assert torch.equal(result.sequences, plain) and torch.equal(same, plain), "the texts differ"
    if decode is not None:
        print(decode(result.sequences[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)[0])
    print(f"after a picture: {result.stats.mean_acceptance_length:.2f} tokens per call that judged drafts")


if __name__ == "__main__":
    main()
