"""The Triton embeddings against their references, bit for bit."""

from __future__ import annotations

import pytest
import torch
from triton_world import DEVICE, DTYPES, agree, close, nan

from modelrunner.kernels.embedding import reference
from modelrunner.kernels.embedding.gpu import OVERRIDES

REFERENCES = {name: getattr(reference, name) for name in OVERRIDES}


@pytest.mark.parametrize("op", OVERRIDES)
def test_conformance_cases(op: str) -> None:
    agree(op, OVERRIDES, REFERENCES)


@pytest.mark.parametrize("width", [1, 576, 1024, 2560])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", DTYPES)
def test_embedding(width: int, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    """Into a wider buffer of more tokens, of which the rest stays as it was."""
    weight = torch.randn(37, width, device=DEVICE).to(dtype)
    ids = torch.tensor([0, 36, 5, 5], device=DEVICE)
    outs = [nan(6, width + 3, dtype=out_dtype) for _ in range(2)]
    for function, out in zip((OVERRIDES["embedding"], reference.embedding), outs, strict=True):
        function(ids, weight, out[:4, :width])
    close(*outs, "embedding")
    assert outs[0][4:].isnan().all()


def test_a_weight_by_columns() -> None:
    """A weight whose elements of a line do not lie side by side."""
    weight = torch.randn(8, 37, device=DEVICE).t()
    ids, out = torch.tensor([3, 36], device=DEVICE), nan(2, 8)
    OVERRIDES["embedding"](ids, weight, out)
    close(out, weight[ids], "embedding")


@pytest.mark.parametrize("op", ["place_media", "add_media"])
def test_media_by_columns(op: str) -> None:
    """Memory whose elements of a line do not lie side by side."""
    arena, slots = torch.randn(8, 9, device=DEVICE).t(), torch.tensor([3, -1], dtype=torch.int32, device=DEVICE)
    outs = [torch.ones(4, 2, device=DEVICE).t() for _ in range(2)]
    for functions, out in zip((OVERRIDES, REFERENCES), outs, strict=True):
        functions[op](out, arena, slots, *([4] if op == "add_media" else []))
    close(*outs, op)
