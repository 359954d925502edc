"""Kernels for `test_builds`: one that is good, one that does not compile, one that spills registers."""

import triton
import triton.language as tl

from modelrunner.kernels.builds import Build


@triton.jit
def copy(x, out, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    tl.store(out + lane, tl.load(x + lane))


@triton.jit
def misspelt(x, out, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    tl.store(out + lane, tl.lod(x + lane))


@triton.jit
def spilling(x, out, BLOCK: tl.constexpr):
    """One warp that must hold all values until it knows their sum."""
    lane = tl.arange(0, BLOCK)
    values = tl.load(x + lane)
    tl.store(out + lane, values / tl.sum(values, 0))


TYPES = {"x": "*fp32", "out": "*fp32"}
BUILDS = [
    Build(copy, TYPES, {"BLOCK": 128}, capabilities=(90,)),
    Build(misspelt, TYPES, {"BLOCK": 128}, capabilities=(90,)),
    Build(spilling, TYPES, {"BLOCK": 8192}, num_warps=1, capabilities=(90,)),
]
