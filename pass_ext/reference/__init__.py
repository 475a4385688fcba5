"""The executable specification: every op in plain PyTorch, readable before fast. Tests compare all devices with it."""

from pass_ext.reference.lookahead import lookahead_embed

__all__ = ["lookahead_embed"]
