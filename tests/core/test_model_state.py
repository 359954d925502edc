"""The ModelState contract, seen from a state that overrides all of it: who is called when, with what, and what happens when it raises."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from modelrunner.attention import AttentionMeta
from modelrunner.batch import Batch
from modelrunner.checkpoint import ModelCard
from modelrunner.engine import Engine
from modelrunner.errors import EngineError, PluginError
from modelrunner.model_state import CacheGroup, FullAttention, Needs, No, StaticBuffer, Yes
from modelrunner.request import Request, SamplingParams
from modelrunner.request_table import Column
from modelrunner.settings import RunnerSettings
from modelrunner.testing import Driver, EngineProbe, P, ScriptedPlugin, mixed, options, scripted
from modelrunner.testing.scripted import MODEL_NAME, ScriptedState
from modelrunner.weights import Target, WeightMap

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
WIDE = 20_000  # elements: more than all other columns of a row together


class Watched(ScriptedState):
    """Notes the host's calls, and what the device finds in the state's own columns and buffers. fail: raise in that method, once."""

    def __init__(self, card: ModelCard, settings: RunnerSettings) -> None:
        super().__init__(card, settings)
        self.calls: list[tuple[Any, ...]] = []
        self.found: list[tuple[int, int, int]] = []
        self.fail = ""

    def note(self, *call: Any) -> None:
        self.calls.append(call)
        if self.fail == call[0]:
            self.fail = ""
            raise RuntimeError(f"{call[0]} was told to fail")

    def declare(self, card: ModelCard, settings: RunnerSettings) -> Needs:
        columns = (Column("mark", torch.int32, default=-1), Column("wide", torch.int32, WIDE))
        return replace(super().declare(card, settings), columns=columns, buffers=(StaticBuffer("doubled", ("tokens", 2), torch.int64),))

    def fill_dummy(self, batch: Batch) -> None:
        self.note("fill_dummy", tuple(batch.buffers["doubled"].shape)[1:])

    def add_row(self, row: int, request: Request) -> Mapping[str, Any]:
        self.note("add_row", request.id, row)
        return {"mark": request.prompt_token_ids[1], "wide": np.full(WIDE, request.prompt_token_ids[1])}

    def resume_row(self, row: int, request: Request) -> Mapping[str, Any]:
        self.note("resume_row", request.id, row)
        return {"mark": -request.prompt_token_ids[1], "wide": np.zeros(WIDE)}

    def remove_row(self, row: int, request: Request) -> None:
        self.note("remove_row", request.id, row)

    def attention_metadata(self, group: CacheGroup, batch: Batch, base: AttentionMeta) -> AttentionMeta:
        self.note("attention_metadata", group.name)
        return replace(base)

    def before_forward(self, batch: Batch) -> None:
        batch.buffers["doubled"][: batch.num_tokens, 0] = batch.positions
        mark, wide = batch.columns["mark"][batch.rows.long()], batch.columns["wide"][batch.rows.long()]
        self.found += [(int(m), int(w[0]), int(w[-1])) for m, w, n in zip(mark, wide, batch.query_len, strict=True) if n]

    def positions(self, batch: Batch, out: torch.Tensor) -> torch.Tensor:
        return batch.buffers["doubled"][: batch.num_tokens, 0] * 2

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor, *rest: Any) -> torch.Tensor:
        self.note("forward")
        assert torch.equal(positions, 2 * hidden[:, 0].long())
        return super().forward(hidden, positions, *rest)


def start(**short: Any) -> tuple[Driver, Watched]:
    plugin = ScriptedPlugin(mixed())
    plugin.state = type("Watched", (Watched, plugin.state), {})
    engine = Engine({"model": {"name": MODEL_NAME}} | options(**short), plugins=[plugin])
    state: Any = engine.assembly.state
    return Driver(engine), state


def expected(prompt: list[int]) -> list[int]:
    return list(plain(lambda driver: driver.add("a", prompt, PARAMS)).result("a").token_ids)


def plain(add: Callable[[Driver], None]) -> Driver:
    driver = Driver(Engine({"model": {"name": MODEL_NAME}} | options(depth=1), plugins=[ScriptedPlugin(mixed())]))
    add(driver)
    driver.finish()
    return driver


@pytest.mark.parametrize("device", ["cpu", "deferred_cpu"])
def test_every_method_has_its_turn(device: str) -> None:
    driver, state = start(device=device)
    assert ("fill_dummy", (2,)) in state.calls, "before the warm-up step"
    state.calls.clear(), state.found.clear()
    probe = EngineProbe(driver)
    driver.add("a", P(5, 3), PARAMS)
    driver.step()
    driver.step()
    probe.preempt("a")
    driver.finish()
    host = [call[:2] for call in state.calls if call[0].endswith("_row")]
    assert host == [("add_row", "a"), ("remove_row", "a"), ("resume_row", "a"), ("remove_row", "a")]
    mark = P(5, 3)[1]
    assert set(state.found) == {(mark, mark, mark), (-mark, 0, 0)}, "what the device read of the state's columns"
    assert list(driver.result("a").token_ids) == expected(P(5, 3))
    probe.assert_clean()


def test_the_scratch_row_keeps_the_default() -> None:
    driver, _ = start()
    driver.add("a", P(5, 3), PARAMS)
    driver.finish()
    assert int(driver.engine.assembly.table.columns["mark"][-1]) == -1


@pytest.mark.parametrize("method", ["add_row", "resume_row"])
def test_a_state_that_refuses_a_row_ends_that_request_only(method: str) -> None:
    driver, state = start()
    probe = EngineProbe(driver)
    driver.add("other", P(7, 1), PARAMS)
    driver.step()
    driver.add("a", P(5, 3), PARAMS)
    if method == "resume_row":
        driver.step()
        probe.preempt("a")
    state.fail = method
    driver.finish()
    result = driver.result("a")
    assert (result.finish_reason, result.stop_reason) == (
        "error",
        f"PluginError: Watched.{method} raised RuntimeError: {method} was told to fail",
    )
    assert list(driver.result("other").token_ids) == expected(P(7, 1))
    probe.assert_clean()


@pytest.mark.parametrize(("device", "method"), [("cpu", "attention_metadata"), ("deferred_cpu", "attention_metadata"), ("cpu", "forward")])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_launch_that_raises_is_rolled_back(device: str, method: str, steps: int) -> None:
    driver, state = start(device=device)
    driver.add("a", P(20, 3), PARAMS)
    driver.add("b", P(6, 4), PARAMS)
    for _ in range(steps):
        driver.step()
    state.fail = method
    with pytest.raises(RuntimeError, match=method):
        driver.step()
    driver.engine.scheduler.check()
    driver.finish()
    assert list(driver.result("a").token_ids) == expected(P(20, 3))
    assert list(driver.result("b").token_ids) == expected(P(6, 4))
    EngineProbe(driver).assert_clean()


def test_a_step_that_fails_on_the_device_stops_the_engine() -> None:
    driver, state = start(device="deferred_cpu")
    driver.add("a", P(5, 3), PARAMS)
    state.fail = "forward"
    with pytest.raises(EngineError, match=r"step \d+ failed on device 'deferred_cpu'.*: forward was told to fail"):
        driver.finish()
    with pytest.raises(EngineError, match="forward was told to fail"):
        driver.step()
    with pytest.raises(EngineError, match="forward was told to fail"):
        driver.add("b", P(5, 3), PARAMS)


def test_features_that_a_state_cannot_do_are_refused_at_the_start() -> None:
    plugin = ScriptedPlugin(mixed())

    def supports(self: Any, feature: str) -> Yes | No:
        return No("its memory is not in pages") if feature == "prefix_cache" else Yes()

    plugin.state = type("Picky", (plugin.state,), {"supports": supports})
    with pytest.raises(Exception, match=r"Picky cannot do.*prefix_cache: its memory is not in pages"):
        Engine({"model": {"name": MODEL_NAME}} | options(), plugins=[plugin])
    Engine({"model": {"name": MODEL_NAME}} | options(prefix=False), plugins=[plugin]).close()


@pytest.mark.parametrize(
    ("method", "words"),
    [("declare", "declare was told to fail"), ("build", "build was told to fail"), ("fill_dummy", "the first step")],
)
def test_a_state_that_raises_at_the_start_is_named(method: str, words: str) -> None:
    """The error says which component of which plugin it was, not only what it raised."""

    def fail(*_: Any) -> None:
        raise ValueError(f"{method} was told to fail")

    plugin = ScriptedPlugin(mixed())
    plugin.state = type("Broken", (plugin.state,), {method: fail})
    with pytest.raises(PluginError, match=rf"(?s)model_state scripted .*ScriptedPlugin.*ValueError: {method} was told to fail") as caught:
        Engine({"model": {"name": MODEL_NAME}} | options(), plugins=[plugin])
    assert words in str(caught.value)


def test_a_state_cannot_have_seats() -> None:
    def declare(self: ScriptedState, card: ModelCard, settings: RunnerSettings) -> Needs:
        return replace(ScriptedState.declare(self, card, settings), columns=(Column("chair", torch.int32, 2, seats=3),))

    plugin = ScriptedPlugin(mixed())
    plugin.state = type("Seated", (plugin.state,), {"declare": declare})
    with pytest.raises(PluginError, match=r"columns \['chair'\] are seated"):
        Engine({"model": {"name": MODEL_NAME}} | options(), plugins=[plugin])


def test_a_step_whose_results_cannot_be_fetched_stops_the_engine() -> None:
    """It runs, so it must not be rolled back and run again."""
    engine = scripted(mixed(), "no results").engine()
    engine.add_request("a", {"prompt_token_ids": P(5, 1)}, PARAMS)
    engine.step()

    def no_download(*_: Any) -> None:
        raise RuntimeError("the side stream is gone")

    engine.assembly.device.download = no_download  # type: ignore[method-assign,assignment]
    with pytest.raises(EngineError, match="the side stream is gone"):
        engine.step()
    with pytest.raises(EngineError, match="the engine stopped"):
        engine.step()


def dead_group(state: Any, hidden: torch.Tensor, positions: torch.Tensor, attention: Any, caches: Any, tap: Any) -> torch.Tensor:
    return attention["ful"](hidden, hidden, hidden, 0)


def dead_layer(state: Any, hidden: torch.Tensor, positions: torch.Tensor, attention: Any, caches: Any, tap: Any) -> torch.Tensor:
    return attention["full"](hidden, hidden, hidden, 7)


MISTAKES: list[tuple[str, Any, str]] = [
    ("declare", lambda *_: {"hidden": 2}, r"Slipped.declare returned {'hidden': 2} \(dict\); a Needs is needed"),
    ("build", lambda *_: None, r"Slipped.build returned None \(NoneType\); a Module is needed"),
    ("weight_map", lambda *_: {}, r"Slipped.weight_map returned {} \(dict\); a WeightMap is needed"),
    ("weight_map", lambda *_: WeightMap({"w": Target("w")}), r"weight map, 'w': got Target\(.*; a tuple of Targets is needed"),  # type: ignore[dict-item]
    ("forward", lambda *_: None, r"Slipped.forward returned None \(NoneType\); a tensor of shape \[1, 2\] is needed"),
    ("forward", lambda state, hidden, *_: hidden[:, :1], r"Slipped.forward returned a tensor of shape \[1, 1\]; .*\[1, 2\] is needed"),
    ("logits", lambda state, hidden: hidden, r"Slipped.logits returned a tensor of shape \[1, 2\]; .*\[1, 331\] is needed"),
    ("forward", dead_group, "no cache group is called 'ful'; `declare` named 'full'"),
    ("forward", dead_layer, r"layer 7 is not in cache group 'full', which has the layers \[0\]"),
]


@pytest.mark.parametrize("device", ["cpu", "deferred_cpu"])
@pytest.mark.parametrize(("method", "mistake", "message"), MISTAKES, ids=[f"{method}-{i}" for i, (method, _, _) in enumerate(MISTAKES)])
def test_an_authors_mistake_is_told_at_the_start(method: str, mistake: Any, message: str, device: str) -> None:
    plugin = ScriptedPlugin(mixed())
    plugin.state = type("Slipped", (plugin.state,), {method: mistake})
    with pytest.raises(PluginError, match=rf"(?s)model_state scripted .*ScriptedPlugin.*{message}"):
        Engine({"model": {"name": MODEL_NAME}} | options(device=device), plugins=[plugin])


@pytest.mark.parametrize(
    ("setting", "message"), [("device.name", "device.name = 'nope', but"), ("linear.scheme", "linear.scheme = 'nope', but")]
)
def test_a_name_that_nobody_offers_is_told_with_its_setting(setting: str, message: str) -> None:
    """The message used to name pin.device, which nobody had set."""
    with pytest.raises(PluginError, match=message):
        Engine({"model": MODEL_NAME, setting: "nope"}, plugins=[ScriptedPlugin(mixed())])


def opened(**methods: Any) -> Engine:
    plugin = ScriptedPlugin(mixed())
    plugin.state = type("Odd", (plugin.state,), methods)
    return Engine({"model": {"name": MODEL_NAME}} | options(), plugins=[plugin])


@pytest.mark.parametrize("answer", [None, False, "no", No])
def test_whether_a_feature_works_is_said_by_yes_or_no(answer: object) -> None:
    got = "No" if answer is No else repr(answer)
    with pytest.raises(PluginError, match=rf"Odd\.supports\('\w+'\) returned {got}; Yes\(\) or No\('why not'\) is needed"):
        opened(supports=lambda state, feature: answer)


def test_embeddings_are_written_not_returned() -> None:
    with pytest.raises(PluginError, match=r"Odd\.embed returned a Tensor; it is to write into `out` and return None"):
        opened(embed=lambda state, batch, out: torch.zeros_like(out))
    opened(embed=lambda state, batch, out: ScriptedState.embed(state, batch, out) or out)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"capture": "None"}, "capture is 'None'; accepted are 'full' and 'none'"),
        ({"tap_points": "layer.0"}, "tap_points is 'layer.0'; a tuple is needed"),
        ({"cache_groups": FullAttention("full", (0,), 2, 1, 8, scale=1.0)}, r"cache_groups is FullAttention\(.*; a tuple is needed"),
        ({"max_model_len": None}, "max_model_len is None; a whole number above 0 is needed"),
        ({"hidden_size": 0}, "hidden_size is 0; a whole number above 0 is needed"),
    ],
)
def test_what_needs_cannot_be(fields: dict[str, Any], message: str) -> None:
    values: dict[str, Any] = {"cache_groups": (), "hidden_size": 8, "vocab_size": 9, "max_model_len": 10}
    Needs(**values)
    with pytest.raises((TypeError, ValueError), match=message):
        Needs(**values | fields)
