"""A model's keys and values while one batch is decoded, and its calls."""
