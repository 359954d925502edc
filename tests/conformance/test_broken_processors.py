"""The suite of logits processors finds broken ones, and passes a good one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from modelrunner import LogitsProcessor, hookimpl
from modelrunner.batch import Batch
from modelrunner.request_table import Column
from modelrunner.testing.conformance import LogitsProcessorConformance
from modelrunner.testing.conformance.logits_processor import SCHEDULES


class Lowers(LogitsProcessor):
    """Takes the request's own number off the token that came last."""

    name = "lowers"

    def columns(self, settings: Any) -> Sequence[Column]:
        return (Column("lowers.by", torch.float32),)

    def row_values(self, request: Any, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        if not isinstance(arguments.get("by"), float):
            raise ValueError("accepted: {'by': a float}")
        return {"lowers.by": arguments["by"]}

    def last(self, batch: Batch) -> torch.Tensor:
        return self.last_tokens(batch, 1).clamp(min=0)

    def by(self, batch: Batch) -> torch.Tensor:
        return batch.per_row("lowers.by").unsqueeze(1)

    def apply(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        return logits.scatter_add_(1, self.last(batch), -self.by(batch))


class LowersAll(Lowers):
    def by(self, batch: Batch) -> torch.Tensor:
        return super().by(batch).max().expand(batch.num_rows, 1)


class Revives(Lowers):
    def apply(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        return super().apply(logits.clamp(min=-1e5), batch)


class KeepsTheFirstStep(Lowers):
    """Python code that decides by the step: a graph of it would repeat its first one."""

    def __init__(self) -> None:
        self.kept: torch.Tensor | None = None

    def last(self, batch: Batch) -> torch.Tensor:
        if self.kept is None or self.kept.shape[0] != batch.num_rows:
            self.kept = super().last(batch)
        return self.kept


class RemembersRows(Lowers):
    """State beside the request's columns: whoever gets the row has it, too."""

    def __init__(self) -> None:
        self.times = torch.zeros(100)

    def by(self, batch: Batch) -> torch.Tensor:
        self.times[batch.rows.long()] += 1.0
        return super().by(batch) * (self.times[batch.rows.long()].unsqueeze(1) > 30)


class LooksBack(Lowers):
    """The token before the last one, as one that is a step late would."""

    def last(self, batch: Batch) -> torch.Tensor:
        return self.last_tokens(batch, 2)[:, :1].clamp(min=0)


class CountsCalls(Lowers):
    """State that has seen drafts which were rejected: another id at each call."""

    drafts = True

    def __init__(self) -> None:
        self.calls = torch.zeros(100, dtype=torch.int64)

    def apply(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        rows = batch.rows.long()
        self.calls[rows] += 1
        return logits.scatter_add_(1, self.calls[rows].unsqueeze(1) % 300, 100 * self.by(batch))


class TakesAnything(Lowers):
    def row_values(self, request: Any, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"lowers.by": float(arguments.get("by", 0.0))}


class Always(Lowers):
    captured = False


class Plugin:
    def __init__(self, kind: type[LogitsProcessor]) -> None:
        self.kind = kind

    @hookimpl
    def logits_processors(self, register: Any) -> None:
        register(self.kind())


class Suite(LogitsProcessorConformance):
    __test__ = False
    processor = "lowers"
    arguments = ({"by": 9.0}, {"by": 4.0})
    wrong_arguments = ({}, {"by": 3})

    def expected(self, prompt: list[int], output: list[int], logits: torch.Tensor, arguments: Mapping[str, Any]) -> torch.Tensor:
        logits[(prompt + output)[-1]] -= arguments["by"]
        return logits


def suite(kind: type[LogitsProcessor]) -> LogitsProcessorConformance:
    made: LogitsProcessorConformance = type("Suite", (Suite,), {"plugins": (Plugin(kind),)})()
    return made


@pytest.mark.parametrize("kind", [Lowers, Always], ids=lambda kind: kind.__name__)
def test_a_good_processor_passes(kind: type[LogitsProcessor]) -> None:
    good = suite(kind)
    good.test_rows_that_do_not_ask_are_left_alone()
    good.test_is_what_the_reference_says()
    for schedule in SCHEDULES:
        good.test_tokens_do_not_depend_on_the_schedule(schedule)
    good.test_goes_on_after_a_preemption()
    good.test_is_called_only_if_a_row_asks()
    good.test_wrong_arguments_are_refused()


@pytest.mark.parametrize(
    ("kind", "test", "arguments"),
    [
        (LowersAll, "test_rows_that_do_not_ask_are_left_alone", ()),
        (Revives, "test_rows_that_do_not_ask_are_left_alone", ()),
        (KeepsTheFirstStep, "test_is_what_the_reference_says", ()),
        (RemembersRows, "test_tokens_do_not_depend_on_the_schedule", ("few_rows",)),
        (CountsCalls, "test_tokens_do_not_depend_on_the_schedule", ("drafts",)),
        (LooksBack, "test_is_what_the_reference_says", ()),
    ],
)
def test_a_broken_processor_is_found(kind: type[LogitsProcessor], test: str, arguments: tuple[str, ...]) -> None:
    with pytest.raises(AssertionError):
        getattr(suite(kind), test)(*arguments)


def test_one_that_takes_anything_is_found() -> None:
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        suite(TakesAnything).test_wrong_arguments_are_refused()
