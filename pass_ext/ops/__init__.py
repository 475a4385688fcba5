"""One module per op family: the typed wrapper of each op, its fake kernel, and its autograd formula."""
