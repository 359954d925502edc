"""The books of the arena: lines are free or in one entry, shared entries have owners, and the one used longest ago gives way."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from modelrunner.encoder_arena import EncoderArena, Entry


def filled(arena: EncoderArena, name: str, size: int) -> Entry:
    """An item that was encoded and that nobody reads."""
    entry = arena.allocate(name.encode(), size)
    entry.ready = True
    arena.release(entry)
    return entry


def check(arena: EncoderArena, *owned: Entry) -> None:
    arena.check(Counter(id(entry) for entry in owned))


def test_an_entry_stays_until_its_lines_are_needed() -> None:
    arena = EncoderArena(10)
    a, b = filled(arena, "a", 4), filled(arena, "b", 4)
    assert arena.find(b"a") is a
    assert (arena.available(), arena.num_owned) == (10, 0)
    arena.retain(a)
    arena.release(a)  # used again: now b is the one used longest ago
    c = filled(arena, "c", 5)
    assert arena.find(b"b") is None
    assert arena.find(b"a") is a
    assert not set(a.lines.tolist()) & set(c.lines.tolist())
    assert set(b.lines.tolist()) & set(c.lines.tolist())
    check(arena)


def test_what_has_owners_is_not_given_up() -> None:
    arena = EncoderArena(10)
    a = filled(arena, "a", 4)
    arena.retain(a)
    arena.retain(a)
    assert (arena.available(), arena.num_owned) == (6, 4)
    check(arena, a, a)
    arena.release(a)
    assert arena.num_owned == 4
    arena.release(a)
    assert arena.available() == 10
    with pytest.raises(AssertionError, match="more often"):
        arena.release(a)


def test_entries_may_be_spared() -> None:
    arena = EncoderArena(10)
    a, b = filled(arena, "a", 4), filled(arena, "b", 4)
    assert arena.available({b"a"}) == 6
    c = arena.allocate(b"c", 6, {b"a"})
    assert arena.find(b"a") is a
    assert arena.find(b"b") is None
    assert set(b.lines.tolist()) < set(c.lines.tolist())
    check(arena, c)


def test_an_encoding_that_fails_frees_its_lines() -> None:
    arena = EncoderArena(4)
    a = arena.allocate(b"a", 4)
    arena.retain(a)  # a row waits for it
    arena.lose(a)
    arena.release(a)
    assert arena.find(b"a") is None
    assert arena.num_owned == 4
    arena.release(a)
    assert arena.available() == 4
    check(arena)


def test_a_lost_entry_does_not_touch_its_successor() -> None:
    arena = EncoderArena(8)
    old = filled(arena, "a", 4)
    arena.retain(old)
    arena.reset()
    new = filled(arena, "a", 4)
    assert arena.find(b"a") is new
    arena.release(old)
    assert arena.find(b"a") is new
    assert arena.available() == 8
    check(arena)


def test_random_lives() -> None:
    draw = random.Random(1)
    arena, owned = EncoderArena(40), list[Entry]()
    for _ in range(3000):
        name, size = str(draw.randint(0, 12)).encode(), draw.randint(1, 15)
        entry = arena.find(name)
        if draw.random() < 0.02:
            arena.reset()
        elif entry is not None and draw.random() < 0.5:
            arena.retain(entry)
            owned.append(entry)
        elif entry is None and size <= arena.available():
            entry = arena.allocate(name, size)
            entry.ready = True
            owned.append(entry)
        elif owned:
            arena.release(owned.pop(draw.randrange(len(owned))))
        alive = [entry for entry in owned if not entry.lost]
        lines = np.concatenate([entry.lines for entry in {id(entry): entry for entry in owned}.values()] or [np.empty(0, np.int32)])
        assert len(set(lines.tolist())) == lines.size == arena.num_owned
        if len(alive) == len(owned):
            check(arena, *owned)
