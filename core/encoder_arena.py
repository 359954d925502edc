"""Which embeddings of media lie where: the books of the arena of encoder outputs. Host only.

The arena has a fixed number of lines, one for each embedding. An item takes any free ones, in the order of its embeddings, so nothing is
ever too scattered to fit. Its entry is found by its key, the hash of content and processing, and is shared by all requests that have it.
An entry that nobody owns stays until its lines are needed, the one used longest ago first.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Set
from dataclasses import dataclass

import numpy as np

from modelrunner.media import Int32Array


@dataclass(eq=False)
class Entry:
    """An item in the arena. lines: [num_embeddings] int32. owners: rows that may still read it, and the encoding that writes it. ready: it
    is encoded. lost: nobody may find it any more."""

    key: bytes
    lines: Int32Array
    owners: int = 0
    ready: bool = False
    lost: bool = False


class EncoderArena:
    """Lines and entries."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free = np.arange(capacity - 1, -1, -1, dtype=np.int32)
        self._num_free = capacity
        self._entries: dict[bytes, Entry] = {}
        self._idle: OrderedDict[bytes, Entry] = OrderedDict()  # ready and without owners, the one used longest ago first

    def find(self, key: bytes) -> Entry | None:
        """The entry of an item, encoded or being encoded."""
        return self._entries.get(key)

    def available(self, keep: Set[bytes] = frozenset()) -> int:
        """Lines that `allocate` could give without giving up entries of the keys `keep`."""
        return self._num_free + sum(entry.lines.size for key, entry in self._idle.items() if key not in keep)

    def allocate(self, key: bytes, size: int, keep: Set[bytes] = frozenset()) -> Entry:
        """Lines for an item that is not there, for an encoding, which owns them until it is done. So many must be available."""
        assert key not in self._entries, "an item is in the arena once"
        for entry in list(self._idle.values()) if self._num_free < size else ():
            if self._num_free < size and entry.key not in keep:
                self._give_up(entry)
        assert self._num_free >= size, f"{size} lines are needed and {self._num_free} free"
        self._num_free -= size
        entry = self._entries[key] = Entry(key, self._free[self._num_free : self._num_free + size].copy(), owners=1)
        return entry

    def retain(self, entry: Entry) -> None:
        entry.owners += 1
        self._idle.pop(entry.key, None)

    def release(self, entry: Entry) -> None:
        """One owner less. Without any, an entry that is ready stays to be found."""
        entry.owners -= 1
        assert entry.owners >= 0, "an entry is released more often than it was owned"
        if entry.owners:
            return
        if entry.ready and not entry.lost:
            self._idle[entry.key] = entry
        else:
            self._give_up(entry)

    def lose(self, entry: Entry) -> None:
        """Let nobody find the entry any more: its lines hold nothing of use. It goes with its last owner."""
        if not entry.lost and self._entries.get(entry.key) is entry:
            del self._entries[entry.key]
        entry.lost = True
        if self._idle.get(entry.key) is entry:
            self._give_up(entry)

    def reset(self) -> None:
        """Lose all entries."""
        for entry in list(self._entries.values()):
            self.lose(entry)

    def _give_up(self, entry: Entry) -> None:
        self._free[self._num_free : self._num_free + entry.lines.size] = entry.lines
        self._num_free += entry.lines.size
        for where in (self._idle, self._entries):
            if where.get(entry.key) is entry:  # a lost entry's key may be another's by now
                del where[entry.key]

    @property
    def num_owned(self) -> int:
        """Lines that are neither free nor given up for others on demand."""
        return self.capacity - self.available()

    def check(self, owners: Counter[int]) -> None:
        """Raise AssertionError unless every line is free or in one entry, and every entry has the owners that it should.

        owners: how many there are by the entry's id().
        """
        entries = {id(e): e for e in self._entries.values()}
        lines = [e.lines for e in entries.values()]
        lost = [key for key in owners if key not in entries]
        held = np.concatenate([self._free[: self._num_free], *lines]) if lines else self._free[: self._num_free]
        if not lost:
            assert np.array_equal(np.sort(held), np.arange(self.capacity)), "a line of the arena is neither free nor in one entry"
        for key, entry in entries.items():
            assert entry.owners == owners[key], f"an entry of the arena has {entry.owners} owners and should have {owners[key]}"
            assert (self._idle.get(entry.key) is entry) == (entry.ready and not entry.owners), "an idle entry of the arena is not listed"
