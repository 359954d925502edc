"""What the area `embedding` gives to CUDA devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from modelrunner.kernels.builds import Build

OVERRIDES: dict[str, Callable[..., Any]] = {}
BUILDS: list[Build] = []
