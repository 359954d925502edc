"""The one pass over all logits: of every group of tokens the peak and, for rows that draw from all tokens, the mass."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modelrunner.kernels.pdl import pdl
from modelrunner.kernels.sampling import reference
from modelrunner.kernels.sampling.noise import INTERPRETED

GROUP = reference.GROUP
TILE = 16  # groups at a time
SHORT_K = tl.constexpr(reference.SHORT_K)
GREEDY_LIMIT = tl.constexpr(reference.GREEDY_TEMPERATURE)
LOG2_UNIT = tl.constexpr(math.log2(reference.GROUP_UNIT))
LOG2E = tl.constexpr(math.log2(math.e))
WHOLE = tl.constexpr(2.0**23)  # added to a smaller number, it leaves the nearest integer in the lower bits
WHOLE_BITS = tl.constexpr(0x4B000000)
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
    """Whether a row's top-k is small enough for a list of candidates; such a row needs no masses."""
    return (k > 0) & (k <= SHORT_K)


@triton.jit
def draw_key(row, line, seed, position, more, choice):
    """What the row's noise depends on: seed, position and choice, int64. row: in the batch; line: in the columns."""
    where = tl.load(position + row).to(tl.int64)
    if more is not None:
        where += tl.load(more + row).to(tl.int64)
    return tl.load(seed + line), where, tl.load(choice + line).to(tl.int64)


@triton.jit
def fast_exp2(x):
    if INTERPRETED:
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def masses_of(x, peak, scale):
    """The mass of each group, in GROUP_UNIT of its best token's, [TILE] int32. x: [TILE, GROUP]; peak: [TILE]."""
    base = tl.where(peak == -INF, 0.0, peak)[:, None]
    whole = fast_exp2((x - base) * scale + LOG2_UNIT) + WHOLE
    return tl.sum(whole.to(tl.int32, bitcast=True) - WHOLE_BITS, 1)


@triton.jit(do_not_specialize=["segments", "steps"])
def _scan(
    logits,
    stride,
    vocab,
    rows,
    temperature,
    top_k,
    peaks,
    masses,
    groups,
    segments,
    steps,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program takes `steps` times TILE groups of a row. peaks: [n, groups] float32; masses: [n, groups] int32, None if all are greedy."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, segment = (tl.program_id(0) // segments).to(tl.int64), tl.program_id(0) % segments
    if masses is not None:
        line = row if rows is None else tl.load(rows + row).to(tl.int64)
        heat = tl.load(temperature + line)
        weighs = heat > GREEDY_LIMIT
        if top_k is not None:
            weighs = weighs & (is_short(tl.load(top_k + line)) == 0)
        scale = LOG2E / heat
    for step in range(steps):
        first = (segment * steps + step) * TILE
        group = first + tl.arange(0, TILE)
        ids = first * GROUP + tl.arange(0, TILE * GROUP)
        flat = tl.load(logits + row * stride + ids, mask=ids < vocab, other=-INF)
        x = tl.reshape(flat, [TILE, GROUP]).to(tl.float32)
        peak = peak_of(x, 1)
        tl.store(peaks + row * groups + group, peak, mask=group < groups)
        if masses is not None:  # noqa: SIM102  (the compiler must not see the rest)
            if weighs:
                tl.store(masses + row * groups + group, masses_of(x, peak, scale), mask=group < groups)


def scan_steps(n: int, groups: int) -> int:
    """How often a program takes a tile: once while programs are few. No constant of the kernel: all numbers of rows need one build."""
    return 1 if n * groups < 1 << 14 else 2


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
    def filtered(self) -> bool:
        return any(column is not None for column in (self.top_k, self.top_p, self.min_p))

    @property
    def draw(self) -> tuple[torch.Tensor | None, ...]:
        """Arguments of `draw_key`."""
        return self.seed, self.position, self.more, self.choice


@dataclass(frozen=True)
class Scan:
    """Of groups, [n, groups]: peaks float32, and masses int32 in GROUP_UNIT of the peak's, None if all rows are greedy."""

    peaks: torch.Tensor
    masses: torch.Tensor | None


def scan(logits: torch.Tensor, columns: Columns | None) -> Scan:
    """logits: [n, V], rows contiguous. columns: None if all rows are greedy. Masses of rows that need none are undefined."""
    n, vocab = logits.shape
    groups = triton.cdiv(vocab, GROUP)
    peaks, masses = torch.empty(n, groups, device=logits.device), None
    inputs: tuple[torch.Tensor | None, ...] = (None,) * 3
    if columns is not None:
        masses = torch.empty(n, groups, dtype=torch.int32, device=logits.device)
        inputs = columns.rows, columns.temperature, columns.top_k
    steps = scan_steps(n, groups)
    segments = triton.cdiv(groups, TILE * steps)
    found = (peaks, masses, groups, segments, steps)
    _scan[(n * segments,)](logits, logits.stride(0), vocab, *inputs, *found, GROUP, TILE, num_warps=4, **pdl(logits))
    return Scan(peaks, masses)
