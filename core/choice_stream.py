"""Several open requests at the front end that answer one prompt (`SamplingParams.n`), followed as one."""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from modelrunner.choices import Told, choices_of
from modelrunner.request import Request, RequestOutput
from modelrunner.text import Tokenizer

if TYPE_CHECKING:
    from modelrunner.engine_link import EngineLink
    from modelrunner.request_stream import RequestStream


class ChoiceStream:
    """One `RequestStream` for each choice of a request. Made, and used, in the event loop that waits for the outputs."""

    def __init__(self, link: EngineLink, request: Request, tokenizer: Tokenizer | None) -> None:
        """Sends the requests. Raises what `EngineLink.open` raises; none is open then."""
        link.claim(request.id, self)
        self._give_up = partial(link.give_up, request.id, self)
        self._arrived = asyncio.Event()
        self._told = Told(request)
        self._ready: deque[RequestOutput] = deque()
        self._streams: list[RequestStream] = []
        try:
            for each in choices_of(request):
                self._streams.append(link.open(each, tokenizer, name=request.id, arrived=self._arrived))
        except BaseException:
            self.release(link)
            raise

    async def next(self) -> RequestOutput:
        """The next output. Raises the error that ended one of the requests."""
        while True:
            self._arrived.clear()
            for choice, stream in enumerate(self._streams):
                while (item := stream.take()) is not None:
                    if (first := self._told.take(choice, item)) is not None:
                        self._ready.append(first)
            if (output := self._told.output()) is not None:
                self._ready.append(output)
            if self._ready:
                if (oldest := self._ready.popleft()).finished:
                    self._give_up()
                return oldest
            await self._arrived.wait()

    def release(self, link: EngineLink) -> None:
        """Nobody waits for this any more."""
        self._give_up()
        for stream in self._streams:
            link.release(stream)
