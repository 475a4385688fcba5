"""Decoding many prompts on several processes, each with a whole model: data parallelism is the launcher's business.

    torchrun --nproc-per-node 2 examples/data_parallel.py

Rank r takes prompts r, r + ranks, …; rank 0 gathers the texts. Seeds belong to prompts, so the texts do not depend on the
number of processes.
"""

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import pass_ext

PROMPTS = [[1, 5, 9, 20], [7, 7, 3], [2, 4, 8, 16, 32], [99, 98], [42]]


def main() -> None:
    """Splits the prompts, decodes this rank's, and gathers the texts."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=500, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                                         num_attention_heads=4, num_key_value_heads=2, eos_token_id=None))  # fmt: skip
    mine = range(rank, len(PROMPTS), ranks)
    texts = {}
    for number in mine:
        prompt = torch.tensor([PROMPTS[number]])
        result = pass_ext.generate(
            model, prompt, pass_ext.NGram(), temperature=0.8, seeds=[number], max_new_tokens=16, eos_token_id=[]
        )
        texts[number] = result.sequences[0].tolist()
    parts: list[dict[int, list[int]] | None] = [None] * ranks
    dist.all_gather_object(parts, texts)
    if rank == 0:
        gathered = {number: text for part in parts for number, text in (part or {}).items()}
        for number in sorted(gathered):
            print(f"{number}: {gathered[number]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
