"""Pages of cache memory: how a page is shared out between cache groups, and who owns which page.

The pool only counts. It never touches the memory, so it needs no device. Page 0 is the null page: it always holds zeros, is never given
out, and stands in block tables for "nothing here".
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from modelrunner.errors import CapacityError
from modelrunner.model_state import CacheGroup

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Rider:
    """A cache group without a block table: what it keeps of a token lies in the page of another group. start: its first byte there."""

    group: CacheGroup
    start: int


@dataclass(frozen=True)
class GroupLayout:
    """A cache group and the tokens that one page holds for it. riders: groups that use its block table, behind what it keeps itself."""

    group: CacheGroup
    tokens_per_page: int
    riders: tuple[Rider, ...] = ()

    @property
    def name(self) -> str:
        return self.group.name

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        """The groups that its block table serves."""
        return (self.group, *(rider.group for rider in self.riders))

    @property
    def whole(self) -> bool:
        """Whether every token needs all earlier ones, so that nothing is given up before the request ends."""
        return type(self.group).needed_from is CacheGroup.needed_from

    def pages_for(self, tokens: int) -> int:
        """Pages that `tokens` tokens fill, the last one perhaps in part."""
        return -(-tokens // self.tokens_per_page)

    def most_pages(self, tokens: int, chunk: int) -> int:
        """Most pages that a request of `tokens` tokens holds at one time when it is computed at most `chunk` tokens a step.

        Assumes that `length - needed_from(length)` does not fall as the length grows.
        """
        if self.whole:
            return max(self.pages_for(tokens), 1)
        lengths = np.array([tokens], np.int64)
        span = tokens - int(self.group.needed_from(lengths)[0])
        touched = self.pages_for(span + min(chunk, tokens)) + 1
        return max(min(self.pages_for(tokens), touched), 1)


def page_layout(
    groups: Sequence[CacheGroup],
    page_size: int,
    itemsize: int | Mapping[str, int],
    riders: Mapping[str, Sequence[CacheGroup]] | None = None,
) -> tuple[int, list[GroupLayout]]:
    """Share pages of equal bytes between groups: (bytes of a page, layouts in the order of `groups`).

    itemsize: bytes of an element, for each group by name, or one number for those that do not choose their own type. riders: by a group's
    name, others whose layers lie in its pages too, as if they were its own; all of these keep something by the token. A page holds
    `page_size` tokens of the group with the most bytes per token, or the one fixed amount of a group that keeps such
    (`CacheGroup.page_tokens`), if that is more. The groups that keep something by the token get as many whole multiples of `page_size` as
    fit into these bytes, so that prefixes which all groups can serve stay frequent. Pages lie a whole number of each such group's tokens of
    a layer apart, so that operations can see the memory as tokens.
    """
    if not groups:
        return page_size, []

    def size_of(group: CacheGroup) -> int:
        if isinstance(itemsize, Mapping):
            return itemsize[group.name]
        return itemsize if (dtype := group.cache_dtype()) is None else dtype.itemsize

    guests = [tuple((riders or {}).get(group.name, ())) for group in groups]
    fixed = [group.page_tokens() for group in groups]
    least = [
        sum(each.page_elements(tokens or page_size) * size_of(each) for each in (group, *own))
        for group, own, tokens in zip(groups, guests, fixed, strict=True)
    ]
    units = [
        size_of(each) if tokens else math.prod(each.page_shape(1)) * size_of(each)
        for group, own, tokens in zip(groups, guests, fixed, strict=True)
        for each in (group, *own)
    ]
    page_bytes = -(-max(least) // math.lcm(*units)) * math.lcm(*units)
    layouts = []
    for group, own, tokens, size in zip(groups, guests, fixed, least, strict=True):
        held = tokens or page_bytes // size * page_size
        ends = list(accumulate(each.page_elements(held) * size_of(each) for each in (group, *own)))
        layouts.append(GroupLayout(group, held, tuple(Rider(each, start) for each, start in zip(own, ends, strict=False))))
    return page_bytes, layouts


class PagePool:
    """Owners of every page, the free pages, and the index of pages whose contents are known by a key.

    A page is in exactly one of three states: owned (at least one owner), free, or idle (no owner, but its contents are in the index and
    may be found again). `alloc` takes free pages first, then the idle ones that were released longest ago.

    arena_pages: pages in the arena, the null page included.
    """

    def __init__(self, arena_pages: int) -> None:
        if arena_pages < 2:
            raise CapacityError(f"the page pool was given {arena_pages} pages; it needs at least 2, of which one is the null page")
        self.arena_pages = arena_pages
        self.owners = np.zeros(arena_pages, np.int32)
        self.gains = 0  # grows whenever pages came back or entered the index: a request that did not fit may fit now
        self._stack = np.arange(arena_pages - 1, -1, -1, dtype=np.int32)  # the first _num_free entries are free
        self._num_free = arena_pages - 1
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._indexed = np.zeros(arena_pages, np.bool_)
        self._keys: dict[int, tuple[int, bytes]] = {}
        self._index: dict[tuple[int, bytes], int] = {}
        self._freed: list[int] | None = None

    @property
    def capacity(self) -> int:
        """Pages that can be given out."""
        return self.arena_pages - 1

    @property
    def available(self) -> int:
        """Pages without an owner."""
        return self._num_free + len(self._idle)

    def alloc(self, count: int) -> Int32Array:
        """Take `count` pages, each with one owner: [count] int32. Raises CapacityError, having taken none, if fewer are available."""
        if count > self.available:
            raise CapacityError(f"{count} cache pages were asked for; {self.available} of {self.capacity} are without an owner")
        if count > self._num_free:
            self._evict(count - self._num_free)
        self._num_free -= count
        pages: Int32Array = self._stack[self._num_free : self._num_free + count][::-1].copy()
        self.owners[pages if count != 1 else pages.item()] = 1  # of one, by its number: that takes a tenth of the time
        return pages

    def retain(self, pages: Int32Array) -> None:
        """Add one owner to each of `pages`, which are distinct and were found in the index."""
        for page in pages[self.owners[pages] == 0].tolist():
            del self._idle[page]
        self.owners[pages] += 1

    def release(self, pages: Int32Array) -> None:
        """Take one owner from each page; a page may be named several times, null pages are passed over.

        Of pages that become idle, the one named first is reused first: name a request's pages from its end.
        """
        pages = pages[pages > 0]
        if not pages.size:
            return
        np.subtract.at(self.owners, pages, 1)
        left = pages[self.owners[pages] == 0]
        if not left.size:
            return
        self.gains += 1
        indexed = self._indexed[left]
        # Without an index asked for, numpy would now import its masked arrays: 40 ms of the first request that ends.
        self._push(np.unique(left[~indexed], return_index=True)[0])
        for page in left[indexed].tolist():
            self._idle[page] = None

    def find(self, group: int, key: bytes) -> int:
        """Page of `group` whose contents have `key`, or 0."""
        return self._index.get((group, key), 0)

    def insert(self, group: int, key: bytes, page: int) -> None:
        """Make an owned page findable. A key that is there already keeps its page, and a page its key."""
        entry = (group, key)
        if entry in self._index or page in self._keys:
            return
        assert self.owners[page] > 0, f"page {page} has no owner and cannot enter the index"
        self._index[entry] = page
        self._keys[page] = entry
        self._indexed[page] = True
        self.gains += 1

    def forget(self, pages: Int32Array) -> None:
        """Take pages out of the index; those that were idle become free."""
        for page in pages[self._indexed[pages]].tolist():
            self._drop_key(page)
            if page in self._idle:
                del self._idle[page]
                self._push(np.array([page], np.int32))

    def reset_index(self) -> None:
        """Take every page out of the index."""
        self.forget(np.flatnonzero(self._indexed).astype(np.int32))

    def record_freed(self) -> None:
        """From now on keep the list that `take_freed` returns. For tests: nothing bounds its length."""
        self._freed = []

    def take_freed(self) -> list[int]:
        """Pages whose contents died since the last call (needs `record_freed`). Some may have been given out again since."""
        assert self._freed is not None, "this pool does not record freed pages"
        freed, self._freed = self._freed, []
        return freed

    def check(self, owners: npt.NDArray[np.integer]) -> None:
        """Raise AssertionError unless each page has exactly the owners that `owners` [arena_pages] says and the lists agree."""
        wrong = np.flatnonzero(self.owners != owners)
        assert not wrong.size, f"pages {wrong[:8].tolist()} have {self.owners[wrong[:8]].tolist()} owners, not {owners[wrong[:8]].tolist()}"
        free = self._stack[: self._num_free]
        idle = np.fromiter(self._idle, np.int32, len(self._idle))
        both = np.concatenate([free, idle])
        assert np.array_equal(np.sort(both), np.flatnonzero(self.owners[1:] == 0) + 1), (
            "free and idle pages are not the pages without owner"
        )
        assert not self._indexed[free].any(), "a free page is in the index"
        assert self._indexed[idle].all(), "an idle page is not in the index"
        assert np.array_equal(np.flatnonzero(self._indexed), np.sort(np.fromiter(self._keys, np.int64, len(self._keys))))
        assert {page: key for key, page in self._index.items()} == self._keys, "the index and the pages' keys differ"
        assert len(self._index) == len(self._keys), "the index names a page twice"

    def _evict(self, count: int) -> None:
        victims = [self._idle.popitem(last=False)[0] for _ in range(count)]
        for page in victims:
            self._drop_key(page)
        self._push(np.array(victims, np.int32))

    def _drop_key(self, page: int) -> None:
        del self._index[self._keys.pop(page)]
        self._indexed[page] = False

    def _push(self, pages: Int32Array) -> None:
        self._stack[self._num_free : self._num_free + pages.size] = pages
        self._num_free += pages.size
        if self._freed is not None:
            self._freed.extend(pages.tolist())
