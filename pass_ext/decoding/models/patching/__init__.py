"""What is changed in a transformers model while a generation runs, and restored afterwards."""
