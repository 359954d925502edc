"""Requests that fork off one prompt: the first computes it, the others are held until they can share its pages."""

from __future__ import annotations

from dataclasses import dataclass, field

from modelrunner.request import Request
from modelrunner.waiting import Entry


@dataclass(eq=False)
class _Group:
    """leader: computes the prompt, None until one may. ready: it has been computed. held: who waits for it. alive: members that have not
    ended."""

    leader: Request | None = None
    ready: bool = False
    alive: int = 0
    held: list[Entry] = field(default_factory=list)


class Forks:
    """Groups of requests by `Request.fork`. Each member joins, asks `may_come` whenever it is to be queued, and tells `first_token` and
    `ended` of its first token and its end.

    The first that may come leads. When it ends without having computed the prompt, the next one takes its place. Entries that methods
    return are to be queued.
    """

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}

    def __len__(self) -> int:
        return sum(len(group.held) for group in self._groups.values())

    def join(self, request: Request) -> None:
        if request.fork is not None:
            self._groups.setdefault(request.fork, _Group()).alive += 1

    def may_come(self, entry: Entry) -> bool:
        """Whether the request is to be queued now; else it is held."""
        group = self._groups.get(entry.request.fork or "")
        if group is None or group.ready:
            return True
        group.leader = group.leader or entry.request
        if group.leader is entry.request:
            return True
        group.held.append(entry)
        return False

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
        following, group.held = group.held[:1], group.held[1:]
        group.leader = following[0].request if following else None
        return following, False

    def entries(self) -> list[Entry]:
        """All that are held."""
        return [entry for group in self._groups.values() for entry in group.held]
