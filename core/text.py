"""Text: the tokenizer protocol, detokenising as tokens arrive or at once, and stop strings.

What the text of an output is: what the output adds to the text of (the last `CONTEXT_TOKENS` prompt ids + output ids). A character
that the prompt leaves incomplete counts as output. A character that is still incomplete is never part of a delta; bytes that
the end of the output leaves incomplete become one U+FFFD. Text decoded piece by piece joins to the text decoded at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

CONTEXT_TOKENS = 8  # decoders look at few neighbours: a leading space, the bytes of one character
MAX_PENDING_TOKENS = 16  # ids that stay undecodable are given out as U+FFFD after this many, so that windows stay short
CHARACTER_TOKENS = 3  # an incomplete UTF-8 character has at most three bytes, so at most three tokens
REPLACEMENT = "\ufffd"


class Tokenizer(Protocol):
    """What the engine asks of a tokenizer. Thread-safe for reading.

    For structured output it also needs `token_bytes() -> list[bytes]`: the bytes that each id from 0 on adds to a text, none for special
    tokens. A tokenizer may lack it; then only these requests are refused.
    """

    @property
    def vocab_size(self) -> int:
        """Ids run from 0 to vocab_size - 1, added tokens included."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """End-of-sequence ids."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of the ids; bytes that are no character become U+FFFD."""

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation. Raises RequestError when there is no template or it refuses the messages."""


class Detokenizer:
    """Turns the tokens of one output into text as they arrive, a few decoder calls per token.

    It decodes a short window twice, without and with the new tokens, and what the second adds is new text. So a tokenizer whose
    decoder treats the first token of a call in its own way (dropping a leading space) needs no special case.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window, prefix, self._aligned = prompt_context(tokenizer, prompt_token_ids, skip_special_tokens)
        self._read = len(self._window)  # ids of the window whose text was given out
        self._given = len(prefix)  # characters of the window's text that were given out

    def feed(self, token_id: int) -> str:
        """Add one output token; returns the text that is now certain, maybe empty."""
        self._window.append(token_id)
        text = self._decode(self._window)
        many = len(self._window) - self._read >= MAX_PENDING_TOKENS
        if len(text) <= self._given:
            if many:  # ids without text, such as skipped special tokens
                del self._window[self._read : -CHARACTER_TOKENS]
            return ""
        if text.endswith(REPLACEMENT):
            return self._give_up() if many else self._give_start(text)
        new = text[self._given :]
        self._advance(len(self._window))
        return new

    def finish(self) -> str:
        """The text of what is still held back, at the end of the output: incomplete bytes are one U+FFFD."""
        text = self._decode(self._window)[self._given :]
        start = text.rstrip(REPLACEMENT)
        self._given += len(text)
        return start if start == text else start + REPLACEMENT

    def _give_start(self, text: str) -> str:
        """Text before the marks at the end is certain only if one token brought it together with the incomplete bytes."""
        start = text.rstrip(REPLACEMENT)
        new = start[self._given :]
        self._given += len(new)
        return new

    def _give_up(self) -> str:
        """Give out all but the ids that can belong to a character still incomplete, marks included."""
        end = len(self._window) - CHARACTER_TOKENS
        new = self._decode(self._window[:end])[self._given :]
        self._advance(end)
        return new

    def _advance(self, end: int) -> None:
        """The text of the first `end` ids was given out. The ids before the ones read last are no longer needed, unless the
        border lies inside a character: a window must not begin there."""
        if self._aligned:
            self._window = self._window[self._read :]
            end -= self._read
        self._aligned = True
        self._read = end
        self._given = len(self._decode(self._window[:end]))

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)


def prompt_context(tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> tuple[list[int], str, bool]:
    """(last prompt ids, the part of their text that is not output, whether that is all of it: no incomplete character at the end)."""

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens) if ids else ""

    context = [int(item) for item in prompt_token_ids[-CONTEXT_TOKENS:]]
    shorter = (context[start:] for start in range(min(CHARACTER_TOKENS + 1, len(context))))
    context = next((ids for ids in shorter if not decode(ids).startswith(REPLACEMENT)), context)  # do not begin inside a character
    text = decode(context)
    if not text.endswith(REPLACEMENT):
        return context, text, True
    genuine = tokenizer.encode(REPLACEMENT, add_special_tokens=False)
    if genuine and context[-len(genuine) :] == list(genuine):
        return context, text, True  # the prompt spells out a U+FFFD
    for cut in range(1, CHARACTER_TOKENS + 1):
        start = decode(context[: len(context) - cut])
        if not start.endswith(REPLACEMENT):
            # The first of the incomplete ids may also hold whole characters; some decoders spoil these, others do not.
            return context, max(start, text.rstrip(REPLACEMENT), key=len), False
    return context, start, False


def detokenize(tokenizer: Tokenizer, prompt_token_ids: Sequence[int], token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
    """The text of a whole output: equal to the joined text of a `Detokenizer`, in one decoder call where that is certain."""
    context, prefix, _ = prompt_context(tokenizer, prompt_token_ids, skip_special_tokens)
    text = tokenizer.decode([*context, *token_ids], skip_special_tokens=skip_special_tokens)
    if REPLACEMENT not in text and text.startswith(prefix):
        return text[len(prefix) :]
    # A decoder may spread invalid bytes over the characters next to them, differently for windows than for the whole.
    steps = Detokenizer(tokenizer, prompt_token_ids, skip_special_tokens)
    return "".join([*(steps.feed(int(item)) for item in token_ids), steps.finish()])


@dataclass(frozen=True)
class StopMatch:
    """A stop string was completed. text_length: characters of the output's text that remain."""

    stop: str
    text_length: int


class StopMatcher:
    """Finds the stop string that ends first in a growing text, and says which text can no longer become part of one.

    Of two that end at the same place the longer wins: nothing of it may have been given out.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = sorted(stops, key=len, reverse=True)
        self._include = include
        self._longest = max(map(len, stops), default=0)
        self._tail = ""  # last characters of the text, enough to hold all but the last character of a stop string
        self._length = 0

    def feed(self, new: str) -> StopMatch | None:
        """Add text; returns the match whose end comes first in the text, if any."""
        text = self._tail + new
        start = self._length - len(self._tail)
        best: tuple[int, str] | None = None
        for stop in self._stops:
            # An occurrence inside the tail alone would have been found before.
            place = text.find(stop, max(0, len(self._tail) - len(stop) + 1))
            if place >= 0 and (best is None or place + len(stop) < best[0]):
                best = (place + len(stop), stop)
        self._length += len(new)
        self._tail = text[max(0, len(text) - self._longest + 1) :] if self._longest else ""
        if best is None:
            return None
        end, stop = best
        return StopMatch(stop, start + end - (0 if self._include else len(stop)))

    def held(self) -> int:
        """Characters at the end of the text that could be the beginning of a stop string: not to be given out yet."""
        if self._include:
            return 0
        for size in range(min(len(self._tail), self._longest - 1), 0, -1):
            suffix = self._tail[-size:]
            if any(len(stop) > size and stop.startswith(suffix) for stop in self._stops):
                return size
        return 0


class OutputText:
    """The text of one output while it grows: detokenising, stop strings, and what was already given out.

    `text` is all text known, `match` the stop string that ended it (then `num_tokens` is the number of output tokens that remain: up to and
    including the one that completed the stop string).
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        stops: Sequence[str],
        include: bool,
        skip_special_tokens: bool,
        min_tokens: int = 0,
    ) -> None:
        """min_tokens: stop strings are looked for in the text that comes after so many tokens."""
        self._steps = Detokenizer(tokenizer, prompt_token_ids, skip_special_tokens)
        self._matcher = StopMatcher(stops, include) if stops else None
        self._min_tokens = min_tokens
        self._searched: int | None = None  # characters before the text in which stop strings are looked for
        self._complete = False
        self.text = ""
        self.num_tokens = 0
        self.match: StopMatch | None = None

    def feed(self, token_ids: Sequence[int]) -> None:
        """Add output tokens; those after a completed stop string are ignored."""
        for token_id in token_ids:
            if self.match is not None:
                return
            self.num_tokens += 1
            self._append(self._steps.feed(token_id))

    def finish(self) -> None:
        """The output ended: nothing is held back any more. A stop string can still turn up in what was."""
        if self.match is None and not self._complete:
            self._append(self._steps.finish())
        self._complete = True

    @property
    def visible(self) -> int:
        """Characters of `text` that will not be withdrawn."""
        if self._complete or self.match is not None or self._matcher is None:
            return len(self.text)
        return len(self.text) - self._matcher.held()

    def _append(self, new: str) -> None:
        if not new:
            return
        self.text += new
        if self._matcher is None or self.num_tokens <= self._min_tokens:
            return
        if self._searched is None:
            self._searched = len(self.text) - len(new)
        self.match = self._matcher.feed(new)
        if self.match is not None:
            self.text = self.text[: self._searched + self.match.text_length]
