"""``Session(batch_invariant=True)``: keys and values of a text, and so the text, have the bits that plain decoding of the text
alone gives them, in 16 bits too. Caches are compared, because texts differ at near ties alone.
"""

import pytest
import torch
from emulator.ops import KERNELS
from support.generation import slots_for
from support.small_models import prompts, ragged_prompts, small_model

from pass_ext import NGram, PaSS, Plain, Session, Tree, generate, testing
from pass_ext.decoding.models import parts


def written(model, method, ids, mask, *, new, **session):
    """Each text with the keys and values of its tokens."""
    kept = Session(model, **session)
    generate(model, ids, method, attention_mask=mask, max_new_tokens=new, eos_token_id=[], session=kept)
    rows = [x.transpose(0, 1) for layer in kept.caches for x in layer]
    return [torch.stack([x[:length, b] for x in rows]).cpu() for b, length in enumerate(kept.prefix_lens.tolist())]


def passes(model):
    tree = Tree.from_branching((2,)).with_lookahead({0: 2, 1: 2})
    return PaSS(slots_for(model).to(model.dtype), tree=tree, rows=7)


def differing(model, ids, mask, *methods, new, **session):
    """How many texts of all methods, written together, are not those of plain decoding alone, bit for bit."""
    texts = [row[None, len(row) - int(shown.sum()) :] for row, shown in zip(ids, mask, strict=True)]
    options = dict(new=new, **session)
    plain = [written(model, Plain(), text, None, **options)[0] for text in texts]
    others = [written(model, method, ids, mask, **options) for method in (Plain(), *methods)]
    return sum(not torch.equal(a, b) for other in others for a, b in zip(other, plain, strict=True))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("codes", "length"), [(None, 145), (torch.int8, 40)], ids=["numbers", "codes"])
def test_on_the_kernels_of_a_gpu(monkeypatch, codes, length):
    """On the emulator, where layer_stack has no kernel. Without it the sums of the same texts differ."""
    monkeypatch.setattr(parts, "_stack_of", lambda *_: None)
    model = small_model(
        "llama", num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=64
    ).bfloat16()
    ids, mask = prompts(2, length, padding=(0, length - 9))
    with testing.rerouted_backend("emulated", KERNELS).active():
        options = dict(new=3, cache_dtype=codes)
        assert differing(model, ids, mask, passes(model), **options, batch_invariant=True) == 0
        if codes is None:
            assert differing(model, ids, mask, **options) > 0


def products(model, ids, **session):
    """The names of the matrix products in a generation."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        generate(model, ids, max_new_tokens=2, eos_token_id=[], session=Session(model, **session))
    names = {event.key for event in profile.key_averages()}
    return names & {"aten::linear", "aten::addmm", "aten::mm", "aten::matmul", "aten::bmm"}


def test_no_product_is_pytorchs():
    """Whose bits may depend on the number of rows, which are those of several prompts."""
    model, (ids, _) = small_model("llama").float(), prompts(2, 300)
    assert products(model, ids) == {"aten::linear", "aten::matmul", "aten::mm"}
    assert products(model, ids, batch_invariant=True) == set()


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3"])
def test_on_a_gpu(cuda, name):
    model = small_model(name).to(cuda.device, torch.bfloat16)
    ids, mask = (x.to(cuda.device) for x in ragged_prompts(8, longest=300))
    assert differing(model, ids, mask, NGram(), passes(model), new=48, batch_invariant=True) == 0


def test_the_switch_is_true_or_false():
    with pytest.raises(TypeError, match="Session: batch_invariant must be True or False, got int"):
        Session(small_model("llama"), batch_invariant=1)
