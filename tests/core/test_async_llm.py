"""AsyncLLM against LLM: the same outputs and the same errors, whoever asks, however many at once, and nothing left of who went away."""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from engine_world import ProbePlugin, engine_processes, last, outputs, run, start, until, wait_until

from modelrunner import LLM, AsyncLLM, SamplingParams
from modelrunner.errors import EngineError, RequestError
from modelrunner.request import OutputKind
from modelrunner.request_stream import RequestStream
from modelrunner.testing import ByteTokenizer, P, dense, options

SHORT: dict[str, Any] = {"rows": 8, "pages": 24, "tokens": 64}  # 24 pages hold one request of the whole context, and preempt eight
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = GREEDY.model_copy(update={"max_tokens": 200})


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    llm = start(plugins=(ProbePlugin(),), **SHORT)
    yield llm
    llm.close()
    assert engine_processes() == []


@pytest.fixture(scope="module")
def plain() -> LLM:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*max_model_len.*")
        return LLM(dense().model, plugins=[*dense().plugins, ProbePlugin()], **options(**SHORT))


@pytest.fixture(autouse=True)
def _clean(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test with the shared engine, nothing is left of its requests."""
    yield
    if "llm" in request.fixturenames:
        shared: AsyncLLM = request.getfixturevalue("llm")
        wait_until(lambda: (shared.stats().running, shared.stats().waiting, shared.stats().pages_used) == (0, 0, 0))
        assert shared._link.num_open == 0
        assert shared.health(), shared.problem()


def final(plain: LLM, prompt: Any, params: SamplingParams | None) -> Any:
    [output] = plain.generate([prompt], params, use_tqdm=False)
    return output


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "greedy": ("The sky is", {"temperature": 0, "max_tokens": 40}),
    "sampled": ("The sky is", {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "seed": 5, "max_tokens": 40}),
    "ids": (P(50, 3), {"temperature": 0, "max_tokens": 20}),
    "mapping": ({"prompt": "ab", "cache_salt": "x"}, {"temperature": 0, "max_tokens": 5}),
    "stop string": ("abc", {"temperature": 1.0, "seed": 2, "max_tokens": 100, "stop": ["e", "a"]}),
    "stop string kept": ("abc", {"temperature": 1.0, "seed": 3, "max_tokens": 100, "stop": ["e"], "include_stop_str_in_output": True}),
    "stop id": (P(9, 4), {"temperature": 1.0, "seed": 4, "max_tokens": 200, "stop_token_ids": list(range(100, 140))}),
    "end of sequence": (P(9, 4), {"temperature": 5.0, "seed": 9, "max_tokens": 240}),
    "end of sequence named": (P(9, 4), {"temperature": 5.0, "seed": 9, "max_tokens": 240, "stop_token_ids": [2]}),
    "ids only": (P(9, 4), {"temperature": 0, "max_tokens": 6, "detokenize": False}),
    "special tokens": (P(9, 4), {"temperature": 3.0, "seed": 1, "max_tokens": 60, "skip_special_tokens": False, "ignore_eos": True}),
    "log-probs": ("The sky is", {"temperature": 0.9, "seed": 5, "max_tokens": 20, "logprobs": 3, "prompt_logprobs": 2}),
    "log-probs, ids only": (P(9, 4), {"temperature": 0, "max_tokens": 6, "detokenize": False, "logprobs": 0, "prompt_logprobs": 20}),
    "log-probs, stop string": ("abc", {"temperature": 1.0, "seed": 2, "max_tokens": 100, "stop": ["e", "a"], "logprobs": 2}),
    "all of the context": (P(30, 2), {"temperature": 0, "max_tokens": None, "ignore_eos": True}),
}


def test_the_cases_contain_what_they_are_named_for(plain: LLM) -> None:
    done = {name: final(plain, prompt, SamplingParams(**values)).outputs[0] for name, (prompt, values) in CASES.items()}
    reasons = {name: (output.finish_reason, output.stop_reason) for name, output in done.items()}
    assert reasons["stop string"] in [("stop", "e"), ("stop", "a")]
    assert reasons["stop string kept"] == ("stop", "e")
    assert reasons["stop id"][1] in range(100, 140)
    assert reasons["end of sequence"] == ("stop", None)
    assert reasons["end of sequence named"] == ("stop", 2)
    assert len(done["all of the context"].token_ids) == 226


@pytest.mark.parametrize("kind", ["delta", "cumulative", "final_only"])
@pytest.mark.parametrize("case", CASES)
def test_outputs_equal_those_of_llm(llm: AsyncLLM, plain: LLM, case: str, kind: str) -> None:
    prompt, values = CASES[case]
    want = final(plain, prompt, SamplingParams(**values))
    got = run(outputs(llm, prompt, SamplingParams(**values, output_kind=kind), request_id="mine"))
    assert [output.finished for output in got] == [False] * (len(got) - 1) + [True]
    assert {(output.request_id, output.prompt, tuple(output.prompt_token_ids)) for output in got} == {
        ("mine", want.prompt, tuple(want.prompt_token_ids))
    }
    ends = [output.outputs[0] for output in got]
    joined = kind == "delta"
    assert ("".join(end.text for end in ends) if joined else ends[-1].text) == want.outputs[0].text
    ids = [token for end in ends for token in end.token_ids] if joined else list(ends[-1].token_ids)
    assert ids == list(want.outputs[0].token_ids)
    assert (ends[-1].finish_reason, ends[-1].stop_reason) == (want.outputs[0].finish_reason, want.outputs[0].stop_reason)
    logprobs = [found for end in ends for found in end.logprobs or ()] if joined else ends[-1].logprobs
    assert (logprobs or None, ends[-1].cumulative_logprob) == (want.outputs[0].logprobs, want.outputs[0].cumulative_logprob)
    assert got[0 if joined else -1].prompt_logprobs == want.prompt_logprobs
    metrics = got[-1].metrics
    assert metrics.first_token_time is not None
    assert metrics.finished_time is not None
    assert metrics.arrival_time <= metrics.first_token_time <= metrics.finished_time
    if kind == "final_only":
        assert len(got) == 1
    elif kind == "cumulative":
        assert all(b.text.startswith(a.text) for a, b in pairwise(ends))


def test_default_parameters_are_the_checkpoints(llm: AsyncLLM, plain: LLM) -> None:
    assert llm.default_sampling_params() == plain.default_sampling_params()
    assert len(run(last(llm, "a")).outputs[0].token_ids) <= 16


def test_many_clients_at_once(llm: AsyncLLM, plain: LLM) -> None:
    """More than there are rows and pages for, so that some wait and some are preempted; each gets what it gets alone."""
    before = llm.stats().preemptions
    cases = [(P(5 + n, n), GREEDY.model_copy(update={"max_tokens": 20 + 3 * n, "output_kind": OutputKind.DELTA})) for n in range(30)]

    async def all_at_once() -> list[list[Any]]:
        return await asyncio.gather(*(outputs(llm, prompt, params) for prompt, params in cases))

    streams = run(all_at_once())
    want = plain.generate([prompt for prompt, _ in cases], [params for _, params in cases], use_tqdm=False)
    got = [[token for output in stream for token in output.outputs[0].token_ids] for stream in streams]
    assert got == [list(output.outputs[0].token_ids) for output in want]
    assert ["".join(output.outputs[0].text for output in stream) for stream in streams] == [output.outputs[0].text for output in want]
    assert llm.stats().preemptions > before
    assert sum(stream[-1].metrics.num_preemptions for stream in streams) == llm.stats().preemptions - before


def test_clients_in_several_threads_and_loops(llm: AsyncLLM, plain: LLM) -> None:
    results: dict[int, list[int]] = {}

    def client(n: int) -> None:
        for _ in range(2):  # a loop of its own each time
            results[n] = list(run(last(llm, P(9, n), GREEDY)).outputs[0].token_ids)

    threads = [threading.Thread(target=client, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    want = plain.generate([P(9, n) for n in range(4)], GREEDY, use_tqdm=False)
    assert [results[n] for n in range(4)] == [list(output.outputs[0].token_ids) for output in want]


def test_a_slow_reader_gets_every_delta_but_only_the_newest_whole(llm: AsyncLLM) -> None:
    async def slow(kind: OutputKind) -> list[Any]:
        got = []
        done = llm.stats().finished.get("length", 0)
        async for output in llm.generate(P(9, 1), GREEDY.model_copy(update={"output_kind": kind})):
            got.append(output)
            await until(lambda: llm.stats().finished.get("length", 0) > done)
        return got

    deltas, wholes = run(slow(OutputKind.DELTA)), run(slow(OutputKind.CUMULATIVE))
    assert [token for output in deltas for token in output.outputs[0].token_ids] == list(wholes[-1].outputs[0].token_ids)
    assert len(wholes) == 2
    assert len(deltas) > 2


# ---- refusals ----------------------------------------------------------------------------------------------------------

BAD: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "empty prompt": ([], GREEDY, {}),
    "id outside": ([5, 999], GREEDY, {}),
    "not an id": ([5, 1.5], GREEDY, {}),
    "too long": (P(300, 1), GREEDY, {}),
    "long text": ("x" * 100_000, GREEDY, {}),
    "surrogate": ("a\ud800", GREEDY, {}),
    "key": ({"text": "a"}, GREEDY, {}),
    "no prompt": (None, GREEDY, {}),
    "stop id outside": ("a", SamplingParams(stop_token_ids=[331]), {}),
    "priority": ("a", GREEDY, {"priority": 1.5}),
    "deadline": ("a", GREEDY, {"deadline": -1.0}),
    "salt": ({"prompt": "a", "cache_salt": ""}, GREEDY, {}),
    "stop ids, which the sampler counts": ("a", SamplingParams(stop_token_ids=list(range(3, 80))), {}),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_requests_get_the_message_of_llm(llm: AsyncLLM, plain: LLM, case: str) -> None:
    prompt, params, named = BAD[case]
    with pytest.raises(RequestError) as here:
        plain.generate([prompt], params, use_tqdm=False, **named)
    with pytest.raises(RequestError) as there:
        run(outputs(llm, prompt, params, **named))
    assert f"prompts[0]: {there.value}" == str(here.value)


def test_more_logprobs_than_the_setting_allows_are_refused(llm: AsyncLLM) -> None:
    for name in ("logprobs", "prompt_logprobs"):
        with pytest.raises(RequestError, match=rf"^{name}: got 21; accepted: at most 20 \(setting sampler.max_logprobs"):
            run(last(llm, P(9, 4), GREEDY.model_copy(update={name: 21})))


def test_wrong_parameters_and_ids_are_refused(llm: AsyncLLM) -> None:
    wrong: Any = {"temperature": 1}
    with pytest.raises(RequestError, match="sampling_params: got a dict of length 1; accepted: a SamplingParams"):
        run(outputs(llm, "a", wrong))
    with pytest.raises(RequestError, match="request id: got ''"):
        run(outputs(llm, "a", GREEDY, request_id=""))


def test_nothing_happens_before_the_first_step(llm: AsyncLLM) -> None:
    async def steps() -> None:
        generator = llm.generate([], GREEDY)
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="empty"):
            await anext(generator)

    run(steps())


def test_an_id_in_use_is_refused_and_its_owner_goes_on(llm: AsyncLLM) -> None:
    async def twice() -> None:
        owner = llm.generate(P(9, 1), LONG, request_id="taken")
        await anext(owner)
        with pytest.raises(RequestError, match="request id 'taken' is in use by an unfinished request; choose another"):
            await last(llm, P(9, 2), GREEDY, request_id="taken")
        *_, end = [output async for output in owner]
        assert len(end.outputs[0].token_ids) == 200
        assert (await last(llm, P(9, 2), GREEDY, request_id="taken")).finished

    run(twice())


# ---- going away --------------------------------------------------------------------------------------------------------


async def leave_by_break(llm: AsyncLLM) -> None:
    """Python closes the generator when the loop runs on, not before."""
    before = llm.stats().finished.get("abort", 0)
    async for _ in llm.generate(P(9, 1), LONG, request_id="left"):
        break
    await until(lambda: llm.stats().finished.get("abort", 0) > before)


async def leave_by_aclose(llm: AsyncLLM) -> None:
    generator = llm.generate(P(9, 1), LONG, request_id="left")
    await anext(generator)
    await generator.aclose()


async def leave_by_cancel(llm: AsyncLLM) -> None:
    begun = asyncio.Event()

    async def client() -> None:
        async for _ in llm.generate(P(9, 1), LONG, request_id="left"):
            begun.set()

    task = asyncio.create_task(client())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def leave_by_timeout(llm: AsyncLLM) -> None:
    """Before the first output, or soon after it."""
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(last(llm, P(9, 1), LONG, request_id="left"), 0.001)


@pytest.mark.parametrize("leave", [leave_by_break, leave_by_aclose, leave_by_cancel, leave_by_timeout])
def test_who_goes_away_takes_the_request_along(llm: AsyncLLM, plain: LLM, leave: Any) -> None:
    """The id is free, and the engine stops working on the request."""

    async def go() -> Any:
        before = llm.stats().finished.get("abort", 0)
        await leave(llm)
        end = await last(llm, P(9, 2), GREEDY, request_id="left")
        await until(lambda: llm.stats().finished.get("abort", 0) == before + 1)
        return end

    assert list(run(go()).outputs[0].token_ids) == list(final(plain, P(9, 2), GREEDY).outputs[0].token_ids)


def test_a_loop_that_is_gone_takes_its_requests_along(llm: AsyncLLM) -> None:
    """An event loop that is closed without a word to its tasks."""
    before = llm.stats().finished.get("abort", 0)
    loop = asyncio.new_event_loop()
    generator = llm.generate(P(9, 1), LONG)
    loop.run_until_complete(anext(generator))
    loop.close()
    wait_until(lambda: llm.stats().finished.get("abort", 0) == before + 1)


def test_abort_from_outside_gives_a_last_output(llm: AsyncLLM) -> None:
    async def go() -> None:
        got = []
        async for output in llm.generate(P(9, 1), LONG, request_id="a"):
            got.append(output)
            llm.abort("a")
        assert got[-1].outputs[0].finish_reason == "abort"
        assert len(got[-1].outputs[0].token_ids) < 200
        llm.abort("a")  # over: ignored

    run(go())


def test_a_deadline_passes(llm: AsyncLLM) -> None:
    end = run(last(llm, P(9, 1), LONG, deadline=0.001))
    assert end.finished
    assert end.outputs[0].finish_reason == "timeout"


class Broken(ByteTokenizer):
    """It can decode the prompt of one id, and no more."""

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        if len(ids) > 1:
            raise IndexError("planted")
        return super().decode(ids, skip_special_tokens)


def test_text_that_cannot_be_made_ends_its_request_and_no_other(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        other = asyncio.create_task(last(llm, P(9, 1), LONG))
        await until(lambda: llm._link.num_open == 1)  # it has its tokenizer now
        monkeypatch.setattr(llm, "tokenizer", Broken())
        for kind in (OutputKind.DELTA, OutputKind.FINAL_ONLY):
            end = (await last(llm, [5], GREEDY.model_copy(update={"output_kind": kind}))).outputs[0]
            assert (end.finish_reason, end.stop_reason) == ("error", "the tokenizer failed: IndexError: planted")
        assert len((await other).outputs[0].token_ids) == 200

    run(go())


@pytest.mark.parametrize("method", ["feed", "end"])
def test_an_output_that_cannot_be_made_ends_its_request_and_no_other(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    make = getattr(RequestStream, method)

    def broken(stream: RequestStream, *arguments: Any) -> Any:
        if stream.request.id == "b":
            raise RuntimeError("planted")
        return make(stream, *arguments)

    async def go() -> None:
        other = asyncio.create_task(last(llm, P(9, 1), LONG))
        monkeypatch.setattr(RequestStream, method, broken)
        with pytest.raises(EngineError, match="request 'b': its output could not be made: RuntimeError: planted"):
            await last(llm, P(9, 2), GREEDY, request_id="b")
        assert len((await other).outputs[0].token_ids) == 200

    run(go())


def test_what_taps_report_comes_along(llm: AsyncLLM, plain: LLM) -> None:
    """Entries stay with their tokens, in every kind of output, also where a stop string cuts."""
    asking: dict[str, Any] = {"temperature": 1.0, "seed": 2, "max_tokens": 40, "stop": ["e", "a"], "extra_args": {"probe": 3}}
    want = final(plain, "abc", SamplingParams(**asking)).outputs[0]
    assert want.finish_reason == "stop"
    assert want.extra["probe"].shape == (len(want.token_ids), 2)
    for kind in OutputKind:
        got = [output.outputs[0] for output in run(outputs(llm, "abc", SamplingParams(**asking, output_kind=kind)))]
        assert all(len(end.extra["probe"]) == len(end.token_ids) for end in got)
        assert all(end.extra["probe"].flags.owndata and end.extra["probe"].flags.writeable for end in got), "the caller's own, as with LLM"
        extra = np.concatenate([end.extra["probe"] for end in got]) if kind is OutputKind.DELTA else got[-1].extra["probe"]
        np.testing.assert_array_equal(extra, want.extra["probe"])
    for bad in ({"probe": "x"}, {"nobody": 1}):
        with pytest.raises(RequestError) as here:
            plain.generate(["a"], SamplingParams(extra_args=bad), use_tqdm=False)
        with pytest.raises(RequestError) as there:
            run(outputs(llm, "a", SamplingParams(extra_args=bad)))
        assert f"prompts[0]: {there.value}" == str(here.value)
    with pytest.raises(RequestError, match="sampling_params: a object cannot be sent to another process; accepted: numbers, text"):
        run(outputs(llm, "a", SamplingParams(extra_args={"probe": object()})))


def test_drafts_are_counted_in_outputs_and_in_stats() -> None:
    """A bias makes the output repeat one token, which prompt lookup then proposes."""
    params = GREEDY.model_copy(update={"max_tokens": 30, "logit_bias": {60: 100.0}})
    llm = start(drafter="ngram", **SHORT)
    try:
        output = run(last(llm, P(9, 1), params))
        assert list(output.outputs[0].token_ids) == [60] * 30
        assert output.outputs[0].num_drafted >= output.outputs[0].num_accepted > 15
        wait_until(lambda: sum(llm.stats().accepted_at) == output.outputs[0].num_accepted)
        assert sum(llm.stats().drafted_at) == output.outputs[0].num_drafted
    finally:
        llm.close()
