"""Which pages hold the start of a token sequence: hash-chained page keys, and the longest prefix that every cache group can serve.

The key of a page is a hash of the key of the page before it and of the page's own tokens, so that equal keys mean equal tokens from the
start on. The chain starts from a root, which keeps apart worlds whose caches differ for equal tokens: weight versions, adapters, salts.
A page with tokens of media also has in its key which embeddings these take: the media's own key, and the first one's number.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from modelrunner.media import RequestMedia
from modelrunner.page_pool import GroupLayout, Int32Array, PagePool

KEY_BYTES = 16


def root_key(seed: bytes, adapter: str | None, salt: str | None, world: bytes | None = None, private: str | None = None) -> bytes:
    """Start of a chain. Each part is written with its presence and length, so no two that differ in any give the same text to hash.

    seed: names the weights. world: what taps do to the request's hidden states. private: names the few that share it.
    """
    text = blake2b(digest_size=KEY_BYTES)
    for part in (seed, adapter, salt, world, *(() if private is None else (private,))):
        if part is None:
            text.update(b"\0")
        else:
            data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
            text.update(b"\1" + len(data).to_bytes(8, "little") + data)
    return text.digest()


class Span(NamedTuple):
    """Tokens start..stop-1 of a sequence, which take the embeddings from number `offset` on of the item with this key."""

    start: int
    stop: int
    key: bytes
    offset: int


def media_spans(media: RequestMedia) -> tuple[Span, ...]:
    """The spans of a request's media, by rising start."""
    return tuple(Span(run.start, run.start + run.length, media.items[run.item].key, run.offset) for run in media.runs)


@dataclass
class PageKeys:
    """The chains of one sequence, one per page size: `chains[tokens_per_page]` are the keys of its full pages, in order.

    shifted: what some group keeps of a token was made from the token after it too. So a page's key has one token more in it, the first
    one after the page; a full page without a next token has none yet. spans: where it has media, by rising start.
    """

    root: bytes
    shifted: bool = False
    spans: tuple[Span, ...] = ()
    chains: dict[int, list[bytes]] = field(default_factory=dict)
    _hashes: dict[int, bytes] = field(default_factory=dict)  # of all tokens of the pages that have keys, by page size

    def pages_of(self, num_tokens: int, tokens_per_page: int) -> int:
        """Pages of so many known tokens that can have keys."""
        return max(num_tokens - self.shifted, 0) // tokens_per_page

    def extend(self, tokens: Int32Array, tokens_per_page: int, num_pages: int) -> list[bytes]:
        """Keys of at least the first `num_pages` pages of `tokens` [n] int32; hashes only what is new."""
        chain = self.chains.setdefault(tokens_per_page, [])
        done = len(chain)
        if done >= num_pages:
            return chain
        parent = self._hashes.get(tokens_per_page, self.root)
        size = tokens_per_page * tokens.itemsize
        data = tokens[done * tokens_per_page : num_pages * tokens_per_page + self.shifted].tobytes()
        ends = range(size, (num_pages - done) * size + 1, size)
        if not self.spans and not self.shifted:
            for end in ends:
                parent = blake2b(parent + data[end - size : end], digest_size=KEY_BYTES).digest()
                chain.append(parent)
            self._hashes[tokens_per_page] = parent
            return chain
        for page, end in enumerate(ends, done):
            more = self._media(page * tokens_per_page, tokens_per_page)
            parent = blake2b(parent + data[end - size : end] + more, digest_size=KEY_BYTES).digest()
            following = data[end : end + tokens.itemsize] if self.shifted else b""
            if following:
                following += self._media((page + 1) * tokens_per_page, 1)
            chain.append(blake2b(parent + following, digest_size=KEY_BYTES).digest() if following else parent)
        self._hashes[tokens_per_page] = parent
        return chain

    def _media(self, start: int, size: int) -> bytes:
        """What the page of `size` tokens from `start` on holds of media; empty if there are none."""
        found: list[bytes] = []
        for span in self.spans[bisect_right(self.spans, start, key=lambda span: span.stop) :]:
            if span.start >= start + size:
                break
            first = max(span.start, start)
            numbers = (first - start, min(span.stop, start + size) - start, span.offset + first - span.start)
            found.append(span.key + b"".join(number.to_bytes(4, "little") for number in numbers))
        return b"".join(found)


@dataclass(frozen=True)
class Hit:
    """Cached start of a sequence. length: tokens. Per group: `first`, the first page that is needed, and `pages`, those from there on."""

    length: int
    first: tuple[int, ...]
    pages: tuple[Int32Array, ...]


class PrefixCache:
    """Looks sequences up in the pool's index and enters pages into it."""

    def __init__(self, layouts: Sequence[GroupLayout], pool: PagePool) -> None:
        self._layouts = tuple(layouts)
        self._pool = pool
        self._unit = math.lcm(*(layout.tokens_per_page for layout in layouts)) if layouts else 0
        self._whole = [(index, layout) for index, layout in enumerate(layouts) if layout.whole]
        self.miss = Hit(0, (0,) * len(self._layouts), tuple(np.empty(0, np.int32) for _ in layouts))

    def hit(self, keys: PageKeys, tokens: Int32Array) -> Hit:
        """Longest start of `tokens` [n] int32 that every group can serve, at most n - 1: one token must be left to compute.

        Takes no ownership of the pages: retain them before anything is allocated.
        """
        if not self._unit:
            return self.miss
        if tokens.size <= self._unit or self._begins_anew(keys, tokens):
            return self.miss
        lengths = np.arange(self._unit, tokens.size, self._unit, dtype=np.int64)
        served = np.ones(lengths.size, np.bool_)
        found = []
        for index, layout in enumerate(self._layouts):
            pages = self._lookup(index, layout, keys, tokens, int(lengths[-1]))
            present = np.concatenate([[0], np.cumsum(pages > 0)])
            first = layout.group.needed_from(lengths) // layout.tokens_per_page
            last = lengths // layout.tokens_per_page
            served &= present[last] - present[first] == last - first
            found.append((pages, first, last))
        best = np.flatnonzero(served)
        if not best.size:
            return self.miss
        at = best[-1]
        return Hit(
            int(lengths[at]),
            tuple(int(first[at]) for _, first, _ in found),
            tuple(pages[first[at] : last[at]] for pages, first, last in found),
        )

    def _begins_anew(self, keys: PageKeys, tokens: Int32Array) -> bool:
        """Whether a group that needs all earlier tokens lacks the first page. Then the others need no keys yet: the request can start, and
        its prompt is hashed once it is computed, while the device has work."""
        for index, layout in self._whole[:1]:
            return not self._pool.find(index, keys.extend(tokens, layout.tokens_per_page, 1)[0])
        return False

    def insert(self, group: int, chain: Sequence[bytes], table: Int32Array, start: int, stop: int) -> None:
        """Enter pages start..stop-1 of a sequence whose block table of `group` is `table`; null pages are passed over."""
        enter = self._pool.insert
        for key, page in zip(chain[start:stop], table[start:stop].tolist(), strict=True):
            if page:
                enter(group, key, page)

    def _lookup(self, index: int, layout: GroupLayout, keys: PageKeys, tokens: Int32Array, length: int) -> Int32Array:
        count = length // layout.tokens_per_page
        chain = keys.extend(tokens, layout.tokens_per_page, count)
        find = self._pool.find
        return np.fromiter((find(index, key) for key in chain[:count]), np.int32, count)
