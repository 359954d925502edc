"""The Triton kernels for log-probs give what the plain ones give."""

from __future__ import annotations

import pytest
from triton_world import agree

pytest.importorskip("triton")
from modelrunner.kernels.logprobs import gpu, reference

REFERENCES = {name: getattr(reference, name) for name in gpu.OVERRIDES}


@pytest.mark.parametrize("op", sorted(gpu.OVERRIDES))
def test_agrees_with_the_reference(op: str) -> None:
    agree(op, gpu.OVERRIDES, REFERENCES)
