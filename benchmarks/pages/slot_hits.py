"""How often look-ahead slots hold the right token in texts that do not loop.
`python -m benchmarks.pages.slot_hits --model MODEL FILE ...` prints a table of the files of look-ahead embeddings.

The texts are the model's own greedy continuations of the held-out prompts of `benchmarks.decoding` (chat and code); a
continuation in which an n-gram of eight tokens comes for the third time is left out. Raw: without transition scores. Chain: the
mean number of slots, counted from the first, that hold the right token.
"""

import argparse
from typing import Any

import torch

import pass_ext
from benchmarks.decoding.prompts import read_prompts
from pass_ext.checkpoint import load_checkpoint
from pass_ext.training.common.own_texts import without_loop
from pass_ext.training.lookahead.evaluation import ranks_of


def texts_of(model: Any, tokenizer: Any, domain: str, prompts: int, tokens: int) -> list[tuple[str, list[int], int]]:
    """(name, ids, length of the prompt) of texts without a loop."""
    found = []
    for prompt in read_prompts(domain, tokenizer, prompts):
        ids = torch.tensor([prompt.ids])
        text = pass_ext.generate(model, ids, pass_ext.Plain(), max_new_tokens=tokens).sequences[0].tolist()
        written = text[len(prompt.ids) :]
        if len(written) > 8 and len(without_loop(prompt.ids, written)) == len(written):
            found.append((prompt.name, text, len(prompt.ids)))
    return found


def ranks_in(
    model: Any, embedding: pass_ext.LookaheadEmbedding, texts: list[tuple[str, list[int], int]]
) -> torch.Tensor:
    """Ranks of the right tokens, [places, slots], at every place of what the model wrote."""
    ranks = []
    for _, ids, prompt in texts:
        places = torch.arange(prompt - 2, len(ids) - 1 - embedding.num_lookahead)
        ranks += [ranks_of(model, embedding, torch.tensor(ids), part) for part in places.split(16)]
    return torch.cat(ranks)


def main() -> None:
    """Entry point of `python -m benchmarks.pages.slot_hits`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", help="files of look-ahead embeddings, or names that come with the package")
    parser.add_argument("--model", required=True, help="a GGUF file, or a transformers model folder or name")
    parser.add_argument("--prompts", type=int, default=8, help="of each domain, at most")
    parser.add_argument("--tokens", type=int, default=72, help="of a continuation")
    options = parser.parse_args()
    model, tokenizer = load_checkpoint(options.model, torch.float32)
    texts = {domain: texts_of(model, tokenizer, domain, options.prompts, options.tokens) for domain in ("chat", "code")}
    for domain, chosen in texts.items():
        print(f"{domain}: {len(chosen)} texts without a loop: {', '.join(name for name, *_ in chosen)}")
    print("| file | text | places | scores | " + " | ".join(f"slot {i + 1}" for i in range(4)) + " | chain |")
    print("|" + " --- |" * 9)
    for file in options.files:
        for scores in ("raw", "with transitions"):
            embedding = pass_ext.LookaheadEmbedding.from_pretrained(file).float()
            if scores == "raw":
                embedding.transition_left = embedding.transition_right = None
            ranks = {domain: ranks_in(model, embedding, chosen) for domain, chosen in texts.items() if chosen}
            for domain, found in (ranks | {"all": torch.cat(list(ranks.values()))}).items():
                hit = found == 0
                tops = " | ".join(f"{share:.3f}" for share in hit.float().mean(0).tolist())
                chain = hit.int().cumprod(1).sum(1).float().mean()
                print(f"| {file} | {domain} | {len(found)} | {scores} | {tops} | {chain:.2f} |", flush=True)


if __name__ == "__main__":
    main()
