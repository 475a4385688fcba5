"""Renders the part of decoding.md with a draft model: a table per setting, and one of published gains."""

from collections.abc import Callable, Iterable, Sequence

from benchmarks.decoding.drafts import (
    BRANCHING,
    DEEPER,
    LONGEST_BRANCH,
    MCSD,
    MODEL,
    SLICE,
    SPECULATIVE,
    TARGET,
    confident,
)
from benchmarks.decoding.tables import Section, number, optional, speed_up
from benchmarks.harness.cases import Row

TITLE = "With a draft model"
HEADS = (
    "", "distribution of the text",
    "acceptance rate", "acceptance length", "tokens per step", "planned", "draft calls per step",
    "drafting, ms per step", "tokens/s", "speed-up", "same text",
)  # fmt: skip


def draft_sections(result: Row) -> list[Section]:
    """The tables of a result; none for a result without that part."""
    rows = result.get("drafts") or []
    settings = list(dict.fromkeys(row["setting"] for row in rows))
    shown = [_race(result["draft"], [row for row in rows if row["setting"] == setting]) for setting in settings]
    if any(row["kind"].startswith((SPECULATIVE, MCSD)) for row in rows):
        shown.append(_published(result, rows, settings))
    return shown


def _race(draft: Row, rows: Sequence[Row]) -> Section:
    setting, greedy = rows[0]["setting"], rows[0]["setting"].startswith("greedy")
    table = [
        [
            row["contender"],
            row["exactness"],
            "–" if row["acceptance_rate"] is None else f"{row['acceptance_rate']:.3f}",
            optional(row["mean_acceptance_length"]),
            f"{row['tokens_per_step']:.2f}",
            _planned(row),
            optional(row["draft_calls_per_step"] or None),
            optional(row.get("draft_ms_per_step")),
            number(row["tokens_per_second"]),
            speed_up(row),
            f"{row['equal_texts']} of {row['prompts']}" if row["comparable_texts"] else "–",
        ]
        for row in rows
    ]
    words = [f"On {rows[0]['prompts']} of the prompts above whose texts do not loop, {_in_turn(draft)}."]
    words.append(_words(greedy))
    words += [f"Without {part}: {reason}." for part, reason in draft["missing"].items()]
    return Section(f"{TITLE}: {setting}", " ".join(words), HEADS, table)


def _words(greedy: bool) -> str:
    if not greedy:
        return (
            "Columns and names as in the greedy table, with the rule in brackets. Only rule coupled writes the text of Plain "
            "for a seed, so the texts of other rules are not compared. *planned* expects greedy texts."
        )
    return (
        "*acceptance rate*, as published: accepted tokens of a step ÷ levels of the largest tree. *tokens per step*: without "
        "the call on the prompt. *planned*: the tokens per step that auto expected, and its candidates level by level. "
        "*drafting*: the time between two calls of the model to find candidates, measured apart, on one prompt. "
        f"{MCSD}: {_shape(BRANCHING)} candidates below each token, level by level. *{SLICE}*: up to {_shape(DEEPER)}; a row "
        f"goes on to the next level only while the draft's best token has a probability above {confident.threshold}. "
        f"*{MODEL}*: a trained model decides instead. *{TARGET}*, as published, rule {LONGEST_BRANCH}: the same tree, but "
        "its first level is drawn from the model's own distribution and always counts as accepted; the longest branch is "
        "kept, and the model adds no token after it. That is approximate: it changes the texts. The exact rules cannot add "
        "this step: their trees hang below a token that the model has already drawn."
    )


def _in_turn(draft: Row) -> str:
    names = ", ".join(f"{part} {name}" for part, name in draft["names"].items())
    rates = f"; hit rates for auto: {draft['hit_rates']}" if draft.get("hit_rates") else ""
    return f"in turn; {names or 'no draft model'}{rates}"


def _planned(row: Row) -> str:
    if "planned_tokens_per_step" not in row:
        return "–"
    levels = row["planned_levels"]
    return f"{row['planned_tokens_per_step']:.2f} ({'·'.join(map(str, levels)) if levels else 'plain'})"


def _shape(branching: Iterable[int]) -> str:
    return "·".join(map(str, branching))


# ---- published gains ----


def _published(result: Row, rows: Sequence[Row], settings: Sequence[str]) -> Section:
    chains = f"{SPECULATIVE}, chain"
    approximate = f"{MCSD} + {TARGET}"
    exact = f"{MCSD} + {SLICE}"
    device = "a GPU" if result["device"] == "cuda" else "a CPU"
    draft = result["draft"]["names"].get("draft model", "none")
    early = draft.startswith("exit:")
    models = f"{result['model']['name']} with draft {draft}{', its own first layers,' if early else ''} on {device}"

    def rate(row: Row) -> float:
        return row["acceptance_rate"] or 0.0

    def speed(row: Row) -> float:
        return row["speed_up"]

    def best(setting: str, kind: str, measure: Callable[[Row], float], base: str | None) -> str:
        """The largest gain of rows of a kind over the best row of the base, or over Plain where base is None."""
        ours = [row for row in rows if row["setting"] == setting and row["kind"].startswith(kind)]
        under = [row for row in rows if row["setting"] == setting and row["kind"] == base]
        least = max(map(measure, under), default=0.0)
        if not ours or (base is not None and least == 0):
            return "–"
        top = max(ours, key=measure)
        gain = f"{measure(top):.2f} ×" if base is None else f"{100 * (measure(top) / least - 1):+.0f} %"
        return f"{gain} ({top['contender']})"

    def line(
        what: str, published: str, kind: str, measure: Callable[[Row], float], base: str | None, how: str
    ) -> list[str]:
        return [what, published, *(best(setting, kind, measure, base) for setting in settings), how]

    table = [
        line(
            "speculative sampling over Plain: speed",
            "up to 2.46 ×",
            chains,
            speed,
            None,
            f"method and exactness: yes. Models: no; theirs is Chinchilla 70B with a 4B draft, ours {models}",
        ),
        line(
            "improved over plain MCSD: acceptance rate",
            "up to +164 % (first version)",
            approximate,
            rate,
            MCSD,
            "definition and selection: yes, both approximate; ours counts the first level, which cannot be rejected, so the "
            "rate rises without a faster text. Models: no",
        ),
        line(
            "improved over plain MCSD: speed",
            "up to +75 % (first version), +27.5 % (final)",
            approximate,
            speed,
            MCSD,
            f"selection: yes, both approximate. Models: no; the final version's are Llama-2-7B with a 68M draft, ours {models}",
        ),
        line(
            "the same steps with exact rules: acceptance rate",
            "none",
            exact,
            rate,
            MCSD,
            "no: published of the approximate form only. A deeper tree has more levels to divide by, so the rate may fall "
            "while tokens per step rise",
        ),
        line(
            "the same steps with exact rules: speed",
            "none",
            exact,
            speed,
            MCSD,
            "no: published of the approximate form only",
        ),
    ]
    words = (
        "Relative gains only. Ours: the best row of the tables above, with its name, over the best row of plain MCSD without "
        "replacement. *comparable*: what both measurements have in common, and what differs. Published: Chen et al. 2023 for "
        "speculative sampling, Lu et al. 2024, in two versions, for the improved multi-candidate form."
    )
    return Section("Beside published gains", words, ["", "published", *settings, "comparable"], table)
