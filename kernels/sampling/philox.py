"""Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3) in plain torch, and Gumbel noise from
it.
"""

from __future__ import annotations

import torch

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
BROADCAST_ROUNDS = 3  # a counter that differs in one word only has filled all four after so many
WORD = 0xFFFFFFFF

PURPOSE_SAMPLE, PURPOSE_DRAFT, PURPOSE_ACCEPT, PURPOSE_RECOVER, PURPOSE_GROUP = range(5)
ATTEMPT = 8  # added to a purpose for each further try of the same draw

# 23 bits and a half: every value is exact in float32 and lies strictly between 0 and 1, so that its noise is finite.
UNIFORM_BITS = 23
UNIFORM_MIN, UNIFORM_MAX = 2.0**-24, 1.0 - 2.0**-24


def philox(key: tuple[torch.Tensor, torch.Tensor], counter: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Four random words for each counter. key: two [n, 1] and counter: four int64 tensors of values in [0, 2^32), broadcast together.

    64-bit products wrap, which leaves their low 64 bits right; an arithmetic shift and a mask then give the high word. c1 and c3 keep
    the bits above their word: they only enter through exclusive-or, and are masked on the way.
    """
    steps = torch.arange(ROUNDS, device=key[0].device).view(-1, 1, 1)
    keys = [((k + steps * weyl) & WORD).unbind(0) for k, weyl in zip(key, WEYL, strict=True)]
    c0, c1, c2, c3 = counter
    for k0, k1 in list(zip(*keys, strict=True))[:BROADCAST_ROUNDS]:
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = ((p1 >> 32) ^ (c1 ^ k0)) & WORD, p1, ((p0 >> 32) ^ (c3 ^ k1)) & WORD, p0
    # By now all four are of full size and our own. In place: a product takes the memory of its factor, a word that of another word.
    high = torch.empty_like(c0)
    for k0, k1 in list(zip(*keys, strict=True))[BROADCAST_ROUNDS:]:
        p0, p1 = c0.mul_(MULTIPLIERS[0]), c2.mul_(MULTIPLIERS[1])
        torch.bitwise_right_shift(p1, 32, out=high)
        c1.bitwise_xor_(high).bitwise_xor_(k0).bitwise_and_(WORD)
        torch.bitwise_right_shift(p0, 32, out=high)
        c3.bitwise_xor_(high).bitwise_xor_(k1).bitwise_and_(WORD)
        c0, c1, c2, c3 = c1, p1, c3, p0
    return c0, c1.bitwise_and_(WORD), c2, c3.bitwise_and_(WORD)


def uniform_noise(seed: torch.Tensor, position: torch.Tensor, choice: torch.Tensor, purpose: int, vocab: int) -> torch.Tensor:
    """Uniform numbers in (0, 1), [n, vocab] float32, a function of nothing but the row's seed, position, choice and the vocabulary id.

    seed [n] int64: key, low word first. Vocabulary id v takes word v % 4 of the counter (v // 4, position, choice, purpose).
    """
    return uniform_blocks((seed, position, choice), purpose, torch.arange(-(-vocab // 4), device=seed.device).unsqueeze(0))[:, :vocab]


def uniform_blocks(keys: tuple[torch.Tensor, ...], purpose: int, block: torch.Tensor) -> torch.Tensor:
    """The numbers of `uniform_noise` of ids 4 b to 4 b + 3 for each b in block, [n or 1, B] int64: [n, 4 B] float32. keys: seed, position
    and choice, [n] each.
    """
    wide = [t.to(torch.int64).unsqueeze(1) for t in keys]
    key = (wide[0] & WORD, (wide[0] >> 32) & WORD)
    words = philox(key, (block, wide[1] & WORD, wide[2] & WORD, torch.full_like(wide[1], purpose)))
    bits = torch.empty(*words[0].shape, 4, device=block.device)
    for place, word in enumerate(words):
        bits[..., place].copy_(word.bitwise_right_shift_(32 - UNIFORM_BITS))
    return bits.add_(0.5).mul_(2.0**-UNIFORM_BITS).flatten(1)


def gumbel(uniforms: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise -log(-log(u)) of numbers in (0, 1), which it overwrites."""
    return uniforms.log_().neg_().log_().neg_()


def gumbel_noise(
    seed: torch.Tensor, position: torch.Tensor, choice: torch.Tensor, purpose: int, vocab: int, uniforms: torch.Tensor | None = None
) -> torch.Tensor:
    """Standard Gumbel noise, [n, vocab] float32, always finite. argmax(logits + noise) draws from softmax(logits)
    (Maddison et al. 2014, arXiv:1411.0030).

    seed [n] int64; position, choice [n] integers; purpose: which of a step's independent draws. uniforms: [n, vocab] float32 to use in
    place of the generator's, clamped to what the generator can give.
    """
    u = uniform_noise(seed, position, choice, purpose, vocab) if uniforms is None else uniforms.to(torch.float32)
    return gumbel(u.clamp(UNIFORM_MIN, UNIFORM_MAX))
