"""Texts that follow a grammar: valid, the same with and without drafts, in fewer calls."""
