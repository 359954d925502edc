"""The built-in devices: the CPU, the deferred CPU for tests, and CUDA."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from modelrunner.hookspecs import hookimpl
from modelrunner.offers import Decline, Offer

if TYPE_CHECKING:
    from modelrunner.device import Device
    from modelrunner.settings import Section

MODELRUNNER_API = ">=1,<2"


def _cpu() -> type[Device]:
    from modelrunner.devices.cpu import CpuDevice

    return CpuDevice


def _deferred_cpu() -> type[Device]:
    from modelrunner.devices.deferred import DeferredCpuDevice

    return DeferredCpuDevice


def _cuda() -> type[Device]:
    from modelrunner.devices.cuda import CudaDevice

    return CudaDevice


@hookimpl
def settings_sections() -> Mapping[str, type[Section]]:
    from modelrunner.devices.settings import DeferredCpuSettings

    return {"deferred_cpu": DeferredCpuSettings}


@hookimpl
def device() -> list[Offer[type[Device]] | Decline]:
    import torch

    cuda: Offer[type[Device]] | Decline
    if torch.cuda.is_available():
        cuda = Offer("cuda", _cuda, fit="exact", reason=f"torch sees {torch.cuda.get_device_name()}")
    else:
        cuda = Decline(f"cuda: torch {torch.__version__} sees no NVIDIA GPU")
    return [
        cuda,
        Offer("cpu", _cpu, fit="family", reason="every host has one"),
        Offer("deferred_cpu", _deferred_cpu, fit="fallback", reason="runs work late on purpose, to show races; for tests"),
    ]
