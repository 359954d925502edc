"""The contract of grammar backends: from what a request asks for to the ids that may come next.

A backend knows bytes and token ids, and nothing of requests, rows or devices. `compile` runs in a thread beside the loop and may take its
time; `Matcher.accept` and `Matcher.fill` run in the loop, once for each token of a request, and should take microseconds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from modelrunner.errors import RequestError

if TYPE_CHECKING:
    from modelrunner.automaton import Automaton
    from modelrunner.settings import RunnerSettings
    from modelrunner.structured_outputs import StructuredOutputsParams
    from modelrunner.text import Tokenizer

BITS = 32  # ids in a word of a mask
Mask = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Vocabulary:
    """What a backend is told of a model's ids.

    tokens: the bytes of each id, 0 to the size of the model's logits; empty for special tokens and for ids without text.
    stop_ids: those that may end an output.
    """

    tokens: Sequence[bytes]
    stop_ids: tuple[int, ...]

    @cached_property
    def words(self) -> int:
        """Words of a mask."""
        return -(-len(self.tokens) // BITS)

    @cached_property
    def packed(self) -> PackedTokens:
        """The same as arrays."""
        stops = set(self.stop_ids)
        texts = [b"" if item in stops else text for item, text in enumerate(self.tokens)]
        lengths = np.fromiter(map(len, texts), np.int32, len(texts))
        start = np.zeros(len(texts) + 1, np.int32)
        np.cumsum(lengths, out=start[1:])
        bits = np.zeros(max(2, self.words) * BITS, np.uint8)
        bits[list(stops)] = 1
        stop_mask = np.packbits(bits, bitorder="little").view(np.int32)
        return PackedTokens(start, np.frombuffer(b"".join(texts), np.uint8), stop_mask, int(lengths.max(initial=0)))


@dataclass(frozen=True, eq=False)
class PackedTokens:
    """start: [V + 1] int32, where each token's bytes begin in `text` uint8; stop ids have none. stops: [words] int32 mask of stop ids.
    longest: bytes of the longest token."""

    start: Mask
    text: npt.NDArray[np.uint8]
    stops: Mask
    longest: int


class Matcher(ABC):
    """How far one output has come in its grammar."""

    @abstractmethod
    def accept(self, token_id: int) -> bool:
        """Go on by one token of the output, which is no stop id. False, and nothing more is asked, if the grammar does not take it."""

    @abstractmethod
    def fill(self, mask: Mask) -> None:
        """Write which ids may come next: bit v % 32 of word v // 32 for id v; those of stop ids when the output may end here.

        mask: [Vocabulary.words] int32, contiguous; every word of it is written.
        """


class Grammar(ABC):
    """A compiled grammar, shared by all requests that ask for the same."""

    @abstractmethod
    def matcher(self) -> Matcher:
        """At the start of an output. Called in the loop."""


class GrammarBackend(ABC):
    """Compiles grammars for one vocabulary. Made once, when the first request asks for structured output."""

    def __init__(self, vocabulary: Vocabulary, settings: RunnerSettings) -> None:
        self.vocabulary = vocabulary
        self.settings = settings

    @abstractmethod
    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """The grammar of `params`. Runs outside the loop, in several threads at once.

        Raises ValueError, whose text is told to the user, for what it does not understand or cannot do.
        """

    def automaton(self, params: StructuredOutputsParams, max_states: int) -> Automaton:
        """The language of `params` as an automaton, which allows what `compile`'s matchers allow; then the device does without them. Runs
        as `compile` does, and before it. `modelrunner.automaton` helps.

        Raises ValueError, whose text is told as the reason, if the language is not regular, if it takes more states, or if the backend
        makes no automata: `compile` is asked then.
        """
        raise ValueError("the grammar backend makes no automata")


def vocabulary(tokenizer: Tokenizer, stop_ids: Sequence[int], vocab_size: int) -> Vocabulary:
    """What the tokenizer says of the model's `vocab_size` ids. Raises RequestError when it does not say the bytes of its ids."""
    told = getattr(tokenizer, "token_bytes", None)
    if told is None:
        raise RequestError(
            f"structured_outputs: the tokenizer {type(tokenizer).__name__} does not say which bytes its ids stand for; accepted: one with "
            "a method token_bytes()"
        )
    tokens = list(told())[:vocab_size]
    tokens += [b""] * (vocab_size - len(tokens))
    return Vocabulary(tokens, tuple(sorted({item for item in stop_ids if item < vocab_size})))
