"""``train-draft``: the adapter that helps a model's first layers to draft for it."""
