"""Training of look-ahead embeddings beside a frozen model; ``python -m pass_ext train`` is ``command.py``.

A step: ``windows`` (what to read) → ``slots`` (text once, all look-ahead groups once) → ``loss`` → Adam in ``loop``;
``evaluation`` measures hit rates on held-out text, ``record`` writes the card. Imports nothing by itself.
"""
