"""Weights in 4 or 8 bits, as files have them: the packed form, the formats of GGUF files, and the layers of a model that hold
them."""
