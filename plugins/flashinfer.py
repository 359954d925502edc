"""FlashInfer (Ye et al. 2025, arXiv:2501.01005) for prompts and decode rows: `pip install 'modelrunner[flashinfer]'`, and pin it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from modelrunner.hookspecs import hookimpl
from modelrunner.offers import Decline, Offer

if TYPE_CHECKING:
    from modelrunner.attention import AttentionBackend
    from modelrunner.device import Device
    from modelrunner.model_state import CacheGroup, FullAttention
    from modelrunner.settings import RunnerSettings

MODELRUNNER_API = ">=1,<2"
LEAST_CAPABILITY = (8, 0)
HEAD_DIMS = (64, 128, 256)
TYPES = ("auto", "bfloat16", "float16")


def _load() -> type[AttentionBackend]:
    from modelrunner.backends.flashinfer import FlashInfer

    return FlashInfer


@hookimpl
def attention_backend(group: CacheGroup, device: Device, settings: RunnerSettings) -> Offer[type[AttentionBackend]] | Decline:
    from modelrunner.model_state import FullAttention

    if not isinstance(group, FullAttention):
        return Decline(f"flashinfer: runs FullAttention groups, not {type(group).__name__}")
    problem = group_problem(group) or types_problem(settings) or place_problem(device)
    if problem:
        return Decline(f"flashinfer: {problem}")
    return Offer("flashinfer", _load, "fallback", "prompts and decode rows by FlashInfer; only if pinned")


def group_problem(group: FullAttention) -> str:
    """Why it does not serve the group; empty if it does. FlashInfer has kernels with windows and softcap too; none is used here."""
    if group.window is not None:
        return "it takes no sliding windows"
    if group.softcap is not None:
        return "it takes no softcap"
    if group.sinks:
        return "it takes no attention sinks"
    if group.head_dim not in HEAD_DIMS:
        return f"head_dim is {group.head_dim}; it takes {', '.join(map(str, HEAD_DIMS))}"
    if find_spec("flashinfer") is None:
        return "package flashinfer-python is not installed; pip install 'modelrunner[flashinfer]'"
    return ""


def types_problem(settings: RunnerSettings) -> str:
    """Why it cannot serve the types of queries and cache, which must be the same."""
    model, cache = settings.model.dtype, settings.cache.dtype
    if model not in TYPES:
        return f"model.dtype is {model!r}; it takes bfloat16 and float16"
    if cache not in ("auto", model if model != "auto" else "bfloat16"):
        return f"cache.dtype is {cache!r} and model.dtype {model!r}; it takes a cache of the model's type"
    return ""


def place_problem(device: Device) -> str:
    """Why it cannot run on the device."""
    if device.type != "cuda":
        return f"device {device.name!r} is no NVIDIA GPU"
    import torch

    found = torch.cuda.get_device_capability(device.torch_device)
    least, has = (".".join(map(str, pair)) for pair in (LEAST_CAPABILITY, found))
    return "" if found >= LEAST_CAPABILITY else f"device {device.name!r} has compute capability {has}; it runs from {least} on"
