"""Launch of attention by rings (`ring.py`), and where it can be."""

from __future__ import annotations

import torch
import triton

from modelrunner.kernels.attention.deal import DealtRows
from modelrunner.kernels.attention.device import launch_options
from modelrunner.kernels.attention.index import rows_per_page

Rotary = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor, float]  # q_norm, k_norm, cos_sin, eps

KEYS, HALF, MOST_GROUP = 64, 64, 8
TRIED = (3, 6), (3, 9)  # first and last version of Triton whose Gluon `decode_ring` was compiled by: it is experimental
try:
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from modelrunner.kernels.attention.ring import decode_ring
except (ImportError, AttributeError):
    RINGS = False
else:
    RINGS = TRIED[0] <= tuple(int(part) for part in triton.__version__.split(".")[:2]) <= TRIED[1]


def ring_rows(
    qkv: torch.Tensor, cache: torch.Tensor, out: torch.Tensor, slots: torch.Tensor, block_table: torch.Tensor, dealt: DealtRows,
    scale: float, rotary: Rotary, buffers: int, registers: int, asking: int = 2,
) -> None:  # fmt: skip
    """Attention of N rows of one query each, whose new keys and values are written, into out: [N, H, D], contiguous.

    qkv: [N, (H + 2 HK) * D], its last dimension contiguous. cache: [num_pages, tokens_per_page, 2, HK, D]. slots: [N] int64, -1: not written.
    buffers: of the ring. registers: of a thread at the start.
    """
    q_norm, k_norm, cos_sin, eps = rotary
    num_kv, dim, page, rows = cache.shape[3], cache.shape[4], cache.shape[1], qkv.shape[0]
    page_rows, width = rows_per_page(cache), 2 * num_kv * dim
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    tokens = [(cache.shape[0] - 1) * page_rows + page, width]
    decode_ring[(dealt.programs,)](
        TensorDescriptor(cache, tokens, [width, 1], [page, HALF], layout),
        qkv, cache, out, dealt.pieces, dealt.arrivals, dealt.outputs, dealt.sums, dealt.query_len, dealt.seq_len, block_table,
        qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm, cos_sin, slots, scale, eps,
        qkv.stride(0), block_table.stride(0), block_table.shape[1], page_rows, cos_sin.stride(0), rows,
        NUM_KV=num_kv, GROUP=out.shape[1] // num_kv, PAGE=page, D=dim, SLOTS=buffers, ASKING=asking, HAS_NORM=q_norm is not None,
        num_warps=4, maxnreg=registers, **launch_options(qkv.device),
    )  # fmt: skip
