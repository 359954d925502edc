"""The kernels of byte automata, on GPUs and on CPUs, give what the plain ones give."""

from __future__ import annotations

import pytest
from triton_world import ON_GPU, agree

pytest.importorskip("triton")
from modelrunner.kernels.automata import cpu, gpu, reference

REFERENCES = {name: getattr(reference, name) for name in gpu.OVERRIDES}


@pytest.mark.parametrize("op", sorted(gpu.OVERRIDES))
def test_agrees_with_the_reference(op: str) -> None:
    agree(op, gpu.OVERRIDES, REFERENCES)


@pytest.mark.skipif(ON_GPU, reason="for tensors on the CPU")
@pytest.mark.parametrize("op", sorted(cpu.OVERRIDES))
def test_the_cpus_form_agrees_with_the_reference(op: str) -> None:
    agree(op, cpu.OVERRIDES, REFERENCES)
