"""Offers: how a plugin bids to supply a component, and what the core does with the bids.

A hook collects one answer from every plugin; the core chooses. Nothing here imports torch, so that listing plugins stays quick.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

T = TypeVar("T")

Fit = Literal["exact", "family", "fallback"]
RANK: dict[str, int] = {"exact": 0, "family": 1, "fallback": 2}


@dataclass(frozen=True)
class Offer(Generic[T]):
    """A bid to supply a component.

    name: what `pin.<hook>` selects it by; unique among the offers of one hook.
    load: called once, only when the offer is chosen; heavy imports belong inside it.
    fit: how closely it was made for the request: `exact` (this very thing), `family` (this kind of thing), `fallback` (almost anything).
    reason: one line for `modelrunner explain`.
    replaces: names of offers that this one beats at equal fit.
    """

    name: str
    load: Callable[[], T]
    fit: Fit = "exact"
    reason: str = ""
    replaces: frozenset[str] = field(default_factory=frozenset)

    def __post_init__(self) -> None:
        if self.fit not in RANK:
            raise ValueError(f"Offer {self.name!r}: fit is {self.fit!r}; accepted are {sorted(RANK, key=RANK.__getitem__)}")


@dataclass(frozen=True)
class Decline:
    """A plugin's no.

    reason: one line that `modelrunner explain` and the error shown when nothing fits repeat.
    accepts: names that the plugin would have said yes to, e.g. architectures; misspelt names are compared with them.
    """

    reason: str
    accepts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.accepts, str):
            raise TypeError(f"Decline: accepts is {self.accepts!r}; a tuple of names is needed, e.g. ({self.accepts!r},)")


Answer = Offer[Any] | Decline | Sequence[Offer[Any] | Decline] | None
"""What a component hook may return. A plugin that supplies several components of one kind answers with a sequence."""
