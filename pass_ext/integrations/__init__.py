"""Where pass_ext meets other libraries: one module per library, imported only by those who use it."""
