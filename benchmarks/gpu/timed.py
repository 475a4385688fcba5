"""Times the steps on which a switch may tell, by the library that is imported: `python -m benchmarks.gpu.timed NAME`.

Microseconds of a call in a CUDA graph of 64, inputs in L2, as `warm` of benchmarks.kernel_time.on_gpu. NAME is what the
evidence calls the build.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator


def steps() -> Iterator[tuple[str, Callable[[], object]]]:
    """Name, call."""
    from benchmarks.gpu.profiled import ACCEPT, flat_accept, flat_draft, step
    from benchmarks.kernel_time.inputs import attention_calls, draft_calls, layer_calls

    for name, long in ACCEPT.items():
        yield f"accept, {name}", step("accept", long)
    yield "accept, rejection, 64 flat requests", flat_accept(64, rule="rejection")
    yield "draft, 1 flat row", flat_draft(1)
    for call in (*draft_calls(), *attention_calls(), *layer_calls()):
        yield f"{call.kind}, {call.name}", call.to("cuda").run


def main() -> int:
    """Entry point of `python -m benchmarks.gpu.timed`."""
    import torch

    from benchmarks.gpu.variants import check_imported
    from benchmarks.harness import evidence
    from benchmarks.kernel_time.on_gpu import CALLS, graph_time

    check_imported()
    with torch.inference_mode():
        for name, call in steps():
            fact = {"build": sys.argv[1], "step": name, "us": round(1e6 * graph_time(call, [()], CALLS), 2)}
            print(json.dumps(fact), flush=True)
            evidence.add_here("timed", **fact)
    return 0


if __name__ == "__main__":
    sys.exit(main())
