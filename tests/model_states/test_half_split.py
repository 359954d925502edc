"""Weights of an interleaved rotation, permuted at load, give the scores of that rotation."""

from __future__ import annotations

import pytest
import torch

from modelrunner.kernels.rope import apply_rope
from modelrunner.model_states.common.rope import half_split


def interleaved(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Component 2i of the first ones turns with 2i + 1. x: [T, heads, D]. cos, sin: [T, rotary_dim / 2]."""
    out, pairs = x.clone(), cos.shape[1]
    for i in range(pairs):
        one, other = x[..., 2 * i], x[..., 2 * i + 1]
        out[..., 2 * i] = one * cos[:, i, None] - other * sin[:, i, None]
        out[..., 2 * i + 1] = other * cos[:, i, None] + one * sin[:, i, None]
    return out


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(8, None), (8, 4), (8, 2), (6, 6), (8, 0)])
def test_scores_are_those_of_the_interleaved_rotation(head_dim: int, rotary_dim: int | None) -> None:
    generator = torch.Generator().manual_seed(3)
    tokens, hidden, heads, kv_heads = 7, 12, 4, 2
    x = torch.randn(tokens, hidden, generator=generator)
    q_weight = torch.randn(heads * head_dim, hidden, generator=generator)
    k_weight = torch.randn(kv_heads * head_dim, hidden, generator=generator)
    angles = torch.randn(tokens, (head_dim if rotary_dim is None else rotary_dim) // 2, generator=generator)
    order = half_split(head_dim, rotary_dim)

    def project(weight: torch.Tensor, permuted: bool) -> torch.Tensor:
        by_head = weight.unflatten(0, (-1, head_dim))
        return (x @ (by_head[:, order] if permuted else by_head).flatten(0, 1).T).unflatten(1, (-1, head_dim))

    want_q, want_k = (interleaved(project(weight, False), angles.cos(), angles.sin()) for weight in (q_weight, k_weight))
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
    q, k = apply_rope(project(q_weight, True), project(k_weight, True), None, cos_sin)
    torch.testing.assert_close(q, want_q[..., order])
    torch.testing.assert_close(k, want_k[..., order])
    scores, want = (torch.einsum("qhd,khd->hqk", a, b.repeat_interleave(heads // kv_heads, 1)) for a, b in ((q, k), (want_q, want_k)))
    torch.testing.assert_close(scores, want)


@pytest.mark.parametrize("rotary_dim", [3, 10, -2])
def test_a_rotation_that_no_head_has_is_refused(rotary_dim: int) -> None:
    with pytest.raises(ValueError, match=f"rotary_dim is {rotary_dim} in a head of 8"):
        half_split(8, rotary_dim)
