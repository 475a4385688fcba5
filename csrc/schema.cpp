// The operators of pass_ext, as torch sees them: torch.ops.pass_ext.<name>. The only STABLE_TORCH_LIBRARY block.
// TORCH_EXTENSION_NAME is the namespace: pass_ext in setup.py, another for each build on the Hugging Face Hub.
// cpu/*.cpp (in this library) and cuda/*.cu (in _C_cuda.so) implement them; fake kernels and autograd are in
// pass_ext/ops/*.py. Meanings and shapes: the docstrings there.
#include <torch/csrc/stable/library.h>

// The namespace, for pass_ext/_library.
extern "C" __attribute__((visibility("default"))) const char* pass_ext_namespace() {
  return C10_STRINGIZE(TORCH_EXTENSION_NAME);
}

STABLE_TORCH_LIBRARY(TORCH_EXTENSION_NAME, library) {
  // lookahead
  library.def("lookahead_embed(Tensor ids, Tensor table, Tensor lookahead) -> Tensor");
  library.def("lookahead_embed_backward(Tensor grad, Tensor ids, int rows, bool slots, ScalarType dtype) -> Tensor");

  // adapter
  library.def("adapter_rows_(Tensor(a!) out, Tensor x, Tensor ids, Tensor down, Tensor up, float scale) -> ()");

  // tree
  library.def("tree_prepare(Tensor parents, Tensor cu_nodes, SymInt max_nodes) -> (Tensor visible, Tensor depths)");
  library.def(
      "tree_mask(Tensor visible, Tensor cu_nodes, SymInt max_nodes, Tensor prefix_lens, SymInt kv_len, ScalarType "
      "dtype) "
      "-> Tensor");

  // attention
  library.def(
      "attention_tree(Tensor q, Tensor k_cache, Tensor v_cache, Tensor prefix_lens, Tensor cu_nodes, Tensor visible, "
      "SymInt max_nodes, Tensor? k_new, Tensor? v_new, Tensor? block_table, Tensor? depths, float? scale, float "
      "softcap, int window, Tensor? sinks, int chunk, Tensor? key_lists, bool batch_invariant) -> (Tensor out, Tensor "
      "lse)");
  library.def(
      "attention_merge(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, Tensor? sinks) -> (Tensor out, Tensor "
      "lse)");

  // cache. Without new rows the list is empty rather than optional: the dispatcher does not look into an optional list,
  // and a tensor on another device, or a negated view, would reach the kernel as it is.
  library.def(
      "cache_commit_(Tensor(a!)[] caches, Tensor prefix_lens, Tensor cu_nodes, Tensor path, Tensor num_accepted, "
      "Tensor[] new, Tensor? block_table) -> ()");

  // quantize
  library.def("quantize_rows(Tensor rows, ScalarType dtype) -> Tensor");

  // draft
  library.def(
      "draft_sample(Tensor logits, int k, int mode, Tensor? temperature, Tensor? top_k, Tensor? top_p, Tensor? min_p, "
      "Tensor? allowed, Tensor? seeds, Tensor? positions, Tensor? nodes) -> (Tensor tokens, Tensor logprobs)");

  // accept. logprobs: -1: none, and the list is empty; n: with the n most probable tokens beside each emitted one.
  // support: 0: none, and the list is empty; n: with room for n ids of each emitted token's support.
  library.def(
      "accept_tree(Tensor target_logits, Tensor tokens, Tensor? parents, Tensor cu_nodes, int max_depth, int rule, "
      "Tensor? draft_logits, Tensor? draft_rows, Tensor? temperature, Tensor? top_k, Tensor? top_p, Tensor? min_p, "
      "Tensor? draft_temperature, Tensor? draft_top_k, Tensor? draft_top_p, Tensor? draft_min_p, Tensor? allowed, "
      "Tensor? draft_allowed, Tensor? seeds, Tensor? positions, float threshold, float alpha, int logprobs, "
      "int support) -> (Tensor emitted, Tensor path, Tensor num_accepted, Tensor status, Tensor[] logprobs, "
      "Tensor[] support)");
  library.def(
      "accept_chain(Tensor target_logits, Tensor draft_tokens, int rule, Tensor? draft_logits, Tensor? temperature, "
      "Tensor? top_k, Tensor? top_p, Tensor? min_p, Tensor? draft_temperature, Tensor? draft_top_k, "
      "Tensor? draft_top_p, Tensor? draft_min_p, Tensor? allowed, Tensor? draft_allowed, Tensor? seeds, "
      "Tensor? positions, float threshold, float alpha, int logprobs, "
      "int support) -> (Tensor emitted, Tensor path, Tensor num_accepted, Tensor status, Tensor[] logprobs, "
      "Tensor[] support)");

  // next
  library.def(
      "next_tree_(Tensor(a!) rows, Tensor(b!) parents, Tensor(c!) lengths, Tensor(d!) prefix_lens, Tensor(e!) report, "
      "Tensor limits, Tensor emitted, Tensor path, Tensor num_accepted, Tensor status, Tensor? rates, Tensor? costs, "
      "Tensor? offered, Tensor? scores, int first, Tensor? left, Tensor? right, Tensor(f!)? text, "
      "Tensor? temperature, Tensor? top_k, Tensor? top_p, Tensor? min_p, Tensor? seeds) -> ()");

  // recall
  library.def("recall_scores(Tensor tokens, Tensor contexts, Tensor requests, Tensor text, Tensor lengths) -> Tensor");

  // shard
  library.def(
      "shard_local(Tensor target_logits, Tensor tokens, Tensor parents, Tensor cu_nodes, int rule, "
      "Tensor? draft_logits, Tensor? draft_rows, Tensor? allowed, Tensor? draft_allowed, Tensor? seeds, "
      "int vocab_start, int slices, int round, Tensor? state) -> Tensor");
  library.def(
      "shard_combine(Tensor target_logits, Tensor tokens, Tensor parents, Tensor cu_nodes, int max_depth, int rule, "
      "Tensor? draft_logits, Tensor? draft_rows, Tensor? temperature, Tensor? top_k, Tensor? top_p, Tensor? min_p, "
      "Tensor? draft_temperature, Tensor? draft_top_k, Tensor? draft_top_p, Tensor? draft_min_p, Tensor? seeds, "
      "Tensor? positions, int vocab_size, int round, int next, Tensor answers, Tensor? state) "
      "-> (Tensor state, Tensor emitted, Tensor path, Tensor num_accepted, Tensor status)");
  library.def(
      "shard_best(Tensor logits, Tensor state, int k, int mode, Tensor? temperature, Tensor? allowed, Tensor? seeds, "
      "Tensor? positions, Tensor? nodes, int vocab_start) -> Tensor");

  // linear
  library.def("linear_rows(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  library.def("linear_packed(Tensor x, Tensor weight, Tensor? bias, int outputs) -> Tensor");

  // step
  library.def(
      "step_rms_norm(Tensor x, Tensor weight, Tensor? residual, float eps, int form) -> (Tensor out, Tensor sum)");
  library.def("step_rotary(Tensor q, Tensor k, Tensor cos, Tensor sin) -> (Tensor q_rotated, Tensor k_rotated)");
  library.def("step_gate(Tensor gate, Tensor? up, int activation) -> Tensor");

  // layer
  library.def(
      "layer_before_attention(Tensor x, Tensor? input_norm, Tensor q_weight, Tensor? q_bias, Tensor k_weight, "
      "Tensor? k_bias, Tensor v_weight, Tensor? v_bias, Tensor? q_norm, Tensor? k_norm, Tensor? cos, Tensor? sin, "
      "int head_dim, float eps, int form, Tensor? ids, Tensor[] adapters, int adapted, float adapter_scale) -> (Tensor "
      "q, "
      "Tensor k, Tensor v)");
  library.def(
      "layer_after_attention(Tensor attended, Tensor residual, Tensor o_weight, Tensor? o_bias, Tensor? "
      "attention_norm, "
      "Tensor? mlp_norm, Tensor gate_weight, Tensor? gate_bias, Tensor up_weight, Tensor? up_bias, Tensor down_weight, "
      "Tensor? down_bias, Tensor? output_norm, float eps, int form, int activation, float scale, Tensor? ids, Tensor[] "
      "adapters, int adapted, float adapter_scale) -> Tensor");
  library.def("layer_pack(Tensor[] weights, int parts, int head_dim) -> Tensor");
  library.def(
      "layer_stack(Tensor x, Tensor? first_input, Tensor[] weights, int parts, Tensor[] caches, Tensor prefix_lens, "
      "Tensor cu_nodes, Tensor visible, int max_nodes, Tensor? depths, Tensor? cos, Tensor? sin, Tensor? positions, "
      "int[] rotates, int[] windows, Tensor? ids, Tensor? deep, Tensor[] adapters, int adapted, float adapter_scale, "
      "Tensor? final_norm, Tensor? head, Tensor? wanted, int[] taps, int head_dim, float eps, int form, "
      "int activation, float scale, float attention_scale, float softcap) "
      "-> (Tensor out, Tensor new_rows, Tensor states)");

  // recurrent
  library.def(
      "recurrent_tree(Tensor q, Tensor k, Tensor v, Tensor log_decay, Tensor? decay_rates, Tensor? beta, Tensor "
      "states, Tensor? state_index, Tensor parents, Tensor cu_nodes, int form, float scale) -> (Tensor out, Tensor u)");

  // convolution
  library.def(
      "convolution_tree(Tensor x, Tensor weight, Tensor? bias, Tensor states, Tensor? state_index, Tensor parents, "
      "Tensor cu_nodes, bool silu) -> Tensor");

  // state. `updates` holds the tensors of each state one after the other, `parts` how many each has: k, u, log_decay
  // and perhaps decay_rates of a recurrence, x of a convolution.
  library.def(
      "state_commit_(Tensor(a!)[] states, Tensor[] updates, int[] parts, Tensor cu_nodes, Tensor path, Tensor "
      "num_accepted, Tensor? state_index) -> ()");
}
