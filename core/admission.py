"""How a request gets a row, and how it gives it up: fit, seats, prefix hit, pages, and the reverse.

A request is admitted only when pages for all its known tokens and one more are there, beside those that running rows need for their next
token. Prompts in progress take the token budget first, so when some of it is left for admissions they have all their pages. The head of
the queue is never overtaken. So a large request cannot be filled and emptied again and again without producing a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from modelrunner.batch import PatchSink
from modelrunner.errors import RequestError
from modelrunner.forks import Forks
from modelrunner.no_media import NoMedia
from modelrunner.page_pool import Int32Array, PagePool
from modelrunner.prefix_cache import Hit, PageKeys, PrefixCache, media_spans, root_key
from modelrunner.request import Request, Status
from modelrunner.rows import HostRows
from modelrunner.waiting import Entry, Seats, WaitingQueue


class Admission:
    """Requests by id, rows by holder, and the way between queue and rows.

    entries: every unfinished request by id. holders: per row the entry that holds it. refused: requests that `on_admit` raised for.
    parked: requests by id that wait, but not in the queue: the mask of their next token is not there (see `guides`), or what they are to
    compute first is not encoded (see `encoding`).
    """

    def __init__(
        self,
        rows: HostRows,
        pool: PagePool,
        seats: Mapping[str, int],
        row_values: Callable[[Request], Mapping[str, Any]],
        on_admit: Callable[[int, Request, bool], Mapping[str, Any]],
        on_remove: Callable[[int, Request], None],
        *,
        max_batched_tokens: int,
        by_priority: bool,
        chunked: bool,
        caching: bool,
        cache_seed: bytes,
        media: NoMedia | None = None,
        shifted: bool = False,
    ) -> None:
        """media: what the requests' media are encoded by."""
        self.media = media or NoMedia()
        self.media.rows = rows
        self.queue = WaitingQueue(by_priority)
        self.forks = Forks()
        self.seats = Seats(seats)
        self.entries: dict[str, Entry] = {}
        self.holders: list[Entry | None] = [None] * rows.active.size
        self.refused: list[Request] = []
        self.parked: dict[str, Entry] = {}
        self._rows = rows
        self._pool = pool
        self._layouts = [table.layout for table in rows.tables]
        self._cache, self._shifted = PrefixCache(self._layouts, pool), shifted
        self._row_values, self._on_admit, self._on_remove = row_values, on_admit, on_remove
        self._chunk = max_batched_tokens
        self._chunked = chunked
        self._caching = caching
        self._cache_seed = cache_seed
        self._sequence = 0
        self._free_rows = list(range(rows.active.size - 1, -1, -1))
        self._leaving: list[tuple[int, dict[str, int]]] = []  # rows without a request that a ticket may still name, and their seats
        self._blocked: tuple[int, int] | None = None  # (sequence, pool gains) when the head of the queue did not fit

    # ---- queue -----------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError if it can never run."""
        if request.id in self.entries:
            raise RequestError(f"request id {request.id!r} is in use by an unfinished request; choose another")
        self._refuse_misfit(request)
        plain, seated = self._split_values(request)
        if full := [name for name in seated if not self.seats.capacity[name]]:
            raise RequestError(f"request {request.id!r} needs a seat in {full}, of which the settings provide none")
        self._sequence += 1
        request.sequence = self._sequence
        request.status = Status.WAITING
        entry = self.entries[request.id] = Entry(request, plain, seated)
        self.forks.join(request)
        self._wait_for_media(entry)
        self._enqueue(entry, parked=request.guide is not None)

    def _split_values(self, request: Request) -> tuple[dict[str, Any], dict[str, Any]]:
        """The request's values of plain columns, and of seated ones that it needs."""
        values = self._row_values(request)
        seated = {name: values[name] for name in self.seats.capacity if values.get(name) is not None and np.size(values[name])}
        return {name: value for name, value in values.items() if name not in self.seats.capacity}, seated

    def revalue(self, request: Request) -> None:
        """Ask once more for the column values of a request without a row: something about it has changed. It needs no further seats."""
        entry = self.entries[request.id]
        entry.values, entry.seated = self._split_values(request)

    def _enqueue(self, entry: Entry, parked: bool) -> None:
        if parked:
            self.parked[entry.request.id] = entry
        elif self.forks.may_come(entry):
            self.queue.push(entry)

    def unpark(self, request: Request) -> None:
        """What the request was parked for is there."""
        self._enqueue(self.parked.pop(request.id), parked=False)

    def _wait_for_media(self, entry: Entry, parked: bool = False) -> None:
        if entry.request.media is not None:
            self.media.wait(entry.request, self._hit(entry, entry.tokens()).length, parked=parked)

    def _refuse_misfit(self, request: Request) -> None:
        self.media.check(request)
        prompt, limit = len(request.prompt_token_ids), request.limit
        if not 0 < prompt < limit <= self._rows.max_model_len:
            raise RequestError(
                f"request {request.id!r} has {prompt} prompt tokens and ends at {limit} tokens; at least one prompt token, one output "
                f"token, and at most {self._rows.max_model_len} tokens in all (model.max_model_len) are accepted"
            )
        if not self._chunked and prompt > self._chunk:
            raise RequestError(
                f"request {request.id!r} has {prompt} prompt tokens, but without scheduler.chunked_prefill a prompt is computed in one "
                f"step, of at most {self._chunk} tokens (scheduler.max_batched_tokens); raise that or shorten the prompt"
            )
        if self._most_pages(limit - 1) > self._pool.capacity:
            raise RequestError(
                f"request {request.id!r} needs cache for {limit} tokens ({prompt} prompt, up to {limit - prompt} output), but "
                f"all {self._pool.capacity} pages hold {self.max_tokens()} tokens of one request; lower max_tokens or enlarge the cache"
            )

    def max_tokens(self) -> int:
        """Longest request, prompt and output in tokens, that the page pool can hold alone."""
        low, high = 1, self._rows.max_model_len
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._most_pages(middle - 1) <= self._pool.capacity else (low, middle - 1)
        return low

    def _most_pages(self, tokens: int) -> int:
        return sum(layout.most_pages(tokens, self._chunk) for layout in self._layouts)

    def requeue(self, entry: Entry, parked: bool = False) -> None:
        """Let a request that gave up its row wait again, at its old place. parked: its row was held."""
        entry.request.status = Status.PREEMPTED if entry.request.num_preemptions else Status.WAITING
        self._wait_for_media(entry)
        self._enqueue(entry, parked)

    def forget(self, request: Request) -> None:
        """The request has ended: it holds no row (any more)."""
        waiting = request.status in (Status.WAITING, Status.PREEMPTED)
        request.status = Status.FINISHED
        self.media.forget(request)
        self.entries.pop(request.id)
        if waiting and self.parked.pop(request.id, None) is None and not self.forks.is_held(request):
            self.queue.dropped()
        following, last = self.forks.ended(request)
        for entry in following:
            self.queue.push(entry)
        if last and not self._caching:
            self._forget_prompt(request)

    def prompt_is_there(self, request: Request) -> None:
        """The request has computed its prompt: whoever was held for it may come."""
        for entry in self.forks.first_token(request):
            self.queue.push(entry)

    def _forget_prompt(self, request: Request) -> None:
        """Take the pages of a shared prompt out of the index, where nobody else may find them."""
        keys, tokens = self._page_keys(request), np.array(request.prompt_token_ids, np.int32)
        for table in self._rows.tables:
            chain = keys.extend(tokens, table.tokens_per_page, keys.pages_of(tokens.size, table.tokens_per_page))
            found = [self._pool.find(table.index, key) for key in chain]
            self._pool.forget(np.array([page for page in found if page], np.int32))

    # ---- into a row ------------------------------------------------------------------------------------------------

    def candidate(self, budget: int) -> Entry | None:
        """The head of the queue, if a row and seats are there for it and its pages are not known to be missing. Every step asks this."""
        if not self._free_rows or budget <= 0 or (entry := self.queue.head()) is None:
            return None
        return entry if self.seats.available(entry.seated) and not self._is_blocked(entry) else None

    def admit_next(self, budget: int, builder: PatchSink) -> tuple[Entry, int] | None:
        """Give the head of the queue a row, pages for its first chunk, and a place in the patch: (entry, query tokens of the chunk).

        budget: tokens left in the step. None when the queue is empty or its head must wait.
        """
        while (entry := self.candidate(budget)) is not None:
            tokens = entry.tokens()
            hit = self._hit(entry, tokens)
            able = self.media.limit(entry.request, hit.length)
            if able <= hit.length or (able < tokens.size and not self._chunked):
                self.parked[entry.request.id] = self.queue.pop()
                self._wait_for_media(entry, parked=True)
                continue
            whole = 1 if self._chunked else max(len(entry.request.prompt_token_ids) - hit.length, 1)
            if budget < whole or not self._fits(entry, tokens.size, hit):
                return None
            values = self._values(entry, tokens, hit)
            if values is None:
                continue
            if builder.num_words and not builder.fits(builder.row_words({**values, **entry.seated})):
                self._on_remove(self._free_rows[-1], entry.request)
                return None
            chunk = min(budget, min(tokens.size, able) - hit.length)
            self._enter(entry, tokens, hit, chunk, values)
            try:
                builder.row(entry.request.row, values)
            except Exception as error:
                self.release(entry.request)
                self._refuse(entry.request, error)
                continue
            return entry, chunk
        return None

    def _hit(self, entry: Entry, tokens: Int32Array) -> Hit:
        if not self._caching and entry.request.fork is None:
            return self._cache.miss
        if entry.keys is None:
            entry.keys = self._page_keys(entry.request)
        if entry.request.logprobs is not None and entry.request.logprobs.lacks_prompt:
            return self._cache.miss  # positions from the cache have no hidden states
        return self._cache.hit(entry.keys, tokens)

    def _page_keys(self, request: Request) -> PageKeys:
        """The root of its pages' keys. Without prefix caching nobody but those that share its prompt has the same one."""
        private = None if self._caching else request.fork
        root = root_key(self._cache_seed, request.extra.get("adapter"), request.cache_salt, request.cache_world, private)
        return PageKeys(root, self._shifted, () if request.media is None else media_spans(request.media))

    def _is_blocked(self, entry: Entry) -> bool:
        """Whether no page came back or entered the index since this entry did not fit: then it is not looked up again."""
        return self._blocked == (entry.request.sequence, self._pool.gains)

    def _fits(self, entry: Entry, known: int, hit: Hit) -> bool:
        ahead = max([self._rows.policy.most, *(table.ahead for table in self._rows.tables)])
        tokens = min(known + 1 + ahead, entry.request.limit - 1)
        needed = 0
        for layout, pages in zip(self._layouts, hit.pages, strict=True):
            idle = int(np.count_nonzero(self._pool.owners[pages] == 0))  # free now, taken by the hit itself
            needed += max(layout.most_pages(tokens, self._chunk) - pages.size, 0) + idle
        spare, num_active = self._pool.available - needed, len(self.holders) - len(self._free_rows) - len(self._leaving)
        if spare >= self._rows.most_growth(num_active) or spare >= self._rows.next_growth():
            return True
        self._blocked = (entry.request.sequence, self._pool.gains)
        return False

    def _values(self, entry: Entry, tokens: Int32Array, hit: Hit) -> dict[str, Any] | None:
        """Column values of the row that the entry would get, block tables excepted. None, and the request ended, if a plugin raised."""
        request = entry.request
        try:
            extra = {**self._on_admit(self._free_rows[-1], request, request.num_preemptions > 0)}
        except Exception as error:
            self._refuse(request, error)
            return None
        return {
            **entry.values,
            **extra,
            "token_ids": tokens,
            "known": tokens.size,
            "computed": hit.length,
            "finished": 0,
            "limit": request.limit,
            "num_accepted": 0,
        }

    def _refuse(self, request: Request, error: Exception) -> None:
        """End a request whose column values a plugin failed to give, or gave wrongly."""
        request.finish_reason, request.stop_reason = "error", f"{type(error).__name__}: {error}"
        self.forget(request)
        self.refused.append(request)

    def _enter(self, entry: Entry, tokens: Int32Array, hit: Hit, chunk: int, values: dict[str, Any]) -> None:
        """Take row, seats and pages, and complete `values` with what was taken."""
        request, rows = entry.request, self._rows
        self.queue.pop()
        row = request.row = self._free_rows.pop()
        request.status = Status.RUNNING
        self.holders[row] = entry
        entry.cached = hit.length
        if not request.num_preemptions:
            request.num_cached_tokens = hit.length
        entry.seats = self.seats.take(entry.seated)
        asked = request.features, request.guide is not None, request.num_draft
        rows.open(row, tokens, hit.length, len(request.prompt_token_ids), request.limit, *asked)
        self.media.enter(row, request, hit.length)
        for pages in hit.pages:
            self._pool.retain(pages)
        for table in rows.tables:
            table.take_hit(row, hit)
            table.start(row, hit.length + chunk, request.limit, self._pool)
            table.hashed[row] = 0 if entry.keys is None else entry.keys.pages_of(tokens.size, table.tokens_per_page)
            values[f"pages.{table.layout.name}"] = table.pages[row, : table.used[row]].copy()
        values["generation"] = int(rows.generation[row])
        values.update({name: (seat, entry.seated[name]) for name, seat in entry.seats.items()})

    # ---- prefix cache ----------------------------------------------------------------------------------------------

    def index_prompts(self, at: Int32Array) -> None:
        """Enter into the prefix cache the pages, known at admission, that rows `at` have filled."""
        for table in self._rows.tables:
            full = np.minimum(self._rows.computed[at] // table.tokens_per_page, table.hashed[at])
            more = full > table.indexed[at]
            for row, stop in zip(at[more].tolist(), full[more].tolist(), strict=True):
                entry = self.holders[row]
                assert entry is not None, f"row {row} has no request"
                assert entry.keys is not None, f"row {row} has no page keys"
                chain = entry.keys.extend(self._rows.token_log[row], table.tokens_per_page, stop)
                self._cache.insert(table.index, chain, table.pages[row], int(table.indexed[row]), stop)
                table.indexed[row] = stop

    def distrust(self, row: int) -> None:
        """The row's numbers are not finite: its pages must not serve anybody else."""
        for table in self._rows.tables:
            self._pool.forget(table.pages[row, : table.used[row]])
            table.hashed[row] = 0
        entry = self.holders[row]
        assert entry is not None, f"row {row} has no request"
        entry.keys = None

    def reset_cache(self, cache_seed: bytes | None) -> None:
        """Empty the prefix cache; what running rows compute does not enter it."""
        if cache_seed is not None:
            self._cache_seed = cache_seed
        self._pool.reset_index()
        for table in self._rows.tables:
            table.hashed[:] = 0
        for entry in self.entries.values():
            entry.keys = None
        self._blocked = None

    # ---- out of a row ----------------------------------------------------------------------------------------------

    def release(self, request: Request) -> None:
        """Take the row from a running request. The row can be given out again once no ticket names it (`reclaim_rows`)."""
        row, rows = request.row, self._rows
        entry = self.holders[row]
        assert entry is not None, f"row {row} has no request"
        assert entry.request is request, f"row {row} is not held by request {request.id!r}"
        request.num_drafted += int(rows.num_drafted[row])
        request.num_accepted += int(rows.num_accepted[row])
        request.output_token_ids.extend(rows.output(row)[len(request.output_token_ids) :].tolist())
        if entry.keys is not None and self._caching:
            computed, known = int(rows.computed[row]), int(rows.known[row])
            for table in rows.tables:
                stop = min(computed // table.tokens_per_page, entry.keys.pages_of(known, table.tokens_per_page))
                chain = entry.keys.extend(rows.token_log[row], table.tokens_per_page, stop)
                self._cache.insert(table.index, chain, table.pages[row], int(table.indexed[row]), stop)
        rows.close(row, self._pool)
        self.media.leave(row)
        self.holders[row] = None
        self._leaving.append((row, entry.seats))
        entry.seats = {}
        request.row = -1
        self._blocked = None
        self._on_remove(row, request)

    def reclaim_rows(self, oldest: int) -> None:
        """Make rows free that no step from `oldest` on names."""
        if not self._leaving:
            return
        staying = []
        for row, seats in self._leaving:
            if self._rows.last_ticket[row] < oldest:
                self._free_rows.append(row)
                self.seats.give(seats)
                self.media.left(row)
            else:
                staying.append((row, seats))
        self._leaving = staying

    def check(self) -> None:
        """Raise AssertionError unless rows, holders, seats and requests agree."""
        held = [row for row, entry in enumerate(self.holders) if entry is not None]
        assert np.array_equal(np.flatnonzero(self._rows.active), held), "active rows and held rows differ"
        every = sorted(held + self._free_rows + [row for row, _ in self._leaving])
        assert every == list(range(len(self.holders))), f"rows {every} are held, free or leaving, not each row once"
        self.media.check_books([entry.request for entry in self.entries.values()])
        self.seats.check([entry.seats for entry in self.holders if entry is not None] + [seats for _, seats in self._leaving])
        running = {entry.request.id for entry in self.holders if entry is not None}
        queued = {entry.request.id for entry in self.queue.entries()}
        forking = {entry.request.id for entry in self.forks.entries()}
        waiting = queued | self.parked.keys() | forking
        assert running | waiting == self.entries.keys(), "a request neither runs nor waits"
        assert not running & waiting, "a request both runs and waits"
        assert len(queued) + len(self.parked) + len(forking) == len(waiting), "a request waits in two places"
        assert len(self.queue) == len(queued), f"the queue counts {len(self.queue)} and holds {len(queued)}"
        for row in held:
            entry = self.holders[row]
            assert entry is not None
            assert (entry.request.row, entry.request.status) == (row, Status.RUNNING), (
                f"request {entry.request.id!r} and row {row} disagree"
            )
