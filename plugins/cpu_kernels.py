"""Faster ways of the CPU: small operations in one call, weights packed for its kernels, attention that knows how long each row is."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from modelrunner.hookspecs import hookimpl
from modelrunner.offers import Decline, Offer

if TYPE_CHECKING:
    from modelrunner.attention import AttentionBackend
    from modelrunner.checkpoint import ModelCard
    from modelrunner.device import Device
    from modelrunner.linear import LinearScheme
    from modelrunner.model_state import CacheGroup
    from modelrunner.ops import Register
    from modelrunner.settings import RunnerSettings

MODELRUNNER_API = ">=1,<2"
HALF = ("bfloat16", "float16")
# The folders of `kernels/` with overrides in a cpu.py.
AREAS = ("norm", "linear", "rope", "automata")


@hookimpl
def kernels(register: Register, device: Device) -> None:
    if device.type != "cpu":
        return
    for area in AREAS:
        for name, function in import_module(f"modelrunner.kernels.{area}.cpu").OVERRIDES.items():
            register.override(name, function, device_type="cpu")


@hookimpl
def linear_scheme(card: ModelCard, device: Device, settings: RunnerSettings) -> list[Offer[type[LinearScheme]] | Decline] | None:
    if device.type != "cpu":
        return None
    if card.quantization is not None:
        return [Decline("packed weights are made from float weights")]
    return [_packed_floats(settings), _packed_integers()]


def _packed_floats(settings: RunnerSettings) -> Offer[type[LinearScheme]] | Decline:
    """`packed` for the model's type: FBGEMM's products with 16-bit weights, oneDNN's with 32-bit ones, which a CPU takes unasked."""
    from modelrunner.kernels.linear import fbgemm, onednn

    plain = frozenset({"plain"})
    if settings.model.dtype in HALF:
        problem, load, reason = fbgemm.problem(), _half, "16-bit weights packed for the CPU"
    elif settings.scheduler.max_rows == 1:
        return Decline("packed: a single row (scheduler.max_rows is 1) is faster with float32 weights in their own order")
    else:
        problem, load, reason = onednn.problem(), _float, "large float32 weights packed for the CPU"
    return Offer("packed", load, "family", reason, plain) if problem is None else Decline(f"packed: {problem}")


def _packed_integers() -> Offer[type[LinearScheme]] | Decline:
    from modelrunner.kernels.linear import fbgemm

    if problem := fbgemm.problem():
        return Decline(f"int8: {problem}")
    return Offer("int8", _int8, "fallback", "8-bit weights packed for the CPU, integer products", frozenset({"int8"}))


@hookimpl
def attention_backend(group: CacheGroup, device: Device, settings: RunnerSettings) -> Offer[type[AttentionBackend]] | Decline | None:
    from modelrunner.model_state import FullAttention

    if device.type != "cpu":
        return None
    if not isinstance(group, FullAttention):
        return Decline(f"rows: runs FullAttention and SlidingWindow groups, not {type(group).__name__}")
    if group.softcap is not None or group.sinks:
        return Decline("rows: has no softcap and no sinks")
    if settings.cache.dtype == "float8_e4m3fn":
        return Decline("rows: cache.dtype is float8_e4m3fn, and it applies no scales; paged does")
    return Offer("rows", _rows, "family", "rows of about one length together; lengths are read by the host", frozenset({"paged"}))


def _rows() -> type[AttentionBackend]:
    from modelrunner.backends.rows import RowAttention

    return RowAttention


def _half() -> type[LinearScheme]:
    from modelrunner.packed_scheme import PackedHalfScheme

    return PackedHalfScheme


def _float() -> type[LinearScheme]:
    from modelrunner.packed_scheme import PackedFloatScheme

    return PackedFloatScheme


def _int8() -> type[LinearScheme]:
    from modelrunner.packed_scheme import PackedInt8Scheme

    return PackedInt8Scheme
