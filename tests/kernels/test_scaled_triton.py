"""The Triton attention over keys and values of 8 bits with scales, against its reference."""

from __future__ import annotations

import pytest
import torch
from test_attention_triton import CHUNKS, CONFIGS, DECODE, E4M3, GATHERED, MIXED, TILES, Fused, make_step
from triton_world import DEVICE, DTYPES, ON_GPU

from modelrunner.kernels.attention.prefill_list import PrefillConfig

SCALES = torch.tensor([[0.3, 5.0], [0.07, 1.7]], device=DEVICE)  # of two heads' keys and values


KEPT = [(dtype, SCALES) for dtype in DTYPES] + [(DTYPES[-1], None)]


@pytest.mark.parametrize("softcap", [None, 2.0], ids=["plain", "softcap"])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("dtype", "scales"), KEPT)
def test_decode_from_8_bits(dtype: torch.dtype, scales: torch.Tensor | None, config: str, softcap: float | None) -> None:
    """Rows of one chunk and of several."""
    step = make_step(DECODE, 7, num_decode=5, dtype=dtype, cache_dtype=E4M3)
    step.check(CONFIGS[config], softcap=softcap, scales=scales)


@pytest.mark.parametrize("prefill", [TILES, GATHERED], ids=["pages", "gathered"])
@pytest.mark.parametrize(("dtype", "scales"), KEPT)
def test_prompts_from_8_bits(dtype: torch.dtype, scales: torch.Tensor | None, prefill: PrefillConfig) -> None:
    """Sinks are not scaled."""
    sinks = torch.tensor([-40.0, -1.0, 0.0, 1.5, 4.0, 40.0], device=DEVICE)
    window = None if prefill.gathered else 9
    make_step(MIXED, 7, num_decode=2, window=window, dtype=dtype, cache_dtype=E4M3).check(CHUNKS, prefill, sinks=sinks, scales=scales)


def test_large_queries_and_8_bits() -> None:
    """Queries that float16 does not reach, and small ones. (Of 1e-4 it keeps so few digits that outputs differ by 1% of the largest.)"""
    if not ON_GPU:
        pytest.skip("the interpreter computes bfloat16 wrongly")
    for size in (1e5, 1e-3):
        step = make_step(MIXED, num_decode=2, dtype=torch.bfloat16, cache_dtype=E4M3)
        step.q *= size
        step.check(CHUNKS, TILES, scales=SCALES / torch.tensor([size, 1.0], device=DEVICE))  # of the keys alone


@pytest.mark.parametrize("config", ["chunks", "whole"])
@pytest.mark.parametrize(("dtype", "scales"), KEPT)
def test_fused_decode_into_8_bits(dtype: torch.dtype, scales: torch.Tensor | None, config: str) -> None:
    """A new key is attended to as it is kept, also where it does not fit."""
    step = make_step([(62, 1), (0, 1), (0, 0), (31, 1), (16, 1), (32, 1)], 7, num_decode=6, dtype=dtype, cache_dtype=E4M3)
    fused = Fused(step, 16, True)
    fused.qkv[:, -20:] *= 1e4
    fused.check(CONFIGS[config], scales=scales)
