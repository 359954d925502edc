"""Plugin: a timeline of an engine's steps, as a file for Chrome's trace viewer or as a page of its own.

modelrunner generate --prompt "Hello" --trace out.html
LLM(..., plugin={"trace": {"path": "out.json"}})
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, field_validator

from modelrunner.errors import SettingsError
from modelrunner.hookspecs import hookimpl
from modelrunner.settings import RunnerSettings, Section

if TYPE_CHECKING:
    from modelrunner.observers import Observer

MODELRUNNER_API = ">=1,<2"

FORMATS = (".json", ".html")
SETTING = "plugin.trace.path"


class TraceSettings(Section):
    """The timeline of steps."""

    path: str = ""
    """File that gets the timeline when the engine is closed: .json for Chrome's trace viewer, .html for a page; empty for none."""

    max_steps: int = Field(default=100_000, ge=1)
    """Steps, and requests, that are kept; of more, the newest."""

    @field_validator("path")
    @classmethod
    def _writable(cls, path: str) -> str:
        """Told at start-up, not after hours of work."""
        if path and Path(path).suffix not in FORMATS:
            raise ValueError(f"{path!r} ends neither in {' nor in '.join(FORMATS)}")
        if path and not Path(path).expanduser().absolute().parent.is_dir():
            raise ValueError(f"there is no folder {str(Path(path).expanduser().absolute().parent)!r} to write {path!r} into")
        return path


@hookimpl
def settings_sections() -> Mapping[str, type[Section]]:
    return {"trace": TraceSettings}


@hookimpl
def observer(settings: RunnerSettings) -> Observer | None:
    section = settings.section(TraceSettings)
    if not section.path:
        return None
    from modelrunner.plugins.trace_file import TraceObserver

    return TraceObserver(Path(section.path).expanduser().absolute(), section.max_steps)


def add_option(parser: argparse.ArgumentParser) -> None:
    """Declare `--trace FILE` for a command that runs an engine."""
    parser.add_argument("--trace", metavar="FILE", help="write a timeline of the steps: .json for Chrome's trace viewer, or .html")


def traced(settings: Mapping[str, Any], path: str | None) -> dict[str, Any]:
    """`settings` with the value of `--trace`. Raises SettingsError when both name a file."""
    if path is None:
        return dict(settings)
    if SETTING in settings:
        raise SettingsError(f"--trace and --{SETTING} are one setting; give one of them")
    return {**settings, SETTING: path}
