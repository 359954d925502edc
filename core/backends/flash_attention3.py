"""Prompts by FlashAttention 3 (Shah et al. 2024, arXiv:2407.08608), decode rows as `PagedAttention` does.

The package fa3-fwd is built without pages, so that each layer first gathers its keys and values: one pass over memory beside the many of
the attention itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

import torch

from modelrunner.attention import AttentionMeta
from modelrunner.backends.split import SplitAttention
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


class FlashAttention3(SplitAttention):
    """Steps of decode rows alone are those of `PagedAttention`, and are captured. Needs the package fa3-fwd."""

    def __init__(self, group: FullAttention, cache: torch.Tensor, ops: Ops, dtype: torch.dtype) -> None:
        super().__init__(group, cache, ops, dtype)
        self._attention = import_module("fa3_fwd_interface").flash_attn_varlen_func

    def begin_prompts(self, meta: AttentionMeta) -> Prompts | None:
        """Where the queries and keys of the prompts lie; None if their keys may need too much memory."""
        longest, tokens = self._keys(meta)
        token_shape = self.cache.shape[3:]
        if tokens * token_shape.numel() * self.cache.element_size() > SCRATCH_BYTES:
            return None
        first, page = meta.num_decode, self.cache.shape[2]
        query_start = torch.cat((meta.query_start[first:], meta.query_start.new_full((1,), meta.num_tokens)))
        query_len, seq_len = meta.query_len[first:], meta.seq_len[first:]
        # Query tokens that are not there stand behind the others, so the last of them sees as many keys more.
        unused = query_start[1:-1] - query_start[:-2] - query_len
        num_keys = torch.cat((torch.where(query_len > 0, seq_len + unused, 0), seq_len.new_zeros(1)))
        room = (num_keys + (page - 1)) // page * page + GAP
        key_start = torch.cat((room.new_zeros(1), room.cumsum(0, dtype=torch.int32)))
        kv = torch.empty((tokens, *token_shape), dtype=self.cache.dtype, device=self.cache.device)
        return Prompts(meta.block_table[first:], seq_len, query_start, key_start, num_keys, kv, meta.max_query, longest)

    def _keys(self, meta: AttentionMeta) -> tuple[int, int]:
        """Bounds of a prompt's keys, and of the room that those of all prompts take: exact where the host has their lengths."""
        num_rows, page = meta.num_rows - meta.num_decode, self.cache.shape[2]
        if meta.prompts is None:
            longest, pages = meta.max_seq_len, num_rows * -(-meta.max_seq_len // page)
        else:
            longest, pages = int(meta.prompts.length.max()), int((-(-meta.prompts.length // page)).sum())
        return longest, pages * page + (num_rows + 1) * GAP

    def attend_prompts(self, q: torch.Tensor, layer: int, prompts: Prompts) -> torch.Tensor:
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
