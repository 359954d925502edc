"""The Triton rotation, alone and fused with norms and cache writes, against the references."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton_world import DEVICE, DTYPES, agree, close, close_in_8_bits

from modelrunner.kernels.attention.gpu import OVERRIDES as ATTENTION
from modelrunner.kernels.norm.reference import rms_norm
from modelrunner.kernels.rope import reference
from modelrunner.kernels.rope.gpu import OVERRIDES

apply_rope = OVERRIDES["apply_rope"]
PAGES, LAYERS = 5, 3


def table(rows: int, rotary: int) -> torch.Tensor:
    angle = torch.rand(rows, rotary // 2) * 100
    return torch.cat((angle.cos(), angle.sin()), 1).to(DEVICE)


def test_conformance_cases() -> None:
    agree("apply_rope", OVERRIDES, {"apply_rope": reference.apply_rope})


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary"), [(4, 2, 64, 64), (9, 3, 64, 32), (3, 1, 80, 80), (40, 8, 128, 128), (1, 1, 6, 2)]
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gathered", [False, True])
def test_apply_rope(gathered: bool, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, rotary: int) -> None:
    """Of views into a wider projection, as the model gives them."""
    qkv = torch.randn(5, heads + 2 * kv_heads, dim, device=DEVICE).to(dtype)
    q, k, _ = qkv.split((heads, kv_heads, kv_heads), 1)
    positions = None if gathered else torch.tensor([3, 0, 11, 3, 7], device=DEVICE)
    cos_sin = table(5 if gathered else 12, rotary)
    close(apply_rope(q, k, positions, cos_sin), reference.apply_rope(q, k, positions, cos_sin), "apply_rope")


def test_no_tokens() -> None:
    q, k = apply_rope(torch.empty(0, 4, 8, device=DEVICE), torch.empty(0, 2, 8, device=DEVICE), None, table(0, 8))
    assert (q.shape, k.shape) == ((0, 4, 8), (0, 2, 8))


class Fused:
    """Arguments of `qkv_rope_write`, and what should come of it. Slots of -1 are not written; the other layers stay."""

    def __init__(self, shape: tuple[int, int, int, int], tokens: int, dtype: torch.dtype, **options: Any) -> None:
        self.heads, self.kv_heads, self.dim, rotary = shape
        page = options.get("page", 7)
        self.arena = torch.randn(PAGES, LAYERS, page, 2, self.kv_heads, self.dim, device=DEVICE).to(options.get("cache_dtype", dtype))
        wide = torch.randn(tokens, (self.heads + 2 * self.kv_heads) * self.dim + 16, device=DEVICE).to(dtype)
        self.qkv = wide[:, : -16 if options.get("strided") else None][:, : (self.heads + 2 * self.kv_heads) * self.dim]
        if not options.get("strided"):
            self.qkv = self.qkv.contiguous()
        norm_dtype = options.get("norm")
        self.norms = [None if norm_dtype is None else torch.randn(self.dim, device=DEVICE).to(norm_dtype) for _ in range(2)]
        self.cos_sin = table(tokens, rotary)
        self.slots = (torch.randperm((PAGES - 1) * page)[:tokens] + page).to(DEVICE)
        self.slots[tokens // 2] = -1

    def check(self, scales: torch.Tensor | None = None) -> None:
        want_arena = self.arena.clone()
        sizes = (self.heads * self.dim, self.kv_heads * self.dim, self.kv_heads * self.dim)
        q, k, v = (part.unflatten(-1, (-1, self.dim)) for part in self.qkv.split(sizes, -1))
        if self.norms[0] is not None:
            q, k = (rms_norm(x, weight, 1e-5) for x, weight in zip((q, k), self.norms, strict=True))
        q, k = reference.apply_rope(q, k, None, self.cos_sin)
        page = self.arena.shape[2]
        for t, slot in enumerate(self.slots.tolist()):
            if slot >= 0:
                kept = torch.stack((k[t], v[t]))
                if scales is not None:
                    kept = (kept.float() / scales.unsqueeze(-1)).clamp(-448, 448)
                want_arena[slot // page, 1, slot % page] = kept.to(want_arena.dtype)
        out = ATTENTION["qkv_rope_write"](
            self.qkv, self.heads, self.kv_heads, *self.norms, 1e-5, self.cos_sin, self.arena[:, 1], self.slots, None, scales=scales
        )
        close(out, q, "qkv_rope_write")
        if scales is None:
            close(self.arena, want_arena, "qkv_rope_write")
        else:
            close_in_8_bits(self.arena, want_arena)


SHAPES = [(4, 2, 64, 64), (9, 3, 32, 16), (3, 1, 96, 96), (16, 8, 128, 128)]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(map(str, s)))
@pytest.mark.parametrize("norm", [None, "same", "float32"])
@pytest.mark.parametrize("tokens", [1, 18])
@pytest.mark.parametrize("dtype", DTYPES)
def test_qkv_rope_write(dtype: torch.dtype, tokens: int, norm: str | None, shape: tuple[int, int, int, int]) -> None:
    Fused(shape, tokens, dtype, norm={None: None, "same": dtype, "float32": torch.float32}[norm]).check()


def test_qkv_rope_write_of_a_view() -> None:
    Fused(SHAPES[1], 5, torch.float32, strided=True, norm=torch.float32, page=16).check()


def test_a_cache_of_another_type() -> None:
    Fused(SHAPES[0], 5, torch.float32, cache_dtype=torch.float16).check()


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(map(str, s)))
def test_a_scaled_cache_of_8_bits(shape: tuple[int, int, int, int]) -> None:
    """Some numbers do not fit and become the largest one."""
    for dtype in DTYPES:
        fused = Fused(shape, 18, dtype, cache_dtype=torch.float8_e4m3fn, norm=torch.float32)
        fused.qkv[3] *= 1e3
        scales = torch.linspace(0.003, 2.7, 2 * shape[1], device=DEVICE).view(2, -1)
        fused.check(scales)
        assert fused.arena.float().abs().max() == 448
