"""Disassembles the built CUDA library and writes its page: registers, stack, instructions, loads in flight.

`python -m benchmarks.kernel_code` measures (about a minute), saves benchmarks/results/kernel-code/kernel-code.json and
writes the page; `--render` writes it from the saved result, `--check` compares it, `--library FILE` prints the tables of
another .so, .o or .cubin.
"""

import argparse
import sys
from pathlib import Path

from benchmarks import ROOT
from benchmarks.kernel_code import page
from benchmarks.kernel_code.disassembler import missing_tools
from benchmarks.kernel_code.measure import measure

LIBRARY = Path("pass_ext/_C_cuda.so")


def main() -> int:
    """Entry point of `python -m benchmarks.kernel_code`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--render", action="store_true", help="measure nothing")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is out of date")
    parser.add_argument("--library", type=Path, help="print the tables of this library and write nothing")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository")
    options = parser.parse_args()
    target = options.root / page.PAGE
    if options.check:
        if target.exists() and target.read_text() == page.render(page.read(options.root)):
            return 0
        print(f"{page.PAGE} does not match the result: run python -m benchmarks.kernel_code --render", file=sys.stderr)
        return 1
    if not options.render:
        library = options.library or options.root / LIBRARY
        if not library.exists():
            print(f"{library} does not exist: build with nvcc, or name a library", file=sys.stderr)
            return 1
        if missing := missing_tools():
            print(f"missing: {', '.join(missing)}; pip install 'pass_ext[dev]', and install binutils", file=sys.stderr)
            return 1
        result = measure(library)
        if options.library:
            print(page.render(result))
            return 0
        page.save(result, options.root)
    target.write_text(page.render(page.read(options.root)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
