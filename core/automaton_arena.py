"""Where the device keeps byte automata: edges, one mask for each state, and the bytes of all tokens.

The idea: a grammar is loaded once, in pieces, a few in a turn of the loop, and lies in a run of lines of tables that never move, so
captured steps can read them. All requests for the same grammar share it. It stays when they have ended, until its lines are needed for
another. New lines are written by the compute stream, behind every step that read the old ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from modelrunner.automaton import MAX_STATES, NO_STATE, Automaton
from modelrunner.device import Device, Event
from modelrunner.grammar import BITS, PackedTokens, Vocabulary
from modelrunner.ops import Ops

STAGED = 512 << 10  # bytes that a turn copies at most
BUFFERS = 3  # of so many bytes
MASK_BITS = 1 << 20  # of masks that are made at a time
TURN_SECONDS = 0.002  # after which a turn enqueues no further masks; a CPU makes them meanwhile
TOKEN_BYTES = 16  # that there is room for, for each token: vocabularies have 4 to 9
STATE_BYTES = 256 * 2 + 2  # of a state beside its mask


@dataclass(eq=False)
class Place:
    """An automaton on the device, in the lines first .. first + automaton.num_states - 1.

    holders: requests that use it. ready: it is loaded. problem: why it never will be.
    """

    automaton: Automaton
    vocabulary: Vocabulary
    first: int
    holders: int = 0
    ready: bool = False
    problem: str = ""

    @property
    def end(self) -> int:
        return self.first + self.automaton.num_states

    def line_after(self, token_ids: Sequence[int]) -> int:
        """The line of the state after an output, which the automaton has allowed."""
        state, tokens = 0, self.vocabulary.tokens
        for token in token_ids:
            if token not in self.vocabulary.stop_ids:
                state = self.automaton.walk(state, tokens[token])
        assert state >= 0, "the output is none that the automaton allows"
        return self.first + state

    def goes_on(self, token_ids: Sequence[int]) -> bool:
        """Whether some token may follow an output, or its end."""
        state = self.line_after(token_ids) - self.first
        tokens = self.vocabulary.tokens
        return bool(self.automaton.accepting[state]) or any(text and self.automaton.walk(state, text) >= 0 for text in tokens)


@dataclass
class _Loading:
    """A place whose next piece of work is `next(pieces)`, which says whether the turn has done enough by that."""

    place: Place
    pieces: Iterator[bool] = field(repr=False)


class AutomatonArena:
    """The tables, and what lies where in them. For the loop's thread alone.

    edges [A, 256] int16: lines of next states, -1 for none. accepting, closed [A] uint8, masks [A + 1, words] int32, token_start [V + 1]
    int32, token_bytes [B] uint8, stops [words] int32: see `modelrunner.kernels.automata`. longest: bytes of the longest token.
    """

    def __init__(self, ops: Ops, device: Device, vocab_size: int, num_bytes: int) -> None:
        """num_bytes: what edges and masks may take."""
        words = max(2, -(-vocab_size // BITS))
        self._ops, self._device = ops, device
        self.num_states = min(MAX_STATES, num_bytes // (STATE_BYTES + 4 * words))

        def table(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device.torch_device)

        self.edges = table(self.num_states, 256, dtype=torch.int16)
        self.accepting, self.closed = (table(self.num_states, dtype=torch.uint8) for _ in range(2))
        self.masks = table(self.num_states + 1, words, dtype=torch.int32)
        self.token_start = table(vocab_size + 1, dtype=torch.int32)
        self.token_bytes = table(TOKEN_BYTES * vocab_size, dtype=torch.uint8)
        self.stops = table(words, dtype=torch.int32)
        self.longest = 1
        self._staging = [device.pinned(STAGED) for _ in range(BUFFERS)]
        self._marks = [device.pinned(4) for _ in range(BUFFERS)]
        self._copied: list[Event | None] = [None] * BUFFERS
        self._turn = 0
        self._places: dict[Hashable, Place] = {}  # the one used last comes last
        self._loading: dict[Place, _Loading] = {}
        self._knows_tokens = False

    def __str__(self) -> str:
        tables = (self.edges, self.accepting, self.closed, self.masks, self.token_start, self.token_bytes, self.stops)
        size = sum(table.nbytes for table in tables) / 2**20
        return f"{self.num_states} states of grammars, {size:.1f} MiB"

    def place(self, key: Hashable, automaton: Automaton, vocabulary: Vocabulary) -> Place | str:
        """A place for one more holder of the automaton, which may have to be loaded first; or why there is none. key: equal for equal
        automata."""
        place = self._places.pop(key, None)
        if place is None or place.problem:
            first = self._room(automaton.num_states)
            if first is None:
                return f"no {automaton.num_states} states are free (setting grammar.automaton_memory)"
            if (needed := vocabulary.packed.text.size) > self.token_bytes.shape[0]:
                return f"the vocabulary has {needed} bytes, and there is room for {self.token_bytes.shape[0]}"
            place = Place(automaton, vocabulary, first)
            self._loading[place] = _Loading(place, self._load(place))
        self._places[key] = place
        place.holders += 1
        return place

    def release(self, place: Place) -> None:
        """A holder has ended."""
        place.holders -= 1

    @property
    def busy(self) -> bool:
        """Whether `advance` has something to do."""
        return bool(self._loading)

    def advance(self) -> None:
        """Enqueue the next pieces of loading."""
        loading = next(iter(self._loading.values()), None)
        if loading is None:
            return
        stop = time.perf_counter() + TURN_SECONDS
        try:
            while not next(loading.pieces):
                if time.perf_counter() >= stop:
                    return
            return
        except StopIteration:
            loading.place.ready = True
        except Exception as error:
            loading.place.problem = f"loading it failed: {type(error).__name__}: {error}"
        del self._loading[loading.place]

    # ---- lines -----------------------------------------------------------------------------------------------------------

    def _room(self, size: int) -> int | None:
        """The first of `size` free lines; automata that nobody holds give way, those first that were used longest ago."""
        idle = [key for key, place in self._places.items() if not place.holders]
        for given_up in range(len(idle) + 1):
            first = self._gap(size, set(idle[:given_up]))
            if first is not None:
                for key in idle[:given_up]:
                    self._loading.pop(self._places.pop(key), None)
                return first
        return None

    def _gap(self, size: int, without: set[Hashable]) -> int | None:
        end = 0
        for place in sorted((place for key, place in self._places.items() if key not in without), key=lambda place: place.first):
            if place.first - end >= size:
                return end
            end = place.end
        return end if self.num_states - end >= size else None

    # ---- loading ---------------------------------------------------------------------------------------------------------

    def _load(self, place: Place) -> Iterator[bool]:
        """Yields after each piece. One copy is enough for a turn, so that a pinned buffer has been read when its turn comes again."""
        automaton, first, count = place.automaton, place.first, place.automaton.num_states
        if not self._knows_tokens:
            yield from self._load_tokens(place.vocabulary.packed)
        edges = np.where(automaton.edges < 0, NO_STATE, automaton.edges + np.int16(first)).astype(np.int16)
        yield from self._copy(edges, self.edges[first : first + count])
        yield from self._copy(automaton.accepting.view(np.uint8), self.accepting[first : first + count])
        size = max(1, MASK_BITS // (BITS * self.stops.shape[0]))
        for begin in range(first, first + count, size):
            self._device.launch(self.masking(begin, min(size, first + count - begin)))
            yield False

    def _load_tokens(self, tokens: PackedTokens) -> Iterator[bool]:
        self.longest = tokens.longest
        for array, table in ((tokens.start, self.token_start), (tokens.text, self.token_bytes), (tokens.stops, self.stops)):
            yield from self._copy(array, table)
        self._knows_tokens = True

    def _copy(self, array: npt.NDArray[Any], table: torch.Tensor) -> Iterator[bool]:
        """Bring an array to the start of a table, through the pinned buffers in turn."""
        data, target = np.ascontiguousarray(array).reshape(-1).view(np.uint8), table.reshape(-1).view(torch.uint8)
        for begin in range(0, data.size, STAGED):
            at = self._turn % BUFFERS
            self._turn += 1
            if (event := self._copied[at]) is not None:
                event.wait()  # for a copy of an earlier turn, which was before the step that was collected since
                self._device.release(self._staging[at])
            part = data[begin : begin + STAGED]
            self._staging[at].array[: part.size] = part
            source = self._staging[at].tensor[: part.size]
            self._device.launch(_copying(source, target[begin : begin + part.size]))
            self._copied[at] = self._device.download(lambda: self.stops[:1], self._marks[at])
            yield True

    def masking(self, first: int, count: int) -> Callable[[], None]:
        """The work that makes the masks of some states."""

        def work() -> None:
            text = (self.token_start, self.token_bytes, self.longest, self.stops)
            self._ops.mask_states(first, count, self.edges, self.accepting, *text, self.masks, self.closed)

        return work


def _copying(source: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
    def work() -> None:
        target.copy_(source, non_blocking=True)

    return work
