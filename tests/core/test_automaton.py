"""Byte automata: letters of UTF-8, merging, limits, and the texts of small languages."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelrunner.automaton import Automaton, Builder, TooLarge, of_choice, utf8


def accepts(automaton: Automaton, text: bytes) -> bool:
    state = automaton.walk(0, text)
    return state >= 0 and bool(automaton.accepting[state])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 0x10FFFF), st.integers(0, 0x10FFFF)).map(sorted).map(tuple), min_size=1, max_size=4),
    st.lists(st.integers(0, 0x10FFFF), max_size=30),
)
def test_ranges_of_letters_take_these_letters(ranges: list[tuple[int, int]], others: list[int]) -> None:
    builder = Builder(200)
    automaton = builder.automaton(builder.letter(ranges, builder.end))
    bounds = {letter + by for each in ranges for letter in each for by in (-1, 0, 1)} - {-1, 0x110000}
    for letter in {*bounds, *others, 0x7F, 0x80, 0x7FF, 0x800, 0xD7FF, 0xE000, 0xFFFF, 0x10000}:
        inside = any(first <= letter <= last for first, last in ranges)
        assert accepts(automaton, utf8(letter)) == inside, hex(letter)
        assert not accepts(automaton, utf8(letter) + b"a")
    assert not accepts(automaton, b"\xc0\x80")
    assert not accepts(automaton, b"\xf5\x80\x80\x80")


def test_a_loop_takes_any_number_of_turns() -> None:
    builder = Builder(10)
    again = builder.state()
    builder.join(again, builder.text(b"ab", again))
    builder.join(again, builder.end)
    automaton = builder.automaton(again)
    assert automaton.num_states == 2
    assert [accepts(automaton, b"ab" * i) for i in range(3)] == [True] * 3
    assert not accepts(automaton, b"aba")


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text("abé", min_size=1, max_size=6), min_size=1, max_size=8, unique=True))
def test_choices_take_these_texts_alone(texts: list[str]) -> None:
    automaton = of_choice(texts, 100)
    words = {"".join(letters) for size in range(1, 5) for letters in itertools.product("abé", repeat=size)} | set(texts)
    assert all(accepts(automaton, word.encode()) == (word in texts) for word in words)
    assert not accepts(automaton, b"")
    lines = [(bool(ends), tuple(line)) for ends, line in zip(automaton.accepting, automaton.edges.tolist(), strict=True)]
    assert len(set(lines)) == len(lines), "two states are the same"


def test_endings_are_shared() -> None:
    texts = [f"{i} is the number of it" for i in range(10)]
    assert of_choice(texts, 1000).num_states == 1 + len(" is the number of it") + 1


def test_states_that_lead_to_no_end_are_gone() -> None:
    builder = Builder(10)
    nowhere = builder.text(b"x", builder.state())
    automaton = builder.automaton(builder.either([nowhere, builder.text(b"y", builder.end)]))
    assert automaton.walk(0, b"x") == -1
    assert automaton.num_states == 2
    lost = Builder(10)
    with pytest.raises(ValueError, match="nothing satisfies it"):
        lost.automaton(lost.text(b"x", lost.state()))


@pytest.mark.parametrize("most", [5, 40])
def test_too_many_states_are_refused(most: int) -> None:
    with pytest.raises(TooLarge, match=f"more than {most}"):
        of_choice(["a" * (most + 1)], most)
    assert of_choice(["a" * (most - 1)], most).num_states == most
    with pytest.raises(TooLarge):
        of_choice(["a" * 10_000_000], most)


def test_an_automaton_that_explodes_is_given_up() -> None:
    """The n-th letter from the end is an a: 2 ** n states."""
    builder = Builder(300)
    then = builder.end
    for _ in range(12):
        then = builder.letter([(97, 98)], then)
    again = builder.state()
    builder.join(again, builder.letter([(97, 98)], again))
    builder.join(again, builder.text(b"a", then))
    with pytest.raises(TooLarge):
        builder.automaton(again)
