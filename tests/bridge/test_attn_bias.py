"""`bridge.fmha.attn_bias`: masks, fields and updates of the torch biases, and their agreement with the JAX ones."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cases
import jax_frontend
import oracle
from bridge.fmha import attn_bias as ab
from pallas_kernels import errors, masks
from pallas_kernels.masks import Window

CPU = torch.device("cpu")
INT32 = torch.int32
TABLES = [[2, 0], [1, 3]]


@pytest.fixture(autouse=True)
def default_device_is_the_cpu(request, monkeypatch):
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def tables(rows=TABLES, dtype=INT32):
    return torch.tensor(rows, dtype=dtype)


def seen(mask):
    """bool numpy of an additive mask, which holds nothing but 0 and -inf."""
    mask = mask.cpu().double()
    assert ((mask == 0) | (mask == -torch.inf)).all()
    return (mask == 0).numpy()


def rows(bias, *shape):
    return ["".join("01"[int(x)] for x in row) for row in seen(bias.materialize(shape))]


def visible_keys(bias, *shape):
    return [set(np.flatnonzero(row).tolist()) for row in seen(bias.materialize(shape))]


# ------------------------------------------------------------------------------------------------ worked masks


def make(name, *arguments, **named):
    """The bias of a class by whichever factory takes its window."""
    cls = getattr(ab, name)
    factory = next(f for f in ("from_seqlens_local_gappy", "from_seqlens_local", "from_seqlens") if hasattr(cls, f))
    return getattr(cls, factory)(*arguments, **named)


PADDED = "BlockDiagonalPaddedKeysMask"
CAUSAL_PADDED = "BlockDiagonalCausalWithOffsetPaddedKeysMask"
LOCAL_PADDED, CAUSAL_LOCAL_PADDED = (f"BlockDiagonal{x}LocalAttentionPaddedKeysMask" for x in ("", "Causal"))
CAUSAL_GAPPY = "BlockDiagonalCausalWithOffsetGappyKeysMask"
LOCAL_GAPPY = "BlockDiagonalLocalAttentionFromBottomRightGappyKeysMask"


@pytest.mark.parametrize(
    "name, arguments, expected",
    [
        (PADDED, ([2, 2], 4, [3, 4]), "11100000 11100000 00001111 00001111"),
        (CAUSAL_PADDED, ([2, 2], 4, [3, 4]), "11000000 11100000 00001110 00001111"),
        (CAUSAL_LOCAL_PADDED, ([2, 2], 4, [3, 4], 2), "11000000 01100000 00000110 00000011"),
        (CAUSAL_LOCAL_PADDED, ([2], 4, [4], 0), "0000 0000"),
        (LOCAL_PADDED, ([2, 2], 4, [3, 4], 1, 1), "11100000 01100000 00000111 00000011"),
        (CAUSAL_GAPPY, ([2, 2], [1, 5, 8], [3, 2]), "01100000 01110000 00000100 00000110"),
        (LOCAL_GAPPY, ([2, 1], [4, 0, 8], [3, 3], 0, 1), "00000110 00000010 00100000"),
        # more queries than keys: the first see nothing; a sequence without queries, one without keys
        (CAUSAL_PADDED, ([3, 0, 1], 2, [1, 2, 0]), "000000 000000 100000 000000"),
        ("BlockDiagonalMask", ([1, 2], [2, 1]), "110 001 001"),
        ("BlockDiagonalCausalMask", ([2, 1], [3, 2]), "10000 11000 00010"),
        ("BlockDiagonalCausalFromBottomRightMask", ([2, 1], [3, 2]), "11000 11100 00011"),
    ],
)
def test_worked_masks(name, arguments, expected):
    expected = expected.split()
    assert rows(make(name, *arguments), len(expected), len(expected[0])) == expected


@pytest.mark.parametrize(
    "bias, expected",
    [
        (ab.LowerTriangularMask(), "1000 1100"),
        (ab.LowerTriangularFromBottomRightMask(), "1110 1111"),
        (ab.LowerTriangularFromBottomRightMask(), "00 10 11"),
        (ab.LowerTriangularFromBottomRightLocalAttentionMask(2), "0110 0011"),
        (ab.LocalAttentionFromBottomRightMask(1, 2), "1110 1111 0111 0011"),
        (ab.LocalAttentionFromBottomRightMask(1, 2), "11110 01111 00111 00011"),
    ],
)
def test_worked_dense_masks(bias, expected):
    expected = expected.split()
    assert rows(bias, len(expected), len(expected[0])) == expected


def test_worked_local_block_masks():
    local = ab.BlockDiagonalMask.from_seqlens([4, 1], [3, 2]).make_local_attention(2)
    assert rows(local, 5, 5) == ["10000", "11000", "01100", "00100", "00010"]
    local = ab.BlockDiagonalMask.from_seqlens([2, 1], [3, 2]).make_local_attention_from_bottomright(1)
    assert rows(local, 3, 5) == ["01000", "00100", "00001"]


def test_worked_gappy_mask():
    bias = ab.BlockDiagonalGappyKeysMask.from_seqlens([1, 1, 1], [0, 7, 12, 14], [6, 3, 1])
    assert visible_keys(bias, 3, 14) == [{0, 1, 2, 3, 4, 5}, {7, 8, 9}, {12}]


def test_worked_paged_mask():
    bias = ab.PagedBlockDiagonalPaddedKeysMask.from_seqlens([1, 1], [3, 2], tables(), 2)
    assert visible_keys(bias, 2, 8) == [{4, 5, 0}, {2, 3}]


def test_worked_paged_gappy_mask():
    gappy = ab.BlockDiagonalGappyKeysMask.from_seqlens([1, 1], [1, 5, 8], [2, 3])
    made = gappy.make_paged(tables(), 2, notional_padding=4, paged_type=ab.PagedBlockDiagonalGappyKeysMask)
    assert type(made) is ab.PagedBlockDiagonalGappyKeysMask
    assert made.q_seqinfo is gappy.q_seqinfo
    info = made.k_seqinfo
    assert info.seqstart.tolist() == [1, 1, 0] and info.seqstart_py == [1, 1, -1]
    assert info.seqlen.tolist() == info.seqlen_py == [3, 4]
    assert (info.max_seqlen, info.min_seqlen) == (3, 2)
    assert (info.seqstart.dtype, info.seqlen.dtype) == (INT32, INT32)
    assert visible_keys(made, 2, 8) == [{5, 0}, {3, 6, 7}]

    # the same from starts relative to each row
    direct = ab.PagedBlockDiagonalGappyKeysMask.from_seqlens([1, 1], [1, 1], [2, 3], tables(), 2)
    assert direct.k_seqinfo.seqstart_py == [1, 1, -1] and direct.k_seqinfo.seqlen.tolist() == [3, 4]
    assert (direct.k_seqinfo.max_seqlen, direct.k_seqinfo.min_seqlen) == (3, 2)
    assert visible_keys(direct, 2, 8) == [{5, 0}, {3, 6, 7}]


def test_the_later_logical_page_wins():
    bias = ab.PagedBlockDiagonalPaddedKeysMask.from_seqlens([1], [3], tables([[1, 1, 0]]), 2)
    assert rows(bias, 1, 6) == ["0010"]  # page 1 as logical page 1 holds one key, page 0 none
    assert rows(ab.PagedBlockDiagonalPaddedKeysMask.from_seqlens([1], [2], tables([[1, -1]]), 2), 1, 4) == ["0011"]
    nothing = ab.PagedBlockDiagonalPaddedKeysMask.from_seqlens([1], [0], tables([[-1]]), 2)
    assert nothing.materialize((1, 2)).shape == (1, 0)


# ------------------------------------------------------------------------- every class against brute force

# class -> (kind of oracle.visible_table, storage)
PACKED = {
    **cases.MASK_CLASSES,
    "BlockDiagonalMask": ("all", "packed"),
    "BlockDiagonalCausalMask": ("causal top-left", "packed"),
    "BlockDiagonalCausalFromBottomRightMask": ("causal", "packed"),
    "BlockDiagonalCausalLocalAttentionMask": ("local top-left", "packed"),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": ("local", "packed"),
    "BlockDiagonalLocalAttentionFromBottomRightGappyKeysMask": ("window", "gappy"),
    "PagedBlockDiagonalCausalLocalPaddedKeysMask": ("local", "paged"),
}
DENSE = {
    "LowerTriangularMask": "causal top-left",
    "LowerTriangularFromBottomRightMask": "causal",
    "LowerTriangularFromBottomRightLocalAttentionMask": "local",
    "LocalAttentionFromBottomRightMask": "window",
    "LowerTriangularMaskWithTensorBias": "causal top-left",
}


def draw_window(draw, kind):
    sizes = st.integers(0, 4)
    if kind == "window":
        return {"left": draw(sizes), "right": draw(sizes)}
    return {"window": draw(sizes) + 1} if kind.startswith("local") else {}


@st.composite
def packed_biases(draw, name):
    """(bias, shape, expected bool table) of one packed class."""
    cls, (kind, storage) = getattr(ab, name), PACKED[name]
    window = draw_window(draw, kind)
    pairs = draw(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), min_size=1, max_size=4))
    q_lens, k_lens = [q for q, _ in pairs], [k for _, k in pairs]
    if storage == "packed":
        if name in (
            "BlockDiagonalCausalFromBottomRightMask",
            "BlockDiagonalCausalLocalAttentionFromBottomRightMask",
            "BlockDiagonalCausalLocalAttentionMask",
        ):
            k_lens = [max(q, k) for q, k in pairs]
        keys = total = sum(k_lens)
        starts = np.cumsum([0, *k_lens])
        positions = oracle.key_positions("gappy", k_lens, starts=starts)
        args = {"_window_size": window["window"]} if window else {}
        base = ab.BlockDiagonalMask.from_seqlens(q_lens, k_lens)
        bias = cls(base.q_seqinfo, base.k_seqinfo, **args)
    elif storage == "padded":
        padding = max(k_lens) + draw(st.integers(0, 2))
        keys = total = padding * len(pairs)
        positions = oracle.key_positions("padded", k_lens, total=total)
        bias = make(name, q_lens, padding, k_lens, *window.values())
    elif storage == "gappy":
        starts = draw(st.lists(st.integers(0, 6), min_size=len(pairs), max_size=len(pairs)))
        keys = total = max(map(sum, zip(starts, k_lens))) + draw(st.integers(0, 2))
        positions = oracle.key_positions("gappy", k_lens, starts=starts)
        bias = make(name, q_lens, [*starts, keys], k_lens, *window.values())
    else:
        page = draw(st.sampled_from([1, 2, 3, 8]))
        starts = draw(st.lists(st.integers(0, 5), min_size=len(pairs), max_size=len(pairs)))
        starts = starts if storage == "paged gappy" else [0] * len(pairs)
        width = max(1, -(-max(map(sum, zip(starts, k_lens))) // page) + draw(st.integers(0, 2)))
        order = draw(st.permutations(range(len(pairs) * width + 1)))
        table = np.array(order[: len(pairs) * width]).reshape(len(pairs), width)
        keys, total = len(pairs) * width * page, int(table.max() + 1) * page
        positions = oracle.key_positions(storage, k_lens, starts=starts, block_tables=table, page_size=page)
        block_tables = tables(table, draw(st.sampled_from([INT32, torch.int64])))
        begin = [starts] if storage == "paged gappy" else []
        bias = make(name, q_lens, *begin, k_lens, block_tables, page, *window.values())
    tables_seen = [oracle.visible_table(kind, q, k, **window) for q, k in zip(q_lens, k_lens)]
    return bias, (sum(q_lens), keys), oracle.mask_table(q_lens, positions, tables_seen, total)


@pytest.mark.parametrize("name", PACKED)
@given(data=st.data())
def test_packed_classes_against_brute_force(name, data):
    bias, shape, expected = data.draw(packed_biases(name))
    assert type(bias).__name__ == name
    np.testing.assert_array_equal(seen(bias.materialize(shape)), expected)
    many = bias.materialize((2, 1, 3, *shape), torch.bfloat16)
    assert many.dtype == torch.bfloat16 and many.shape == (2, 1, 3, *expected.shape)
    np.testing.assert_array_equal(seen(many), np.broadcast_to(expected, many.shape))
    moved = bias.to("cpu")
    assert type(moved) is type(bias)
    np.testing.assert_array_equal(seen(moved.materialize(shape)), expected)


@pytest.mark.parametrize("name", PACKED)
@given(data=st.data())
def test_packed_normal_form_and_host_check(name, data):
    bias, (queries, keys), _ = data.draw(packed_biases(name))
    n = len(bias.q_seqinfo.seqstart_py) - 1
    paged = name.startswith("Paged")
    if paged:
        keys = (int(bias.block_tables.max()) + 1) * bias.page_size
    ab.host_check(bias, queries, keys)
    form = ab.normal_form(bias, 1, queries, keys)
    assert form.q_start is bias.q_seqinfo.seqstart
    for x, shape in ((form.q_start, (n + 1,)), (form.k_start, (n,)), (form.k_len, (n,))):
        assert x.dtype == INT32 and tuple(x.shape) == shape
    assert form.packed and form.tensor_bias is None
    assert (form.block_table is not None) == paged == (form.page_size is not None)
    if paged:
        assert form.block_table.dtype == INT32 and form.page_size == bias.page_size
    assert form.window.top_left == PACKED[name][0].endswith("top-left")
    with pytest.raises(errors.ShapeError):
        ab.normal_form(bias, 2, queries, keys)
    with pytest.raises(errors.ShapeError):
        ab.host_check(bias, queries + 1, keys)


@pytest.mark.parametrize("name", DENSE)
@given(q_len=st.integers(0, 5), k_len=st.integers(0, 6), data=st.data())
def test_dense_classes_against_brute_force(name, q_len, k_len, data):
    kind, cls = DENSE[name], getattr(ab, name)
    window = draw_window(data.draw, kind)
    if name == "LowerTriangularMaskWithTensorBias":
        bias = ab.LowerTriangularMask().add_bias(torch.zeros(q_len, k_len))
    else:
        bias = cls(*window.values())
    assert type(bias) is cls
    expected = oracle.visible_table(kind, q_len, k_len, **window)
    got = bias.materialize((2, 3, q_len, k_len), torch.float16)
    assert got.dtype == torch.float16
    np.testing.assert_array_equal(seen(got), np.broadcast_to(expected, got.shape))
    got += 1  # memory of its own, not an expanded view
    ab.host_check(bias, q_len, 2 * k_len)
    form = ab.normal_form(bias, 2, q_len, 2 * k_len, device="cpu")
    assert form.q_start.tolist() == [0, q_len, 2 * q_len]
    assert form.k_start.tolist() == [0, k_len] and form.k_len.tolist() == [k_len, k_len]
    assert {x.dtype for x in form[:3]} == {INT32}
    assert not form.packed and form.block_table is None and form.page_size is None
    assert form.window.top_left == kind.endswith("top-left")
    moved = bias.to(CPU)
    np.testing.assert_array_equal(seen(moved.materialize((q_len, k_len))), expected)


def test_tensor_bias():
    extra = torch.randn(2, 3, 2, 4, requires_grad=True)
    bias = ab.LowerTriangularMask().add_bias(extra)
    assert isinstance(bias, ab.LowerTriangularMask) and bias._bias is extra
    got = bias.materialize((2, 3, 2, 4))
    causal = ab.LowerTriangularMask().materialize((2, 4))
    torch.testing.assert_close(got, extra + causal)
    got[causal.expand_as(got) == 0].sum().backward()
    torch.testing.assert_close(extra.grad, (causal == 0).float().expand_as(extra))
    form = ab.normal_form(bias, 2, 2, 8)
    assert form.tensor_bias is extra and form.window == Window(None, 0, top_left=True)
    assert ab.normal_form(extra, 2, 2, 8).tensor_bias is extra
    assert ab.normal_form(None, 2, 3, 8).k_len.tolist() == [4, 4]
    ab.host_check(None, 2, 8)
    ab.host_check(extra, 2, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name, arguments, kind, window",
    [
        ("BlockDiagonalMask", ([2], [4]), "all", {}),
        ("BlockDiagonalCausalMask", ([2], [4]), "causal top-left", {}),
        ("BlockDiagonalCausalFromBottomRightMask", ([2], [4]), "causal", {}),
        (PADDED, ([2], 4, [4]), "all", {}),
        (CAUSAL_PADDED, ([2], 4, [4]), "causal", {}),
        (LOCAL_PADDED, ([2], 4, [4], 0, 1), "window", {"left": 0, "right": 1}),
        (CAUSAL_LOCAL_PADDED, ([2], 4, [4], 2), "local", {"window": 2}),
    ],
)
def test_create_block_mask(name, arguments, kind, window, dtype):
    got = make(name, *arguments)._create_block_mask((2, 3), dtype, "cpu")
    assert got.dtype == dtype
    np.testing.assert_array_equal(seen(got), oracle.visible_table(kind, 2, 3, **window))


# ------------------------------------------------------------------------------------------------ fields


def test_seqlen_info():
    info = ab._SeqLenInfo.from_seqlens([2, 3, 2])
    assert info.seqstart.tolist() == info.seqstart_py == [0, 2, 5, 7]
    assert info.seqstart.dtype == INT32 and info.seqstart.device == CPU
    assert (info.max_seqlen, info.min_seqlen) == (3, 2)
    assert list(info.intervals()) == [(0, 2), (2, 5), (5, 7)]
    assert ab._SeqLenInfo.from_seqlens(np.array([2, 3, 2])).seqstart_py == [0, 2, 5, 7]
    assert ab._SeqLenInfo.from_seqlens(n for n in (2, 3)).seqstart_py == [0, 2, 5]
    empty = ab._SeqLenInfo.from_seqlens([])
    assert (empty.seqstart_py, empty.max_seqlen, empty.min_seqlen) == ([0], -1, -1)
    assert ab._SeqLenInfo(info.seqstart, 3, 2, [0, 2, 5, 7]).seqstart is info.seqstart  # positional order
    assert info.to("cpu") is info and info.to(CPU) is info


def test_padded_seqlen_info():
    lens = [2, 3, 1]
    info = ab._PaddedSeqLenInfo.from_seqlens_padded(lens, 4)
    assert info.seqstart.tolist() == info.seqstart_py == [0, 4, 8, 12]
    assert info.seqlen.tolist() == info.seqlen_py == [2, 3, 1]
    assert info.seqlen_py is not lens
    assert (info.seqlen.dtype, info.max_seqlen, info.min_seqlen, info.padding) == (INT32, 3, 1, 4)
    assert list(info.intervals()) == [(0, 2), (4, 7), (8, 9)]
    again = ab._PaddedSeqLenInfo(info.seqstart, 3, 1, [0, 4, 8, 12], info.seqlen, [2, 3, 1], 4)
    assert again.padding == 4


def test_gappy_seqlen_info():
    info = ab._GappySeqInfo.from_seqlens_gappy([0, 7, 12, 14], [6, 3, 1], False, device=CPU)
    assert info.seqstart.tolist() == info.seqstart_py == [0, 7, 12, 14]
    assert info.seqlen.tolist() == info.seqlen_py == [6, 3, 1]
    assert (info.max_seqlen, info.min_seqlen) == (6, 1)
    assert list(info.intervals()) == [(0, 6), (7, 10), (12, 13)]
    paged = ab._GappySeqInfo.from_seqlens_gappy([5, 1], [2, 3], True, device=CPU)
    assert paged.seqstart_py == [5, 1, -1] and paged.seqstart[:2].tolist() == [5, 1]
    assert paged.seqlen.tolist() == paged.seqlen_py == [7, 4]
    assert (paged.max_seqlen, paged.min_seqlen) == (3, 2)


def test_fields_in_positional_order():
    q = ab._SeqLenInfo.from_seqlens([1, 1])
    k = ab._PaddedSeqLenInfo.from_seqlens_padded([3, 2], 4)
    g = ab._GappySeqInfo.from_seqlens_gappy([0, 4, 8], [3, 2], False)
    t = tables()
    assert ab.BlockDiagonalMask(q, q)._batch_sizes is None
    assert ab.BlockDiagonalCausalWithOffsetPaddedKeysMask(q, k).causal_diagonal is None
    local = ab.BlockDiagonalLocalAttentionPaddedKeysMask(q, k, 3, 1)
    assert (local.window_left, local.window_right) == (3, 1)
    assert ab.BlockDiagonalCausalLocalAttentionPaddedKeysMask(q, k, 3)._window_size == 3
    assert ab.BlockDiagonalCausalLocalAttentionMask(q, q, None, 3)._window_size == 3
    assert ab.BlockDiagonalLocalAttentionFromBottomRightGappyKeysMask(q, g, 3, 1).window_right == 1
    for cls in (ab.PagedBlockDiagonalPaddedKeysMask, ab.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask):
        paged = cls(q, k, t, 2)
        assert (paged.q_seqinfo, paged.k_seqinfo, paged.block_tables, paged.page_size) == (q, k, t, 2)
    assert ab.PagedBlockDiagonalCausalLocalPaddedKeysMask(q, k, t, 2, 5)._window_size == 5
    for name in ("PagedBlockDiagonalPaddedKeysMask", "PagedBlockDiagonalGappyKeysMask"):
        with pytest.raises(TypeError):
            getattr(ab, name)(q, k)


def test_inheritance():
    def parents(name):
        return {c.__name__ for c in getattr(ab, name).__mro__ if c.__name__ in ab.__all__} - {name}

    attention = {"AttentionBias"}
    block, padded_, gappy = ({*attention, f"BlockDiagonal{x}Mask"} for x in ("", "PaddedKeys", "GappyKeys"))
    paged, paged_gappy = ({*attention, f"PagedBlockDiagonal{x}KeysMask"} for x in ("Padded", "Gappy"))
    expected = {
        "LowerTriangularMask": attention,
        "LowerTriangularFromBottomRightMask": attention,
        "LocalAttentionFromBottomRightMask": attention,
        "LowerTriangularMaskWithTensorBias": {*attention, "LowerTriangularMask"},
        "LowerTriangularFromBottomRightLocalAttentionMask": {*attention, "LowerTriangularFromBottomRightMask"},
        "BlockDiagonalMask": attention,
        "BlockDiagonalCausalMask": block,
        "BlockDiagonalCausalFromBottomRightMask": block,
        "BlockDiagonalCausalLocalAttentionMask": {*block, "BlockDiagonalCausalMask"},
        "BlockDiagonalCausalLocalAttentionFromBottomRightMask": {*block, "BlockDiagonalCausalFromBottomRightMask"},
        "BlockDiagonalPaddedKeysMask": attention,
        "BlockDiagonalCausalWithOffsetPaddedKeysMask": padded_,
        "BlockDiagonalLocalAttentionPaddedKeysMask": padded_,
        "BlockDiagonalCausalLocalAttentionPaddedKeysMask": padded_,
        "BlockDiagonalGappyKeysMask": attention,
        "BlockDiagonalCausalWithOffsetGappyKeysMask": gappy,
        "BlockDiagonalLocalAttentionFromBottomRightGappyKeysMask": gappy,
        "PagedBlockDiagonalPaddedKeysMask": attention,
        "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask": paged,
        "PagedBlockDiagonalCausalLocalPaddedKeysMask": paged,
        "PagedBlockDiagonalGappyKeysMask": attention,
        "PagedBlockDiagonalCausalWithOffsetGappyKeysMask": paged_gappy,
        "_PaddedSeqLenInfo": {"_SeqLenInfo"},
        "_GappySeqInfo": {"_SeqLenInfo"},
    }
    assert {name: parents(name) for name in expected} == expected
    assert {*expected, *attention, "_SeqLenInfo"} | {"VARLEN_BIASES", "Lowered", "host_check", "normal_form"} == {
        *ab.__all__
    }
    assert [c.__name__ for c in ab.VARLEN_BIASES] == [
        "BlockDiagonalMask",
        "BlockDiagonalGappyKeysMask",
        "BlockDiagonalPaddedKeysMask",
        "PagedBlockDiagonalPaddedKeysMask",
        "PagedBlockDiagonalGappyKeysMask",
    ]
    for suffix, unpaged in (
        ("PaddedKeysMask", "BlockDiagonalPaddedKeysMask"),
        ("CausalWithOffsetPaddedKeysMask", "BlockDiagonalCausalWithOffsetPaddedKeysMask"),
        ("CausalLocalPaddedKeysMask", "BlockDiagonalCausalLocalAttentionPaddedKeysMask"),
        ("GappyKeysMask", "BlockDiagonalGappyKeysMask"),
        ("CausalWithOffsetGappyKeysMask", "BlockDiagonalCausalWithOffsetGappyKeysMask"),
    ):
        assert getattr(ab, f"PagedBlockDiagonal{suffix}")._UNPAGED_TYPE is getattr(ab, unpaged)


def test_to_and_pickle():
    mask = ab.BlockDiagonalMask.from_seqlens([1, 2])
    meta = mask.to("meta")
    assert meta.q_seqinfo.seqstart.is_meta and meta.q_seqinfo is meta.k_seqinfo
    assert meta.q_seqinfo.seqstart_py == [0, 1, 3]
    assert meta.q_seqinfo.seqstart_py is not mask.q_seqinfo.seqstart_py
    assert mask.to(CPU).q_seqinfo is mask.q_seqinfo
    paged = ab.PagedBlockDiagonalPaddedKeysMask.from_seqlens([1, 1], [3, 2], tables(), 2)
    moved = paged.to(torch.device("meta"))
    assert moved.block_tables.is_meta and moved.k_seqinfo.seqlen.is_meta and moved.page_size == 2
    assert ab.LowerTriangularMask().add_bias(torch.zeros(2, 2)).to("meta")._bias.is_meta
    again = pickle.loads(pickle.dumps(paged))
    assert rows(again, 2, 8) == rows(paged, 2, 8)


@pytest.mark.parametrize(
    "make",
    [
        lambda sub: sub(ab.LowerTriangularMask)(),
        lambda sub: sub(ab.LowerTriangularMaskWithTensorBias)(torch.zeros(1)),
        lambda sub: sub(ab.LowerTriangularFromBottomRightMask)(),
        lambda sub: sub(ab.LowerTriangularFromBottomRightLocalAttentionMask)(2),
        lambda sub: sub(ab._SeqLenInfo).from_seqlens([1]),
        lambda sub: sub(ab.BlockDiagonalMask).from_seqlens([1]),
        lambda sub: sub(ab.BlockDiagonalCausalWithOffsetPaddedKeysMask).from_seqlens([1], 2, [2]),
        lambda sub: sub(ab.PagedBlockDiagonalGappyKeysMask).from_seqlens([1], [0], [2], tables([[0]]), 2),
    ],
)
def test_a_subclass_needs_its_own_to(make):
    with pytest.raises(AssertionError, match="must implement `to`"):
        make(lambda cls: type("Mine", (cls,), {})).to(CPU)


# ------------------------------------------------------------------------------- conversions and tensor lists


def test_make_paged_keeps_the_tensors():
    for name, extra in (
        (PADDED, []),
        (CAUSAL_PADDED, []),
        (CAUSAL_LOCAL_PADDED, [2]),
    ):
        bias = make(name, [1, 1], 4, [3, 2], *extra)
        paged_type = next(
            c for c in vars(ab).values() if isinstance(c, type) and getattr(c, "_UNPAGED_TYPE", None) is type(bias)
        )
        paged = bias.make_paged(tables([[2, 0, 9], [1, 3, 9]]), 2, paged_type)
        assert type(paged) is paged_type
        assert paged.q_seqinfo is bias.q_seqinfo and paged.page_size == 2
        assert paged.k_seqinfo.seqlen is bias.k_seqinfo.seqlen and paged.k_seqinfo.seqstart is bias.k_seqinfo.seqstart
        assert paged.k_seqinfo.padding == 6 and bias.k_seqinfo.padding == 4
        # logical rows of the pages see what rows of the slots did
        slots, pages = seen(bias.materialize((2, 8))), seen(paged.materialize((2, 12)))
        for b, table in enumerate(TABLES):
            for p, page in enumerate(table):
                np.testing.assert_array_equal(
                    pages[b, 2 * page : 2 * page + 2], slots[b, 4 * b + 2 * p : 4 * b + 2 * p + 2]
                )
    assert paged._window_size == 2


def test_make_local_attention_of_padded_keys():
    bias = make(PADDED, [2, 2], 4, [3, 4]).make_local_attention(1, 1)
    assert type(bias) is ab.BlockDiagonalLocalAttentionPaddedKeysMask
    assert rows(bias, 4, 8) == ["11100000", "01100000", "00000111", "00000011"]


def test_make_of_block_diagonal_mask():
    mask, _ = ab.BlockDiagonalMask.from_tensor_list([torch.zeros(2, 3, 1)])
    for made, cls in (
        (mask.make_causal(), ab.BlockDiagonalCausalMask),
        (mask.make_causal_from_bottomright(), ab.BlockDiagonalCausalFromBottomRightMask),
        (mask.make_local_attention(2), ab.BlockDiagonalCausalLocalAttentionMask),
        (mask.make_local_attention_from_bottomright(2), ab.BlockDiagonalCausalLocalAttentionFromBottomRightMask),
    ):
        assert type(made) is cls
        assert made.q_seqinfo is mask.q_seqinfo and made.k_seqinfo is mask.k_seqinfo and made._batch_sizes == [2]
        assert getattr(made, "_window_size", 2) == 2
    local = ab.LowerTriangularFromBottomRightMask().make_local_attention(3)
    assert local == ab.LowerTriangularFromBottomRightLocalAttentionMask(3)


def test_tensor_list():
    tensors = [torch.randn(1, 3, 2, 4), torch.randn(2, 5, 2, 4), torch.randn(1, 0, 2, 4)]
    mask, packed = ab.BlockDiagonalMask.from_tensor_list(tensors)
    assert packed.shape == (1, 13, 2, 4)
    assert mask.q_seqinfo is mask.k_seqinfo and mask.q_seqinfo.seqstart_py == [0, 3, 8, 13, 13]
    for part, tensor in zip(mask.split(packed), tensors, strict=True):
        torch.testing.assert_close(part, tensor, rtol=0, atol=0)
    assert mask.split(packed)[0].data_ptr() == packed.data_ptr()
    single = ab._SeqLenInfo.from_seqlens([3, 5, 5]).split(packed)
    assert [tuple(x.shape) for x in single] == [(1, 3, 2, 4), (1, 5, 2, 4), (1, 5, 2, 4)]


def test_tensor_lists_qkv():
    q, k, v = ([torch.randn(b, m + extra, 2) for b, m in ((2, 3), (1, 4))] for extra in (0, 1, 1))
    mask, packed_q, packed_k, packed_v = ab.BlockDiagonalMask.from_tensor_lists_qkv(q, k, v)
    assert mask.q_seqinfo.seqstart_py == [0, 3, 6, 10] and mask.k_seqinfo.seqstart_py == [0, 4, 8, 13]
    for parts, tensors in (
        (mask.split_queries(packed_q), q),
        (mask.split_kv(packed_k), k),
        (mask.split_kv(packed_v), v),
    ):
        for part, tensor in zip(parts, tensors, strict=True):
            torch.testing.assert_close(part, tensor, rtol=0, atol=0)
    assert ab.BlockDiagonalMask.from_tensor_lists_qkv(q, k)[3] is None
    causal, *_ = ab.BlockDiagonalCausalMask.from_tensor_lists_qkv(q, k, v)
    assert type(causal) is ab.BlockDiagonalCausalMask
    with pytest.raises(AssertionError):
        mask.split(packed_q)
    for bad in ((q, k[:1], v), (q, k, v[:1]), (q, [k[1], k[0]], v), (q, k, q)):
        with pytest.raises(AssertionError):
            ab.BlockDiagonalMask.from_tensor_lists_qkv(*bad)


def test_equal_lengths_are_shared():
    for kv in (None, [1, 2], np.array([1, 2])):
        mask = ab.BlockDiagonalMask.from_seqlens([1, 2], kv)
        assert mask.q_seqinfo is mask.k_seqinfo
    assert ab.BlockDiagonalMask.from_seqlens([]).materialize((2, 0, 0)).shape == (2, 0, 0)


# --------------------------------------------------------------------------------------------- in-place updates


def test_inplace_update_of_packed_lengths():
    info = ab._SeqLenInfo.from_seqlens([2, 4, 3])
    address, host = info.seqstart.data_ptr(), info.seqstart_py
    info.from_seqlens_inplace([3, 1, 1])
    assert info.seqstart.tolist() == info.seqstart_py == [0, 3, 4, 5]
    assert info.seqstart.data_ptr() == address and info.seqstart_py is host
    assert (info.max_seqlen, info.min_seqlen) == (4, 2)  # stale
    for bad in ([1, 1], [5, 1, 1], torch.tensor([1, 1, 1])):
        with pytest.raises(AssertionError):
            info.from_seqlens_inplace(bad)
    assert info.seqstart_py == [0, 3, 4, 5]


def test_inplace_update_of_padded_lengths():
    bias = make(CAUSAL_PADDED, [1, 1], 8, [4, 2])
    info = bias.k_seqinfo
    address = info.seqlen.data_ptr()
    info.from_seqlens_padded_inplace([1, 3])
    assert info.seqlen.tolist() == info.seqlen_py == [1, 3]
    assert info.seqlen.data_ptr() == address and info.seqstart_py == [0, 8, 16]
    assert (info.max_seqlen, info.min_seqlen) == (4, 2)  # stale
    assert rows(bias, 2, 16) == ["1000000000000000", "0000000011100000"]
    for bad in ([1], [1, 5], [9, 1], torch.tensor([1, 1])):
        with pytest.raises(AssertionError):
            info.from_seqlens_padded_inplace(bad)


def test_masking_follows_the_device_and_sizes_the_host():
    bias = make(PADDED, [1, 1], 4, [3, 2])
    bias.k_seqinfo.seqlen.copy_(torch.tensor([1, 4]))
    bias.q_seqinfo.seqstart.copy_(torch.tensor([0, 2, 2]))
    assert rows(bias, 2, 8) == ["10000000", "10000000"]
    assert ab.normal_form(bias, 1, 2, 8).k_len.tolist() == [1, 4]
    ab.host_check(bias, 2, 8)
    with pytest.raises(ValueError):
        bias.materialize((2, 4))


def test_pitch_is_not_the_padding():
    bias = make(PADDED, [2, 1], 8192, [20, 0])
    ab.host_check(bias, 3, 3 * 64)
    assert ab.normal_form(bias, 1, 3, 3 * 64).k_start.tolist() == [0, 96]
    one = make(PADDED, [1], 8192, [20])
    ab.host_check(one, 1, 4096)


# ----------------------------------------------------------------------------------------- the JAX front end


@st.composite
def jax_arguments(draw, name):
    """Arguments of one of the ten classes for both front ends; the shapes are fixed, so that JAX compiles once."""
    n, queries, capacity, page = 3, 6, 6, 2
    kind, storage = cases.MASK_CLASSES[name]
    cuts = sorted(draw(st.lists(st.integers(0, queries), min_size=n - 1, max_size=n - 1)))
    arguments = {"q_seqlen": np.diff([0, *cuts, queries]).tolist()}
    lens = draw(st.lists(st.integers(0, capacity), min_size=n, max_size=n))
    arguments["kv_seqlen"] = lens
    if storage == "padded":
        arguments["kv_padding"] = capacity
    elif storage == "gappy":
        arguments["kv_seqstarts"] = [draw(st.integers(0, n * capacity - k)) for k in lens] + [n * capacity]
    elif storage == "paged gappy":
        arguments["kv_seqstarts"] = [draw(st.integers(0, capacity - k)) for k in lens]
    if storage.startswith("paged"):
        width = capacity // page
        arguments["block_tables"] = np.array(draw(st.permutations(range(n * width))), np.int32).reshape(n, width)
        arguments["page_size"] = page
    arguments |= {cases.WINDOW_NAMES[k]: w for k, w in draw_window(draw, kind).items()}
    return arguments, (queries, n * capacity)


@pytest.mark.parametrize("name", cases.MASK_CLASSES)
@given(data=st.data())
def test_equal_to_the_jax_class(name, data):
    arguments, (queries, keys) = data.draw(jax_arguments(name))
    theirs = jax_frontend.mask(name, arguments)
    assert type(theirs) is getattr(masks, name)
    if "block_tables" in arguments:
        arguments = {**arguments, "block_tables": torch.from_numpy(arguments["block_tables"])}
    mine = make(name, **arguments)

    ours, form = ab.normal_form(mine, 1, queries, keys), theirs.normal_form(keys)
    for field in masks.NormalForm._fields:
        x, y = getattr(ours, field), getattr(form, field)
        assert (x is None) == (y is None)
        if x is not None:
            np.testing.assert_array_equal(x.numpy(), np.asarray(y))
            assert x.numpy().dtype == np.asarray(y).dtype
    assert ours.window == theirs.window and ours.page_size == theirs.paging
    np.testing.assert_array_equal(
        seen(mine.materialize((queries, keys))), np.asarray(theirs.materialize((queries, keys))) == 0
    )
    for sizes in ((queries, keys), (queries + 1, keys), (queries, keys + 1), (queries, keys // 2)):
        ours_says = error_of(lambda q, k: ab.host_check(mine, q, k), *sizes)
        theirs_says = error_of(lambda q, k: theirs.check(k, q), *sizes)
        assert ours_says == theirs_says


def error_of(check, *sizes):
    try:
        check(*sizes)
    except ValueError as error:
        return type(error)
    return None


# ------------------------------------------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_on_cuda_nothing_is_read_back():
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        bias = make(CAUSAL_PADDED, [1, 1], 4, [3, 2])
        assert bias.q_seqinfo.seqstart.is_cuda and bias.k_seqinfo.seqlen.is_cuda
        paged = bias.make_paged(
            bias.q_seqinfo.seqstart.new_zeros(2, 2), 2, ab.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask
        )
        gappy = ab.BlockDiagonalGappyKeysMask.from_seqlens([1, 1], [1, 5, 8], [2, 3])
        gappy_paged = gappy.make_paged(paged.block_tables, 2, 4, ab.PagedBlockDiagonalGappyKeysMask)
        for x in (bias, paged, gappy, gappy_paged, ab.BlockDiagonalMask.from_seqlens([1, 1], [4, 4])):
            ab.host_check(x, 2, 8)
            form = ab.normal_form(x, 1, 2, 8)
            assert all(t.is_cuda for t in form if isinstance(t, torch.Tensor))
            assert x.to("cuda").q_seqinfo is x.q_seqinfo
        bias.k_seqinfo.from_seqlens_padded_inplace([1, 2])
        bias.q_seqinfo.from_seqlens_inplace([1, 1])
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert rows(bias, 2, 8) == ["10000000", "00001100"]
    assert bias.k_seqinfo.seqlen.tolist() == [1, 2]
    back = bias.to("cpu")
    assert not back.k_seqinfo.seqlen.is_cuda and back.k_seqinfo.seqlen.tolist() == [1, 2]
