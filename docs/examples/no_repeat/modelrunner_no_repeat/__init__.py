"""Plugin: a logits processor that lets no sequence of tokens come twice. No torch is imported here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pydantic import Field

from modelrunner.hookspecs import hookimpl
from modelrunner.settings import Section

if TYPE_CHECKING:
    from modelrunner.logits_processors import RegisterProcessor
    from modelrunner.taps import ModelInfo

MODELRUNNER_API = ">=1.5,<2"


class NoRepeatSettings(Section):
    """Users set them as `plugin.no_repeat.<field>`."""

    max_size: int = Field(default=8, ge=1)
    """Longest sequence, in tokens, that a request may name."""


@hookimpl
def settings_sections() -> Mapping[str, type[Section]]:
    return {"no_repeat": NoRepeatSettings}


@hookimpl
def logits_processors(register: RegisterProcessor, model_info: ModelInfo) -> None:
    from modelrunner_no_repeat.ngrams import NoRepeat

    register(NoRepeat(model_info.settings.section(NoRepeatSettings).max_size))
