"""Settings of devices, free of torch so that listing them stays quick."""

from __future__ import annotations

from pydantic import Field

from modelrunner.settings import Section


class DeferredCpuSettings(Section):
    """The deferred CPU device, which runs work late on purpose."""

    seed: int = 0
    """Seed of the random moments at which work runs."""

    run_probability: float = Field(default=0.4, ge=0.0, lt=1.0)
    """Chance that one more piece of work runs at each look; 0 runs it only when it is waited for."""

    poison: bool = True
    """Overwrite host buffers and ring entries with garbage once they are released."""

    captures: bool = False
    """Play at captured graphs: steps run closures made once for each shape."""
