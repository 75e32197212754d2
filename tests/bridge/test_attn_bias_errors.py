"""What `bridge.fmha.attn_bias` refuses, and with which kinds of errors."""

import pytest
import torch

from bridge.fmha import attn_bias as ab

TABLES = [[2, 0], [1, 3]]


def tables(rows=TABLES):
    return torch.tensor(rows, dtype=torch.int32)


def padded(name, *arguments):
    cls = getattr(ab, name)
    return (cls.from_seqlens_local if len(arguments) > 3 else cls.from_seqlens)(*arguments)


Q = [1, 1]


def gappy_pages(starts, notional_padding=4):
    bias = ab.BlockDiagonalGappyKeysMask.from_seqlens(Q, starts, [2, 2])
    return bias.make_paged(tables(), 2, notional_padding, ab.PagedBlockDiagonalGappyKeysMask)


def paged(kv_seqlen, rows=TABLES):
    return ab.PagedBlockDiagonalPaddedKeysMask.from_seqlens(Q, kv_seqlen, tables(rows), 2)


@pytest.mark.parametrize(
    "kinds, call",
    [
        # lengths
        ((AssertionError, ValueError), lambda: ab._SeqLenInfo.from_seqlens(torch.tensor([1, 2]))),
        ((AssertionError, ValueError), lambda: ab._SeqLenInfo.from_seqlens([1.5])),
        ((AssertionError, ValueError), lambda: ab._SeqLenInfo.from_seqlens([1, -1])),
        ((ValueError,), lambda: ab._SeqLenInfo.from_seqlens([2**31])),
        ((ValueError,), lambda: ab._PaddedSeqLenInfo.from_seqlens_padded([], 4)),
        ((AssertionError,), lambda: ab._PaddedSeqLenInfo.from_seqlens_padded([5], 4)),
        ((AssertionError,), lambda: ab._PaddedSeqLenInfo.from_seqlens_padded(torch.tensor([5]), 8)),
        ((AssertionError,), lambda: ab._PaddedSeqLenInfo(torch.zeros(1), 1, 1, [0], torch.zeros(1), [1], 4)),
        ((RuntimeError,), lambda: ab._PaddedSeqLenInfo.from_seqlens([1])),
        ((RuntimeError,), lambda: ab._PaddedSeqLenInfo.from_seqlens_padded([1], 4).from_seqlens_inplace([1])),
        ((NotImplementedError,), lambda: ab._PaddedSeqLenInfo.from_seqlens_padded([1], 4).split(torch.zeros(1, 4))),
        ((NotImplementedError,), lambda: ab._GappySeqInfo.from_seqlens([1])),
        ((ValueError,), lambda: ab._GappySeqInfo.from_seqlens_gappy([0], [], False)),
        ((ValueError,), lambda: ab._GappySeqInfo.from_seqlens_gappy([0, 1], [1, 1], False)),
        ((ValueError,), lambda: ab._GappySeqInfo.from_seqlens_gappy([0, 1, 2], [1, 1], True)),
        ((AssertionError,), lambda: ab._GappySeqInfo.from_seqlens_gappy([0, 1], torch.tensor([1]), False)),
        ((NotImplementedError,), lambda: ab._GappySeqInfo.from_seqlens_gappy([0, 4], [1], False).split(torch.zeros(1))),
        (
            (NotImplementedError,),
            lambda: ab._GappySeqInfo.from_seqlens_gappy([0, 4], [1], False).from_seqlens_inplace([1]),
        ),
        ((ValueError,), lambda: ab._SeqLenInfo.from_seqlens([1, 2]).split(torch.zeros(2, 3, 1))),
        ((ValueError,), lambda: ab._SeqLenInfo.from_seqlens([1, 2]).split(torch.zeros(1, 4, 1))),
        ((ValueError,), lambda: ab._SeqLenInfo.from_seqlens([1, 3]).split(torch.zeros(1, 4, 1), [2])),
        ((ValueError,), lambda: ab._SeqLenInfo.from_seqlens([1, 3]).split(torch.zeros(1, 4, 1), [1])),
        # classes
        ((AssertionError,), lambda: ab.BlockDiagonalMask.from_seqlens([1], Q)),
        ((AssertionError,), lambda: padded("BlockDiagonalPaddedKeysMask", [1], 4, Q)),
        ((AssertionError,), lambda: padded("BlockDiagonalCausalWithOffsetPaddedKeysMask", [1], 4, [5])),
        ((AssertionError,), lambda: padded("BlockDiagonalLocalAttentionPaddedKeysMask", [1], 4, Q, 1, 1)),
        ((AssertionError,), lambda: padded("BlockDiagonalCausalLocalAttentionPaddedKeysMask", [1], 4, Q, 1)),
        ((AssertionError,), lambda: ab.BlockDiagonalGappyKeysMask.from_seqlens([1], [0, 1, 2], Q)),
        ((ValueError,), lambda: ab.BlockDiagonalGappyKeysMask.from_seqlens(Q, [0, 1], Q)),
        ((AssertionError,), lambda: ab.PagedBlockDiagonalPaddedKeysMask.from_seqlens([1], Q, tables(), 2)),
        ((AssertionError,), lambda: ab.PagedBlockDiagonalPaddedKeysMask.from_seqlens(Q, [5, 1], tables(), 2)),
        ((AssertionError,), lambda: ab.PagedBlockDiagonalGappyKeysMask.from_seqlens(Q, [0], Q, tables(), 2)),
        ((ValueError,), lambda: ab.PagedBlockDiagonalGappyKeysMask.from_seqlens(Q, [0, 2], [1, 3], tables(), 2)),
        ((ValueError,), lambda: ab.PagedBlockDiagonalPaddedKeysMask.from_seqlens(Q, Q, tables([[0, 1]]), 2)),
        ((ValueError,), lambda: ab.PagedBlockDiagonalPaddedKeysMask.from_seqlens(Q, Q, tables([0, 1]), 2)),
        ((ValueError,), lambda: ab.PagedBlockDiagonalPaddedKeysMask.from_seqlens(Q, Q, tables(), 0)),
        ((TypeError,), lambda: ab.PagedBlockDiagonalPaddedKeysMask.from_seqlens(Q, Q, tables().float(), 2)),
        ((TypeError,), lambda: ab.PagedBlockDiagonalPaddedKeysMask.from_seqlens(Q, Q, TABLES, 2)),
        ((ValueError,), lambda: ab.LowerTriangularFromBottomRightLocalAttentionMask(0)),
        ((ValueError,), lambda: ab.LocalAttentionFromBottomRightMask(-1, 0)),
        ((ValueError,), lambda: ab.LocalAttentionFromBottomRightMask(0, -1)),
        ((ValueError,), lambda: ab.BlockDiagonalCausalFromBottomRightMask.from_seqlens([2], [1])),
        ((ValueError,), lambda: ab.BlockDiagonalMask.from_seqlens([1]).make_local_attention(0)),
        ((ValueError,), lambda: ab.BlockDiagonalMask.from_seqlens([1]).make_local_attention_from_bottomright(0)),
        ((RuntimeError,), lambda: ab.BlockDiagonalMask.from_seqlens([4], [2]).make_local_attention(2)),
        # make_paged
        (
            (ValueError, AssertionError),
            lambda: gappy_pages([0, 4, 8], notional_padding=3),
        ),
        ((AssertionError,), lambda: gappy_pages([4, 4, 8])),
        ((AssertionError,), lambda: gappy_pages([0, 2, 8])),
        ((AssertionError,), lambda: gappy_pages([0, 7, 9])),
        (
            (NotImplementedError,),
            lambda: padded("BlockDiagonalLocalAttentionPaddedKeysMask", Q, 4, Q, 1, 1).make_paged(
                tables(), 2, ab.PagedBlockDiagonalPaddedKeysMask
            ),
        ),
        (
            (NotImplementedError,),
            lambda: ab.BlockDiagonalLocalAttentionFromBottomRightGappyKeysMask.from_seqlens_local_gappy(
                Q, [0, 4, 8], Q, 1, 1
            ).make_paged(tables(), 2, 4, ab.PagedBlockDiagonalGappyKeysMask),
        ),
        # materialize
        ((AssertionError,), lambda: ab.BlockDiagonalMask.from_seqlens(Q).materialize((3, 2))),
        ((AssertionError,), lambda: ab.BlockDiagonalMask.from_seqlens(Q).materialize((2, 3))),
        ((ValueError,), lambda: padded("BlockDiagonalPaddedKeysMask", Q, 4, Q).materialize((2, 7))),
        ((ValueError,), lambda: padded("BlockDiagonalPaddedKeysMask", Q, 4, Q).materialize((3, 8))),
        (
            (ValueError,),
            lambda: padded("BlockDiagonalLocalAttentionPaddedKeysMask", Q, 4, Q, -1, 0).materialize((2, 8)),
        ),
        ((ValueError,), lambda: ab.BlockDiagonalGappyKeysMask.from_seqlens(Q, [0, 4, 8], Q).materialize((2, 7))),
        ((ValueError,), lambda: paged(Q).materialize((2, 4))),
        ((NotImplementedError,), lambda: ab.AttentionBias().materialize((1, 1))),
        # normal form and host check
        ((NotImplementedError,), lambda: ab.normal_form(ab.AttentionBias(), 1, 1, 1)),
        ((ValueError,), lambda: ab.normal_form("causal", 1, 1, 1)),
        ((ValueError,), lambda: ab.normal_form(ab.LowerTriangularMask(), 2, 1, 3)),
        ((RuntimeError,), lambda: ab.normal_form(padded("BlockDiagonalPaddedKeysMask", Q, 4, Q), 1, 2, 7)),
        ((RuntimeError,), lambda: ab.host_check(padded("BlockDiagonalPaddedKeysMask", Q, 4, Q), 2, 7)),
        ((ValueError,), lambda: ab.host_check(padded("BlockDiagonalPaddedKeysMask", Q, 4, [3, 1]), 2, 4)),
        ((ValueError,), lambda: ab.host_check(ab.BlockDiagonalMask.from_seqlens(Q, [2, 2]), 2, 3)),
        ((ValueError,), lambda: ab.host_check(ab.BlockDiagonalGappyKeysMask.from_seqlens(Q, [0, 4, 8], Q), 2, 4)),
        ((ValueError,), lambda: ab.host_check(paged(Q), 2, 7)),
        ((ValueError,), lambda: ab.host_check(paged(Q), 3, 8)),
        ((ValueError,), lambda: ab.host_check(paged([3, 3]), 2, 6)),
        ((ValueError,), lambda: ab.host_check(paged([3, 3], [[0, -1], [1, 2]]), 2, 8)),
        (
            (ValueError,),
            lambda: ab.host_check(ab.BlockDiagonalMask(ab._SeqLenInfo.from_seqlens([2]), paged(Q).q_seqinfo), 2, 2),
        ),
    ],
)
def test_errors(kinds, call):
    with pytest.raises(kinds[0]) as raised:
        call()
    for kind in kinds:
        assert isinstance(raised.value, kind)
    assert str(raised.value)


def test_messages_of_the_original():
    for call, text in (
        (lambda: gappy_pages([0, 4, 8], 3), "Notional padding should be divisible by the page size"),
        (lambda: padded("BlockDiagonalPaddedKeysMask", Q, 4, Q).materialize((2, 7)), "k shapes wrong"),
        (lambda: padded("BlockDiagonalPaddedKeysMask", Q, 4, Q).materialize((1, 8)), "q shapes wrong"),
    ):
        with pytest.raises(ValueError, match=text):
            call()


def test_pages_that_no_query_needs_may_be_anything():
    ab.host_check(paged([1, 2], [[0, -1], [1, 10**6]]), 2, 4)  # past the last key
    empty = ab.PagedBlockDiagonalPaddedKeysMask.from_seqlens([0, 1], [4, 0], tables([[-1, -1], [-1, -1]]), 2)
    ab.host_check(empty, 1, 4)
    before = ab.PagedBlockDiagonalGappyKeysMask.from_seqlens([1], [2], [2], tables([[-1, 0]]), 2)
    ab.host_check(before, 1, 2)
    make = ab.PagedBlockDiagonalCausalLocalPaddedKeysMask.from_seqlens_local
    outside = make([1], [4], tables([[-1, 0]]), 2, 2)
    ab.host_check(outside, 1, 2)
    with pytest.raises(ValueError):
        ab.host_check(make([1], [4], tables([[-1, 0]]), 2, 3), 1, 2)
    ab.host_check(make([2], [4], tables([[-1, -1]]), 2, 0), 2, 2)  # an empty window
    on_device = paged([3, 3]).to("meta")
    ab.host_check(on_device, 2, 6)  # not on the CPU: not read
