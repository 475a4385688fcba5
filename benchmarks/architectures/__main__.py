"""The causal language models of transformers that pass_ext decodes: each tiny and random, on ragged prompts, by every method.

    reference    the text of transformers' own greedy `generate` for the same prompts, left-padded
    same         the same tokens; where transformers' logits of both tokens are closer than TIE, both are right
    refused      a sentence that names the model and the reason

`python -m benchmarks.architectures [name …]` judges them for some minutes and writes
benchmarks/results/architectures/architectures.json and its README.md; with names, only these lines change. `--render` writes
the page from that file, `--check` compares it.
"""

import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import pass_ext
from benchmarks.architectures.models import NOT_TRIED, VOCABULARY, WINDOW, model_types, tiny_model
from benchmarks.architectures.table import command, quiet
from benchmarks.harness.markdown import table
from benchmarks.harness.template import page
from pass_ext import EarlyExitDraft, MultiCandidate, NGram, PaSS, Plain, Speculative, Tree
from pass_ext.integrations import transformers as hooks

RESULT, PAGE = (
    Path("benchmarks/results/architectures/architectures.json"),
    Path("benchmarks/results/architectures/README.md"),
)
LENGTHS = (14, 2, 9, 5)  # of the prompts
NEW, CACHED = 10, 6  # new tokens; of these, tokens that custom_generate writes before transformers continues
TIE = 1e-4
LOGITS = 1e-3  # the most difference of logits in float32, over their spread
SEEDS = [11, 12, 13, 14]
WAYS = ("generate", "custom_generate", "attn_implementation")
SAME = "same"
REFERENCES = (
    "batch",
    "alone",
    "without cache",
)  # a later one counts where transformers' own text differs from the earlier
DRAWN = ("Plain", "PaSS", "MultiCandidate")  # the methods that are sampled too


def prompts() -> tuple[Tensor, Tensor]:
    """Prompt ids and attention mask, padded on the left."""
    ids = torch.randint(3, VOCABULARY - 10, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(max(LENGTHS)) >= max(LENGTHS) - torch.tensor(LENGTHS)[:, None]).long()
    return ids * mask, mask


class Texts:
    """transformers' texts, and comparisons of other texts with them.

    Attributes:
        expected: ``[B, NEW]``, the reference of the last comparison.
        references: those of ``REFERENCES`` that some text was equal to.
        ties: rows that left the expected text where both tokens are right.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.ids, self.mask = prompts()
        self._known = {REFERENCES[0]: self._written(self.ids, self.mask)}
        self.expected = self.batch
        self.references: set[str] = set()
        self.ties = 0

    @property
    def batch(self) -> Tensor:
        """The text for all prompts at once, padded."""
        return self._known[REFERENCES[0]]

    def _written(self, ids: Tensor, mask: Tensor, **options: Any) -> Tensor:
        options.update(max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
        return self._model.generate(input_ids=ids, attention_mask=mask, **options)[:, ids.shape[1] :]

    def _reference(self, name: str) -> Tensor:
        if name not in self._known:
            options = {} if name == "alone" else {"use_cache": False}
            rows = [
                (ids[tokens][None], mask[tokens][None])
                for ids, mask, tokens in zip(self.ids, self.mask, self.mask.bool(), strict=True)
            ]
            self._known[name] = torch.cat([self._written(ids, mask, **options) for ids, mask in rows])
        return self._known[name]

    def difference(self, got: Tensor) -> str | None:
        """The first difference of new tokens ``[B, NEW]`` from the texts; None if a reference equals them but for ties."""
        wrong = []
        for name in REFERENCES:
            self.expected = self._reference(name)
            wrong.append(self._difference(got))
            if wrong[-1] is None:
                self.references.add(name)
                return None
        self.expected = self.batch
        return wrong[0]

    def _difference(self, got: Tensor) -> str | None:
        if got.shape != self.expected.shape:
            return f"{list(got.shape)} new tokens, transformers writes {list(self.expected.shape)}"
        ties = 0
        for row in (got != self.expected).any(1).nonzero().flatten().tolist():
            place = int((got[row] != self.expected[row]).nonzero()[0])
            wrong, right = int(got[row, place]), int(self.expected[row, place])
            logits = self.logits(row)[self.mask[row].sum() - 1 + place]
            margin = abs(float(logits[right] - logits[wrong]))
            if margin >= TIE:
                return f"row {row}, token {place}: {wrong}, transformers writes {right} (by {margin:.2g})"
            ties += 1
        self.ties += ties
        return None

    def text(self, row: int) -> Tensor:
        """A row's prompt and expected text, without padding."""
        return torch.cat([self.ids[row][self.mask[row].bool()], self.expected[row]])

    @torch.no_grad()
    def logits(self, row: int) -> Tensor:
        """transformers' logits ``[tokens, V]`` after every token of a row's text, in one call; where layers keep a state, of
        new tokens step by step, because steps may leave limits out that whole texts have."""
        text = self.text(row)[None]
        options = {"attention_mask": torch.ones_like(text), "use_cache": False}
        if "position_ids" in inspect.signature(type(self._model).forward).parameters:
            options["position_ids"] = torch.arange(text.shape[1])[None]
        logits = self._model(text, **options).logits[0].float()
        if self._model._is_stateful and self.expected is not self._known.get(REFERENCES[-1]):
            prompt = text[:, : -self.expected.shape[1]]
            options = dict(do_sample=False, eos_token_id=None, pad_token_id=0, max_new_tokens=self.expected.shape[1])
            written = self._model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                output_logits=True,
                return_dict_in_generate=True,
                **options,
            )
            logits[prompt.shape[1] - 1 : -1] = torch.cat(written.logits)
        return logits


class Logits:
    """A logits processor that compares its logits with transformers' after the same text."""

    def __init__(self, texts: Texts) -> None:
        self._known = {}
        for row in range(len(LENGTHS)):
            text, logits = texts.text(row).tolist(), texts.logits(row)
            self._known.update({tuple(text[: n + 1]): logits[n] for n in range(len(text))})
        self.compared, self.worst = 0, 0.0

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        for text, row in zip(ids.tolist(), logits.float(), strict=True):
            known = self._known.get(tuple(text))
            if known is not None:
                self.compared += 1
                self.worst = max(self.worst, float((row - known).abs().max() / known.std()))
        return logits


def methods(model: Any, draft: Any) -> dict[str, Any]:
    """Name -> method; some draft right tokens, some wrong ones."""
    torch.manual_seed(0)
    table = model.get_input_embeddings().weight
    slots = pass_ext.LookaheadEmbedding(3, table.shape[1], vocabulary=table.shape[0])
    torch.nn.init.normal_(slots.weight)
    bushy = Tree([-1, 0, 0, 1, 1, 2, 3])
    return {
        "Plain": Plain(),
        "NGram": NGram(longest=2, shortest=1, tokens=4, branches=2),
        "PaSS": PaSS(slots, tree=bushy, rows=24),
        "PaSS, two passes": PaSS(slots, passes=2, tree=Tree.from_branching((2, 2)), rows=24),
        "Speculative": Speculative(draft, 3),
        "MultiCandidate": MultiCandidate(model, (2, 2, 1)),  # its drafts are all right
    }


def judge(model_type: str) -> dict[str, Any]:
    """The line of one architecture."""
    line: dict[str, Any] = {"architecture": model_type, "class": model_types()[model_type]}
    if model_type in NOT_TRIED:
        return {**line, "not tried": NOT_TRIED[model_type]}
    try:
        model, draft = tiny_model(model_type), tiny_model(model_type, seed=1)
    except Exception as error:
        return {**line, "not tried": f"transformers cannot build it: {_short(error)}"}
    try:
        texts = Texts(model)
    except Exception as error:
        texts, line["transformers"] = None, _short(error)
    line["generate"] = _outcome(model, lambda: _by_generate(model, draft, texts))
    line["custom_generate"] = _outcome(model, lambda: _by_custom_generate(model, texts))
    line["attn_implementation"] = _outcome(model, lambda: _by_attention(model, texts))
    if line["generate"] == SAME:
        ids, mask = prompts()
        line["way"] = pass_ext.generate(
            model, ids, attention_mask=mask, max_new_tokens=2, eos_token_id=[]
        ).stats.backend
        line["early exit"] = _outcome(model, lambda: _by_early_exit(model, texts))
    if texts is not None:
        line["ties"], line["references"] = texts.ties, sorted(texts.references, key=REFERENCES.index)
        line["distinct"] = [len(set(row)) for row in texts.batch.tolist()]
        line["different rows"] = len(set(map(tuple, texts.batch.tolist())))
    return line


def _outcome(model: Any, judged: Callable[[], str]) -> str:
    """The result of ``judged``, or a refusal: an error whose sentence names the model."""
    try:
        return judged()
    except (ValueError, TypeError, NotImplementedError, AttributeError) as error:
        family = type(model).__name__.partition("For")[0]  # its attention is FamilyAttention
        names = {model.config.model_type, model.config.get_text_config(decoder=True).model_type, family}
        if any(name in str(error) for name in names):
            return f"refused: {_short(error, name=False)}"
        return f"fails: {_short(error)}"
    except Exception as error:
        return f"fails: {_short(error)}"


def _short(error: Exception, name: bool = True) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if name else text[:300]


def _compared(texts: Texts | None, got: Tensor, name: str = "") -> str | None:
    """A sentence about a difference; None if there is none."""
    if texts is None:
        return f"decodes what transformers does not{name}"
    wrong = texts.difference(got)
    return None if wrong is None else f"another text{name}: {wrong}"


def _by_generate(model: Any, draft: Any, texts: Texts | None) -> str:
    ids, mask = prompts()
    options = dict(max_new_tokens=NEW, attention_mask=mask, eos_token_id=[])
    drawn = None
    for name, method in methods(model, draft).items():
        got = pass_ext.generate(model, ids, method, **options).sequences[:, ids.shape[1] :]
        wrong = _compared(texts, got, f" by {name}")
        if wrong is not None:
            return wrong
        if name in ("Plain", "MultiCandidate"):
            processor = Logits(texts)
            pass_ext.generate(model, ids, method, logits_processor=processor, **options)
            if not processor.worst < LOGITS or processor.compared < len(LENGTHS) * (NEW - 1):
                return (
                    f"other logits by {name}: by {processor.worst:.2g} of their spread in one of {processor.compared}"
                )
        if name not in DRAWN:
            continue
        sampled = pass_ext.generate(model, ids, method, temperature=0.8, seeds=SEEDS, **options).sequences
        drawn = sampled if drawn is None else drawn
        if not torch.equal(sampled, drawn):
            return f"another text for a seed by {name}"
    return SAME


def _by_early_exit(model: Any, texts: Texts) -> str:
    draft = EarlyExitDraft(model, layers=1)
    for name, method in (("Speculative", Speculative(draft, 3)), ("MultiCandidate", MultiCandidate(draft, (2, 2)))):
        got = pass_ext.generate(
            model, texts.ids, method, max_new_tokens=NEW, attention_mask=texts.mask, eos_token_id=[]
        ).sequences[:, texts.ids.shape[1] :]
        wrong = _compared(texts, got, f" by {name} with EarlyExitDraft")
        if wrong is not None:
            return wrong
    return SAME


def _by_custom_generate(model: Any, texts: Texts | None) -> str:
    ids, mask = prompts()
    options = dict(input_ids=ids, attention_mask=mask, do_sample=False, eos_token_id=None, pad_token_id=0)
    ours = pass_ext.custom_generate(NGram(longest=2, shortest=1, tokens=4))
    got = model.generate(max_new_tokens=NEW, custom_generate=ours, **options)
    wrong = _compared(texts, got[:, ids.shape[1] :])
    if wrong is not None:
        return wrong
    assert texts is not None
    try:
        half = model.generate(max_new_tokens=CACHED, custom_generate=ours, return_dict_in_generate=True, **options)
    except ValueError as error:
        if "cannot read or write" in str(error) and model.config.model_type in str(error):
            return f"{SAME}, without caches"
        raise
    longer = torch.cat([mask, mask.new_ones(len(mask), CACHED)], 1)
    options.update(input_ids=half.sequences, attention_mask=longer, past_key_values=half.past_key_values)
    rest = model.generate(max_new_tokens=NEW - CACHED, **options)
    if texts.expected is not texts.batch:  # transformers' continuation has padding and a cache, so no reference fits
        return SAME
    wrong = _compared(texts, rest[:, ids.shape[1] :], " where transformers goes on from our cache")
    if wrong is not None:  # it may read a text again that its own cache of states is of
        fresh = options | dict(input_ids=ids, attention_mask=mask, past_key_values=None)
        theirs = model.generate(max_new_tokens=CACHED, return_dict_in_generate=True, **fresh)
        options["past_key_values"] = theirs.past_key_values
        if torch.equal(model.generate(max_new_tokens=NEW - CACHED, **options), rest):
            return SAME
    return wrong or SAME


def _by_attention(model: Any, texts: Texts | None) -> str:
    ids, mask = prompts()
    before = model.config._attn_implementation
    hooks.use(model)
    try:
        got = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0
        )[:, ids.shape[1] :]
    finally:
        model.set_attn_implementation(before)
    return _compared(texts, got) or SAME


def judged(model_type: str) -> dict[str, Any]:
    """The line of one architecture, judged without transformers' warnings."""
    with quiet():
        return judge(model_type)


# ---- the page ----


def render(result: dict[str, Any]) -> str:
    """The page of a result."""
    lines = result["rows"]
    decoded = [line for line in lines if line.get("generate") == SAME]
    untried = [line for line in lines if "not tried" in line]
    others = [line for line in lines if line not in decoded and line not in untried]
    ways = ("custom_generate", "attn_implementation", "early exit")
    return page(
        __file__,
        result["versions"],
        date=result["date"][:10],
        window=WINDOW,
        requests=len(LENGTHS),
        new=NEW,
        tie=TIE,
        ties=sum(line.get("ties", 0) for line in lines),
        decoded=len(decoded),
        decoded_lines=table(
            ["architecture", "custom_generate", "attention", "early exit", "steps", ""],
            ([line["architecture"], *(_cell(line[way]) for way in ways), line["way"], _note(line)] for line in decoded),
            left=6,
        ),
        others=len(others),
        other_lines=table(
            ["architecture", "generate", "attention", "why not"],
            (
                [line["architecture"], _cell(line["generate"]), _cell(line["attn_implementation"]), _why_not(line)]
                for line in others
            ),
            left=4,
        ),
        untried=len(untried),
        untried_lines=table(
            ["architecture", "why not"], ([line["architecture"], line["not tried"]] for line in untried), left=2
        ),
    )


def _cell(outcome: str) -> str:
    if outcome == SAME:
        return "yes"
    if outcome.startswith(SAME):
        return "yes, no caches"
    return "no" if outcome.startswith("refused") else "**wrong**"


def _note(line: dict[str, Any]) -> str:
    notes = [name for name in line["references"] if name != REFERENCES[0]]
    notes += [f"{way}: {line[way]}" for way in WAYS if is_wrong(line, way)]
    return "; ".join(notes).replace("|", "\\|")


def _why_not(line: dict[str, Any]) -> str:
    why = line["generate"].removeprefix("refused: ").replace("|", "\\|")
    return why + ("; transformers' own generate fails too" if "transformers" in line else "")


def is_wrong(line: dict[str, Any], way: str) -> bool:
    """True if the outcome is neither transformers' text nor a refusal, and transformers writes a text."""
    outcome = line.get(way, SAME)
    return not outcome.startswith((SAME, "refused")) and ("transformers" not in line or way == "generate")


def committed_result(root: Path) -> dict[str, Any]:
    """The result that the page shows."""
    return json.loads((root / RESULT).read_text())


def main() -> int:
    """Entry point of `python -m benchmarks.architectures`."""
    return command(__doc__, RESULT, PAGE, model_types, judged, render)


if __name__ == "__main__":
    sys.exit(main())
