"""Tiles of queries whose keys several programs share out, where tiles alone would leave multiprocessors without work.

A short chunk of a long prompt is few tiles, and each walks over all earlier keys: time is the length of that walk. So the keys of a tile
are cut into parts (Flash-Decoding, Dao et al. 2023), and the program that ends last adds the parts up, in their order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from modelrunner.kernels.attention.tile import LOWEST, threads_meet

MOST_PARTS = 8  # of a tile; a word of the list has four bits for the number


@dataclass(frozen=True)
class TileParts:
    """Where parts leave their results. slots: parts that all tiles may have in all; beyond them no tile is cut.

    outputs: [slots, HK, M, D] float32, sums over a part's keys. sums: [slots, HK, 2, M] float32, log2 of the largest weight and the sum of
    weights. arrivals: [slots * HK] int32, zeros between launches: parts of a tile that have ended, at its first part's place.
    """

    slots: int
    outputs: torch.Tensor
    sums: torch.Tensor
    arrivals: torch.Tensor


def room_for_parts(programs: int, num_kv: int, block_queries: int, block_dim: int, device: torch.device) -> TileParts:
    """Room for as many parts, times key heads, as run at once."""
    slots = max(programs // num_kv, 1)
    outputs = torch.empty((slots, num_kv, block_queries, block_dim), dtype=torch.float32, device=device)
    sums = torch.empty((slots, num_kv, 2, block_queries), dtype=torch.float32, device=device)
    return TileParts(slots, outputs, sums, torch.empty(slots * num_kv, dtype=torch.int32, device=device))


@triton.jit
def add_up(
    acc, largest, total, first_slot, part, parts, head, outputs_ptr, sums_ptr, arrivals_ptr,
    NUM_KV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, GPU: tl.constexpr,
):  # fmt: skip
    """Keep a part's sums. (acc, largest, total, whether it was the tile's last part to end): then they are those of all parts."""
    m, dim = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    within = m[:, None] * BLOCK_D + dim[None, :]
    mine = ((first_slot + part) * NUM_KV + head).to(tl.int64)
    tl.store(outputs_ptr + mine * (BLOCK_M * BLOCK_D) + within, acc)
    tl.store(sums_ptr + mine * (2 * BLOCK_M) + m, largest)
    tl.store(sums_ptr + mine * (2 * BLOCK_M) + BLOCK_M + m, total)
    threads_meet(GPU)  # all threads' stores come before the one atomic
    arrival = arrivals_ptr + first_slot * NUM_KV + head
    is_last = tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu") == parts - 1
    if is_last:
        tl.store(arrival, 0)  # for the next layer
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        largest = tl.full([BLOCK_M], LOWEST, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        for other in range(parts):
            slot = ((first_slot + other) * NUM_KV + head).to(tl.int64)
            its_largest = tl.load(sums_ptr + slot * (2 * BLOCK_M) + m)
            its_total = tl.load(sums_ptr + slot * (2 * BLOCK_M) + BLOCK_M + m)
            top = tl.maximum(largest, its_largest)
            shrink, its_shrink = tl.exp2(largest - top), tl.exp2(its_largest - top)
            its_acc = tl.load(outputs_ptr + slot * (BLOCK_M * BLOCK_D) + within)
            acc = acc * shrink[:, None] + its_acc * its_shrink[:, None]
            total = total * shrink + its_total * its_shrink
            largest = top
    return acc, largest, total, is_last
