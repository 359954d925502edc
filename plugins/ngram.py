"""Drafting by prompt lookup: a request's own text says how it goes on where it ended alike before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from modelrunner.hookspecs import hookimpl
from modelrunner.offers import Offer
from modelrunner.settings import Section

if TYPE_CHECKING:
    from modelrunner.settings import RunnerSettings
    from modelrunner.speculation import Drafter

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
def drafter(settings: RunnerSettings) -> Offer[type[Drafter]]:
    return Offer(NAME, load, fit="family", reason="the request's own text; no weights")


def load() -> type[Drafter]:
    from modelrunner.plugins.ngram_drafter import NgramDrafter

    return NgramDrafter
