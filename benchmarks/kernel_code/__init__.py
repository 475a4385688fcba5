"""Machine code of the compiled kernels: registers, stack, instructions and loads in flight, read without a GPU."""
