"""One open request at the front end of an engine process: text from its tokens, and outputs handed to the coroutine that waits for them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from modelrunner.messages import Add, Ended, Facts
from modelrunner.outputs import OutputProcessor
from modelrunner.request import OutputKind, Request, RequestOutput, SamplingParams
from modelrunner.step_books import Committed
from modelrunner.text import Tokenizer

if TYPE_CHECKING:
    from modelrunner.engine_link import EngineLink

Item = RequestOutput | Exception


class RequestStream:
    """Made in the event loop that waits for the outputs. `feed` and `end` run in the link's thread, `deliver` and `next` in the loop.

    The text is made by the `OutputProcessor` that `Engine` uses, from the same tokens, so that both give the same outputs.
    """

    def __init__(
        self, number: int, request: Request, tokenizer: Tokenizer | None, name: str = "", arrived: asyncio.Event | None = None
    ) -> None:
        """name: what the caller knows it by; its id if empty. arrived: an event to set that others set too."""
        self.number = number
        self.request = request
        self.name = name or request.id
        self.loop = asyncio.get_running_loop()
        self.over = False  # the last item was given to `deliver`
        self.drafts = False  # the engine counts drafts for it, and says how many at its end
        self.stopped = False  # its text has ended, and its last output waits for these counts
        request.row = 0
        self._outputs = OutputProcessor(tokenizer, self, self._extra_of)
        self._outputs.add(request)
        self._extra: dict[str, npt.NDArray[Any]] = {}
        self._items: deque[Item] = deque()
        self._arrived = arrived or asyncio.Event()

    def request_at(self, row: int) -> Request:
        """The holder of the only row that there is here."""
        return self.request

    def command(self) -> Add:
        """What the engine is told: ids instead of text, and all ids that end the output as if the request had named them.

        While nobody looks, the engine says nothing before the end.
        """
        request = self.request
        params = request.params
        watched = bool(params.stop) or params.output_kind is not OutputKind.FINAL_ONLY
        changed = {
            "n": 1,
            "stop": (),
            "stop_token_ids": request.stop_ids,
            "ignore_eos": True,
            "bad_words": request.bad_word_ids,
            "detokenize": False,
            "output_kind": (OutputKind.DELTA if watched else OutputKind.FINAL_ONLY).value,
        }
        fields = {name: getattr(params, name) for name in SamplingParams.model_fields}
        return Add(
            self.number,
            request.id,
            request.prompt_token_ids,
            fields | changed,
            request.priority,
            request.deadline,
            request.cache_salt,
            request.choice,
            request.fork,
            None if request.parcel is None else request.parcel.message,
        )

    # ---- the link's thread -----------------------------------------------------------------------------------------

    def learn(self, facts: Facts) -> None:
        """Take in what later outputs say beside tokens."""
        request = self.request
        request.first_token_time = facts.first_token_time
        request.num_cached_tokens = facts.num_cached_tokens
        request.num_preemptions = facts.num_preemptions
        self._outputs.weight_version = facts.weight_version

    def take_logprobs(self, records: npt.NDArray[np.int32] | None, prompt: npt.NDArray[np.int32] | None) -> None:
        """Take in the log-probs of new tokens, and of the prompt's. See `messages.Turn`."""
        if self.stopped:
            return
        for held, new in (
            ((self.request.logprobs.records, records), (self.request.logprobs.prompt, prompt)) if self.request.logprobs else ()
        ):
            held.extend(() if new is None else new)

    def feed(self, token_ids: Sequence[int], extra: Mapping[str, npt.NDArray[Any]], last: bool) -> RequestOutput | None:
        """Take in new tokens. The output that follows from them, if the request wants one now; with a stop string in it, the last one, or
        none of a request that drafts, whose last one `end` gives: the engine is to be told.

        last: `end` follows, and its output has these tokens too. extra: see `messages.Turn`.
        """
        request = self.request
        if self.stopped:
            return None
        request.output_token_ids.extend(token_ids)
        for name, values in extra.items():
            self._extra[name] = np.concatenate([self._extra[name], values]) if name in self._extra else values
        if last:
            return None
        row, count = np.array([0], np.int32), np.array([len(token_ids)], np.int32)
        outputs, stopped = self._outputs.process(Committed(row, np.array([token_ids], np.int32), count, []))
        for _, keep, reason, stop in stopped:
            del request.output_token_ids[keep:]
            request.finish_reason, request.stop_reason = reason, stop
            self.stopped = self.drafts
            return None if self.stopped else self._outputs.finish(request)
        return outputs[0] if outputs else None

    def end(self, ended: Ended) -> RequestOutput:
        """The last output. An id that ends the output is a stop reason only if the caller named it."""
        request, reason = self.request, ended.stop_reason
        hidden = ended.finish_reason == "stop" and reason not in request.params.stop_token_ids
        if not self.stopped:
            request.finish_reason, request.stop_reason = ended.finish_reason, None if hidden else reason
        request.num_drafted, request.num_accepted = ended.num_drafted, ended.num_accepted
        return self._outputs.finish(request)

    def _extra_of(self, request: Request, start: int, stop: int) -> dict[str, npt.NDArray[Any]]:
        return {name: values[start:stop].copy() for name, values in self._extra.items()}

    # ---- the event loop --------------------------------------------------------------------------------------------

    def deliver(self, item: Item) -> None:
        """Hand an output, or the error that ends the request, to the coroutine. Of outputs that hold all so far only the newest is kept."""
        if self.request.params.output_kind is not OutputKind.DELTA and isinstance(item, RequestOutput):
            self._items.clear()
        self._items.append(item)
        self._arrived.set()

    async def next(self) -> RequestOutput:
        """The next output. Raises the error that ended the request."""
        while (item := self.take()) is None:
            self._arrived.clear()
            await self._arrived.wait()
        return item

    def take(self) -> RequestOutput | None:
        """The next output if it is there. Raises the error that ended the request."""
        if not self._items:
            return None
        item = self._items.popleft()
        if isinstance(item, Exception):
            raise item
        return item

    def release(self, link: EngineLink) -> None:
        """Nobody waits for this any more."""
        link.release(self)
