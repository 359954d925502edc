"""Steps for attention backends, and the parts that they are made with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from modelrunner.attention import AttentionMeta
from modelrunner.batch import Prompts
from modelrunner.kernels import attention as kernels
from modelrunner.model_state import FullAttention
from modelrunner.settings import load_settings

GPU: Any = SimpleNamespace(type="cuda", name="cuda", torch_device=torch.device("cuda", 0), settings=load_settings({}))
OPS: Any = SimpleNamespace(
    **{name: getattr(kernels, name) for name in ("attention_index", "indexed_write", "indexed_attention", "gather_pages")}
)
PAGE = 16


def make_meta(group: FullAttention, rows: list[tuple[int, int, int]], num_decode: int, padding: int) -> tuple[AttentionMeta, torch.Tensor]:
    """A step over rows of (computed, query, slots) tokens in pages of random order. Returns it and a cache of two layers of `group`.

    NaN lies wherever nothing may be read: after a row's last token, in pages that nobody owns.
    """
    computed, query, slots_of = (torch.tensor(column, dtype=torch.int32) for column in zip(*rows, strict=True))
    length = torch.where(query > 0, computed + query, 0)
    pages = -(-int(length.max()) // PAGE) + 3
    table = (torch.randperm(len(rows) * pages) + 1).view(len(rows), pages).int()
    token = (2, group.num_kv_heads, group.head_dim)
    cache = torch.full((len(rows) * pages + 1, 2, PAGE, *token), torch.nan)
    cache[0] = 0.0
    for row, (done, count, _) in enumerate(rows):
        for position in range(done if count else 0):
            cache[table[row, position // PAGE], :, position % PAGE] = torch.randn(2, *token)
    start = torch.cat((torch.zeros(1, dtype=torch.int32), slots_of.cumsum(0, dtype=torch.int32)))
    num_tokens = int(start[-1]) + padding
    token_row = torch.searchsorted(start[1:].contiguous(), torch.arange(num_tokens, dtype=torch.int32), right=True).clamp(max=len(rows) - 1)
    offset = torch.arange(num_tokens) - start[token_row]
    valid = offset < query[token_row]
    positions = torch.where(valid, computed[token_row] + offset, 0)
    slots = torch.where(valid, table[token_row, positions // PAGE].long() * PAGE + positions % PAGE, -1)
    bounds = (max(int(slots_of.max()), padding), int(length.max()) + 5)
    meta = AttentionMeta(len(rows), num_tokens, num_decode, 1, *bounds, start, query, length, token_row, positions, slots, table)
    return meta, cache


def prompts_of(rows: list[tuple[int, int, int]], num_decode: int) -> Prompts:
    """What the host knows of the prompts among `rows`, all of which run."""
    query, length = ([query for _, query, _ in rows], [done + query for done, query, _ in rows])
    return Prompts(np.array(query[num_decode:], np.int32), np.array(length[num_decode:], np.int32))
