"""``answer``: the loop of a worker: a JSON line in, a JSON line out, in the environment of any contender.

    {"prompt": [ids], "tokens": n}  ->  {"seconds": s, "tokens": [ids], "calls": n, "drafted": n, "accepted": n}

Imports nothing but the standard library. What libraries print goes to the log, because the pipe carries answers alone.
"""

import json
import os
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any

Answer = dict[str, Any]


def answer(start: Callable[[dict[str, Any]], tuple[Callable[[Answer], Answer], Answer]]) -> None:
    """Runs a worker until its input ends.

    Args:
        start: takes the options on the command line, a JSON object; returns what answers a request, and facts about the
            contender, which are the first line out.
    """
    with os.fdopen(os.dup(1), "w", buffering=1) as pipe:
        os.dup2(2, 1)
        write, facts = start(json.loads(sys.argv[1]))
        pipe.write(json.dumps(facts) + "\n")
        for line in sys.stdin:
            pipe.write(json.dumps(write(json.loads(line))) + "\n")


def versions(*packages: str) -> dict[str, str]:
    """The versions of these packages in this environment."""
    return {name: metadata.version(name) for name in packages}
