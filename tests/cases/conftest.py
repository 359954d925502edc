"""Where a case runs: on the CPU, and on an NVIDIA GPU if there is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")])


@pytest.fixture(params=["deferred_cpu", GPU])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of the device of a case's engine, in float32."""
    monkeypatch.setenv("MODELRUNNER_MODEL__DTYPE", "float32")
    name: str = request.param
    return name


@pytest.fixture(params=["cpu", GPU])
def sample(request: pytest.FixtureRequest) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The operation `sample` as a function of tensors on the CPU: the reference, or a GPU's kernels."""
    if request.param == "cpu":
        from modelrunner.kernels.sampling import sample

        return sample
    from modelrunner.kernels.sampling.gpu import OVERRIDES

    def on_gpu(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        moved = [value.contiguous().cuda() if isinstance(value, torch.Tensor) else value for value in arguments]
        tokens, ok = OVERRIDES["sample"](*moved)
        return tokens.cpu(), ok.cpu()

    return on_gpu
