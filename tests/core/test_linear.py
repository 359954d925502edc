"""Linear layers and their schemes."""

from __future__ import annotations

import pytest
import torch

from modelrunner.kernels.linear.reference import int8_matmul, matmul
from modelrunner.linear import Int8Scheme, LinearFactory, PlainScheme
from modelrunner.ops import Ops

CPU = torch.device("cpu")
OPS = Ops({"matmul": matmul, "int8_matmul": int8_matmul, "matmul_add": lambda x, weight, residual: matmul(x, weight) + residual}, {})


def factory(scheme, dtype=torch.float32):
    return LinearFactory(scheme(OPS, dtype, CPU))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_plain(dtype):
    layer = factory(PlainScheme, dtype)(6, (3, 2), bias=True)
    weight, bias, x = torch.randn(5, 6), torch.randn(5), torch.randn(4, 6).to(dtype)
    for part, rows in enumerate((slice(0, 3), slice(3, 5))):
        layer.load(part, weight[rows])
        layer.load(part, bias[rows], "bias")
    want = torch.nn.functional.linear(x, weight.to(dtype)) + bias.to(dtype)
    assert torch.equal(layer(x), want)


@pytest.mark.parametrize("scheme", [PlainScheme, Int8Scheme])
def test_wrong_shapes_are_refused(scheme):
    layer = factory(scheme)(6, (3, 2))
    with pytest.raises(ValueError, match=r"weight of part 1 has shape \(3, 6\); \(2, 6\) is needed"):
        layer.load(1, torch.zeros(3, 6))
    with pytest.raises(ValueError, match="the layer has none"):
        layer.load(1, torch.zeros(2), "bias")
    with pytest.raises(ValueError, match=r"\[5, 6\] cannot be tied to a parameter of \[6, 5\]"):
        factory(scheme)(6, 5, tied=torch.nn.Parameter(torch.zeros(6, 5)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inner", "outer"), [(64, 96), (33, 7), (1, 1), (576, 200)])
@pytest.mark.parametrize("rows", [1, Int8Scheme.PACKED_ROWS, Int8Scheme.PACKED_ROWS + 1, 40])
def test_int8_equals_its_dequantised_weights(dtype, inner, outer, rows):
    """Both of its ways compute x @ (scale * q).T, awkward sizes included; what is left is bfloat16's rounding."""
    layer = factory(Int8Scheme, dtype)(inner, outer)
    layer.load(0, torch.randn(outer, inner))
    x = torch.randn(rows, inner).to(dtype)
    want = x.double() @ (layer.qweight.double() * layer.scale.double()[:, None]).T
    got = layer(x)
    assert got.dtype == dtype
    # 2^-8 for each of input, scale and output, over sums of `inner` random terms.
    torch.testing.assert_close(got.double(), want, rtol=0.02, atol=0.02 * inner**0.5)


def test_int8_rounds_to_half_a_step(monkeypatch):
    monkeypatch.setattr("modelrunner.linear.QUANTISED_AT_ONCE", 7 * 50)  # several blocks, the last one short
    layer = factory(Int8Scheme)(50, (10, 20))
    parts = [torch.randn(10, 50), torch.randn(20, 50) * 1e-3]
    for part, weight in enumerate(parts):
        layer.load(part, weight)
    restored = layer.qweight * layer.scale[:, None]
    assert ((restored - torch.cat(parts)).abs() <= layer.scale[:, None] * 0.5001).all()
    assert layer.qweight.abs().amax(-1).eq(127).all()
    assert layer.qweight.dtype == torch.int8


def test_int8_of_zero_rows():
    layer = factory(Int8Scheme)(8, 4)
    layer.load(0, torch.zeros(4, 8))
    assert torch.equal(layer(torch.randn(2, 8)), torch.zeros(2, 4))


def test_int8_is_a_quarter_of_float32():
    def size(layer):
        return sum(tensor.nbytes for tensor in layer.state_dict().values())

    assert size(factory(Int8Scheme)(256, 512)) < 0.27 * size(factory(PlainScheme)(256, 512))


def test_tied_plain_shares_and_tied_int8_copies():
    embedding = torch.nn.Parameter(torch.randn(12, 8), requires_grad=False)
    x = torch.randn(3, 8)
    plain, small = (factory(scheme)(8, 12, tied=embedding) for scheme in (PlainScheme, Int8Scheme))
    small.load(0, embedding)
    assert plain.weight is embedding
    torch.testing.assert_close(plain(x), x @ embedding.T)
    torch.testing.assert_close(small(x), x @ embedding.T, rtol=0.05, atol=0.1)
    assert [name for name, _ in small.named_parameters()] == []
