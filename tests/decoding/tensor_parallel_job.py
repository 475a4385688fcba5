"""One rank under torchrun: ``tensor_parallel_job.py FOLDER`` decodes with a divided model and writes ``RANK.json``: every
method's text, and that of one process."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from support.generation import slots_for
from support.small_models import VOCABULARY
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

import pass_ext
from pass_ext.decoding.drafting.from_slots import lookahead_drafter
from pass_ext.decoding.drafting.slot_tokens import transition_tables
from pass_ext.decoding.models.any_model import packed_model
from pass_ext.modules.files import fingerprint_of

PROMPTS = torch.tensor([[1, 5, 9, 20], [7, 7, 3, 11]])


def make_model(folder, layers, seed):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    path = folder / f"{os.environ['RANK']}-{layers}"
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def forbid_seven(ids, logits):
    return logits.index_fill(-1, torch.tensor([7]), -torch.inf)


def refusal(model, slots, fingerprint):
    """What generation says of slots of another model."""
    slots.fingerprint = fingerprint
    try:
        pass_ext.generate(model, PROMPTS, pass_ext.PaSS(slots, rows=12), max_new_tokens=4)
    except ValueError as error:
        return str(error)


def main(folder):
    torch.set_num_threads(1)
    target, drafting = make_model(folder, 2, 0), make_model(folder, 1, 1)
    dist.init_process_group("gloo")
    whole, draft = (AutoModelForCausalLM.from_pretrained(path) for path in (target, drafting))
    plan = {"model." + name: style for name, style in whole.config.base_model_tp_plan.items()}
    config = DistributedConfig(tp_plan={**plan, "lm_head": "colwise"})
    model = AutoModelForCausalLM.from_pretrained(target, distributed_config=config)

    slots, bound = slots_for(whole), slots_for(whole, rank=4)
    slots.fingerprint = bound.fingerprint = fingerprint_of(whole.get_input_embeddings().weight)
    warm = dict(temperature=0.8, seeds=[1, 2])
    runs = {
        "plain": (pass_ext.Plain(), {}),
        "plain, warm": (pass_ext.Plain(), warm | {"top_p": 0.9}),
        "n-grams": (pass_ext.NGram(), warm),
        "PaSS": (pass_ext.PaSS(slots, rows=12), warm),
        "PaSS, greedy": (pass_ext.PaSS(slots, rows=12), {}),
        "PaSS, rejection": (pass_ext.PaSS(slots, rows=12), warm | {"rule": "rejection"}),
        "PaSS, transitions": (pass_ext.PaSS(bound, rows=12), warm),
        "PaSS, transitions, greedy": (pass_ext.PaSS(bound, rows=12), {}),
        "PaSS, transitions, rejection": (pass_ext.PaSS(bound, rows=12), warm | {"rule": "rejection"}),
        "draft model": (pass_ext.Speculative(draft, length=3), warm | {"rule": "block"}),
        "tree": (pass_ext.MultiCandidate(draft, branching=(3, 2)), warm | {"top_k": 50}),
        "tree, traversal": (pass_ext.MultiCandidate(draft, branching=(2, 2)), warm | {"rule": "traversal"}),
        "processor": (pass_ext.Speculative(draft, length=3), warm | {"logits_processor": forbid_seven}),
    }
    texts = {"columns": [model(PROMPTS).logits.shape[-1], whole(PROMPTS).logits.shape[-1]]}
    shared = dict(max_new_tokens=16, eos_token_id=[])
    for name, (method, options) in runs.items():
        results = [pass_ext.generate(each, PROMPTS, method, **shared, **options) for each in (model, whole)]
        texts[name] = [result.sequences.tolist() for result in results]
    torch.manual_seed(dist.get_rank())  # fresh seeds are those of the first rank
    texts["fresh seeds"] = pass_ext.generate(
        model, PROMPTS, pass_ext.Plain(), temperature=1.0, **shared
    ).sequences.tolist()
    try:
        pass_ext.generate(model, PROMPTS, pass_ext.PaSS(slots), **shared)
    except ValueError as error:
        texts["rows"] = str(error)
    texts["another model's"] = refusal(model, slots_for(whole), fingerprint_of(draft.get_input_embeddings().weight))
    divided, alone = packed_model(model), packed_model(whole)
    assert alone.logit_shards is None and divided.logit_shards is not None
    tables = [transition_tables(bound, each.table, each.logit_shards) for each in (divided, alone)]
    texts["tables"] = [torch.allclose(*pair, rtol=1e-5, atol=1e-6) for pair in zip(*tables, strict=True)]
    rows = torch.randn(3, texts["columns"][1], generator=torch.Generator().manual_seed(5))
    drawn = [draw(rows, 4, mode="top")[0] for draw in (divided.logit_shards.draft_sample, pass_ext.draft_sample)]
    texts["drafts of all columns"] = torch.equal(*drawn)
    divided.logit_shards.table_part = None  # as of a table that is divided in another way
    try:
        lookahead_drafter(pass_ext.PaSS(bound), SimpleNamespace(target=divided))
    except ValueError as error:
        texts["transitions"] = str(error)
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(texts))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    # Not by way of Python's own end: a thread of gloo may still hold the last collective's tensor, and where it drops that
    # while the interpreter ends, the process aborts ("terminate called without an active exception", torch 2.13).
    os._exit(0)
