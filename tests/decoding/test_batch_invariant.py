"""``Session(batch_invariant=True)``: keys and values of a text, and so the text, have the bits that plain decoding of the text
alone gives them, in 16 bits too. Caches and log probabilities are compared, because texts differ at near ties alone.
"""

import sys

import pytest
import torch
from emulator.ops import EMULATED
from support.generation import slots_for
from support.pairwise import pairwise
from support.paths import ROOT
from support.small_models import prompts, ragged_prompts, small_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.append(str(ROOT))  # for benchmarks; at the end, so that an installed pass_ext stays the one that is tested
from benchmarks.architectures.models import tiny_model
from examples.plain_decoder import VOCABULARY, Decoder
from pass_ext import NGram, PaSS, Plain, Session, Speculative, Tree, generate
from pass_ext.decoding.models import parts


def written(model, method, ids, mask, *, new, **session):
    """Of each text the keys and values of its tokens, the states after them, and its new tokens' log probabilities."""
    kept = Session(model, **session)
    options = dict(attention_mask=mask, max_new_tokens=new, eos_token_id=[], logprobs=0)
    scores = generate(model, ids, method, session=kept, **options).logprobs
    lengths = kept.prefix_lens.tolist()
    return [
        [
            *(x[b, :length].cpu() for layer in kept.caches for x in layer),
            *(state[b].cpu() for state in kept.states),
            scores[b].raw.cpu(),
        ]
        for b, length in enumerate(lengths)
    ]


def passes(model):
    tree = Tree.from_branching((2,)).with_lookahead({0: 2, 1: 2})
    return PaSS(slots_for(model).to(model.dtype), tree=tree, rows=7)


def differing(model, ids, mask, *methods, new, **session):
    """How many texts of all methods, written together, are not those of plain decoding alone, bit for bit."""
    texts = [row[None, len(row) - int(shown.sum()) :] for row, shown in zip(ids, mask, strict=True)]
    options = dict(new=new, **session)
    plain = [written(model, Plain(), text, None, **options)[0] for text in texts]
    others = [written(model, method, ids, mask, **options) for method in (Plain(), *methods)]
    return sum(not all(map(torch.equal, a, b)) for other in others for a, b in zip(other, plain, strict=True))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("codes", "length"), [(None, 145), (torch.int8, 40)], ids=["numbers", "codes"])
def test_on_the_kernels_of_a_gpu(monkeypatch, codes, length):
    """On the emulator, where layer_stack has no kernel. Without it the sums of the same texts differ."""
    monkeypatch.setattr(parts, "stack_of", lambda *_: None)
    model = small_model(
        "llama", num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=64
    ).bfloat16()
    ids, mask = prompts(2, length, padding=(0, length - 9))
    with EMULATED.active():
        options = dict(new=3, cache_dtype=codes)
        assert differing(model, ids, mask, passes(model), **options, batch_invariant=True) == 0
        if codes is None:
            assert differing(model, ids, mask, **options) > 0


@pytest.mark.usefixtures("one_thread")
def test_a_group_of_heads_on_the_kernels_of_a_gpu(monkeypatch):
    """Eight heads of a key head and 128 numbers, whose products are by tensor cores."""
    monkeypatch.setattr(parts, "stack_of", lambda *_: None)
    model = small_model("llama", num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=1, head_dim=128)
    model, (ids, mask) = model.bfloat16(), prompts(2, 40, padding=(0, 31))
    with EMULATED.active():
        assert differing(model, ids, mask, passes(model), new=2, batch_invariant=True) == 0


@pytest.mark.usefixtures("one_thread")
def test_experts_on_the_kernels_of_a_gpu():
    model = tiny_model("qwen3_moe", num_hidden_layers=1).bfloat16()
    ids, mask = prompts(2, 9, padding=(0, 5))
    with EMULATED.active():
        assert differing(model, ids, mask, passes(model), new=2, batch_invariant=True) == 0


# ---- experts ----

EXPERTS = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3")


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("name", "dtype"), pairwise(EXPERTS, [torch.float32, torch.bfloat16]))
def test_models_with_experts(name, dtype):
    model = tiny_model(name).to(dtype)
    ids, mask = ragged_prompts(4, longest=90)
    assert differing(model, ids, mask, NGram(), passes(model), new=12, batch_invariant=True) == 0


@pytest.mark.usefixtures("one_thread")
def test_experts_of_pytorch_depend_on_the_other_rows():
    """So the test above can fail."""
    ids, mask = ragged_prompts(4, longest=90)
    assert differing(tiny_model("qwen3_moe"), ids, mask, new=12) > 0


def roots(model, ids, mask, rows):
    """Logits of the root in a tree of so many rows for each text."""
    session = Session(model, len(ids), 200, batch_invariant=True)
    generate(model, ids, attention_mask=mask, max_new_tokens=2, eos_token_id=[], session=session)
    with torch.no_grad(), session.model.attached():
        trees = session.packed([Tree([-1, *(i // 2 for i in range(n - 1))]) for n in rows])
        first = trees.cu_nodes[:-1].long()
        tokens = (torch.arange(len(trees.parents)) * 7 % 80 + 3).index_fill(0, first, 5)
        return session.call(trees, tokens)[first]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager"])
def test_a_row_in_trees_of_all_sizes(name, implementation):
    model = tiny_model(name).bfloat16()
    model.set_experts_implementation(implementation)
    ids, mask = ragged_prompts(4, longest=20)
    together = roots(model, ids, mask, (1, 2, 9, 64))
    for text, (row, shown) in enumerate(zip(ids, mask, strict=True)):
        alone = row[None, len(row) - int(shown.sum()) :]
        assert torch.equal(roots(model, alone, torch.ones_like(alone), (1,))[0], together[text])


class Operations(TorchDispatchMode):
    """The names of PyTorch's operations inside, as they reach the kernels."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func._opname)
        return func(*args, **(kwargs or {}))


def sums(model, ids, **session):
    """The names of PyTorch's sums in the calls of a generation."""
    generate(model, ids, max_new_tokens=1)  # how a model is run is found out by PyTorch's sums too
    with Operations() as seen:
        generate(model, ids, max_new_tokens=2, eos_token_id=[], session=Session(model, **session))
    return seen.names & {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "mean", "sum", "_softmax"}


@pytest.mark.parametrize("name", ["llama", *EXPERTS])
def test_no_sum_is_pytorchs(name):
    """Whose bits may depend on the number of rows, which are those of several prompts."""
    model, (ids, _) = tiny_model(name), prompts(2, 300 if name == "llama" else 120)
    assert sums(model, ids) >= ({"mm"} if name == "llama" else {"_grouped_mm", "sum"})
    assert sums(model, ids, batch_invariant=True) == set()


# ---- other models ----


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "name",
    [
        "gpt2",
        "cohere2",
        "dbrx",
        "llama4_text",
        "deepseek_v32",
        "minimax_m3_vl_text",
        "qwen3_next",
        "mamba2",
    ],
)
def test_other_layers(name):
    """Products without a linear layer, other norms, lengths, indexers, states."""
    model = tiny_model(name).bfloat16()
    ids, mask = ragged_prompts(3, longest=20)
    assert differing(model, ids, mask, NGram(), passes(model), new=8, batch_invariant=True) == 0


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", ["deepseek_v3", "llama"])
def test_prompts_with_a_common_beginning(name):
    """Together, their last rows are read by themselves, few of them: the same sums as of the many rows of a whole prompt."""
    common, (own, _) = prompts(1, 280)[0], prompts(2, 20, seed=1)
    ids = torch.cat([common.repeat(2, 1), own], 1)
    assert differing(tiny_model(name), ids, torch.ones_like(ids), new=2, batch_invariant=True) == 0


@pytest.mark.usefixtures("one_thread")
def test_a_model_of_ones_own():
    torch.manual_seed(0)
    model = Decoder().eval().requires_grad_(False)
    ids, mask = ragged_prompts(3, longest=90, vocabulary=VOCABULARY)
    assert differing(model, ids, mask, NGram(), Speculative(model, 3), new=12, batch_invariant=True) == 0
    assert differing(model, ids, mask, new=12) > 0
    assert sums(model, ids, batch_invariant=True) == set()


@pytest.mark.usefixtures("one_thread")
def test_offloaded_weights():
    accelerate = pytest.importorskip("accelerate")
    model, (ids, mask) = small_model("llama").bfloat16(), ragged_prompts(2, longest=20)
    expected = written(model, Plain(), ids, mask, new=4, batch_invariant=True)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    got = written(model, Plain(), ids, mask, new=4, batch_invariant=True)
    assert all(all(map(torch.equal, a, b)) for a, b in zip(got, expected, strict=True))


def test_compiled_code_runs_uncompiled():
    calls = []

    def counting(graph, inputs):
        return lambda *inputs: calls.append(graph) or graph(*inputs)

    model, (ids, _) = tiny_model("qwen3_moe"), prompts(1, 6)
    expected = sums(model, ids, batch_invariant=True)
    model.model.layers[0].mlp.gate = torch.compile(model.model.layers[0].mlp.gate, backend=counting)
    generate(model, ids, max_new_tokens=2, eos_token_id=[])
    assert calls
    calls.clear()
    assert sums(model, ids, batch_invariant=True) == expected
    calls.clear()
    generate(model, ids, max_new_tokens=2, eos_token_id=[], session=Session(model, batch_invariant=True))
    assert not calls


class Convolving(nn.Module):
    """A model of one's own whose layer is a convolution."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 8)

    def forward(self, rows, positions, attend, wanted):
        heads = nn.functional.conv1d(rows[:, None], torch.ones(1, 1, 3), padding=1)
        attend(0, *[heads] * 3)
        return rows @ self.embedding.weight.T if wanted is None else rows[wanted] @ self.embedding.weight.T


def test_what_is_not_served_is_refused():
    model, ids = Convolving().requires_grad_(False), torch.tensor([[1, 2, 3]])
    generate(model, ids, max_new_tokens=2)
    with pytest.raises(ValueError, match=r"batch_invariant must be False .*: Convolving calls aten\.convolution"):
        generate(model, ids, max_new_tokens=2, session=Session(model, batch_invariant=True))
    model = tiny_model("jamba")
    model.model.layers[0].mamba.in_proj.weight = nn.Parameter(torch.zeros(9, 9, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(
        ValueError, match=r"layers\.0\.mamba\.in_proj \(Linear\) has a weight of the class Parameter in"
    ):
        Session(model, batch_invariant=True)
    Session(model)


# ---- a GPU ----


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss", "qwen3"])
def test_on_a_gpu(cuda, name):
    model = small_model(name).to(cuda.device, torch.bfloat16)
    ids, mask = (x.to(cuda.device) for x in ragged_prompts(8, longest=300))
    assert differing(model, ids, mask, NGram(), passes(model), new=48, batch_invariant=True) == 0


def test_the_switch_is_true_or_false():
    with pytest.raises(TypeError, match="Session: batch_invariant must be True or False, got int"):
        Session(small_model("llama"), batch_invariant=1)
