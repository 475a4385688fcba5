"""Decoding with more than one token per model call: methods, sessions, plans of a step, and what came of them."""
