"""How long each part of an engine's loop takes on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from modelrunner.engine import Engine

PARTS = ("plan", "launch", "collect", "commit")  # of a step; what is left is its rest


class Clock:
    """Inside its `with`, times the calls that make an engine's loop. entries: name -> nanoseconds of each call, in order."""

    def __init__(self, engine: Engine, now: Callable[[], int], hidden: Callable[[], int] = lambda: 0) -> None:
        """now: nanoseconds of some clock. hidden: nanoseconds so far that are not to count."""
        self.entries: dict[str, list[int]] = {name: [] for name in PARTS}
        self._now, self._hidden = now, hidden
        self._owners: dict[str, Any] = {
            "plan": engine.scheduler, "launch": engine.runner, "collect": engine.runner, "commit": engine.scheduler,
        }  # fmt: skip
        self._own: dict[str, Any] = {}

    def __enter__(self) -> Self:
        for name, owner in self._owners.items():
            if name in vars(owner):
                self._own[name] = vars(owner)[name]
            setattr(owner, name, self._timed(self.entries[name], getattr(owner, name)))
        return self

    def __exit__(self, *_: object) -> None:
        for name, owner in self._owners.items():
            if name in self._own:
                setattr(owner, name, self._own[name])
            else:
                delattr(owner, name)

    def _timed(self, entries: list[int], call: Callable[..., Any]) -> Callable[..., Any]:
        now, hidden = self._now, self._hidden

        def timed(*args: Any, **named: Any) -> Any:
            before, start = hidden(), now()
            result = call(*args, **named)
            entries.append(now() - start - (hidden() - before))
            return result

        return timed

    def clear(self) -> None:
        for entries in self.entries.values():
            entries.clear()


def split(clock: Clock, nanoseconds: int, steps: int) -> dict[str, float]:
    """Microseconds a step: of each part, of the rest, and in all. nanoseconds: that all the steps took."""
    parts = {name: sum(entries) / steps / 1000 for name, entries in clock.entries.items()}
    whole = nanoseconds / steps / 1000
    return {**parts, "rest": whole - sum(parts.values()), "step": whole}
