"""The KV cache of one batch, and the model's calls that extend it."""
