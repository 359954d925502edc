"""Logits processors in an engine: order, rows, graphs, errors; and Python functions, with the tokens that the device has."""

from __future__ import annotations

import asyncio
from asyncio import CancelledError
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from engine_world import start
from processor_world import Plugin, Shift

from modelrunner import LogitsProcessor, SamplingParams
from modelrunner.batch import PROCESSOR_BIT, Batch
from modelrunner.errors import PluginError, RequestError
from modelrunner.sampler import sampler as sampler_module
from modelrunner.testing import Driver, EngineProbe, P, Subject, assert_same, dense, ref

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def with_processors(*processors: Any) -> Subject:
    plain = dense()
    return Subject(plain.model, "processed", (*plain.plugins, Plugin(*processors)))


def asking(**processors: Any) -> SamplingParams:
    return GREEDY.model_copy(update={"logits_processors": processors})


def test_stands_after_penalties_and_before_temperature() -> None:
    """It is given logits with the bias, the bans and the penalty in them, not divided by the temperature; what it adds decides."""
    shift = Shift()
    driver = Driver(with_processors(shift).engine())
    plain = ref(dense(), P(12, 1), GREEDY)
    wish = {"logit_bias": {60: 3.0}, "bad_words": [[61]], "presence_penalty": 1.0, "temperature": 0.5, "top_k": 1, "max_tokens": 2}
    driver.add("a", P(12, 1), asking(shift={"by": 1000.0}).model_copy(update=wish))
    driver.add("b", P(12, 1), asking(shift={"by": 0.0}))
    driver.finish()
    (_, first), (_, second) = shift.seen[1:3]  # the first call was the warm-up's
    edited, unedited = first
    torch.testing.assert_close(edited[60], unedited[60] + 3.0)
    assert edited[61] == -torch.inf
    others = [v for v in range(edited.numel()) if v not in (60, 61)]
    assert torch.equal(edited[others], unedited[others])
    assert second[0, 50] < -100 or second[0, 50] != first[0, 50]
    assert list(driver.result("a").token_ids) == [50, 50]
    assert list(driver.result("b").token_ids) == list(plain.token_ids)


@pytest.mark.parametrize("processors", [(), (Shift(),)], ids=["none-installed", "none-asked-for"])
def test_without_one_tokens_are_chosen_from_the_models_own_logits(processors: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """And not from a copy of them in float32."""
    engine = with_processors(*processors).engine() if processors else dense().engine()
    sampler, made, chosen = engine.assembly.sampler, [], []
    logits, best = engine.runner.state.logits, sampler.ops.greedy_rows

    def noted_logits(hidden: torch.Tensor) -> torch.Tensor:
        made.append(logits(hidden).bfloat16())
        return made[-1]

    def noted_choice(given: torch.Tensor, samples: torch.Tensor) -> Any:
        chosen.append(given)
        return best(given, samples)

    monkeypatch.setattr(engine.runner.state, "logits", noted_logits)
    monkeypatch.setattr(sampler.ops, "greedy_rows", noted_choice)
    driver = Driver(engine)
    driver.add("a", P(12, 1), GREEDY)
    driver.finish()
    assert len(made) == 12
    assert all(one is other for one, other in zip(made, chosen, strict=True))


def test_processors_act_in_the_order_of_registration() -> None:
    one, two = Shift("one"), Shift("two")
    driver = Driver(with_processors(one, two).engine())
    driver.add("a", P(12, 1), asking(two={"by": 1.0}, one={"by": 2.0}))
    driver.finish()
    (_, before), (_, after) = one.seen[1], two.seen[1]
    torch.testing.assert_close(after[0, 50], before[0, 50] + 2.0)


def test_many_rows_are_processed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the float32 copies stay small; each part has the columns of its own rows."""
    monkeypatch.setattr(sampler_module, "EDITED_LINES", 3)
    shift = Shift()
    driver = Driver(with_processors(shift).engine())
    for i in range(8):
        driver.add(str(i), P(9, i), asking(shift={"by": 1000.0 * (i % 2)}))
    driver.finish()
    assert max(rows for rows, _ in shift.seen) == 3
    for i in range(8):
        if i % 2:
            assert set(driver.result(str(i)).token_ids) == {50}
        else:
            assert_same(dense(), P(9, i), GREEDY, driver.result(str(i)))


@pytest.mark.parametrize("captured", [True, False])
def test_steps_are_captured_if_the_processor_allows(captured: bool) -> None:
    shift = Shift()
    shift.captured = captured
    driver = Driver(with_processors(shift).engine(device="deferred_cpu", captures=True))
    driver.add("a", P(9, 1), asking(shift={"by": 1000.0}))
    driver.add("b", P(9, 2), GREEDY)
    driver.finish()
    bit = PROCESSOR_BIT << 1
    keys = [key for key in driver.engine.runner.graphs.captured if int(key.features) & bit]
    assert bool(keys) is captured
    assert set(driver.result("a").token_ids) == {50}
    assert_same(dense(), P(9, 2), GREEDY, driver.result("b"))


def test_a_request_that_names_a_wrong_one_is_refused() -> None:
    driver = Driver(with_processors(Shift()).engine())
    for wrong, message in (
        ({"shifd": {}}, r"logits_processors: no logits processor is named 'shifd'; accepted: 'shift'"),
        ({"shift": {"by": "x"}}, r"logits_processors\['shift'\]: could not convert string to float: 'x'"),
        ({"shift": {}}, r"logits_processors\['shift'\]: 'by'"),
    ):
        with pytest.raises(RequestError, match=message):
            driver.add("a", P(9, 1), GREEDY.model_copy(update={"logits_processors": wrong}))
    EngineProbe(driver).assert_alive(dense())


@pytest.mark.parametrize(
    "wrong",
    [3, "shift", [3], [""], {"a": 3}, {"": {}}, {1: {}}, [lambda logits: logits], {"functions": []}, {"functions": {"functions": [3]}}],
    ids=lambda wrong: "function" if "lambda" in repr(wrong) else repr(wrong),
)
def test_what_is_no_list_of_processors_is_refused(wrong: Any) -> None:
    with pytest.raises(RequestError, match=r"logits_processors: got .*; accepted: a list of names"):
        SamplingParams(logits_processors=wrong)


def test_names_alone_stand_for_no_arguments() -> None:
    def same(prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits

    params = SamplingParams(logits_processors=["a", same, "b", same])
    assert params.logits_processors == {"a": {}, "b": {}, "functions": {"functions": (same, same)}}
    assert SamplingParams(logits_processors=params.logits_processors) == params
    assert SamplingParams(logits_processors={"a": None}).logits_processors == {"a": {}}
    assert hash(params) == hash(SamplingParams())


class NotOne:
    name = "shift"


@pytest.mark.parametrize(
    ("processors", "message"),
    [
        ((Shift(), Shift()), "both register the logits processor 'shift'; rename one"),
        ((Shift("two words"),), "with the name 'two words'; accepted: a Python identifier"),
        ((Shift("functions"),), "with the name 'functions'"),
        ((NotOne(),), "registers a NotOne as a logits processor; accepted: an instance of a subclass of modelrunner"),
        ([Shift(f"p{i}") for i in range(21)], "'p20'; an engine holds at most 20"),
    ],
)
def test_what_cannot_be_registered_is_refused(processors: Sequence[Any], message: str) -> None:
    subject = with_processors(*processors)
    with pytest.warns(UserWarning, match=message):
        driver = Driver(subject.engine())  # as of any plugin passed as an object: left out, and told
    with pytest.raises(RequestError, match="accepted: functions alone, since no plugin brings a processor"):
        driver.add("a", P(9, 1), asking(shift={}))


class Narrow(LogitsProcessor):
    name = "narrow"

    def apply(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        return logits[:, 1:]


class Failing(LogitsProcessor):
    name = "failing"

    def apply(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        raise ValueError("no luck")


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (Narrow(), r"'narrow' of plugin .* gave \[1, 330\] torch.float32; \[1, 331\]"),
        (Failing(), "'failing' of plugin .* ValueError: no luck"),
    ],
)
def test_one_that_does_not_work_is_found_at_the_start(processor: LogitsProcessor, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        with_processors(processor).engine()


# ---- Python functions ------------------------------------------------------------------------------------------------


class NoRepeat:
    """Bans every token that the output has, and notes what it was given."""

    def __init__(self) -> None:
        self.seen: list[tuple[list[int], list[int]]] = []

    def __call__(self, prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        self.seen.append((list(prompt_ids), list(output_ids)))
        logits[output_ids] = -torch.inf
        return logits


def bare(*functions: Any, **more: Any) -> SamplingParams:
    return GREEDY.model_copy(update={"logits_processors": list(functions), **more})


@pytest.mark.parametrize(
    "short", [{}, {"depth": 1}, {"depth": 3, "device": "deferred_cpu"}, {"tokens": 7}, {"rows": 2, "device": "deferred_cpu"}]
)
def test_a_function_sees_the_true_tokens_and_decides(short: dict[str, Any]) -> None:
    """Beside a request without one, in rows that change hands, and over a preemption."""
    driver = Driver(dense().engine(**short))
    probe = EngineProbe(driver)
    functions = [NoRepeat() for _ in range(4)]
    for i, function in enumerate(functions):
        driver.add(f"f{i}", P(15, i), bare(function))
        driver.add(f"p{i}", P(15, i), GREEDY)
    driver.step_until(lambda: driver.num_tokens("f0") > 3)
    probe.preempt("f0")
    driver.finish()
    for i, function in enumerate(functions):
        got = list(driver.result(f"f{i}").token_ids)
        assert len(set(got)) == GREEDY.max_tokens
        assert function.seen == [(P(15, i), got[:n]) for n in range(len(got))]
        assert_same(dense(), P(15, i), GREEDY, driver.result(f"p{i}"))
    probe.assert_clean()


def test_functions_follow_each_other() -> None:
    def up(prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        return torch.where(torch.arange(logits.numel()) == 40 + len(output_ids), 1e4, logits)

    def down(prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        assert logits[40 + len(output_ids)] == 1e4
        return torch.where(torch.arange(logits.numel()) == 41, -torch.inf, logits).double()

    with dense().llm() as llm:
        (output,) = llm.generate([P(9, 1)], bare(up, down, max_tokens=4))
        tokens = list(output.outputs[0].token_ids)
        assert tokens[0::2] == [40, 42]
        assert tokens[1] != 41
        assert tokens[3] == 43


def raising(prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    if len(output_ids) == 3:
        raise KeyError("gone")
    return logits


def cancelled(prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    raise CancelledError("over")


def narrow(prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    return logits[1:]


def nothing(prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> None:
    logits[0] = 1e4


@pytest.mark.parametrize(
    ("function", "count", "message"),
    [
        (raising, 3, "logits_processors: the function 'raising' failed: it raised KeyError: 'gone'"),
        (cancelled, 0, "logits_processors: the function 'cancelled' failed: it raised CancelledError: over"),
        (narrow, 0, "logits_processors: the function 'narrow' failed: it returned [330] torch.float32; [331] of a float type is needed"),
        (nothing, 0, "logits_processors: the function 'nothing' failed: it returned a NoneType; a tensor is needed"),
    ],
)
def test_a_function_that_fails_ends_its_own_request(function: Any, count: int, message: str) -> None:
    with dense().llm() as llm:
        failed, other = llm.generate([P(9, 1), P(9, 2)], [bare(function), GREEDY])
        (completion,) = failed.outputs
        assert (completion.finish_reason, completion.stop_reason, len(completion.token_ids)) == ("error", message, count)
        assert_same(dense(), P(9, 2), GREEDY, other.outputs[0])


def test_nobody_waits_for_a_function_once_its_request_has_ended() -> None:
    driver = Driver(dense().engine())
    function = NoRepeat()
    driver.add("f", P(9, 1), bare(function))
    driver.add("p", P(9, 1), GREEDY)
    driver.step_until(lambda: len(function.seen) > 2)
    driver.engine.abort("f")
    driver.step()
    calls = len(function.seen)
    driver.finish()
    assert len(function.seen) == calls
    assert driver.engine.runner.route is not None
    assert not int(driver.engine.runner.route.plan.features) & PROCESSOR_BIT


def test_a_function_cannot_go_to_another_process() -> None:
    llm = start(plugins=(Plugin(Shift()),))

    async def run() -> list[int]:
        with pytest.raises(RequestError, match="logits_processors: a Python function cannot go to the engine process"):
            await anext(llm.generate(P(9, 1), bare(NoRepeat())))
        with pytest.raises(RequestError, match=r"logits_processors: no logits processor is named 'shifd'; accepted: 'shift'"):
            await anext(llm.generate(P(9, 1), asking(shifd={})))
        async for output in llm.generate(P(9, 1), asking(shift={"by": 1000})):
            last = output
        return list(last.outputs[0].token_ids)

    try:
        assert asyncio.run(run()) == [50] * 12
    finally:
        llm.close()
