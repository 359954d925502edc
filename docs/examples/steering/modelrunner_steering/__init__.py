"""Plugin: read a layer's hidden state, and add a vector at a layer, for the requests that ask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from modelrunner.hookspecs import hookimpl
from modelrunner.settings import Section

if TYPE_CHECKING:
    from modelrunner.taps import ModelInfo, Tap

MODELRUNNER_API = ">=1,<2"


class SteeringSettings(Section):
    """Where the taps are."""

    layer: int | None = Field(default=None, ge=0)
    """Layer whose input is read and steered; none takes what leaves the last layer."""

    seats: int = Field(default=8, ge=1)
    """Steered requests that run at once; more wait."""


@hookimpl
def settings_sections() -> Mapping[str, type[Section]]:
    return {"steering": SteeringSettings}


@hookimpl
def taps(model_info: ModelInfo) -> Sequence[Tap] | None:
    if not model_info.tap_points:
        return None
    # Imported here, so that listing plugins does not import torch. A module named `taps` would replace this function in the package.
    from modelrunner_steering.layer_taps import ReadHidden, Steer

    section = model_info.settings.section(SteeringSettings)
    point = model_info.tap_points[-1] if section.layer is None else f"layer.{section.layer}"
    return [Steer(point, model_info.hidden_size, section.seats), ReadHidden(point, model_info.hidden_size)]
