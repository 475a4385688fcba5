"""The vLLM versions whose functions pass_ext replaces, and the log of its plugin."""

import logging

TESTED = ("0.32.0", "0.33.0")
"""Runner V1 runs in the tests with the first. In the others the functions that are replaced or called were compared with it."""

LOG = logging.getLogger("vllm.pass_ext")  # vLLM shows the loggers below its own name only
