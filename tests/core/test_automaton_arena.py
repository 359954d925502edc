"""The arena: who lies where, what is shared, what gives way, and loading in pieces on a device that runs late."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from modelrunner.automaton import Automaton, of_choice
from modelrunner.automaton_arena import STATE_BYTES, AutomatonArena, Place
from modelrunner.device import Device
from modelrunner.devices.deferred import DeferredCpuDevice
from modelrunner.grammar import Vocabulary
from modelrunner.kernels.automata import reference
from modelrunner.ops import Ops
from modelrunner.settings import load_settings
from modelrunner.testing.byte_tokenizer import EOS, ByteTokenizer

WORDS = Vocabulary(ByteTokenizer(331).token_bytes(), (EOS,))
OPS = Ops({"mask_states": reference.mask_states}, {})
LINE = STATE_BYTES + 4 * WORDS.words


def device(seed: int = 0) -> Device:
    from modelrunner.devices.settings import DeferredCpuSettings

    values = {"plugin": {"deferred_cpu": {"seed": seed, "run_probability": 0.3}}}
    return DeferredCpuDevice(load_settings(values, sections={"deferred_cpu": DeferredCpuSettings}, environ={}))


def arena(states: int, seed: int = 0) -> AutomatonArena:
    return AutomatonArena(OPS, device(seed), len(WORDS.tokens), states * LINE)


def chain(size: int, letter: str = "a") -> Automaton:
    """An automaton of so many states."""
    made = of_choice([letter * (size - 1)], size)
    assert made.num_states == size
    return made


def placed(where: AutomatonArena, key: Any, automaton: Automaton) -> Place:
    place = where.place(key, automaton, WORDS)
    assert isinstance(place, Place), place
    return place


def load(where: AutomatonArena) -> int:
    turns = 0
    while where.busy:
        where.advance()
        turns += 1
    where._device.synchronize()
    return turns


def check(where: AutomatonArena, place: Place) -> None:
    """The device has what walking the automaton by hand gives."""
    first, automaton = place.first, place.automaton
    for state in range(automaton.num_states):
        bits = np.unpackbits(where.masks[first + state].numpy().view(np.uint8), bitorder="little")[: len(WORDS.tokens)]
        leads = [bool(text) and automaton.walk(state, text) >= 0 for text in WORDS.tokens]
        leads[EOS] = bool(automaton.accepting[state])
        assert bits.tolist() == leads
        edges = where.edges[first + state].numpy()
        assert np.array_equal(edges, np.where(automaton.edges[state] < 0, -1, automaton.edges[state] + first))


@pytest.mark.parametrize("seed", range(4))
def test_what_is_loaded_is_what_was_given(seed: int) -> None:
    where = arena(100, seed)
    assert where.num_states == 100
    places = [placed(where, name, of_choice([name, "abc"], 50)) for name in ("one", "two and more", "three")]
    assert not any(place.ready for place in places)
    assert load(where) > 3 * 3
    assert all(place.ready for place in places)
    for place in places:
        check(where, place)
    spans = sorted((place.first, place.end) for place in places)
    assert all(left[1] <= right[0] for left, right in itertools.pairwise(spans))


def test_equal_grammars_share_their_states() -> None:
    where = arena(20)
    first = placed(where, "a", chain(15))
    load(where)
    assert placed(where, "a", chain(15)) is first
    assert first.holders == 2
    assert not where.busy
    assert "15 states are free" in str(where.place("b", chain(15, "b"), WORDS))


def test_what_nobody_uses_gives_way_the_oldest_first() -> None:
    where = arena(30)
    a, b, c = (placed(where, name, chain(10, name)) for name in "abc")
    load(where)
    for place in (b, a, c):
        where.release(place)
    assert placed(where, "a", chain(10)) is a  # used again, so b and c are older
    where.release(a)
    assert placed(where, "d", chain(8, "d")).first == b.first
    assert placed(where, "c", chain(10, "c")) is c
    assert isinstance(where.place("e", chain(11, "e"), WORDS), str), "a alone is too small, and the others are in use"
    assert placed(where, "a", chain(10)) is a, "nothing gave way in vain"
    load(where)
    check(where, where._places["d"])
    check(where, a)


def test_states_of_several_that_gave_way_become_one_run() -> None:
    where = arena(30)
    for name in "abc":
        where.release(placed(where, name, chain(10, name)))
    load(where)
    big = placed(where, "z", chain(25, "z"))
    load(where)
    check(where, big)


def test_giving_way_while_it_is_loaded() -> None:
    where = arena(10)
    gone = placed(where, "a", chain(10))
    where.advance()
    where.release(gone)
    new = placed(where, "b", chain(9, "b"))
    load(where)
    assert not gone.ready
    check(where, new)


def test_a_load_that_fails_is_told_and_tried_again() -> None:
    where, calls = arena(10), [0]

    def failing(*arguments: Any) -> None:
        calls[0] += 1
        raise RuntimeError("planted")

    launch = where._device.launch
    where._device.launch = failing  # type: ignore[method-assign]
    place = placed(where, "a", chain(10))
    where.advance()
    assert place.problem == "loading it failed: RuntimeError: planted"
    assert not place.ready
    assert not where.busy
    where._device.launch = launch  # type: ignore[method-assign]
    where.release(place)
    again = placed(where, "a", chain(10))
    assert again is not place
    load(where)
    check(where, again)


def test_a_vocabulary_of_too_many_bytes_is_not_taken() -> None:
    long = Vocabulary([b"x" * 40] * 331, (EOS,))
    assert "the vocabulary has 13200 bytes, and there is room for 5296" in str(arena(10).place("a", chain(10), long))


def test_a_place_finds_the_state_after_an_output() -> None:
    where = arena(40)
    placed(where, "x", chain(7))
    place = placed(where, "a", of_choice(["abcd"], 10))
    ids = [WORDS.tokens.index(bytes([byte])) for byte in b"abcd"]
    assert place.line_after([]) == place.first == 7
    assert place.line_after(ids[:3]) == place.first + place.automaton.walk(0, b"abc")
    assert place.line_after([*ids, EOS]) == place.line_after(ids)
    assert place.goes_on(ids[:2])
    bare = placed(where, "b", of_choice(["€"], 10))
    bare = Place(bare.automaton, Vocabulary([b"", b"a"], (0,)), 0)
    assert not bare.goes_on([])


def test_no_memory_no_states() -> None:
    assert arena(0).num_states == 0
    assert isinstance(arena(0).place("a", chain(2), WORDS), str)
    assert torch.equal(arena(3).masks, torch.zeros(4, WORDS.words, dtype=torch.int32))
