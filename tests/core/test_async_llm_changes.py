"""AsyncLLM against LLM where the weights change under running requests, and errors of such changes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_world import Tamper, ids, last, outputs, run, running, start, tensors, until

from modelrunner import AsyncLLM, RequestOutput, SamplingParams
from modelrunner.errors import CheckpointError, EngineError, RequestError
from modelrunner.testing import P, assert_same, assert_tokens, dense, ref

SHORT: dict[str, Any] = {"rows": 8, "pages": 64, "tokens": 64}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, seed=5, max_tokens=12, ignore_eos=True)
LONG = GREEDY.model_copy(update={"max_tokens": 200, "output_kind": "delta"})


@pytest.fixture
def llm(changing: AsyncLLM) -> AsyncLLM:
    """The weights are those of dense(1), named "first"."""
    return changing


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
    "not pairs": (RequestError, lambda _: [1, 2], None),
    "nothing to go through": (RequestError, lambda _: 5, None),
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


@pytest.mark.parametrize("source", [list, lambda: [("x", torch.zeros(1))]], ids=["none", "strange"])
def test_an_update_of_which_nothing_was_stored_disturbs_nobody(llm: AsyncLLM, source: Callable[[], Any]) -> None:
    async def go() -> None:
        async with running(llm, LONG, P(20, 1)) as [client]:
            with pytest.raises(CheckpointError, match="the set of new weights does not fit the model"):
                await llm.update_weights(source())
            assert llm.problem() is None
            assert len(ids(await client)) == 200

    run(go())


def some() -> Iterator[tuple[str, torch.Tensor]]:
    return iter(list(tensors(dense(2)))[:3])


def misshapen() -> Iterator[tuple[str, torch.Tensor]]:
    """Of which only the first fits."""
    return ((name, tensor if number == 0 else tensor[:1]) for number, (name, tensor) in enumerate(tensors(dense(2))))


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
