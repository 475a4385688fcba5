"""The skeleton of the three training commands.

options → run (model, texts) → [a command's own data] → trainer, steps → [its evaluation] → record (file, card, picture)
"""
