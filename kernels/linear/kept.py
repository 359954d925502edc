"""Stores whose lines the L2 cache gives up last: of sums in parts, which the next launch reads, while weights stream through the cache."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def store_kept(at, value, inside):
    """tl.store(at, value, mask=inside) of float32, for triton and for Gluon; compute capability 8.0 on, and not in the interpreter."""
    tl.inline_asm_elementwise(
        "{ .reg .b64 policy; .reg .pred in; createpolicy.fractional.L2::evict_last.b64 policy, 1.0; setp.ne.b32 in, $3, 0;"
        " @in st.global.L2::cache_hint.b32 [$1], $2, policy; mov.u32 $0, 0; }",
        "=r,l,r,r", [at.to(tl.int64), value.to(tl.int32, bitcast=True), inside.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
