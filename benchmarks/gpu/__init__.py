"""One run on a machine with a GPU, whose evidence survives whatever ends the run: ``python -m benchmarks.gpu``."""
