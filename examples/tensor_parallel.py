"""Decoding under tensor parallelism: several processes hold a model's weights, and the columns of its logits, together.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py

It makes a small Llama with random weights, loads it divided by transformers with ``lm_head: colwise``, so that no rank ever has
all logits, and decodes with a draft model. Every rank prints the same text; rank 0 compares it with that of one process. Runs
on CPUs with gloo, on GPUs with nccl. SLURM and Ray start the same program: docs/distributed.md.
"""

import os
import tempfile

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

import pass_ext


def make_model(folder: str, layers: int, seed: int) -> str:
    """Saves a small random Llama and returns its path."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=509, hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    path = os.path.join(folder, f"llama-{layers}")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def main() -> None:
    """Decodes on all ranks, and once more on one."""
    on_gpus = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpus else torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder:
        # Before the group exists: in a group transformers saves on rank 0 alone, and each rank has a folder of its own here.
        target_path, draft_path = make_model(folder, 2, 0), make_model(folder, 1, 1)
        dist.init_process_group("nccl" if on_gpus else "gloo")
        rank = dist.get_rank()
        whole = AutoModelForCausalLM.from_pretrained(target_path).to(device)
        draft = AutoModelForCausalLM.from_pretrained(draft_path).to(device)
        plan = {"model." + name: style for name, style in whole.config.base_model_tp_plan.items()}
        config = DistributedConfig(tp_plan={**plan, "lm_head": "colwise"})  # logits stay divided
        model = AutoModelForCausalLM.from_pretrained(target_path, distributed_config=config)

        prompts = torch.tensor([[1, 5, 9, 20], [7, 7, 3, 11]], device=device)
        sampling = dict(temperature=0.8, top_k=50, seeds=[1, 2], max_new_tokens=24, eos_token_id=[])
        method = pass_ext.MultiCandidate(draft, branching=(3, 2))
        divided = pass_ext.generate(model, prompts, method, **sampling)
        alone = pass_ext.generate(whole, prompts, method, **sampling)
        same = torch.equal(divided.sequences, alone.sequences)
        print(
            f"rank {rank}: {divided.sequences[0, 4:].tolist()} {'equals' if same else 'DIFFERS FROM'} one process's text"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
