"""Attention on a CPU that knows how long each row is: a step reads its lengths once, and rows of about one length attend together.

A prompt from its first token on reads the step's own keys. All others are copied out of their pages into memory that stays in the
processor's cache, the null token where a row of a piece is shorter than the longest. Letters: T tokens of the step, HQ query heads, HK
key-value heads, D head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from modelrunner.attention import AttentionBackend, AttentionMeta, Rotary
from modelrunner.kernels.attention.index import rows_per_page, token_rows
from modelrunner.kernels.attention.pieces import attend_pieces, write_rows
from modelrunner.kernels.rope.cpu import full_turns, turned

if TYPE_CHECKING:
    from modelrunner.model_state import FullAttention
    from modelrunner.ops import Ops

PIECE = 1 << 20  # bytes of keys and values that are copied together: more would leave the processor's cache
PADDING = 1 << 16  # bytes that one row may be padded by: copying them takes less time than another piece


class Decode(NamedTuple):
    """The decode rows of a step, those of about one length in a piece. N rows, in the order of the pieces.

    tokens: of the step, [N] int64. whole: there are no others. back: where in that order each token of the step is, [N] int64; None where
    they are in order, or not whole. ordered: [N, HQ, D], where a layer's queries are put. The others are the lists of `attend_pieces`,
    views of memory that the steps share: places, copies, wide, queries, keys, values, masks.
    """

    tokens: torch.Tensor
    whole: bool
    back: torch.Tensor | None
    ordered: torch.Tensor
    lists: tuple[list[Any], ...]


class Prompt(NamedTuple):
    """The tokens of one prompt, or of a part of it.

    tokens: of the step. keys: how many. places: [keys] int64 rows of the token view; None: the keys are the step's own. mask: added to the
    scores, [queries, keys] in the queries' type; None: keys up to the query's own, the last of which is the last.
    """

    tokens: slice
    keys: int
    places: torch.Tensor | None = None
    mask: torch.Tensor | None = None


class Step(NamedTuple):
    """What the layers of a step share. whole: every token belongs to a row. write: rows of the token view, [W] int64. written: the tokens
    that are written there, [W] int64; None for all. turns: by identity, tables of positions and their `full_turns`."""

    decode: Decode | None
    prompts: tuple[Prompt, ...]
    whole: bool
    write: torch.Tensor
    written: torch.Tensor | None
    turns: dict[int, tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]]


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
        self._wide = self._copied.to(dtype)
        self._queries = self._wide.new_empty(0, group.num_heads, group.head_dim)

    def begin(self, meta: AttentionMeta) -> Step:
        slots, page_size = meta.slots, self.cache.shape[2]
        write = slots + slots.div(page_size, rounding_mode="floor") * (self._page_rows - page_size)
        written = None
        if meta.num_tokens and int(slots.min()) < 0:
            written = torch.nonzero(slots >= 0).squeeze(1)
            write = write[written]
        rows = self._rows(meta)
        decode = self._decode_rows(meta, [row for row in rows if row.queries == 1])
        prompts = tuple(self._prompt_piece(meta, row) for row in rows if row.queries > 1)
        return Step(decode, prompts, sum(row.queries for row in rows) == meta.num_tokens, write, written, {})

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

    def _decode_rows(self, meta: AttentionMeta, rows: list[Row]) -> Decode | None:
        if not rows:
            return None
        pieces = self._alike(rows)
        sizes = [(len(piece), max(row.keys for row in piece)) for piece in pieces]
        found = [self._index(meta, piece, keys) for piece, (_, keys) in zip(pieces, sizes, strict=True)]
        places = [index for index, _ in found]
        masks = [None if missing is None else self._mask(missing)[:, None, None] for _, missing in found]
        copies, wide = self._memory([index.numel() for index in places])
        kept = [copy.view(*size, 2, self.group.num_kv_heads, -1) for copy, size in zip(wide or copies, sizes, strict=True)]
        keys, values = ([each.select(2, part).transpose(1, 2) for each in kept] for part in (0, 1))
        ordered = self._ordered(len(rows))
        queries = list(ordered.unflatten(1, (self.group.num_kv_heads, -1)).split([number for number, _ in sizes]))
        firsts, whole = [row.first for piece in pieces for row in piece], len(rows) == meta.num_tokens
        tokens = torch.tensor(firsts)
        back = tokens.argsort() if whole and firsts != sorted(firsts) else None
        return Decode(tokens, whole, back, ordered, (places, copies, wide, queries, keys, values, masks))

    def _memory(self, sizes: list[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Room for the keys and values of pieces of so many tokens, the same for all: in the cache's type, and in the queries' if that is
        another."""
        longest = max(sizes, default=0)
        if longest > self._copied.shape[0]:
            self._copied = self._copied.new_empty(longest, self._copied.shape[1])
            self._wide = self._copied.to(self.dtype)
        other = self.cache.dtype != self.dtype
        return [self._copied[:size] for size in sizes], [self._wide[:size] for size in sizes] if other else []

    def _ordered(self, rows: int) -> torch.Tensor:
        if rows > self._queries.shape[0]:
            self._queries = self._queries.new_empty(rows, *self._queries.shape[1:])
        return self._queries[:rows]

    def _mask(self, unseen: torch.Tensor) -> torch.Tensor:
        return torch.zeros(unseen.shape, dtype=self.dtype).masked_fill_(unseen, float("-inf"))

    def _prompt_piece(self, meta: AttentionMeta, row: Row) -> Prompt:
        tokens, window = slice(row.first, row.first + row.queries), self.group.window
        if row.queries == row.keys and (window is None or row.keys <= window):
            own = self.cache.dtype == self.dtype  # stored keys are what was computed
            return Prompt(tokens, row.keys, None if own else self._index(meta, [row], row.keys)[0])
        key, query = torch.arange(row.keys), torch.arange(row.keys - row.queries, row.keys).unsqueeze(1)
        unseen = key > query if window is None else (key > query) | (key <= query - window)
        return Prompt(tokens, row.keys, self._index(meta, [row], row.keys)[0], self._mask(unseen))

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
        if step.decode is not None and step.decode.whole:
            out, back = self._decode(q, layer, step.decode), step.decode.back
            return (out if back is None else out.index_select(0, back)).flatten(1)
        out = q.new_empty(q.shape) if step.whole else q.new_zeros(q.shape)
        if step.decode is not None:
            out.index_copy_(0, step.decode.tokens, self._decode(q, layer, step.decode))
        for prompt in step.prompts:
            own = (k[prompt.tokens], v[prompt.tokens]) if prompt.places is None else None
            out[prompt.tokens] = self._prompt(q[prompt.tokens], layer, prompt, own)
        return out.flatten(1)

    def attend_qkv(self, qkv: torch.Tensor, rotary: Rotary, layer: int, step: Step, sinks: torch.Tensor | None = None) -> torch.Tensor:
        group = self.group
        dim, heads = group.head_dim, group.num_heads + group.num_kv_heads
        if rotary.q_norm is not None or rotary.cos_sin.shape[-1] != dim:
            return super().attend_qkv(qkv, rotary, layer, step, sinks)
        every = qkv.view(-1, heads + group.num_kv_heads, dim)
        if qkv.dtype == torch.float32:
            both = turned(every[:, :heads], *self._turns(rotary.cos_sin, step))
        else:
            both, _ = self.ops.apply_rope(every[:, :heads], every[:, :0], None, rotary.cos_sin)
        return self.attend(both[:, : group.num_heads], both[:, group.num_heads :], every[:, heads:], layer, step, sinks)

    def _turns(self, cos_sin: torch.Tensor, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """Made once a step for all layers that share a table."""
        if (kept := step.turns.get(id(cos_sin))) is None:
            kept = step.turns[id(cos_sin)] = cos_sin, full_turns(cos_sin)
        return kept[1]

    def _write(self, k: torch.Tensor, v: torch.Tensor, layer: int, step: Step) -> None:
        """Store the step's keys and values, in place."""
        if step.written is not None:
            k, v = k.index_select(0, step.written), v.index_select(0, step.written)
        keys, values = self._keys_and_values[layer]
        write_rows(keys, values, step.write, k, v)

    def _decode(self, q: torch.Tensor, layer: int, decode: Decode) -> torch.Tensor:
        """q: [T, HQ, D]. Returns [N, HQ, D]. The query heads of one key head are queries of one product."""
        torch.index_select(q, 0, decode.tokens, out=decode.ordered)
        places, copies, wide, queries, keys, values, masks = decode.lists
        out = attend_pieces(self._tokens[layer], places, copies, wide, queries, keys, values, masks, self.group.scale)
        return out.transpose(1, 2).reshape(decode.ordered.shape)

    def _prompt(self, q: torch.Tensor, layer: int, prompt: Prompt, own: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
        """q: [queries, HQ, D]. own: the step's keys and values of these tokens, [queries, HK, D]. Returns [queries, HQ, D]."""
        k, v = (part.transpose(0, 1).unsqueeze(0) for part in (self._stored(layer, prompt) if own is None else own))
        shared = self.group.num_heads != self.group.num_kv_heads
        out = scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0), k, v,
            attn_mask=prompt.mask, is_causal=prompt.mask is None, scale=self.group.scale, enable_gqa=shared,
        )  # fmt: skip
        return out.squeeze(0).transpose(0, 1)

    def _stored(self, layer: int, prompt: Prompt) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and the values of a prompt, [keys, HK, D] each."""
        assert prompt.places is not None
        stored = self._tokens[layer].index_select(0, prompt.places).to(self.dtype)
        k, v = stored.view(-1, 2, self.group.num_kv_heads, self.group.head_dim).unbind(1)
        return k, v
