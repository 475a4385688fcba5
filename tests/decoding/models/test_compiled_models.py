"""generate with models compiled by torch.compile: the text of the model itself, and a graph per shape, not per layer."""

import logging
import threading

import pytest
import torch

pytest.importorskip("transformers")

from support.generation import slots_for
from support.small_models import ragged_prompts, small_model, whole_prompts
from torch._dynamo.utils import counters

from pass_ext import NGram, PaSS, Plain, Tree, generate

slow = pytest.mark.slow

DECORATOR = "transformers/utils/deprecation.py"
LAYERS, LIMIT = 9, 8  # torch's own limit, which a function compiled once per layer exceeds


@pytest.fixture
def compiled():
    """A model, the same model compiled, and a list of torch.compile's warnings."""
    torch._dynamo.reset()
    warned = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warned.append(record.getMessage())
    logging.getLogger("torch._dynamo").addHandler(handler)
    model = small_model("llama", num_hidden_layers=LAYERS)
    with torch._dynamo.config.patch(recompile_limit=LIMIT):
        yield model, torch.compile(model, backend="eager"), warned
    logging.getLogger("torch._dynamo").removeHandler(handler)
    torch._dynamo.reset()


def test_a_compiled_model_gives_the_text_of_the_model():
    """In two generations: what the first one put into the model is gone in the second."""
    torch._dynamo.reset()
    model = small_model("llama", num_hidden_layers=1)
    fast, (ids, mask) = torch.compile(model, backend="eager"), ragged_prompts(2, longest=6)
    options = dict(max_new_tokens=3, attention_mask=mask, eos_token_id=[])
    want = generate(model, ids, **options).sequences
    assert torch.equal(generate(fast, ids, **options).sequences, want)
    assert torch.equal(generate(fast, ids, **options).sequences, want)
    torch._dynamo.reset()


@slow
def test_text_and_graphs(compiled):
    model, fast, warned = compiled
    ids, mask = ragged_prompts(3)
    options = dict(max_new_tokens=8, attention_mask=mask, eos_token_id=[])
    lookahead = slots_for(model, deep_layers=LAYERS)
    methods = (Plain(), NGram(shortest=1, tokens=3), PaSS(lookahead, tree=Tree.chain(2), rows=12))
    want = [generate(model, ids, method, **options) for method in methods]
    counters.clear()
    for method, wanted in zip(methods, want, strict=True):
        got = generate(fast, ids, method, **options)
        assert torch.equal(got.sequences, wanted.sequences)
        assert got.stats.acceptance_histogram == wanted.stats.acceptance_histogram
    # transformers 5.24 has one decorator around all forwards, whose code torch compiles for each of them.
    assert not [message for message in warned if "recompile_limit" in message and DECORATOR not in message]
    graphs = counters["stats"]["unique_graphs"]
    assert 0 < graphs < 10 * LAYERS, "some graphs for each shape, whatever the number of layers"
    for method in methods:
        generate(fast, ids, method, **options)
    assert counters["stats"]["unique_graphs"] == graphs, "nothing is compiled again"


@slow
def test_another_thread_calls_the_compiled_model(compiled):
    """Graphs from a generation do not keep its attention."""
    _, fast, _ = compiled
    ids = whole_prompts(2, longest=6)
    want, results = fast(ids).logits, []

    class Streamer:
        put = end = lambda *_: None

        def put_step(self, tokens, accepted):
            thread = threading.Thread(target=lambda: results.append(fast(ids).logits))
            thread.start()
            thread.join(60)

    generate(fast, ids[:1], streamer=Streamer(), max_new_tokens=3, eos_token_id=[])
    assert len(results) == 3 and all(torch.equal(got, want) for got in results)
    assert torch.equal(fast(ids).logits, want)
