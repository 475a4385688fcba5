"""The loop that decodes one batch, and its three kinds of step."""
