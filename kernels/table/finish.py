"""What ends a step, in one launch: the state update, the record, and the step counter.

Letters: N rows of the step, 1 + k tokens of a row, S stop ids of a seat, E ring entries.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modelrunner.kernels.pdl import pdl
from modelrunner.kernels.table import reference

NONE, STOP, LENGTH, ERROR = (tl.constexpr(code) for code in range(4))
HEADER = tl.constexpr(reference.RECORD_HEADER)
NO_TOKEN = tl.constexpr(reference.NO_TOKEN)
ARRIVAL = tl.constexpr(1 << 40)  # what a program that has read the counter adds to it
TILE = 1024  # comparisons of a warp
MAX_ROWS = 32  # of a program


@triton.jit
def update_rows(
    i, live, query_len, samples, tokens, num_tokens, ok,
    token_ids_ptr, computed_ptr, known_ptr, finished_ptr, limit_ptr, num_accepted_ptr, seat_ptr, stop_ids_ptr, ends_ptr,
    row, length, S, WIDTH: tl.constexpr, STOPS: tl.constexpr,
):  # fmt: skip
    """`update_state` of a block of rows. tokens: [rows, WIDTH]. Returns num_tokens and finish; dead rows write no column."""
    alive = live & (query_len > 0)
    sampling = samples & alive
    known = tl.load(known_ptr + row, mask=live, other=0)
    computed = tl.load(computed_ptr + row, mask=live, other=0)
    limit = tl.load(limit_ptr + row, mask=live, other=0)
    seat = tl.load(seat_ptr + row, mask=live, other=-1).to(tl.int64)
    step = tl.arange(0, WIDTH)[None, :]
    place = tl.arange(0, STOPS)[None, :]

    seated = (seat[:, None] >= 0) & (place < S)
    stop_ids = tl.load(stop_ids_ptr + seat[:, None] * S + place, mask=seated, other=0)
    room = tl.maximum(tl.where(sampling & ok, tl.minimum(num_tokens, limit - known), 0), 0)
    same = (tokens[:, :, None] == stop_ids[:, None, :].to(tl.int64)) & seated[:, None, :]
    stops = tl.max(same.to(tl.int32), 2) > 0
    if ends_ptr is not None:
        stops = stops | (step + 1 == tl.load(ends_ptr + i, mask=live, other=0)[:, None])
    stops = stops & (step < room[:, None])
    first_stop = tl.min(tl.where(stops, step, WIDTH), 1)
    num_tokens = tl.minimum(room, first_stop + 1)

    known_new = known + num_tokens
    computed_new = tl.where(num_tokens > 0, known_new - 1, computed + query_len)
    finish = tl.where(known_new >= limit, LENGTH, NONE)
    finish = tl.where(first_stop < WIDTH, STOP, finish)
    finish = tl.where(ok, finish, ERROR)
    finish = tl.where(sampling, finish, NONE)

    tl.debug_barrier()  # the program's warps have read what it now writes
    token_place = token_ids_ptr + row[:, None] * length + known[:, None] + step
    tl.store(token_place, tokens.to(tl.int32), mask=step < num_tokens[:, None])
    tl.store(known_ptr + row, known_new, mask=num_tokens > 0)
    tl.store(computed_ptr + row, computed_new, mask=alive)
    tl.store(num_accepted_ptr + row, computed_new - computed, mask=alive)
    tl.store(finished_ptr + row, finish, mask=sampling)
    return num_tokens, finish


@triton.jit
def arrive(counter_ptr, E):
    """The ring entry that the counter names. The last program to ask advances it, when all others know the entry.

    A program counts itself in the high bits of the counter; what lies below them stays until the last one sets the new value.
    """
    old = tl.atomic_add(counter_ptr, ARRIVAL, sem="relaxed")
    count = old % ARRIVAL
    tl.store(counter_ptr, count + 1, mask=old // ARRIVAL == tl.num_programs(0) - 1)
    return count % E


@triton.jit
def record_rows(
    i, live, row, generation, tokens, num_tokens, finish, num_drafted_ptr, ring_ptr, entry, entry_stride, row_stride, K1,
    WIDTH: tl.constexpr
):  # fmt: skip
    """One record of each row of a block into a ring entry."""
    step = tl.arange(0, WIDTH)[None, :]
    record = ring_ptr + entry * entry_stride + i.to(tl.int64) * row_stride
    tl.store(record, row.to(tl.int32), mask=live)
    tl.store(record + 1, generation, mask=live)
    tl.store(record + 2, num_tokens, mask=live)
    tl.store(record + 3, finish, mask=live)
    num_drafted = tl.zeros_like(i)
    if num_drafted_ptr is not None:
        num_drafted = tl.load(num_drafted_ptr + i, mask=live, other=0)
    tl.store(record + 4, num_drafted, mask=live)
    kept = tl.where(step < num_tokens[:, None], tokens, NO_TOKEN).to(tl.int32)
    tl.store(record[:, None] + HEADER + step, kept, mask=live[:, None] & (step < K1))


_ANY_SIZE = ["N"]


@triton.jit(do_not_specialize=_ANY_SIZE)
def finish_kernel(
    rows_ptr, query_len_ptr, samples_ptr, tokens_ptr, num_tokens_ptr, ok_ptr,
    token_ids_ptr, computed_ptr, known_ptr, finished_ptr, limit_ptr, num_accepted_ptr, seat_ptr, stop_ids_ptr, ends_ptr, finish_ptr,
    ring_ptr, counter_ptr, generations_ptr, num_drafted_ptr, N, length, S, token_stride, E, entry_stride, row_stride,
    K1: tl.constexpr, WIDTH: tl.constexpr, STOPS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`update_state`, and `write_record` unless ring_ptr is None, of BLOCK rows a program."""
    if PDL:
        gdc_launch_dependents()
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < N
    step = tl.arange(0, WIDTH)[None, :]
    if PDL:
        gdc_wait()
    row = tl.load(rows_ptr + i, mask=live, other=0).to(tl.int64)
    query_len = tl.load(query_len_ptr + i, mask=live, other=0)
    samples = tl.load(samples_ptr + i, mask=live, other=0) != 0
    ok = tl.load(ok_ptr + i, mask=live, other=0) != 0
    num_tokens = tl.full([BLOCK], K1, tl.int32)
    if num_tokens_ptr is not None:
        num_tokens = tl.load(num_tokens_ptr + i, mask=live, other=0)
    tokens = tl.load(tokens_ptr + i[:, None].to(tl.int64) * token_stride + step, mask=live[:, None] & (step < K1), other=0)
    if ring_ptr is not None:
        entry = arrive(counter_ptr, E)
        generation = tl.load(generations_ptr + i, mask=live, other=0)
    num_tokens, finish = update_rows(
        i, live, query_len, samples, tokens, num_tokens, ok,
        token_ids_ptr, computed_ptr, known_ptr, finished_ptr, limit_ptr, num_accepted_ptr, seat_ptr, stop_ids_ptr, ends_ptr,
        row, length, S, WIDTH, STOPS,
    )  # fmt: skip
    if num_tokens_ptr is not None:
        tl.store(num_tokens_ptr + i, num_tokens, mask=live)
    tl.store(finish_ptr + i, finish, mask=live)
    if ring_ptr is not None:
        record_rows(
            i, live, row, generation, tokens, num_tokens, finish, num_drafted_ptr, ring_ptr, entry, entry_stride, row_stride, K1, WIDTH
        )


@triton.jit(do_not_specialize=_ANY_SIZE)
def record_kernel(
    ring_ptr, counter_ptr, rows_ptr, generations_ptr, num_tokens_ptr, finish_ptr, tokens_ptr, num_drafted_ptr,
    N, token_stride, E, entry_stride, row_stride, K1: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`write_record` of BLOCK rows a program."""
    if PDL:
        gdc_launch_dependents()
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < N
    step = tl.arange(0, WIDTH)[None, :]
    if PDL:
        gdc_wait()
    entry = arrive(counter_ptr, E)
    row = tl.load(rows_ptr + i, mask=live, other=0)
    generation = tl.load(generations_ptr + i, mask=live, other=0)
    num_tokens = tl.load(num_tokens_ptr + i, mask=live, other=0)
    finish = tl.load(finish_ptr + i, mask=live, other=0)
    tokens = tl.load(tokens_ptr + i[:, None].to(tl.int64) * token_stride + step, mask=live[:, None] & (step < K1), other=0)
    record_rows(i, live, row, generation, tokens, num_tokens, finish, num_drafted_ptr, ring_ptr, entry, entry_stride, row_stride, K1, WIDTH)


def finish_step(
    ring: torch.Tensor | None,
    counter: torch.Tensor | None,
    generations: torch.Tensor | None,
    rows: torch.Tensor,
    query_len: torch.Tensor,
    samples: torch.Tensor,
    tokens: torch.Tensor,
    num_tokens: torch.Tensor | None,
    ok: torch.Tensor,
    token_ids: torch.Tensor,
    computed: torch.Tensor,
    known: torch.Tensor,
    finished: torch.Tensor,
    limit: torch.Tensor,
    num_accepted: torch.Tensor,
    stop_seat: torch.Tensor,
    stop_ids: torch.Tensor,
    ends: torch.Tensor | None = None,
    num_drafted: torch.Tensor | None = None,
) -> torch.Tensor:
    """`update_state` and `write_record` in one launch, with their arguments. Returns finish [N] int32.

    num_tokens None: all of a row's tokens, which is what is sampled without drafts. ring None: no record.
    """
    n, k1 = tokens.shape
    stops, width = triton.next_power_of_2(stop_ids.shape[1]), triton.next_power_of_2(k1)
    block = min(max(TILE // (stops * width), 1), MAX_ROWS)
    tokens = _rows_of(tokens)
    finish = torch.empty_like(rows)
    entries, entry_stride, row_stride = (0, 0, 0) if ring is None else (ring.shape[0], ring.stride(0), ring.stride(1))
    finish_kernel[(triton.cdiv(n, block),)](
        rows, query_len, samples, tokens, num_tokens, ok,
        token_ids, computed, known, finished, limit, num_accepted, stop_seat, stop_ids, ends, finish,
        ring, counter, generations, num_drafted,
        n, token_ids.stride(0), stop_ids.shape[1], tokens.stride(0), entries, entry_stride, row_stride,
        k1, width, stops, block, num_warps=min(max(stops * width // TILE, 1), 8), **pdl(rows),
    )  # fmt: skip
    return finish


def update_state(rows: torch.Tensor, *arguments: torch.Tensor | None) -> torch.Tensor:
    """See the reference."""
    return finish_step(None, None, None, rows, *arguments)  # type: ignore[arg-type]


def write_record(
    ring: torch.Tensor,
    counter: torch.Tensor,
    rows: torch.Tensor,
    generations: torch.Tensor,
    num_tokens: torch.Tensor,
    finish: torch.Tensor,
    tokens: torch.Tensor,
    num_drafted: torch.Tensor | None = None,
) -> None:
    """See the reference."""
    n, k1 = tokens.shape
    tokens = _rows_of(tokens)
    record_kernel[(triton.cdiv(n, MAX_ROWS),)](
        ring, counter, rows, generations, num_tokens, finish, tokens, num_drafted,
        n, tokens.stride(0), ring.shape[0], ring.stride(0), ring.stride(1), k1, triton.next_power_of_2(k1), MAX_ROWS, num_warps=1,
        **pdl(rows),
    )  # fmt: skip


def _rows_of(tokens: torch.Tensor) -> torch.Tensor:
    """The same values with the tokens of a row side by side."""
    return tokens if tokens.shape[1] == 1 or tokens.stride(1) == 1 else tokens.contiguous()
