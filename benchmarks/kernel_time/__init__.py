"""Estimates the times of launches at batch 1 from their critical paths on the emulator, and measures them on a GPU."""
