"""One module per column: the typed wrapper of each op, its fake kernel, and its autograd formula."""
