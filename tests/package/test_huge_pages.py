"""Weights on huge pages: the numbers stay, the memory is what Linux is asked to map by huge pages, what is shared stays."""

import copy
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from pass_ext import huge_pages
from pass_ext.layers import to_huge_pages

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="huge pages of Linux")
needs_pages = pytest.mark.skipif(
    not huge_pages._SWITCH.exists() or "[never]" in huge_pages._SWITCH.read_text(),
    reason="this Linux uses no huge pages",
)


class Model(nn.Module):
    """An embedding tied to its head, a bias of odd size, and two weights that are views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(1000, 576, dtype=torch.bfloat16)
        self.head = nn.Linear(576, 1000, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embedding.weight
        self.layer = nn.Linear(576, 1531)
        both = torch.randn(2, 300, 300)
        self.first, self.second = nn.Parameter(both[0]), nn.Parameter(both[1])
        self.transposed = nn.Parameter(torch.randn(7, 5).T)
        self.empty = nn.Parameter(torch.empty(0))
        self.register_buffer("lent", torch.randn(600))
        self.borrowed = nn.Parameter(self.lent)
        self.special = Special(torch.randn(600))


class Special(nn.Parameter):
    """A class of another library, which may keep the address."""


def flags_of(tensor):
    """The flags of the mapping that the tensor lies in, as /proc shows them."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= tensor.data_ptr() < int(found[2], 16)
        elif inside and line.startswith("VmFlags"):
            return line.split()[1:]
    raise AssertionError("no mapping")


@needs_pages
def test_numbers_stay_and_memory_is_asked_for_as_huge_pages():
    model = Model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    stays = {
        name: getattr(model, name).data_ptr()
        for name in ("first", "second", "transposed", "lent", "borrowed", "special")
    }
    assert to_huge_pages(model) is model
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert model.head.weight is model.embedding.weight
    for weight in (model.embedding.weight, model.layer.weight, model.layer.bias):
        assert "hg" in flags_of(weight) and weight.data_ptr() % 64 == 0
    assert stays == {name: getattr(model, name).data_ptr() for name in stays}
    model.second.data.zero_()
    assert torch.equal(model.first, before["first"])


@needs_pages
def test_mapped_memory_is_there_already():
    model = nn.Module()
    model.mapped = nn.Parameter(huge_pages.mapped(torch.Size((3, 1000, 1000)), torch.uint8), requires_grad=False)
    model.small = nn.Parameter(huge_pages.mapped(torch.Size((30, 7)), torch.bfloat16), requires_grad=False)
    model.other = nn.Parameter(torch.randn(1000, 1000))
    assert not model.mapped.any() and not model.small.any()
    model.mapped.fill_(7)
    at = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    flags = [flags_of(part) for part in (model.mapped, model.mapped.flatten()[-1:], model.small)]
    assert ["hg" in each for each in flags] == [True, False, False], "its end is no whole page"
    to_huge_pages(model)
    stays = [name for name, parameter in model.named_parameters() if parameter.data_ptr() == at[name]]
    assert stays == ["mapped"] and (model.mapped == 7).all()


@needs_pages
def test_a_moved_model_is_an_ordinary_one(tmp_path):
    from safetensors.torch import load_file, save_file

    model = to_huge_pages(nn.Sequential(nn.Linear(576, 1531), nn.Linear(1531, 3)))
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    saved = load_file(tmp_path / "weights.safetensors")
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    loaded, copied = torch.load(tmp_path / "weights.pt"), copy.deepcopy(model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, saved[name]) and torch.equal(value, loaded[name])
        assert torch.equal(value, copied.state_dict()[name])
    x = torch.randn(2, 576)
    model(x).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert not torch.equal(model(x), copied(x))
    weight = model[0].weight.detach()
    del model
    assert weight.sum().isfinite(), "a tensor keeps its memory"


@needs_pages
@pytest.mark.parametrize(
    "why", ["switched off", "another system", "a container's limit", "less than a page", "other processes"]
)
def test_parameters_stay_where_they_are(why, monkeypatch, tmp_path):
    model = nn.Linear(30, 30) if why == "less than a page" else nn.Linear(1000, 1000)
    if why == "other processes":
        model.share_memory()
    if why == "switched off":
        (tmp_path / "enabled").write_text("always madvise [never]\n")
    if why in ("switched off", "another system"):
        monkeypatch.setattr(huge_pages, "_SWITCH", tmp_path / "enabled")
    if why == "a container's limit":
        for name, text in {"max": "9000000", "current": "6000000", "stat": "anon 1\ninactive_file 900000\n"}.items():
            (tmp_path / f"memory.{name}").write_text(text)
        container = (str(tmp_path), "memory.max", "memory.current", "inactive_file")
        monkeypatch.setattr(huge_pages, "_CONTAINERS", (container,))
        assert to_huge_pages(nn.Linear(900, 1000)).weight.data_ptr() % 4096 == 0, "3.6 MB of 3.9 that are free"
    at = model.weight.data_ptr()
    assert to_huge_pages(model).weight.data_ptr() == at
