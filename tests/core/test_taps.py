"""Taps and model outputs, by taps small enough to know every number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from modelrunner import ModelInfo, Result, SamplingParams, Tap, hookimpl
from modelrunner.batch import Batch
from modelrunner.engine import Engine
from modelrunner.errors import PluginError, PluginWarning, RequestError
from modelrunner.model_state import Needs, StaticBuffer
from modelrunner.request import Request
from modelrunner.request_table import Column
from modelrunner.testing import Driver, EngineProbe, P, dense, mixed
from modelrunner.testing.scripted import ScriptedPlugin, ScriptedState
from modelrunner.testing.subjects import options

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


class Brings:
    """A plugin of the given taps. seen: what the hook was told."""

    MODELRUNNER_API = ">=1,<2"

    def __init__(self, *taps: Tap) -> None:
        self.given = list(taps)
        self.seen: list[ModelInfo] = []

    @hookimpl
    def taps(self, model_info: ModelInfo) -> Sequence[Tap]:
        self.seen.append(model_info)
        return self.given


class Positions(Tap):
    """Reports where each token was sampled from, of every dtype and shape that matters, and through a static buffer."""

    name = "positions"
    edits = False
    results = (Result("position", (), torch.int64), Result("pair", (1, 2), torch.float16), Result("row", (1,), torch.int32))
    buffers = (StaticBuffer("positions.at", ("rows",), torch.int64),)

    def outputs(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        at = batch.buffers["positions.at"][: batch.num_rows]
        torch.index_select(batch.positions, 0, batch.sample_index, out=at)
        pair = torch.stack((at, -at), 1).to(torch.float16).unsqueeze(1)
        return {"position": at, "pair": pair, "row": self.per_row(batch, "tap.positions")[:, None]}


class Scale(Tap):
    """Multiplies hidden states by 2 for rows that ask: whether that reaches only theirs shows in tokens."""

    name = "scale"
    points = ("layer.1",)

    def columns(self, settings: Any) -> Sequence[Column]:
        return (Column("scale.by", torch.float32, default=1.0),)

    def row_values(self, request: Request) -> Mapping[str, Any] | None:
        by = request.params.extra_args.get("scale")
        return None if by is None else {"scale.by": float(by)}

    def apply(self, point: str, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        return hidden * self.per_token(batch, "scale.by")[:, None]


def driver(*taps: Tap, **short: Any) -> Driver:
    subject = dense()
    return Driver(Engine({"model": {"name": subject.model}} | options(**short), plugins=[*subject.plugins, Brings(*taps)]))


def asking(**arguments: Any) -> SamplingParams:
    return SamplingParams(**{**GREEDY.model_dump(), "extra_args": arguments})


@pytest.mark.filterwarnings("ignore:.*max_model_len.*")
@pytest.mark.parametrize("short", [{"depth": 1}, {"depth": 3, "tokens": 5}, {"depth": 2, "pages": 12, "page_size": 4}], ids=str)
def test_entries_belong_to_their_tokens(short: dict[str, Any]) -> None:
    run = driver(Positions(), device="deferred_cpu", **short)
    lengths = {"a": 9, "b": 20, "c": 4}
    for name, length in lengths.items():
        run.add(name, P(length, 1), asking(positions=True))
    run.add("silent", P(7, 2), GREEDY)
    run.finish()
    if short.get("pages"):
        assert run.engine.scheduler.stats.preemptions, "preempted requests are part of this"
    for name, length in lengths.items():
        extra = run.result(name).extra
        positions = np.arange(length - 1, length + 5)
        assert (extra["position"].dtype, extra["position"].tolist()) == (np.int64, positions.tolist())
        assert (extra["pair"].dtype, extra["pair"].shape) == (np.float16, (6, 1, 2))
        assert np.array_equal(extra["pair"][:, 0], np.stack((positions, -positions), 1))
        assert extra["row"].tolist() == [[1]] * 6
    assert run.result("silent").extra == {}
    EngineProbe(run).assert_clean()


def test_a_tap_reaches_only_the_rows_that_ask() -> None:
    run = driver(Scale(), device="deferred_cpu")
    alone = {}
    for name, params in (("plain", GREEDY), ("scaled", asking(scale=-3))):
        run.add(name, P(20, 1), params)
        run.finish()
        alone[name] = list(run.result(name).token_ids)
    assert alone["plain"] != alone["scaled"]
    for i in range(4):
        run.add(f"plain{i}", P(20, 1), GREEDY)
        run.add(f"scaled{i}", P(20, 1), asking(scale=-3))
    run.finish()
    for i in range(4):
        assert list(run.result(f"plain{i}").token_ids) == alone["plain"]
        assert list(run.result(f"scaled{i}").token_ids) == alone["scaled"]


def test_the_hook_is_told_of_the_model() -> None:
    subject, brings = dense(), Brings()
    Engine({"model": {"name": subject.model, "max_model_len": 100}} | options(), plugins=[*subject.plugins, brings])
    (info,) = brings.seen
    assert (info.tap_points, info.hidden_size, info.vocab_size, info.max_model_len) == (("layer.0", "layer.1", "layer.2"), 64, 331, 100)
    assert (info.dtype, info.device) == (torch.float32, torch.device("cpu"))


class Nameless(Tap):
    pass


class WrongShape(Positions):
    def outputs(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        return {**super().outputs(batch), "row": torch.zeros(batch.num_rows, 3)}


class WrongNames(Positions):
    def outputs(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        return {"position": batch.rows}


class Touches(Tap):
    name, points = "touches", ("layer.0",)

    def __init__(self, answer: Any, edits: bool = True) -> None:
        self.answer, self.edits = answer, edits

    def apply(self, point: str, hidden: torch.Tensor, batch: Batch) -> Any:
        return self.answer(hidden)


@pytest.mark.parametrize(
    ("taps", "message"),
    [
        ([Touches(lambda hidden: None)], r"tap 'touches' returned None at 'layer\.0'; \[\d+, 64\] torch\.float32 is needed"),
        ([Touches(lambda hidden: hidden[:, :3])], r"tap 'touches' returned \[\d+, 3\] torch\.float32 at 'layer\.0'"),
        ([Touches(lambda hidden: {}["x"])], "tap 'touches' failed at 'layer.0': "),
        ([Touches(lambda hidden: hidden * 2, edits=False)], "tap 'touches', which has edits = False, returned something else than"),
        ([Nameless()], "brings a tap without a name"),
        ([Positions(), Positions()], "both bring tap 'positions'"),
        ([WrongShape()], r"tap 'positions' gave output 'row' as \[1, 3\] torch.float32; it declares \[1, 1\] torch.int32"),
        ([WrongNames()], r"tap 'positions' gave the outputs \['position'\]; it declares \['position', 'pair', 'row'\]"),
    ],
)
def test_taps_that_do_not_fit_are_refused_at_start_up(taps: list[Tap], message: str) -> None:
    with pytest.raises(PluginError, match=message):
        driver(*taps)


def test_an_answer_that_is_no_tap_is_reported() -> None:
    with pytest.warns(PluginWarning, match="an instance of modelrunner.taps.Tap, a list of these, or None is needed"):
        run = driver("positions")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="no tap is named 'positions'; accepted: nothing, since no plugin brings a tap"):
        run.add("a", P(9, 1), asking(positions=True))


@pytest.mark.parametrize(("name", "shape", "dtype"), [("", (), torch.float32), ("x", (0,), torch.float32), ("x", (), torch.bfloat16)])
def test_results_that_cannot_be_sent_are_refused(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="accepted: a name, sizes of at least 1"):
        Result(name, shape, dtype)


class Reporting(ScriptedState):
    """Reports the id of the token that each output token was sampled from."""

    def declare(self, card: Any, settings: Any) -> Needs:
        needs = super().declare(card, settings)
        return Needs(needs.cache_groups, 2, needs.vocab_size, needs.max_model_len, results=(Result("previous", (), torch.int32),))

    def outputs(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        return {"previous": batch.input_ids.index_select(0, batch.sample_index).to(torch.int32)}


def test_a_model_state_reports_too() -> None:
    plugin = ScriptedPlugin(mixed())
    plugin.state = type("Reports", (Reporting,), {"script": staticmethod(mixed())})
    run = Driver(Engine({"model": {"name": "scripted"}} | options(device="deferred_cpu", tokens=6), plugins=[plugin]))
    run.add("a", P(20, 1), asking(model_outputs=True))
    run.add("b", P(9, 2), GREEDY)
    run.finish()
    tokens = list(run.result("a").token_ids)
    assert run.result("a").extra["previous"].tolist() == [P(20, 1)[-1], *tokens[:-1]]
    assert run.result("b").extra == {}
