"""Samples of one prompt that draft for each other: `python -m benchmarks.samples`."""
