"""What the references share: distributions and random numbers."""
