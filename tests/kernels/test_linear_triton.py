"""The Triton matrix products against their plain chains, for every kernel and awkward sizes."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from triton_world import DEVICE, DTYPES, close

from modelrunner.kernels.activation import reference as activation_reference
from modelrunner.kernels.linear.reference import int8_matmul, matmul
from modelrunner.kernels.norm.reference import rms_norm
from modelrunner.ops import Tolerance

pytest.importorskip("triton")
from modelrunner.kernels.linear import launch
from modelrunner.kernels.linear.gpu import BUILDS, OVERRIDES
from modelrunner.kernels.linear.launch import Extras
from modelrunner.kernels.linear.plan import Gemv, Ring, Several, Stream, Tiles, Wide, added, plan

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# The chain rounds its intermediate results; the fused form does not.
FUSED = Tolerance({torch.float32: (2e-5, 2e-5), torch.float16: (4e-3, 4e-3), torch.bfloat16: (3e-2, 3e-2)})
GEMVS = [Gemv(4, 64, 1), Gemv(2, 256, 4), Gemv(16, 128, 2)]
SEVERALS = [Several(1, 64, 1), Several(2, 128, 4), Several(4, 256, 2)]
TILES = [
    Tiles(16, 32, 64, 4, 4, 2),
    Tiles(32, 64, 32, 2, 4, 1, fused_norm=False),
    Tiles(64, 64, 64, 1, 4, 3),
    Tiles(32, 32, 64, 3, 4, 1),
]
STREAMS = [
    Stream(16, 32, 32, 1, 4, 2, 64),
    Stream(32, 64, 32, 3, 4, 2),
    Stream(32, 64, 32, 2, 4, 3, early=1),
    Stream(16, 32, 32, 2, 4, 3, early=2),
]


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every buffer that a launcher takes is NaN: what a kernel does not write is seen."""
    monkeypatch.setattr(torch, "empty", lambda *size, **kw: torch.full(*size, float("nan"), **kw))


def noise(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape) * scale).to(DEVICE, dtype)


def world(rows: int, outputs: int, inner: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """x and residual are slices of wider tensors."""
    return {
        "x": noise(rows, inner + 24, dtype=dtype)[:, 16 : inner + 16],
        "norm": 1 + noise(inner, dtype=dtype, scale=0.2),
        "weight": noise(outputs, inner, dtype=dtype, scale=inner**-0.5),
        "residual": noise(rows, outputs + 8, dtype=dtype)[:, 8:],
    }


KINDS = ["plain", "norm", "add", "silu_mul", "gelu_tanh_mul", "int8"]
CASES = [
    *((kind, 37, 200, torch.float32) for kind in KINDS),
    *((kind, 96, 576, DTYPES[-1]) for kind in ("norm", "add")),
    *((kind, 64, 512, torch.float16) for kind in ("silu_mul", "int8")),
]


@pytest.mark.parametrize(
    ("kind", "outputs", "inner", "dtype", "tiles"),
    [(*case, tiles) for case in CASES for tiles in (*GEMVS, *SEVERALS, *TILES, *STREAMS) if case[0] != "int8" or tiles not in STREAMS],
    ids=str,
)
def test_every_kernel(kind: str, outputs: int, inner: int, tiles: Gemv | Several | Tiles | Stream, dtype: torch.dtype) -> None:
    rows = 3 if isinstance(tiles, Gemv | Several) else 19
    w = world(rows, outputs, inner, dtype)
    x, normed = w["x"], rms_norm(w["x"], w["norm"], 1e-5)
    if kind == "plain":
        out, want = launch.run(tiles, x, w["weight"]), matmul(x, w["weight"])
    elif kind == "norm":
        out, want = launch.run(tiles, x, w["weight"], Extras(w["norm"], 1e-5)), matmul(normed, w["weight"])
    elif kind == "add":
        out, want = launch.run(tiles, x, w["weight"], Extras(residual=w["residual"])), w["residual"] + matmul(x, w["weight"])
    elif kind == "int8":
        quantised = torch.randint(-127, 128, (outputs, inner), dtype=torch.int8, device=DEVICE)
        scale = (torch.rand(outputs) / 60 / inner**0.5).to(DEVICE)
        out, want = launch.run(tiles, x, quantised, Extras(scale=scale)), int8_matmul(x, quantised, scale)
    else:
        weight = noise(2 * outputs, inner, dtype=dtype, scale=inner**-0.5)
        act = 1 + (kind == "gelu_tanh_mul")
        out = launch.run(tiles, x, weight, Extras(w["norm"], 1e-5, act=act))
        want = getattr(activation_reference, kind)(matmul(normed, weight))
    close(out, want, FUSED)


def calls(w: dict[str, Any]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Each operation's result and its plain chain's, at one shape."""
    x, norm, weight, residual = w["x"], w["norm"], w["weight"], w["residual"]
    pairs = torch.cat((weight, weight.flip(0)))
    normed = rms_norm(x, norm, 1e-6)
    return {
        "matmul": (OVERRIDES["matmul"](x, weight), matmul(x, weight)),
        "matmul_add": (OVERRIDES["matmul_add"](x, weight, residual), residual + matmul(x, weight)),
        "matmul_add_in_place": (OVERRIDES["matmul_add_in_place"](x, weight, residual.clone()), residual + matmul(x, weight)),
        "norm_matmul": (OVERRIDES["norm_matmul"](x, norm, 1e-6, weight), matmul(normed, weight)),
        "norm_gated_matmul": (
            OVERRIDES["norm_gated_matmul"](x, norm, 1e-6, pairs, "silu_mul"),
            activation_reference.silu_mul(matmul(normed, pairs)),
        ),
    }


@dtypes
@pytest.mark.parametrize(
    ("rows", "outputs", "inner"),
    [
        (0, 80, 96),
        (1, 80, 576),
        (2, 129, 96),
        (4, 40, 30),
        (5, 80, 576),
        (17, 129, 96),
        (64, 80, 96),
        (70, 40, 96),
        (130, 80, 128),
        (200, 40, 2112),
    ],
)
def test_operations(rows: int, outputs: int, inner: int, dtype: torch.dtype) -> None:
    """Whatever kernel the shapes choose."""
    for out, want in calls(world(rows, outputs, inner, dtype)).values():
        assert out.shape == want.shape
        close(out, want, FUSED)


@dtypes
def test_leading_dimensions(dtype: torch.dtype) -> None:
    x, weight = noise(2, 3, 64, dtype=dtype), noise(32, 64, dtype=dtype, scale=0.1)
    quantised, scale = torch.randint(-127, 128, (32, 64), dtype=torch.int8, device=DEVICE), torch.rand(32).to(DEVICE) / 1000
    close(OVERRIDES["matmul"](x, weight), matmul(x, weight), FUSED)
    close(OVERRIDES["matmul"](x.transpose(0, 1), weight), matmul(x.transpose(0, 1), weight), FUSED)
    close(OVERRIDES["matmul"](x[0, 0], weight), matmul(x[0, 0], weight), FUSED)
    close(OVERRIDES["int8_matmul"](x, quantised, scale), int8_matmul(x, quantised, scale), FUSED)


@pytest.mark.parametrize("rows", [1, 16])
def test_large_residual_streams_keep_within_float16(rows: int) -> None:
    """The norm's weight times a large x would overflow before the division by rms."""
    x, norm = noise(rows, 64, dtype=torch.float16, scale=5000), torch.full((64,), 8.0).to(DEVICE, torch.float16)
    weight = noise(32, 64, dtype=torch.float16, scale=0.1)
    out = OVERRIDES["norm_matmul"](x, norm, 1e-6, weight)
    close(out, matmul(rms_norm(x, norm, 1e-6), weight), Tolerance({torch.float16: (1e-2, 2e-2)}))


def test_the_kernels_depend_on_shapes_alone() -> None:
    assert isinstance(plan(1, 4096, 1024, 16, False, True, False), Gemv)
    assert isinstance(plan(8, 4096, 1024, 16, False, True, False), Tiles)
    assert plan(8, 4096, 1024, 32, False, True, False) is None
    assert plan(1, 4096, 1001, 16, False, False, False) is None
    assert plan(65, 4096, 1024, 16, False, True, False) is None
    assert plan(129, 512, 2048, 16, False, False, False) is None
    many = plan(129, 1024, 2048, 16, False, False, False)
    assert many == plan(256, 1024, 2048, 16, False, False, False) == Stream(128, 64, 128, 4, 4, 4, 256)
    assert plan(256, 1024, 2048, 16, False, False, False, streams=False) is None
    assert plan(256, 4096, 4096, 16, False, True, False) is None
    assert plan(257, 1024, 2048, 16, False, False, False) is None
    assert plan(64, 4096, 1024, 16, False, True, False) == Stream(64, 64, 128, 1, 4, 6, 256)
    assert plan(64, 12288, 4096, 16, True, True, False) == Stream(64, 128, 128, 1, 8, 3, early=1, keep=True)
    assert plan(32, 6144, 4096, 16, False, True, False) == Stream(32, 64, 256, 1, 4, 4, 256)
    assert plan(32, 6144, 4096, 16, False, True, False, streams=False) is None
    assert isinstance(plan(32, 4096, 12288, 16, False, False, False, streams=False), Tiles)
    assert plan(32, 4096, 4096, 16, False, False, False, rings=True) == Ring(32, 64, 256, 2, 4, 5, 4, 64)
    assert plan(17, 12288, 4096, 16, True, True, False, rings=True) == Ring(32, 128, 128, 1, 4, 3, 3, 104)
    assert isinstance(plan(32, 6144, 4096, 16, False, True, False, rings=True), Stream)
    few = [plan(rows, 4096, 4096, 16, False, False, False, rings=True) for rows in (2, 16)]
    assert few == [Ring(16, 64, 256, 2, 4, 6, 4, 64)] * 2
    assert isinstance(plan(33, 4096, 4096, 16, False, False, False, rings=True), Stream)
    assert isinstance(plan(1, 4096, 4096, 16, False, False, False, rings=True), Gemv)
    wide = [plan(rows, 12288, 4096, 16, True, True, False, rings=True) for rows in (33, 64, 65, 128, 241, 256)]
    few, some, many = Wide(64, 1, 3, 128, 1, 3, 72), Wide(128, 1, 3, 64, 1, 5, 96), Wide(128, 2, 3, 64, 1, 4, 128)
    assert wide == [few, few, some, some, many, many]
    assert [plan(rows, 12288, 4096, 16, True, True, False, rings=True) for rows in (129, 240, 257)] == [None] * 3
    assert plan(256, 12288, 4096, 16, True, True, False) is None
    assert plan(33, 6144, 4096, 16, False, True, False, rings=True) == Wide(64, 1, 1, 128, 1, 6, 72)
    assert plan(64, 4096, 12288, 16, False, False, False, rings=True) == Wide(64, 1, 1, 128, 2, 6, 72)
    streams = [
        (128, 12288, 4096, True, False),
        (128, 14336, 4096, True, True),
        (65, 4096, 12288, False, True),
        (64, 4096, 4096, False, True),
    ]
    assert all(isinstance(plan(*shape, 16, gated, gated, False, rings=rings), Stream) for *shape, gated, rings in streams)
    half = plan(8, 4096, 1024, 16, False, True, True)
    assert isinstance(half, Tiles)
    assert not half.fused_norm
    assert len(BUILDS) > 80


def test_products_that_are_added_have_tiles_for_more_rows() -> None:
    assert added(129, 1024, 2048, 16) == Tiles(64, 64, 64, 2, 4, 6, warm=False)
    assert added(256, 1024, 2048, 16) == Tiles(64, 64, 64, 1, 4, 6, warm=False)
    assert added(256, 1024, 3072, 16) == Tiles(128, 64, 128, 4, 4, 3, warm=False)
    assert [added(rows, 1024, 2048, 16) for rows in (128, 257)] == [None, None]
    assert [added(200, 4096, 4096, 16), added(200, 1024, 2048, 32), added(200, 1024, 1000, 16)] == [None] * 3


def test_a_program_holds_no_more_weights_than_shared_memory() -> None:
    """For whatever shape is multiplied by tiles that hold all their weights."""
    shapes = [(4096, 1024), (1024, 2048), (3072, 1024), (1024, 3072), (960, 576), (576, 1536), (1024, 8192), (512, 16384), (16, 1008)]
    for rows in (3, 8, 16, 17, 32, 33, 64, 65, 128):
        for outputs, inner in shapes:
            for gated, norm in [(False, False), (False, True), (True, True)]:
                tiles = plan(rows, outputs, inner, 16, gated, norm, False)
                if isinstance(tiles, Tiles) and tiles.stages == 1:
                    steps = -(-inner // (tiles.bk * tiles.split))
                    assert 2 * tiles.bn * (1 + gated) * steps * tiles.bk <= 2**17
                    assert tiles.pipelined().stages > 1


def test_a_stream_fits_in_shared_memory() -> None:
    """Whatever of it is in flight, with programs enough to keep memory busy."""
    large = [(6144, 4096), (4096, 4096), (4096, 12288), (12288, 4096), (8192, 8192), (5120, 25600), (2048, 16384)]
    cases = [(rows, *shape, gated) for rows in (3, 8, 16, 17, 32, 33, 64, 65, 128) for shape in large for gated in (False, True)]
    cases += [(rows, 1024, inner, False) for rows in (129, 193, 256) for inner in (2048, 3072)]
    cases += [(rows, *shape) for rows in (129, 193, 256) for shape in [(4096, 1024, False), (3072, 1024, True)]]
    for rows, outputs, inner, gated in cases:
        tiles = plan(rows, outputs, inner, 16, gated, gated, False)
        assert isinstance(tiles, Stream)
        for way in (tiles, tiles.late(gated)):
            held = way.bk * way.bn * (1 + gated) * max(way.early, 1) * way.stages + way.bk * way.bt * (way.early or way.stages)
            assert 2 * held <= 231_000
            assert way.stages >= (3 if way == tiles else 2)
        assert outputs // tiles.bn * tiles.split * -(-rows // tiles.bt) >= 90
        assert inner % (tiles.bk * tiles.split) == 0


def test_a_ring_fits_in_shared_memory() -> None:
    """With programs enough to keep memory busy, one a multiprocessor; other shapes have a stream."""
    shapes = [(4096, 4096), (4096, 12288), (12288, 4096), (8192, 8192), (5120, 25600), (2048, 16384), (6144, 4096), (5000, 4096)]
    found = []
    for outputs, inner in shapes:
        for gated in (False, True):
            tiles = plan(32, outputs, inner, 16, gated, gated, False, rings=True)
            if isinstance(tiles, Ring):
                found.append((outputs, inner, gated))
                held = tiles.bk * (tiles.bn * (1 + gated) * tiles.w_slots + tiles.bt * tiles.x_slots)
                assert 2 * held + 16 * (tiles.w_slots + tiles.x_slots) <= 232_448
                assert min(tiles.w_slots, tiles.x_slots) >= 2
                assert 90 <= outputs // tiles.bn * tiles.split <= 132
                assert outputs % tiles.bn == inner % (tiles.bk * tiles.split) == 0
            else:
                assert isinstance(tiles, Stream)
    assert {(4096, 4096, False), (4096, 12288, False), (12288, 4096, True)} <= set(found)


def test_a_wide_ring_fits_in_shared_memory_and_registers() -> None:
    """All programs run at once, and a thread of a group has room for its sums and what else there is, when its time has come."""
    found = set()
    shapes = [(outputs, inner) for outputs in range(4096, 16384, 8) for inner in (4096, 12288)]
    for (outputs, inner), rows, gated in product(shapes, (40, 100, 250), (False, True)):
        tiles = plan(rows, outputs, inner, 16, gated, gated, False, rings=True)
        if isinstance(tiles, Wide):
            found.add((rows, gated))
            assert 2 * tiles.slots * tiles.bk * (64 * tiles.groups + tiles.bt * tiles.tiles) + 16 * tiles.slots <= 232_448
            assert 90 <= -(-outputs // tiles.outputs(gated)) * tiles.split <= 132
            assert inner % (tiles.bk * tiles.split) == 0
            threads = 128 * (tiles.groups + 1)
            assert tiles.registers * threads <= 65_536
            assert 128 * (tiles.groups * tiles.later + 24) <= tiles.registers * threads
            assert tiles.later >= tiles.tiles * tiles.bt // 2 + 32
    assert found == {(40, False), (40, True), (100, True), (250, True)}


def test_a_device_without_dependent_launches_has_a_pipeline() -> None:
    assert Tiles(16, 128, 256, 4, 8, 1).pipelined() == Tiles(16, 128, 128, 4, 8, 3)
    assert Tiles(64, 64, 64, 4, 4, 6).pipelined() == Tiles(64, 64, 64, 4, 4, 6)
