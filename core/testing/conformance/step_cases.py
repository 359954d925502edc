"""Cases for the operations of a step: areas `table`, `batch` and `attention`, over random steps of a request table.

Letters: R table rows (the last one is scratch), N rows and T tokens of the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from modelrunner.kernels.batch import gather_rows, gather_tokens

if TYPE_CHECKING:
    from modelrunner.testing.conformance.kernel_cases import Draw

HEADS, KV_HEADS, DIM, LAYERS, LAYER = 6, 2, 24, 3, 1
VOCAB = 331


@dataclass(frozen=True)
class Size:
    """decode, prefill: rows of one query token, and rows of more. longest: tokens of a sequence at most. page: tokens a page."""

    decode: int
    prefill: int
    longest: int
    page: int
    padding: int = 0
    window: int | None = None
    softcap: float | None = None


SIZES = (
    Size(1, 0, 1, 16),
    Size(0, 1, 63, 16),
    Size(7, 0, 130, 16, padding=3),
    Size(3, 4, 63, 8, padding=5),
    Size(0, 3, 200, 32, window=9),
    Size(5, 2, 90, 4, window=17, softcap=20.0),
)


class Reference:
    """The operations that a case needs before the one it is about."""

    gather_rows = staticmethod(gather_rows)
    gather_tokens = staticmethod(gather_tokens)


class Step:
    """Columns of a table of N + 4 rows, and a step over N of them. Every fifth row has finished, every fifth is of another tenancy."""

    def __init__(self, draw: Draw, size: Size) -> None:
        def integers(low: int, high: int, *shape: int) -> torch.Tensor:
            return draw.integers(low, high, *shape, dtype=torch.int32)

        live = size.decode + size.prefill
        lines, device = live + 4, draw.device
        padding = torch.zeros(size.padding, dtype=torch.int32, device=device)
        own = torch.randperm(lines - 1, generator=draw.generator)[:live].to(device)
        query = torch.ones(live, dtype=torch.int32, device=device)
        query[size.decode :] = integers(1, max(2, size.longest // 2), size.prefill)
        computed, known, finished, generation = (
            integers(0, size.longest, lines),
            *(integers(0, 1, lines) for _ in range(2)),
            integers(0, 5, lines),
        )
        computed[own] = torch.minimum(computed[own], size.longest - query)
        known[own] = computed[own] + query + integers(0, 2, live)  # about half of them sample
        finished[own[4::5]] = 1
        self.size = size
        self.rows = torch.cat((own.int(), padding + lines - 1))
        self.generations = torch.cat((generation[own], padding - 1))
        self.generations[3:live:5] += 1
        self.num_query = torch.cat((query, padding))
        slots = torch.cat((query, padding if size.prefill else padding + 1))  # a padding row of a decode step has its slot
        self.query_start = torch.cat((slots[:1] * 0, slots.cumsum(0).int()))
        self.num_tokens = int(self.query_start[-1]) + (size.padding if size.prefill else 0)
        self.columns = {
            "token_ids": integers(0, VOCAB, lines, size.longest + 3),
            "known": known,
            "computed": computed,
            "finished": finished,
            "generation": generation,
            "limit": known + integers(1, 4, lines),
            "num_accepted": integers(0, 2, lines),
        }

    @property
    def num_rows(self) -> int:
        return int(self.rows.shape[0])


def gather(ops: Any, draw: Draw, step: Step) -> dict[str, torch.Tensor]:
    """What `gather_rows` and `gather_tokens` make of a step."""
    n, t, c = step.num_rows, step.num_tokens, step.columns
    out = {name: draw.unwritten(n, dtype=torch.int32) for name in ("query_len", "computed", "seq_len")}
    out["samples"] = torch.zeros(n, dtype=torch.bool, device=draw.device)
    columns = (c["computed"], c["known"], c["finished"], c["generation"])
    ops.gather_rows(step.rows, step.num_query, step.generations, *columns, *out.values())
    tokens = {name: draw.unwritten(t, dtype=torch.int64) for name in ("input_ids", "positions", "token_row")}
    tokens["token_valid"] = torch.zeros(t, dtype=torch.bool, device=draw.device)
    tokens["sample_index"] = draw.unwritten(n, dtype=torch.int64)
    ops.gather_tokens(step.rows, step.query_start, out["query_len"], out["computed"], c["known"], c["token_ids"], *tokens.values())
    return out | tokens


def gathers(ops: Any, draw: Draw, size: Size) -> Any:
    step = Step(draw, size)
    found = gather(ops, draw, step)
    live, index = found["query_len"] > 0, found.pop("sample_index")
    return found, index[live], ((index >= 0) & (index < step.num_tokens)).all()


def gather_block_table(ops: Any, draw: Draw, rows: int, pages: int) -> Any:
    table = draw.integers(0, 999, rows + 3, pages + 5, dtype=torch.int32)
    out = draw.unwritten(rows, pages, dtype=torch.int32)
    ops.gather_block_table(table, draw.integers(0, rows + 3, rows, dtype=torch.int32), out)
    return out


def slot_mapping(ops: Any, draw: Draw, size: Size) -> Any:
    step = Step(draw, size)
    batch = gather(Reference, draw, step)
    table = draw.integers(0, 4, step.num_rows, -(-size.longest // size.page), dtype=torch.int32)  # every fourth is the null page
    out = draw.unwritten(step.num_tokens, dtype=torch.int64)
    ops.slot_mapping(table, batch["token_row"], batch["positions"], batch["token_valid"], size.page, out)
    return out


def gather_step(ops: Any, draw: Draw, size: Size) -> Any:
    """Two cache groups; of their block tables what the step reads is compared."""
    step = Step(draw, size)
    n, t, c = step.num_rows, step.num_tokens, step.columns
    wanted = gather(Reference, draw, step)
    out = {name: draw.unwritten(*value.shape, dtype=value.dtype) for name, value in wanted.items()}
    row_outs = [out[name] for name in ("query_len", "computed", "seq_len", "samples")]
    token_outs = [out[name] for name in ("input_ids", "positions", "token_row", "token_valid")]
    columns = [c[name] for name in ("computed", "known", "finished", "generation", "num_accepted", "token_ids")]
    groups = []
    for page in (size.page, 2 * size.page):
        pages = -(-size.longest // page)
        table = draw.integers(0, 4, c["known"].shape[0], pages + 3, dtype=torch.int32)
        groups.append((table, page, draw.unwritten(n, pages, dtype=torch.int32), draw.unwritten(t, dtype=torch.int64)))
    num_accepted = draw.unwritten(n, dtype=torch.int32)
    ops.gather_step(
        *(step.rows, step.num_query, step.generations, step.query_start),
        *columns,
        *row_outs,
        num_accepted,
        out["sample_index"],
        *token_outs,
        groups,
    )
    tables = []
    for _, page, table, _ in groups:
        needed = (-(-wanted["seq_len"] // page)).clamp(min=1).unsqueeze(1)
        tables.append(torch.where(torch.arange(table.shape[1], device=table.device) < needed, table, -1))
    index = out.pop("sample_index")
    return out, num_accepted, index[wanted["query_len"] > 0], tables, [slots for *_, slots in groups]


# ---- table -------------------------------------------------------------------------------------------------------------


def apply_patch(ops: Any, draw: Draw, runs: int) -> Any:
    arena = draw.integers(0, 99, 4096, dtype=torch.int32)
    length = draw.integers(1, 9, runs, dtype=torch.int32)
    dst = (torch.randperm(512, generator=draw.generator)[:runs] * 8).to(draw.device)
    start = (length.cumsum(0) - length).int()
    ops.apply_patch(arena, dst, length, start, draw.integers(100, 999, int(length.sum()), dtype=torch.int32))
    return arena


def update_state(ops: Any, draw: Draw, size: Size, draft: int) -> Any:
    step = Step(draw, size)
    batch, c, n = gather(Reference, draw, step), step.columns, step.num_rows
    tokens = draw.integers(0, 40, n, 1 + draft)
    num_tokens = draw.integers(1, 2 + draft, n, dtype=torch.int32)
    ok = draw.integers(0, 8, n) > 0
    seats = draw.integers(-1, 3, step.columns["known"].shape[0], dtype=torch.int32)
    stop_ids = draw.integers(0, 40, 4, 6, dtype=torch.int32)
    stop_ids[:, 4:] = -1
    c["token_ids"] = torch.cat((c["token_ids"], c["token_ids"][:, : 1 + draft]), 1)
    state = [c[name] for name in ("token_ids", "computed", "known", "finished", "limit", "num_accepted")]
    ends = (draw.integers(0, 2 + draft, n, dtype=torch.int32),) if size.prefill else ()
    finish = ops.update_state(step.rows, batch["query_len"], batch["samples"], tokens, num_tokens, ok, *state, seats, stop_ids, *ends)
    return finish, num_tokens, state


def finish_step(ops: Any, draw: Draw, size: Size, draft: int) -> Any:
    """`update_state` and then `write_record`, with the update's own columns."""
    n = size.decode + size.prefill + size.padding
    ring, counter = draw.unwritten(3, n + 2, 6 + draft, dtype=torch.int32), draw.integers(5, 6, 1)
    generations = draw.integers(0, 9, n, dtype=torch.int32)
    fused = SimpleNamespace(update_state=partial(ops.finish_step, ring, counter, generations))
    return ring, counter, update_state(fused, draw, size, draft)


def write_record(ops: Any, draw: Draw, rows: int, draft: int) -> Any:
    ring, counter = draw.unwritten(3, rows + 2, 6 + draft, dtype=torch.int32), draw.integers(5, 6, 1)
    row_values = [draw.integers(0, 4, rows, dtype=torch.int32) for _ in range(2)]
    num_tokens = draw.integers(0, 2 + draft, rows, dtype=torch.int32)
    finish = draw.integers(0, 4, rows, dtype=torch.int32)
    for _ in range(2):
        ops.write_record(ring, counter, *row_values, num_tokens, finish, draw.integers(0, VOCAB, rows, 1 + draft))
    return ring, counter


# ---- attention ---------------------------------------------------------------------------------------------------------


class Paged:
    """A cache of which only what may be read is not NaN, and the step's queries, keys and values as strided views of one tensor."""

    def __init__(self, draw: Draw, size: Size) -> None:
        self.step = step = Step(draw, size)
        self.batch = batch = gather(Reference, draw, step)
        n, page, pages = step.num_rows, size.page, -(-size.longest // size.page)
        table = torch.randperm(n * pages, generator=draw.generator).view(n, pages).to(draw.device, torch.int32) + 1
        self.arena = draw.unwritten(n * pages + 3, LAYERS, page, 2, KV_HEADS, DIM)
        self.arena[0] = 0.0
        for row, (done, query) in enumerate(zip(batch["computed"].tolist(), batch["query_len"].tolist(), strict=True)):
            first = 0 if size.window is None else max(done - size.window + 1, 0)
            for position in range(first, done):
                self.arena[int(table[row, position // page]), :, position % page] = draw.noise(2, KV_HEADS, DIM)
            table[row, : first // page] = 0
            table[row, -(-(done + query) // page) :] = 0
        self.table, positions = table, batch["positions"]
        slots = table[batch["token_row"], positions // page].long() * page + positions % page
        self.slots = torch.where(batch["token_valid"], slots, -1)
        self.fused = draw.noise(step.num_tokens, (HEADS + 2 * KV_HEADS) * DIM)
        split = self.fused.split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], -1)
        self.q, self.k, self.v = (part.unflatten(-1, (-1, DIM)) for part in split)

    @property
    def cache(self) -> torch.Tensor:
        return self.arena[:, LAYER]

    def arguments(self) -> tuple[torch.Tensor, ...]:
        """block_table, query_start, query_len, seq_len, token_row."""
        batch = self.batch
        return self.table, self.step.query_start, batch["query_len"], batch["seq_len"], batch["token_row"]

    def limits(self) -> dict[str, Any]:
        size, step = self.step.size, self.step
        decode = size.decode if size.prefill else step.num_rows
        bounds = {"max_query": max(int(step.num_query.max()), size.padding), "max_seq_len": size.longest, "window": size.window}
        return {"num_decode": decode, "decode_query": 1} | bounds

    def compared(self, out: torch.Tensor) -> Any:
        """Of an output: the valid tokens, and whether all are finite."""
        return out[self.batch["token_valid"]], out.isfinite().all(), self.arena


def paged_attention(ops: Any, draw: Draw, size: Size) -> Any:
    """The step's own keys and values are written first, as a model does it."""
    made = Paged(draw, size)
    ops.write_cache(made.cache, made.k, made.v, made.slots)
    options = {"scale": 0.3, "softcap": size.softcap} | made.limits()
    return made.compared(ops.paged_attention(made.q, made.cache, *made.arguments(), made.batch["positions"], **options))


def indexed_attention(ops: Any, draw: Draw, size: Size) -> Any:
    """`attention_index`, `indexed_write` and `indexed_attention` together: an override may have an index of its own."""
    made = Paged(draw, size)
    index = ops.attention_index(made.cache, *made.arguments(), made.slots, num_heads=HEADS, **made.limits(), dtype=draw.dtype)
    ops.indexed_write(made.cache, made.k, made.v, index)
    return made.compared(ops.indexed_attention(made.q, made.cache, index, scale=0.3, softcap=size.softcap))


def qkv_rope_write(ops: Any, draw: Draw, size: Size, rotary: int, normed: bool) -> Any:
    """Queries, keys and values in one tensor; the cache with what was written into it."""
    return rotated(ops.attention_index, ops.qkv_rope_write, draw, size, rotary, normed)


def qkv_attention(ops: Any, draw: Draw, size: Size, rotary: int, normed: bool) -> Any:
    return rotated(ops.attention_index, partial(ops.qkv_attention, scale=0.3), draw, size, rotary, normed)


def rotated(index: Any, operation: Any, draw: Draw, size: Size, rotary: int, normed: bool) -> Any:
    """An operation on queries, keys and values in one tensor, which it must leave as it is."""
    made = Paged(draw, size)
    work = index(made.cache, *made.arguments(), made.slots, num_heads=HEADS, **made.limits(), dtype=draw.dtype)
    angle = draw.uniform(made.step.num_tokens, rotary // 2) * 7
    norms = (1 + draw.noise(DIM) / 4, 1 + draw.noise(DIM) / 4) if normed else (None, None)
    cos_sin, kept = torch.cat((angle.cos(), angle.sin()), 1), made.fused.clone()
    out = operation(made.fused, HEADS, KV_HEADS, *norms, 1e-5, cos_sin, made.cache, made.slots, work)
    return *made.compared(out), made.fused - kept


def segment_attention(ops: Any, draw: Draw, dim: int, lengths: tuple[int, ...]) -> Any:
    """Queries, keys and values as an encoder has them: slices of one tensor."""
    q, k, v = draw.noise(sum(lengths), 3, HEADS, dim).unbind(1)
    starts = torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)], dtype=torch.int32, device=draw.device)
    out = ops.segment_attention(q, k, v, starts, lengths, scale=0.3)
    return out, out.isfinite().all()


def write_cache(ops: Any, draw: Draw, size: Size) -> Any:
    made = Paged(draw, size)
    ops.write_cache(made.cache, made.k, made.v, made.slots)
    return made.arena


def gather_pages(ops: Any, draw: Draw, size: Size) -> Any:
    """What rows have in the cache, with some room after it; what comes after the last row stays."""
    made = Paged(draw, size)
    ops.write_cache(made.cache, made.k, made.v, made.slots)
    lengths = made.batch["seq_len"]
    room = lengths + draw.integers(0, 2 * size.page, lengths.shape[0], dtype=torch.int32)
    starts = torch.cat((room.new_zeros(1), room.cumsum(0, dtype=torch.int32)))
    out = draw.unwritten(int(starts[-1]) + 5, 2, KV_HEADS, DIM)
    ops.gather_pages(made.cache, made.table, starts, lengths, out, max_tokens=int(room.max()))
    return out


STEPS = tuple((size,) for size in SIZES)
DRAFTS = tuple((size, draft) for size in SIZES[1:4] for draft in (0, 3))
ROTATIONS = tuple((size, rotary, normed) for size in SIZES[::2] for rotary, normed in ((DIM, True), (8, False)))
STEP_CASES: dict[str, tuple[Any, Any]] = {
    "apply_patch": (apply_patch, ((0,), (1,), (63,), (500,))),
    "update_state": (update_state, DRAFTS),
    "finish_step": (finish_step, DRAFTS),
    "write_record": (write_record, ((1, 0), (63, 0), (5, 3))),
    "gather_rows": (gathers, STEPS),
    "gather_tokens": (gathers, STEPS),
    "gather_block_table": (gather_block_table, ((1, 1), (63, 7))),
    "slot_mapping": (slot_mapping, STEPS),
    "gather_step": (gather_step, STEPS),
    "write_cache": (write_cache, STEPS),
    "gather_pages": (gather_pages, STEPS),
    "paged_attention": (paged_attention, STEPS),
    "segment_attention": (segment_attention, ((16, (5,)), (80, (64, 64, 32, 64, 1)), (20, (7, 7, 3)))),
    "attention_index": (indexed_attention, STEPS),
    "indexed_write": (indexed_attention, STEPS),
    "indexed_attention": (indexed_attention, STEPS),
    "qkv_rope_write": (qkv_rope_write, ROTATIONS),
    "qkv_attention": (qkv_attention, ROTATIONS),
}
