"""Attention on a CPU, a row at a time: a step reads its lengths once, and each row then attends to exactly the keys that it has.

Nothing is padded to the longest row, nothing is masked but a prompt that begins after its first token or reaches past a window, and keys
are copied a page at a time. Letters: T tokens of the step, HQ query heads, HK key-value heads, D head size.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from modelrunner.attention import AttentionBackend, AttentionMeta, Rotary
from modelrunner.kernels.attention.index import rows_per_page, token_rows

if TYPE_CHECKING:
    from modelrunner.model_state import FullAttention
    from modelrunner.ops import Ops

KEYS_AT_ONCE = 4096  # of rows of one length, gathered together: more would leave the processor's cache


class Piece(NamedTuple):
    """Rows of one length whose tokens follow each other. tokens: of the step. queries: of each row.

    pages: [rows * n] int64, n pages of each row. start, keys: where in those pages the keys begin, and how many there are.
    mask: [queries, keys] bool, True where a key is seen; None: all keys, or with `causal` those up to the query's own, the last of which
    is the last.
    """

    tokens: slice
    queries: int
    pages: torch.Tensor
    start: int
    keys: int
    causal: bool = False
    mask: torch.Tensor | None = None


class Step(NamedTuple):
    """What the layers of a step share. whole: the pieces cover all tokens. write: rows of the token view, [W] int64. written: the tokens
    that are written there, [W] int64; None for all."""

    pieces: tuple[Piece, ...]
    whole: bool
    write: torch.Tensor
    written: torch.Tensor | None


class Row(NamedTuple):
    """A living row of the batch. first: its first token in the step. start: the first key that any of its queries sees."""

    number: int
    first: int
    queries: int
    length: int
    start: int


class RowAttention(AttentionBackend):
    """Works on lengths read back from the step's tensors, which are there when the step runs: they are in the host's memory."""

    def __init__(self, group: FullAttention, cache: torch.Tensor, ops: Ops, dtype: torch.dtype) -> None:
        super().__init__(group, cache, ops, dtype)
        self._layers = [cache[:, layer] for layer in range(cache.shape[1])]
        shape = (2, group.num_kv_heads, group.head_dim)
        self._keys_and_values = [token_rows(layer).unflatten(1, shape).unbind(1) for layer in self._layers]

    def begin(self, meta: AttentionMeta) -> Step:
        slots, view = meta.slots, rows_per_page(self.cache[:, 0])
        page_size = self.cache.shape[2]
        write = slots + slots.div(page_size, rounding_mode="floor") * (view - page_size)
        written = None
        if meta.num_tokens and int(slots.min()) < 0:
            written = torch.nonzero(slots >= 0).squeeze(1)
            write = write[written]
        pieces = tuple(self._pieces(meta))
        covered = sum(piece.tokens.stop - piece.tokens.start for piece in pieces)
        return Step(pieces, covered == meta.num_tokens, write, written)

    def _pieces(self, meta: AttentionMeta) -> list[Piece]:
        """The step's living rows: decode rows of one length that follow each other together, each prompt by itself."""
        window = self.group.window
        rows = []
        lengths = zip(meta.query_start.tolist(), meta.query_len.tolist(), meta.seq_len.tolist(), strict=False)
        for index, (first, queries, length) in enumerate(lengths):
            if queries > 0:
                start = 0 if window is None else max(length - queries - window + 1, 0)
                rows.append(Row(index, first, queries, length, start))
        pieces = []
        for _, found in groupby(enumerate(rows), key=lambda item: self._alike(*item)):
            alike = [row for _, row in found]
            at_once = max(1, KEYS_AT_ONCE // (alike[0].length - alike[0].start))
            pieces += [self._piece(meta, alike[i : i + at_once]) for i in range(0, len(alike), at_once)]
        return pieces

    @staticmethod
    def _alike(place: int, row: Row) -> tuple[int, ...]:
        """Equal for neighbours that can be one piece."""
        return (row.first - place, row.length, row.start) if row.queries == 1 else (row.first, -1, place)

    def _piece(self, meta: AttentionMeta, rows: list[Row]) -> Piece:
        row, page_size = rows[0], self.cache.shape[2]
        first_page, keys = row.start // page_size, row.length - row.start
        pages = meta.block_table[row.number : rows[-1].number + 1, first_page : -(-row.length // page_size)]
        if pages.shape[0] != len(rows):  # dead rows stand between
            pages = meta.block_table[[r.number for r in rows], first_page : -(-row.length // page_size)]
        tokens = slice(row.first, row.first + row.queries * len(rows))
        piece = Piece(tokens, row.queries, pages.flatten().long(), row.start - first_page * page_size, keys)
        window = self.group.window
        if row.queries == 1:
            return piece
        if row.queries == keys and (window is None or keys <= window):
            return piece._replace(causal=True)
        key, query = torch.arange(keys), torch.arange(keys - row.queries, keys).unsqueeze(1)
        mask = key <= query
        return piece._replace(mask=mask if window is None else mask & (key > query - window))

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, step: Step, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        self._write(k, v, layer, step)
        if step.whole and len(step.pieces) == 1:
            return self._read(q, layer, step.pieces[0])
        out = q.new_empty(q.shape[0], q.shape[1] * q.shape[2]) if step.whole else q.new_zeros(q.shape[0], q.shape[1] * q.shape[2])
        for piece in step.pieces:
            out[piece.tokens] = self._read(q[piece.tokens], layer, piece)
        return out

    def attend_qkv(self, qkv: torch.Tensor, rotary: Rotary, layer: int, step: Step, sinks: torch.Tensor | None = None) -> torch.Tensor:
        group = self.group
        dim, heads = group.head_dim, group.num_heads + group.num_kv_heads
        if rotary.q_norm is not None or rotary.cos_sin.shape[-1] != dim:
            return super().attend_qkv(qkv, rotary, layer, step, sinks)
        every = qkv.view(-1, heads + group.num_kv_heads, dim)
        turned, _ = self.ops.apply_rope(every[:, :heads], every[:, :0], None, rotary.cos_sin)
        return self.attend(turned[:, : group.num_heads], turned[:, group.num_heads :], every[:, heads:], layer, step, sinks)

    def _write(self, k: torch.Tensor, v: torch.Tensor, layer: int, step: Step) -> None:
        """Store the step's keys and values, in place."""
        if step.written is not None:
            k, v = k.index_select(0, step.written), v.index_select(0, step.written)
        for stored, part in zip(self._keys_and_values[layer], (k, v), strict=True):
            stored.index_copy_(0, step.write, part.to(stored.dtype))

    def _read(self, q: torch.Tensor, layer: int, piece: Piece) -> torch.Tensor:
        """q: [rows * queries, HQ, D]. Returns [rows * queries, HQ * D]."""
        heads, dim = q.shape[1:]
        rows, kv_heads = q.shape[0] // piece.queries, self.group.num_kv_heads
        kv = self._layers[layer].index_select(0, piece.pages).view(rows, -1, 2, kv_heads, dim)
        kv = kv[:, piece.start : piece.start + piece.keys].to(q.dtype)
        k, v = kv.permute(2, 0, 3, 1, 4).unbind(0)  # [rows, HK, keys, D]
        scale = self.group.scale
        if piece.queries == 1:  # the query heads of one key head are queries of one product
            out = scaled_dot_product_attention(q.reshape(rows, kv_heads, -1, dim), k, v, scale=scale)
            return out.reshape(rows, heads * dim)
        part = q.transpose(0, 1).unsqueeze(0)
        out = scaled_dot_product_attention(
            part, k, v, attn_mask=piece.mask, is_causal=piece.causal, scale=scale, enable_gqa=heads != kv_heads
        )
        return out.squeeze(0).transpose(0, 1).reshape(piece.queries, heads * dim)
