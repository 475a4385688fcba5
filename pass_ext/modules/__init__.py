"""Trained parameters, and the files that hold them."""
