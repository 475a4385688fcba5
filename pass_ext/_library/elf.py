"""Finds damage in a shared library before the loader opens it: loading a truncated one ends the process (SIGBUS)."""

import platform
import struct
from pathlib import Path

_MACHINES = {3: "i686", 40: "arm", 62: "x86_64", 183: "aarch64", 243: "riscv64"}


def damage_of(path: Path) -> str:
    """Describes the damage, such as "is empty"; '' for a whole library for this machine."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header = file.read(64)
    if not header:
        return "is empty"
    if not header.startswith(b"\x7fELF"):
        return "is no shared library"
    if size < 64:
        return f"is cut short: it has {size} bytes"
    machine = _MACHINES.get(struct.unpack_from("<H", header, 18)[0], "another processor")
    if machine != platform.machine():
        return f"is for {machine}, and this machine is {platform.machine()}"
    (sections,) = struct.unpack_from("<Q", header, 40)  # the table of sections is what a linker writes last
    entry_bytes, entries = struct.unpack_from("<HH", header, 58)
    whole = sections + entry_bytes * entries
    return f"is cut short: it has {size} of {whole} bytes" if size < whole else ""
