"""Decoding loops on the ops: ``generate``, its methods, and what they are made of."""
