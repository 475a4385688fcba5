"""The caller's side of a batch: prompts, logits processors, streamers and stopping criteria."""
