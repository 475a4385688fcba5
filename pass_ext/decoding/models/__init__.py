"""The models that decoding calls: a transformers model, its first layers, or any callable on packed rows."""
