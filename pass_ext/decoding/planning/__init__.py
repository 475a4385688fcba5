"""Plans the tree of a step that gives the most tokens per second, from hit rates and measured step times."""
