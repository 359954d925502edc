"""Attention on a CPU that knows how long each row is: a step reads its lengths once, and rows of about one length attend together.

A prompt from its first token on reads the step's own keys. All others are copied out of their pages into memory that stays in the
processor's cache, the null token where a row of a piece is shorter than the longest. Letters: T tokens of the step, HQ query heads, HK
key-value heads, D head size.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from modelrunner.attention import AttentionBackend, AttentionMeta, Rotary
from modelrunner.kernels.attention.index import rows_per_page, token_rows

if TYPE_CHECKING:
    from modelrunner.model_state import FullAttention
    from modelrunner.ops import Ops

PIECE = 1 << 20  # bytes of keys and values that are copied together: more would leave the processor's cache
PADDING = 1 << 16  # bytes that one row may be padded by: copying them takes less time than another piece


class Piece(NamedTuple):
    """Decode rows of about one length, or the tokens of one prompt.

    tokens: of the step. queries: of each row. keys: of the longest row. places: [rows * keys] int64 rows of the token view, 0 for a key
    that is not there; None: the keys are the step's own. mask: added to the scores, [rows, 1, 1, keys] or [queries, keys] in the queries'
    type; None: all keys, or with `causal` those up to the query's own, the last of which is the last.
    """

    tokens: slice | torch.Tensor
    queries: int
    keys: int
    places: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    causal: bool = False


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

    @property
    def keys(self) -> int:
        return self.length - self.start


class RowAttention(AttentionBackend):
    """Works on lengths read back from the step's tensors, which are there when the step runs: they are in the host's memory."""

    def __init__(self, group: FullAttention, cache: torch.Tensor, ops: Ops, dtype: torch.dtype) -> None:
        super().__init__(group, cache, ops, dtype)
        self._tokens = [token_rows(cache[:, layer]) for layer in range(cache.shape[1])]
        self._page_rows = rows_per_page(cache[:, 0])
        self._keys_and_values = [tokens.unflatten(1, (2, group.num_kv_heads, group.head_dim)).unbind(1) for tokens in self._tokens]
        self._key_bytes = cache.stride(2) * cache.itemsize
        self._copied = cache.new_empty(0, cache.stride(2))  # keys and values of the piece at work

    def begin(self, meta: AttentionMeta) -> Step:
        slots, page_size = meta.slots, self.cache.shape[2]
        write = slots + slots.div(page_size, rounding_mode="floor") * (self._page_rows - page_size)
        written = None
        if meta.num_tokens and int(slots.min()) < 0:
            written = torch.nonzero(slots >= 0).squeeze(1)
            write = write[written]
        rows = self._rows(meta)
        pieces = [self._decode_piece(meta, alike) for alike in self._alike([row for row in rows if row.queries == 1])]
        pieces += [self._prompt_piece(meta, row) for row in rows if row.queries > 1]
        longest = max((piece.places.numel() for piece in pieces if piece.places is not None), default=0)
        if longest > self._copied.shape[0]:
            self._copied = self._copied.new_empty(longest, self._copied.shape[1])
        return Step(tuple(pieces), sum(row.queries for row in rows) == meta.num_tokens, write, written)

    def _rows(self, meta: AttentionMeta) -> list[Row]:
        window = self.group.window
        rows = []
        lengths = zip(meta.query_start.tolist(), meta.query_len.tolist(), meta.seq_len.tolist(), strict=False)
        for index, (first, queries, length) in enumerate(lengths):
            if queries > 0:
                start = 0 if window is None else max(length - queries - window + 1, 0)
                rows.append(Row(index, first, queries, length, start))
        return rows

    def _alike(self, rows: list[Row]) -> list[list[Row]]:
        """Rows of about one length, as many together as PIECE and PADDING allow, in the order of the batch."""
        most, padding = PIECE // self._key_bytes, PADDING // self._key_bytes
        pieces: list[list[Row]] = []
        for row in sorted(rows, key=lambda row: row.keys):
            last = pieces[-1] if pieces else []
            if last and row.keys - last[0].keys <= padding and row.keys * (len(last) + 1) <= most:
                last.append(row)
            else:
                pieces.append([row])
        return [sorted(piece) for piece in pieces]

    def _decode_piece(self, meta: AttentionMeta, rows: list[Row]) -> Piece:
        keys = max(row.keys for row in rows)
        firsts = [row.first for row in rows]
        follow = all(after == first + 1 for first, after in pairwise(firsts))
        tokens = slice(firsts[0], firsts[-1] + 1) if follow else torch.tensor(firsts)
        index, missing = self._index(meta, rows, keys)
        if missing is None:
            return Piece(tokens, 1, keys, index)
        mask = torch.zeros(missing.shape, dtype=self.dtype).masked_fill_(missing, float("-inf"))
        return Piece(tokens, 1, keys, index, mask[:, None, None])

    def _prompt_piece(self, meta: AttentionMeta, row: Row) -> Piece:
        tokens, window = slice(row.first, row.first + row.queries), self.group.window
        if row.queries == row.keys and (window is None or row.keys <= window):
            own = self.cache.dtype == self.dtype  # stored keys are what was computed
            return Piece(tokens, row.queries, row.keys, None if own else self._index(meta, [row], row.keys)[0], causal=True)
        key, query = torch.arange(row.keys), torch.arange(row.keys - row.queries, row.keys).unsqueeze(1)
        unseen = key > query if window is None else (key > query) | (key <= query - window)
        mask = torch.zeros(unseen.shape, dtype=self.dtype).masked_fill_(unseen, float("-inf"))
        return Piece(tokens, row.queries, row.keys, self._index(meta, [row], row.keys)[0], mask)

    def _index(self, meta: AttentionMeta, rows: list[Row], keys: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Where the rows' keys are, a row after the other: [rows * keys] rows of the token view; and which are not there: [rows, keys]
        bool, None if all are."""
        page_size = self.cache.shape[2]
        position = torch.tensor([row.start for row in rows]).unsqueeze(1) + torch.arange(keys)
        last = torch.tensor([row.length - 1 for row in rows]).unsqueeze(1)
        table = meta.block_table[[row.number for row in rows]].long()
        at = torch.minimum(position, last)
        page = at.div(page_size, rounding_mode="floor")
        index = at + table.gather(1, page).mul_(self._page_rows).sub_(page.mul_(page_size))
        if all(row.keys == keys for row in rows):
            return index.flatten(), None
        missing = position > last
        return index.masked_fill_(missing, 0).flatten(), missing

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, step: Step, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        self._write(k, v, layer, step)
        out = q.new_empty(q.shape) if step.whole else q.new_zeros(q.shape)
        for piece in step.pieces:
            if piece.queries == 1:
                out[piece.tokens] = self._decode(q[piece.tokens], layer, piece)
            else:
                own = (k[piece.tokens], v[piece.tokens]) if piece.places is None else None
                out[piece.tokens] = self._prompt(q[piece.tokens], layer, piece, own)
        return out.flatten(1)

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

    def _stored(self, layer: int, piece: Piece) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and the values of a piece, [rows, HK, keys, D] each, until the next piece's are asked for."""
        assert piece.places is not None
        copied = torch.index_select(self._tokens[layer], 0, piece.places, out=self._copied[: piece.places.numel()])
        kv = copied.view(-1, piece.keys, 2, self.group.num_kv_heads, self.group.head_dim).to(self.dtype)
        k, v = kv.permute(2, 0, 3, 1, 4).unbind(0)
        return k, v

    def _decode(self, q: torch.Tensor, layer: int, piece: Piece) -> torch.Tensor:
        """q: [rows, HQ, D]. Returns the same. The query heads of one key head are queries of one product."""
        k, v = self._stored(layer, piece)
        folded = q.reshape(q.shape[0], self.group.num_kv_heads, -1, q.shape[2])
        return scaled_dot_product_attention(folded, k, v, attn_mask=piece.mask, scale=self.group.scale).reshape(q.shape)

    def _prompt(self, q: torch.Tensor, layer: int, piece: Piece, own: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
        """q: [queries, HQ, D]. own: the step's keys and values of these tokens, [queries, HK, D]. Returns [queries, HQ, D]."""
        k, v = self._stored(layer, piece) if own is None else (part.transpose(0, 1).unsqueeze(0) for part in own)
        shared = self.group.num_heads != self.group.num_kv_heads
        out = scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0), k, v, attn_mask=piece.mask, is_causal=piece.causal, scale=self.group.scale, enable_gqa=shared
        )
        return out.squeeze(0).transpose(0, 1)
