"""Drafting by prompt lookup: a request's own text says how it goes on where it ended alike before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from modelrunner.hookspecs import hookimpl
from modelrunner.offers import Decline, Offer
from modelrunner.settings import Section

if TYPE_CHECKING:
    import torch

    from modelrunner.checkpoint import ModelCard
    from modelrunner.speculation import DraftBuild, Drafter, DraftStep

MODELRUNNER_API = ">=1.6,<2"
NAME = "ngram"


class NgramSettings(Section):
    """The drafter `ngram`."""

    min_size: int = Field(default=2, ge=1, le=32)
    """Fewest of a request's last tokens that must have stood together before."""

    max_size: int = Field(default=4, ge=1, le=32)
    """Most of them that are compared; among places that match as far, the last one counts."""

    @model_validator(mode="after")
    def _ordered(self) -> NgramSettings:
        if self.min_size > self.max_size:
            raise ValueError(f"min_size is {self.min_size} and max_size {self.max_size}; the first may not be larger")
        return self


@hookimpl
def settings_sections() -> Mapping[str, type[Section]]:
    return {NAME: NgramSettings}


@hookimpl
def drafter(card: ModelCard | None) -> Offer[type[Drafter]] | Decline:
    if card is not None:
        return Decline(
            f"prompt lookup reads no weights, and speculation.model names {card.name!r}: leave it out, or name a drafter with weights"
        )
    return Offer(NAME, load, fit="family", reason="the request's own text; no weights")


def load() -> type[Drafter]:
    from modelrunner.speculation import Drafter, DrafterNeeds

    class NgramDrafter(Drafter):
        """Looks a row's last tokens up in its own prompt and output (operation `ngram_draft`)."""

        def declare(self) -> DrafterNeeds:
            return DrafterNeeds()

        def build(self, build: DraftBuild) -> None:
            self.ops = build.context.ops
            self.sizes = self.settings.section(NgramSettings)

        def propose(self, step: DraftStep, out: torch.Tensor, probabilities: torch.Tensor | None) -> None:
            batch, token_ids = step.batch, step.columns["token_ids"]
            longest = min(batch.max_seq_len + 1, token_ids.shape[1])
            self.ops.ngram_draft(batch.rows, step.wants, step.known, token_ids, longest, self.sizes.min_size, self.sizes.max_size, out)

    return NgramDrafter
