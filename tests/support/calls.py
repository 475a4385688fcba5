"""Calls of every op with the arguments of its samples: raw, or by the keywords of its public function."""

import torch
from support.faces import function_of
from support.samples import SAMPLES
from torch.utils._pytree import tree_map_only

import pass_ext
from pass_ext import _library
from pass_ext.ops import layer
from pass_ext.ops.draft import MODES
from pass_ext.ops.recurrent import FORMS, RecurrentUpdate
from pass_ext.ops.shard import ROUNDS
from pass_ext.ops.step import ACTIVATIONS, NORM_FORMS

OPS = _library.op_names()
DEVICES = ["cpu"] + (["cuda"] if pass_ext.status().cuda_loaded and torch.cuda.is_available() else [])
# The weights of the samples' layers, in the order of the op's list.
STACKED = ("input_norm", "q_weight", "k_weight", "v_weight", "o_weight", "gate_weight", "up_weight", "down_weight")
# The tensors of the samples' updates of states, in the order of the op's list: a convolution's has no name of its own.
UPDATES = [f"updates[{i}]{f'.{name}' * bool(name)}" for i, names in enumerate(
    (("k", "u", "log_decay"), ("",), ("k", "u", "log_decay"), RecurrentUpdate._fields)
) for name in names]  # fmt: skip
PUBLIC = [name for name in OPS if function_of(name) is not None]


def arguments_of(op):
    return [argument.name for argument in getattr(torch.ops.pass_ext, op).default._schema.arguments]


def samples_of(op, device="cpu"):
    """Argument tuples whose tensors have elements."""
    torch.manual_seed(0)
    for sample in SAMPLES[op](device):
        if all(tensor.numel() for _, tensor in places_of(sample)):
            yield sample


def places_of(sample):
    """(place, tensor) of every tensor in an argument tuple; a place is an index, or two for a tensor in a list."""
    for i, value in enumerate(sample):
        if isinstance(value, torch.Tensor):
            yield (i,), value
        elif isinstance(value, list):
            yield from (((i, k), item) for k, item in enumerate(value))


def replaced(sample, where, tensor):
    changed = list(sample)
    if len(where) == 1:
        changed[where[0]] = tensor
    else:
        changed[where[0]] = [tensor if k == where[1] else item for k, item in enumerate(changed[where[0]])]
    return tuple(changed)


def listed(op, where):
    name = arguments_of(op)[where[0]]
    return name if len(where) == 1 else f"{name}[{where[1]}]"


def named(op, where):
    """As in the op's own messages."""
    if op in ("layer_pack", "layer_stack") and arguments_of(op)[where[0]] == "weights":
        return STACKED[where[1] % len(STACKED)]
    if op == "state_commit_" and arguments_of(op)[where[0]] == "updates":
        return UPDATES[where[1]]
    return listed(op, where)


def keywords_of(op, sample):
    """A sample as keyword arguments of the public function."""
    keywords = dict(zip(arguments_of(op), sample, strict=True))
    if "mode" in keywords:
        keywords["mode"] = MODES[keywords["mode"]]
    if "rule" in keywords:
        keywords["rule"] = list(pass_ext.RULES)[keywords["rule"]]
    if "form" in keywords:
        keywords["form"] = (FORMS if op == "recurrent_tree" else NORM_FORMS)[keywords["form"]]
    for name in {"round", "next"} & keywords.keys():
        keywords[name] = ROUNDS[keywords[name]]
    if "activation" in keywords:
        keywords["activation"] = ACTIVATIONS[keywords["activation"]]
    if op in ("layer_pack", "layer_stack"):
        weights, each = keywords.pop("weights"), len(STACKED)
        assert keywords.pop("parts") == sum(1 << layer._ORDER.index(name) for name in STACKED)
        keywords["layers"] = [
            pass_ext.layers.LayerWeights(**dict(zip(STACKED, weights[i : i + each], strict=True)))
            for i in range(0, len(weights), each)
        ]
    if "adapted" in keywords:
        bits = keywords.pop("adapted")
        adapted = [name for i, name in enumerate(layer.ADAPTED) if bits >> i & 1]
        sides = iter(keywords["adapters"])
        keywords["adapters"] = {name: (next(sides), next(sides)) for name in adapted}
    if op == "layer_stack":
        caches = keywords["caches"]
        keywords["caches"] = caches[0] if len(caches) == 1 else list(zip(caches[::2], caches[1::2], strict=True))
    if "logprobs" in keywords:
        count = keywords.pop("logprobs")
        keywords |= {"return_logprobs": count >= 0, "top_logprobs": max(count, 0)}
    if "silu" in keywords:
        keywords["activation"] = "silu" if keywords.pop("silu") else None
    if op == "state_commit_":
        tensors, counts = iter(keywords["updates"]), keywords.pop("parts")
        own = [[next(tensors) for _ in range(count)] for count in counts]
        keywords["updates"] = [RecurrentUpdate(*parts) if len(parts) > 1 else parts[0] for parts in own]
    if op == "cache_commit_":
        keywords["new"] = keywords["new"] or None
    return keywords


def call(op, sample):
    return function_of(op)(**keywords_of(op, sample))


def detached(sample):
    return tree_map_only(torch.Tensor, torch.Tensor.detach, sample)


def written_by(op):
    """The places of the arguments that an op writes into."""
    arguments = getattr(torch.ops.pass_ext, op).default._schema.arguments
    return [i for i, argument in enumerate(arguments) if argument.is_write]


def results_of(op, sample):
    """Every tensor that a call returns or changes; what it changes is a copy."""
    written = [i for i in written_by(op) if sample[i] is not None]
    copies = tree_map_only(torch.Tensor, torch.Tensor.clone, [sample[i] for i in written])
    sample = list(sample)
    for i, copy in zip(written, copies, strict=True):
        sample[i] = copy
    result = call(op, tuple(sample))
    changed = [tensor for copy in copies for tensor in (copy if isinstance(copy, list) else [copy])]
    return changed + ([result] if isinstance(result, torch.Tensor) else list(result or ()))
