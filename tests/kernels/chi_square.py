"""Chi-square tests of counts."""

from __future__ import annotations

import math

import torch

FAR = 4.265  # of a normal number: one in 100,000 is above


def critical(freedom: int) -> float:
    """What a chi-square of so many degrees of freedom exceeds once in 100,000 times (Wilson and Hilferty 1931)."""
    part = 2 / (9 * freedom)
    return freedom * (1 - part + FAR * math.sqrt(part)) ** 3


def assert_fits(counts: torch.Tensor, expected: torch.Tensor, lost: int = 1) -> None:
    """Chi-square of counts against what was expected, cells that expect less than 5 in one. lost: degrees of freedom."""
    rare = expected < 5
    assert counts[expected == 0].sum() == 0
    counts, expected = (torch.cat((t[~rare], t[rare].sum()[None])) for t in (counts.double(), expected.double()))
    counts, expected = counts[expected > 1e-9], expected[expected > 1e-9]
    value = ((counts - expected) ** 2 / expected).sum().item()
    assert value < critical(max(len(counts) - lost, 1)), f"chi-square {value:.1f} of {len(counts)} cells"
