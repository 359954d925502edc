"""Plugin: a drafter that draws what has followed a token in the request's own text. No torch is imported here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pydantic import Field

from modelrunner.hookspecs import hookimpl
from modelrunner.offers import Offer
from modelrunner.settings import Section

if TYPE_CHECKING:
    from modelrunner.speculation import Drafter

MODELRUNNER_API = ">=1.6,<2"


class FollowersSettings(Section):
    """Users set them as `plugin.followers.<field>`."""

    floor: float = Field(default=0.0, ge=0, lt=1)
    """Chance, in all, of tokens that have not followed yet."""


@hookimpl
def settings_sections() -> Mapping[str, type[Section]]:
    return {"followers": FollowersSettings}


@hookimpl
def drafter() -> Offer[type[Drafter]]:
    return Offer("followers", load, reason="draws what has followed a token in the request's own text")


def load() -> type[Drafter]:
    from modelrunner_followers.counts import Followers

    return Followers
