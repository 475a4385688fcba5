// Every operator of pass_ext, as torch sees it: torch.ops.pass_ext.<name>. The only STABLE_TORCH_LIBRARY block.
// Backends implement these in cpu/*.cpp (in this library) and cuda/*.cu (in _C_cuda.so); fake kernels and autograd are
// in pass_ext/ops/*.py. Meanings and shapes: the docstrings there.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(pass_ext, library) {
  // lookahead
  library.def("lookahead_embed(Tensor ids, Tensor table, Tensor lookahead) -> Tensor");
  library.def("lookahead_embed_backward(Tensor grad, Tensor ids, int rows, bool slots, ScalarType dtype) -> Tensor");
}
