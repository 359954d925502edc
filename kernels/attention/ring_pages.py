"""The pages of a program's piece of the decode rows (`deal.py`), on their way into the ring of `ring.py`."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

_copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # of newer Triton, and of 3.6

KEYS = gl.constexpr(64)  # of a buffer
HALF = gl.constexpr(64)  # of a head's values, which a copy brings


@gluon.jit
def piece_of(pieces_ptr):
    """First unit and page of the program's piece, unit and page where it ends, whether that unit has pages of the piece, units in all."""
    piece = pieces_ptr + gl.program_id(0) * 16
    unit = gl.load(piece)
    page = gl.load(piece + 1)
    end_unit = gl.load(piece + 4)
    end_page = gl.load(piece + 5)
    cut = (end_page > gl.where(unit == end_unit, page, 0)).to(gl.int32)
    return unit, page, end_unit, end_page, cut, end_unit - unit + cut


@gluon.jit
def nth_unit(n, piece, N):
    """The piece's n-th unit: the one that ends elsewhere comes first, so that its other parts need not be waited for in the end.

    Returns unit, row, first page, and whether it ends elsewhere.
    """
    last = (n == 0) & (piece[4] == 1)
    this = gl.where(last, piece[2], piece[0] + n - piece[4])
    return this, this % N, gl.where(this == piece[0], piece[1], 0), last


@gluon.jit
def _places(numbers, block, end, page_rows, PAGE: gl.constexpr):
    """Rows of the cache where a block's pages begin, by their numbers; past the end such as bring zeros."""
    places = ()  # the compiler takes no unpacking
    for i in gl.static_range(KEYS // PAGE):
        places = places + (gl.where(block + i < end, numbers[i] * page_rows, -PAGE),)  # type: ignore[assignment]  # noqa: RUF005
    return places


@gluon.jit
def _numbers(table, block, end, PAGE: gl.constexpr):
    """Of a block's pages, as far as there are."""
    numbers = ()
    for i in gl.static_range(KEYS // PAGE):
        numbers = numbers + (gl.load(table + block + i, mask=block + i < end, other=0),)  # type: ignore[assignment]  # noqa: RUF005
    return numbers


@gluon.jit
def ask_for_pages(
    desc, ring, full, free, pieces_ptr, query_len_ptr, seq_len_ptr, table_ptr, table_row, columns, page_rows, N,
    PART: gl.constexpr, PARTS: gl.constexpr, NUM_KV: gl.constexpr, PAGE: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """One warp: a part of the piece's pages (of halves of keys and of values) into ring [slots * 4 * KEYS / PAGE, PAGE, HALF]."""
    AT_ONCE: gl.constexpr = KEYS // PAGE
    SLOTS: gl.constexpr = ring.shape[0] // (4 * AT_ONCE)
    piece = piece_of(pieces_ptr)
    _, row, first, last = nth_unit(0, piece, N)
    this = gl.where(last, piece[2], piece[0])
    keys = gl.load(pieces_ptr + gl.program_id(0) * 16 + 8)
    numbers = _numbers(pieces_ptr + gl.program_id(0) * 16 + 9, 0, AT_ONCE, PAGE)
    turn = 0
    for n in range(piece[5]):
        end = (keys + PAGE - 1) // PAGE
        end = gl.where(last, gl.minimum(piece[3], end), end)
        places = _places(numbers, first, end, page_rows, PAGE)
        begin = first
        column = this // N * D
        table = table_ptr + row.to(gl.int64) * table_row
        # What the next unit begins with is looked up meanwhile.
        this, row, first, last = nth_unit(gl.minimum(n + 1, piece[5] - 1), piece, N)
        keys = gl.load(seq_len_ptr + row) - gl.load(query_len_ptr + row)
        numbers = _numbers(table_ptr + row.to(gl.int64) * table_row, first, columns, PAGE)
        for block in range(begin, gl.maximum(end, begin + 1), AT_ONCE):
            slot = turn % SLOTS
            following = _numbers(table, block + AT_ONCE, end, PAGE)
            mbarrier.wait(free.index(slot), (turn // SLOTS + 1) & 1)
            mbarrier.expect(full.index(slot), 4 // PARTS * KEYS * HALF * 2)
            for i in gl.static_range(AT_ONCE):
                for half in gl.static_range(PART * (4 // PARTS), (PART + 1) * (4 // PARTS)):
                    to = ring.index((slot * 4 + half) * AT_ONCE + i)
                    _copy(desc, [places[i], column + half // 2 * (NUM_KV * D) + half % 2 * HALF], full.index(slot), to)
            places = _places(following, block + AT_ONCE, end, page_rows, PAGE)
            turn += 1
