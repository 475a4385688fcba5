"""Programs for whoever works on pass_ext: what docs/ shows, and what an op family still lacks."""
