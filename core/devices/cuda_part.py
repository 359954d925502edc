"""Streams on a part of a GPU's multiprocessors: green contexts (CUDA 12.4 and later), by the driver's C interface.

Work on such a stream leaves the other multiprocessors alone, so that what another stream launches meanwhile starts there at once, where it
would wait for blocks that run. Memory and loaded kernels are those of the process' usual context.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch

RESOURCE_BYTES, COUNT_AT = 144, 96  # of the driver's CUdevResource: its size, and where the number of multiprocessors stands
MULTIPROCESSORS = 1  # CU_DEV_RESOURCE_TYPE_SM
WITH_STREAMS = 1  # CU_GREEN_CTX_DEFAULT_STREAM, which is demanded
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING


class NoParts(Exception):
    """The driver does not part this GPU; says why."""


def part_stream(device: torch.device, share: float) -> tuple[torch.cuda.Stream, int]:
    """A stream of the lowest priority on about `share` of the multiprocessors, more than 0 to 1, and how many these are. It stays until
    the process ends. Raises NoParts.

    The count is rounded up to what the GPU can part, eight on Hopper.
    """
    context, count = _part(device.index or 0, share)
    stream = ctypes.c_void_p()
    _call("cuGreenCtxStreamCreate", ctypes.byref(stream), context, NON_BLOCKING, 0)
    assert stream.value is not None, "the driver made a stream"
    return torch.cuda.ExternalStream(stream.value, device), count


@cache
def _part(index: int, share: float) -> tuple[ctypes.c_void_p, int]:
    """A green context, made once a process, and its multiprocessors. The primary context must be there."""
    number = ctypes.c_int()
    _call("cuDeviceGet", ctypes.byref(number), index)
    every, part, rest = (ctypes.create_string_buffer(RESOURCE_BYTES) for _ in range(3))
    _call("cuDeviceGetDevResource", number, ctypes.byref(every), MULTIPROCESSORS)
    groups, wanted = ctypes.c_uint(1), max(1, int(share * _count(every)))
    _call("cuDevSmResourceSplitByCount", ctypes.byref(part), ctypes.byref(groups), ctypes.byref(every), ctypes.byref(rest), 0, wanted)
    described, context = ctypes.c_void_p(), ctypes.c_void_p()
    _call("cuDevResourceGenerateDesc", ctypes.byref(described), ctypes.byref(part), 1)
    _call("cuGreenCtxCreate", ctypes.byref(context), described, number, WITH_STREAMS)
    return context, _count(part)


def _count(resource: ctypes.Array[ctypes.c_char]) -> int:
    return int.from_bytes(resource.raw[COUNT_AT : COUNT_AT + 4], "little")


def _call(name: str, *arguments: object) -> None:
    try:
        code = getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments)
    except (OSError, AttributeError) as error:
        raise NoParts(f"the driver has no {name}: {error}") from error
    if code:
        raise NoParts(f"{name} gave error {code} of the driver")
