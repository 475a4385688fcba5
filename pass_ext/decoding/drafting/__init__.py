"""Candidates for the next step: from look-ahead slots, a draft model, or the text so far."""
