"""Which media are encoded next, who waits for them, and who reads them. Host only; called by the loop, in its thread.

The idea: an encoding runs beside the steps, so nobody waits for it but the requests that need it. A row computes its tokens up to the first
item that is not encoded yet; a request whose next token needs one has no row and waits outside of the queue. Items are encoded a step
or more before they are needed, several at a time, those of rows first, then those of waiting requests in the order of the queue.

Nothing can wait for ever. A row owns items in the order in which it computes them, so it always can compute those that it owns, and gives
them up when committed tokens are past them. A request without a row owns nothing: what was encoded for it is given up for rows, and for
those before it in the queue. An item that could never be encoded is refused at the door.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from modelrunner.batch import Feature, Plan, StepMedia
from modelrunner.encoder_arena import EncoderArena, Entry
from modelrunner.errors import RequestError
from modelrunner.guides import End
from modelrunner.media import Int32Array, MediaItem, RequestMedia
from modelrunner.no_media import NoMedia
from modelrunner.rows import NO_LIMIT

if TYPE_CHECKING:
    from modelrunner.device import SideEvent
    from modelrunner.request import Request
    from modelrunner.scheduler import Scheduler

MAX_IN_FLIGHT = 2  # encodings enqueued at the same time: one runs, one follows it
Start = Callable[[Sequence[MediaItem], Sequence[Int32Array]], "SideEvent"]


@dataclass(eq=False)
class Tenancy:
    """A row's media. first: the first item that it may still read. held: entries of the items from there on, without gaps."""

    media: RequestMedia
    first: int
    held: list[Entry] = field(default_factory=list)

    @property
    def next(self) -> int:
        """The first item that it needs and does not own."""
        return self.first + len(self.held)


@dataclass(eq=False)
class Waiting:
    """A request without a row. computed: tokens that it will find in the cache. parked: it is not in the queue."""

    computed: int
    parked: bool


@dataclass(eq=False)
class Flight:
    """An encoding that was started. begun: seconds of the clock."""

    entries: list[Entry]
    event: SideEvent
    begun: float


class Encoding(NoMedia):
    """See the module.

    start: enqueues an encoding, see `Encoder.start`. max_together: embeddings of one encoding, unless an item has more by itself. chunked:
    whether prompts may be computed in parts. position_rows: see `MediaNeeds`. shifted: a drafter reads the token after each. share: of the
    device, for encodings while others decode. pace: has the device keep to it, see `Device.pace_side`; without it pauses are made here,
    between encodings.
    """

    def __init__(
        self,
        arena: EncoderArena,
        start: Start,
        *,
        max_together: int,
        chunked: bool,
        position_rows: int,
        shifted: bool = False,
        share: float = 1.0,
        pace: Callable[[float], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.arena = arena
        self._start, self._max_together = start, max_together
        self._chunked, self._position_rows, self._shifted = chunked, position_rows, shifted
        self._tenancies: dict[int, Tenancy] = {}  # by row, in the order of admission; only those with items still to be read
        self._leaving: dict[int, Tenancy] = {}
        self._waiting: dict[Request, Waiting] = {}
        self._flights: list[Flight] = []
        self._changed = False  # something may be encoded that could not be before
        self._share, self._pace, self._clock = share, pace, clock
        self._paced = 1.0  # what `pace` was told
        self._most_in_flight = MAX_IN_FLIGHT if share == 1 or pace is not None else 1
        self._came_with: set[int] = set()  # rows whose requests have media, read or not
        self._rest_until = 0.0  # seconds of the clock

    # ---- requests without a row --------------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        media = request.media
        if media is None:
            return
        if self._chunked:
            needed, what = max(item.num_embeddings for item in media.items), "its largest item"
        else:
            sizes = {item.key: item.num_embeddings for item in media.items}
            needed, what = sum(sizes.values()), "all of its items together, since scheduler.chunked_prefill is off,"
        if needed > self.arena.capacity:
            raise RequestError(
                f"multi_modal_data: request {request.id!r} needs room for {needed} embeddings of {what} and the encoder's arena has "
                f"{self.arena.capacity} (setting media.arena_tokens); raise that, or give smaller images"
            )

    def wait(self, request: Request, computed: int, *, parked: bool = False) -> None:
        if request.media is not None:
            self._waiting[request] = Waiting(computed, parked)
            self._changed = True

    def forget(self, request: Request) -> None:
        if self._waiting.pop(request, None) is not None:
            self._changed = True

    def limit(self, request: Request, computed: int) -> int:
        media = request.media
        if media is None:
            return NO_LIMIT
        for number in range(media.first_needed(computed), len(media.items)):
            entry = self.arena.find(media.items[number].key)
            if entry is None or not entry.ready:
                return media.starts[number]
        return NO_LIMIT

    def _enough(self, request: Request, waiting: Waiting) -> bool:
        """Whether what is encoded lets the request have a row."""
        limit = self.limit(request, waiting.computed)
        return limit > waiting.computed if self._chunked else limit == NO_LIMIT

    # ---- rows --------------------------------------------------------------------------------------------------------

    def enter(self, row: int, request: Request, computed: int) -> None:
        media = request.media
        if media is None:
            return
        self._waiting.pop(request, None)
        self._came_with.add(row)
        self._changed = True
        if computed < media.end:
            self._tenancies[row] = Tenancy(media, media.first_needed(computed))
            self.rows.num_media += 1
            self._own(row)

    def _own(self, row: int) -> None:
        """Let the row own what is there of its next items, and compute up to the first that is not encoded."""
        tenancy = self._tenancies[row]
        items = tenancy.media.items
        while tenancy.next < len(items) and (entry := self.arena.find(items[tenancy.next].key)) is not None:
            self.arena.retain(entry)
            tenancy.held.append(entry)
        unready = next((i for i, entry in enumerate(tenancy.held, tenancy.first) if not entry.ready), tenancy.next)
        self.rows.computable[row] = tenancy.media.starts[unready] if unready < len(items) else NO_LIMIT

    def leave(self, row: int) -> None:
        self._came_with.discard(row)
        if (tenancy := self._tenancies.pop(row, None)) is not None:
            self.rows.num_media -= 1
            self.rows.computable[row] = NO_LIMIT
            self._leaving[row] = tenancy

    def left(self, row: int) -> None:
        if (tenancy := self._leaving.pop(row, None)) is not None:
            self._release(tenancy.held)

    def commit(self, rows: Int32Array) -> None:
        for row in rows.tolist():
            if (tenancy := self._tenancies.get(row)) is None:
                continue
            computed = int(self.rows.computed[row])
            done = tenancy.media.first_needed(computed) - tenancy.first
            if done > 0:
                self._release(tenancy.held[:done])
                del tenancy.held[:done]
                tenancy.first += done
            if computed >= tenancy.media.end:
                del self._tenancies[row]
                self.rows.num_media -= 1

    def _release(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self.arena.release(entry)
        self._changed = self._changed or bool(entries)

    def attach(self, plan: Plan) -> Plan:
        places = {row: place for place, row in enumerate(plan.rows.tolist())} if self._tenancies else {}
        starts = plan.query_start if places else ()
        lines = positions = following = None
        for row, tenancy in self._tenancies.items():
            place = places.get(row)
            if place is None:
                continue
            count = int(plan.num_query[place])
            first = int(self.rows.computed_upper[row]) - count
            if first >= tenancy.media.end:
                continue
            if lines is None:
                lines = np.full(plan.num_tokens, -1, np.int32)
                following = lines.copy() if self._shifted else None
                if self._position_rows > 1:
                    positions = np.full((self._position_rows, plan.num_tokens), -1, np.int32)
            at = int(starts[place])
            tenancy_lines(tenancy, first, lines[at : at + count])
            if following is not None:
                tenancy_lines(tenancy, first + 1, following[at : at + count])
            if positions is not None and tenancy.media.positions is not None:
                own = tenancy.media.positions[:, first : first + count]
                positions[:, at : at + own.shape[1]] = own
        if lines is None:
            return plan
        return replace(plan, media=StepMedia(lines, positions, following), features=plan.features | Feature.MEDIA)

    # ---- encoding ----------------------------------------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        return len(self._flights)

    def settle(self, seconds: float | None = None) -> None:
        if self._flights:
            with contextlib.suppress(Exception):  # `advance` tells whose it is
                self._flights[0].event.wait(seconds)

    def advance(self, scheduler: Scheduler) -> list[End]:
        failed: dict[bytes, str] = {}
        while self._flights and self._take(self._flights[0], failed):
            del self._flights[0]
            self._changed = True
        if self._pace is not None and (self._flights or self._changed):
            self._set_pace(self._pace, scheduler)
        if not self._changed:
            return []
        self._changed = False
        ends = self._blame(failed, scheduler) if failed else []
        for row in self._tenancies:
            self._own(row)
        for request, waiting in list(self._waiting.items()):
            if waiting.parked and self._enough(request, waiting):
                waiting.parked = False
                scheduler.ready(request)
        if self._rests(scheduler):
            self._changed = True  # looked at again in the next turn
            return ends
        while len(self._flights) < self._most_in_flight and self._begin(scheduler):
            for row in self._tenancies:
                self._own(row)
        return ends

    def _spares(self, scheduler: Scheduler) -> bool:
        """Whether encoding is to leave the device to those who decode.

        It is while a request decodes that brought no media. Those that did gain by encodings too, for their like: among themselves, it is
        while more of them decode than wait for one.
        """
        running, reading = scheduler.num_running, len(self._tenancies)
        return running > len(self._came_with) or running - reading > len(self._waiting) + reading

    def _set_pace(self, pace: Callable[[float], None], scheduler: Scheduler) -> None:
        share = self._share if self._spares(scheduler) else 1.0
        if share != self._paced:
            self._paced = share
            pace(share)

    def _rests(self, scheduler: Scheduler) -> bool:
        """Whether nothing is to be started yet."""
        return self._clock() < self._rest_until and self._spares(scheduler)

    def _take(self, flight: Flight, failed: dict[bytes, str]) -> bool:
        """Take in an encoding, if it is done."""
        try:
            if not flight.event.done():
                return False
            if self._pace is None:
                now = self._clock()
                self._rest_until = now + (now - flight.begun) * (1 / self._share - 1)
        except Exception as error:
            text = f"the encoder failed: {type(error).__name__}: {error}"
            failed.update({entry.key: text for entry in flight.entries})
            for entry in flight.entries:
                self.arena.lose(entry)
        else:
            self.num_encoded += len(flight.entries)
            for entry in flight.entries:
                entry.ready = True
        for entry in flight.entries:
            self.arena.release(entry)
        return True

    def _blame(self, failed: dict[bytes, str], scheduler: Scheduler) -> list[End]:
        """The requests that still need one of the items that could not be encoded."""
        ends = []
        for request, computed in [
            *((scheduler.request_at(row), int(self.rows.computed[row])) for row in self._tenancies),
            *((request, waiting.computed) for request, waiting in self._waiting.items()),
        ]:
            assert request is not None, "a row with media has a request"
            assert request.media is not None
            keys = [item.key for item in request.media.items[request.media.first_needed(computed) :]]
            if (key := next((key for key in keys if key in failed), None)) is not None:
                ends.append(End(request, "error", failed[key]))
        return ends

    def _begin(self, scheduler: Scheduler) -> bool:
        """Start the next encoding. False if there is nothing to encode, or no room."""
        chosen: list[tuple[MediaItem, Entry]] = []
        total = 0
        for item, keep in self._needs(scheduler):
            size = item.num_embeddings
            if (chosen and total + size > self._max_together) or size > self.arena.available(keep):
                break
            chosen.append((item, self.arena.allocate(item.key, size, keep)))
            total += size
            if total >= self._max_together:
                break
        if not chosen:
            return False
        entries, begun = [entry for _, entry in chosen], self._clock()
        event = self._start([item for item, _ in chosen], [entry.lines for entry in entries])
        self._flights.append(Flight(entries, event, begun))
        return True

    def _needs(self, scheduler: Scheduler) -> Iterator[tuple[MediaItem, set[bytes]]]:
        """Items that are to be encoded and are not in the arena, the most urgent first, each with the keys that may not be given up for it.

        Each row's next item, for which anything may go; then the other items of rows, and what those wait for that have none.
        """
        keep: set[bytes] = set()
        nothing: set[bytes] = set()
        for tenancy in self._tenancies.values():
            items = tenancy.media.items
            if tenancy.next < len(items) and self.arena.find(items[tenancy.next].key) is None:
                yield items[tenancy.next], nothing
        waiting = sorted(self._waiting, key=scheduler.admission.queue.order)
        for media, first in [
            *((tenancy.media, tenancy.next) for tenancy in self._tenancies.values()),
            *((request.media, request.media.first_needed(self._waiting[request].computed)) for request in waiting if request.media),
        ]:
            keep.update(item.key for item in media.items[first:])
            for item in media.items[first:]:
                if self.arena.find(item.key) is None:
                    yield item, keep

    def reset(self) -> None:
        while self._flights:
            self.settle()
            self._take(self._flights.pop(0), {})
        self.arena.reset()
        self._changed = True

    # ---- tests ---------------------------------------------------------------------------------------------------------

    def check_books(self, requests: Sequence[Request]) -> None:
        owners = Counter(id(entry) for tenancy in (*self._tenancies.values(), *self._leaving.values()) for entry in tenancy.held)
        owners.update(id(entry) for flight in self._flights for entry in flight.entries)
        self.arena.check(owners)
        assert self.rows.num_media == len(self._tenancies), "rows with media are miscounted"
        limited = set(np.flatnonzero(self.rows.computable < NO_LIMIT).tolist())
        assert limited <= self._tenancies.keys(), "a row without media has a limit"
        alive = set(requests)
        assert alive >= self._waiting.keys(), "a request that has ended waits for media"
        with_media = {request for request in alive if request.media is not None and request.row < 0}
        assert with_media == self._waiting.keys(), "a request without a row is not among those that wait for media"
        came_with = {request.row for request in alive if request.media is not None and request.row >= 0}
        assert came_with == self._came_with, "rows of requests with media are miscounted"


def tenancy_lines(tenancy: Tenancy, first: int, out: Int32Array) -> None:
    """Write the arena's lines of the tokens from `first` on into `out`, where they have one. (Only the token after a step's last one can be
    of an item that is not encoded.)"""
    end = first + out.size
    for run in tenancy.media.runs:
        start, stop = max(run.start, first), min(run.start + run.length, end)
        if start >= stop:
            continue
        place = run.item - tenancy.first
        if place >= len(tenancy.held) or not (entry := tenancy.held[place]).ready:
            continue
        offset = run.offset - run.start
        out[start - first : stop - first] = entry.lines[offset + start : offset + stop]
