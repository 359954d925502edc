"""Settings of tests: a plugin's section with awkward fields, and loading without the environment."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import field_validator

from modelrunner.errors import SettingsError
from modelrunner.settings import RunnerSettings, Section, load_settings


class Inner(Section):
    width: int = 4


class Acme(Section):
    """A plugin's section with a field of every awkward kind."""

    depth: int = 3
    names: tuple[str, ...] = ()
    limit: int | None = 7
    inner: Inner = Inner()

    @field_validator("depth")
    @classmethod
    def _even(cls, depth: int) -> int:
        if depth == 13:
            raise ValueError("depth may be anything but 13")
        return depth


def load(arguments: dict[str, Any] | None = None, **kw: Any) -> RunnerSettings:
    return load_settings(arguments, environ=kw.pop("environ", {}), **kw)


def refused(arguments: dict[str, Any] | None = None, **kw: Any) -> str:
    with pytest.raises(SettingsError) as caught:
        load(arguments, **kw)
    return str(caught.value)
