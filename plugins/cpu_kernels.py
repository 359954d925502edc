"""Faster ways of the CPU: linear weights packed for its kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelrunner.hookspecs import hookimpl
from modelrunner.offers import Decline, Offer

if TYPE_CHECKING:
    from modelrunner.checkpoint import ModelCard
    from modelrunner.device import Device
    from modelrunner.linear import LinearScheme
    from modelrunner.settings import RunnerSettings

MODELRUNNER_API = ">=1,<2"
HALF = ("bfloat16", "float16")


@hookimpl
def linear_scheme(card: ModelCard, device: Device, settings: RunnerSettings) -> list[Offer[type[LinearScheme]] | Decline] | None:
    if device.type != "cpu":
        return None
    from modelrunner.kernels.linear import fbgemm

    if card.quantization is not None:
        return [Decline("packed weights are made from float weights")]
    if problem := fbgemm.problem():
        return [Decline(problem)]
    answers: list[Offer[type[LinearScheme]] | Decline] = [
        Offer("int8", _int8, "fallback", "8-bit weights packed for the CPU, integer products", frozenset({"int8"}))
    ]
    if settings.model.dtype in HALF:
        answers.append(Offer("packed", _half, "family", "16-bit weights packed for the CPU", frozenset({"plain"})))
    else:
        answers.append(Decline(f"packed weights have 16 bits ({' or '.join(HALF)}); model.dtype is {settings.model.dtype}"))
    return answers


def _half() -> type[LinearScheme]:
    from modelrunner.packed_scheme import PackedHalfScheme

    return PackedHalfScheme


def _int8() -> type[LinearScheme]:
    from modelrunner.packed_scheme import PackedInt8Scheme

    return PackedInt8Scheme
