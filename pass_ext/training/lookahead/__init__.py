"""``train``: look-ahead embeddings for a model."""
