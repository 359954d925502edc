"""Attention through the named operations over paged memory: works wherever the operations do."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from modelrunner.attention import AttentionBackend, AttentionMeta, Rotary


class Step(NamedTuple):
    """What the layers of a step share. slots: [T] int64 to write to. index: of the operation `attention_index`."""

    slots: torch.Tensor
    index: Any


class PagedAttention(AttentionBackend):
    """Works out once a step where queries, keys and values lie (`attention_index`), then writes and attends a layer at a time."""

    takes_scales = True
    deterministic = True

    def begin(self, meta: AttentionMeta) -> Step:
        group = self.group
        index = self.ops.attention_index(
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
        return Step(meta.slots, index)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, step: Step, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        self.ops.indexed_write(self.cache[:, layer], k, v, step.index, **self._scales(layer))
        out: torch.Tensor = self.ops.indexed_attention(q, self.cache[:, layer], step.index, **self._options(sinks, layer))
        return out.flatten(1)

    def attend_qkv(self, qkv: torch.Tensor, rotary: Rotary, layer: int, step: Step, sinks: torch.Tensor | None = None) -> torch.Tensor:
        group = self.group
        out: torch.Tensor = self.ops.qkv_attention(
            qkv,
            group.num_heads,
            group.num_kv_heads,
            rotary.q_norm,
            rotary.k_norm,
            rotary.eps,
            rotary.cos_sin,
            self.cache[:, layer],
            step.slots,
            step.index,
            **self._options(sinks, layer),
        )
        return out.flatten(1)

    def attend_qkv_at(
        self,
        qkv: torch.Tensor,
        rotary: Rotary,
        layer: int,
        step: Any,
        meta: AttentionMeta,
        tokens: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As rows that decode: each has one query, behind all its keys."""
        group, n, cache = self.group, tokens.shape[0], self.cache[:, layer]
        norms = (rotary.q_norm, rotary.k_norm, rotary.eps)
        heads, written = (group.num_heads, group.num_kv_heads), (cache, step.slots, step.index)
        q = self.ops.qkv_rope_write(qkv, *heads, *norms, rotary.cos_sin, *written, **self._scales(layer))
        rows = torch.arange(n + 1, dtype=torch.int32, device=tokens.device)
        index = self.ops.attention_index(
            self.cache[:, 0],
            meta.block_table[:n],
            rows,
            meta.query_len[:n].clamp(max=1),
            meta.seq_len[:n],
            rows[:n].long(),
            meta.slots[:n],
            num_heads=group.num_heads,
            num_decode=n,
            decode_query=1,
            max_query=1,
            max_seq_len=meta.max_seq_len,
            window=group.window,
            dtype=self.dtype,
        )
        out: torch.Tensor = self.ops.indexed_attention(q.index_select(0, tokens), cache, index, **self._options(sinks, layer))
        return out.flatten(1)

    def _options(self, sinks: torch.Tensor | None, layer: int) -> dict[str, Any]:
        """Keyword arguments of attention. Sinks and scales only where there are some: overrides that know of none stay usable."""
        options = {"scale": self.group.scale, "softcap": self.group.softcap, **self._scales(layer)}
        return options if sinks is None else {**options, "sinks": sinks}

    def _scales(self, layer: int) -> dict[str, torch.Tensor]:
        return {} if self.scales is None else {"scales": self.scales[layer]}
