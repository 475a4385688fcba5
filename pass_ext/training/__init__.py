"""Training beside a frozen model: look-ahead embeddings, exit adapters, decision models.

Each command has a folder: ``command`` (its options), ``pipeline`` (a whole run, and its card), ``loop`` (the loss of a step)
and ``evaluation`` (on held-out text). ``common`` is their skeleton. Imports nothing by itself.
"""
