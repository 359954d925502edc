"""Products by rings, which no interpreter runs, against float64 and against the kernel that takes their place elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
from modelrunner.kernels.activation.reference import silu_mul
from modelrunner.kernels.linear import launch
from modelrunner.kernels.linear.gpu import OVERRIDES
from modelrunner.kernels.linear.launch import Extras
from modelrunner.kernels.linear.plan import Ring, Stream, Wide
from modelrunner.kernels.norm.reference import rms_norm
from modelrunner.kernels.room import roomy, rows_with_room

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9"),
    pytest.mark.skipif(not launch.RINGS, reason="rings are not written for this Triton's Gluon"),
]

RINGS = [
    Ring(16, 64, 128, 1, 4, 5, 4, 64),
    Ring(32, 64, 256, 2, 4, 2, 2, 64),
    Ring(32, 64, 128, 2, 4, 5, 2, 64, requests=1),
    Ring(16, 64, 64, 4, 4, 7, 3, 64, requests=2),
    Ring(32, 128, 64, 4, 4, 3, 2, 104),
    Ring(64, 64, 64, 2, 4, 2, 3, 104),
    Ring(128, 128, 64, 1, 8, 3, 2, 160),
]

WIDE = [
    Wide(32, 1, 1, 256, 1, 4, 64),
    Wide(64, 1, 2, 128, 2, 4, 96),
    Wide(128, 1, 3, 64, 1, 5, 96),
    Wide(128, 1, 3, 64, 4, 2, 128),
    Wide(128, 2, 2, 64, 1, 4, 168),
    Wide(128, 2, 3, 64, 2, 4, 128),
]


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every buffer that a launcher takes is NaN: what a kernel does not write is seen."""
    monkeypatch.setattr(torch, "empty", lambda *size, **kw: torch.full(*size, float("nan"), **kw))


def noise(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") * scale).bfloat16()


def product(x: torch.Tensor, weight: torch.Tensor, extras: Extras) -> torch.Tensor:
    """The same in float64."""
    wide = x.double()
    if extras.norm is not None:
        wide = rms_norm(wide, extras.norm.double(), extras.eps)
    out = wide @ weight.double().T
    out = silu_mul(out) if extras.act else out
    return out if extras.residual is None else out + extras.residual.double()


@pytest.mark.parametrize("rows", [1, 15, 32, 100, 200])
@pytest.mark.parametrize("kind", ["plain", "norm", "add", "gated"])
@pytest.mark.parametrize("tiles", [*RINGS, *WIDE], ids=str)
def test_rings(tiles: Ring | Wide, kind: str, rows: int) -> None:
    """Few steps and many, more rows than a tile has, outputs that fill no last tile, input and residual that are slices."""
    if isinstance(tiles, Wide) and kind == "gated":
        tiles = replace(tiles, split=1)  # its sums of gate and up have no parts
    for outputs, inner in ((256, 1024), (416, 2560)):
        x, residual = noise(rows, inner + 64)[:, 64:], noise(rows, outputs + 8)[:, 8:]
        weight = noise(outputs * (2 if kind == "gated" else 1), inner, scale=inner**-0.5)
        norm = 1 + noise(inner, scale=0.2) if kind in ("norm", "gated") else None
        extras = Extras(norm=norm, eps=1e-5, act=int(kind == "gated"), residual=residual if kind == "add" else None)
        want = product(x, weight, extras)
        got = launch.run(tiles, x, weight, extras)
        assert float((got.double() - want).norm() / want.norm()) < 6e-3
        stream = launch.run(Stream(min(tiles.bt, 64), 64, 64, tiles.split, 4, 3), x, weight, extras)
        assert float((got.double() - stream.double()).norm() / want.norm()) < 6e-3


@pytest.mark.parametrize("rows", [9, 72, 130])
@pytest.mark.parametrize("tiles", [*RINGS[1:5:3], *WIDE[::2], Stream(128, 64, 64, 2, 4, 3, 256)], ids=str)
def test_what_lies_behind_the_rows_is_not_seen(tiles: Ring | Wide | Stream, rows: int) -> None:
    """Memory up to the tile's end, which is read instead of filled in, is NaN."""
    memory, weight = roomy((rows, 1024), torch.bfloat16, torch.device("cuda")), noise(512, 1024, scale=0.03)
    x = memory.copy_(noise(rows, 1024))
    assert rows_with_room(x, 128) == 128 * -(-rows // 128) or rows == 9
    for extras in (Extras(), Extras(residual=noise(rows, 512))):
        got = launch.run(tiles, x, weight, extras)
        assert torch.equal(got, launch.run(tiles, x.clone(), weight, extras))
        assert not got.isnan().any()


@pytest.mark.parametrize("tiles", [Stream(32, 64, 128, 4, 4, 3), Stream(128, 64, 64, 2, 4, 3, 256)], ids=str)
def test_parts_that_stay_in_the_cache_are_the_same(tiles: Stream) -> None:
    """Sums of the same parts in the same order, whichever way these were stored; rows and outputs that fill no last tile."""
    x, residual, weight, kept = noise(13, 1024), noise(13, 992), noise(992, 1024, scale=0.03), replace(tiles, keep=True)
    extras = Extras(residual=residual)
    assert torch.equal(launch.run(kept, x, weight, extras), launch.run(tiles, x, weight, extras))
    gated = replace(extras, residual=None, act=1)
    got = launch.run(kept, x, weight, gated)
    assert float((got.double() - product(x, weight, gated)).norm() / got.double().norm()) < 6e-3


def assert_the_same_each_time(first: Callable[[], None], work: Callable[[], None], out: torch.Tensor) -> None:
    """What a graph of `work` writes to `out`, fifty times, is what `first` wrote."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        first()
    torch.cuda.synchronize()
    want = out.clone()
    assert float(want.norm()) > 0
    with torch.cuda.graph(graph, stream=stream):
        work()
    for _ in range(50):
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, want)


@pytest.mark.parametrize("tiles", [RINGS[1], WIDE[1], WIDE[5]], ids=str)
def test_a_chain_in_a_graph_is_the_same_each_time(tiles: Ring | Wide) -> None:
    """Weights of the next product are on their way while one still runs; what it reads as input must have been written."""
    weights = [noise(1024, 1024, scale=0.03) for _ in range(12)]
    x, out = noise(32, 1024), torch.zeros(32, 1024, dtype=torch.bfloat16, device="cuda")

    def chain() -> None:
        y = x
        for place, weight in enumerate(weights):
            y = launch.run(replace(tiles, split=1 + place % 2), y, weight, Extras(residual=x))
        out.copy_(y)

    assert_the_same_each_time(chain, chain, out)


@pytest.mark.parametrize("rows", [4, 40])
def test_norms_between_products_are_the_same_each_time(rows: int) -> None:
    """Of few rows, products start once their norm does; of more, before it."""
    weights = [noise(4096, 4096, scale=0.02) for _ in range(8)]
    x, norm, out = noise(rows, 4096), 1 + noise(4096, scale=0.2), torch.zeros(rows, 4096, dtype=torch.bfloat16, device="cuda")

    def chain(wait: bool = False) -> None:
        y = x
        for weight in weights:
            y = OVERRIDES["norm_matmul"](y, norm, 1e-5, weight)
            if wait:
                torch.cuda.synchronize()
        out.copy_(y)

    assert_the_same_each_time(lambda: chain(wait=True), chain, out)
