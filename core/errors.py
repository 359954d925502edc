"""Exceptions for what a user or a plugin can get wrong. Each message says what was asked, what was found, and what to change."""

from __future__ import annotations

import sys
import warnings


class ModelRunnerError(Exception):
    """Base of all errors that modelrunner raises on purpose."""


class RequestError(ModelRunnerError, ValueError):
    """A request that cannot be served as it was put; only that request is refused."""


class SettingsError(ModelRunnerError, ValueError):
    """A setting that is unknown, out of range, or given twice."""


class PluginError(ModelRunnerError):
    """A plugin that failed to load, or a choice between plugins that cannot be made."""


class CheckpointError(ModelRunnerError):
    """A checkpoint that is missing, damaged, or does not fit the model."""


class EngineError(ModelRunnerError):
    """A step failed on the device, or the engine was closed; it takes no more work. The cause is chained."""


class CapacityError(ModelRunnerError):
    """Memory or table sizes that cannot hold what was asked for."""


class ModelRunnerWarning(UserWarning):
    """Base of the warnings for users. The command line shows them as one line."""


class PluginWarning(ModelRunnerWarning):
    """A plugin that is left out, or a plugin name that nothing answers to; the engine goes on without it."""


class CapacityWarning(ModelRunnerWarning):
    """A size that fits, but less than was asked for or than the model could do."""


class SettingsWarning(ModelRunnerWarning):
    """A setting that was given and has no effect beside the others."""


def kind_of(value: object) -> str:
    """The type of `value` with its article, for messages: "an int"."""
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def warn_caller(message: str, category: type[Warning]) -> None:
    """Warn at the line outside this package that led here."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == __name__.partition(".")[0]:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
