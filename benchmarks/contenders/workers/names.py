"""The names of the contenders of this project's environment."""

PLAIN, NGRAM, PASS, JOINED = "Plain", "NGram", "PaSS", "PaSS + NGram"
PLAIN_FLOAT = "Plain, float32"
OURS = (PLAIN, NGRAM, PASS, JOINED, PLAIN_FLOAT)
TRANSFORMERS, GENERATE = "transformers", "generate"
