"""layer_stack on the CPU at every instruction set: the bits of the layer ops, attention_tree, step_rms_norm and linear_rows
called one by one, whose own tests have their errors against float64.
"""

import sys
from contextlib import nullcontext

import pytest
import torch
from layer_cases import Numbers, after_by_ops, before_by_ops, linear
from torch.nn import functional

import pass_ext
from pass_ext import Tree
from pass_ext.layers import LayerWeights
from pass_ext.ops.quantize import MOST_OF_CODES
from pass_ext.testing import assert_same_bits
from pass_ext.tree import pack_trees

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
CODES = tuple(MOST_OF_CODES)
WIDTH, HEADS, KEY_HEADS, DIM, INNER, VOCABULARY, LAYERS = 72, 6, 2, 64, 100, 90, 3
PREFIXES = (70, 0, 9)


def weights_of(random, *, biases=False, norms=("input_norm", "mlp_norm")):
    shapes = dict(q=(HEADS * DIM, WIDTH), k=(KEY_HEADS * DIM, WIDTH), v=(KEY_HEADS * DIM, WIDTH), o=(WIDTH, HEADS * DIM),
                  gate=(INNER, WIDTH), up=(INNER, WIDTH), down=(WIDTH, INNER))  # fmt: skip
    tensors = {f"{name}_weight": random(*shape) for name, shape in shapes.items()}
    if biases:
        tensors |= {f"{name}_bias": random(shape[0]) for name, shape in shapes.items()}
    widths = dict(q_norm=DIM, k_norm=DIM)
    return LayerWeights(**tensors, **{name: random(widths.get(name, WIDTH)) for name in norms})


INPUTS = dict(q=WIDTH, k=WIDTH, v=WIDTH, o=HEADS * DIM, gate=WIDTH, up=WIDTH, down=INNER)
OUTPUTS = dict(q=HEADS * DIM, k=KEY_HEADS * DIM, v=KEY_HEADS * DIM, o=WIDTH, gate=INNER, up=INNER, down=WIDTH)


def adapters_of(random, names, *, count=2, rank=3):
    """Adapters of all layers; the ranks differ."""
    ranks = {name: rank + place for place, name in enumerate(names)}

    def side(name, numbers):
        return random(LAYERS, count, ranks[name], numbers) * numbers**-0.5

    return {name: (side(name, INPUTS[name]), side(name, OUTPUTS[name])) for name in names}


def case_of(dtype, *, seed=0, plain=False, adapted=(), count=2, drafts=3, **options):
    """A step of three requests: a tree, a chain and one row; plain: without everything that is optional."""
    random = Numbers(seed, dtype)
    trees = pack_trees([Tree.from_branching((2, 2)), Tree.chain(drafts), Tree.chain(0)], torch.device("cpu"))
    rows = len(trees.depths)
    case = dict(
        x=random(rows, WIDTH) * WIDTH**0.5, layers=[weights_of(random, **options) for _ in range(LAYERS)],
        caches=[(random(3, 80, KEY_HEADS, DIM), random(3, 80, KEY_HEADS, DIM)) for _ in range(LAYERS)],
        prefix_lens=torch.tensor(PREFIXES, dtype=torch.int32), cu_nodes=trees.cu_nodes, visible=trees.visible,
        max_nodes=trees.max_nodes, head_dim=DIM,
    )  # fmt: skip
    if plain:
        return case
    angles = random(120, DIM, dtype=torch.float64)
    positions = torch.repeat_interleave(torch.tensor(PREFIXES), trees.cu_nodes.diff()) + trees.depths
    ids = torch.arange(rows)
    ids[3], ids[5], ids[8] = -1, -2, -1
    return case | dict(
        depths=trees.depths, cos=angles.cos().to(dtype), sin=angles.sin().to(dtype), positions=positions.long(),
        rotates=(True, False, True), windows=(-1, 5, 40), ids=ids, deep=random(LAYERS, 2, WIDTH),
        final_norm=random(WIDTH), head=random(VOCABULARY, WIDTH), wanted=torch.tensor([7, 0, 0]), taps=(1, LAYERS, 0), eps=1e-3,
        activation="gelu_tanh", attention_scale=0.2, softcap=20.0,
        adapters=adapters_of(random, adapted, count=count) if adapted else None, adapter_scale=0.7,
    )  # fmt: skip


def by_ops(x, layers, caches, prefix_lens, cu_nodes, visible, max_nodes, *, head_dim, first_input=None, depths=None,
           cos=None, sin=None, positions=None, rotates=None, windows=None, ids=None, deep=None, final_norm=None, head=None,
           wanted=None, taps=(), activation="silu", scale=1.0, attention_scale=None, softcap=0.0, adapters=None,
           adapter_scale=1.0, **norm):  # fmt: skip
    """The ops one by one."""
    if positions is not None:
        cos, sin = cos[..., positions, :], sin[..., positions, :]
    new, states = [], []
    for index, (layer, pair) in enumerate(zip(layers, caches, strict=True)):
        if deep is not None:
            shifted = x + deep[index][(-1 - ids).clamp(min=0)]
            x = torch.where((ids < 0)[:, None], shifted, x)
        states.append(x)
        named = layer._asdict()
        number = 0 if cos is None else 1 if rotates is None else int(rotates[index])
        turns = dict(cos=None, sin=None)
        if number:
            turns = dict(cos=cos, sin=sin) if cos.dim() == 2 else dict(cos=cos[number - 1], sin=sin[number - 1])
        before = {name: named[name] for name in ("q_bias", "k_bias", "v_bias", "input_norm", "q_norm", "k_norm")}
        of_layer = {name: (down[index], up[index]) for name, (down, up) in (adapters or {}).items()}
        added = dict(ids=ids, adapters=of_layer, adapter_scale=adapter_scale) if adapters else {}
        read = x
        if index == 0 and first_input is not None:
            read, before["input_norm"] = first_input, None
        q, k, v = before_by_ops(
            read, layer.q_weight, layer.k_weight, layer.v_weight, head_dim=head_dim, **turns, **before, **added, **norm
        )
        if pair[0].dtype in CODES:
            k, v = (pass_ext.layers.quantize_rows(rows, pair[0].dtype) for rows in (k, v))
        new += k, v
        attended, _ = pass_ext.attention_tree(
            q, *pair, prefix_lens, cu_nodes, visible, max_nodes, k_new=k, v_new=v, depths=depths, scale=attention_scale,
            softcap=softcap, window=-1 if windows is None else windows[index],
        )  # fmt: skip
        after = {name: value for name, value in named.items() if name not in before and name[0] not in "qkv"}
        x = after_by_ops(attended.flatten(1), x, **after, activation=activation, scale=scale, **added, **norm)
    states.append(x)
    tapped = torch.stack([states[tap] for tap in taps]) if taps else x.new_empty(0, *x.shape)
    x = x if wanted is None else x[wanted]
    x = x if final_norm is None else pass_ext.layers.step_rms_norm(x, final_norm, **norm)[0]
    return x if head is None else linear(x, head), torch.stack(new), tapped


def assert_same(got, expected):
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.is_contiguous() and ours.dtype is theirs.dtype
        if ours.dtype in CODES:
            ours, theirs = ours.view(torch.uint8), theirs.view(torch.uint8)
        assert_same_bits(ours, theirs.contiguous())


def in_codes(case, codes):
    """The case with caches in 8 bits."""
    pairs = [tuple(pass_ext.layers.quantize_rows(rows, codes) for rows in pair) for pair in case["caches"]]
    return case | dict(caches=pairs)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(plain=True),
        dict(biases=True, norms=("input_norm", "mlp_norm", "q_norm", "k_norm")),
        dict(norms=("attention_norm", "output_norm")),
        dict(norms=()),
    ],
    ids=str,
)
def test_the_bits_of_the_single_ops(cpu, dtype, options):
    case = case_of(dtype, **options)
    assert_same(pass_ext.layers.layer_stack(**case), by_ops(**case))


ALL = ("q", "k", "v", "o", "gate", "up", "down")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        dict(adapted=ALL),
        dict(adapted=ALL, count=1, biases=True, norms=("input_norm", "mlp_norm", "q_norm", "k_norm")),
        dict(adapted=ALL, norms=("attention_norm", "output_norm")),
        *(dict(adapted=(name,)) for name in ALL),
        dict(adapted=("k", "up", "down"), norms=()),
    ],
    ids=str,
)
def test_adapters_have_the_bits_of_adapter_rows(cpu, dtype, options):
    case = case_of(dtype, **options)
    got, without = pass_ext.layers.layer_stack(**case), pass_ext.layers.layer_stack(**case | dict(adapters=None))
    assert_same(got, by_ops(**case))
    assert not torch.equal(got[1], without[1])


@pytest.mark.parametrize("count", [1, 2])
def test_adapters_of_runs_of_slots(cpu, count):
    """1 to 6 and 9 slots in a row, adapters mixed in them."""
    case = case_of(torch.bfloat16, adapted=ALL, count=count, drafts=40) | dict(wanted=None)
    ids, row, slot = torch.arange(len(case["x"])), 1, 0
    for length in (1, 2, 3, 4, 5, 6, 9):
        for each in range(length):
            ids[row + each] = -1 - slot % 3 // 2  # -1, -1, -2, -1, -1, -2, …
            slot += 1
        row += length + 1
    case |= dict(ids=ids)
    got = pass_ext.layers.layer_stack(**case)
    assert_same(got, by_ops(**case))
    assert not torch.equal(got[1], pass_ext.layers.layer_stack(**case | dict(adapters=None))[1])


def test_adapters_of_more_rows_than_stay_arranged(cpu, monkeypatch):
    """Products over so many numbers take 24 rows at a time; slots stand after these too."""
    monkeypatch.setattr(sys.modules[__name__], "WIDTH", 5504)
    for sizes in (INPUTS, OUTPUTS):
        for name, size in dict(sizes).items():
            monkeypatch.setitem(sizes, name, 5504 if size == 72 else size)
    case = case_of(torch.bfloat16, adapted=ALL, drafts=20)
    case["ids"][[24, 26, 28]] = torch.tensor([-2, -1, -2])
    case["wanted"] = None
    got, without = pass_ext.layers.layer_stack(**case), pass_ext.layers.layer_stack(**case | dict(adapters=None))
    assert_same(got, by_ops(**case))
    assert not torch.equal(got[1][:, 26], without[1][:, 26])


def test_rows_of_tokens_keep_their_bits_beside_adapters(cpu):
    """No row of a token sees a slot's row here."""
    case = case_of(torch.bfloat16, adapted=ALL) | dict(wanted=None)
    ids = torch.arange(len(case["x"]))
    bounds = case["cu_nodes"].tolist()
    ids[bounds[1] - 1], ids[bounds[2] - 1] = -1, -2  # the last row of a tree and of a chain
    case |= dict(ids=ids)
    got, without = pass_ext.layers.layer_stack(**case), pass_ext.layers.layer_stack(**case | dict(adapters=None))
    tokens = ids >= 0
    assert_same([part[..., tokens, :] if part.dim() == 2 else part[:, tokens] for part in got],
                [part[..., tokens, :] if part.dim() == 2 else part[:, tokens] for part in without])  # fmt: skip
    assert all((ours != theirs).any() for ours, theirs in zip(got[0][~tokens], without[0][~tokens], strict=True))


def test_no_row_of_a_slot_means_no_adapter(cpu):
    case = case_of(torch.bfloat16, adapted=ALL) | dict(deep=None)
    tokens = case | dict(ids=case["ids"].abs())
    assert_same(
        pass_ext.layers.layer_stack(**tokens), pass_ext.layers.layer_stack(**tokens | dict(adapters=None, ids=None))
    )
    empty = {name: (down[:, :, :0], up[:, :, :0]) for name, (down, up) in case["adapters"].items()}
    bare = case | dict(adapters=None, ids=None)
    assert_same(pass_ext.layers.layer_stack(**case | dict(adapters=empty)), pass_ext.layers.layer_stack(**bare))


@pytest.mark.parametrize("end", ["final_norm", "head", "wanted", "deep", "positions", "taps"])
def test_every_end_alone(cpu, end):
    case = case_of(torch.float32)
    absent = {"deep": ("deep", "ids"), "positions": ("positions", "cos", "sin")}.get(end, (end,))
    without = {name: value for name, value in case.items() if name not in absent}
    assert_same(pass_ext.layers.layer_stack(**without), by_ops(**without))
    alone = case_of(torch.float32, plain=True) | {name: case[name] for name in absent if name in case}
    assert_same(pass_ext.layers.layer_stack(**alone), by_ops(**alone))


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_every_number_of_layers(cpu, layers):
    """An even and an odd number: the rows change places in work space from layer to layer."""
    for case in (case_of(torch.bfloat16), case_of(torch.bfloat16, plain=True)):
        case |= {
            name: case[name][:layers] for name in ("layers", "caches", "rotates", "windows", "deep") if name in case
        }
        case["taps"] = (layers, 0)
        assert_same(pass_ext.layers.layer_stack(**case), by_ops(**case))


def with_first_input(case, width):
    """The case with rows of this width for the first layer, and weights that read them."""
    dtype, first = case["x"].dtype, case["layers"][0]
    random = Numbers(7, dtype)
    own = {name: random(len(getattr(first, name)), width) for name in ("q_weight", "k_weight", "v_weight")}
    layers = [first._replace(**own), *case["layers"][1:]]
    return case | dict(layers=layers, first_input=random(len(case["x"]), width))


@pytest.mark.parametrize("width", [WIDTH, 2 * WIDTH])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rows_for_the_first_layer(cpu, dtype, width):
    """With a norm in front of attention, which they skip, and without; beside adapters; of weights that are packed."""
    for options in (dict(adapted=("o", "down")), dict(norms=("mlp_norm",)), dict(plain=True)):
        case = with_first_input(case_of(dtype, **options), width)
        expected = by_ops(**case)
        assert_same(pass_ext.layers.layer_stack(**case), expected)
        packed = pass_ext.layers.layer_pack(case["layers"], head_dim=DIM)
        assert_same(pass_ext.layers.layer_stack(**case | dict(layers=packed)), expected)
        apart = torch.full((len(case["x"]), width + 3), float("nan"), dtype=dtype)[:, :width].copy_(case["first_input"])
        assert_same(pass_ext.layers.layer_stack(**case | dict(first_input=apart)), expected)


@pytest.mark.parametrize("is_packed", [False, True], ids=["listed", "packed"])
def test_rows_for_the_first_layer_that_do_not_fit(is_packed):
    case = with_first_input(case_of(torch.bfloat16, plain=True), 2 * WIDTH)
    given, without = case["first_input"], case | dict(first_input=None)
    if is_packed:
        packed = pass_ext.layers.layer_pack(case["layers"], head_dim=DIM)
        case, without = case | dict(layers=packed), without | dict(layers=packed)
    for wrong, message in (
        (given[:-1], r"first_input must have \d+ .N, the rows of x. in dimension 0"),
        (given.float(), r"first_input must be bfloat16"),
        (given[0], r"first_input must have shape"),
        (given[:, 1:], "143"),
    ):
        with pytest.raises(RuntimeError, match=f"layer_stack.*{message}"):
            pass_ext.layers.layer_stack(**case | dict(first_input=wrong))
    with pytest.raises(RuntimeError, match=r"layer_stack.*144"):
        pass_ext.layers.layer_stack(**without)


def test_scale_and_float32_rotation(cpu):
    case = case_of(torch.bfloat16)
    case |= dict(scale=0.22, cos=case["cos"].float(), sin=case["sin"].float())
    assert_same(pass_ext.layers.layer_stack(**case), by_ops(**case))


def test_caches_in_one_tensor(cpu):
    case = case_of(torch.bfloat16)
    expected = pass_ext.layers.layer_stack(**case)
    stacked = torch.stack([cache for pair in case["caches"] for cache in pair])
    assert_same(pass_ext.layers.layer_stack(**case | dict(caches=stacked)), expected)
    apart = torch.full((2 * LAYERS, 3, 80, KEY_HEADS, DIM + 8), float("nan"), dtype=torch.bfloat16)[..., :DIM]
    assert_same(pass_ext.layers.layer_stack(**case | dict(caches=apart.copy_(stacked))), expected)


def test_threads_change_no_bit(cpu, with_threads):
    """Jobs of a call are shared by threads that stand by, or run in the pool."""
    case = case_of(torch.bfloat16)
    expected = pass_ext.layers.layer_stack(**case)
    for got in with_threads(lambda: pass_ext.layers.layer_stack(**case), [2] * 20 + [5] * 20):
        assert_same(got, expected)


def two_rotations(case, dtype):
    """As gemma3's: one for some layers, one for others. Neither cos nor sin is contiguous."""
    angles = Numbers(5, torch.float64)(120, 2, DIM)
    cos, sin = angles.cos().to(dtype), functional.pad(angles.sin().to(dtype), (0, 6))[..., :DIM]
    return case | dict(cos=cos.transpose(0, 1), sin=sin.transpose(0, 1), rotates=(2, 1, 0))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("wide", [False, True], ids=["same", "float32"])
@pytest.mark.parametrize("placed", [False, True], ids=["rows", "positions"])
def test_layers_with_rotary_embeddings_of_their_own(cpu, dtype, wide, placed):
    case = two_rotations(case_of(dtype), torch.float32 if wide else dtype)
    if not placed:
        case |= {name: case[name][:, case["positions"]] for name in ("cos", "sin")} | dict(positions=None)
    got = pass_ext.layers.layer_stack(**case)
    assert_same(got, by_ops(**case))
    for rotates in ((1, 1, 0), (2, 2, 0), (2, 1, 1)):
        assert not torch.equal(pass_ext.layers.layer_stack(**case | dict(rotates=rotates))[0], got[0])


def test_the_caches_stay(cpu):
    case = case_of(torch.float32)
    former = [cache.clone() for pair in case["caches"] for cache in pair]
    pass_ext.layers.layer_stack(**case)
    assert all(map(torch.equal, former, [cache for pair in case["caches"] for cache in pair]))


ZERO = torch.zeros(12, dtype=torch.int64)


@pytest.mark.parametrize("codes", CODES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_caches_in_8_bits(cpu, dtype, codes):
    """The bits of quantize_rows between the single ops; of rows of zeros and of hardly any numbers too."""
    case = in_codes(case_of(dtype, norms=(), biases=True), codes)
    for factor in (1.0, 0.0, 1e-38 if dtype is torch.float32 else 1e-6):
        layers = [each._replace(k_weight=each.k_weight * factor, k_bias=each.k_bias * factor, v_bias=each.v_bias * 0.0,
                                v_weight=each.v_weight * factor) for each in case["layers"]]  # fmt: skip
        once = case | dict(layers=layers)
        out, new, states = pass_ext.layers.layer_stack(**once)
        assert new.dtype is codes and new.shape == (2 * LAYERS, len(case["x"]), KEY_HEADS, 16 + DIM)
        assert_same((out, new, states), by_ops(**once))
    stacked = torch.stack([rows.view(torch.uint8) for pair in case["caches"] for rows in pair]).view(codes)
    assert_same(pass_ext.layers.layer_stack(**case | dict(caches=stacked)), pass_ext.layers.layer_stack(**case))


@pytest.mark.parametrize("codes", CODES, ids=str)
def test_every_code_is_reached(cpu, codes):
    """Values that go through unchanged, at each code and halfway between two, have the codes of quantize_rows."""
    every = torch.arange(128, dtype=torch.uint8).view(codes).float()
    every = every[every.isfinite() & (every <= MOST_OF_CODES[codes])]
    halves = torch.cat((every, (every[1:] + every[:-1]) / 2, -every, -(every[1:] + every[:-1]) / 2))
    near = torch.cat((halves, torch.nextafter(halves, halves + 1), torch.nextafter(halves, halves - 1)))
    near = near[near.abs() < MOST_OF_CODES[codes]] + 0.0  # a product has no -0
    rows = torch.nn.functional.pad(near, (0, -len(near) % (DIM - 1))).view(-1, DIM - 1)
    rows = torch.cat((rows, torch.full((len(rows), 1), MOST_OF_CODES[codes])), 1)  # so the scale is 1
    eye, none = torch.eye(DIM), torch.zeros(DIM, DIM)
    weights = LayerWeights(eye, eye, eye, none, none, none, none)
    trees = pack_trees([Tree.chain(len(rows) - 1)], torch.device("cpu"))
    caches = torch.zeros(2, 1, 1, 1, 16 + DIM, dtype=torch.uint8).view(codes)
    step = torch.tensor([0], dtype=torch.int32), trees.cu_nodes, trees.visible, trees.max_nodes
    _, new, _ = pass_ext.layers.layer_stack(rows, [weights], caches, *step, head_dim=DIM)
    assert_same_bits(new[0, :, 0].view(torch.uint8), pass_ext.layers.quantize_rows(rows, codes).view(torch.uint8))


def sides(down, up):
    """Adapters of q of these shapes."""
    return {"q": (torch.ones(down), torch.ones(up))}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(layers=[]), "parts must have q_weight"),
        (dict(windows=(-1, -1)), "windows must have 3 items .3 layers., got 2"),
        (dict(windows=(-1, 0, -1)), "window must be positive, or -1 for none, got 0"),
        (dict(rotates=(True,)), "rotates must have 3 items"),
        (dict(rotates=(1, 2, 0)), r"rotates must be in \[0, 1\] .0 for none., got 2"),
        (dict(rotates=(1, -1, 0)), r"rotates must be in \[0, 1\] .0 for none., got -1"),
        (dict(cos=torch.ones(0, 120, DIM), sin=torch.ones(0, 120, DIM)), "cos must have 1 or more rotary embeddings"),
        (dict(cos=torch.ones(2, 120, DIM)), "sin must"),
        (
            dict(cos=torch.ones(2, 120, 3), sin=torch.ones(2, 120, 3)),
            r"cos\[0\] must have an even number of at most 64",
        ),
        (dict(head_dim=8, cos=None, sin=None, positions=None), "q must have a head size that is a multiple of 16"),
        (dict(ids=None), "ids must come with deep or adapters, got only deep"),
        (dict(deep=None), "ids must come with deep or adapters, got ids alone"),
        (dict(deep=None, ids=None, adapted=("q",)), "ids must come with deep or adapters, got only adapters"),
        (dict(adapted=("o",), scale=0.5), "scale must be 1 beside adapters of o or down, got 0.5"),
        (dict(adapted=("q",), count=1, ids=None, deep=None, adapters={"z": ()}), "adapters must be of q, k, v"),
        (dict(adapters=sides((3, 1, 2, WIDTH), (3, 1, 3, 384))), "adapter of q: up must have 2"),
        (dict(adapters=sides((3, 1, 2, 71), (3, 1, 2, 384))), "adapter of q: down must have 72"),
        (dict(adapters=sides((3, 1, 2, WIDTH), (3, 1, 2, 383))), "adapter of q: up must have 384"),
        (dict(adapters=sides((3, 1, 2, WIDTH), (3, 2, 2, 384))), "adapter of q: up must have 1 .K, as in the first"),
        (dict(adapters=sides((2, 1, 2, WIDTH), (2, 1, 2, 384))), "adapter of q: down must have 3 .layers."),
        (dict(adapters=sides((1, 2, WIDTH), (1, 2, 384))), r"down must have shape \[layers, K, r, numbers\]"),
        (dict(adapters={"q": (torch.ones(3, 1, 2, WIDTH),)}), "adapters must have 2 tensors"),
        (
            dict(adapters=sides((3, 1, 129, WIDTH), (3, 1, 129, 384))),
            "adapter of q: down must have less than 129 ranks",
        ),
        (dict(adapted=("down",), count=1, ids=ZERO - 2, deep=None), None),
        (dict(adapted=("down",), count=2, ids=ZERO - 3, deep=None), "ids must be at least -2 .2 adapters., got -3"),
        (dict(deep=torch.ones(2, 2, WIDTH)), "deep must have 3 .layers. in dimension 0"),
        (dict(deep=torch.ones(3, 1, WIDTH)), "ids must be at least -1 .the slots of deep., got -2 at 5"),
        (dict(positions=ZERO + 120), r"positions must be in \[0, 120\) .the rows of cos., got 120 at 0"),
        (
            dict(taps=(0, LAYERS + 1)),
            rf"taps must be in \[0, {LAYERS}\] .{LAYERS} for the rows after the last layer., got {LAYERS + 1}",
        ),
        (dict(wanted=torch.tensor([12])), r"wanted must be in \[0, 12\) .the rows of x., got 12 at 0"),
        (dict(head=torch.ones(9, 71)), "head_weight must have 72 .in"),
        (dict(final_norm=torch.ones(71)), "final_norm must have 72"),
        (dict(cos=torch.ones(120, DIM)), "sin must be|cos and sin"),
        (dict(depths=None), "depths must be given with a window"),
        (dict(scale=0.5, norms=("output_norm",)), "scale must be 1 beside attention_norm or output_norm"),
        (dict(prefix_lens=torch.tensor([81, 0, 0], dtype=torch.int32)), "must have room for the prefix"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_wrong_arguments(cpu, changes, message):
    changes = dict(changes)
    options = {name: changes.pop(name) for name in ("norms", "adapted", "count") if name in changes}
    case = case_of(torch.float32, **options)
    if "cos" in changes and "head_dim" not in changes:
        case["sin"] = None
    with pytest.raises((RuntimeError, ValueError), match=message) if message else nullcontext():
        pass_ext.layers.layer_stack(**case | changes)


def test_errors_name_the_layer(cpu):
    case = case_of(torch.float32)
    layers = list(case["layers"])
    layers[1] = layers[1]._replace(up_weight=torch.ones(99, WIDTH))
    with pytest.raises(RuntimeError, match=r"layer_stack: layer 1: up_weight must have 100 .the rows of gate_weight."):
        pass_ext.layers.layer_stack(**case | dict(layers=layers))
    caches = list(case["caches"])
    caches[2] = (caches[2][0], torch.ones(3, 79, KEY_HEADS, DIM))
    with pytest.raises(RuntimeError, match=r"caches\[5\] must have the shape of caches\[0\]"):
        pass_ext.layers.layer_stack(**case | dict(caches=caches))
    pairs = in_codes(case, torch.int8)["caches"]
    for changed, message in (
        ((pairs[0][0].view(torch.float8_e5m2), pairs[0][1]), "v_cache must be float8_e5m2, got int8"),
        ((pairs[0][0][..., 16:], pairs[0][1]), r"k_cache must have 80 .16 bytes for the scale"),
    ):
        with pytest.raises(RuntimeError, match=message):
            pass_ext.layers.layer_stack(**case | dict(caches=[changed, *pairs[1:]]))


def test_layers_must_be_alike(cpu):
    case = case_of(torch.float32)
    layers = [*case["layers"][:2], case["layers"][2]._replace(mlp_norm=None)]
    with pytest.raises(ValueError, match="layers must all have the same optional parts"):
        pass_ext.layers.layer_stack(**case | dict(layers=layers))
