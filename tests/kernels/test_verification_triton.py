"""The Triton kernels that verify drafts keep what the plain one keeps."""

from __future__ import annotations

import pytest
from triton_world import agree

pytest.importorskip("triton")
from modelrunner.kernels.verification import gpu, reference

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy of infinities, in the interpreter


def test_agrees_with_the_reference() -> None:
    agree("verify_drafts", gpu.OVERRIDES, {"verify_drafts": reference.verify_drafts})
