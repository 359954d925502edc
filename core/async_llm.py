"""AsyncLLM: prompts in, outputs as they come, with the engine in a process of its own.

    llm = AsyncLLM("path/to/model")
    async for output in llm.generate("Hello", SamplingParams(max_tokens=8, output_kind="delta")):
        print(output.outputs[0].text, end="")

This process makes token ids of prompts and text of output ids; the engine process knows ids only.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
import time
import warnings
import weakref
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel

from modelrunner.assemble import settle
from modelrunner.chat import Message, chat_tokenizer, num_characters, one_conversation, opened
from modelrunner.chat_media import has_media
from modelrunner.choice_stream import ChoiceStream
from modelrunner.choosing import Chooser, open_checkpoint
from modelrunner.engine_link import EngineLink
from modelrunner.errors import PluginError, PluginWarning, RequestError
from modelrunner.media_front import EMBEDS_KEY, MEDIA_KEYS, MediaFacts
from modelrunner.media_messages import Parcel
from modelrunner.media_setup import front_of
from modelrunner.messages import Sleep, UpdateWeights, WakeUp
from modelrunner.new_weights import Weights, check_version, checkpoint_name, pairs
from modelrunner.plugin_manager import PluginManager, warn_once
from modelrunner.request import Prompt, Request, RequestOutput, SamplingParams, default_params, make_request
from modelrunner.sampling_values import FUNCTIONS
from modelrunner.settings import RunnerSettings
from modelrunner.settings_sources import field_names
from modelrunner.tensor_file import pack

if TYPE_CHECKING:
    from modelrunner.checkpoint import ModelCard
    from modelrunner.messages import EngineStats, Ready
    from modelrunner.text import Tokenizer

LONG_TEXT = 4096  # characters; a longer prompt is tokenised beside the event loop


class AsyncLLM:
    """A model in an engine process of its own, for any number of coroutines, in any number of threads and event loops.

    The constructor returns when the engine takes requests, which may take minutes: from a running event loop, call it by
    `await asyncio.to_thread(AsyncLLM, ...)`. model, plugins, settings: as for `LLM`; plugin objects must be picklable. The engine process
    ends with `close`, and with this process, however that ends.

    Raises what `LLM` raises for settings, plugins and checkpoints that do not fit.
    """

    def __init__(self, model: str | PurePath = "", *, plugins: Sequence[object] = (), **settings: Any) -> None:
        named = {"model": model} if model else {}
        manager = PluginManager.load(plugins)
        self.settings: RunnerSettings = settle({**named, **settings}, manager)
        manager.warn_failures()
        plugins = [plugins] if isinstance(plugins, str) else plugins
        link = self._link = EngineLink(
            engine_arguments(self.settings), plugins, self.settings.process.stall_limit, self.settings.speculation.drafter is not None
        )
        self._finalizer = weakref.finalize(self, link.close)
        try:
            self._open_front(manager)
            ready = link.wait_ready()
            check_plugins(manager, ready)
        except BaseException:
            self.close()
            raise
        self._vocab_size, self._max_model_len = ready.vocab_size, ready.max_model_len
        self._media = front_of(self.settings, MediaFacts(*ready.media), self._make_state, self.tokenizer)
        for category, text in ready.warnings:
            if category == PluginWarning.__name__:
                warn_once(text)
            else:
                warnings.warn(text, stacklevel=2)

    def _open_front(self, manager: PluginManager) -> None:
        """Read what this process needs of the checkpoint, while the engine process loads the rest."""
        choose = Chooser(manager, self.settings)
        _, self.card = open_checkpoint(choose)
        self._make_state = lambda: choose("model_state", card=self.card, settings=self.settings)(self.card, self.settings)
        skip = self.settings.model.skip_tokenizer_init
        self.tokenizer: Tokenizer | None = None if skip else choose("tokenizer", card=self.card, settings=self.settings)

    card: ModelCard

    @property
    def pid(self) -> int | None:
        """Process id of the engine process."""
        return self._link.pid

    def default_sampling_params(self) -> SamplingParams:
        """What applies when none are given: our defaults with those of the checkpoint's generation_config.json."""
        return default_params(self.card)

    # ---- requests ------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        deadline: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one prompt; yields outputs as they come, the last one with `finished`.

        sampling_params: None for `default_sampling_params`. Its `output_kind` decides what is yielded: `delta` yields all new text each
        time and loses nothing; `cumulative` yields all text so far, the newest when the caller is slow; `final_only` yields once.
        request_id: None for a new one; else it must not be in use. prompt, priority, deadline: as for `LLM.generate`, for one prompt.
        Images, videos and embeddings are made ready by a thread of this process, and cost neither its event loop nor the engine's time.

        Leaving the loop, `aclose` and cancelling end the request. Raises, at the first step, RequestError for a request that cannot be
        served as it was put, with the message of `Engine.add_request`; at any step EngineError when the engine is gone, with the cause.
        """
        self._link.check()
        name = secrets.token_hex(8) if request_id is None else request_id
        arguments = (name, prompt, sampling_params, priority, deadline)
        if is_long(prompt) or has_more(prompt):
            request = await asyncio.to_thread(self._request, *arguments)
        else:
            request = self._request(*arguments)
        stream = self._link.open(request, self.tokenizer) if request.params.n == 1 else ChoiceStream(self._link, request, self.tokenizer)
        try:
            finished = False
            while not finished:
                output = await stream.next()
                finished = output.finished
                yield output
        finally:
            stream.release(self._link)

    async def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        add_generation_prompt: bool = True,
        priority: int = 0,
        deadline: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer one conversation by the tokenizer's chat template, as `LLM.chat` does; otherwise as `generate`.

        messages: `[{"role": "user", "content": "Hello"}, ...]`; a content may be a list of parts, as for `LLM.chat`.
        add_generation_prompt: end the prompt where the answer begins.
        """
        self._link.check()
        template = chat_tokenizer(self.tokenizer).apply_chat_template
        conversation = one_conversation(messages)
        if has_media(conversation):
            conversation, media = await asyncio.to_thread(opened, conversation, self._media)
        else:
            conversation, media = opened(conversation, self._media)
        if num_characters(conversation) > LONG_TEXT:
            ids = await asyncio.to_thread(template, conversation, add_generation_prompt)
        else:
            ids = template(conversation, add_generation_prompt)
        prompt = {"prompt_token_ids": ids, **media}
        outputs = self.generate(prompt, sampling_params, request_id, priority=priority, deadline=deadline)
        try:
            async for output in outputs:
                yield output
        finally:
            await outputs.aclose()

    def _request(self, request_id: str, prompt: Prompt, params: SamplingParams | None, priority: int, deadline: float | None) -> Request:
        if isinstance(params, SamplingParams) and FUNCTIONS in params.logits_processors:
            raise RequestError(
                "logits_processors: a Python function cannot go to the engine process; accepted: names of logits processors that plugins "
                "bring, or functions with LLM"
            )
        request = make_request(
            request_id,
            prompt,
            params,
            media=self._media,
            card=self.card,
            tokenizer=self.tokenizer,
            vocab_size=self._vocab_size,
            max_model_len=self._max_model_len,
            priority=priority,
            deadline=deadline,
            seed=0,  # stays here: the engine draws one for a request without
            now=time.monotonic(),
        )
        if request.media is not None:
            request.parcel, request.media = Parcel(request.media), None
        return request

    def abort(self, request_id: str) -> None:
        """End a request from outside its loop, which gets a last output with finish reason `abort`. An id that is not open is ignored.

        Raises RequestError for an id that is not a non-empty string.
        """
        if not isinstance(request_id, str) or not request_id:
            raise RequestError(f"abort takes the id of one request, a non-empty string; got {request_id!r}")
        self._link.abort(request_id)

    # ---- between steps ---------------------------------------------------------------------------------------------

    async def update_weights(self, tensors: Weights, version: str | None = None) -> None:
        """Replace the weights, in place, between two steps. Open requests go on with the new ones, as `Engine.update_weights` says.

        tensors: (name, tensor) pairs under the checkpoint's names, or a mapping, every tensor of a checkpoint, on any device; or a
        checkpoint: a folder, a file or a hub id, of which only the tensors count. A thread takes the pairs and copies them into memory
        that the engine process reads. Requests run until the last one is there; while the engine loads, no step runs. version: name of
        these weights, for `RequestOutput.weight_version`; None for the number of updates so far. Updates take place one after the other.

        Raises what the iteration raises; the engine notices nothing of that. Raises what `LLM.update_weights` raises for weights that do
        not fit. When some had been stored by then, open requests wait, and new ones are refused with EngineError, until an update succeeds.
        Who cancels this before the last pair was taken cancels the update; after that it takes place.
        """
        self._link.check()
        check_version(version)
        if isinstance(tensors, (str, os.PathLike)):
            name = checkpoint_name(tensors)
            await asyncio.wrap_future(self._link.change(lambda number: UpdateWeights(number, name, None, version)))
            return
        cancelled = threading.Event()
        try:
            file = await asyncio.to_thread(pack, pairs(tensors), lambda: cancelled.is_set() or self._link.failure is not None)
        finally:
            cancelled.set()
        if file is None:
            self._link.check()
        assert file is not None, "only an engine that is gone ends it early for a caller who is still there"
        try:
            future = self._link.change(lambda number: UpdateWeights(number, file.path, file.entries, version))
        except BaseException:
            file.close()
            raise
        future.add_done_callback(lambda _: file.close())
        await asyncio.wrap_future(future)

    async def sleep(self) -> None:
        """Give the cache's memory up until `wake_up`. Requests, new ones too, wait meanwhile and go on afterwards; `abort` and deadlines
        work. Does nothing while asleep; `stats().sleeping` says whether it is."""
        await asyncio.wrap_future(self._link.change(Sleep))

    async def wake_up(self) -> None:
        """Take the cache's memory again. Does nothing while awake."""
        await asyncio.wrap_future(self._link.change(WakeUp))

    # ---- the engine process ----------------------------------------------------------------------------------------

    def health(self) -> bool:
        """Whether the engine process lives and, while requests are open, tokens flow. Takes no time."""
        return self.problem() is None

    def problem(self) -> str | None:
        """Why `health` is false; None if it is true."""
        if self._link.failure is not None:
            return str(self._link.failure)
        return self._link.liveness.problem(self._link.num_open)

    def stats(self) -> EngineStats:
        """Gauges and counters that the engine process reported last: within a second, or at the end of its last step."""
        return self._link.liveness.stats

    def close(self, grace: float = 10.0) -> None:
        """End the engine process and wait for its end; open requests fail. It is killed if it takes more than `grace` seconds."""
        self._finalizer.detach()
        self._link.close(grace)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)


def is_long(prompt: object) -> bool:
    """Whether making ids of a prompt may hold an event loop up."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return isinstance(text, str) and len(text) > LONG_TEXT


def has_more(prompt: object) -> bool:
    """Whether a prompt brings more than text."""
    return isinstance(prompt, Mapping) and (EMBEDS_KEY in prompt or MEDIA_KEYS[0] in prompt)


def check_plugins(manager: PluginManager, ready: Ready) -> None:
    """Raise PluginError unless the engine process has loaded the plugins of this one, in the same order."""
    here = [info.name for info in manager.describe() if info.state == "loaded"]
    if here != ready.plugins:
        raise PluginError(
            f"this process has loaded the plugins {', '.join(here)}; its engine process has loaded {', '.join(ready.plugins)}. Both must "
            "load the same ones in the same order: look for a plugin that fails in one of them (`modelrunner plugins`)"
        )


def engine_arguments(settings: RunnerSettings) -> dict[str, Any]:
    """Every setting, as arguments that no environment or file of the engine process can change. It needs no tokenizer."""
    arguments: dict[str, Any] = section_values(settings)
    return arguments | {"model": arguments["model"] | {"skip_tokenizer_init": True}}


def section_values(section: BaseModel) -> dict[str, Any]:
    """The fields of a section by their public names; sections in it likewise."""
    values = {public: getattr(section, name) for public, name in field_names(type(section)).items()}
    return {name: section_values(value) if isinstance(value, BaseModel) else value for name, value in values.items()}
