"""What the caller gave with a batch: prompts, logits processors, streamers and stopping criteria."""
