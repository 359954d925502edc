"""The Triton operations of speculative decoding against their references, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from triton_world import agree

from modelrunner.kernels.speculation import reference
from modelrunner.kernels.speculation.gpu import OVERRIDES

REFERENCES: dict[str, Callable[..., Any]] = {name: getattr(reference, name) for name in OVERRIDES}


@pytest.mark.parametrize("op", OVERRIDES)
def test_conformance_cases(op: str) -> None:
    agree(op, OVERRIDES, REFERENCES)
