"""The arithmetic of one block of keys that the attention kernels share."""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1.0e30)  # stands for minus infinity where differences are taken
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def matmul(a, b, acc):
    """acc + a @ b, summed in float32. float32 factors are multiplied as IEEE says, not in TensorFloat-32."""
    if a.dtype == tl.float32:
        return tl.dot(a, b, acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def capped(scores, scale, softcap):
    """softcap * tanh(scores * scale / softcap), in units of log(2). tanh(x) = 1 - 2 / (exp(2 x) + 1)."""
    x = scores * (scale * 2.0 * LOG2E / softcap)
    return (softcap * LOG2E) * (1.0 - 2.0 / (tl.exp2(x) + 1.0))


@triton.jit
def fold(acc, largest, total, scores, factor, v):
    """One step of the online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867).

    acc: [M, D] float32 and total: [M], both relative to 2 ** largest [M]. scores: [M, S] float32, times factor > 0 in units of log(2).
    v: [S, D].
    """
    new = tl.maximum(largest, tl.max(scores, 1) * factor)
    weights = tl.exp2(scores * factor - new[:, None])
    shrink = tl.exp2(largest - new)
    total = total * shrink + tl.sum(weights, 1)
    acc = matmul(weights.to(v.dtype), v, acc * shrink[:, None])
    return acc, new, total


@triton.jit
def add_sink(acc, largest, total, sink):
    """Let one more key without a value take part. sink: [M] float32, its score in units of log(2)."""
    new = tl.maximum(largest, sink)
    shrink = tl.exp2(largest - new)
    return acc * shrink[:, None], total * shrink + tl.exp2(sink - new)


@triton.jit
def pages_of(table_ptr, keys, there, PAGE: tl.constexpr):
    """Page numbers of a row's keys [S]. table_ptr: the row's block table. there: [S] bool.

    Loops load them one turn ahead, in a variable that they carry: the pipeline then sees loads of keys and values whose addresses are at
    hand. (Left to itself it copies page numbers to shared memory, and waiting for those also waits for the keys before them.)
    """
    return tl.load(table_ptr + keys // PAGE, mask=there, other=0)


@triton.jit
def token_offsets(page, keys, page_rows, PAGE: tl.constexpr, TOKEN: tl.constexpr):
    """Where keys [S] lie in a layer's cache, in elements: int64 [S, 1]."""
    return ((page.to(tl.int64) * page_rows + keys % PAGE) * TOKEN)[:, None]


@triton.jit
def threads_meet(GPU: tl.constexpr):
    """A barrier for loops that are pipelined: with the compiler's own in them they would not be. GPU: False in the interpreter."""
    if GPU:
        tl.inline_asm_elementwise("bar.sync 0; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
