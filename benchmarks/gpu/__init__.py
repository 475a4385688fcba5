"""One run of everything on a machine with a GPU, with evidence that survives a killed run: ``python -m benchmarks.gpu``."""
