"""Engine processes for tests: starting them in one line, asking them, tampering with what they do, and looking for what they leave behind.

Importable by name from an engine process, as plugin objects must be.
"""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

from modelrunner import AsyncLLM, RequestOutput, SamplingParams, hookimpl
from modelrunner.testing import Subject, dense, options

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
PATIENCE = 240.0  # seconds: no limit of the code, only what a test waits before it gives up, on the slowest of machines


def start(subject: Subject | None = None, plugins: tuple[object, ...] = (), stall_limit: float = 600.0, **short: Any) -> AsyncLLM:
    """An AsyncLLM on a tiny model. short: see `options`."""
    subject = subject or dense()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*max_model_len.*")
        settings = options(**short) | {"process": {"stall_limit": stall_limit}}
        return AsyncLLM(subject.model, plugins=[*subject.plugins, *plugins], **settings)


def tensors(subject: Subject) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the subject's checkpoint."""
    from safetensors import safe_open

    with safe_open(Path(subject.model) / "model.safetensors", "pt") as file:  # type: ignore[no-untyped-call]
        for name in file.keys():  # noqa: SIM118
            yield name, file.get_tensor(name)


def run(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` that gives up in the end."""
    return asyncio.run(asyncio.wait_for(work, PATIENCE))


async def outputs(llm: AsyncLLM, prompt: Any, params: SamplingParams | None = None, **options: Any) -> list[RequestOutput]:
    """Every output of a request."""
    return [output async for output in llm.generate(prompt, params, **options)]


async def last(llm: AsyncLLM, prompt: Any, params: SamplingParams | None = None, **options: Any) -> RequestOutput:
    return (await outputs(llm, prompt, params, **options))[-1]


@asynccontextmanager
async def running(llm: AsyncLLM, params: SamplingParams, *prompts: list[int], at: int = 3) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Requests that have brought some tokens already; all of their outputs are the tasks' results."""
    begun = [asyncio.Event() for _ in prompts]

    async def client(prompt: list[int], event: asyncio.Event) -> list[RequestOutput]:
        got = []
        async for output in llm.generate(prompt, params):
            got.append(output)
            if len(got) == at:
                event.set()
        return got

    tasks = [asyncio.create_task(client(prompt, event)) for prompt, event in zip(prompts, begun, strict=True)]
    await asyncio.gather(*(event.wait() for event in begun))
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def ids(streamed: list[RequestOutput], version: str | None = None) -> list[int]:
    """Tokens of a stream of deltas; those of one version of the weights."""
    return [token for output in streamed if version in (None, output.weight_version) for token in output.outputs[0].token_ids]


async def until(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    """Wait for a condition; an error when it does not come."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the awaited condition did not come"
        await asyncio.sleep(0.02)


def wait_until(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    asyncio.run(until(condition, seconds))


def gone(pid: int) -> bool:
    """Whether there is no such process any more (what init has not yet collected is gone too)."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def engine_processes() -> list[int]:
    """Process ids of this process's engine processes."""
    return [child.pid for child in psutil.Process().children() if child.is_running() and "modelrunner-engine" in child.cmdline()]


class Tamper:
    """A plugin that changes an engine in its process, by files in a folder, which the test makes and removes.

    `stall`: no step is planned. `slow`: a step takes 0.3 seconds more. `launch`: the next launch raises, once. `collect`: the next
    collect raises. `load`: a tensor of new weights takes 0.1 seconds more.
    """

    MODELRUNNER_API = ">=1,<2"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __contains__(self, name: str) -> bool:
        return (self.folder / name).exists()

    def on(self, name: str) -> None:
        (self.folder / name).touch()

    def off(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)

    @hookimpl
    def device(self, settings: Any) -> None:
        """Asked in the engine process only."""
        from modelrunner import weights
        from modelrunner.runner import Runner
        from modelrunner.scheduler import Scheduler

        store = weights.store
        plan, launch, collect = Scheduler.plan, Runner.launch, Runner.collect

        def tampered_plan(scheduler: Any, *arguments: Any, **named: Any) -> Any:
            return None if "stall" in self else plan(scheduler, *arguments, **named)

        def tampered_launch(runner: Any, *arguments: Any) -> Any:
            if "slow" in self:
                time.sleep(0.3)
            if "launch" in self:
                self.off("launch")
                raise RuntimeError("planted in launch")
            return launch(runner, *arguments)

        def tampered_collect(runner: Any, *arguments: Any) -> Any:
            if "collect" in self:
                raise RuntimeError("planted in collect")
            return collect(runner, *arguments)

        def tampered_store(*arguments: Any) -> None:
            if "load" in self:
                time.sleep(0.1)
            store(*arguments)

        weights.store = tampered_store
        Scheduler.plan, Runner.launch, Runner.collect = tampered_plan, tampered_launch, tampered_collect  # type: ignore[method-assign]


class ProbePlugin:
    """A plugin with a tap, `probe`: reports twice, per token, the mean of its hidden state after the first layer and a request's number."""

    MODELRUNNER_API = ">=1,<2"

    @hookimpl
    def taps(self, model_info: Any) -> Any:
        import torch

        from modelrunner.request_table import Column
        from modelrunner.taps import Result, Tap

        class Probe(Tap):
            name, points, edits = "probe", ("layer.1",), False
            results = (Result("probe", (2,), torch.float32),)

            def columns(self, settings: Any) -> Any:
                return (Column("probe.number", torch.float32, default=0.0),)

            def row_values(self, request: Any) -> Any:
                number = request.params.extra_args.get("probe")
                return None if number is None else {"probe.number": float(number)}

            def apply(self, point: str, hidden: Any, batch: Any) -> Any:
                self.mean = hidden.index_select(0, batch.sample_index).mean(dim=-1)
                return hidden

            def outputs(self, batch: Any) -> Any:
                return {"probe": torch.stack([self.mean, self.per_row(batch, "probe.number")], 1)}

        return Probe()
