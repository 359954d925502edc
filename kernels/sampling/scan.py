"""The one pass over all logits: the peak of every chunk of the vocabulary and, for rows that draw, how far its best noisy token can get.

The draw is a race: with u uniform, -log(u) * exp(distance) is the arrival time of a token, and the earliest wins; its negative logarithm is
noise - distance. The times here come from fast approximations. They serve as bounds alone: `settle.py` looks at the promising chunks
again, with the reference's own rounding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from modelrunner.kernels.sampling.noise import INTERPRETED, random_words, uniform
from modelrunner.kernels.sampling.philox import PURPOSE_SAMPLE
from modelrunner.kernels.sampling.reference import GREEDY_TEMPERATURE

CHUNK = 1024
GREEDY_LIMIT = tl.constexpr(GREEDY_TEMPERATURE)
PURPOSE = tl.constexpr(PURPOSE_SAMPLE)
LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)
INF = tl.constexpr(float("inf"))


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def peak_of(x):
    """The largest of x, or NaN if there is any."""
    if INTERPRETED:  # which takes other reductions than its own one element at a time
        return tl.where(tl.max((x != x).to(tl.int32), 0) > 0, float("nan"), tl.max(x, 0))
    else:
        return tl.reduce(x, 0, _larger)


@triton.jit
def place_of(x, peak, ids):
    """The lowest of `ids` where x holds its peak."""
    holds = x == peak
    if peak != peak:
        holds = x != x
    return tl.min(tl.where(holds, ids, 0x7FFFFFFF), 0)


@triton.jit
def divisor_of(temperature):
    return tl.where(temperature <= GREEDY_LIMIT, 1.0, temperature)


@triton.jit
def _fast_log2(x):
    if INTERPRETED:
        return tl.log2(x)
    else:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _fast_exp2(x):
    if INTERPRETED:
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _times(x, peak, scale, words):
    """Arrival times relative to the peak's distance, to within 1e-5 of themselves; inf for a token that cannot win."""
    u = uniform(words)
    rest = 1.0 - u
    near_one = rest * (1.0 + rest * (0.5 + rest * (1.0 / 3.0 + rest * 0.25)))
    wait = tl.where(rest < 0.0625, near_one, _fast_log2(u) * -LN2)
    return wait * _fast_exp2((peak - x) * scale)


@triton.jit
def _scan(
    logits,
    stride,
    vocab,
    temperature,
    seed,
    position,
    choice,
    peaks,
    times,
    chunks,
    segments,
    CHUNK: tl.constexpr,
    STEPS: tl.constexpr,
    NOISE: tl.constexpr,
):
    """A program takes STEPS chunks of a row. peaks, times: [n, chunks] float32."""
    row, segment = (tl.program_id(0) // segments).to(tl.int64), tl.program_id(0) % segments
    if NOISE:
        heat = tl.load(temperature + row)
        draws = heat > GREEDY_LIMIT
        scale = LOG2E / divisor_of(heat)
        key, where, which = tl.load(seed + row), tl.load(position + row).to(tl.int64), tl.load(choice + row).to(tl.int64)
    for step in range(STEPS):
        chunk = segment * STEPS + step
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(logits + row * stride + ids, mask=ids < vocab, other=-INF).to(tl.float32)
        peak = peak_of(x)
        tl.store(peaks + row * chunks + chunk, peak, mask=chunk < chunks)
        if NOISE:  # noqa: SIM102 (a constant, then a value)
            if draws:
                words = random_words(key, where, which, PURPOSE, chunk * CHUNK, CHUNK)
                earliest = tl.min(_times(x, tl.where(peak == -INF, 0.0, peak), scale, words), 0)
                tl.store(times + row * chunks + chunk, earliest, mask=chunk < chunks)


def steps_of(n: int, chunks: int) -> int:
    """Chunks a program takes: few while programs are few, more when there are many."""
    steps = 1
    while steps < 8 and n * chunks >= 8192 * steps:
        steps *= 2
    return steps


def scan(
    logits: torch.Tensor, columns: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Peaks and, if `columns` (temperature, seed, position, choice) are given, arrival times: two of [n, chunks] float32."""
    n, vocab = logits.shape
    chunks = triton.cdiv(vocab, CHUNK)
    found = torch.empty(2, n, chunks, device=logits.device)
    peaks, times = found[0], found[1]
    steps = steps_of(n, chunks)
    segments = triton.cdiv(chunks, steps)
    _scan[(n * segments,)](
        logits, logits.stride(0), vocab, *(columns or (None,) * 4), peaks, times, chunks, segments, CHUNK, steps, columns is not None
    )
    return peaks, times
