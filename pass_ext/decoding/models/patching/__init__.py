"""Patches of a transformers model while a generation runs, restored afterwards."""
