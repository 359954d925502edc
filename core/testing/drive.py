"""Driving an engine by hand and remembering everything that it said."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from modelrunner.request import CompletionOutput, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from modelrunner.engine import Engine

MAX_STEPS = 20_000


class Driver:
    """Adds requests to an engine, steps it, and keeps each request's outputs in order of arrival.

    outputs: request id -> every RequestOutput so far. steps: calls of `engine.step`.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.outputs: dict[str, list[RequestOutput]] = {}
        self.steps = 0

    def add(self, request_id: str, prompt: Sequence[int] | str | Mapping[str, Any], params: SamplingParams, **options: Any) -> None:
        """Submit a request; `prompt` is text, token ids or a mapping, `options` are those of `Engine.add_request`."""
        full = prompt if isinstance(prompt, str | Mapping) else {"prompt_token_ids": list(prompt)}
        self.engine.add_request(request_id, full, params, **options)
        self.outputs[request_id] = []

    def step(self) -> list[RequestOutput]:
        """One engine step, after which the scheduler's books must agree."""
        self.steps += 1
        outputs = self.receive(self.engine.step())
        self.engine.scheduler.check()
        return outputs

    def receive(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """Remember outputs. A request must not speak after its end."""
        for output in outputs:
            assert not self.is_finished(output.request_id), f"{output.request_id} was reported after its end"
            self.outputs[output.request_id].append(output)
        return outputs

    def step_until(self, condition: Callable[[], bool], max_steps: int = 200) -> None:
        """Step until `condition()`; an error after `max_steps`."""
        for _ in range(max_steps):
            if condition():
                return
            self.step()
        raise AssertionError(f"the awaited condition did not come within {max_steps} steps")

    def finish(self, max_steps: int = MAX_STEPS) -> None:
        """Step until nothing is left."""
        for _ in range(max_steps):
            if not self.engine.has_unfinished():
                return
            self.step()
        raise AssertionError(f"requests are unfinished after {max_steps} steps")

    def is_finished(self, request_id: str) -> bool:
        outputs = self.outputs[request_id]
        return bool(outputs) and outputs[-1].finished

    def result(self, request_id: str) -> CompletionOutput:
        """The last output of a finished request."""
        assert self.is_finished(request_id), f"{request_id} has not finished"
        return self.outputs[request_id][-1].outputs[0]

    def final(self, request_id: str) -> RequestOutput:
        assert self.is_finished(request_id), f"{request_id} has not finished"
        return self.outputs[request_id][-1]

    def num_tokens(self, request_id: str) -> int:
        """Output tokens reported so far, of a request with cumulative output."""
        outputs = self.outputs[request_id]
        return len(outputs[-1].outputs[0].token_ids) if outputs else 0
