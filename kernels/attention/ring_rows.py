"""Attention by rings (`ring.py`): where it is chosen, and its launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from modelrunner.kernels.attention.deal import FIRST_PAGES, DealtRows, deal_rows
from modelrunner.kernels.attention.device import launch_options, processors
from modelrunner.kernels.attention.index import rows_per_page
from modelrunner.kernels.gluon import require_tried
from modelrunner.kernels.pdl import hopper

Rotary = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor, float]  # q_norm, k_norm, cos_sin, eps

KEYS, HALF, MOST_GROUP = 64, 64, 8
FEWEST_ROWS, FEW_ROWS, MOST_ROWS = 16, 40, 64
LARGE_GROUP = 4  # query heads of a key head, as large models have: no product of theirs finds room beside a ring, however small
FEW_OF_LARGE, MOST_OF_LARGE = 23, 128  # rows, instead of FEW_ROWS and MOST_ROWS
try:
    require_tried()
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from modelrunner.kernels.attention.ring import decode_ring
except (ImportError, AttributeError):
    RINGS = False
else:
    RINGS = True


@dataclass(frozen=True)
class RingConfig:
    """programs: per multiprocessor. buffers: of a ring, of KEYS keys and values each. registers: of a thread at the start.
    asking: warps that ask for pages, 1 or 2."""

    programs: int
    buffers: int
    registers: int
    asking: int


@dataclass(frozen=True)
class RingWork:
    """A step's decode rows, as `ring_rows` takes them."""

    config: RingConfig
    dealt: DealtRows


def ring_config(rows: int, group: int) -> RingConfig:
    """For so many query heads of a key head. By `tests/gpu/bench_rings.py` on an H200."""
    few = FEW_OF_LARGE if group >= LARGE_GROUP else FEW_ROWS
    return RingConfig(1, 4, 128, 2) if rows <= few else RingConfig(2, 3, 128, 1)


def choose_rings(cache: torch.Tensor, rows: int, num_heads: int, dtype: torch.dtype) -> RingConfig | None:
    """How attention of so many decode rows of one query each is by rings; None where it is not. dtype: of the queries."""
    page, num_kv, dim = cache.shape[1], cache.shape[3], cache.shape[4]
    fits = dim == 2 * HALF and page >= KEYS // FIRST_PAGES and KEYS % page == 0 and num_heads <= MOST_GROUP * num_kv
    usual = dtype == cache.dtype and dtype in (torch.bfloat16, torch.float16)
    most = MOST_OF_LARGE if num_heads // num_kv >= LARGE_GROUP else MOST_ROWS
    if not (RINGS and fits and usual and FEWEST_ROWS <= rows <= most and hopper(cache)):
        return None
    return ring_config(rows, num_heads // num_kv)


def ring_work(
    config: RingConfig, cache: torch.Tensor, num_heads: int, block_table: torch.Tensor, query_len: torch.Tensor, seq_len: torch.Tensor
) -> RingWork:
    """Deal out the rows of a step. One launch."""
    page, num_kv, dim = cache.shape[1], cache.shape[3], cache.shape[4]
    programs = processors(cache.device) * config.programs
    return RingWork(config, deal_rows(programs, num_kv, num_heads // num_kv, dim, page, block_table, query_len, seq_len))


def ring_rows(
    qkv: torch.Tensor, cache: torch.Tensor, out: torch.Tensor, slots: torch.Tensor, block_table: torch.Tensor, work: RingWork,
    scale: float, rotary: Rotary,
) -> None:  # fmt: skip
    """Attention of N rows of one query each, whose new keys and values are written, into out: [N, H, D], contiguous.

    qkv: [N, (H + 2 HK) * D], its last dimension contiguous. cache: [num_pages, tokens_per_page, 2, HK, D]. slots: [N] int64, -1: not
    written. rotary: all D components are turned.
    """
    q_norm, k_norm, cos_sin, eps = rotary
    num_kv, dim, page, rows = cache.shape[3], cache.shape[4], cache.shape[1], qkv.shape[0]
    page_rows, width, config, dealt = rows_per_page(cache), 2 * num_kv * dim, work.config, work.dealt
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    tokens = [(cache.shape[0] - 1) * page_rows + page, width]
    decode_ring[(dealt.programs,)](
        TensorDescriptor(cache, tokens, [width, 1], [page, HALF], layout),
        qkv, cache, out, dealt.pieces, dealt.arrivals, dealt.outputs, dealt.sums, dealt.query_len, dealt.seq_len, block_table,
        qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm, cos_sin, slots, scale, eps,
        qkv.stride(0), block_table.stride(0), block_table.shape[1], page_rows, cos_sin.stride(0), rows,
        NUM_KV=num_kv, GROUP=out.shape[1] // num_kv, PAGE=page, D=dim, SLOTS=config.buffers, ASKING=config.asking,
        HAS_NORM=q_norm is not None, num_warps=4, maxnreg=config.registers, **launch_options(qkv.device),
    )  # fmt: skip
