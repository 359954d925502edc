"""AsyncLLM against LLM where the engine changes under running requests: new weights, sleep, errors of both, and the end in the middle."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_world import Tamper, engine_processes, gone, last, outputs, run, start, tensors, until

from modelrunner import AsyncLLM, RequestOutput, SamplingParams
from modelrunner.errors import CheckpointError, EngineError, RequestError
from modelrunner.testing import P, assert_same, assert_tokens, dense, ref

SHORT: dict[str, Any] = {"rows": 8, "pages": 64, "tokens": 64}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, seed=5, max_tokens=12, ignore_eos=True)
LONG = GREEDY.model_copy(update={"max_tokens": 200, "output_kind": "delta"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tamper")


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[AsyncLLM]:
    llm = start(dense(1), plugins=(Tamper(folder),), **SHORT)
    yield llm
    llm.close()
    assert engine_processes() == []


@pytest.fixture
def tamper(folder: Path) -> Iterator[Tamper]:
    tamper = Tamper(folder)
    yield tamper
    for name in ("stall", "slow", "load"):
        tamper.off(name)


@pytest.fixture
def llm(shared: AsyncLLM, tamper: Tamper) -> Iterator[AsyncLLM]:
    """The shared engine with the weights of dense(1), and nothing left of a test afterwards."""
    run(shared.update_weights(tensors(dense(1)), "first"))
    yield shared
    tamper.off("slow")

    async def check() -> None:
        await shared.wake_up()
        await until(lambda: (shared.stats().running, shared.stats().waiting, shared.stats().pages_used) == (0, 0, 0))

    run(check())
    assert (shared._link.num_open, shared._link._changes) == (0, {})
    assert shared.pid is not None
    assert not gone(shared.pid)


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


# ---- weights -----------------------------------------------------------------------------------------------------------

SOURCES: dict[str, Callable[[Any], Any]] = {
    "pairs": tensors,
    "a mapping's items": lambda subject: dict(tensors(subject)).items(),
    "a folder": lambda subject: str(subject.model),
    "a file": lambda subject: Path(subject.model) / "model.safetensors",
}


@pytest.mark.parametrize("source", SOURCES)
def test_results_after_an_update_are_those_of_llm(llm: AsyncLLM, source: str) -> None:
    plain = dense(1).llm()
    asked = [(P(20, 1), GREEDY), (P(33, 2), SAMPLED)]

    async def both() -> list[RequestOutput]:
        return await asyncio.gather(*(last(llm, prompt, params) for prompt, params in asked))

    for model in (2, 1):
        run(llm.update_weights(SOURCES[source](dense(model)), f"model {model}"))
        plain.update_weights(SOURCES[source](dense(model)), f"model {model}")
        want = plain.generate([prompt for prompt, _ in asked], [params for _, params in asked], use_tqdm=False)
        for (prompt, params), here, there in zip(asked, want, run(both()), strict=True):
            assert list(there.outputs[0].token_ids) == list(here.outputs[0].token_ids)
            assert (there.weight_version, there.num_cached_tokens) == (here.weight_version, here.num_cached_tokens) == (f"model {model}", 0)
            assert_same(dense(model), prompt, params, there.outputs[0])
    plain.close()


def test_versions_without_names_are_counted() -> None:
    async def go() -> list[str]:
        async with await asyncio.to_thread(start, dense(1), **SHORT) as llm:
            seen = [(await last(llm, P(9, 1), GREEDY)).weight_version]
            for version in (None, "mine", None):
                await llm.update_weights(tensors(dense(2)), version)
                seen.append((await last(llm, P(9, 1), GREEDY)).weight_version)
            return seen

    assert run(go()) == ["0", "1", "mine", "3"]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_open_requests_go_on_with_the_new_weights(llm: AsyncLLM, tamper: Tamper, params: SamplingParams) -> None:
    """Every token is what the weights that its output names say after the tokens before it."""
    tamper.on("slow")
    long = params.model_copy(update={"max_tokens": 40, "output_kind": "delta"})
    prompts = [P(20, 1), P(33, 2)]

    async def go() -> list[list[RequestOutput]]:
        async with running(llm, long, *prompts) as clients:
            await llm.update_weights(tensors(dense(2)), "second")
            assert llm.stats().weight_version == "second"
            tamper.off("slow")
            return list(await asyncio.gather(*clients))

    for prompt, streamed in zip(prompts, run(go()), strict=True):
        old, new = ids(streamed, "first"), ids(streamed, "second")
        assert (len(old) >= 3, len(new) >= 3, len(old + new)) == (True, True, 40)
        want = list(ref(dense(1), prompt, long).token_ids)
        assert_tokens(dense(1), prompt, old, want[: len(old)], greedy=False)
        rest = ref(dense(2), prompt + old, long.model_copy(update={"max_tokens": len(new)}))
        assert_tokens(dense(2), prompt + old, new, rest.token_ids, greedy=params.temperature == 0)


def test_requests_run_until_the_last_tensor_is_there(llm: AsyncLLM) -> None:
    """A sender that takes its time does not stop the engine."""
    done = threading.Event()

    def slowly() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors(dense(2)):
            assert done.wait(200)
            yield name, tensor

    async def go() -> None:
        update = asyncio.create_task(llm.update_weights(slowly(), "second"))
        end = await last(llm, P(9, 1), GREEDY)
        assert (end.weight_version, update.done()) == ("first", False)
        done.set()
        await update
        assert (await last(llm, P(9, 1), GREEDY)).weight_version == "second"

    run(go())


def test_the_engine_process_speaks_while_it_loads(llm: AsyncLLM, tamper: Tamper) -> None:
    """And commands that come meanwhile are not lost."""
    seen: set[int] = set()

    async def go() -> None:
        async with running(llm, LONG, P(20, 1)) as [client]:
            tamper.on("load")
            before = llm.stats().loaded_tensors
            update = asyncio.create_task(llm.update_weights(tensors(dense(2)), "second"))
            await until(lambda: llm.stats().loaded_tensors > before + 1)
            other = asyncio.create_task(last(llm, P(9, 1), GREEDY))
            aborted = asyncio.create_task(last(llm, P(9, 2), LONG, request_id="aborted"))
            await until(lambda: llm._link.num_open == 3)
            llm.abort("aborted")
            while not update.done():
                assert llm.health(), llm.problem()
                assert llm.stats().weights_problem == ""
                seen.add(llm.stats().loaded_tensors)
                await asyncio.sleep(0.02)
            await update
            assert (await other).weight_version == "second"
            assert_same(dense(2), P(9, 1), GREEDY, (await other).outputs[0])
            assert (await aborted).outputs[0].finish_reason == "abort"
            assert len(ids(await client)) == 200

    run(go())
    assert len(seen) > 3, "it says how far it is"


def test_many_clients_and_many_changes_at_once(llm: AsyncLLM) -> None:
    async def change(n: int) -> None:
        for turn in range(2):
            await llm.update_weights(tensors(dense(1 + (n + turn) % 2)), f"{n}.{turn}")
            await llm.sleep()
            await asyncio.sleep(0.02)
            await llm.wake_up()

    async def go() -> None:
        clients = [asyncio.create_task(outputs(llm, P(5 + n, n), LONG)) for n in range(8)]
        await asyncio.gather(*(change(n) for n in range(2)))
        await llm.wake_up()  # whoever went to sleep last
        await llm.update_weights(tensors(dense(2)), "last")
        streams = await asyncio.gather(*clients)
        assert [len(ids(stream)) for stream in streams] == [200] * 8
        assert_same(dense(2), P(20, 1), GREEDY, (await last(llm, P(20, 1), GREEDY)).outputs[0])

    run(go())


# ---- errors ------------------------------------------------------------------------------------------------------------


def broken(when: int) -> Iterator[tuple[str, torch.Tensor]]:
    for n, pair in enumerate(tensors(dense(2))):
        if n == when:
            raise OSError("the sender is gone")
        yield pair


BAD: dict[str, tuple[type[Exception], Callable[[Path], Any], Any]] = {
    "an empty version": (RequestError, lambda _: tensors(dense(2)), ""),
    "a version that is no text": (RequestError, lambda _: tensors(dense(2)), 5),
    "no name": (RequestError, lambda _: "", None),
    "no such checkpoint": (CheckpointError, lambda _: "/nowhere/at/all", None),
    "a damaged checkpoint": (CheckpointError, lambda folder: folder / "damaged.safetensors", None),
    "no tensors": (CheckpointError, lambda _: [], None),
    "not pairs": (TypeError, lambda _: [1, 2], None),
    "nothing to go through": (TypeError, lambda _: 5, None),
    "a sender that fails at once": (OSError, lambda _: broken(0), None),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_update_raises_what_llm_raises_and_changes_nothing(llm: AsyncLLM, tmp_path: Path, case: str) -> None:
    kind, source, version = BAD[case]
    (tmp_path / "damaged.safetensors").write_bytes(b"not tensors")
    plain = dense(1).llm()
    with pytest.raises(kind) as here:
        plain.update_weights(source(tmp_path), version)
    plain.close()

    async def go() -> None:
        async with running(llm, LONG, P(20, 1)) as [client]:
            with pytest.raises(kind) as there:
                await llm.update_weights(source(tmp_path), version)
            assert str(there.value) == str(here.value)
            assert llm.health(), llm.problem()
            assert len(ids(await client, "first")) == 200

    run(go())


def test_a_sender_that_fails_half_way_changes_nothing(llm: AsyncLLM) -> None:
    """Other than with LLM, whose weights are a mixture then: here the engine has not begun."""

    async def go() -> None:
        async with running(llm, LONG, P(20, 1)) as [client]:
            with pytest.raises(OSError, match="the sender is gone"):
                await llm.update_weights(broken(5))
            assert len(ids(await client, "first")) == 200
        assert llm.health(), llm.problem()

    run(go())


def some() -> Iterator[tuple[str, torch.Tensor]]:
    return iter(list(tensors(dense(2)))[:3])


def misshapen() -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, tensor[:1]) for name, tensor in tensors(dense(2)))


@pytest.mark.parametrize("source", [some, misshapen])
def test_after_an_update_that_fits_half_requests_wait_for_a_good_one(llm: AsyncLLM, tamper: Tamper, source: Any) -> None:
    plain = dense(1).llm()
    with pytest.raises(CheckpointError) as here:
        plain.update_weights(source())
    with pytest.raises(EngineError) as refused:
        plain.generate([P(9, 1)], GREEDY, use_tqdm=False)
    plain.close()
    tamper.on("slow")

    async def go() -> None:
        async with running(llm, LONG, P(20, 1)) as [client]:
            aborted = asyncio.create_task(last(llm, P(9, 2), LONG, request_id="aborted"))
            await until(lambda: llm._link.num_open == 2)
            with pytest.raises(CheckpointError) as there:
                await llm.update_weights(source())
            tamper.off("slow")
            assert str(there.value) == str(here.value)
            assert llm.problem() == llm.stats().weights_problem == str(refused.value)
            with pytest.raises(EngineError) as told:
                await last(llm, P(9, 1), GREEDY)
            assert str(told.value) == str(refused.value)
            llm.abort("aborted")
            assert (await aborted).outputs[0].finish_reason == "abort"
            assert not client.done()
            await llm.update_weights(tensors(dense(2)), "second")
            assert llm.health(), llm.problem()
            streamed = await client
            assert len(ids(streamed)) == 200
            assert {output.weight_version for output in streamed} == {"first", "second"}

    run(go())


def test_a_step_that_fails_under_a_change_ends_everything_with_its_cause(tmp_path: Path) -> None:
    tamper = Tamper(tmp_path)
    llm = start(dense(1), plugins=(tamper,), **SHORT)

    async def go() -> None:
        tamper.on("slow")
        async with running(llm, LONG, P(20, 1)) as [client]:
            tamper.on("collect")
            update = asyncio.create_task(llm.update_weights(tensors(dense(2))))
            for task in (update, client):
                with pytest.raises(EngineError, match="planted in collect"):
                    await task
            for change in (llm.sleep(), llm.wake_up(), llm.update_weights(tensors(dense(2))), llm.update_weights(dense(2).model)):
                with pytest.raises(EngineError, match="planted in collect"):
                    await change

    run(go())
    llm.close()


# ---- sleep -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_requests_sleep_and_go_on(llm: AsyncLLM, tamper: Tamper, params: SamplingParams) -> None:
    """Those that run, those that wait, and those that come meanwhile; abort and deadlines work."""
    tamper.on("slow")
    long = params.model_copy(update={"max_tokens": 30, "output_kind": "delta"})

    async def go() -> None:
        async with running(llm, long, P(20, 1), P(33, 2)) as clients:
            await asyncio.gather(llm.sleep(), llm.sleep())
            tamper.off("slow")
            assert (llm.stats().sleeping, llm.stats().running) == (True, 0)
            new = asyncio.create_task(last(llm, P(20, 1), params))
            aborted = asyncio.create_task(last(llm, P(9, 4), params, request_id="aborted"))
            late = asyncio.create_task(last(llm, P(9, 5), params, deadline=0.05))
            await until(lambda: llm._link.num_open == 5)
            llm.abort("aborted")
            assert (await aborted).outputs[0].finish_reason == "abort"
            assert (await late).outputs[0].finish_reason == "timeout"
            steps = llm.stats().steps
            await asyncio.sleep(0.3)
            assert (llm.stats().steps, llm.stats().pages_used, new.done()) == (steps, 0, False)
            assert llm.health(), llm.problem()
            await asyncio.gather(llm.wake_up(), llm.wake_up())
            assert not llm.stats().sleeping
            for prompt, client in zip((P(20, 1), P(33, 2)), clients, strict=True):
                streamed = await client
                want = ref(dense(1), prompt, long)
                assert_tokens(dense(1), prompt, ids(streamed), want.token_ids, greedy=params.temperature == 0)
                assert streamed[-1].metrics.num_preemptions == 1
            assert_same(dense(1), P(20, 1), params, (await new).outputs[0])

    run(go())


def test_weights_can_be_replaced_in_the_sleep(llm: AsyncLLM) -> None:
    """As a trainer does that needs the cache's memory until then."""

    async def go() -> None:
        await llm.sleep()
        waiting = asyncio.create_task(last(llm, P(20, 1), GREEDY))
        await llm.update_weights(tensors(dense(2)), "second")
        assert llm.stats().sleeping
        await llm.wake_up()
        output = await waiting
        assert output.weight_version == "second"
        assert_same(dense(2), P(20, 1), GREEDY, output.outputs[0])

    run(go())


# ---- going away --------------------------------------------------------------------------------------------------------


def test_an_update_that_is_cancelled_before_its_last_tensor_does_not_take_place(llm: AsyncLLM) -> None:
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def slowly() -> Iterator[tuple[str, torch.Tensor]]:
        try:
            for pair in tensors(dense(2)):
                begun.set()
                assert go_on.wait(200)
                yield pair
        finally:
            ended.set()

    async def go() -> None:
        update = asyncio.create_task(llm.update_weights(slowly(), "second"))
        await asyncio.to_thread(begun.wait)
        update.cancel()
        with pytest.raises(asyncio.CancelledError):
            await update
        go_on.set()
        await asyncio.to_thread(ended.wait)
        output = await last(llm, P(20, 1), GREEDY)
        assert output.weight_version == "first"
        assert_same(dense(1), P(20, 1), GREEDY, output.outputs[0])

    run(go())


def test_an_update_that_is_cancelled_later_takes_place(llm: AsyncLLM, tamper: Tamper) -> None:
    async def go() -> None:
        tamper.on("load")
        before = llm.stats().loaded_tensors
        update = asyncio.create_task(llm.update_weights(tensors(dense(2)), "second"))
        await until(lambda: llm.stats().loaded_tensors > before)
        update.cancel()
        with pytest.raises(asyncio.CancelledError):
            await update
        tamper.off("load")
        await until(lambda: llm.stats().weight_version == "second")
        assert_same(dense(2), P(20, 1), GREEDY, (await last(llm, P(20, 1), GREEDY)).outputs[0])

    run(go())


@pytest.mark.parametrize("where", ["taking tensors", "loading", "asleep"])
def test_closing_in_the_middle(tmp_path: Path, where: str) -> None:
    """The process ends cleanly, and everybody is told."""
    tamper = Tamper(tmp_path)
    llm = start(dense(1), plugins=(tamper,), **SHORT)
    begun, go_on = threading.Event(), threading.Event()

    def slowly() -> Iterator[tuple[str, torch.Tensor]]:
        for pair in tensors(dense(2)):
            begun.set()
            assert go_on.wait(200)
            yield pair

    async def go() -> None:
        tamper.on("slow")
        async with running(llm, LONG, P(20, 1)) as [client]:
            update: asyncio.Task[None] | None = None
            if where == "asleep":
                await llm.sleep()
            elif where == "loading":
                tamper.on("load")
                update = asyncio.create_task(llm.update_weights(tensors(dense(2))))
                await until(lambda: llm.stats().loaded_tensors > 0)
            else:
                update = asyncio.create_task(llm.update_weights(slowly()))
                await asyncio.to_thread(begun.wait)
            process = llm._link._process
            await asyncio.to_thread(llm.close, 120.0)
            go_on.set()
            assert process is not None
            assert process.returncode == 0, "it was not killed"
            for task in (client, update):
                if task is not None:
                    with pytest.raises(EngineError, match="the engine was closed"):
                        await task

    run(go())
    assert llm.pid is not None
    assert gone(llm.pid)
