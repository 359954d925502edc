"""What the area `linear` gives to CUDA devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton

from modelrunner.kernels.activation.gated import SILU
from modelrunner.kernels.builds import CAPABILITIES, PDL_SINCE, Build
from modelrunner.kernels.linear.fixed import SUM_BLOCK as FIXED_SUM_BLOCK
from modelrunner.kernels.linear.fixed import fixed_int8_matmul, fixed_kernel, fixed_matmul, fixed_sum_kernel, fixed_tiles
from modelrunner.kernels.linear.gemv import gemv_kernel
from modelrunner.kernels.linear.launch import RINGS, sum_shape
from modelrunner.kernels.linear.plan import Gemv, Ring, Several, Stream, Wide, added, plan
from modelrunner.kernels.linear.products import int8_matmul, matmul, matmul_add, matmul_add_in_place, norm_gated_matmul, norm_matmul
from modelrunner.kernels.linear.several import WARP, several_kernel
from modelrunner.kernels.linear.stream import stream_kernel
from modelrunner.kernels.linear.tiles import sum_kernel, tile_kernel

OVERRIDES: dict[str, Callable[..., Any]] = {
    "matmul": matmul,
    "int8_matmul": int8_matmul,
    "matmul_add": matmul_add,
    "matmul_add_in_place": matmul_add_in_place,
    "norm_matmul": norm_matmul,
    "norm_gated_matmul": norm_gated_matmul,
}
FIXED: dict[str, Callable[..., Any]] = {"matmul": fixed_matmul, "int8_matmul": fixed_int8_matmul}

_NUMBERS = {"T": "i32", "N": "i32", "x_stride": "i32", "residual_stride": "i32", "eps": "fp32"}
_DIVISIBLE = ("N", "x_stride", "residual_stride")


def builds(kind: str, rows: int, outputs: int, inner: int, dtype: str = "bf16", rings: bool = False) -> list[Build]:
    """What one product launches. kind: "plain", "norm", "add", "gated" (with a norm) or "int8". rings: where they may run."""
    act = SILU if kind == "gated" else 0
    norm, bits = kind in ("norm", "gated"), 16 if dtype != "fp32" else 32
    tiles = plan(rows, outputs, inner, bits, act != 0, norm, dtype == "fp16", kind != "int8", rings)
    if tiles is None and kind == "add":
        tiles = added(rows, outputs, inner, bits)
    if tiles is None:
        return []
    if isinstance(tiles, Ring):
        return [_ring_build(tiles, kind, inner, dtype)]
    if isinstance(tiles, Wide):
        return [_wide_build(tiles, kind, inner, dtype)]
    if isinstance(tiles, Stream):
        return _stream_builds(tiles, kind, inner, dtype, sum_shape(rows, outputs))
    given = {"x_ptr": dtype, "w_ptr": "i8" if kind == "int8" else dtype, "out_ptr": dtype}
    fused = isinstance(tiles, Gemv | Several) or tiles.fused_norm
    given |= {"norm_ptr": dtype} if norm and fused else {}
    given |= {"residual_ptr": dtype} if kind == "add" else {}
    given |= {"scale_ptr": "fp32"} if kind == "int8" else {}
    split = 1 if isinstance(tiles, Gemv | Several) else tiles.split
    given |= {"part_ptr": "fp32"} if split > 1 else {}
    names = ("x_ptr", "norm_ptr", "w_ptr", "scale_ptr", "residual_ptr", "out_ptr", "part_ptr")
    signature = {k: f"*{v}" for k, v in given.items()} | _NUMBERS
    none = {name: None for name in names if name not in given}
    if isinstance(tiles, Gemv):
        none.pop("part_ptr")
        constants = {"T": rows, "K": inner, "BN": tiles.bn, "BK": tiles.bk, "ACT": act, "PDL": True}
        return [Build(gemv_kernel, signature, none | constants, tiles.warps, divisible=_DIVISIBLE)]
    if isinstance(tiles, Several):
        none.pop("part_ptr")
        constants = {"T": rows, "K": inner, "BN": WARP // tiles.c, "S": tiles.times, "C": tiles.c, "WARPS": tiles.warps, "ACT": act}
        return [Build(several_kernel, signature, none | constants | {"PDL": True}, tiles.warps, divisible=_DIVISIBLE)]
    common = {"K": inner, "ACT": act, "PDL": True, "SPLIT": split}
    found = []
    for way, early in ((tiles, True), (tiles.pipelined(), False)):
        capabilities = tuple(c for c in CAPABILITIES if (c >= PDL_SINCE) == early)
        constants = {"BT": way.bt, "BN": way.bn, "BK": way.bk, "HOLD": way.stages == 1, "WARM": way.warm}
        absent = {"out_ptr": None, "residual_ptr": None} if split > 1 else {}
        kernel = (tile_kernel, signature, none | common | constants | absent, way.warps, way.stages)
        found.append(Build(*kernel, 16, divisible=_DIVISIBLE, capabilities=capabilities))
    if split > 1:
        none = {name: None for name in none if name in ("scale_ptr", "residual_ptr")} | ({} if "norm_ptr" in given else {"x_ptr": None})
        block, warps = sum_shape(rows, outputs)
        constants = {"BLOCK_K": triton.next_power_of_2(inner), "BLOCK": block}
        # A100's compiler spills a little where eight parts of gate and up meet the norm.
        found.append(Build(sum_kernel, signature, none | common | constants, warps, max_spill_bytes=32, divisible=_DIVISIBLE))
    return found


def _stream_builds(tiles: Stream, kind: str, inner: int, dtype: str, shape_of_sum: tuple[int, int]) -> list[Build]:
    """As `builds`, for weights in a stream: norms are launches of their own."""
    act, split = SILU if kind == "gated" else 0, tiles.split > 1
    common: dict[str, Any] = {"K": inner, "SPLIT": tiles.split, "ACT": act, "PDL": True}
    late, found = tiles.late(act != 0), []
    for way, capabilities in [(tiles, (90, 100))] if late == tiles else [(tiles, (90,)), (late, (100,))]:
        blocks = {"x_desc": f"tensordesc<{dtype}[{way.bt}, {way.bk}]>", "w_desc": f"tensordesc<{dtype}[{way.bn}, {way.bk}]>"}
        pointers = {"x_ptr": dtype, "w_ptr": dtype, "residual_ptr": dtype, "out_ptr": dtype, "part_ptr": "fp32"}
        none = {"out_ptr", "residual_ptr"} if split else {"part_ptr"} | (set() if kind == "add" else {"residual_ptr"})
        none |= {"x_desc"} if way.early else set()
        signature = blocks | {k: f"*{v}" for k, v in pointers.items() if k not in none} | _NUMBERS
        constants: dict[str, Any] = {"BT": way.bt, "BN": way.bn, "BK": way.bk, "AHEAD": way.ahead, "EARLY": way.early, "KEEP": way.keep}
        constants |= dict.fromkeys(none)
        shape = (way.warps, way.stages)
        found.append(Build(stream_kernel, signature, common | constants, *shape, 16, divisible=_DIVISIBLE, capabilities=capabilities))
    if split:
        given = {"part_ptr": "*fp32", "out_ptr": f"*{dtype}"} | ({"residual_ptr": f"*{dtype}"} if kind == "add" else {})
        absent = {name: None for name in ("x_ptr", "scale_ptr", "residual_ptr") if name not in given}
        block, warps = shape_of_sum
        sums = common | absent | {"BLOCK_K": triton.next_power_of_2(inner), "BLOCK": block}
        found.append(Build(sum_kernel, given | _NUMBERS, sums, warps, divisible=_DIVISIBLE, capabilities=(90, 100)))
    return found


def _ring_build(tiles: Ring, kind: str, inner: int, dtype: str) -> Build:
    """As `builds`. Norms and sums are the same launches as with streams."""
    blocks = _ring_blocks(dtype, [tiles.bt, tiles.bk], [tiles.bn, tiles.bk])
    constants = {"W_SLOTS": tiles.w_slots, "X_SLOTS": tiles.x_slots, "REQUESTS": tiles.requests}
    return _gluon_build(ring_kernel, tiles, kind, inner, dtype, blocks, constants, tiles.warps)


def _wide_build(tiles: Wide, kind: str, inner: int, dtype: str = "bf16") -> Build:
    """As `_ring_build`."""
    blocks = _ring_blocks(dtype, [tiles.bt, tiles.bk], [4, 2, 8, tiles.bk] if kind == "gated" else [64, tiles.bk])
    constants = {"GROUPS": tiles.groups, "TILES": tiles.tiles, "SLOTS": tiles.slots, "OTHERS": tiles.later}
    return _gluon_build(wide_kernel, tiles, kind, inner, dtype, blocks, constants, 4)


def _ring_blocks(dtype: str, x: list[int], w: list[int]) -> dict[str, str]:
    from triton.experimental.gluon.language import NVMMASharedLayout

    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=len(x))
    other = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=len(w))
    return {"x_desc": f"tensordesc<{dtype}{x},{layout!r}>", "w_desc": f"tensordesc<{dtype}{w},{other!r}>"}


def _gluon_build(
    kernel: Any, tiles: Ring | Wide, kind: str, inner: int, dtype: str, blocks: dict[str, str], constants: dict[str, Any], warps: int
) -> Build:
    split = tiles.split > 1
    none = {"out_ptr", "residual_ptr"} if split else {"part_ptr"} | (set() if kind == "add" else {"residual_ptr"})
    pointers = {"residual_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "part_ptr": "*fp32"}
    signature = blocks | {name: of for name, of in pointers.items() if name not in none} | _NUMBERS
    constants = constants | {"ACT": SILU if kind == "gated" else 0, "STEPS": inner // (tiles.bk * tiles.split), "PDL": True}
    spills = 0 if isinstance(tiles, Ring) else 32 if tiles.tiles == 1 else 256  # of Triton 3.9, after the last product
    constants = constants | dict.fromkeys(none)
    return Build(kernel, signature, constants, warps, 3, spills, _DIVISIBLE, capabilities=(90,), registers=tiles.registers)


BUILDS: list[Build] = [
    build
    for rows in (1, 2, 4, 16, 32, 64, 128, 192, 256)
    for kind, outputs, inner in [
        ("norm", 4096, 1024),  # Qwen3-0.6B: qkv, o, gate and up, down, head
        ("add", 1024, 2048),
        ("gated", 3072, 1024),
        ("add", 1024, 3072),
        ("plain", 151936, 1024),
        ("norm", 6144, 4096),  # Qwen3-8B
        ("add", 4096, 4096),
        ("gated", 12288, 4096),
        ("add", 4096, 12288),
        ("norm", 960, 576),  # SmolLM2-135M
        ("gated", 1536, 576),
        ("add", 576, 1536),
    ]
    for build in builds(kind, rows, outputs, inner)
]
BUILDS += builds("norm", 4, 4096, 1024, "fp32") + builds("gated", 32, 3072, 1024, "fp16") + builds("int8", 1, 4096, 1024)
BUILDS += builds("int8", 32, 1024, 3072)
if RINGS:
    from modelrunner.kernels.linear.ring import ring_kernel
    from modelrunner.kernels.linear.wide import wide_kernel

    LARGE_PRODUCTS = (("add", 4096, 4096), ("gated", 12288, 4096), ("add", 4096, 12288))
    BUILDS += [build for rows in (16, 32) for product in LARGE_PRODUCTS for build in builds(product[0], rows, *product[1:], rings=True)]
    BUILDS += [build for rows in (64, 128, 256) for build in builds("gated", rows, 12288, 4096, rings=True)]
    BUILDS += builds("norm", 64, 6144, 4096, rings=True) + builds("add", 64, 4096, 12288, rings=True)


def fixed_builds(outputs: int, inner: int, dtype: str = "bf16", weight: str = "") -> list[Build]:
    """What one product of the mode `device.deterministic` launches: for few rows and for many, and the sum. weight: "i8" for int8."""
    tiles = fixed_tiles(outputs, inner, 32 if dtype == "fp32" else 16)
    given = {"x_ptr": f"*{dtype}", "w_ptr": f"*{weight or dtype}", "out_ptr": f"*{dtype}", "part_ptr": "*fp32", "scale_ptr": "*fp32"}
    signature = given | {"T": "i32", "N": "i32", "x_stride": "i32"}
    plain: dict[str, Any] = {} if weight else {"scale_ptr": None}
    constants = {"K": inner, "BT": tiles.bt, "BN": tiles.bn, "BK": tiles.bk, "PARTS": tiles.parts, "PDL": True}
    ways: list[dict[str, Any]] = [{"part_ptr": None}, {}] if tiles.parts > 1 else [{"part_ptr": None}]
    found = [Build(fixed_kernel, signature, plain | way | constants, tiles.warps, tiles.stages, divisible=_DIVISIBLE) for way in ways]
    if tiles.parts > 1:
        sums = {"PARTS": tiles.parts, "BLOCK": FIXED_SUM_BLOCK, "PDL": True}
        found.append(Build(fixed_sum_kernel, signature, plain | sums, 2, divisible=_DIVISIBLE))
    return found


BUILDS += [
    build
    for outputs, inner in ((4096, 1024), (1024, 2048), (6144, 1024), (151936, 1024), (4096, 12288), (576, 1536))
    for build in fixed_builds(outputs, inner)
]
BUILDS += fixed_builds(576, 576, "fp32") + fixed_builds(1024, 3072, weight="i8")
