"""Log-probs in Triton: one read of the logits, then a program a line that puts its chunks together.

The first kernel notes of every small group of tokens its peak and the sum of exp(logit - peak), and how many tokens come before the chosen
one. The second adds these up, and finds the likeliest tokens among those groups whose peaks are good enough. Each of the tokens listed then
counts those that come before it, which is its place.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modelrunner.kernels.logprobs.reference import Ranked
from modelrunner.kernels.pdl import pdl
from modelrunner.kernels.sampling.scan import GROUP, INF, peak_of
from modelrunner.kernels.sampling.search import load_chunk, shortlist

GROUPS = 32  # a program looks at
TILE = 32  # bytes: one logit each of the groups looked at at a time
LIST = 1024  # tokens on a line's short list, at most
SQUARE = 64  # tokens of the list compared with as many others at a time
WIDE = 2048
LAST_ID = tl.constexpr(0x7FFFFFFF)


@triton.jit
def key_of(x, ids):
    """See `reference.order_keys`."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    ordered = tl.where(bits >= 0, bits, bits ^ LAST_ID)
    return (ordered.to(tl.int64) << 32) | (ids ^ LAST_ID).to(tl.int64)


@triton.jit
def _survey(
    logits, stride, vocab, rows, wanted, chosen, peaks, sums, before, groups, segments,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (n, s): GROUPS groups of line n. peaks, sums: [n, groups]; before: [n, segments]."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    line = tl.program_id(0).to(tl.int64)
    if tl.load(wanted + tl.load(rows + line)) >= 0:
        logits += line * stride
        token = tl.load(chosen + line).to(tl.int32)
        own = tl.load(logits + token).to(tl.float32)
        first = tl.program_id(1) * GROUPS
        ids = first * GROUP + tl.arange(0, GROUPS * GROUP)
        flat = tl.load(logits + ids, mask=ids < vocab, other=-INF).to(tl.float32)
        earlier = (flat > own) | ((flat == own) & (ids < token))
        tl.store(before + line * segments + tl.program_id(1), tl.sum(earlier.to(tl.int32), 0))
        x = tl.reshape(flat, [GROUPS, GROUP])
        peak = peak_of(x, 1)
        total = tl.sum(tl.exp(x - tl.where(peak == -INF, 0.0, peak)[:, None]), 1)
        group = first + tl.arange(0, GROUPS)
        tl.store(peaks + line * groups + group, peak, mask=group < groups)
        tl.store(sums + line * groups + group, total, mask=group < groups)


@triton.jit
def _place_listed(logits, listed, count, wanted, base, scale, ids_out, values_out, SQUARE: tl.constexpr):
    """The likeliest `wanted` of the `count` tokens whose ids lie at `listed`, to their places in the order."""
    for begin in range(0, count, SQUARE):
        slots = begin + tl.arange(0, SQUARE)
        ids = tl.load(listed + slots, mask=slots < count, other=0)
        x = tl.load(logits + ids).to(tl.float32)
        keys = key_of(x, ids)
        place = tl.zeros([SQUARE], tl.int32)
        for other in range(0, count, SQUARE):
            others = other + tl.arange(0, SQUARE)
            those = tl.load(listed + others, mask=others < count, other=0)
            ahead = key_of(tl.load(logits + those).to(tl.float32), those)[None, :] > keys[:, None]
            place += tl.sum((ahead & (others < count)[None, :]).to(tl.int32), 1)
        fits = (slots < count) & (place < wanted)
        tl.store(ids_out + place, ids, mask=fits)
        tl.store(values_out + place, x - base - scale, mask=fits)


@triton.jit
def _place_one_by_one(logits, vocab, wanted, base, scale, ids_out, values_out, WIDE: tl.constexpr):
    """The same from the whole line, a pass for each: where too many tokens are equal for a list."""
    last = tl.full([], 0x7FFFFFFFFFFFFFFF, tl.int64)
    for place in range(wanted):
        best = tl.full([], -0x8000000000000000, tl.int64)
        for start in range(0, vocab, WIDE):
            ids, x = load_chunk(logits, vocab, start, WIDE)
            keys = key_of(x, ids)
            best = tl.maximum(best, tl.max(tl.where((keys < last) & (ids < vocab), keys, -0x8000000000000000), 0))
        token = (best & LAST_ID).to(tl.int32) ^ LAST_ID
        tl.store(ids_out + place, token)
        tl.store(values_out + place, tl.load(logits + token).to(tl.float32) - base - scale)
        last = best


@triton.jit
def _place_masked(logits, vocab, done, wanted, ids_out, values_out, WIDE: tl.constexpr):
    """After the `done` tokens that can come at all, those that cannot, the lowest ids first."""
    start = 0
    while (done < wanted) & (start < vocab):
        ids, x = load_chunk(logits, vocab, start, WIDE)
        masked = ((x == -INF) & (ids < vocab)).to(tl.int32)
        place = done + tl.cumsum(masked) - 1
        fits = (masked > 0) & (place < wanted)
        tl.store(ids_out + place, ids, mask=fits)
        tl.store(values_out + place, tl.full([WIDE], -INF, tl.float32), mask=fits)
        done += tl.sum(masked, 0)
        start += WIDE


@triton.jit
def _rank(
    logits, stride, vocab, rows, wanted, chosen, peaks, sums, before, groups, segments, scratch, ranks, ids_out, values_out, width,
    GROUP: tl.constexpr, PLACES: tl.constexpr, SEGMENTS: tl.constexpr, TILE: tl.constexpr, LIST: tl.constexpr,
    SQUARE: tl.constexpr, WIDE: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program n: line n. ids_out, values_out: [n, width], WIDTH of them at most. scratch: [n, PLACES + 2 LIST] int32."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    line = tl.program_id(0).to(tl.int64)
    asked = tl.load(wanted + tl.load(rows + line))
    places = tl.arange(0, WIDTH)
    ids_out += line * width
    values_out += line * width
    rest = (places < width) & (places > asked)
    tl.store(ids_out + places, tl.full([WIDTH], -1, tl.int32), mask=rest)
    tl.store(values_out + places, tl.zeros([WIDTH], tl.float32), mask=rest)
    if asked < 0:
        tl.store(ranks + line, 0)
    else:
        logits += line * stride
        part = tl.arange(0, PLACES)
        inside = part < groups
        peak = tl.load(peaks + line * groups + part, mask=inside, other=-INF)
        best = peak_of(peak, 0)
        base = tl.where(best == -INF, 0.0, best)
        total = tl.sum(tl.load(sums + line * groups + part, mask=inside, other=0.0) * tl.exp(peak - base), 0)
        scale = tl.log(tl.where(total == 0.0, 1.0, total))
        token = tl.load(chosen + line).to(tl.int32)
        segment = tl.arange(0, SEGMENTS)
        tl.store(ranks + line, 1 + tl.sum(tl.load(before + line * segments + segment, mask=segment < segments, other=0), 0))
        tl.store(ids_out, token)
        tl.store(values_out, tl.load(logits + token).to(tl.float32) - base - scale)
        if asked > 0:
            own = scratch + line * (PLACES + 2 * LIST)
            count = 0
            if best > -INF:
                count = shortlist(logits, vocab, peaks + line * groups, groups, own, best, asked, GROUP, PLACES, TILE, LIST)
            if count > LIST:
                _place_one_by_one(logits, vocab, asked, base, scale, ids_out + 1, values_out + 1, WIDE)
            else:
                _place_listed(logits, own + PLACES, count, asked, base, scale, ids_out + 1, values_out + 1, SQUARE)
                _place_masked(logits, vocab, count, asked, ids_out + 1, values_out + 1, WIDE)


def token_logprobs(logits: torch.Tensor, chosen: torch.Tensor, rows: torch.Tensor, wanted: torch.Tensor, num_top: int) -> Ranked:
    """See `reference.token_logprobs`: two launches, one read of the logits; lines of rows that want nothing are not read."""
    n, vocab = logits.shape
    if logits.stride(1) != 1 or logits.data_ptr() % 16:  # the kernels are built for memory that begins on such a border
        logits = logits.clone(memory_format=torch.contiguous_format)
    device, width, groups = logits.device, 1 + num_top, triton.cdiv(vocab, GROUP)
    segments, places = triton.cdiv(groups, GROUPS), places_of(groups)
    ranks = torch.empty(n, dtype=torch.int32, device=device)
    ids = torch.empty(n, width, dtype=torch.int32, device=device)
    values = torch.empty(n, width, device=device)
    if n == 0:
        return ranks, ids, values
    peaks, sums = (torch.empty(n, groups, device=device) for _ in range(2))  # each on a border of its own, for any n: one build
    before = torch.empty(n, segments, dtype=torch.int32, device=device)
    scratch = torch.empty(n, places + 2 * LIST, dtype=torch.int32, device=device)
    head = (logits, logits.stride(0), vocab, rows, wanted, chosen, peaks, sums, before, groups, segments)
    _survey[(n, segments)](*head, GROUP, GROUPS, num_warps=4, **pdl(logits))
    constants = (GROUP, places, places_of(segments), TILE // logits.element_size(), LIST, SQUARE, min(WIDE, places_of(vocab)))
    _rank[(n,)](*head, scratch, ranks, ids, values, width, *constants, places_of(width), num_warps=8, **pdl(logits))
    return ranks, ids, values


def places_of(count: int) -> int:
    """A power of two for `count` elements; the interpreter wants more than one."""
    return max(16, int(triton.next_power_of_2(count)))
