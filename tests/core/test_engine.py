"""The engine's own books: what it still counts as unfinished, and whose output is whose."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from modelrunner import LLM, SamplingParams, hookimpl
from modelrunner.batch import Drain
from modelrunner.engine import Engine
from modelrunner.errors import CapacityError, CapacityWarning, EngineError, PluginError, PluginWarning, RequestError
from modelrunner.testing import ByteTokenizer, Driver, EngineProbe, P, ScriptedPlugin, Subject, dense, mixed, ref, say, scripted

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def test_requests_past_their_deadline_are_forgotten() -> None:
    """`has_unfinished` stayed true for ever after one."""
    driver = Driver(dense().engine(rows=1, pages=32))
    forever = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    driver.add("runs", P(8, 1), forever, deadline=0.01)
    driver.add("waits", P(8, 2), forever, deadline=0.01)
    driver.finish(max_steps=300)
    assert [driver.result(name).finish_reason for name in ("runs", "waits")] == ["timeout", "timeout"]
    driver.add("runs", P(8, 1), SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))  # its id is free again
    driver.finish()
    EngineProbe(driver).assert_clean()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 10**9}, "model.max_model_len is 1000000000 tokens, but the model holds at most"),
        ({"cache": {"memory_bytes": 1}}, "the cache would get 1 bytes, less than the 2 pages"),
    ],
)
def test_what_the_settings_make_impossible_is_told_before_a_weight_is_read(
    settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*arguments: object) -> None:
        raise AssertionError("the weights are read")

    monkeypatch.setattr("modelrunner.assemble.build_module", read)
    with pytest.raises(CapacityError, match=message):
        LLM(dense().model, plugins=dense().plugins, **settings)


@pytest.mark.parametrize("kind", ["cumulative", "delta", "final_only"])
def test_an_aborted_id_may_be_taken_again_at_once(kind: str) -> None:
    """The old request's last output used to take the new one's stop strings away."""
    whole = ref(dense(), P(8, 2), SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, output_kind=kind)
    driver = Driver(dense().engine())
    engine = driver.engine
    driver.add("same", P(8, 1), params)
    for _ in range(5):
        driver.step()
    engine.abort("same")
    engine.add_request("same", {"prompt_token_ids": P(8, 2)}, params.model_copy(update={"stop": (whole.text[6:9],)}))
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
        engine.scheduler.check()
    ends = [output.outputs[0].finish_reason for output in outputs if output.finished]
    assert ends == ["abort", "stop"]
    new = "".join(o.outputs[0].text for o in outputs[1:]) if kind == "delta" else outputs[-1].outputs[0].text
    assert new == whole.text[:6]
    EngineProbe(driver).assert_clean()


def test_a_prompt_without_text_leaves_nothing_behind() -> None:
    """Ids of the model that the tokenizer lacks: the request stayed queued though `add_request` had raised."""
    driver = Driver(scripted(mixed(), "few", tokenizer=ByteTokenizer(300)).engine())
    with pytest.raises(RequestError, match="310"):
        driver.add("bad", [1, 310], GREEDY)
    EngineProbe(driver).assert_clean()


@pytest.mark.parametrize("kind", ["cumulative", "final_only"])
def test_an_output_id_that_the_tokenizer_lacks_ends_its_own_request(kind: str) -> None:
    """The exception used to lose the outputs of every request of the step, and the engine never ended."""
    script = say([50, 51, 310, 52], prompt_len=4)
    driver = Driver(scripted(script, "lacks", tokenizer=ByteTokenizer(300)).engine())
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, output_kind=kind)
    driver.add("bad", P(4, 1), params)
    driver.add("good", P(4, 2), params.model_copy(update={"max_tokens": 2}))
    driver.add("ids", P(4, 2), params.model_copy(update={"detokenize": False}))
    driver.finish(max_steps=100)
    bad = driver.result("bad")
    assert (bad.finish_reason, list(bad.token_ids)[:3]) == ("error", [50, 51, 310])
    assert "310" in str(bad.stop_reason)
    assert [driver.result(name).finish_reason for name in ("good", "ids")] == ["length", "length"]
    EngineProbe(driver).assert_clean()


class Raising:
    """A scripted model one of whose methods raises at its `at`-th call, once `at` is set."""

    def __init__(self, method: str, error: BaseException) -> None:
        self.plugin = ScriptedPlugin(mixed())
        self.at: int | None = None
        whole = getattr(self.plugin.state, method)

        def raising(state: Any, *arguments: Any) -> Any:
            if self.at is not None:
                self.at -= 1
                if self.at == 0:
                    raise error
            return whole(state, *arguments)

        self.plugin.state = type("RaisingState", (self.plugin.state,), {method: raising})
        self.subject = Subject("scripted", "mixed", (self.plugin,))


def good() -> Subject:
    return scripted(mixed(), "mixed")


@pytest.mark.parametrize("device", ["cpu", "deferred_cpu"])
def test_a_model_state_that_raises_in_remove_row_does_not_spoil_the_books(device: str) -> None:
    model = Raising("remove_row", RuntimeError("lost it"))
    driver = Driver(model.subject.engine(rows=2, device=device))
    model.at = 2
    for k in range(5):
        driver.add(str(k), P(4 + k, k), GREEDY)
    with pytest.warns(PluginWarning, match=r"RaisingState\.remove_row.*lost it"):
        driver.finish()
    for k in range(5):
        assert driver.result(str(k)).token_ids == ref(good(), P(4 + k, k), GREEDY).token_ids
    EngineProbe(driver).assert_clean()


def test_outputs_of_a_step_that_raises_later_come_with_the_next() -> None:
    """`a` ends in a step that is collected before the launch that fails."""
    model = Raising("forward", RuntimeError("once"))
    engine = model.subject.engine(rows=3)
    driver, scheduler = Driver(engine), engine.scheduler
    plan, armed = scheduler.plan, [1]

    def draining(drained: bool = False) -> Any:
        if engine.tickets:
            return Drain("as if pages had run out")
        if "a" not in engine.requests and armed:
            model.at = armed.pop()
        return plan(drained)

    scheduler.plan = draining  # type: ignore[method-assign]
    for name, count in (("a", 3), ("b", 6)):
        driver.add(name, P(4, 1), GREEDY.model_copy(update={"max_tokens": count}))
    with pytest.raises(RuntimeError, match="once"):
        driver.finish()
    driver.finish()
    assert [len(driver.result(name).token_ids) for name in "ab"] == [3, 6]
    EngineProbe(driver).assert_clean()


def during(llm: LLM, part: str, method: str, action: Callable[[], object]) -> None:
    """Run `action` in the middle of the third call of a method of the engine, after its work is half done."""
    owner = getattr(llm.engine, part)
    whole, calls = getattr(owner, method), iter(range(1000))

    def wrapped(*arguments: Any, **options: Any) -> Any:
        result = whole(*arguments, **options)
        if next(calls) == 2:
            action()
        return result

    setattr(owner, method, wrapped)


@pytest.mark.parametrize("place", [("scheduler", "plan"), ("runner", "launch"), ("runner", "collect"), ("scheduler", "commit")])
def test_ctrl_c_waits_for_the_end_of_the_step(place: tuple[str, str]) -> None:
    """It used to leave a planned step unlaunched, or one launched and forgotten: wrong tokens, or an engine that never ends."""
    llm = good().llm(rows=2)
    during(llm, *place, lambda: signal.raise_signal(signal.SIGINT))
    prompts = [{"prompt_token_ids": P(4 + k, k)} for k in range(4)]
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, GREEDY)
    EngineProbe(Driver(llm.engine)).assert_clean()
    for k, output in enumerate(llm.generate(prompts, GREEDY)):
        assert output.outputs[0].token_ids == ref(good(), P(4 + k, k), GREEDY).token_ids
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_engine_interrupted_in_mid_step_says_so() -> None:
    llm = good().llm(rows=2)
    during(llm, "runner", "launch", lambda: [signal.raise_signal(signal.SIGINT) for _ in range(2)])
    with pytest.raises(KeyboardInterrupt):
        llm.generate({"prompt_token_ids": P(4, 1)}, GREEDY)
    with pytest.raises(EngineError, match="KeyboardInterrupt"):
        llm.generate({"prompt_token_ids": P(4, 1)}, GREEDY)


@pytest.mark.parametrize("answer", [None, 3, "known"])
def test_a_model_state_that_answers_no_columns_ends_that_request_only(answer: Any) -> None:
    """It used to raise from every step, with the request at the head of the queue for ever."""
    plugin = ScriptedPlugin(mixed())
    plugin.state = type("Odd", (plugin.state,), {"add_row": lambda state, row, request: answer if request.id == "bad" else {}})
    driver = Driver(Subject("scripted", "mixed", (plugin,)).engine())
    for name in ("bad", "good"):
        driver.add(name, P(4, 1), GREEDY)
    driver.finish(max_steps=50)
    assert driver.result("bad").finish_reason == "error"
    assert driver.result("good").token_ids == ref(good(), P(4, 1), GREEDY).token_ids
    EngineProbe(driver).assert_clean()


class Override:
    """Overrides one operation."""

    MODELRUNNER_API = ">=1,<2"

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name, self.function = name, function

    @hookimpl
    def kernels(self, register: Any) -> None:
        register.override(self.name, self.function, device_type="cpu")


@pytest.mark.parametrize("name", ["apply_patch", "greedy", "sample", "write_record", "slot_mapping"])
def test_an_operation_of_the_wrong_signature_fails_at_start_up(name: str) -> None:
    """`greedy` and `apply_patch` were first called by the first request."""
    with pytest.raises(PluginError, match="at start-up: TypeError"):
        Subject("scripted", "mixed", (ScriptedPlugin(mixed()), Override(name, lambda: None))).engine()


def test_an_operation_that_writes_no_record_fails_at_start_up() -> None:
    with pytest.raises(PluginError, match="write_record"):
        Subject("scripted", "mixed", (ScriptedPlugin(mixed()), Override("write_record", lambda *arguments: None))).engine()


def test_a_cache_that_cannot_be_allocated_is_named() -> None:
    with pytest.raises(CapacityError, match=r"the cache of 2147483647 pages of \d+ bytes does not fit on device 'cpu'"):
        dense().engine(pages=2**31 - 1, page_size=4096)


def test_a_closed_engine_says_that_it_was_closed() -> None:
    """It used to say that a step had failed."""
    engine = good().engine()
    engine.close()
    with pytest.raises(EngineError, match=r"^the engine was closed"):
        engine.add_request("a", {"prompt_token_ids": P(4, 1)}, GREEDY)


@pytest.mark.parametrize("start", ["engine", "llm"])
def test_the_warning_of_a_small_cache_points_at_the_caller(start: str) -> None:
    subject = good()
    settings = {"model": "scripted", "num_gpu_blocks_override": 4, "device": "cpu"}
    begin: Callable[[], object] = {
        "llm": lambda: LLM(plugins=subject.plugins, **settings),
        "engine": lambda: Engine(settings, plugins=subject.plugins),
    }[start]
    with pytest.warns(CapacityWarning, match="longer requests are refused") as caught:
        begin()
    assert [warning.filename for warning in caught] == [__file__]
