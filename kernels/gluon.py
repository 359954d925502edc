"""Gluon, Triton's language of explicit layouts and copies, is experimental: our kernels in it are for versions that compiled them."""

from __future__ import annotations

import triton

TRIED = (3, 6), (3, 9)  # first and last version


def require_tried() -> None:
    """Raise ImportError with another Triton: to be called before a module with such kernels is imported, which it might not even read."""
    if not TRIED[0] <= tuple(int(part) for part in triton.__version__.split(".")[:2]) <= TRIED[1]:
        raise ImportError(f"no kernel in Gluon was compiled by Triton {triton.__version__}")
