"""Requests that fork off one prompt: the first computes it, the others are held until they can share its pages."""

from __future__ import annotations

from dataclasses import dataclass, field

from modelrunner.request import Request
from modelrunner.waiting import Entry


@dataclass(eq=False)
class _Group:
    """leader: computes the prompt. ready: it has. held: who waits for it. alive: members that have not ended, held ones included."""

    leader: Request
    ready: bool = False
    alive: int = 1
    held: list[Entry] = field(default_factory=list)


class Forks:
    """Groups of requests by `Request.fork`. Each member is told to `add`, and to `ended`; the first token of each to `first_token`.

    What these return is to be queued. When a leader ends without having computed the prompt, the next one takes its place.
    """

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}

    def __len__(self) -> int:
        return sum(len(group.held) for group in self._groups.values())

    def add(self, entry: Entry) -> bool:
        """Whether the request is to be queued now; else it is held."""
        request = entry.request
        if request.fork is None:
            return True
        group = self._groups.get(request.fork)
        if group is None:
            self._groups[request.fork] = _Group(request)
            return True
        group.alive += 1
        if not group.ready:
            group.held.append(entry)
        return group.ready

    def first_token(self, request: Request) -> list[Entry]:
        """Its prompt has been computed."""
        group = self._groups.get(request.fork or "")
        if group is None or group.ready or group.leader is not request:
            return []
        group.ready = True
        held, group.held = group.held, []
        return held

    def is_held(self, request: Request) -> bool:
        group = self._groups.get(request.fork or "")
        return group is not None and any(entry.request is request for entry in group.held)

    def ended(self, request: Request) -> tuple[list[Entry], bool]:
        """A member ended. Also whether it was the last one of its group."""
        group = self._groups.get(request.fork or "")
        if group is None:
            return [], False
        group.alive -= 1
        group.held = [entry for entry in group.held if entry.request is not request]
        if not group.alive:
            del self._groups[request.fork or ""]
            return [], True
        if group.ready or group.leader is not request:
            return [], False
        group.leader, following = group.held[0].request, group.held[:1]
        del group.held[:1]
        return following, False

    def entries(self) -> list[Entry]:
        """All that are held."""
        return [entry for group in self._groups.values() for entry in group.held]
