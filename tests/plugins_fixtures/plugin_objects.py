"""Plugins made on the spot, and managers of these alone."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest

from modelrunner.errors import PluginError
from modelrunner.hookspecs import hookimpl
from modelrunner.offers import Offer
from modelrunner.plugin_manager import PluginManager


def plugin(name: str, **hooks: Callable[..., Any]) -> types.ModuleType:
    """A plugin module with these hook implementations."""
    module = types.ModuleType(name)
    module.__dict__.update({hook: hookimpl(function) for hook, function in hooks.items()}, MODELRUNNER_API=">=1,<2")
    return module


def offering(name: str, offer: str, fit: Any = "exact", **more: Any) -> types.ModuleType:
    return plugin(name, device=lambda settings: Offer(offer, lambda: None, fit, **more))


def load(*plugins: object, **environ: str) -> PluginManager:
    return PluginManager.load(plugins, environ, discover=False)


def choose(manager: PluginManager, pin: str | None = None) -> str:
    return manager.choose("device", pin=pin, settings=None).offer.name


def refused(manager: PluginManager, pin: str | None = None) -> str:
    with pytest.raises(PluginError) as caught:
        choose(manager, pin)
    return str(caught.value)


def broken(settings: object) -> None:
    raise RuntimeError("no driver")
