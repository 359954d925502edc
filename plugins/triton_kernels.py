"""The Triton kernels: faster versions of the plain-torch operations and fusions, on NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from modelrunner.errors import PluginError
from modelrunner.hookspecs import hookimpl

if TYPE_CHECKING:
    from modelrunner.device import Device
    from modelrunner.ops import Register

MODELRUNNER_API = ">=1,<2"
# The folders of `kernels/` with a gpu.py.
AREAS = (
    *("table", "batch", "embedding", "norm", "activation", "linear", "rope", "attention", "logits", "logprobs", "sampling"),
    *("automata", "speculation", "verification"),
)


@hookimpl
def kernels(register: Register, device: Device) -> None:
    if device.type != "cuda":
        return
    try:
        import_module("triton")
    except ImportError as error:  # there is none outside Linux; the plain operations run
        if device.settings.device.deterministic:
            raise PluginError("device.deterministic is set, but its kernels are written in Triton, which is not there") from error
        return
    for area in AREAS:
        for name, function in overrides(area, device.settings.device.deterministic).items():
            register.override(name, function, device_type="cuda")


def overrides(area: str, deterministic: bool) -> Mapping[str, Callable[..., Any]]:
    """Operations of an area. deterministic: those whose results for a row do not depend on the other rows; the rest run as plain chains."""
    module = import_module(f"modelrunner.kernels.{area}.gpu")
    found: Mapping[str, Callable[..., Any]] = getattr(module, "FIXED", module.OVERRIDES) if deterministic else module.OVERRIDES
    return found
