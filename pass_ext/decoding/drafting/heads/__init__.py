"""Heads: small networks, trained for one model, that draft from the states which that model has computed for its text."""
