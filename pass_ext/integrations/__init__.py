"""pass_ext inside other libraries: one module per library, which ``import pass_ext`` does not load."""
