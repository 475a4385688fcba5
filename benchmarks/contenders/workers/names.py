"""The names of the contenders of this project's environment."""

PLAIN, NGRAM, PASS, ADAPTED, JOINED = "Plain", "NGram", "PaSS", "PaSS, adapters", "PaSS + NGram"
PLAIN_FLOAT = "Plain, float32"
OURS = (PLAIN, NGRAM, PASS, ADAPTED, JOINED, PLAIN_FLOAT)
TRANSFORMERS, GENERATE = "transformers", "generate"
