"""`Inputs`, `InputsFp8` and `Context`: field order, normalisation, and what `validate_inputs` refuses."""

import dataclasses

import pytest
import torch

from bridge import fmha
from bridge.fmha import attn_bias as ab


def qkv(*q_shape, k_shape=None, dtype=torch.half):
    k_shape = k_shape or q_shape
    return torch.zeros(q_shape, dtype=dtype), torch.zeros(k_shape, dtype=dtype), torch.zeros(k_shape, dtype=dtype)


def test_fields_stand_in_mslk_order():
    names = [f.name for f in dataclasses.fields(fmha.Inputs)]
    assert names == [
        "query", "key", "value", "attn_bias", "p", "scale", "output_dtype", "is_partial", "quantize_pv_to_fp8",
        "quantize_qk_to_fp8", "use_fp32_scales", "num_splits",
    ]  # fmt: skip
    fp8 = [f.name for f in dataclasses.fields(fmha.triton_splitk.InputsFp8)]
    assert fp8 == [*names, "k_fp8_scale_shift", "v_fp8_scale_shift", "q_fp8_scale_shift"]
    assert fmha.common.Inputs is fmha.Inputs and fmha.triton_splitk.InputsFp8 is fmha.InputsFp8


def test_defaults_and_scale():
    inp = fmha.Inputs(*qkv(2, 3, 4, 16))
    assert inp.scale_float == 0.25 and inp.device.type == "cpu"
    assert fmha.Inputs(*qkv(2, 3, 4, 16), scale=0.0).scale_float == 0.0
    assert fmha.Inputs(*qkv(2, 3, 4, 16), scale=-2.0).scale_float == -2.0


@pytest.mark.parametrize(
    ("dtype", "options", "expected"),
    [
        (torch.half, {}, torch.half),
        (torch.half, {"is_partial": True}, torch.float32),
        (torch.float64, {"is_partial": True}, torch.float64),
        (torch.float8_e4m3fn, {}, torch.float8_e4m3fn),
        (torch.float8_e4m3fn, {"is_partial": True}, torch.float32),
        (torch.half, {"is_partial": True, "output_dtype": torch.bfloat16}, torch.bfloat16),
    ],
)
def test_output_dtype(dtype, options, expected):
    assert fmha.Inputs(*qkv(1, 1, 1, 16, dtype=dtype), **options).get_output_dtype() == expected


def test_nbytes_counts_storages():
    q, k, v = qkv(2, 3, 4, 16)
    assert fmha.Inputs(q, k, v).nbytes == 3 * 2 * 3 * 4 * 16 * 2
    words = torch.zeros(2, 3, 1, 4, dtype=torch.int32)
    scales = torch.zeros(2, 3, 4, dtype=torch.int32)
    inp = fmha.InputsFp8(q, words.expand(2, 3, 4, 4), words, k_fp8_scale_shift=scales, v_fp8_scale_shift=scales)
    inp.q_fp8_scale_shift = torch.zeros(2, 3, 4)
    assert inp.nbytes == q.nbytes + 2 * words.nbytes + 2 * scales.nbytes


def test_views_in_bmghk():
    for shape, want in (((2, 3, 16), (2, 3, 1, 1, 16)), ((2, 3, 4, 16), (2, 3, 1, 4, 16)), ((1, 2, 3, 4, 16),) * 2):
        inp = fmha.Inputs(*qkv(*shape))
        assert all(x.shape == want and x.data_ptr() != 0 for x in inp.get_qkv_in_bmghk())


def test_normalisation_is_in_place():
    bias = torch.zeros(2, 3, 5)
    inp = fmha.Inputs(*qkv(2, 3, 16, k_shape=(2, 5, 16)), bias)
    assert inp.normalize_bmhk() == (2, 3, 16)
    assert inp.query.shape == (2, 3, 1, 16) and inp.key.shape == (2, 5, 1, 16) and inp.attn_bias.shape == (2, 1, 3, 5)
    assert inp.normalize_bmhk() == (2, 3, 1, 16)
    q, k, _ = qkv(2, 3, 4, 16)
    assert fmha.Inputs(q, k, torch.zeros(2, 3, 4, 8, dtype=torch.half)).normalize_bmhk() == (2, 3, 4, 8)
    words = torch.zeros(2, 3, 4, 3, dtype=torch.int32)
    assert fmha.Inputs(q, words, words).normalize_bmhk() == (2, 3, 4, 16)


def bad(*args, **options):
    return lambda: fmha.Inputs(*args, **options)


Q, K, V = qkv(2, 3, 4, 16)
WORDS = torch.zeros(2, 3, 4, 3, dtype=torch.int32)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (bad(Q[0, 0], K[0, 0], V[0, 0]), "query"),
        (bad(Q, K[0], V), "query, key, value"),
        (bad(Q, K.to("meta"), V), "device"),
        (bad(Q, K, V, ab.BlockDiagonalMask.from_seqlens([3, 3], device="meta")), "attn_bias"),
        (bad(Q, K.float(), V), "dtype"),
        (bad(Q, WORDS, V), "dtype"),
        (bad(*qkv(2, 3, 16), ab.LowerTriangularFromBottomRightMask()), "BMHK"),
        (bad(*qkv(2, 3, 16), torch.nn.Parameter(torch.zeros(2, 3, 3))), "BMHK"),
        (bad(Q, K, V, torch.zeros(1, 4, 3, 3)), "attn_bias"),
        (bad(Q, K, V, ab.LowerTriangularMaskWithTensorBias(torch.zeros(4, 3, 3))), "attn_bias"),
        (bad(Q, K, V, ab.BlockDiagonalMask.from_seqlens([3, 3], device="cpu")), "batch 1"),
        (bad(Q, K, V, p=1.5), "p:"),
        (bad(Q, K, V, p=-0.1), "p:"),
        (bad(Q, K[:, :, :1], V[:, :, :1]), "expand"),
        (bad(Q, K[:1], V[:1]), "expand"),
        (bad(Q, K[..., :8], V), "expand"),
        (bad(Q, K, V[:, :2]), "expand"),
        (bad(Q, WORDS, WORDS[..., :2]), "expand"),
    ],
)
def test_validation_refuses(make, names):
    with pytest.raises(ValueError, match=names):
        make().validate_inputs()


@pytest.mark.parametrize(
    "make",
    [
        bad(Q, K, V),
        bad(Q, WORDS, WORDS),
        bad(Q, K, V[..., :8]),
        bad(Q, K, V, torch.zeros(2, 4, 3, 3)),
        bad(*qkv(2, 3, 16), ab.LowerTriangularMask()),
        bad(*qkv(2, 3, 16), torch.zeros(2, 3, 3)),
        bad(Q, K, V, p=1.0),
    ],
)
def test_validation_accepts(make):
    make().validate_inputs()


def test_padded_lse():
    lse, out = torch.zeros(1, 2, 6), torch.zeros(1, 4, 2, 8)
    inf = torch.inf
    assert fmha.Context(lse, out).get_padded_lse(3)[0, 0].tolist() == [0] * 6
    assert fmha.Context(lse, out).get_padded_lse(4)[0, 0].tolist() == [0] * 6 + [inf] * 2
    assert fmha.Context(lse, out).get_padded_lse(4, force_pad_inf=True)[0, 0].tolist() == [0] * 4
    assert fmha.Context(lse, out).get_padded_lse(3, force_pad_inf=True)[0, 0].tolist() == [0] * 4 + [inf] * 2
    assert (lse == 0).all()
