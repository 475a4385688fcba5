"""Decoding loops on the ops: ``generate``, its methods, and their parts."""
