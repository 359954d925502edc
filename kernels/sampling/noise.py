"""Random words and Gumbel noise inside Triton kernels, equal to `philox.py`; and the operation `gumbel_noise`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from modelrunner.kernels.sampling import philox

BLOCK = 1024
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
M0, M1 = (tl.constexpr(m) for m in philox.MULTIPLIERS)
W0, W1 = (tl.constexpr(w) for w in philox.WEYL)
ROUNDS = tl.constexpr(philox.ROUNDS)
UNIFORM_BITS = tl.constexpr(philox.UNIFORM_BITS)
UNIFORM_MIN = tl.constexpr(philox.UNIFORM_MIN)


@triton.jit
def exact_log(x):
    """The logarithm that torch's CUDA kernels use (tl.log is a coarser one); the interpreter has no libdevice."""
    if INTERPRETED:
        return tl.log(x)
    else:
        return libdevice.log(x)


@triton.jit
def exact_exp(x):
    """As `exact_log`, the exponential."""
    if INTERPRETED:
        return tl.exp(x)
    else:
        return libdevice.exp(x)


@triton.jit
def _philox(block, seed, position, choice, purpose):
    """The four words of each counter. block: a tensor; seed, position, choice: int64; purpose: int32 or a constant."""
    c0 = block.to(tl.uint32)
    c1 = tl.zeros_like(c0) + position.to(tl.uint32)
    c2 = tl.zeros_like(c0) + choice.to(tl.uint32)
    c3 = (tl.zeros_like(block) + purpose).to(tl.uint32)
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(ROUNDS):
        p0, p1 = c0.to(tl.uint64) * M0, c2.to(tl.uint64) * M1
        c0, c2 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0, (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = p1.to(tl.uint32), p0.to(tl.uint32)
        k0, k1 = (k0 + W0).to(tl.uint32), (k1 + W1).to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def random_words(seed, position, choice, purpose, start, COUNT: tl.constexpr):
    """COUNT random words [COUNT] uint32, of vocabulary ids start to start + COUNT. start and COUNT: multiples of 4."""
    c0, c1, c2, c3 = _philox(start // 4 + tl.arange(0, COUNT // 4), seed, position, choice, purpose)
    return tl.reshape(tl.join(tl.join(c0, c2), tl.join(c1, c3)), [COUNT])


@triton.jit
def random_words_of(seed, position, choice, purpose, ids):
    """The random words of scattered vocabulary ids, uint32."""
    c0, c1, c2, c3 = _philox(ids // 4, seed, position, choice, purpose)
    place = ids % 4
    return tl.where(place < 2, tl.where(place == 0, c0, c1), tl.where(place == 2, c2, c3))


@triton.jit
def uniform(word):
    """A number in (0, 1) from a random word: its upper bits and a half, float32, exact."""
    bits = (word >> (32 - UNIFORM_BITS)) | 0x3F800000
    return bits.to(tl.float32, bitcast=True) - 1.0 + UNIFORM_MIN


@triton.jit
def gumbel(word):
    """Standard Gumbel noise from a random word, rounded as the reference rounds."""
    return -exact_log(-exact_log(uniform(word)))


@triton.jit
def _gumbel_noise(seed, position, choice, out, vocab, blocks, PURPOSE: tl.constexpr, BLOCK: tl.constexpr):
    row, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    key, where, which = tl.load(seed + row), tl.load(position + row).to(tl.int64), tl.load(choice + row).to(tl.int64)
    words = random_words(key, where, which, PURPOSE, block * BLOCK, BLOCK)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + row.to(tl.int64) * vocab + ids, gumbel(words), mask=ids < vocab)


def gumbel_noise(
    seed: torch.Tensor, position: torch.Tensor, choice: torch.Tensor, purpose: int, vocab: int, uniforms: torch.Tensor | None = None
) -> torch.Tensor:
    """See `philox.gumbel_noise`: one launch, the words in registers."""
    if uniforms is not None:
        return philox.gumbel_noise(seed, position, choice, purpose, vocab, uniforms)
    n = seed.shape[0]
    out = torch.empty(n, vocab, device=seed.device)
    blocks = triton.cdiv(vocab, BLOCK)
    if n:
        keys = (seed.to(torch.int64).contiguous(), position.contiguous(), choice.contiguous())
        _gumbel_noise[(n * blocks,)](*keys, out, vocab, blocks, purpose, BLOCK)
    return out
