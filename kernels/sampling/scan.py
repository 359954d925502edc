"""The one pass over all logits: the peak of every chunk of the vocabulary and, for rows that draw, how far its best noisy token can get.

The draw is a race: with u uniform, -log(u) * exp(distance) is the arrival time of a token, and the earliest wins; its negative logarithm is
noise - distance. The times here are lower bounds, exact where a token comes early: `settle.py` looks at the promising chunks again, with
the reference's own rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modelrunner.kernels.pdl import pdl
from modelrunner.kernels.sampling import philox
from modelrunner.kernels.sampling.noise import INTERPRETED, UNIFORM_BITS, random_words
from modelrunner.kernels.sampling.reference import GREEDY_TEMPERATURE

CHUNK = 1024
GROUP = 128
SHORT_K = tl.constexpr(512)
GREEDY_LIMIT = tl.constexpr(GREEDY_TEMPERATURE)
PURPOSE = tl.constexpr(philox.PURPOSE_SAMPLE)
UNIFORM_MAX = tl.constexpr(philox.UNIFORM_MAX)
LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)
INF = tl.constexpr(float("inf"))


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def peak_of(x, AXIS: tl.constexpr):
    """The largest of x along an axis, or NaN if there is any."""
    if INTERPRETED:  # which takes other reductions than its own one element at a time
        return tl.where(tl.max((x != x).to(tl.int32), AXIS) > 0, float("nan"), tl.max(x, AXIS))
    else:
        return tl.reduce(x, AXIS, _larger)


@triton.jit
def place_of(x, peak, ids):
    """The lowest of `ids` where x holds its peak."""
    holds = x == peak
    if peak != peak:
        holds = x != x
    return tl.min(tl.where(holds, ids, 0x7FFFFFFF), 0)


@triton.jit
def is_short(k):
    """Whether a row's top-k is small enough for a list of candidates; such a row needs no race."""
    return (k > 0) & (k <= SHORT_K)


@triton.jit
def draw_key(row, line, seed, position, more, choice):
    """What the row's noise depends on: seed, position and choice, int64. row: in the batch; line: in the columns."""
    where = tl.load(position + row).to(tl.int64)
    if more is not None:
        where += tl.load(more + row).to(tl.int64)
    return tl.load(seed + line), where, tl.load(choice + line).to(tl.int64)


@triton.jit
def _fast_exp2(x):
    if INTERPRETED:
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _times(x, peak, scale, words):
    """What arrival times are at least, but for 1e-5 of themselves, relative to the peak's distance; inf for a token that cannot win.

    With r = 1 - u, -log(u) is r + r^2 / 2 + r^3 / 3 + ...: few terms do, as early arrivals have small r.
    """
    rest = ((words >> (32 - UNIFORM_BITS)) ^ 0x3FFFFFFF).to(tl.float32, bitcast=True) - UNIFORM_MAX
    return rest * (1.0 + rest * (0.5 + rest * (1.0 / 3.0))) * _fast_exp2((peak - x) * scale)


@triton.jit(do_not_specialize=["segments", "steps"])
def _scan(
    logits,
    stride,
    vocab,
    rows,
    temperature,
    top_k,
    seed,
    position,
    more,
    choice,
    peaks,
    times,
    group_peaks,
    chunks,
    segments,
    steps,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    NOISE: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program takes `steps` times TILE chunks of a row.

    peaks, times: [n, chunks]; group_peaks: [n, chunks * CHUNK / GROUP], only with top_k.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, segment = (tl.program_id(0) // segments).to(tl.int64), tl.program_id(0) % segments
    if NOISE:
        line = row if rows is None else tl.load(rows + row).to(tl.int64)
        heat = tl.load(temperature + line)
        races = heat > GREEDY_LIMIT
        if top_k is not None:
            races = races & (is_short(tl.load(top_k + line)) == 0)
        scale = LOG2E / heat
        key, where, which = draw_key(row, line, seed, position, more, choice)
    for step in range(steps):
        first = (segment * steps + step) * TILE
        chunk = first + tl.arange(0, TILE)
        ids = first * CHUNK + tl.arange(0, TILE * CHUNK)
        flat = tl.load(logits + row * stride + ids, mask=ids < vocab, other=-INF)
        x = tl.reshape(flat, [TILE, CHUNK]).to(tl.float32)
        peak = peak_of(x, 1)
        tl.store(peaks + row * chunks + chunk, peak, mask=chunk < chunks)
        if NOISE:
            if top_k is not None:
                group = first * (CHUNK // GROUP) + tl.arange(0, TILE * CHUNK // GROUP)
                groups = chunks * (CHUNK // GROUP)
                most = tl.max(tl.reshape(flat, [TILE * CHUNK // GROUP, GROUP]), 1).to(tl.float32)
                tl.store(group_peaks + row * groups + group, most, mask=group < groups)
            if races:
                words = tl.reshape(random_words(key, where, which, PURPOSE, first * CHUNK, TILE * CHUNK), [TILE, CHUNK])
                earliest = tl.min(_times(x, tl.where(peak == -INF, 0.0, peak)[:, None], scale, words), 1)
                tl.store(times + row * chunks + chunk, earliest, mask=chunk < chunks)


def scan_shape(n: int, chunks: int) -> tuple[int, int, int]:
    """Chunks at a time, how often, and warps: little for a program while programs are few.

    How often is no constant of the kernel, so that all numbers of rows need but two builds of it.
    """
    tile = 1 if n * chunks < 4096 else 2
    steps = 1
    while steps < 8 and n * chunks >= 8192 * steps * tile:
        steps *= 2
    return tile, steps, 4


@dataclass(frozen=True)
class Columns:
    """What rows draw by. rows: [n] int32, where their values lie in the columns; None: columns are [n] themselves.

    temperature, top_p, min_p: float32; top_k, choice: int32; seed: int64. position: [n] integers, `more` (or None) is added to it.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor | None
    top_p: torch.Tensor | None
    min_p: torch.Tensor | None
    seed: torch.Tensor
    choice: torch.Tensor
    position: torch.Tensor
    more: torch.Tensor | None = None
    rows: torch.Tensor | None = None

    @property
    def draw(self) -> tuple[torch.Tensor | None, ...]:
        """Arguments of `draw_key`."""
        return self.seed, self.position, self.more, self.choice


@dataclass(frozen=True)
class Scan:
    """Peaks and arrival times, [n, chunks] float32, and the peaks of groups, [n, chunks * CHUNK / GROUP], None without top-k."""

    peaks: torch.Tensor
    times: torch.Tensor
    group_peaks: torch.Tensor | None


def scan(logits: torch.Tensor, columns: Columns | None) -> Scan:
    """logits: [n, V], rows contiguous. columns: None if all rows are greedy, then arrival times are undefined."""
    n, vocab = logits.shape
    chunks = triton.cdiv(vocab, CHUNK)
    found = [torch.empty(n, chunks, device=logits.device) for _ in range(2)]  # each on a border of its own, for any n: one build
    groups, inputs = None, (None,) * 7
    if columns is not None:
        inputs = (columns.rows, columns.temperature, columns.top_k, *columns.draw)  # type: ignore[assignment]
        if columns.top_k is not None:
            groups = torch.empty(n, chunks * (CHUNK // GROUP), device=logits.device)
    out = Scan(found[0], found[1], groups)
    _launch(logits, inputs, out, scan_shape(n, chunks))
    return out


def _launch(logits: torch.Tensor, inputs: Sequence[torch.Tensor | None], out: Scan, shape: tuple[int, int, int]) -> None:
    """inputs: rows, temperature, top_k and what noise depends on."""
    (n, chunks), (tile, steps, warps) = out.peaks.shape, shape
    segments = triton.cdiv(chunks, tile * steps)
    found = (out.peaks, out.times, out.group_peaks, chunks, segments, steps)
    constants = (CHUNK, GROUP, tile, inputs[1] is not None)
    _scan[(n * segments,)](logits, logits.stride(0), logits.shape[1], *inputs, *found, *constants, num_warps=warps, **pdl(logits))
