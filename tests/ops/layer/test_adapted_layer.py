"""Adapters of look-ahead slots in layer_before_attention and layer_after_attention on every backend: the bits of adapter_rows_
after each product, rows of tokens to the bit, and memory that must not be read.
"""

import emulator
import pytest
import torch
from layer_cases import adapters_for, after_by_ops, after_case, before_by_ops, before_case
from support.each import each
from support.pairwise import pairwise

import pass_ext
from pass_ext.testing import assert_same_bits

pytestmark = pytest.mark.usefixtures("on_backend")
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
WARPS = 8  # of a block
MIXED = [5, -1, -3, 0, -2, -1, 9, -3, -1]  # unsorted, tokens between slots


def ids_of(rows):
    return (MIXED * (rows // len(MIXED) + 1))[:rows]


def assert_before(case):
    got = pass_ext.layers.layer_before_attention(**case)
    for ours, theirs in zip(got, before_by_ops(**case), strict=True):
        assert_same_bits(ours, theirs.contiguous())
    return got


def assert_after(case):
    got = pass_ext.layers.layer_after_attention(**case)
    assert_same_bits(got, after_by_ops(**case))
    return got


def plain(case):
    return {name: value for name, value in case.items() if name not in ("ids", "adapters", "adapter_scale")}


BEFORE_RANKS = (dict(q=3, k=8, v=1), dict(q=17, v=0), dict(k=16), dict(q=5, k=5, v=40))
AFTER_RANKS = (dict(o=3, gate=8, up=1, down=5), dict(gate=17), dict(up=9, gate=0), dict(down=33, o=16))


BEFORE = [
    {}, dict(whole=True), dict(plain=True), dict(plain=True, width=65, head_dim=10, rotated=6),
    dict(plain=True, head_dim=80, rotated=40),
]  # fmt: skip
AFTER = [{}, dict(biases=False, width=65, inner=37), dict(norms=("attention_norm", "output_norm")), dict(norms=())]


MANY = pytest.mark.quick_on("cpu")


def adapters_of(backend, dtype, ranks):
    """(ranks, adapters) of the calls of a case: all; on the emulator each with one dtype."""
    found = list(zip(ranks, (3, 1, 5, 1), strict=True))
    return found[FLOATS.index(dtype) :: len(FLOATS)] if backend.name == "emulated" else found


def rows_and(options):
    """Few rows in pairs; many on the CPU."""
    many = [pytest.param(rows, one, marks=MANY) for rows in (33, 70) for one in options]
    return [*pairwise([2, 9], options, "cpu"), *many]


@each("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "options"), rows_and(BEFORE), ids=str)
def test_before_has_the_bits_of_adapter_rows(backend, dtype, rows, options):
    case = before_case(rows, dtype, **options) | dict(head_dim=options.get("head_dim", 16))
    for ranks, count in adapters_of(backend, dtype, BEFORE_RANKS):
        case |= adapters_for(case, ranks, count, ids_of(rows))
        got = assert_before(case)
        bare = pass_ext.layers.layer_before_attention(**plain(case))
        tokens = case["ids"] >= 0
        for name, ours, theirs in zip("qkv", got, bare, strict=True):
            assert_same_bits(ours[tokens], theirs[tokens])
            assert torch.equal(ours, theirs) == (ranks.get(name, 0) == 0)
    assert_before(case | dict(cos=None, sin=None))


@each("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "options"), rows_and(AFTER), ids=str)
def test_after_has_the_bits_of_adapter_rows(backend, dtype, rows, options):
    case = after_case(rows, dtype, **options)
    for ranks, count in adapters_of(backend, dtype, AFTER_RANKS):
        case |= adapters_for(case, ranks, count, ids_of(rows))
        got = assert_after(case | dict(activation="gelu_tanh"))
        bare = pass_ext.layers.layer_after_attention(**plain(case), activation="gelu_tanh")
        tokens = case["ids"] >= 0
        assert_same_bits(got[tokens], bare[tokens])
        assert not torch.equal(got[~tokens], bare[~tokens])
    if "norms" not in options:
        for scale in (0.25, 0.22):
            assert_after(case | dict(scale=scale))


@each("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rank", [15, 16, 128, *(pytest.param(n, marks=MANY) for n in (2, 31, 64, 127))])
def test_every_rank(backend, dtype, rank):
    case = before_case(5, dtype, plain=True) | dict(head_dim=16)
    for count, ids in ((1, [-1, 3, -7, 0, -2]), (3, [-3, -1, 0, -3, -2])):
        assert_before(case | adapters_for(case, dict(q=rank, v=129 - rank), count, ids))
    case = after_case(5, dtype)
    assert_after(case | adapters_for(case, dict(gate=rank, up=129 - rank), 3, [-3, -1, 0, -3, -2]))


def test_long_rows(backend):
    """More units than the warps of a block read at once, and rows whose norm has a launch of its own."""
    case = before_case(16, torch.bfloat16, width=2120, heads=2, key_heads=1) | dict(head_dim=16)
    assert_before(case | adapters_for(case, dict(q=6, k=20), 3, ids_of(16)))
    case = after_case(16, torch.bfloat16, width=2120, attended=1040, inner=1544)
    assert_after(case | adapters_for(case, dict(o=6, gate=9, up=4, down=8), 3, ids_of(16)))
    case = before_case(2, torch.float32, width=520, heads=2, key_heads=1, plain=True) | dict(head_dim=16)
    assert_before(case | adapters_for(case, dict(q=6, k=20), 3, [-2, -1]))


@pytest.mark.parametrize("name", ["q", "k"])
def test_adapters_at_odd_addresses(backend, name):
    case = before_case(4, torch.bfloat16, plain=True) | dict(head_dim=16)
    given = adapters_for(case, dict(q=3, k=2), 2, [-2, -1, 5, -1])
    odd = [
        torch.full((side.numel() + 1,), float("nan"), dtype=side.dtype)[1:].view(side.shape).copy_(side)
        for side in given["adapters"][name]
    ]
    expected = pass_ext.layers.layer_before_attention(**case, **given)
    given["adapters"][name] = tuple(odd)
    for ours, theirs in zip(assert_before(case | given), expected, strict=True):
        assert_same_bits(ours, theirs)


def test_every_row_has_an_adapter_of_its_own(backend):
    rows = 32
    ids = [-1 - (7 * n) % rows for n in range(rows)]
    case = before_case(rows, torch.bfloat16) | dict(head_dim=16)
    assert_before(case | adapters_for(case, dict(q=4, k=7, v=8), rows, ids))
    case = after_case(rows, torch.bfloat16)
    assert_after(case | adapters_for(case, dict(o=4, gate=7, up=8, down=1), rows, ids))


@pytest.mark.parametrize("id_dtype", [torch.int16, torch.int32, torch.int64], ids=str)
def test_ids_of_every_integer_type(backend, id_dtype):
    case = after_case(9, torch.bfloat16)
    case |= adapters_for(case, dict(o=3, up=4), 3, ids_of(9))
    got = pass_ext.layers.layer_after_attention(**case | dict(ids=case["ids"].to(id_dtype)))
    assert_same_bits(got, assert_after(case))


def test_one_adapter_serves_every_slot(backend):
    case = before_case(5, torch.float32) | dict(head_dim=16)
    first, second = (
        assert_before(case | adapters_for(case, dict(q=3, k=2), 1, ids))
        for ids in ([-1, 4, -9, -1000, 3], [-1, 0, -1, -1, 0])
    )
    for ours, theirs in zip(first, second, strict=True):
        assert_same_bits(ours, theirs)


def test_slots_beyond_the_adapters(backend):
    """Refused on the CPU before anything is computed; on CUDA they have no adapter."""
    case = after_case(5, torch.float32)
    case |= adapters_for(case, dict(o=3, gate=2), 2, [-3, -1, 0, -2, -9])
    if backend.name.startswith("cpu"):
        with pytest.raises(RuntimeError, match=r"layer_after_attention: ids must be at least -2 .2 adapters., got -3"):
            pass_ext.layers.layer_after_attention(**case)
        return
    got = assert_after(case)
    bare = pass_ext.layers.layer_after_attention(**plain(case))
    assert_same_bits(got[[0, 4]], bare[[0, 4]])


def test_debug_mode_refuses_slots_beyond_the_adapters(backend, debug_mode):
    case = before_case(3, torch.float32) | dict(head_dim=16)
    case |= adapters_for(case, dict(v=2), 2, [0, -3, -1])
    with pytest.raises(IndexError, match=r"ids must be at least -2 .2 adapters., got -3 at index 1"):
        pass_ext.layers.layer_before_attention(**case)


def test_adapters_are_not_read_without_slots(backend):
    """NaN in them changes no bit; nor do those of other slots."""
    for make, run, ranks in (
        (before_case, pass_ext.layers.layer_before_attention, dict(q=3, k=2, v=1)),
        (after_case, pass_ext.layers.layer_after_attention, dict(o=2, gate=3, up=1, down=4)),
    ):
        case = make(20, torch.bfloat16) | (dict(head_dim=16) if make is before_case else {})
        bare = run(**case)
        given = adapters_for(case, ranks, 2, [7] * 20)
        for pair in given["adapters"].values():
            for side in pair:
                side.fill_(float("nan"))
        got = run(**case, **given)
        for ours, theirs in zip(*(out if isinstance(out, tuple) else (out,) for out in (got, bare)), strict=True):
            assert_same_bits(ours, theirs)


def test_blocks_of_tokens_read_ids_alone(backend):
    """Each warp of a block reads the block's ids, and a block whose rows are all tokens nothing more."""
    if backend.name != "emulated":
        pytest.skip("only the emulator counts reads")
    rows, tiles = 21, 7  # 48 + 32 + 32 outputs; 16 rows a block
    case = before_case(rows, torch.bfloat16, plain=True) | dict(head_dim=16, cos=None, sin=None)

    def accesses(**more):
        pass_ext.layers.layer_before_attention(**case, **more)
        return emulator.load().count_accesses()  # of the last launch

    without = accesses()
    assert accesses(**adapters_for(case, dict(q=3, v=5), 2, [7] * rows)) == without + WARPS * rows * tiles
    assert accesses(**adapters_for(case, dict(q=0), 2, [-1] * rows)) == without
    half = accesses(**adapters_for(case, dict(q=3, k=3, v=3), 2, [7] * 16 + [-1] + [7] * 4))
    both = accesses(**adapters_for(case, dict(q=3, k=3, v=3), 2, [7] * 15 + [-1] * 2 + [7] * 4))
    assert without + WARPS * rows * tiles < half < both


def test_numbers_of_other_rows_and_slots_do_not_matter(backend):
    """Tokens that are infinite, and adapters of other slots that are NaN, leave a slot's row as it is."""
    case = after_case(6, torch.bfloat16, biases=False)
    ids = [3, -1, -2, 0, -1, 7]
    case |= adapters_for(case, dict(o=3, gate=5, up=2, down=3), 2, ids)
    clean = assert_after(case)
    spoilt = {name: value.clone() if torch.is_tensor(value) else value for name, value in case.items()}
    spoilt["attended"][[0, 3]] = float("inf")
    got = pass_ext.layers.layer_after_attention(**spoilt)
    assert_same_bits(got[[1, 2, 4, 5]], clean[[1, 2, 4, 5]])
    for pair in case["adapters"].values():
        for side in pair:
            side[1] = float("nan")
    got = pass_ext.layers.layer_after_attention(**case)
    assert_same_bits(got[[0, 1, 3, 4, 5]], clean[[0, 1, 3, 4, 5]])
    assert got[2].isnan().all()


def test_no_rows(backend):
    case = before_case(0, torch.float32) | dict(head_dim=16)
    q, k, v = pass_ext.layers.layer_before_attention(**case, **adapters_for(case, dict(q=3), 2, []))
    assert q.shape == (0, 3, 16) and k.shape == v.shape == (0, 2, 16)
    case = after_case(0, torch.float32)
    assert pass_ext.layers.layer_after_attention(**case, **adapters_for(case, dict(o=3), 2, [])).shape == (0, 72)


# ---- what is refused ----


def sides(down, up):
    return dict(adapters=dict(q=(torch.ones(down), torch.ones(up))))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(ids=None), "ids and adapters must be given together, got only adapters"),
        (dict(adapters=None), "ids and adapters must be given together, got only ids"),
        (dict(ids=torch.zeros(5, dtype=torch.int64)), "ids must have 6 .N, the rows of the input."),
        (dict(ids=torch.zeros(6, 1, dtype=torch.int64)), r"ids must have shape \[N\]"),
        (sides((2, 3, 71), (2, 3, 48)), "adapter of q: down must have 72 .in, of the linear layer."),
        (sides((2, 3, 72), (2, 3, 47)), "adapter of q: up must have 48 .out, of the linear layer."),
        (sides((2, 3, 72), (2, 4, 48)), "adapter of q: up must have 3 .r, the rank of down."),
        (sides((2, 3, 72), (3, 3, 48)), "adapter of q: up must have 2 .K, as in the first adapter."),
        (sides((3, 72), (3, 48)), r"adapter of q: down must have shape \[K, r, numbers\]"),
        (sides((1, 129, 72), (1, 129, 48)), "adapter of q: down must have less than 129 ranks"),
        (dict(adapters=dict(q=(torch.ones(2, 3, 72).double(), torch.ones(2, 3, 48)))), "down must be float32"),
        (dict(adapters=dict(q=(torch.ones(2, 72, 3).mT, torch.ones(2, 3, 48)))), "down must be contiguous"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_arguments(changes, message):
    case = before_case(6, torch.float32) | dict(head_dim=16)
    case |= adapters_for(case, dict(q=3), 2, [0, -1, -2, 0, 1, -1])
    with pytest.raises(RuntimeError, match=message):
        pass_ext.layers.layer_before_attention(**case | changes)


def test_linear_layers_of_the_other_half():
    case = after_case(2, torch.float32)
    given = adapters_for(case, dict(o=3), 1, [0, -1])
    with pytest.raises(ValueError, match="layer_after_attention: adapters must be of o, gate, up, down, got q"):
        pass_ext.layers.layer_after_attention(**case, **given | dict(adapters=dict(q=given["adapters"]["o"])))
    tensors = list(given["adapters"]["o"])
    attended, residual, o, gate, up, down = (
        case[name] for name in ("attended", "residual", "o_weight", "gate_weight", "up_weight", "down_weight")
    )
    arguments = (attended, residual, o, None, None, None, gate, None, up, None, down, None, None, 1e-6, 0, 0, 1.0)
    with pytest.raises(RuntimeError, match="adapted must have no bits but 120, got 1"):
        torch.ops.pass_ext.layer_after_attention(*arguments, given["ids"], tensors, 1, 1.0)
    with pytest.raises(RuntimeError, match=r"adapters must have 2 tensors .adapted 8., got 1"):
        torch.ops.pass_ext.layer_after_attention(*arguments, given["ids"], tensors[:1], 8, 1.0)
