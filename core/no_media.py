"""What the scheduler asks about media of requests, answered for an engine that takes none. `encoding` answers for the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from modelrunner.batch import Int32Array, Plan
from modelrunner.rows import NO_LIMIT, HostRows

if TYPE_CHECKING:
    from modelrunner.guides import End
    from modelrunner.request import Request
    from modelrunner.scheduler import Scheduler


class NoMedia:
    """Where requests have no media: nothing to encode, nothing to wait for."""

    rows: HostRows
    num_encoded = 0  # items, since the start

    def check(self, request: Request) -> None:
        """Raise RequestError for a request whose items can never be encoded."""

    def wait(self, request: Request, computed: int, *, parked: bool = False) -> None:
        """The request has no row; when it gets one, `computed` of its tokens will be there. parked: it is not in the queue."""

    def forget(self, request: Request) -> None:
        """The request has ended, without a row."""

    def limit(self, request: Request, computed: int) -> int:
        """Tokens that can be computed with what is encoded now, when `computed` of them are there."""
        return NO_LIMIT

    def enter(self, row: int, request: Request, computed: int) -> None:
        """The request got `row`."""

    def leave(self, row: int) -> None:
        """The request gave up `row`. Steps in flight may still read its items."""

    def left(self, row: int) -> None:
        """No step in flight names the row any more."""

    def commit(self, rows: Int32Array) -> None:
        """Committed tokens of `rows` went up."""

    def attach(self, plan: Plan) -> Plan:
        """The plan with what its rows read of media. After the upper counts went up."""
        return plan

    def advance(self, scheduler: Scheduler) -> list[End]:
        """Take in what was encoded, and start what is next. Returns requests that end because their media could not be encoded."""
        return []

    @property
    def num_in_flight(self) -> int:
        """Encodings that were started and have not been taken in."""
        return 0

    def settle(self, seconds: float | None = None) -> None:
        """Wait for the oldest encoding in flight, if there is one. seconds: about the most, where the device can tell."""

    def reset(self) -> None:
        """Forget what was encoded; what runs is encoded again for those who need it. Rows keep what they own."""

    def check_books(self, requests: Sequence[Request]) -> None:
        """Raise AssertionError unless the books agree. requests: all that have not ended."""
