"""The request table: structure of arrays on the device; a request keeps one row for its active life."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Column:
    """A column of the request table, declared by the feature that owns it.

    width: elements per row (1: the column's tensor is [rows], else [rows, width]). default: fills a row when the owner gives no value.
    seats: None for a plain column. A number for a seated one: that many lines exist (a capacity), a row holds the id of its seat
    or -1, and a request that needs a seat is admitted only when one is free.
    """

    name: str
    dtype: torch.dtype
    width: int = 1
    default: int | float = 0
    seats: int | None = None
