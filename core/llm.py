"""LLM: prompts in, finished texts out, with the engine in the caller's process.

llm = LLM("path/to/model")
for output in llm.generate(["Hello", "The sky is"], SamplingParams(max_tokens=8)):
    print(output.outputs[0].text)
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Self

from modelrunner.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence, check_logprobs, search
from modelrunner.chat import Message, chat_tokenizer, conversations, opened
from modelrunner.engine import Engine
from modelrunner.errors import RequestError, kind_of
from modelrunner.media_front import MEDIA_KEYS, Prepared
from modelrunner.new_weights import Weights, checkpoint_name, checkpoint_tensors
from modelrunner.prompts import check_ids, prepare_prompt, read_prompt
from modelrunner.request import (
    OutputKind,
    Prompt,
    RequestOutput,
    SamplingParams,
    default_params,
    merged_eos,
)

if TYPE_CHECKING:
    import torch

    from modelrunner.checkpoint import ModelCard
    from modelrunner.text import Tokenizer


class LLM:
    """A model, ready to generate. Everything that runs in its engine is its own; not thread-safe.

    model: hub id, folder, or file, as text or a path; "" for the small built-in one. plugins: plugin objects or module names, beside the
    installed ones.
    settings: as for `load_settings`: flat names (`max_model_len=4096`), sections (`cache={"page_size": 32}`), and so on.
    """

    def __init__(self, model: str | PurePath = "", *, plugins: Sequence[object] = (), **settings: Any) -> None:
        named = {"model": model} if model else {}
        self.engine = Engine({**named, **settings}, plugins=plugins)
        self._ids = itertools.count()

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None with `skip_tokenizer_init`."""
        return self.engine.tokenizer

    @property
    def card(self) -> ModelCard:
        return self.engine.card

    def default_sampling_params(self) -> SamplingParams:
        """What applies when none are given: our defaults with those of the checkpoint's generation_config.json."""
        return default_params(self.engine.card)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
        deadline: float | Sequence[float | None] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt. Returns one output per prompt, in their order; a call always starts from nothing.

        prompts: one or a list; each is text, a list of token ids, or a mapping with one of `prompt`, `prompt_token_ids` and `prompt_embeds`
        ([tokens, hidden size], with `media.prompt_embeds`), and optionally `cache_salt`. A multimodal model also takes `multi_modal_data`,
        `{"image": [...], "video": [...]}`, in the order of their placeholders: PIL images, uint8 arrays, bytes of files, URLs;
        `mm_processor_kwargs` for its processor; and `multi_modal_uuids`, labels of the items. sampling_params: one for all, or a list with
        one each; None for `default_sampling_params`. use_tqdm: show a progress bar on a terminal. priority: lower runs earlier under the
        `priority` policy. deadline: seconds from now after which a request ends with finish reason `timeout`. Both may be lists too.

        Raises RequestError before anything runs when any prompt or parameter is invalid, naming the prompt's index. An
        exception during the run ends the call's other requests; the engine stays usable. So does a Ctrl-C, which waits for the end
        of the step (a second one does not, and costs the engine).
        """
        if self.engine.is_sleeping:
            raise RequestError("prompts: the engine is asleep, so nothing would run; accepted: generate after wake_up()")
        many = self._prepared(as_list(prompts))
        params = [self._final_only(item) for item in spread("sampling_params", sampling_params, len(many))]
        priorities, deadlines = spread("priority", priority, len(many)), spread("deadline", deadline, len(many))
        pending: dict[str, int] = {}  # request id -> index of its prompt
        results: list[RequestOutput | None] = [None] * len(many)
        with held_interrupts() as let_interrupts_in:
            try:
                for i, prompt in enumerate(many):
                    request_id = str(next(self._ids))
                    pending[request_id] = i  # before it is added: an interrupt in between must not leave it behind
                    with naming_prompt(i):
                        self.engine.add_request(request_id, prompt, params[i], priority=priorities[i], deadline=deadlines[i])
                    let_interrupts_in()
                self._run(pending, results, use_tqdm, let_interrupts_in)
            except BaseException:
                self._abandon(pending)
                raise
        return [result for result in results if result is not None]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        priority: int | Sequence[int] = 0,
        deadline: float | Sequence[float | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of a list of them, by the tokenizer's chat template; otherwise as `generate`.

        messages: `[{"role": "user", "content": "Hello"}, ...]`; a content may be a list of parts: `{"type": "text", "text": ...}`, and of a
        multimodal model `{"type": "image_url", "image_url": {"url": ...}}`, `{"type": "image", "image": ...}`, and the same of `video`.
        add_generation_prompt: end the prompt where the answer begins.
        """
        tokenizer = chat_tokenizer(self.tokenizer)
        prompts: list[Prompt] = []
        for i, conversation in enumerate(conversations(messages)):
            with naming_prompt(i):
                made, media = opened(conversation, self.engine.assembly.media.front)
                prompts.append({"prompt_token_ids": tokenizer.apply_chat_template(made, add_generation_prompt), **media})
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, priority=priority, deadline=deadline)

    def beam_search(self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, *, use_tqdm: bool = True) -> list[BeamSearchOutput]:
        """The likeliest answers to each prompt, found by beam search: `params.beam_width` sequences, the best first.

        prompts: as for `generate`; their cache salts are left out. Needs as many log-probs as twice the beam width
        (`sampler.max_logprobs`), or more where several ids end an output, and is slow without prefix caching.
        Raises RequestError before anything runs when a prompt is invalid, naming its index, or when `params` need more log-probs than that.
        """
        if not isinstance(params, BeamSearchParams):
            raise RequestError(f"params: got {kind_of(params)}; accepted: BeamSearchParams")
        resolved, eos = self.engine.assembly.resolved, merged_eos(self.card, self.tokenizer)
        check_logprobs(params, eos, self.engine.settings.sampler.max_logprobs)
        ids = []
        for i, prompt in enumerate(as_list(prompts)):
            with naming_prompt(i):
                ids.append(list(read_prompt(prompt, self.tokenizer)[1]))
                check_ids(ids[-1], self.engine.assembly.needs.vocab_size, resolved.max_model_len)

        def generate(beams: Sequence[Prompt], step: SamplingParams) -> list[RequestOutput]:
            return self.generate(beams, step, use_tqdm=False)

        found = search(generate, ids, params, eos, resolved.max_model_len, use_tqdm=use_tqdm)
        return [BeamSearchOutput([self._with_text(sequence) for sequence in each.finished]) for each in found]

    def _with_text(self, sequence: BeamSearchSequence) -> BeamSearchSequence:
        return sequence if self.tokenizer is None else replace(sequence, text=self.tokenizer.decode(sequence.tokens))

    def update_weights(self, tensors: Weights, version: str | None = None) -> None:
        """Replace the weights in place; see `Engine.update_weights`.

        tensors: (name, tensor) pairs under the checkpoint's names, or a mapping, or a checkpoint: a folder, a file or a hub id, of which
        only the tensors count.
        """
        if isinstance(tensors, (str, os.PathLike)):
            tensors = checkpoint_tensors(checkpoint_name(tensors), self.engine.assembly.manager, self.engine.settings)
        self.engine.update_weights(tensors, version)

    def calibrate_cache(self, prompts: Prompt | Sequence[Prompt]) -> Mapping[str, torch.Tensor]:
        """Set the scales of a cache in 8 bits (`cache.dtype=float8_e4m3fn`) by what the prompts' keys and values are, head by head.

        The prompts run once, or up to three times if some keys or values did not fit the scales they began with. A scale becomes the power
        of 2 that leaves room for twice the largest number seen. What the cache held is forgotten. Later updates of the weights keep the
        scales, unless they bring some.

        Returns them by checkpoint name, [num_kv_heads] float32 each; `safetensors.torch.save_file` makes a file for `cache.scales` of it.
        Raises RequestError while requests are open, and for a cache of another type; or as `generate` does.
        """
        from modelrunner.calibration import calibrate

        return calibrate(self, prompts)

    def sleep(self) -> None:
        """Give the cache's memory up until `wake_up`; `generate` raises RequestError meanwhile."""
        self.engine.sleep()

    def wake_up(self) -> None:
        """Take the cache's memory again."""
        self.engine.wake_up()

    def close(self) -> None:
        """Wait for the device and give the engine up."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _prepared(self, prompts: Sequence[Any]) -> list[Any]:
        """The prompts, those with media made ready by several threads."""
        many = list(prompts)
        places = [i for i, prompt in enumerate(many) if isinstance(prompt, Mapping) and MEDIA_KEYS[0] in prompt]
        if not places:
            return many
        front, tokenizer = self.engine.assembly.media.front, self.tokenizer

        def prepare(place: int) -> Prepared:
            with naming_prompt(place):
                return prepare_prompt(many[place], tokenizer, front)

        with ThreadPoolExecutor(self.engine.settings.media.threads, "modelrunner-media") as threads:
            for place, prepared in zip(places, threads.map(prepare, places), strict=True):
                many[place] = prepared
        return many

    def _final_only(self, params: object) -> SamplingParams:
        params = self.default_sampling_params() if params is None else params
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params: got {kind_of(params)}; accepted: SamplingParams, or a list of them")
        return params.model_copy(update={"output_kind": OutputKind.FINAL_ONLY})

    def _run(self, pending: dict[str, int], results: list[RequestOutput | None], use_tqdm: bool, after_step: Callable[[], None]) -> None:
        from tqdm import tqdm  # type: ignore[import-untyped]

        quiet = not use_tqdm or not sys.stderr.isatty()
        with tqdm(total=len(pending), desc="Generating", unit="prompt", disable=quiet) as bar:
            while pending:
                for output in self.engine.step():
                    if output.finished and output.request_id in pending:
                        results[pending.pop(output.request_id)] = output
                        bar.update()
                after_step()

    def _abandon(self, pending: dict[str, int]) -> None:
        """End the requests of a call that failed, and take their last outputs, so that the next call finds nothing of them."""
        with contextlib.suppress(Exception):  # an engine that cannot go on says so at the next call; the first error is the one to show
            for request_id in pending:
                self.engine.abort(request_id)  # does nothing for the one that was refused
            while pending and self.engine.has_unfinished():
                for output in self.engine.step():
                    if output.finished:
                        pending.pop(output.request_id, None)


@contextlib.contextmanager
def held_interrupts() -> Iterator[Callable[[], None]]:
    """Hold the first Ctrl-C back until the function that this gives is called, or to the end; the second one comes through at once.

    Python raises KeyboardInterrupt between any two instructions, and the engine's books do not bear that. Handlers other than Python's own,
    and threads, in which there are no signals, are left alone.
    """
    own = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    came: list[int] = []

    def hold(number: int, frame: Any) -> None:
        if came:
            raise KeyboardInterrupt
        came.append(number)

    def let_in() -> None:
        if came:
            came.clear()
            raise KeyboardInterrupt

    if own:
        signal.signal(signal.SIGINT, hold)
    try:
        yield let_in
    finally:
        if own:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    let_in()


@contextlib.contextmanager
def naming_prompt(index: int) -> Any:
    """Say in a RequestError which prompt of the call it is about."""
    try:
        yield
    except RequestError as error:
        raise RequestError(f"prompts[{index}]: {error}") from error


def as_list(prompts: Any) -> list[Any]:
    """The prompts of a call: a list of ids is one prompt, a list of anything else is several."""
    if isinstance(prompts, (str, Mapping, Prepared)):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes | set | frozenset) or getattr(prompts, "ndim", 1) == 0:
        raise RequestError(f"prompts: got {kind_of(prompts)}; accepted: text, token ids, a mapping with one of them, or a list of these")
    many = list(prompts)
    one = bool(many) and hasattr(many[0], "__index__") and not hasattr(many[0], "__len__")
    return [many] if one else many


def spread(name: str, value: Any, count: int) -> list[Any]:
    """One value per prompt: a list as it is, anything else for all."""
    if not isinstance(value, (list, tuple)):
        return [value] * count
    if len(value) != count:
        raise RequestError(f"{name}: got a list of {len(value)} for {count} prompts; accepted: one for all, or exactly one each")
    return list(value)
