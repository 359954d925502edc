"""Prompts by FlashAttention 3 (Shah et al. 2024, arXiv:2407.08608), decode rows as `PagedAttention` does.

The package fa3-fwd is built without pages, so that each layer first gathers its keys and values: one pass over memory beside the many of
the attention itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, NamedTuple

import torch

from modelrunner.attention import AttentionMeta, Rotary
from modelrunner.backends.paged import PagedAttention, Step
from modelrunner.model_state import FullAttention
from modelrunner.ops import Ops

GAP = 192  # zeros after a row's keys: the kernel reads whole blocks, which so never reach the next row
SCRATCH_BYTES = 1 << 29  # for gathered keys and values; a step that may need more runs as `PagedAttention`


@dataclass(frozen=True)
class Prompts:
    """The rows after the decode rows, and the tokens after the last row's as one more row without keys.

    block_table: [N, pages] int32. lengths: [N] int32 tokens to gather. query_start: [N+2] int32, first tokens in the step. key_start: [N+2]
    int32, first tokens in kv. num_keys: [N+1] int32 that a row's last query token sees. kv: [S, 2, HK, D], scratch of each layer in turn.
    """

    block_table: torch.Tensor
    lengths: torch.Tensor
    query_start: torch.Tensor
    key_start: torch.Tensor
    num_keys: torch.Tensor
    kv: torch.Tensor
    max_query: int
    max_keys: int


class FlashStep(NamedTuple):
    """What the layers of a step share. slots, index: as in `Step`, for all rows. decode: for the decode rows alone, None where there are
    none. prompts: None where all rows run as `PagedAttention`."""

    slots: torch.Tensor
    index: Any
    decode: tuple[int, Step] | None
    prompts: Prompts | None


class FlashAttention3(PagedAttention):
    """Steps of decode rows alone are those of `PagedAttention`, and are captured. Needs the package fa3-fwd."""

    deterministic = False

    def __init__(self, group: FullAttention, cache: torch.Tensor, ops: Ops, dtype: torch.dtype) -> None:
        super().__init__(group, cache, ops, dtype)
        self._attention = import_module("fa3_fwd_interface").flash_attn_varlen_func

    def begin(self, meta: AttentionMeta) -> FlashStep:  # type: ignore[override]
        slots, index = super().begin(meta)
        prompts = self._prompts(meta)
        decode = None
        if prompts is not None and meta.num_decode:
            tokens = meta.num_decode * meta.decode_query
            decode = tokens, super().begin(first_rows(meta, meta.num_decode, tokens))
        return FlashStep(slots, index, decode, prompts)

    def _prompts(self, meta: AttentionMeta) -> Prompts | None:
        """Where the queries and keys of the prompts lie; None if there are none, their keys may need too much memory, or it is for a graph,
        whose bounds are those of the longest request."""
        first = meta.num_decode
        num_rows, page = meta.num_rows - first, self.cache.shape[2]
        row_tokens = -(-meta.max_seq_len // page) * page + GAP
        token_bytes = self.cache[0, 0, 0].numel() * self.cache.element_size()
        if meta.captured or num_rows < 1 or num_rows * row_tokens * token_bytes > SCRATCH_BYTES:
            return None
        query_start = torch.cat((meta.query_start[first:], meta.query_start.new_full((1,), meta.num_tokens)))
        query_len, seq_len = meta.query_len[first:], meta.seq_len[first:]
        # Query tokens that are not there stand behind the others, so the last of them sees as many keys more.
        unused = query_start[1:-1] - query_start[:-2] - query_len
        num_keys = torch.cat((torch.where(query_len > 0, seq_len + unused, 0), seq_len.new_zeros(1)))
        room = (num_keys + (page - 1)) // page * page + GAP
        key_start = torch.cat((room.new_zeros(1), room.cumsum(0, dtype=torch.int32)))
        shape = (num_rows * row_tokens + GAP, *self.cache.shape[3:])
        kv = torch.empty(shape, dtype=self.cache.dtype, device=self.cache.device)
        return Prompts(meta.block_table[first:], seq_len, query_start, key_start, num_keys, kv, meta.max_query, meta.max_seq_len)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, step: Any, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        if step.prompts is None:
            return super().attend(q, k, v, layer, step, sinks)
        self.ops.indexed_write(self.cache[:, layer], k, v, step.index)
        return self._read(q, layer, step, sinks)

    def attend_qkv(self, qkv: torch.Tensor, rotary: Rotary, layer: int, step: Any, sinks: torch.Tensor | None = None) -> torch.Tensor:
        if step.prompts is None:
            return super().attend_qkv(qkv, rotary, layer, step, sinks)
        heads, norms = (self.group.num_heads, self.group.num_kv_heads), (rotary.q_norm, rotary.k_norm, rotary.eps)
        q = self.ops.qkv_rope_write(qkv, *heads, *norms, rotary.cos_sin, self.cache[:, layer], step.slots, step.index)
        return self._read(q, layer, step, sinks)

    def _read(self, q: torch.Tensor, layer: int, step: FlashStep, sinks: torch.Tensor | None) -> torch.Tensor:
        """Attention over what the cache has: of the prompts' tokens by FlashAttention, then of the decode rows'."""
        assert step.prompts is not None
        out = self._flash(q, layer, step.prompts)
        if step.decode is not None:
            tokens, decode = step.decode
            rows = self.ops.indexed_attention(q[:tokens], self.cache[:, layer], decode.index, **self._options(sinks))
            out[:tokens] = rows.flatten(1)
        return out

    def _flash(self, q: torch.Tensor, layer: int, prompts: Prompts) -> torch.Tensor:
        """Attention of the prompts' tokens. Returns [T, num_heads * head_dim]; what other tokens get is undefined."""
        kv, lengths = prompts.kv, prompts.lengths
        starts = prompts.key_start[: lengths.shape[0] + 1]
        self.ops.gather_pages(
            self.cache[:, layer], prompts.block_table, starts, lengths, kv, max_tokens=prompts.max_keys + self.cache.shape[2] + GAP
        )
        out: torch.Tensor = self._attention(
            q,
            kv[:, 0],
            kv[:, 1],
            prompts.query_start,
            prompts.key_start,
            prompts.max_query,
            prompts.max_keys,
            seqused_k=prompts.num_keys,
            softmax_scale=self.group.scale,
            causal=True,
            softcap=self.group.softcap or 0.0,
        )
        return out.flatten(1)


def first_rows(meta: AttentionMeta, rows: int, tokens: int) -> AttentionMeta:
    """The metadata of a step's first rows, which have so many tokens."""
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
    )
