"""The accept step of pass_ext in the place of vLLM's sampler and rejection sampler."""
