"""FlashAttention 3 (Shah et al. 2024, arXiv:2407.08608) for prompts, from the package fa3-fwd: `pip install 'modelrunner[fa3]'`."""

from __future__ import annotations

from importlib import import_module
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
HOPPER = 9  # major compute capability
MAX_HEAD_DIM = 256


def _load() -> type[AttentionBackend]:
    from modelrunner.backends.flash_attention3 import FlashAttention3

    return FlashAttention3


@hookimpl
def attention_backend(group: CacheGroup, device: Device, settings: RunnerSettings) -> Offer[type[AttentionBackend]] | Decline:
    from modelrunner.model_state import FullAttention

    if not isinstance(group, FullAttention):
        return Decline(f"flash_attention3: runs FullAttention groups, not {type(group).__name__}")
    problem = group_problem(group) or types_problem(settings) or place_problem(device)
    if problem:
        return Decline(f"flash_attention3: {problem}")
    reason = "prompts by FlashAttention 3, decoding as paged"
    return Offer("flash_attention3", _load, "family", reason, replaces=frozenset({"paged"}))


def group_problem(group: FullAttention) -> str:
    """Why it cannot serve the group, as the package was built; empty if it can."""
    if group.window is not None:
        return "it takes no sliding windows"
    if group.sinks:
        return "it takes no attention sinks"
    if group.head_dim % 8 or group.head_dim > MAX_HEAD_DIM:
        return f"head_dim is {group.head_dim}; it takes multiples of 8 up to {MAX_HEAD_DIM}"
    if find_spec("fa3_fwd_interface") is None:
        return "package fa3-fwd is not installed; pip install 'modelrunner[fa3]'"
    built: dict[str, bool] = import_module("fa3_fwd_config").CONFIG["build_flags"]
    if group.softcap is not None and built["FLASHATTENTION_DISABLE_SOFTCAP"]:
        return "the installed fa3-fwd was built without softcap"
    return ""


def types_problem(settings: RunnerSettings) -> str:
    """Why it cannot serve the mode, or the types of queries and cache. It computes in float16 too, but fa3-fwd is built without."""
    if settings.device.deterministic:
        return "device.deterministic is set; a prompt's rows would not be computed as decode rows are"
    if settings.model.dtype not in ("auto", "bfloat16"):
        return f"model.dtype is {settings.model.dtype!r}; it takes bfloat16"
    if settings.cache.dtype not in ("auto", "bfloat16"):
        return f"cache.dtype is {settings.cache.dtype!r}; it takes bfloat16"
    return ""


def place_problem(device: Device) -> str:
    """Why it cannot run on the device."""
    if device.type != "cuda":
        return f"device {device.name!r} is no NVIDIA GPU"
    import torch

    major, minor = torch.cuda.get_device_capability(device.torch_device)
    return "" if major == HOPPER else f"device {device.name!r} has compute capability {major}.{minor}; it runs on Hopper, {HOPPER}.0"
