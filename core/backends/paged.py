"""Attention through the named operations over paged memory: works wherever the operations do."""

from __future__ import annotations

import torch

from modelrunner.attention import AttentionBackend, AttentionMeta


class PagedAttention(AttentionBackend):
    """Works out once a step where queries, keys and values lie (`attention_index`), then writes and attends a layer at a time."""

    def begin(self, meta: AttentionMeta) -> object:
        group = self.group
        return self.ops.attention_index(
            self.cache[:, 0],
            meta.block_table,
            meta.query_start,
            meta.query_len,
            meta.seq_len,
            meta.token_row,
            meta.slots,
            num_heads=group.num_heads,
            num_decode=meta.num_decode,
            decode_query=meta.decode_query,
            max_query=meta.max_query,
            max_seq_len=meta.max_seq_len,
            window=group.window,
            dtype=self.dtype,
        )

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, step: object, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        cache = self.cache[:, layer]
        self.ops.indexed_write(cache, k, v, step)
        own = {} if sinks is None else {"sinks": sinks}  # overrides that know of none stay usable
        out: torch.Tensor = self.ops.indexed_attention(q, cache, step, scale=self.group.scale, softcap=self.group.softcap, **own)
        return out.flatten(1)
