"""Byte automata: what structured output may be, as a table that a device can walk.

The idea: a regular language over bytes is a deterministic automaton, and where an output stands in it is one number. So the masks of a
grammar can be made once, one for each state, and a sampled token's bytes lead to the next state by table look-ups alone: the host has no
part in it. `Builder` makes automata from pieces; languages that are not regular, or that take too many states, are for grammar backends
(see `grammar`).

Nothing here imports torch.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MAX_STATES = 32767  # of one automaton, and of all that a device holds: numbers of states are int16
NO_STATE = -1
ITSELF = -2  # in a line that is compared with others
NFA_FACTOR = 24  # states of the automaton that is made first, for each that the result may have
STEPS_A_STATE = 4096  # sets that are joined, for each state that the result may have
LETTERS = (0, 0x10FFFF)  # code points
UTF8_ENDS = (0x7F, 0x7FF, 0xFFFF, 0x10FFFF)  # last code points that take one, two, three, four bytes


class TooLarge(ValueError):
    """An automaton would take more states than it may have."""


@dataclass(frozen=True, eq=False)
class Automaton:
    """A deterministic automaton over bytes whose every state can still lead to an end. State 0 is the start.

    edges: [S, 256] int16, the next state for each byte, or -1. accepting: [S] bool, whether an output may end there.
    """

    edges: npt.NDArray[np.int16]
    accepting: npt.NDArray[np.bool_]

    @property
    def num_states(self) -> int:
        return int(self.accepting.size)

    def walk(self, state: int, text: bytes) -> int:
        """The state after `text`, -1 if there is none."""
        for byte in text:
            if state < 0:
                break
            state = int(self.edges[state, byte])
        return state


class Builder:
    """Builds an automaton from its end to its start: each method is told the state that a piece leads to, and returns the one that it
    begins in. `end` is the state in which an output may end.

        builder = Builder(max_states=100)
        yes_or_no = builder.either([builder.text(b"yes", builder.end), builder.text(b"no", builder.end)])
        automaton = builder.automaton(yes_or_no)

    Raises TooLarge when it becomes clear that the result would have more than `max_states`, or take too long to make.
    """

    def __init__(self, max_states: int) -> None:
        self.max_states = min(max_states, MAX_STATES)
        self._edges: list[list[tuple[int, int, int]]] = []  # of each state: first byte, last byte, next state
        self._free: list[list[int]] = []  # of each state: states that are reached without a byte
        self._shared: dict[tuple[int, int, int], int] = {}
        self.end = self.state()

    def state(self) -> int:
        """A new state without edges."""
        if len(self._edges) >= NFA_FACTOR * self.max_states:
            raise TooLarge(f"it takes more than {self.max_states} states")
        self._edges.append([])
        self._free.append([])
        return len(self._edges) - 1

    def join(self, state: int, to: int) -> None:
        """Let `state` be all that `to` is, too."""
        self._free[state].append(to)

    def either(self, starts: Iterable[int]) -> int:
        """One of several pieces."""
        state = self.state()
        self._free[state].extend(starts)
        return state

    def text(self, text: bytes, then: int) -> int:
        """These bytes."""
        for byte in reversed(text):
            then = self._byte(byte, byte, then)
        return then

    def letter(self, ranges: Sequence[tuple[int, int]], then: int) -> int:
        """One code point out of `ranges`, (first, last) each, in UTF-8."""
        state = self.state()
        for first, last in ranges:
            self._spread(state, first, last, then)
        return state

    def _byte(self, first: int, last: int, then: int) -> int:
        """A state with one edge; the same one for the same edge."""
        key = (first, last, then)
        if key not in self._shared:
            state = self._shared[key] = self.state()
            self._edges[state].append(key)
        return self._shared[key]

    def _spread(self, state: int, first: int, last: int, then: int) -> None:
        """Edges out of `state` for the code points first..last: the range is cut until each part is a product of ranges of bytes."""
        for end in UTF8_ENDS[:-1]:
            if first <= end < last:
                self._spread(state, first, end, then)
                self._spread(state, end + 1, last, then)
                return
        length = 1 + sum(first > end for end in UTF8_ENDS[:-1])
        for low in range(1, length):
            mask = (1 << 6 * low) - 1
            if first >> 6 * low != last >> 6 * low:
                if first & mask:
                    self._spread(state, first, first | mask, then)
                    self._spread(state, (first | mask) + 1, last, then)
                    return
                if last & mask != mask:
                    self._spread(state, first, (last & ~mask) - 1, then)
                    self._spread(state, last & ~mask, last, then)
                    return
        starts, ends = utf8(first), utf8(last)
        for low_byte, high_byte in zip(starts[:0:-1], ends[:0:-1], strict=True):
            then = self._byte(low_byte, high_byte, then)
        self._edges[state].append((starts[0], ends[0], then))

    def automaton(self, start: int) -> Automaton:
        """The automaton that begins in `start`. Raises ValueError if nothing can be written from there."""
        classes, cuts = self._classes()
        moves = self._moves(classes)
        table, accepting = self._subsets(start, moves, len(cuts))
        table, accepting = merged(*trimmed(table, accepting))
        if len(table) > self.max_states:
            raise TooLarge(f"it takes more than {self.max_states} states")
        lines = np.array(table, np.int16).reshape(len(table), len(cuts))
        return Automaton(np.ascontiguousarray(lines[:, classes]), np.array(accepting, np.bool_))

    def _classes(self) -> tuple[npt.NDArray[np.int64], list[int]]:
        """The class of each byte, [256], and the first byte of each class: bytes of one class lead everywhere to the same."""
        bounds = {0}
        for edges in self._edges:
            for first, last, _ in edges:
                bounds.update((first, last + 1))
        cuts = sorted(bounds - {256})
        return np.searchsorted(cuts, np.arange(256), side="right") - 1, cuts

    def _closures(self) -> list[frozenset[int]]:
        """For each state those that it stands for: what it reaches without a byte, of those that have edges or are the end."""
        found: list[frozenset[int]] = []
        for state in range(len(self._edges)):
            seen, stack = {state}, [state]
            while stack:
                for to in self._free[stack.pop()]:
                    if to not in seen:
                        seen.add(to)
                        stack.append(to)
            found.append(frozenset(each for each in seen if self._edges[each] or each == self.end))
        return found

    def _moves(self, classes: npt.NDArray[np.int64]) -> tuple[list[frozenset[int]], list[list[tuple[int, frozenset[int]]]]]:
        closures = self._closures()
        moves = [
            [(int(each), closures[to]) for first, last, to in edges for each in range(classes[first], classes[last] + 1)]
            for edges in self._edges
        ]
        return closures, moves

    def _subsets(
        self, start: int, given: tuple[list[frozenset[int]], list[list[tuple[int, frozenset[int]]]]], width: int
    ) -> tuple[list[list[int]], list[bool]]:
        """The subset construction (Rabin and Scott 1959). Returns lines of next states by class, and which states accept."""
        closures, moves = given
        numbers = {closures[start]: 0}
        subsets = [closures[start]]
        table: list[list[int]] = []
        steps, most = 0, STEPS_A_STATE * self.max_states
        for subset in subsets:  # it grows meanwhile
            time.sleep(0)  # lets other threads have the interpreter
            reached: defaultdict[int, set[int]] = defaultdict(set)
            for state in subset:
                for each, targets in moves[state]:
                    reached[each] |= targets
                    steps += len(targets)
            line = [NO_STATE] * width
            for each, union in reached.items():
                key = frozenset(union)
                number = numbers.setdefault(key, len(subsets))
                if number == len(subsets):
                    subsets.append(key)
                line[each] = number
            table.append(line)
            if len(subsets) > 2 * self.max_states or steps > most:  # some of them may yet become one
                raise TooLarge(f"it takes more than {self.max_states} states")
        return table, [self.end in subset for subset in subsets]


def utf8(letter: int) -> bytes:
    """The UTF-8 of a code point, be it a surrogate."""
    return chr(letter).encode("utf-8", "surrogatepass")


def trimmed(table: list[list[int]], accepting: list[bool]) -> tuple[list[list[int]], list[bool]]:
    """Without the states from which no end can be reached. Raises ValueError if the first is one of them."""
    sources: defaultdict[int, set[int]] = defaultdict(set)
    for state, line in enumerate(table):
        for to in line:
            sources[to].add(state)
    stack = [state for state, ends in enumerate(accepting) if ends]
    alive = set(stack)
    while stack:
        for source in sources[stack.pop()] - alive:
            alive.add(source)
            stack.append(source)
    if 0 not in alive:
        raise ValueError("nothing satisfies it")
    return renumbered(table, accepting, {state: number for number, state in enumerate(sorted(alive))})


def merged(table: list[list[int]], accepting: list[bool]) -> tuple[list[list[int]], list[bool]]:
    """States that lead to the same by the same bytes become one, again and again."""
    while True:
        first: dict[tuple[bool, tuple[int, ...]], int] = {}
        same = [0] * len(table)
        for state in range(len(table) - 1, -1, -1):  # what is built later lies further back, mostly: ends come first here
            line = tuple(ITSELF if to == state else same[to] if to > state else to for to in table[state])
            same[state] = first.setdefault((accepting[state], line), state)
        kept = sorted(set(same), key=lambda state: (state != same[0], state))  # the start stays the first
        if len(kept) == len(table):
            return table, accepting
        places = {state: number for number, state in enumerate(kept)}
        table, accepting = renumbered(table, accepting, {state: places[same[state]] for state in range(len(table))}, kept)


def renumbered(
    table: list[list[int]], accepting: list[bool], numbers: dict[int, int], kept: Sequence[int] | None = None
) -> tuple[list[list[int]], list[bool]]:
    """The states of `kept` (all that have a number) under new numbers; edges to others are gone."""
    kept = list(numbers) if kept is None else kept
    return [[numbers.get(to, NO_STATE) for to in table[state]] for state in kept], [accepting[state] for state in kept]


def of_choice(texts: Iterable[str], max_states: int) -> Automaton:
    """The automaton of a list of texts. Raises TooLarge."""
    builder = Builder(max_states)
    return builder.automaton(builder.either([builder.text(text.encode(), builder.end) for text in texts]))
