"""Kernels of the mode `device.deterministic`: a row's bits are the same whatever stands beside it."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from test_attention_triton import E4M3, MIXED, SCALE, make_step
from test_scaled_triton import SCALES
from triton_world import DEVICE, DTYPES, close

from modelrunner.kernels.linear.reference import int8_matmul, matmul
from modelrunner.kernels.norm.reference import rms_norm

pytest.importorskip("triton")
from modelrunner.kernels.attention.fixed import fixed_index, fixed_indexed_attention, fixed_paged_attention
from modelrunner.kernels.linear import fixed
from modelrunner.kernels.norm.rows import fixed_rms_norm

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
SHAPES = [(40, 96), (129, 576), (64, 1024)]  # outputs and inner: one part of K, parts with a rest, eight parts


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every buffer that a launcher takes is NaN: what a kernel does not write is seen."""
    empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *size, **kw: torch.full(*size, float("nan"), **kw) if kw["dtype"].is_floating_point else empty(*size, **kw)
    )


def noise(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape) * scale).to(DEVICE, dtype)


@dtypes
@pytest.mark.parametrize(("outputs", "inner"), SHAPES)
def test_products_are_right(outputs: int, inner: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """By programs that share K and by programs that do not, of strided rows, of one row, of none, and with 8-bit weights."""
    x, weight = noise(70, inner + 8, dtype=dtype)[:, 8:], noise(outputs, inner, dtype=dtype, scale=inner**-0.5)
    quantised, scale = torch.randint(-127, 128, (outputs, inner), dtype=torch.int8, device=DEVICE), torch.rand(outputs).to(DEVICE) / 1000
    for most in (0, 256):
        monkeypatch.setattr(fixed, "SHARED_ROWS", most)
        close(fixed.fixed_matmul(x, weight), matmul(x, weight), "matmul")
        close(fixed.fixed_matmul(x[3], weight), matmul(x[3], weight), "matmul")
        close(fixed.fixed_int8_matmul(x[:5], quantised, scale), int8_matmul(x[:5], quantised, scale), "int8_matmul")
    assert fixed.fixed_matmul(x[:0], weight).shape == (0, outputs)


@dtypes
@pytest.mark.parametrize(("outputs", "inner"), SHAPES)
def test_a_row_of_a_product_is_what_it_is_alone(outputs: int, inner: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any place of a batch of any size, also where programs do not share K. Rows are whole tiles apart, since off a GPU the product
    within a program is numpy's, which may treat the places of a tile differently."""
    tiles = fixed.fixed_tiles(outputs, inner, 8 * dtype.itemsize)
    x, weight = noise(2 * tiles.bt + 5, inner, dtype=dtype), noise(outputs, inner, dtype=dtype, scale=inner**-0.5)
    places = [0, tiles.bt, 2 * tiles.bt, *([1, 17, tiles.bt + 3] if DEVICE.type == "cuda" else [])]
    alone = {place: fixed.fixed_matmul(x[place : place + 1], weight)[0] for place in places}
    for most in (0, 256):
        monkeypatch.setattr(fixed, "SHARED_ROWS", most)
        together = fixed.fixed_matmul(x, weight)
        for place, want in alone.items():
            assert torch.equal(together[place], want)


def test_shapes_of_tiles_do_not_know_the_rows() -> None:
    assert fixed.fixed_tiles(1024, 2048, 16).parts == 8
    assert fixed.fixed_tiles(151936, 1024, 16).parts == 1
    assert {fixed.fixed_tiles(outputs, inner, 16).bt for outputs, inner in SHAPES} == {64}


@dtypes
@pytest.mark.parametrize("width", [64, 576, 3000])
def test_norms(width: int, dtype: torch.dtype) -> None:
    """Few rows and many give the same bits, and what the reference says."""
    x, weight = noise(1300, width, dtype=dtype), 1 + noise(width, dtype=dtype, scale=0.1)
    many = fixed_rms_norm(x, weight, 1e-5)
    close(many, rms_norm(x, weight, 1e-5), "rms_norm")
    for place in (0, 7, 1299):
        assert torch.equal(fixed_rms_norm(x[place : place + 1], weight, 1e-5)[0], many[place])


@pytest.mark.parametrize(
    ("window", "options"), [(None, {}), (9, {"softcap": 2.0}), (None, {"scales": SCALES})], ids=["full", "window", "8-bits"]
)
@dtypes
def test_attention_is_right(dtype: torch.dtype, window: int | None, options: dict[str, Any]) -> None:
    """Over decode rows, prompts, later chunks, dead rows and tokens that nobody owns."""
    kept = E4M3 if "scales" in options else dtype
    step = make_step(MIXED, 16, num_decode=2, padding=13, window=window, dtype=dtype, cache_dtype=kept)
    cache, heads = step.arena[:, 1], step.q.shape[1]
    index = fixed_index(cache, **step.arguments, num_heads=heads, window=window, dtype=dtype, **step.limits)
    out = fixed_indexed_attention(step.q, cache, index, scale=SCALE, **options)
    assert (out[~step.live] == 0).all()
    close(out[step.live], step.want(**options)[step.live], "paged_attention")
    arguments = {**step.arguments}
    positions = arguments.pop("slots")  # of the same shape; neither reads it
    whole = fixed_paged_attention(
        step.q, cache, *arguments.values(), positions, window=window, scale=SCALE, **step.limits, **options
    )  # fmt: skip
    assert torch.equal(whole, out)


def alike(got: torch.Tensor, want: torch.Tensor) -> None:
    """Bit for bit; in the interpreter as nearly as numpy's products allow, where these depend on a row's place among others."""
    if torch.equal(got, want):
        return
    assert DEVICE.type == "cpu", "not the same bits"
    assert numpy_minds_places(), "not the same bits, though numpy gives them"
    torch.testing.assert_close(got, want, rtol=0, atol=4 * torch.finfo(got.dtype).eps * float(want.abs().max()))


@cache
def numpy_minds_places() -> bool:
    """Whether a row of a product of matrices has other bits in another place, as with some CPUs' kernels."""
    noise = np.random.default_rng(0)
    sizes = [(m, k, n) for m in (16, 32, 64, 128) for k in (16, 32, 64, 128) for n in (16, 32, 64, 128)]
    for m, k, n in sizes:
        a, b = noise.standard_normal((m, k), np.float32), noise.standard_normal((k, n), np.float32)
        whole = a @ b
        if any(not np.array_equal(np.roll(np.roll(a, by, 0) @ b, -by, 0), whole) for by in (1, 5, m // 2)):
            return True
    return False


@dtypes
@pytest.mark.parametrize("window", [None, 40])
def test_a_query_is_what_it_is_in_any_chunk(dtype: torch.dtype, window: int | None) -> None:
    """A prompt of 100 tokens at once, in chunks of 37, and token by token after the first 90, as a decode row."""
    step = make_step([(0, 100)], 16, dtype=dtype)
    cache, heads = step.arena[:, 1], step.q.shape[1]

    def attend(first: int, count: int) -> torch.Tensor:
        start = torch.tensor([0, count], dtype=torch.int32, device=DEVICE)
        lengths = (torch.tensor([n], dtype=torch.int32, device=DEVICE) for n in (count, first + count))
        unused = torch.zeros(count, dtype=torch.int32, device=DEVICE)
        limits = {"num_decode": int(count == 1), "decode_query": 1, "max_query": count, "max_seq_len": 128, "window": window}
        arguments = (step.arguments["block_table"], start, *lengths, unused, unused)
        index = fixed_index(cache, *arguments, num_heads=heads, dtype=dtype, **limits)
        return fixed_indexed_attention(step.q[first : first + count], cache, index, scale=SCALE)

    whole = attend(0, 100)
    alike(torch.cat([attend(first, min(37, 100 - first)) for first in range(0, 100, 37)]), whole)
    alike(torch.cat([attend(first, 1) for first in range(90, 100)]), whole[90:])
