"""Attention of a step in parts: backends that run prompts, or decode rows, by other kernels than the named operations."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from modelrunner.attention import AttentionMeta, Rotary
from modelrunner.backends.paged import PagedAttention, Step


class SplitStep(NamedTuple):
    """What the layers of a step share. slots, index: as in `Step`, for all rows.

    prompts: what `begin_prompts` returned. tokens: of the decode rows, where they are attended to by themselves, else 0. decode: what
    `begin_decode` returned for them. rows: None if `decode` or all rows are attended to at once, else the index of the decode rows.
    """

    slots: torch.Tensor
    index: Any
    prompts: Any | None = None
    tokens: int = 0
    decode: Any | None = None
    rows: Step | None = None


class SplitAttention(PagedAttention):
    """Writes as `PagedAttention`, and attends as it does wherever the subclass has nothing else for the rows."""

    takes_scales = False
    deterministic = False

    @abstractmethod
    def begin_prompts(self, meta: AttentionMeta) -> Any | None:
        """D. What all layers share of the rows after the decode rows; None leaves the whole step to `PagedAttention`. Not called for steps
        that are made for a graph."""

    @abstractmethod
    def attend_prompts(self, q: torch.Tensor, layer: int, prompts: Any) -> torch.Tensor:
        """D. Attention of the tokens after the decode rows'. q: [T, num_heads, head_dim] of all. Returns [T, num_heads * head_dim]; what
        the decode rows' tokens get is overwritten, the others are finite."""

    def begin_decode(self, meta: AttentionMeta) -> Any | None:
        """D. What all layers share of a step of decode rows; None leaves them to `PagedAttention`. Also called for graphs."""
        return None

    def attend_decode(self, q: torch.Tensor, layer: int, decode: Any) -> torch.Tensor:
        """D. Attention of the decode rows, with what `begin_decode` returned. q: [T, num_heads, head_dim]. Returns the same shape."""
        raise NotImplementedError(f"{type(self).__name__} begins decode rows that it cannot attend to")

    def begin(self, meta: AttentionMeta) -> SplitStep:  # type: ignore[override]
        slots, index = super().begin(meta)
        if meta.num_decode == meta.num_rows:
            decode = self.begin_decode(meta)
            return SplitStep(slots, index, tokens=0 if decode is None else meta.num_tokens, decode=decode)
        prompts = None if meta.captured else self.begin_prompts(meta)
        if prompts is None or not meta.num_decode:
            return SplitStep(slots, index, prompts)
        tokens = meta.num_decode * meta.decode_query
        first = first_rows(meta, meta.num_decode, tokens)
        decode = self.begin_decode(first)
        return SplitStep(slots, index, prompts, tokens, decode, super().begin(first) if decode is None else None)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, step: Any, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        if step.prompts is None and step.decode is None:
            return super().attend(q, k, v, layer, step, sinks)
        self.ops.indexed_write(self.cache[:, layer], k, v, step.index)
        return self._read(q, layer, step, sinks)

    def attend_qkv(self, qkv: torch.Tensor, rotary: Rotary, layer: int, step: Any, sinks: torch.Tensor | None = None) -> torch.Tensor:
        if step.prompts is None and step.decode is None:
            return super().attend_qkv(qkv, rotary, layer, step, sinks)
        heads, norms = (self.group.num_heads, self.group.num_kv_heads), (rotary.q_norm, rotary.k_norm, rotary.eps)
        q = self.ops.qkv_rope_write(qkv, *heads, *norms, rotary.cos_sin, self.cache[:, layer], step.slots, step.index)
        return self._read(q, layer, step, sinks)

    def _read(self, q: torch.Tensor, layer: int, step: SplitStep, sinks: torch.Tensor | None) -> torch.Tensor:
        """Attention over what the cache has."""
        if step.prompts is None:
            return self.attend_decode(q, layer, step.decode).flatten(1)
        out = self.attend_prompts(q, layer, step.prompts)
        first = q[: step.tokens]
        if step.decode is not None:
            out[: step.tokens] = self.attend_decode(first, layer, step.decode).flatten(1)
        elif step.rows is not None:
            rows = self.ops.indexed_attention(first, self.cache[:, layer], step.rows.index, **self._options(sinks, layer))
            out[: step.tokens] = rows.flatten(1)
        return out


def first_rows(meta: AttentionMeta, rows: int, tokens: int) -> AttentionMeta:
    """The metadata of a step's first rows, which have so many tokens and decode."""
    return replace(
        meta,
        num_rows=rows,
        num_tokens=tokens,
        max_query=meta.decode_query,
        query_start=meta.query_start[: rows + 1],
        query_len=meta.query_len[:rows],
        seq_len=meta.seq_len[:rows],
        token_row=meta.token_row[:tokens],
        positions=meta.positions[:tokens],
        slots=meta.slots[:tokens],
        block_table=meta.block_table[:rows],
        prompts=None,
    )
