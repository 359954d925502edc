"""Sinks on their way from a layer to the operation: declared by the cache group, passed with each call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from modelrunner.attention import BoundAttention
from modelrunner.backends.paged import PagedAttention
from modelrunner.kernels import attention as kernels
from modelrunner.model_state import FullAttention

HEADS, DIM, TOKENS = 2, 8, 5


def bound(sinks: bool) -> BoundAttention:
    """One layer, number 3 of its model, at the head of a prompt of TOKENS tokens."""
    group = FullAttention("full", (3,), HEADS, HEADS, DIM, 0.5, sinks=sinks)
    cache = torch.zeros(2, 1, 16, 2, HEADS, DIM)
    ops: Any = SimpleNamespace(
        attention_index=kernels.attention_index, indexed_write=kernels.indexed_write, indexed_attention=kernels.indexed_attention
    )
    lengths = torch.tensor([TOKENS], dtype=torch.int32)
    meta: Any = SimpleNamespace(
        block_table=torch.tensor([[1]], dtype=torch.int32),
        query_start=torch.tensor([0, TOKENS], dtype=torch.int32),
        query_len=lengths,
        seq_len=lengths,
        token_row=torch.zeros(TOKENS, dtype=torch.long),
        slots=16 + torch.arange(TOKENS),
        num_decode=0,
        decode_query=1,
        max_query=TOKENS,
        max_seq_len=TOKENS,
    )
    attention = BoundAttention(PagedAttention(group, cache, ops, torch.float32), {3: 0}, meta)
    attention.begin()
    return attention


def test_a_sink_takes_weight_from_the_values() -> None:
    """All scores are 0, so token i's output is the sum of the first i + 1 values over (i + 1 + exp(sink))."""
    q, k, v = torch.zeros(TOKENS, HEADS, DIM), torch.zeros(TOKENS, HEADS, DIM), torch.randn(TOKENS, HEADS, DIM)
    sinks = torch.tensor([0.0, 2.0])
    out = bound(sinks=True)(q, k, v, 3, sinks).view(TOKENS, HEADS, DIM)
    weight = torch.arange(1, TOKENS + 1)[:, None] + sinks.exp()
    torch.testing.assert_close(out, v.cumsum(0) / weight[:, :, None])
    plain = bound(sinks=False)(q, k, v, 3).view(TOKENS, HEADS, DIM)
    torch.testing.assert_close(plain, v.cumsum(0) / torch.arange(1, TOKENS + 1)[:, None, None])


def test_declared_and_given_must_agree() -> None:
    q = torch.zeros(TOKENS, HEADS, DIM)
    with pytest.raises(ValueError, match="'full' declares sinks, but layer 3 gives none"):
        bound(sinks=True)(q, q, q, 3)
    with pytest.raises(ValueError, match="'full' declares no sinks, but layer 3 gives some"):
        bound(sinks=False)(q, q, q, 3, torch.zeros(HEADS))
