"""Estimated times of launches at batch 1, from their critical paths on the emulator: docs/kernel-time.md. No GPU is used."""
