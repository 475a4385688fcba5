"""``generate``: decodes with the installed package pass_ext, which holds all of the code; README.md lists the arguments."""

from pass_ext.integrations.transformers.hub_generate import generate

__all__ = ["generate"]
