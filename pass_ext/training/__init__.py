"""Training beside a frozen model: look-ahead embeddings, exit adapters, decision models.

Each command has a folder: ``command`` (its options), ``pipeline`` (a whole run), ``loop`` (the loss of a step), ``evaluation``
(on held-out text) and ``record`` (its card). ``common`` is their skeleton. Imports nothing by itself.
"""
