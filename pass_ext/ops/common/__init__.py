"""Parts of the wrappers that several op families share."""
