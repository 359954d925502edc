"""Our engine beside itself: the same work with weights of other types, for `--compare float32`. Torch-free."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from modelrunner.errors import SettingsError

BASE = "float32"  # what the others are measured against
FORMS: dict[str, dict[str, Any]] = {
    BASE: {"model.dtype": "float32", "linear.scheme": "auto"},
    "bfloat16": {"model.dtype": "bfloat16", "linear.scheme": "auto"},
    "int8": {"model.dtype": "float32", "linear.scheme": "int8"},
}


def forms(settings: Mapping[str, Any], decided: Collection[str]) -> dict[str, dict[str, Any]]:
    """Settings of each form's engine, by name. decided: settings that the user gave; raises SettingsError for one that forms differ in."""
    own = [name for name in FORMS[BASE] if name in decided]
    if own:
        raise SettingsError(f"--compare {BASE} runs {', '.join(FORMS)} by itself, and {' and '.join(own)} is given; leave it out")
    return {name: {**settings, **form} for name, form in FORMS.items()}
