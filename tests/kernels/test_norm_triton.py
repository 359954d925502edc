"""The Triton norms and activations against their references."""

from __future__ import annotations

import pytest
import torch
from triton_world import DEVICE, DTYPES, close

from modelrunner.kernels.activation import reference as activation_reference
from modelrunner.kernels.norm.reference import rms_norm as reference_rms_norm

pytest.importorskip("triton")
from modelrunner.kernels.activation.gpu import OVERRIDES as ACTIVATIONS
from modelrunner.kernels.norm.gpu import OVERRIDES as NORMS

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def noise(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape).to(DEVICE, dtype)


@dtypes
@pytest.mark.parametrize("shape", [(1, 1), (5, 63), (3, 576), (2, 3, 128), (70, 1000), (600, 64), (2, 2, 2, 48), (1024,)], ids=str)
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = noise(*shape, dtype=dtype), noise(shape[-1], dtype=dtype)
    kept = x.clone()
    out = NORMS["rms_norm"](x, weight, 1e-5)
    assert out.is_contiguous()
    close(out, reference_rms_norm(x, weight, 1e-5), "rms_norm")
    assert torch.equal(x, kept)


@dtypes
def test_rms_norm_of_heads_in_a_slice(dtype: torch.dtype) -> None:
    """q and k are slices of one product, seen as heads."""
    fused, weight = noise(6, 5 * 64 + 32, dtype=dtype), noise(64, dtype=dtype)
    heads = fused[:, 64 : 4 * 64].view(6, 3, 64)
    close(NORMS["rms_norm"](heads, weight, 1e-6), reference_rms_norm(heads, weight, 1e-6), "rms_norm")
    columns = noise(64, 6, dtype=dtype).t()
    close(NORMS["rms_norm"](columns, weight, 1e-6), reference_rms_norm(columns, weight, 1e-6), "rms_norm")


def test_rms_norm_with_a_wide_weight_rounds_once() -> None:
    x, weight = noise(5, 500, dtype=torch.float16), noise(500, dtype=torch.float32)
    out, want = NORMS["rms_norm"](x, weight, 1e-5), reference_rms_norm(x, weight, 1e-5)
    assert out.dtype == torch.float16
    # Equal but where 1 / rms, a unit in the last place off, turns the rounding over.
    assert (out != want).float().mean() < 0.01
    narrow = reference_rms_norm(x, weight.half(), 1e-5)
    assert (out != narrow).float().mean() > 0.1


@dtypes
@pytest.mark.parametrize("shape", [(4, 100), (2, 3, 64), (0, 64), (530, 96)], ids=str)
def test_add_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, residual, weight = noise(*shape, dtype=dtype), noise(*shape[:-1], shape[-1] + 8, dtype=dtype)[..., 8:], noise(shape[-1], dtype=dtype)
    normed, total = NORMS["add_rms_norm"](x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    close(normed, reference_rms_norm(x + residual, weight, 1e-5), "rms_norm")


@dtypes
@pytest.mark.parametrize("name", ["silu_mul", "gelu_tanh_mul"])
@pytest.mark.parametrize("shape", [(1, 2), (4, 126), (3, 2, 3072), (0, 8)], ids=str)
def test_gated(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = noise(*shape, dtype=dtype) * 4
    reference = getattr(activation_reference, name)
    close(ACTIVATIONS[name](x), reference(x), name)
    wide = noise(*shape[:-1], shape[-1] + 6, dtype=dtype)[..., 6:]
    close(ACTIVATIONS[name](wide), reference(wide), name)


@dtypes
def test_gates_far_from_zero(dtype: torch.dtype) -> None:
    gate = torch.tensor([-3e4, -100.0, -30.0, 0.0, 30.0, 100.0, 3e4]).to(DEVICE, dtype)
    x = torch.cat((gate, torch.ones_like(gate)))[None]
    for name in ("silu_mul", "gelu_tanh_mul"):
        close(ACTIVATIONS[name](x), getattr(activation_reference, name)(x), name)
