"""The kernels that a step of a transformers model launches on a GPU: ours counted on the emulator, and one for each op of torch
that computes.
"""

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers")

import emulator
from emulator.ops import EMULATED
from support.generation import slots_for
from support.small_models import ragged_prompts, small_model

from pass_ext import PaSS, Session, Tree, generate
from pass_ext.decoding.loop.device_step import DeviceStep
from pass_ext.decoding.models import parts
from pass_ext.modules.slot_adapters import SlotAdapters
from pass_ext.training.lookahead.adapters import adapter_sizes

VIEWS = {"view", "_unsafe_view", "slice", "select", "expand", "unsqueeze", "alias", "detach", "transpose", "reshape", "t",
         "split", "split_with_sizes", "as_strided", "permute", "squeeze", "empty", "empty_strided", "new_empty"}  # fmt: skip


class Launches(TorchDispatchMode):
    """The launches of a step, by op."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = emulator.load().count_launches()
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        ours = emulator.load().count_launches() - before
        self.ops += [name] * (ours if func.namespace == "pass_ext" else name not in VIEWS)
        return result


@pytest.fixture
def steps(monkeypatch):
    """The launches of each step, as on a GPU, where layer_stack has no kernel."""
    modes = []
    step = DeviceStep._run

    def run(self):
        with Launches() as mode:
            step(self)
        modes.append(mode.ops)

    monkeypatch.setattr(DeviceStep, "_run", run)
    monkeypatch.setattr(parts, "stack_of", lambda *_: None)
    return modes


MORE = pytest.mark.slow  # either architecture and either kind of slots is in a quick pair


@pytest.mark.parametrize(
    ("architecture", "adapted"),
    [
        ("llama", False),
        ("qwen3", True),
        pytest.param("llama", True, marks=MORE),
        pytest.param("qwen3", False, marks=MORE),
    ],
)
def test_launches_of_a_step(steps, architecture, adapted):
    """A layer's: norm, q, k, v and rotation (qwen3: norms of heads and rotation after them); o; norm, gate and up; down.
    Adapters of the slots add none. Attention has one or two. docs/ops/layer.md has the sums for 30 layers."""
    outside, of_layer = [], {"llama": 4, "qwen3": 5}[architecture]
    for layers in (1, 2):
        model = small_model(architecture, num_hidden_layers=layers, head_dim=64)
        adapters = SlotAdapters(adapter_sizes(model, 3)) if adapted else None
        slots = slots_for(model, adapters=adapters)
        method = PaSS(slots, tree=Tree.from_branching((2,)).with_lookahead({0: 2, 1: 2, 2: 2}), rows=9)
        with EMULATED.active():
            session = Session(model, run_ahead=True)
            generate(model, ragged_prompts(1, longest=3)[0], method, max_new_tokens=2, session=session, eos_token_id=[])
        ops = steps[-1]
        assert layers <= ops.count("attention_tree") <= 2 * layers
        assert ops.count("layer_before_attention") + ops.count("layer_after_attention") == of_layer * layers
        outside.append([op for op in ops if op != "attention_tree" and not op.startswith("layer_")])
    # How many an op has may depend on the size of the GPU, which changes from launch to launch here.
    assert set(outside[0]) == set(outside[1]) and abs(len(outside[0]) - len(outside[1])) <= 2, "nothing between the ops"
    assert max(map(len, outside)) + 30 * (of_layer + 2) <= (200 if architecture == "llama" else 230), outside


def test_chosen_rows_take_one_launch_more_than_fixed_ones(steps):
    """``tree_prepare``, because trees are not known beforehand. That rows are chosen takes none."""
    model, found = small_model("llama", num_hidden_layers=1, head_dim=64), []
    slots, ids = slots_for(model), ragged_prompts(1, longest=3)[0]
    tree = Tree.from_branching((2,)).with_lookahead({0: 2, 1: 2})
    for method in (PaSS(slots, rows=7, slots=2), PaSS(slots, tree=tree, rows=7)):
        steps.clear()
        with EMULATED.active():
            # Two texts: one on the CPU has a loop that is its own.
            session = Session(model, run_ahead=True)
            generate(model, ids.repeat(2, 1), method, max_new_tokens=2, session=session, eos_token_id=[])
        found.append(steps[-1])
    chosen, fixed = ({name: ops.count(name) for name in set(ops)} for ops in found)
    assert chosen["tree_prepare"] == chosen["next_tree_"] == fixed["next_tree_"] == 1
    assert set(chosen) - {"tree_prepare"} <= set(fixed)
