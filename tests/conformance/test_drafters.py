"""The suite of drafters passes good ones, the built-in n-gram drafter among them, and finds broken ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
from draft_world import DrawingDrafter

from modelrunner import Offer, hookimpl
from modelrunner.speculation import Drafter, DrafterNeeds, DraftStep
from modelrunner.testing.conformance import DrafterConformance


class Plugin:
    """Offers a drafter of the kind as `planted`."""

    MODELRUNNER_API = ">=1.6,<2"

    def __init__(self, kind: type[Drafter]) -> None:
        self.kind = kind

    @hookimpl
    def drafter(self) -> Offer[type[Drafter]]:
        return Offer("planted", lambda: self.kind, reason="for tests")


class Before(Drafter):
    """Proposes the tokens before the newest one, from the fourth last on: right in texts that repeat four tokens."""

    def declare(self) -> DrafterNeeds:
        return DrafterNeeds()

    def last(self, step: DraftStep, back: int) -> torch.Tensor:
        place = (step.known - back).clamp(min=0).long().unsqueeze(1)
        return step.columns["token_ids"][step.batch.rows.long()].gather(1, place)[:, 0]

    def propose(self, step: DraftStep, out: torch.Tensor, probabilities: torch.Tensor | None) -> None:
        for j in range(step.num_draft):
            out[:, j] = self.last(step, 4 - j)


class FromTheNeighbour(Before):
    def propose(self, step: DraftStep, out: torch.Tensor, probabilities: torch.Tensor | None) -> None:
        super().propose(step, out, probabilities)
        out.copy_(out.roll(1, 0))


class Asks(Before):
    def propose(self, step: DraftStep, out: torch.Tensor, probabilities: torch.Tensor | None) -> None:
        if step.wants.any():
            super().propose(step, out, probabilities)


class Silent(Before):
    def propose(self, step: DraftStep, out: torch.Tensor, probabilities: torch.Tensor | None) -> None:
        pass


class Late(Before):
    """One token behind."""

    def last(self, step: DraftStep, back: int) -> torch.Tensor:
        return super().last(step, back + 1)


class Drawing(DrawingDrafter):
    chances: ClassVar[Mapping[int, float]] = {60: 0.25, 61: 0.75}


class Unnormalised(Drawing):
    def propose(self, step: DraftStep, out: torch.Tensor, probabilities: torch.Tensor | None) -> None:
        super().propose(step, out, probabilities)
        assert probabilities is not None
        probabilities.mul_(0.5)


def suite(kind: type[Drafter]) -> DrafterConformance:
    class TestPlanted(DrafterConformance):
        drafter = "planted"
        plugins = (Plugin(kind),)

        def expected(self, tokens: list[int], wanted: int) -> list[int] | None:
            if not issubclass(kind, Before):
                return None
            return [tokens[max(len(tokens) - 4 + j, 0)] for j in range(wanted)]

    return TestPlanted()


class TestGood(DrafterConformance):
    drafter = "planted"
    plugins = (Plugin(Before),)

    def expected(self, tokens: list[int], wanted: int) -> list[int]:
        return [tokens[max(len(tokens) - 4 + j, 0)] for j in range(wanted)]


class TestDrawing(DrafterConformance):
    drafter = "planted"
    plugins = (Plugin(Drawing),)


class TestNgram(DrafterConformance):
    drafter = "ngram"
    drafts = 4


@pytest.mark.parametrize(
    ("kind", "test", "message"),
    [
        (FromTheNeighbour, "test_proposals_are_a_rows_own", "proposals depend on company"),
        (Asks, "test_asks_for_no_values", "reads a tensor's value"),
        (Silent, "test_tokens_are_those_without_it", "nothing was proposed"),
        (Late, "test_is_what_the_reference_says", "is expected"),
        (Unnormalised, "test_probabilities_are_what_drafts_were_drawn_from", "must add up to 1"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_broken_drafter_is_found(kind: type[Drafter], test: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    more: tuple[Any, ...] = ("depth_2",) if test == "test_tokens_are_those_without_it" else ()
    with pytest.raises(Exception, match=message):
        getattr(suite(kind), test)(*more, monkeypatch)
