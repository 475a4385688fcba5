"""Grammars: the interface of one, its place in a text, and its masks for the candidates of a tree."""
