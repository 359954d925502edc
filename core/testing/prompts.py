"""Prompts as short formulas, so that a test can name one: P(n, s) is varied, R(m) repeats itself."""

from __future__ import annotations

BOS = 1


def P(n: int, s: int) -> list[int]:
    """BOS followed by n - 1 ids, the i-th (from 0) being 3 + (31 s + 7 i) mod 256."""
    return [BOS, *(3 + (s * 31 + 7 * i) % 256 for i in range(n - 1))]


def R(m: int) -> list[int]:
    """BOS followed by m repeats of [20, 21, 22, 23]."""
    return [BOS, *([20, 21, 22, 23] * m)]
