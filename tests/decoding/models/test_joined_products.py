"""joined_products: results to the bit, where the weights lie, that no memory is held twice, and layers that must stay alone."""

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional

pytest.importorskip("transformers")

from support.small_models import prompts, small_model

import pass_ext
from pass_ext.decoding.models.patching import few_rows
from pass_ext.decoding.models.patching import joined_products as patching
from pass_ext.decoding.models.patching.few_rows import MAX_FEW_ROWS, few_rows_linear
from pass_ext.decoding.models.patching.joined_products import joined_products
from pass_ext.testing import assert_same_bits

pytestmark = pytest.mark.usefixtures("one_thread")


class Projections(nn.Module):
    """Three layers that read one input."""

    def __init__(self, bias=True, dtype=torch.bfloat16):
        super().__init__()
        torch.manual_seed(0)
        for name, outputs in (("q_proj", 24), ("k_proj", 8), ("v_proj", 16)):
            setattr(self, name, nn.Linear(20, outputs, bias=bias, dtype=dtype).requires_grad_(False))

    def forward(self, x, other=None):
        return self.q_proj(x), self.k_proj(x if other is None else other), self.v_proj(x)


def always():
    return True


def layers_of(model):
    return [model.q_proj, model.k_proj, model.v_proj]


def has_forward(model):
    return [name for name, part in model.named_modules() if "forward" in vars(part)]


def storages(model):
    """The memory of all parameters: the address of each, and its size."""
    return {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}


@pytest.fixture
def calls(monkeypatch):
    """The number of outputs of each product, joined or alone."""
    seen = []
    for module in (few_rows, patching):

        def counting(x, weight, bias, op=module._op):
            seen.append(len(weight))
            return op(x, weight, bias)

        monkeypatch.setattr(module, "_op", counting)
    return seen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_one_product_has_the_bits_of_three(calls, dtype, bias):
    model, x = Projections(bias, dtype), torch.randn(1, 7, 20).to(dtype)
    numbers = {name: parameter.clone() for name, parameter in model.named_parameters()}
    objects = dict(model.named_parameters())
    with torch.no_grad():
        with few_rows_linear(model):
            expected = model(x)
        calls.clear()
        for _ in range(2):
            with joined_products(model, always):
                assert has_forward(model) == ["q_proj", "k_proj", "v_proj"]
                for value, alone in zip(model(x), expected, strict=True):
                    assert_same_bits(value.contiguous(), alone)
            assert has_forward(model) == []
        assert calls == [48, 48]
    for name, parameter in model.named_parameters():
        assert parameter is objects[name]
        assert_same_bits(parameter, numbers[name])


@pytest.mark.parametrize("bias", [True, False])
def test_weights_are_moved_once_and_held_once(bias):
    model = Projections(bias)
    size = sum(parameter.nbytes for parameter in model.parameters())
    with joined_products(model, always):
        inside = storages(model)
        assert sum(inside.values()) == size and len(inside) == 1 + bias
    assert storages(model) == inside
    with joined_products(model, always):
        assert storages(model) == inside
    copy = Projections(bias)
    copy.load_state_dict(model.state_dict())
    model.double()
    with joined_products(model, always):
        assert has_forward(model) == []


def test_joined_weights_are_saved_and_loaded(tmp_path):
    from safetensors.torch import load_file, save_file

    model = Projections()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with joined_products(model, always):
        save_file(model.state_dict(), tmp_path / "a.safetensors")
        torch.save(model.state_dict(), tmp_path / "a.pt")
    for loaded in (load_file(tmp_path / "a.safetensors"), torch.load(tmp_path / "a.pt")):
        for name, value in before.items():
            assert_same_bits(loaded[name], value)
    llama = small_model("llama")
    llama.generation_config.pad_token_id = None
    with joined_products(llama, always):
        llama.save_pretrained(tmp_path / "llama")
    again = type(llama).from_pretrained(tmp_path / "llama")
    for (name, ours), (_, theirs) in zip(llama.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_a_whole_model(calls):
    model, ids = small_model("qwen2"), prompts(1, 9)[0]
    with torch.no_grad():
        with few_rows_linear(model):
            expected = model(ids).logits
        alone = len(calls)
        calls.clear()
        with joined_products(model, always), few_rows_linear(model):
            assert_same_bits(model(ids).logits, expected)
            assert len(calls) == alone - 2 * 3  # 2 layers: q, k, v are one product, gate and up one
    want = model.generate(ids, max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0)
    calls.clear()
    assert torch.equal(pass_ext.generate(model, ids, max_new_tokens=5, eos_token_id=[]).sequences, want)
    assert 64 + 2 * 32 in calls and 2 * 96 in calls and 96 not in calls


def test_layers_with_other_inputs_compute_alone(calls):
    model, x, other = Projections(), *torch.randn(2, 3, 20).bfloat16()
    expected = [functional.linear(x, layer.weight, layer.bias) for layer in layers_of(model)]
    with torch.no_grad(), joined_products(model, always):
        torch.testing.assert_close(model(x, other)[1], model.k_proj(other))
        calls.clear()
        torch.testing.assert_close([model.k_proj(x), model.v_proj(x)], expected[1:])  # none asked for the queries
        assert calls == [8, 16]
        torch.testing.assert_close(list(model(x)), expected)
        calls.clear()
        torch.testing.assert_close(model.v_proj(x.clone()), expected[2])
        assert calls == [16]


def test_many_rows_gradients_and_foreign_calls_compute_as_before(calls):
    model = Projections(dtype=torch.float32)
    few, most, more = (torch.randn(rows, 20) for rows in (2, MAX_FEW_ROWS, MAX_FEW_ROWS + 1))
    answer = [True]
    with joined_products(model, lambda: answer[0]):
        x = few.clone().requires_grad_()
        sum(part.sum() for part in model(x)).backward()
        assert x.grad is not None and calls == []
        with torch.no_grad():
            for value, layer in zip(model(more), layers_of(model), strict=True):
                assert_same_bits(value, functional.linear(more, layer.weight, layer.bias))
            assert calls == []
            model(most)
            assert calls == [48]
            answer[0] = False
            for value, layer in zip(model(few), layers_of(model), strict=True):
                assert_same_bits(value, functional.linear(few, layer.weight, layer.bias))
            answer[0] = True
            model(few.double().float())
            with pytest.raises(RuntimeError):
                model(few.double())
            compiled = torch.compile(lambda x: model(x), backend="eager", fullgraph=True)
            calls.clear()
            for value, layer in zip(compiled(few), layers_of(model), strict=True):
                assert_same_bits(value, functional.linear(few, layer.weight, layer.bias))
            assert calls == []


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj"])
def test_weights_that_change_meanwhile_are_used(name):
    model, x = Projections(), torch.randn(3, 20).bfloat16()
    layer = getattr(model, name)

    def check():
        for value, each in zip(model(x), layers_of(model), strict=True):
            assert_same_bits(value.contiguous(), pass_ext.linear_rows(x, each.weight, each.bias))

    with torch.no_grad(), joined_products(model, always):
        check()
        layer.weight.mul_(2)
        check()
        layer.weight.data = torch.randn_like(layer.weight)
        check()
        layer.weight, before = nn.Parameter(torch.randn_like(layer.weight), requires_grad=False), layer.weight
        other = functional.linear(x, layer.weight, layer.bias)
        assert_same_bits(model(x)[["q_proj", "k_proj", "v_proj"].index(name)].contiguous(), other)
        layer.weight = before
        layer.bias = None
        assert_same_bits(getattr(model, name)(x), functional.linear(x, layer.weight))


def test_threads_do_not_see_each_others_products():
    model, x, errors = Projections(), torch.randn(4, 20).bfloat16(), []
    expected = [pass_ext.linear_rows(x, layer.weight, layer.bias) for layer in layers_of(model)]
    barrier = threading.Barrier(2)

    def run(scale):
        with torch.no_grad():
            for _ in range(50):
                barrier.wait(30)
                q = model.q_proj(x)
                barrier.wait(30)
                parts = q, model.k_proj(x), model.v_proj(x)
                if not all(map(torch.equal, parts, expected)):
                    errors.append(scale)

    with joined_products(model, always):
        threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
        [thread.start() for thread in threads]
        [thread.join(60) for thread in threads]
    assert errors == []


class Own(torch.Tensor):
    """A subclass, as torchao's and distributed tensors are."""


def test_groups_that_are_left_alone():
    def other_width(model):
        model.k_proj = nn.Linear(21, 8, dtype=torch.bfloat16)

    def other_dtype(model):
        model.k_proj.float()

    def one_bias(model):
        model.k_proj.bias = None

    def missing(model):
        model.k_proj = None

    def shared(model):
        model.v_proj = model.k_proj

    def own(model):
        model.k_proj.weight = nn.Parameter(model.k_proj.weight.as_subclass(Own), requires_grad=False)

    def hooked(model):
        model.v_proj.register_forward_hook(lambda *_: None)

    def wrapped(model):
        model.v_proj.forward = lambda x: x

    def part_of_more(model):
        model.q_proj.weight.data = torch.randn(30, 20).bfloat16()[:24]

    def in_shared_memory(model):
        model.k_proj.weight.share_memory_()

    def transposed(model):
        model.k_proj.weight.data = torch.randn(20, 8).bfloat16().t()

    changes = other_width, other_dtype, one_bias, missing, shared, own, hooked, wrapped, part_of_more, in_shared_memory
    for change in (*changes, transposed):
        model = Projections()
        change(model)
        before, memory = has_forward(model), storages(model)
        with joined_products(model, always):
            assert has_forward(model) == before, change
        assert storages(model) == memory, change
    with torch.autocast("cpu", torch.bfloat16), joined_products(model := Projections(), always):
        assert has_forward(model) == [] and len(storages(model)) == 6


def test_nested_and_after_an_error():
    model = Projections()
    with pytest.raises(KeyError), joined_products(model, always), joined_products(model, always):
        assert has_forward(model) == ["q_proj", "k_proj", "v_proj"]
        raise KeyError
    assert has_forward(model) == []
