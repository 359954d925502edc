"""What tokens are drawn from, in Triton: one read of the logits for the peaks of small groups of tokens, a program a row that finds where
its filters cut, and one read that lays the cut on. A large top-k, and top-p without a small top-k, read their row again 31 times, out of
the L2 cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modelrunner.kernels.logprobs.ranked import GROUPS, LIST, TILE, places_of
from modelrunner.kernels.pdl import pdl
from modelrunner.kernels.sampling.noise import exact_log
from modelrunner.kernels.sampling.scan import GREEDY_LIMIT, GROUP, INF, is_short, peak_of
from modelrunner.kernels.sampling.search import (
    FEW,
    OTHERS,
    cut_of_list,
    distance_of,
    kth_of_row,
    measure_listed,
    nucleus_of_row,
    shortlist,
)

WIDE = 4096
BLOCK = 4096  # tokens a program


@triton.jit
def _group_peaks(logits, stride, vocab, peaks, groups, GROUP: tl.constexpr, GROUPS: tl.constexpr, PDL: tl.constexpr):
    """Program (n, s): the peaks of GROUPS groups of row n. peaks: [n, groups]."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * GROUPS
    ids = first * GROUP + tl.arange(0, GROUPS * GROUP)
    x = tl.load(logits + row * stride + ids, mask=ids < vocab, other=-INF).to(tl.float32)
    group = first + tl.arange(0, GROUPS)
    tl.store(peaks + row * groups + group, peak_of(tl.reshape(x, [GROUPS, GROUP]), 1), mask=group < groups)


@triton.jit
def _cut(
    logits, stride, vocab, temperature, top_k, top_p, min_p, peaks, groups, scratch, cuts,
    GROUP: tl.constexpr, PLACES: tl.constexpr, TILE: tl.constexpr, LIST: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program n: the largest distance that the filters of row n keep, and its best logit. cuts: [n, 2]; scratch: [n, PLACES + 2 LIST]."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    part = tl.arange(0, PLACES)
    best = peak_of(tl.load(peaks + row * groups + part, mask=part < groups, other=-INF), 0)
    heat = tl.load(temperature + row)
    cut = INF
    if (heat > GREEDY_LIMIT) & (tl.abs(best) < INF):
        if min_p is not None:
            cut = tl.maximum(-exact_log(tl.load(min_p + row)), 0.0)
        p = 1.0
        if top_p is not None:
            p = tl.load(top_p + row)
        listed = 0  # tokens in a list that settles the row
        if top_k is not None:
            k = tl.load(top_k + row)
            if is_short(k):
                own = scratch + row * (PLACES + 2 * LIST)
                count = shortlist(logits, vocab, peaks + row * groups, groups, own, best, k, GROUP, PLACES, TILE, LIST)
                if count <= LIST:
                    listed = count
                    measure_listed(logits, own + PLACES, count, best, heat, LIST)
                    cut = cut_of_list(own + PLACES, count, cut, k, p, LIST, FEW, OTHERS)
            if (listed == 0) & (k > 0) & (k < vocab):
                cut = tl.minimum(cut, kth_of_row(logits, vocab, best, heat, k, WIDE))
        if (listed == 0) & (p < 1.0):
            cut = tl.minimum(cut, nucleus_of_row(logits, vocab, best, heat, cut, p, WIDE))
    tl.store(cuts + row * 2, cut)
    tl.store(cuts + row * 2 + 1, best)


@triton.jit
def _lay(logits, stride, vocab, temperature, cuts, out, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Program (n, b): tokens b * BLOCK onwards of row n."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + ids, mask=ids < vocab, other=0.0).to(tl.float32)
    heat = tl.load(temperature + row)
    distance = distance_of(x, tl.load(cuts + row * 2 + 1), tl.where(heat > GREEDY_LIMIT, heat, 1.0))
    tl.store(out + row * vocab + ids, tl.where(distance > tl.load(cuts + row * 2), -INF, -distance), mask=ids < vocab)


def processed_logits(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
) -> torch.Tensor:
    """See `reference.processed_logits`: three launches, two reads of the logits where no row's filters need more."""
    n, vocab = logits.shape
    out = torch.empty(n, vocab, device=logits.device)
    if n == 0:
        return out
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    groups = triton.cdiv(vocab, GROUP)
    places = places_of(groups)
    peaks, cuts = torch.empty(n, groups, device=logits.device), torch.empty(n, 2, device=logits.device)
    scratch = None if top_k is None else torch.empty(n, places + 2 * LIST, dtype=torch.int32, device=logits.device)
    head, on = (logits, logits.stride(0), vocab), pdl(logits)
    _group_peaks[(n, triton.cdiv(groups, GROUPS))](*head, peaks, groups, GROUP, GROUPS, num_warps=4, **on)
    constants = (GROUP, places, TILE // logits.element_size(), LIST, min(WIDE, places_of(vocab)))
    _cut[(n,)](*head, temperature, top_k, top_p, min_p, peaks, groups, scratch, cuts, *constants, num_warps=8, **on)
    _lay[(n, triton.cdiv(vocab, BLOCK))](*head, temperature, cuts, out, BLOCK, num_warps=8, **on)
    return out
