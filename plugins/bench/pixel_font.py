"""Capitals, digits and a few signs of 5 x 7 dots, for pictures made without a graphics library. Torch-free."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

WIDTH, HEIGHT = 5, 7
SPACING = 1
UNKNOWN = "7F4141417F"  # a box
# A glyph's columns from left to right, one byte each; bit 0 is the top dot.
COLUMNS = {
    " ": "0000000000", ".": "0060600000", ",": "0050300000", ":": "0036360000", "-": "0808080808", "_": "4040404040",
    "/": "2010080402", "(": "001C224100", ")": "0041221C00", "+": "08083E0808", "=": "1414141414",
    "0": "3E5149453E", "1": "00427F4000", "2": "4261514946", "3": "2141454B31", "4": "1814127F10",
    "5": "2745454539", "6": "3C4A494930", "7": "0171090503", "8": "3649494936", "9": "064949291E",
    "A": "7E1111117E", "B": "7F49494936", "C": "3E41414122", "D": "7F4141221C", "E": "7F49494941", "F": "7F09090901",
    "G": "3E4149497A", "H": "7F0808087F", "I": "00417F4100", "J": "2040413F01", "K": "7F08142241", "L": "7F40404040",
    "M": "7F020C027F", "N": "7F0408107F", "O": "3E4141413E", "P": "7F09090906", "Q": "3E4151215E", "R": "7F09192946",
    "S": "4649494931", "T": "01017F0101", "U": "3F4040403F", "V": "1F2040201F", "W": "3F4038403F", "X": "6314081463",
    "Y": "0708700807", "Z": "6151494543",
}  # fmt: skip


def glyphs(text: str) -> npt.NDArray[np.bool_]:
    """The text in capitals as dots: [HEIGHT, (WIDTH + SPACING) * characters]. A character that the font lacks is a box."""
    columns = [bytes.fromhex(COLUMNS.get(character, UNKNOWN)) + bytes(SPACING) for character in text.upper()]
    packed = np.frombuffer(b"".join(columns), np.uint8)
    return (packed[None, :] >> np.arange(HEIGHT, dtype=np.uint8)[:, None] & 1).astype(np.bool_)
