"""The Triton kernels: faster versions of the plain-torch operations and fusions, on NVIDIA GPUs."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from modelrunner.hookspecs import hookimpl

if TYPE_CHECKING:
    from modelrunner.device import Device
    from modelrunner.ops import Register

MODELRUNNER_API = ">=1,<2"
# The folders of `kernels/` with a gpu.py.
AREAS = ("table", "batch", "embedding", "norm", "activation", "linear", "rope", "attention", "logits", "logprobs", "sampling")


@hookimpl
def kernels(register: Register, device: Device) -> None:
    if device.type != "cuda":
        return
    try:
        import_module("triton")
    except ImportError:  # there is none outside Linux; the plain operations run
        return
    for area in AREAS:
        for name, function in import_module(f"modelrunner.kernels.{area}.gpu").OVERRIDES.items():
            register.override(name, function, device_type="cuda")
