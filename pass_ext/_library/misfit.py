"""Says in a sentence why a sound library does not load here: another torch, an older Linux. Imported when that has happened."""

import platform
import re

OLDEST_TORCH = (2, 10)


def misfit(library: str, torch_version: str, words: str, rebuild: str) -> str:
    """The sentence for the loader's words; with words that are not known, these themselves."""
    numbers = re.match(r"(\d+)\.(\d+)", torch_version)
    if numbers and (int(numbers[1]), int(numbers[2])) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        return (
            f"pass_ext needs torch {oldest} or newer, and this is torch {torch_version}. "
            f"Run: pip install -U 'torch>={oldest}'"
        )
    if asked := re.search(r"version `(GLIBC|GLIBCXX|CXXABI|GCC)_([\d.]+)' not found", words):
        if asked[1] == "GLIBC":
            return f"{library} needs glibc {asked[2]}, and this Linux has {platform.libc_ver()[1]}. Build it here: {rebuild}"
        name = "libgcc" if asked[1] == "GCC" else "libstdc++"
        return (
            f"{library} needs a newer {name} (with {asked[1]}_{asked[2]}) than this Linux has. Build it here: {rebuild}"
        )
    if symbol := re.search(r"undefined symbol: ([^\s,]+)|Error relocating .*?: ([^\s:]+): symbol not found", words):
        missing = symbol[1] or symbol[2]
        return (
            f"{library} does not fit torch {torch_version}, which lacks {missing}. Build it for this torch: {rebuild}"
        )
    if absent := re.search(r"(\S+): cannot open shared object file", words):
        name = absent[1].rstrip(":")
        return f"{library} does not fit torch {torch_version}, which comes without {name}. Build it for this torch: {rebuild}"
    return f"{library} does not load with torch {torch_version}: {words}"
