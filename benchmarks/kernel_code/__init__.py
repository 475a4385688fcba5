"""Kernel code without a GPU: what each compiled kernel takes and does, read from its machine code."""
