"""Exceptions for what a user or a plugin can get wrong. Each message says what was asked, what was found, and what to change."""

from __future__ import annotations


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


class PluginWarning(UserWarning):
    """A plugin that is left out, or a plugin name that nothing answers to; the engine goes on without it."""
