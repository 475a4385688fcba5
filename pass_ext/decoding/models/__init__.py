"""Models as decoding calls them: a transformers model, its first layers, or any callable on packed rows."""
