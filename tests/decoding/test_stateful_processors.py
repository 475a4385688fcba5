"""Logits processors that follow one text, call by call: known ones are refused by name where candidates would disturb them, and
errors of unknown ones are explained."""

import pytest
import torch

pytest.importorskip("transformers")

from support.small_models import VOCABULARY
from transformers import LogitsProcessor, LogitsProcessorList, SynthIDTextWatermarkLogitsProcessor

from pass_ext import NGram, Plain, custom_generate, generate

# Every token has been followed by a token of its own parity: n-grams draft such tokens, and the grammar below forbids them.
IDS = torch.cat([torch.arange(3, VOCABULARY, 2), torch.arange(4, VOCABULARY, 2)])[None]
NEW = 8
DRAFTS = NGram(shortest=1)


class Follower(LogitsProcessor):
    """A processor like xgrammar.contrib.hf.LogitsProcessor: a matcher per row takes the last token of each call. In its grammar
    odd and even tokens alternate."""

    def __init__(self):
        self.rows, self.written = None, []

    def __call__(self, ids, scores):
        if self.rows is None:
            self.rows = len(ids)
        else:
            if len(ids) != self.rows or (self.written and int(ids[0, -1]) % 2 == self.written[-1] % 2):
                raise AssertionError  # an error without a message
            self.written.append(int(ids[0, -1]))
        even = len(self.written) % 2 == 0
        return scores.masked_fill(torch.arange(scores.shape[1]) % 2 == even, -torch.inf)


Grammar = type("LogitsProcessor", (Follower,), {"__module__": "xgrammar.contrib.hf"})
Own = type("Own", (Grammar,), {"__module__": "somewhere"})


@pytest.fixture
def no_calls(llama, monkeypatch):
    monkeypatch.setattr(llama, "forward", lambda *_, **__: pytest.fail("decoding has started"))


SYNTH = {
    "keys": [1, 2, 3],
    "ngram_len": 2,
    "sampling_table_size": 16,
    "sampling_table_seed": 0,
    "context_history_size": 4,
}
KNOWN = {
    "of a package": (Grammar, r"xgrammar\.contrib\.hf\.LogitsProcessor.*give it method Plain\(\)"),
    "a subclass": (Own, r"somewhere\.Own.*give it method Plain\(\)"),
    "a method": (lambda: Grammar().__call__, "give it method Plain"),
    "in a list": (lambda: LogitsProcessorList([Grammar()]), r"xgrammar\.contrib\.hf\.LogitsProcessor"),
    "of transformers": (
        lambda: SynthIDTextWatermarkLogitsProcessor(device="cpu", **SYNTH),
        r"SynthIDTextWatermarkLogitsProcessor, which keeps state between calls or runs the model$",
    ),
}


@pytest.mark.usefixtures("no_calls")
@pytest.mark.parametrize("name", KNOWN)
def test_known_ones_are_refused_before_decoding_starts(llama, name):
    make, message = KNOWN[name]
    with pytest.raises(
        ValueError, match=r"logits_processor must compute its result from ids and logits alone.*" + message
    ):
        generate(llama, IDS, DRAFTS, max_new_tokens=NEW, logits_processor=make())
    with pytest.raises(ValueError, match="logits_processor must compute its result"):
        generate(llama, IDS.repeat(2, 1), max_new_tokens=NEW, logits_processor=make())


@pytest.mark.parametrize("name", ["of a package", "of transformers"])
def test_known_ones_are_refused_in_custom_generate(llama, name):
    make, message = KNOWN[name]
    options = dict(max_new_tokens=NEW, do_sample=False, logits_processor=[make()])
    with pytest.raises(ValueError, match=message):
        llama.generate(IDS, custom_generate=custom_generate(DRAFTS), **options)


def test_one_text_without_candidates_may_be_followed(llama):
    want = llama.generate(IDS, max_new_tokens=NEW, do_sample=False, logits_processor=[Grammar()])
    got = generate(llama, IDS, Plain(), max_new_tokens=NEW, logits_processor=Grammar())
    assert torch.equal(got.sequences, want)
    assert (want[0, IDS.shape[1] :] % 2).tolist() == [0, 1] * (NEW // 2), "the grammar shows"
    ours = llama.generate(
        IDS, max_new_tokens=NEW, do_sample=False, logits_processor=[Grammar()], custom_generate=custom_generate()
    )
    assert torch.equal(ours, want)


def test_errors_of_unknown_ones_are_explained(llama):
    message = r"logits_processor test_stateful_processors\.Follower raised AssertionError\. It was called with ids \[\d+, \d+\]"
    with pytest.raises(RuntimeError, match=message + ".*keeps state between calls does not work") as caught:
        generate(llama, IDS, DRAFTS, max_new_tokens=NEW, logits_processor=Follower())
    assert isinstance(caught.value.__cause__, AssertionError)
    with pytest.raises(RuntimeError, match=message):
        llama.generate(
            IDS,
            max_new_tokens=NEW,
            do_sample=False,
            logits_processor=[Follower()],
            custom_generate=custom_generate(DRAFTS),
        )

    def broken(ids, scores):
        return scores[:, VOCABULARY + 3]

    with pytest.raises(
        RuntimeError, match=r"test_errors_of_unknown_ones_are_explained.*broken raised IndexError: index 100"
    ):
        generate(llama, IDS, max_new_tokens=NEW, logits_processor=broken)
