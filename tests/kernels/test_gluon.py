"""Where the kernels in Gluon are used."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

ANOTHER_TRITON = """
import triton
from triton.experimental.gluon import language

def changed(*_, **__):
    raise ValueError("layouts are made otherwise")

triton.__version__, language.NVMMADistributedLayout = "{version}", changed
from modelrunner.kernels.attention import gpu as attention, ring_rows
from modelrunner.kernels.linear import gpu as linear, launch
print(ring_rows.RINGS, launch.RINGS, len(attention.BUILDS) > 30 and len(linear.BUILDS) > 10)
"""


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0", "4.0.0"])
def test_a_triton_that_was_not_tried_sees_none_of_them(version: str) -> None:
    """Its Gluon may have other names and refuse what others take; all else runs as before."""
    pytest.importorskip("triton")
    code = ANOTHER_TRITON.format(version=version)
    ran = subprocess.run([sys.executable, "-P", "-c", code], env=os.environ, capture_output=True, text=True, timeout=120, check=False)
    assert ran.stdout.split() == ["False", "False", "True"], ran.stderr
