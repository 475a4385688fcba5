"""What the three training commands share: texts, samples, windows, losses, records."""
