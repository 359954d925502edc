"""The products of a decode step, and the tiles that are worth a try for each: what `bench_products.py` sweeps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product as product_of

import torch

from modelrunner.kernels.linear.launch import RINGS as HAS_RINGS
from modelrunner.kernels.linear.plan import Gemv, Ring, Several, Stream, Tiles, Wide, plan

BYTES_PER_US = 4.29e6
Config = Gemv | Several | Tiles | Stream | Ring | Wide | None
RINGS = (115_500, 230_000)  # the same for rings
SHARED = (112_000, 224_000)  # bytes of shared memory that a program's pipeline may fill: with two programs a multiprocessor, and with one


@dataclass(frozen=True)
class Product:
    """kind: plain, norm, add or gated. outputs: of gate and up each."""

    name: str
    kind: str
    outputs: int
    inner: int

    @property
    def weight_shape(self) -> tuple[int, int]:
        return (self.outputs * (2 if self.kind == "gated" else 1), self.inner)

    @property
    def small(self) -> bool:
        """Whether all its weights fit into shared memory, of all multiprocessors together."""
        return self.weight_shape[0] * self.inner < 2**23

    @property
    def floor(self) -> float:
        return 2 * self.weight_shape[0] * self.inner / BYTES_PER_US


@dataclass(frozen=True)
class Model:
    name: str
    layers: int  # that are timed
    scale: float  # all layers over these
    products: tuple[Product, ...]  # qkv, o, gate_up, down, head


def model(name: str, layers: int, scale: float, hidden: int, heads: int, qkv: int, inner: int, vocab: int) -> Model:
    layer = (("qkv", "norm", qkv, hidden), ("o", "add", hidden, heads), ("gate_up", "gated", inner, hidden), ("down", "add", hidden, inner))
    return Model(name, layers, scale, tuple(Product(*shape) for shape in (*layer, ("head", "plain", vocab, hidden))))


MODELS = {
    "0.6b": model("0.6b", 28, 1, 1024, 2048, 4096, 3072, 151936),
    "8b": model("8b", 8, 36 / 8, 4096, 4096, 6144, 12288, 151936),
    "dry": model("dry", 2, 1, 64, 64, 96, 96, 128),
}
# bn, bk, warps
GEMVS = [(bn, bk, warps) for bk, warps in ((256, 1), (512, 1), (512, 2), (1024, 2), (1024, 4), (2048, 4)) for bn in (1, 2, 4, 8)]
# bn, bk, warps, stages (1: all weights held), fewest rows
TILES = [
    (64, 128, 4, 1, 1), (64, 256, 4, 1, 1), (128, 128, 8, 1, 1), (64, 128, 4, 3, 33), (64, 64, 4, 6, 33), (128, 64, 8, 4, 65),
    (32, 128, 4, 4, 65),
]  # fmt: skip
SPLITS = (1, 2, 4, 6, 8, 12)


def fits(config: Tiles, product: Product, rows: int) -> bool:
    """In shared memory and registers, with neither too few nor too many programs."""
    parts, norm = (2 if product.kind == "gated" else 1), product.kind in ("norm", "gated")
    programs = product.outputs // config.bn * config.split * -(-rows // config.bt)
    if product.inner % (config.bk * config.split) or not 60 <= programs <= 300:
        return False
    length = product.inner // config.split
    if config.stages == 1:
        held = 2 * config.bn * parts * length
        return length // config.bk <= 8 and held <= 132_000 and 2 * (config.bn * parts + config.bt) * length < 200_000
    return length >= 2 * config.bk and 2 * config.stages * config.bk * (config.bn * parts + config.bt * (1 + norm)) <= 200_000


def streams(product: Product, rows: int) -> Iterator[Stream]:
    """Tiles of `stream_kernel` in about one wave of programs, with a pipeline that fills half of the shared memory or all of it."""
    pair, bt = 2 if product.kind == "gated" else 1, min(128 if product.small else 256, max(16, 1 << (rows - 1).bit_length()))
    rows_of_tile = [bt, 64] if 128 < rows <= 192 else [bt]
    for bt, (bn, warps) in product_of(rows_of_tile, ((64, 4), (64, 8), (128, 8))):
        sums = pair * bn * bt // (warps * 32)  # that a thread keeps
        if sums > 128 or (warps == 8 and (bt < 64 or (sums < 64 and bn == 64))):
            continue
        for split, bk in product_of((1, 2, 3, 4, 8) if product.small else (1, 2, 3, 4), (64, 128, 256, 512)):
            programs = product.outputs // bn * split * -(-rows // bt)
            fine = bk * bn * pair >= 8192 or product.small
            if product.inner % (bk * split) == 0 and (48 if product.small else 90) <= programs <= 260 and fine:
                one = programs <= 132 or bt <= 32
                yield from _streams((bt, bn, bk, split, warps), product.inner, 2 * bk * bn * pair, 2 * bk * bt, one, sums)


def _streams(shape: tuple[int, int, int, int, int], inner: int, weights: int, x: int, one: bool, sums: int) -> Iterator[Stream]:
    """Pipelines for tiles of so many bytes, as deep as fits and is of use: x in it, or through registers. one: program a multiprocessor.

    Of those that fill before the input is there, half-size ones too: beside such a program there is room for the next product's.
    """
    steps = inner // (shape[2] * shape[3])
    if SHARED[one] // (weights + x) >= 2 <= steps:
        yield Stream(*shape, min(8, steps + 1, SHARED[one] // (weights + x)), max(256, shape[2]))
    for early in (1, 2):
        registers = sums + early * x // (128 * shape[4])
        for shared in SHARED[: 1 + one]:
            stages = (shared + 3000 * (1 + one) - early * x) // (early * weights)
            if registers <= 170 and stages >= min(4 - early, steps // early + 1) and steps % early == 0:
                yield Stream(*shape, min(12 // early, stages, steps // early + 1), early=early)


def several(product: Product, rows: int) -> Iterator[Several]:
    """Tiles of `several_kernel` whose weights and input fit in registers."""
    pair = 2 if product.kind == "gated" else 1
    for times, c, warps in product_of((1, 2, 4), (64, 128, 256), (1, 2, 4, 8)):
        tiles, programs = product.inner / (warps * c), product.outputs // (256 // c * times)
        held, given = 4 * pair * times * tiles, 4 * rows * tiles  # registers of a thread
        if tiles >= 1 and 16 <= held <= 64 and held + given <= 130 and 120 <= programs <= 1600:
            yield Several(times, c, warps)


def rings(product: Product, rows: int) -> Iterator[Ring]:
    """Rings that fill half of the shared memory, so that the next product's stand beside them, or all of it."""
    pair = 2 if product.kind == "gated" else 1
    for bt in {min(top, max(16, 1 << (rows - 1).bit_length())) for top in (128, 256)}:
        for (bn, warps), bk in product_of(((64, 4), (128, 4), (128, 8)), (64, 128, 256)):
            sums = pair * bn * bt // (warps * 32)
            if sums > 128 or (warps == 8 and bt < 64) or bk * bt > 2**14 or (bk == 64 and bt < 128 and pair == 1):
                continue
            for split, shared in product_of((1, 2, 3, 4, 6, 8), RINGS):
                programs = product.outputs // bn * split * -(-rows // bt)
                if product.inner % (bk * split) or not 90 <= programs <= 264:
                    continue
                weights, x = 2 * pair * bn * bk, 2 * bt * bk
                x_slots = min(4, max(2, shared // (weights + x))) if bt < 128 else shared // (weights + x)
                w_slots = min(12, (shared - x_slots * x) // weights)
                if x_slots >= 2 <= w_slots:
                    registers = (64 if sums <= 32 else 104 if sums <= 64 else 160) if warps == 8 or sums <= 64 else 168
                    yield Ring(bt, bn, bk, split, warps, w_slots, x_slots, registers)


def wides(product: Product, rows: int) -> Iterator[Wide]:
    """Wide rings that fill shared memory, or leave room for programs beside them, in about one wave."""
    bt, tiles = (min(128, max(16, 1 << (rows - 1).bit_length())), 1 if rows <= 128 else 2)
    for groups, bk, split in product_of((1, 2, 3), (64, 128, 256), (1, 2, 4, 6)):
        if product.inner % (bk * split) or (product.kind == "gated" and (split > 1 or product.outputs % 8)):
            continue
        most = RINGS[1] // (2 * bk * (64 * groups + bt * tiles))
        programs = -(-product.weight_shape[0] // (64 * groups)) * split * -(-rows // (bt * tiles))
        for slots in range(max(2, most - 1), most + 1) if 90 <= programs <= 132 else ():
            yield Wide(bt, tiles, groups, bk, split, slots, 128 if tiles == 2 else 96 if bt == 128 else 72)


def heads(rows: int) -> list[Config]:
    """For a head: many more programs than run at once."""
    if rows <= 4:
        return []
    bt = min(128, max(16, 1 << (rows - 1).bit_length()))
    shapes = [(64, 64, 4, 0), (64, 128, 4, 0), (64, 128, 4, 1), (128, 64, 4, 0), (128, 64, 8, 1), (128, 128, 8, 1), (256, 64, 8, 1)]
    return [
        Stream(bt, bn, bk, 1, warps, min(8, SHARED[place] // (2 * bk * (bn + bt))))
        for bn, bk, warps, place in shapes
        if bn * bt // (warps * 32) <= 128 and (warps == 4 or bt >= 64)
    ]


def candidates(product: Product, rows: int, only_streams: bool = False, only_few: bool = False) -> Iterator[Config]:
    """Configurations worth a try. only_streams: without those of `tile_kernel`, of many rows. only_few: of few rows alone."""
    if 2 <= rows <= 4:
        yield from several(product, rows)
    if only_few:
        yield from dict.fromkeys(default(product, many) for many in (3, 8))
        return
    if rows <= 4:
        for bn, bk, warps in GEMVS:
            registers = product.weight_shape[0] // product.outputs * bn * product.inner / (warps * 64)
            if bk <= product.inner and 24 <= registers <= 128 and 128 <= product.outputs // bn <= 1100:
                yield Gemv(bn, bk, warps)
        return
    if rows > 8 or not product.small:
        yield from streams(product, rows)
    if rows > 32 and not product.small and HAS_RINGS:
        yield from wides(product, rows)
    if product.weight_shape[0] * product.inner >= 2**26 or (only_streams and rows > 8):
        return
    for bt in {min(top, max(16, 1 << (rows - 1).bit_length())) for top in (32, 64)}:
        for bn, bk, warps, stages, least in TILES:
            tiles = [Tiles(bt, bn, bk, split, warps, stages) for split in SPLITS if rows >= least]
            yield from (config for config in tiles if fits(config, product, rows))


def variants(config: Config, product: Product) -> list[Config]:
    """Of the best: the norm apart, another early fetch."""
    if isinstance(config, Stream):
        if config.early:
            return [replace(config, stages=config.stages - 1)]
        return [replace(config, ahead=columns) for columns in (0, 512) if columns % config.bk == 0]
    if not isinstance(config, Tiles):
        return []
    apart = [replace(config, fused_norm=False)] if product.kind in ("norm", "gated") else []
    return [*apart, *([replace(config, warm=not config.warm)] if config.stages > 1 else [])]


def default(product: Product, rows: int) -> Config:
    rings = HAS_RINGS and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    return plan(rows, product.outputs, product.inner, 16, product.kind == "gated", product.kind in ("norm", "gated"), False, rings=rings)


def short(config: Config) -> str:
    if config is None:
        return "cuBLAS"
    if isinstance(config, Gemv):
        return f"gemv {config.bn}x{config.bk} w{config.warps}"
    if isinstance(config, Several):
        return f"several {config.times}x{256 // config.c} c{config.c} w{config.warps}"
    if isinstance(config, Stream):
        first = f"early {config.early}" if config.early else f"a{config.ahead}"
        return f"stream {config.bn}x{config.bk}/{config.split} t{config.bt} w{config.warps} s{config.stages} {first}"
    if isinstance(config, Wide):
        return f"wide {config.tiles}x{config.bt} g{config.groups} k{config.bk}/{config.split} s{config.slots} r{config.registers}"
    if isinstance(config, Ring):
        shape = f"{config.bn}x{config.bk}/{config.split} t{config.bt} w{config.warps}"
        return f"ring {shape} s{config.w_slots}+{config.x_slots} r{config.registers}"
    marks = ("" if config.fused_norm else " norm apart") + ("" if config.warm else " cold")
    return f"tile {config.bn}x{config.bk}/{config.split} t{config.bt} w{config.warps} s{config.stages}{marks}"
