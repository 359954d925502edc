"""Throughputs as a bar chart in one file: SVG, a page that holds it, or PNG. Needs nothing but numpy. Torch-free."""

from __future__ import annotations

import html
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from modelrunner.plugins.bench.pixel_font import HEIGHT, glyphs

if TYPE_CHECKING:
    from modelrunner.plugins.bench.measure import Result

WIDTH, MARGIN, LABELS, VALUES = 900, 20, 160, 270  # pixels; bars lie between the labels and the values
BAR, GAP, LINE = 22, 8, 30
INK, OURS, OTHERS = "#222222", "#2b6cb0", "#a0aec0"
TEXT_SIZE = 14
PIXEL = 2  # of the font, in pixels of the picture


@dataclass(frozen=True)
class Box:
    """A filled rectangle, in pixels from the upper left corner."""

    x: float
    y: float
    width: float
    height: float
    colour: str


@dataclass(frozen=True)
class Label:
    """Text that starts at x and is centred on y."""

    x: float
    y: float
    text: str


Shape = Box | Label


def draw(results: Sequence[Result], path: Path) -> None:
    """Write the chart in the form that the name asks for: .svg, .html or .png."""
    shapes, height = chart(results)
    if path.suffix == ".png":
        path.write_bytes(png(raster(shapes, height)))
        return
    picture = svg(shapes, height)
    if path.suffix == ".html":
        title = ", ".join(result.scenario.name for result in results)
        picture = f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>bench {html.escape(title)}</title>\n{picture}</html>\n'
    path.write_text(picture, encoding="utf-8")


def chart(results: Sequence[Result]) -> tuple[list[Shape], int]:
    """The shapes, and the picture's height. Each scenario has a scale of its own: its fastest engine fills the width."""
    shapes: list[Shape] = []
    y = MARGIN
    for result in results:
        setting = result.setting
        shapes.append(
            Label(MARGIN, y + LINE / 2, f"{result.scenario.name}: {Path(setting['model']).name}, {setting['dtype']}, {setting['linear']}")
        )
        y += LINE
        speeds = [timing.tokens_per_second(result.statistic) for timing in result.timings]
        for index, (timing, speed) in enumerate(zip(result.timings, speeds, strict=True)):
            width = (WIDTH - 2 * MARGIN - LABELS - VALUES) * speed / max(speeds)
            ours = "" if result.forms else "ours "
            ratio = f" ({ours}{result.comparison(timing)[1]:.2f}x)" if index else ""
            shapes.append(Label(MARGIN, y + BAR / 2, timing.engine))
            shapes.append(Box(MARGIN + LABELS, y, width, BAR, OTHERS if index else OURS))
            shapes.append(Label(MARGIN + LABELS + width + GAP, y + BAR / 2, f"{speed:.1f} tok/s{ratio}"))
            y += BAR + GAP
        y += GAP
    return shapes, y + MARGIN


def svg(shapes: Iterable[Shape], height: int) -> str:
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}">']
    lines.append(f'<rect width="100%" height="100%" fill="white"/><g font-family="sans-serif" font-size="{TEXT_SIZE}" fill="{INK}">')
    for shape in shapes:
        if isinstance(shape, Box):
            size = f'width="{shape.width:.1f}" height="{shape.height:.1f}"'
            lines.append(f'<rect x="{shape.x:.1f}" y="{shape.y:.1f}" {size} fill="{shape.colour}"/>')
        else:
            lines.append(f'<text x="{shape.x:.1f}" y="{shape.y:.1f}" dominant-baseline="central">{html.escape(shape.text)}</text>')
    return "\n".join([*lines, "</g></svg>\n"])


def raster(shapes: Iterable[Shape], height: int) -> npt.NDArray[np.uint8]:
    """[height, WIDTH, 3]. Text that does not fit is cut off at the edge."""
    image = np.full((height, WIDTH, 3), 255, np.uint8)
    for shape in shapes:
        if isinstance(shape, Box):
            x, y = round(shape.x), round(shape.y)
            image[y : y + round(shape.height), x : x + round(shape.width)] = rgb(shape.colour)
        else:
            dots = glyphs(shape.text).repeat(PIXEL, 0).repeat(PIXEL, 1)
            x, y = round(shape.x), round(shape.y - PIXEL * HEIGHT / 2)
            place = image[y : y + dots.shape[0], x : x + dots.shape[1]]
            place[dots[:, : place.shape[1]]] = rgb(INK)
    return image


def rgb(colour: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(colour[1:]))


def png(image: npt.NDArray[np.uint8]) -> bytes:
    """A PNG file (W3C recommendation, third edition) of 8-bit RGB: [height, width, 3]."""
    height, width, _ = image.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), image.reshape(height, -1)], 1)  # each row after its filter type, 0 for none

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows.tobytes())) + chunk(b"IEND", b"")
