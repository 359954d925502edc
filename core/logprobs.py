"""Log-probs on the host: what is kept with each request, and what users see of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from modelrunner.batch import Int32Array
    from modelrunner.request import Request
    from modelrunner.text import Tokenizer

JSON_FLOOR = -9999.0  # in place of -inf, which JSON has not

TokenLogprobs = dict[int, "Logprob"]


@dataclass(frozen=True)
class Logprob:
    """What is known of a token at a position. logprob: natural logarithm of its probability, -inf for a token that could not come.

    rank: its place among all tokens from the likeliest on, from 1; of equals the lowest id comes first. decoded_token: its text alone, None
    without a tokenizer and for an id that it lacks.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None

    @property
    def finite(self) -> float:
        """The log-prob for JSON: `JSON_FLOOR` for a token that could not come."""
        return max(self.logprob, JSON_FLOOR)


@dataclass(eq=False)
class RequestLogprobs:
    """What a request asks for, and what has come of it. num_top, num_prompt_top: the likeliest tokens at each position beside its own; None
    for nothing. prompt_length: in tokens.

    records, prompt: words of a position each: rank, ids, then as many log-probs (float32); the first is the position's own token.
    """

    num_top: int | None
    num_prompt_top: int | None
    prompt_length: int
    records: list[Int32Array] = field(default_factory=list)
    prompt: list[Int32Array] = field(default_factory=list)
    lists: list[TokenLogprobs] = field(default_factory=list)  # of the records so far asked for
    sums: list[float] = field(default_factory=list)  # of the sampled tokens' log-probs up to each of these
    prompt_given: bool = False

    @property
    def lacks_prompt(self) -> bool:
        """Whether positions of the prompt are still to be computed for their log-probs."""
        return self.num_prompt_top is not None and len(self.prompt) < self.prompt_length - 1


class LogprobLists:
    """Log-probs as users see them: a mapping of token ids to `Logprob` for each position."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str | None] = {}

    def output(self, request: Request, start: int, stop: int) -> tuple[Any, float | None]:
        """Of output tokens start..stop-1, and the sum of the log-probs of all tokens before `stop`. None if the request asks for none."""
        held = request.logprobs
        if held is None or held.num_top is None:
            return None, None
        for record in held.records[len(held.lists) : stop]:
            held.lists.append(self._entry(record, held.num_top, request.params.detokenize))
            own = float(record[record.size // 2 + 1 :].view(np.float32)[0])
            held.sums.append(own + (held.sums[-1] if held.sums else 0.0))
        return held.lists[start:stop], held.sums[stop - 1] if stop else 0.0

    def prompt(self, request: Request) -> Any:
        """Of the prompt's tokens, None for the first. None if the request asks for none, or ended before they were there."""
        held = request.logprobs
        if held is None or held.num_prompt_top is None or held.lacks_prompt:
            return None
        return [None, *(self._entry(record, held.num_prompt_top, request.params.detokenize) for record in held.prompt)]

    def _entry(self, record: Int32Array, num_top: int, decodes: bool) -> TokenLogprobs:
        width = record.size // 2
        ids, values = record[1 : 2 + num_top].tolist(), record[1 + width : 2 + width + num_top].view(np.float32).tolist()
        ranks = [int(record[0]), *range(1, num_top + 1)]
        text = self._text if decodes else _no_text
        return {token: Logprob(value, rank, text(token)) for token, value, rank in zip(ids, values, ranks, strict=True)}

    def _text(self, token: int) -> str | None:
        if token not in self._texts:
            try:
                self._texts[token] = None if self._tokenizer is None else self._tokenizer.decode([token], skip_special_tokens=False)
            except Exception:  # the model may have more ids than the tokenizer
                self._texts[token] = None
        return self._texts[token]


def _no_text(token: int) -> None:
    return None


class PackedLogprobs(LogprobLists):
    """Log-probs as an engine process sends them: the records' words, [positions, words] int32."""

    def __init__(self) -> None:
        super().__init__(None)

    def output(self, request: Request, start: int, stop: int) -> tuple[Any, float | None]:
        held = request.logprobs
        if held is None or held.num_top is None:
            return None, None
        return packed(held.records[start:stop], held.num_top), None

    def prompt(self, request: Request) -> Any:
        held = request.logprobs
        return None if held is None or held.num_prompt_top is None or held.lacks_prompt else packed(held.prompt, held.num_prompt_top)


def packed(records: Sequence[Int32Array], num_top: int) -> Int32Array:
    """Records side by side, cut to the likeliest `num_top` tokens."""
    if not records:
        return np.empty((0, 1 + 2 * (1 + num_top)), np.int32)
    words = np.stack(records)
    width = words.shape[1] // 2
    return np.concatenate([words[:, : 2 + num_top], words[:, 1 + width : 2 + width + num_top]], 1)
