"""Mutation testing: small faults are planted in a copy of the tree, one at a time, and the tests must notice each.

``faults`` finds what can be planted, ``table`` says which tests must notice it, ``trial`` plants it and runs them. ``python -m
tests.mutation`` runs a seeded choice; see CONTRIBUTING.md.
"""
