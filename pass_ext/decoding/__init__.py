"""Decoding loops and what they need of a model."""
