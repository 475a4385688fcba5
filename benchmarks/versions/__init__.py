"""Two versions of pass_ext beside each other: the same texts, and how fast."""
