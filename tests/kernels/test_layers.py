"""Norm, rope, activation, embedding and linear operations against their formulas in float64."""

from __future__ import annotations

import math

import pytest
import torch

from modelrunner.kernels.activation import gelu_tanh_mul, silu_mul
from modelrunner.kernels.embedding import embedding
from modelrunner.kernels.linear import int8_matmul, matmul
from modelrunner.kernels.norm import rms_norm
from modelrunner.kernels.rope import apply_rope

DTYPES = [(torch.float32, 1e-5), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)]
dtypes = pytest.mark.parametrize(("dtype", "tolerance"), DTYPES, ids=lambda v: str(v) if isinstance(v, torch.dtype) else "")
sizes = pytest.mark.parametrize("size", [1, 63, 500, 1000])


def close(out: torch.Tensor, want: torch.Tensor, dtype: torch.dtype, tolerance: float) -> None:
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), want, rtol=tolerance, atol=tolerance)


@dtypes
@sizes
def test_rms_norm(size: int, dtype: torch.dtype, tolerance: float) -> None:
    x, weight = torch.randn(5, size).to(dtype), torch.randn(size).to(dtype)
    wide = x.double()
    want = wide / torch.sqrt((wide * wide).mean(-1, keepdim=True) + 1e-5) * weight.double()
    close(rms_norm(x, weight, 1e-5), want, dtype, tolerance)
    heads = torch.randn(2, 3, size).to(dtype)
    assert torch.equal(rms_norm(heads, weight, 1e-5).view(6, size), rms_norm(heads.view(6, size), weight, 1e-5))


def test_rms_norm_with_a_wide_weight_rounds_once() -> None:
    """16-bit inputs and a float32 weight: the float32 result, rounded; with a 16-bit weight the quotient is rounded before."""
    x, weight = torch.randn(5, 500).bfloat16(), torch.randn(500)
    out = rms_norm(x, weight, 1e-5)
    assert torch.equal(out, rms_norm(x.float(), weight, 1e-5).bfloat16())
    assert not torch.equal(rms_norm(x, weight.bfloat16(), 1e-5), rms_norm(x, weight.bfloat16().float(), 1e-5))


@dtypes
@pytest.mark.parametrize("rotary_dim", [16, 8])
@pytest.mark.parametrize("gathered", [False, True])
def test_rope(rotary_dim: int, gathered: bool, dtype: torch.dtype, tolerance: float) -> None:
    """Each pair of components is a complex number turned by its angle."""
    num_tokens, half = 7, rotary_dim // 2
    positions = torch.tensor([0, 3, 3, 99, 1, 50, 2])
    angle = torch.arange(100).double()[:, None] * (1e4 ** -(torch.arange(half).double() / half))
    cos_sin = torch.cat((angle.cos(), angle.sin()), 1).float()
    q, k = torch.randn(num_tokens, 4, 16).to(dtype), torch.randn(num_tokens, 2, 16).to(dtype)
    outs = apply_rope(q, k, None, cos_sin[positions]) if gathered else apply_rope(q, k, positions, cos_sin)
    for x, out in zip((q, k), outs, strict=True):
        want = x.double().clone()
        for t in range(num_tokens):
            for i in range(half):
                turned = torch.complex(x[t, :, i].double(), x[t, :, i + half].double()) * torch.polar(
                    torch.ones((), dtype=torch.float64), angle[positions[t], i]
                )
                want[t, :, i], want[t, :, i + half] = turned.real, turned.imag
        close(out, want, dtype, tolerance)
        assert torch.equal(out[..., rotary_dim:], x[..., rotary_dim:])


@dtypes
@sizes
def test_silu_mul(size: int, dtype: torch.dtype, tolerance: float) -> None:
    x = torch.randn(4, 2 * size).to(dtype)
    before, gate, up = x.clone(), x[:, :size].double(), x[:, size:].double()
    close(silu_mul(x), gate / (1 + torch.exp(-gate)) * up, dtype, tolerance)
    assert torch.equal(x, before)


@dtypes
@sizes
def test_gelu_tanh_mul(size: int, dtype: torch.dtype, tolerance: float) -> None:
    x = torch.randn(4, 2 * size).to(dtype)
    before, gate, up = x.clone(), x[:, :size].double(), x[:, size:].double()
    want = 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
    close(gelu_tanh_mul(x), want, dtype, tolerance)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embedding(dtype: torch.dtype) -> None:
    weight, ids = torch.randn(331, 24), torch.tensor([330, 0, 7, 7])
    buffer = torch.full((6, 24), math.nan, dtype=dtype)
    embedding(ids, weight, buffer[:4])
    assert torch.equal(buffer[:4], torch.stack([weight[i] for i in ids.tolist()]).to(dtype))
    assert buffer[4:].isnan().all()


@sizes
def test_matmul(size: int) -> None:
    x, weight = torch.randn(3, size), torch.randn(11, size)
    close(matmul(x, weight), x.double() @ weight.double().T, torch.float32, 1e-4)


@dtypes
@sizes
def test_int8_matmul(size: int, dtype: torch.dtype, tolerance: float) -> None:
    x, scale = torch.randn(2, 3, size).to(dtype), torch.rand(11) / size
    qweight = torch.randint(-127, 128, (11, size), dtype=torch.int8)
    close(int8_matmul(x, qweight, scale), x.double() @ (qweight.double() * scale.double()[:, None]).T, dtype, max(tolerance, 1e-4))
