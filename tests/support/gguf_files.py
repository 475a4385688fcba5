"""Small models as GGUF files: ``write_gguf``, ``write_gguf_of_experts`` and ``write_gguf_of_oss`` with
random weights, ``qwen35_files`` with those of a folder."""

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from support.mtp import model_with_mtp
from support.small_models import small_model

HIDDEN, LAYERS, FFN, VOCABULARY, EXPERTS = 32, 2, 64, 258, 4


def write_gguf(path, kind="F32", *, tied=False, missing=(), mtp=False, architecture="llama", scaling=(), more=()):
    """Writes a llama of two small layers with a token per byte, its matrices in this format; returns the path. missing: tensors
    that it leaves out. mtp: with parts of an MTP layer. scaling: what it says of its rotation. more: further tensors."""
    matrices = {"token_embd": (VOCABULARY, HIDDEN)} | ({} if tied else {"output": (VOCABULARY, HIDDEN)})
    vectors = {"output_norm": HIDDEN}
    for layer in range(LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            matrices[f"blk.{layer}.{name}"] = HIDDEN, HIDDEN
        matrices |= {f"blk.{layer}.{name}": (FFN, HIDDEN) for name in ("ffn_gate", "ffn_up")}
        matrices[f"blk.{layer}.ffn_down"] = HIDDEN, FFN
        vectors |= {f"blk.{layer}.{name}": HIDDEN for name in ("attn_norm", "ffn_norm")}
    if mtp:
        matrices[f"blk.{LAYERS}.nextn.eh_proj"] = HIDDEN, 2 * HIDDEN
        vectors |= {f"blk.{LAYERS}.nextn.{name}": HIDDEN for name in ("enorm", "hnorm")}

    def others(writer):
        _add_numbers(writer, {f"rope.scaling.{name}": value for name, value in dict(scaling).items()})
        for name, numbers in dict(more).items():
            writer.add_tensor(name, numbers)

    return _write(path, architecture, kind, matrices, vectors, missing, others)


def write_gguf_of_experts(path, kind, *, width=768, missing=()):
    """Writes a qwen3_moe of two small layers in the same way. width: of an expert; transformers knows no other than 768."""
    heads = HIDDEN // 2

    def more(writer):
        writer.add_key_length(heads)
        writer.add_value_length(heads)
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(width)

    matrices, vectors = dict.fromkeys(("token_embd", "output"), (VOCABULARY, HIDDEN)), {"output_norm": HIDDEN}
    for layer in range(LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            matrices[f"blk.{layer}.{name}"] = HIDDEN, HIDDEN
        matrices |= {f"blk.{layer}.{name}": (EXPERTS, width, HIDDEN) for name in ("ffn_gate_exps", "ffn_up_exps")}
        matrices[f"blk.{layer}.ffn_down_exps"] = EXPERTS, HIDDEN, width
        matrices[f"blk.{layer}.ffn_gate_inp"] = EXPERTS, HIDDEN
        vectors |= {f"blk.{layer}.{name}": HIDDEN for name in ("attn_norm", "ffn_norm")}
        vectors |= {f"blk.{layer}.{name}": heads for name in ("attn_q_norm", "attn_k_norm")}
    return _write(path, "qwen3moe", kind, matrices, vectors, missing, more)


def _write(path, architecture, kind, matrices, vectors, missing, more):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // 2)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCABULARY)
    more(writer)
    _add_tokens(writer, VOCABULARY)
    random, own = np.random.default_rng(0), gguf.GGMLQuantizationType[kind]
    for name, shape in (matrices | vectors).items():
        numbers = (random.standard_normal(shape) / 5).astype(np.float32)
        if f"{name}.weight" in missing:
            continue
        if kind == "F32" or name in vectors or name.endswith("ffn_gate_inp"):
            writer.add_tensor(f"{name}.weight", numbers)
        else:
            writer.add_tensor(f"{name}.weight", gguf.quantize(numbers, own), raw_dtype=own)
    _finish(writer)
    return path


def write_gguf_of_oss(path, kind="Q8_0", experts="MXFP4", *, damage=lambda tensors: None, changes=None, **settings):
    """Writes a gpt_oss of two small layers as llama.cpp does, its matrices in the one format and its experts in the other;
    returns the model of the file's exact numbers.

    damage: changes the tensors before they are written. changes: of the file's numbers beside tensors; None leaves one out.
    settings: of the config.
    """
    rotation = dict(
        rope_type="yarn", rope_theta=20000.0, factor=8.0, original_max_position_embeddings=64, truncate=False
    )
    shape = dict(
        hidden_size=64, intermediate_size=96, num_local_experts=4, num_experts_per_tok=2, vocab_size=VOCABULARY
    )
    shape |= dict(sharpness=2.0, max_position_embeddings=512, rope_parameters=rotation)
    model = small_model("gpt_oss", **(shape | settings))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_(0, 0.5)
    config, tensors = model.config, {}
    for name, parameter in model.named_parameters():
        for part, numbers in _oss_parts(name, parameter).items():
            tensors[part] = _rounded(part, numbers, experts if "_exps.weight" in part else kind)
        parameter.copy_(_oss_joined(name, {part: numbers for part, (numbers, _, _) in tensors.items()}))
    damage(tensors)
    keys = {
        "context_length": 512, "block_count": 2, "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size, "expert_feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim, "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps, "attention.sliding_window": config.sliding_window,
        "expert_count": config.num_local_experts, "expert_used_count": config.num_experts_per_tok,
        "rope.freq_base": rotation["rope_theta"], "rope.scaling.type": "yarn", "rope.scaling.factor": rotation["factor"],
        "rope.scaling.original_context_length": rotation["original_max_position_embeddings"],
    }  # fmt: skip
    writer = gguf.GGUFWriter(path, "gpt-oss")
    writer.add_name("tiny")
    _add_numbers(writer, keys | (changes or {}))
    _add_tokens(writer, VOCABULARY)
    for name, (_, stored, own) in tensors.items():
        writer.add_tensor(name, stored, raw_dtype=own)
    _finish(writer)
    return model


_OSS = {
    "model.embed_tokens": "token_embd", "lm_head": "output", "model.norm": "output_norm", "model.layers.": "blk.",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm", "self_attn.sinks": "attn_sinks.weight",
    "self_attn.o_proj": "attn_output", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "mlp.router": "ffn_gate_inp", "mlp.experts.down_proj_bias": "ffn_down_exps.bias",
    "mlp.experts.gate_up_proj_bias": "ffn_{}_exps.bias", "mlp.experts.down_proj": "ffn_down_exps.weight",
    "mlp.experts.gate_up_proj": "ffn_{}_exps.weight",
}  # fmt: skip


def _oss_name(name):
    for theirs, ours in _OSS.items():
        name = name.replace(theirs, ours)
    return name


def _oss_parts(name, numbers):
    """A tensor of the model as those of the file: gates and ups, which take turns, apart; experts with outputs first."""
    place, turned = _oss_name(name), numbers.mT if name.endswith(("gate_up_proj", "down_proj")) else numbers
    if "{}" not in place:
        return {place: turned}
    return {place.format("gate"): turned[:, ::2], place.format("up"): turned[:, 1::2]}


def _oss_joined(name, tensors):
    """A tensor of the model, of those of the file."""
    place = _oss_name(name)
    whole = (
        torch.stack([tensors[place.format(part)] for part in ("gate", "up")], 2).flatten(1, 2)
        if "{}" in place
        else tensors[place]
    )
    return whole.mT if name.endswith(("gate_up_proj", "down_proj")) else whole


def _rounded(name, numbers, kind):
    """The numbers that a file has for these, what it has, and the format."""
    plain = numbers.ndim == 1 or name.endswith(".bias") or "ffn_gate_inp" in name
    own = gguf.GGMLQuantizationType["F32" if plain else kind]
    stored = gguf.quantize(np.ascontiguousarray(numbers.float().numpy()), own)
    return torch.from_numpy(np.array(gguf.dequantize(stored, own), np.float32)), stored, own


def qwen35_files(folder, family, kind):
    """Writes a model with an MTP layer as a folder and, with the same numbers, as a GGUF file -> the file, and the layer in
    plain PyTorch."""
    rotation = dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5, mrope_section=[2, 1, 1])
    target, plain = model_with_mtp(folder / "model", family, vocab_size=VOCABULARY, rope_parameters=rotation)
    file, weights = folder / "tiny.gguf", folder / "model/model.safetensors"
    stored = write_gguf_of_qwen35(file, target.config, load_file(weights), kind)
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, weights, {"format": "pt"})
    return file, plain


def write_gguf_of_qwen35(path, config, tensors, kind):
    """Writes a Qwen 3.5 as llama.cpp does, whose checkpoint has these tensors, of its MTP layers too; returns the tensors that
    the file has, by their names in the checkpoint. As many heads of keys as of values: these keep their order."""
    layers, found = config.num_hidden_layers, {}
    has_experts = hasattr(config, "num_experts")
    writer = gguf.GGUFWriter(path, "qwen35moe" if has_experts else "qwen35")
    prefix = writer.arch
    writer.add_name("tiny")
    writer.add_context_length(512)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(layers + 1)
    writer.add_uint32(f"{prefix}.nextn_predict_layers", 1)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(int(config.head_dim * config.rope_parameters["partial_rotary_factor"]))
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_sections([*config.rope_parameters["mrope_section"], 0])
    writer.add_uint32(f"{prefix}.full_attention_interval", layers)
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    if has_experts:
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    else:
        writer.add_feed_forward_length(config.intermediate_size)
    _add_tokens(writer, config.vocab_size)
    own = gguf.GGMLQuantizationType[kind]
    for name, tensor in _with_experts_together(tensors).items():
        numbers, placed = tensor.float().numpy(), _qwen35_name(name, layers)
        if name.endswith("norm.weight") or "pre_fc_norm" in name:
            numbers = numbers + (not name.endswith("linear_attn.norm.weight"))
        elif name.endswith("A_log"):
            numbers = -np.exp(numbers)
        elif "conv1d" in name:
            numbers = numbers[:, 0]
        parts = {placed: numbers}
        if name.endswith("gate_up_proj"):
            parts = dict(zip(("ffn_gate_exps", "ffn_up_exps"), np.split(numbers, 2, 1), strict=True))
            parts = {f"{placed}.{part}.weight": np.ascontiguousarray(each) for part, each in parts.items()}
        stored = []
        for place, each in parts.items():
            if kind == "F32" or each.ndim < 2 or "conv1d" in name or "gate_inp" in place:
                writer.add_tensor(place, each.astype(np.float32))
                stored.append(tensor.float())
            else:
                codes = gguf.quantize(each, own)
                writer.add_tensor(place, codes, raw_dtype=own)
                stored.append(torch.from_numpy(gguf.dequantize(codes, own)))
        found[name] = torch.cat(stored, 1) if len(stored) > 1 and kind != "F32" else stored[0]
    _finish(writer)
    return found


_QWEN35 = {
    "model.embed_tokens.weight": "token_embd.weight", "lm_head.weight": "output.weight",
    "model.norm.weight": "output_norm.weight",
    "mtp.fc": "blk.{mtp}.nextn.eh_proj", "mtp.pre_fc_norm_embedding": "blk.{mtp}.nextn.enorm",
    "mtp.pre_fc_norm_hidden": "blk.{mtp}.nextn.hnorm", "mtp.norm": "blk.{mtp}.nextn.shared_head_norm",
    "mtp.layers.0.": "blk.{mtp}.", "model.layers.": "blk.", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "post_attention_norm", "input_layernorm": "attn_norm",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp", "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp", "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.experts.down_proj": "ffn_down_exps.weight", ".mlp.experts.gate_up_proj": "", "mlp.gate.": "ffn_gate_inp.",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.conv1d": "ssm_conv1d", "linear_attn.norm": "ssm_norm", "linear_attn.out_proj": "ssm_out",
    "linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias",
}  # fmt: skip


def _with_experts_together(tensors):
    joined, experts = {}, {}
    for name, tensor in tensors.items():
        place, has_experts, rest = name.partition(".experts.")
        if has_experts and rest[0].isdigit():
            number, part, _ = rest.split(".")
            experts.setdefault(f"{place}.experts.", {})[part, int(number)] = tensor
        else:
            joined[name] = tensor
    for place, parts in experts.items():
        gate, up, down = (
            torch.stack([parts[f"{part}_proj", i] for i in range(len(parts) // 3)]) for part in ("gate", "up", "down")
        )
        joined |= {f"{place}gate_up_proj": torch.cat((gate, up), 1), f"{place}down_proj": down}
    return joined


def _qwen35_name(name, layers):
    for theirs, ours in _QWEN35.items():
        name = name.replace(theirs, ours.format(mtp=layers))
    return name


def _add_numbers(writer, numbers):
    for name, value in numbers.items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}.get(type(value))
        if add is not None:
            add(f"{writer.arch}.{name}", value)


def _finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokens(writer, count):
    """A token per byte and two more."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*bytes_to_unicode().values(), "ab", "<end>"])
    writer.add_token_types([1] * (count - 1) + [3])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(count - 1)
    writer.add_eos_token_id(count - 1)
