"""What waits for admission: the queue, the seats of capacity-limited columns, and the deadlines."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from modelrunner.page_pool import Int32Array
from modelrunner.prefix_cache import PageKeys
from modelrunner.request import Request, Status


@dataclass(eq=False)
class Entry:
    """A request between `add` and its end, with what the scheduler knows beside it.

    values: its plain column values. seated: elements for each seated column that it uses. keys: page keys; None until needed, or when
    its pages must not enter the prefix cache. seats: the seats it holds while it has a row. cached: tokens of the last prefix hit.
    """

    request: Request
    values: Mapping[str, Any]
    seated: Mapping[str, Any]
    keys: PageKeys | None = None
    seats: dict[str, int] = field(default_factory=dict)
    cached: int = 0

    def tokens(self) -> Int32Array:
        """Prompt and committed output while it has no row: [n] int32."""
        return np.array(self.request.prompt_token_ids + self.request.output_token_ids, np.int32)


class WaitingQueue:
    """Requests without a row, best first: lowest priority number (when priorities count), then earliest arrival.

    A preempted request keeps its place in the order of arrival. A finished one is dropped when it comes to the head, or when such ones
    make up half of the queue.
    """

    def __init__(self, by_priority: bool) -> None:
        self._by_priority = by_priority
        self._heap: list[tuple[int, int, Entry]] = []
        self._dropped = 0

    def __len__(self) -> int:
        return len(self._heap) - self._dropped

    def order(self, request: Request) -> tuple[int, int]:
        """Sort key: the lower, the better."""
        return (request.priority if self._by_priority else 0, request.sequence)

    def push(self, entry: Entry) -> None:
        heapq.heappush(self._heap, (*self.order(entry.request), entry))

    def head(self) -> Entry | None:
        """The best entry, left in the queue."""
        while self._heap and self._heap[0][-1].request.status is Status.FINISHED:
            heapq.heappop(self._heap)
            self._dropped -= 1
        return self._heap[0][-1] if self._heap else None

    def pop(self) -> Entry:
        """Take the entry that `head` returned."""
        return heapq.heappop(self._heap)[-1]

    def dropped(self) -> None:
        """Note that a waiting request has just become FINISHED."""
        self._dropped += 1
        if self._dropped * 2 > len(self._heap):
            self._heap = [item for item in self._heap if item[-1].request.status is not Status.FINISHED]
            heapq.heapify(self._heap)
            self._dropped = 0

    def entries(self) -> list[Entry]:
        """All that wait, in no order."""
        return [item[-1] for item in self._heap if item[-1].request.status is not Status.FINISHED]


class Seats:
    """Free seats of every capacity-limited column."""

    def __init__(self, capacity: Mapping[str, int]) -> None:
        self.capacity = dict(capacity)
        self._free = {name: list(range(count - 1, -1, -1)) for name, count in capacity.items()}

    def available(self, names: Mapping[str, Any]) -> bool:
        """Whether each named column has a free seat."""
        return all(self._free[name] for name in names)

    def take(self, names: Mapping[str, Any]) -> dict[str, int]:
        return {name: self._free[name].pop() for name in names}

    def give(self, seats: Mapping[str, int]) -> None:
        for name, seat in seats.items():
            self._free[name].append(seat)

    def check(self, held: Sequence[Mapping[str, int]]) -> None:
        """Raise AssertionError unless every seat is free or held exactly once."""
        for name, count in self.capacity.items():
            seats = self._free[name] + [seats[name] for seats in held if name in seats]
            assert sorted(seats) == list(range(count)), f"seats of column {name!r}: {sorted(seats)}, not each of {count} once"


class Deadlines:
    """Requests with a deadline, earliest first."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._prune_at = 64

    def add(self, request: Request) -> None:
        if request.deadline is None:
            return
        heapq.heappush(self._heap, (request.deadline, request.sequence, request))
        if len(self._heap) > self._prune_at:  # finished requests must not be kept until their deadline
            self._heap = [item for item in self._heap if item[-1].status is not Status.FINISHED]
            heapq.heapify(self._heap)
            self._prune_at = max(64, 2 * len(self._heap))

    def passed(self, now: float) -> list[Request]:
        """Take the unfinished requests whose deadline has passed."""
        late = []
        while self._heap and self._heap[0][0] <= now:
            request = heapq.heappop(self._heap)[-1]
            if request.status is not Status.FINISHED:
                late.append(request)
        return late
