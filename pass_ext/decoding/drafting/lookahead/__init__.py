"""Candidates from look-ahead slots: what the slots offer, trees filled from it, and the drafter of ``PaSS``."""
