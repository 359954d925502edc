"""Which kernel multiplies how many rows, and with which tiles: a pure function of shapes and types."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

GEMV_ROWS = 2  # beyond, tensor cores
TILE_ROWS = 128  # beyond, the vendor's library
MANY_ROWS = range(129, 257)  # but for products of so many weights, where the device copies tiles by itself,
MANY = range(2**21, 2**23)
ADDED_ROWS = 256  # and for one of few weights that is added to a residual,
SMALL = 2**22
PROGRAMS = 128  # that keep the GPU busy
LARGE = 2**24  # weights from which on the vendor's library reads them as fast, but for tall products of few outputs
HELD = 2**17  # bytes of weights that a program holds in shared memory
STREAMS = 90  # programs that keep memory busy, each with a full pipeline,
PROCESSORS = 132  # and as many as there may be of them
PIPELINE = 224_000  # bytes of shared memory for it
RING = 230_000  # the same for rings,
REQUESTS = 3  # tiles of weights that a ring asks for at a time
KEPT_ROWS = range(33, 129)  # whose streams' parts stay in the L2 cache, as those of rings do, but not of wide ones
RING_ROWS = range(2, 33)  # which pay for so many rows;
LATE_ROWS = 16  # with fewer, they and streams start once the norm of their input does;
WIDE_ROWS = range(33, 129)  # for so many, wide ones of gate and up,
WIDE_MANY = range(241, 257)  # also where they have most of their rows,
WIDE_FEW = 64  # and up to so many, of other products
WIDE_WEIGHTS = 3 * 2**23  # of so many weights
HEAD = 2**16  # outputs of a product that is the model's head


@dataclass(frozen=True)
class Gemv:
    """Tiles of `gemv_kernel`: bn outputs a program, K in steps of bk."""

    bn: int
    bk: int
    warps: int


@dataclass(frozen=True)
class Several:
    """Tiles of `several_kernel`: `times` times 256 / c outputs a program, c values of K at a time for each of `warps`."""

    times: int
    c: int
    warps: int


@dataclass(frozen=True)
class Tiles:
    """Tiles of `tile_kernel`: bn outputs and bt rows a program, K in steps of bk and in `split` parts for as many programs.

    stages: of the pipeline that brings weights and x; 1: all weights of a program are in shared memory before its input is there.
    fused_norm: False gives the norm a launch of its own. warm: with more stages, weights are fetched into the L2 cache while waiting for
    the input.
    """

    bt: int
    bn: int
    bk: int
    split: int
    warps: int
    stages: int
    fused_norm: bool = True
    warm: bool = True

    def pipelined(self) -> Tiles:
        """For a device on which no kernel starts before its input is there, so that there is no time in which to load all weights."""
        return replace(self, bk=min(self.bk, 128 if self.bt <= 32 else 64), stages=3) if self.stages == 1 else self


@dataclass(frozen=True)
class Stream:
    """Tiles of `stream_kernel`: as in `Tiles`.

    ahead: columns of a program's weights that are fetched into the L2 cache while it waits. early: 0, or steps of K in a turn of the loop,
    1 or 2; x then goes through registers, a turn ahead, and the pipeline holds nothing but weights and is full before the input is there.
    keep: parts stay in the L2 cache.
    """

    bt: int
    bn: int
    bk: int
    split: int
    warps: int
    stages: int
    ahead: int = 0
    early: int = 0
    keep: bool = False

    def late(self, gated: bool) -> Stream:
        """For a device other than Hopper, on which early ones were not measured (and Triton 3.6 does not compile all of them)."""
        if not self.early:
            return self
        room = PIPELINE // (2 * self.bk * (self.bn * (2 if gated else 1) + self.bt))
        return replace(self, stages=min(8, max(2, room)), ahead=max(256, self.bk), early=0)


@dataclass(frozen=True)
class Ring:
    """Tiles of `ring_kernel`: as in `Tiles`; `warps` multiply, two more ask for weights and input.

    w_slots, x_slots: tiles of weights (with gate and up, pairs) and of x that shared memory has room for. registers: of a thread, when a
    program starts. requests: tiles of weights that are on their way at a time.
    """

    bt: int
    bn: int
    bk: int
    split: int
    warps: int
    w_slots: int
    x_slots: int
    registers: int
    requests: int = REQUESTS


@dataclass(frozen=True)
class Wide:
    """Tiles of `wide_kernel`: `tiles` times bt rows and `groups` times 64 rows of weights a program, K in steps of bk and in `split` parts.

    slots: steps' weights and input that shared memory has room for. registers: of a thread, when a program starts.
    """

    bt: int
    tiles: int
    groups: int
    bk: int
    split: int
    slots: int
    registers: int

    def outputs(self, gated: bool) -> int:
        """Of a program."""
        return self.groups * (32 if gated else 64)

    @property
    def later(self) -> int:
        """Registers of a thread of a group, once the four warps two of which ask gave most of theirs away."""
        return (self.registers * (self.groups + 1) - 24) // (8 * self.groups) * 8


AnyTiles = Gemv | Several | Tiles | Stream | Ring | Wide


@cache
def plan(
    rows: int, outputs: int, inner: int, bits: int, gated: bool, norm: bool, half: bool, streams: bool = True, rings: bool = False
) -> AnyTiles | None:
    """None: the vendor's library, with norm and activation in launches of their own.

    outputs: of the product (of gate and up each, if gated). bits: of x's type. half: x is float16, whose range is too small for
    x * norm weight without 1 / rms. streams: weights are of x's type, and the device copies tiles by itself (compute capability 9.0 on).
    rings: besides, it is Hopper, and Triton has a Gluon that `ring_kernel` is written for.
    """
    if inner % 16 or outputs < 16:
        return None
    weights = outputs * inner * (2 if gated else 1)
    large = bits == 16 and streams and weights >= LARGE and (outputs < HEAD or inner > 2048)
    if rows == 1 or (rows <= GEMV_ROWS and not large):
        return _several(outputs, inner, gated) if rows > 1 and bits == 16 and weights < LARGE else _gemv(rows, outputs, inner, gated)
    if bits != 16:
        return None
    if rows > TILE_ROWS:
        if rings and gated and rows in WIDE_MANY and weights >= LARGE:
            return _wide(rows, outputs, inner, gated)
        return _many(rows, outputs, inner, gated) if streams and rows in MANY_ROWS and weights in MANY else None
    if weights >= LARGE:
        if streams and outputs < HEAD:
            tiles: AnyTiles | None = None
            if rings and rows in RING_ROWS:
                tiles = _ring(rows, outputs, inner, gated)
            elif rings and rows in WIDE_ROWS:
                tiles = _wide(rows, outputs, inner, gated)
            return tiles or replace(_stream(rows, outputs, inner, gated), keep=rows in KEPT_ROWS)
        return None if norm else _large(rows, outputs, inner, streams)
    if streams and norm and not gated and 32 < rows <= 64 and 60 <= outputs // 64 <= PROCESSORS and inner % 128 == 0:
        return Stream(64, 64, 128, 1, 4, 6, 256)
    if norm and rows > 64:
        return None
    return _small(rows, outputs, inner, gated, norm, not (norm and half))


def _gemv(rows: int, outputs: int, inner: int, gated: bool) -> Gemv | None:
    if rows == 1 and 768 < inner <= 1024 and 2048 <= outputs < HEAD:
        return Gemv(8, 1024, 4)  # few registers beside the weights: the next product's fit in, too
    if rows == 1 and not gated and 1024 < inner <= 2048 and outputs <= 2048:
        return Gemv(1, 256, 1)
    if gated:
        if inner <= 1024:
            return Gemv(2, 256, 1) if rows == 1 else Gemv(4, 512, 2)
        bn = 2
    elif rows > 1 and inner <= 4096:
        return Gemv(4, 256, 1) if inner <= 1024 else Gemv(2, 512, 2)
    else:
        bn = 4
    if inner <= 768:
        return Gemv(bn, 256, 1)
    if inner <= 4096:
        return Gemv(bn, 1024, 4)
    return Gemv(max(1, bn // 2), 2048, 8) if inner <= 16384 else None


def _several(outputs: int, inner: int, gated: bool) -> Gemv | Several | None:
    """Two rows of few weights."""
    if gated and inner <= 2048:
        return Several(1, 64, 2)
    if not gated and outputs <= 2048 and 1024 < inner <= 4096:
        return Several(2, 128, 4) if inner <= 2048 else Several(2, 256, 2)
    return _gemv(2, outputs, inner, gated)


def _stream(rows: int, outputs: int, inner: int, gated: bool, least: int = STREAMS) -> Stream:
    """More weights than the multiprocessors hold at once, of a layer: all programs run together, with what pipelines fit in shared memory.

    The longer the pieces of a row of weights that are read at a time, the faster is memory. least: programs that there are to be.
    """
    bt, pair = _rows_of_tile(rows, TILE_ROWS), 2 if gated else 1
    if bt == 64 and gated and STREAMS <= outputs // 128 <= PROCESSORS and inner % 128 == 0:
        return Stream(bt, 128, 128, 1, 8, 3, early=1)
    bk = max(64, 256 // pair // (1 if bt <= (32 if gated else 64) else 2))
    programs = outputs // 64 * -(-rows // bt)
    split = next((n for n in (1, 2, 3, 4, 6, 8) if programs * n >= least and inner % (n * bk) == 0), 8)
    # Too many programs of many rows for one a multiprocessor: two.
    room = PIPELINE // 2 if programs * split > PROCESSORS and bt > 32 else PIPELINE
    while bk > 64 and room < 3 * 2 * bk * (64 * pair + bt):
        bk //= 2
    return Stream(bt, 64, bk, split, 4, max(2, min(8, room // (2 * bk * (64 * pair + bt)))), 256)


def _ring(rows: int, outputs: int, inner: int, gated: bool) -> Ring | None:
    """For weights as in `_stream`, where it is the faster: gate and up in tall tiles, and products in parts of K.

    Its buffers fill shared memory.
    """
    bt = _rows_of_tile(rows)
    if gated:
        bn, bk, split = 128, 128, 1
    else:
        bn, bk = 64, 256
        split = next((n for n in (1, 2, 3, 4, 6, 8) if outputs // bn * n >= STREAMS), 1)
    if outputs % bn or inner % (bk * split) or not STREAMS <= outputs // bn * split <= PROCESSORS or (split == 1) != gated:
        return None
    weights, x = 2 * bk * bn * (2 if gated else 1), 2 * bk * bt
    x_slots = min(4, RING // (weights + x))
    return Ring(bt, bn, bk, split, 4, (RING - x_slots * x) // weights, x_slots, 104 if gated else 64)


def _wide(rows: int, outputs: int, inner: int, gated: bool) -> Wide | None:
    """For weights as in `_stream`, where it is the faster: all programs run at once.

    Gate and up are in tiles so tall that programs of a stream, with tiles half as tall, would take two waves.
    """
    if gated and rows <= WIDE_FEW:
        tiles = Wide(64, 1, 3, 128, 1, 3, 72)
    elif gated:
        tiles = Wide(128, 1, 3, 64, 1, 5, 96) if rows <= TILE_ROWS else Wide(128, 2, 3, 64, 1, 4, 128)
    elif rows <= WIDE_FEW and outputs * inner >= WIDE_WEIGHTS:
        tiles = Wide(64, 1, 1, 128, next((n for n in (1, 2, 3, 4) if outputs // 64 * n >= STREAMS), 1), 6, 72)
    else:
        return None
    programs = -(-outputs // tiles.outputs(gated)) * tiles.split
    fits = outputs % 8 == 0 and inner % (tiles.bk * tiles.split) == 0
    return tiles if fits and STREAMS <= programs <= PROCESSORS else None


def _many(rows: int, outputs: int, inner: int, gated: bool) -> Stream | None:
    """More rows than a tile has, and few weights."""
    tiles = _stream(rows, outputs, inner, gated, STREAMS if gated else 120)
    return tiles if inner % (tiles.bk * tiles.split) == 0 and tiles.stages >= 3 else None


def _large(rows: int, outputs: int, inner: int, streams: bool) -> Tiles | Stream | None:
    """More weights than the multiprocessors hold at once."""
    bt = _rows_of_tile(rows)
    if outputs >= HEAD and streams and 32 < rows <= 64:
        return Stream(bt, 64, 128, 1, 4, 3) if inner <= 2048 else Stream(bt, 128, 128, 1, 8, 4)
    if rows > 32:
        return None
    if outputs >= HEAD:
        if rows > 8 and inner <= 2048:
            return Tiles(bt, 64, 128, 1, 4, 4, warm=False)
        return Stream(bt, 64, 128, 1, 4, PIPELINE // 2 // (256 * (64 + bt))) if streams else None
    return Tiles(bt, 64, 128, 8, 4, 3, warm=False) if inner <= 4096 else Tiles(bt, 64, 128, 2, 4, 4, warm=False)


def _small(rows: int, outputs: int, inner: int, gated: bool, norm: bool, fused_norm: bool) -> Tiles:
    """One layer's weights, which lie in shared memory by the time the input is there (stages 1), or are on their way."""
    bt = _rows_of_tile(rows)
    if rows <= 16:
        if norm:
            bn, bk, warps, split = 64 if gated else 128, 128, 4 if gated else 8, _split(inner, 4)
        elif inner <= 2048:
            bn, bk, warps, split = 64, 256, 4, _split(inner, 4)
        else:
            bn, bk, warps, split = 64, 128, 4, max(1, min(16, inner // 256))
    elif rows <= 32:
        split = _split(inner, max(1, PROGRAMS * 64 // outputs))
        bn, bk, warps = 64, 128 if inner % (256 * split) else 256, 4
    elif rows > 64:
        return Tiles(bt, 64, 64, _split(inner, 4), 4, 6, warm=False)
    elif norm:
        bt, bn, bk, warps, split = (64, 64, 256, 4, _split(inner, 2)) if gated else (32, 128, 128, 8, _split(inner, 2))
    elif inner <= 2048:
        bt, bn, bk, warps, split = 32, 64, 256, 4, _split(inner, 4)
    else:
        bn, bk, warps, split = 128, 128, 8, _split(inner, 8)
    if 2 * bn * (2 if gated else 1) * -(-inner // (bk * split)) * bk <= HELD:
        return Tiles(bt, bn, bk, split, warps, 1, fused_norm)
    return Tiles(bt, 64, 128, split, 4, 3, fused_norm)


def _rows_of_tile(rows: int, most: int = 64) -> int:
    return min(most, max(16, 1 << (rows - 1).bit_length()))


def _split(inner: int, most: int) -> int:
    """Programs that share K, a power of two, each with at least one step of it."""
    split = 1
    while 2 * split <= most and inner >= 256 * split:
        split *= 2
    return split


@cache
def added(rows: int, outputs: int, inner: int, bits: int) -> Tiles | None:
    """Instead of the vendor's library, which first copies the residual, for a product of more than TILE_ROWS rows that is added to one."""
    if not TILE_ROWS < rows <= ADDED_ROWS or bits != 16 or inner % 64 or outputs * inner > SMALL:
        return None
    if rows > 192 and inner > 2048:
        return Tiles(128, 64, 128, 4, 4, 3, warm=False)
    return Tiles(64, 64, 64, 1 if rows > 192 else 2, 4, 6, warm=False)
