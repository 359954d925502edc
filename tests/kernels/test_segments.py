"""Attention within segments against a softmax over a mask, in float64."""

from __future__ import annotations

import pytest
import torch

from modelrunner.kernels.attention import segment_attention
from modelrunner.kernels.attention.segments import packed_segment_attention
from modelrunner.testing.conformance import KernelConformance

SCALE = 0.3


@pytest.mark.parametrize("function", [segment_attention, packed_segment_attention])
@pytest.mark.parametrize("lengths", [(1,), (7,), (4, 4, 4), (5, 5, 2, 5, 1, 1)])
def test_each_token_sees_its_segment(lengths: tuple[int, ...], function: object) -> None:
    """Segments of equal length that are not neighbours included. The packed form runs as the plain one where types are wide."""
    total = sum(lengths)
    q, k, v = torch.randn(total, 3, 2, 20).unbind(1)
    starts = torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)], dtype=torch.int32)
    segment = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()) * SCALE
    scores.masked_fill_(segment[:, None] != segment[None, :], -torch.inf)
    want = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.double())
    out = function(q, k, v, starts, lengths, scale=SCALE)  # type: ignore[operator]
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
class TestPackedOnCuda(KernelConformance):
    op = "segment_attention"
    device_type = "cuda"


def test_no_tokens() -> None:
    empty = torch.randn(0, 2, 8)
    assert segment_attention(empty, empty, empty, torch.zeros(1, dtype=torch.int32), (), scale=1.0).shape == (0, 2, 8)
