"""What the attention kernels' launchers ask of a device. Off CUDA the kernels run in Triton's interpreter."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

INTERPRETED_PROCESSORS = 3  # few, so that every program has several units of work


@lru_cache(maxsize=16)
def processors(device: torch.device) -> int:
    """Multiprocessors of a device: persistent kernels start a few programs for each."""
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@lru_cache(maxsize=16)
def dependent_launch(device: torch.device) -> bool:
    """Whether kernels may start while their predecessor runs (programmatic dependent launch, from Hopper on)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


@lru_cache(maxsize=16)
def launch_options(device: torch.device) -> dict[str, Any]:
    """Keyword arguments of a launch with programmatic dependence, where there is any. The kernel gets PDL as a constant."""
    pdl = dependent_launch(device)
    return {"PDL": pdl, "launch_pdl": True} if pdl else {"PDL": False}


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
