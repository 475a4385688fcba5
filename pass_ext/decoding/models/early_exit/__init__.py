"""A model's first layers as its draft model."""
